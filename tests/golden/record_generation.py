"""Records which tokens transformers generates, and which its filters of logits keep.

    python tests/golden/record_generation.py      writes tests/golden/fixtures/generation.{json,npz}

Four prompts of different lengths with padding on the left, 200 new tokens by ``GPT2LMHeadModel.generate`` without
sampling, in float64; the weights are those of ``generation_case.drawn``. The smallest difference of the two highest
logits of a token is stored too: rounding cannot change the tokens while it is far above 1e-5.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from family_cases import values
from generation_case import CONFIG, FILTERS, NEW, drawn, logits, padded
from safetensors.numpy import load_file
from transformers import GPT2Config, GPT2LMHeadModel, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

FIXTURES = Path(__file__).parent / "fixtures"


def main() -> None:
    model = GPT2LMHeadModel(GPT2Config(**CONFIG)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = json.loads((Path(folder) / "config.json").read_text())
        shapes = {key: list(array.shape) for key, array in load_file(Path(folder) / "model.safetensors").items()}
    state = {key: torch.from_numpy(drawn(key, tuple(shape), values)) for key, shape in shapes.items()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    model.to(torch.float64)
    ids, mask = map(torch.from_numpy, padded())
    done = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.stack(done.logits).topk(2).values
    arrays = {"tokens": done.sequences[:, ids.shape[1] :].numpy().astype(np.int32)}
    for i, (temperature, top_k, top_p) in enumerate(FILTERS):
        scores = torch.from_numpy(logits())
        for use, warper in (
            (True, TemperatureLogitsWarper(temperature)),
            (top_k, TopKLogitsWarper(top_k or 1)),
            (top_p < 1, TopPLogitsWarper(top_p)),
        ):
            scores = warper(None, scores) if use else scores
        arrays[f"kept_{i}"] = torch.isfinite(scores).numpy()
    margin = float((best[..., 0] - best[..., 1]).min())
    told = {"config": stored, "tensors": shapes, "margin": margin}
    (FIXTURES / "generation.json").write_text(json.dumps(told, indent=0, sort_keys=True) + "\n")
    np.savez_compressed(FIXTURES / "generation.npz", **arrays)
    print(margin, len(np.unique(arrays["tokens"])))


if __name__ == "__main__":
    main()
