"""Records what ``EncoderDecoderModel`` of transformers computes: logits, loss, tokens of greedy and beam search.

    python tests/golden/record_translation.py      writes tests/golden/fixtures/translation.{json,npz}

The models of ``translation_cases.py``, in float64; the sources are padded on both sides. The smallest difference of
the two highest logits of the greedy tokens, and of the scores of the two best hypotheses, are stored too: rounding
cannot change the tokens while they are far above 1e-5.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from family_cases import values
from safetensors.numpy import load_file
from transformers import AutoConfig, EncoderDecoderConfig, EncoderDecoderModel
from translation_cases import BEAMS, CASES, END, NEW, PENALTY, START, drawn, inputs

FIXTURES = Path(__file__).parent / "fixtures"


def load(model: EncoderDecoderModel, shapes: dict[str, list[int]], scale: int) -> None:
    """Give ``model`` the weights of ``drawn``."""
    state = {name: torch.from_numpy(drawn(name, tuple(shape), values, scale)) for name, shape in shapes.items()}
    _, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    model.decoder.tie_weights()
    model.to(torch.float64)


def main() -> None:
    told, arrays = {}, {}
    for case, described in CASES.items():
        parts = [AutoConfig.for_model(**one) for one in described]
        config = EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
        config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = START, 0, END
        model = EncoderDecoderModel(config).eval()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            stored = json.loads((Path(folder) / "config.json").read_text())
            shapes = {name: list(x.shape) for name, x in load_file(Path(folder) / "model.safetensors").items()}
        given = {
            left: inputs(*(one.vocab_size for one in parts), parts[0].pad_token_id, left) for left in (False, True)
        }
        load(model, shapes, 3)
        for left, side in ((False, "right"), (True, "left")):
            ids, mask, labels = (torch.from_numpy(given[left][name]) for name in ("ids", "mask", "labels"))
            with torch.no_grad():
                output = model(input_ids=ids, attention_mask=mask, labels=labels)
            arrays[f"{case}/{side}/logits"] = output.logits.numpy().astype(np.float32)
            arrays[f"{case}/{side}/loss"] = output.loss.numpy().astype(np.float32)
        load(model, shapes, 5)
        ids, mask = (torch.from_numpy(given[False][name]) for name in ("ids", "mask"))
        options = {
            "max_new_tokens": NEW,
            "output_scores": True,
            "return_dict_in_generate": True,
            "do_sample": False,
        }
        done = model.generate(input_ids=ids, attention_mask=mask, **options)
        best = torch.stack(done.scores).topk(2).values
        margins = [float((best[..., 0] - best[..., 1]).min())]
        arrays[f"{case}/tokens_1"] = done.sequences[:, 1:].numpy().astype(np.int32)
        options |= {"num_beams": BEAMS, "length_penalty": PENALTY, "num_return_sequences": 2}
        done = model.generate(input_ids=ids, attention_mask=mask, **options)
        scores = done.sequences_scores.reshape(-1, 2)
        margins.append(float((scores[:, 0] - scores[:, 1]).min()))
        arrays[f"{case}/tokens_{BEAMS}"] = done.sequences[::2, 1:].numpy().astype(np.int32)
        told[case] = {"config": stored, "tensors": shapes, "margin": min(margins)}
        print(case, margins, *(arrays[f"{case}/tokens_{n}"].tolist() for n in (1, BEAMS)))
    (FIXTURES / "translation.json").write_text(json.dumps(told, indent=0, sort_keys=True) + "\n")
    np.savez_compressed(FIXTURES / "translation.npz", **arrays)


if __name__ == "__main__":
    main()
