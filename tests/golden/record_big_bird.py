"""Records what only BigBird of transformers has: its random blocks, the outputs in training, and the scores of a
question.

    pip install -r tests/golden/requirements.lock  (an environment of its own)
    python tests/golden/record_big_bird.py         writes tests/golden/fixtures/families/big_bird_blocks.{json,npz}

Dropout is off. The outputs are float64 arithmetic, stored as float32, with weights as in ``record_families``; of
the scores of a question, the 1e6 that is subtracted from tokens of the question is added again.
"""

import json
import zlib

import numpy as np
import torch
import transformers
from family_cases import CASES, inputs, values
from record_families import FIXTURES
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

# (layer, heads, length, block, random blocks, positions)
PLANS = (
    (0, 2, 48, 4, 2, 64), (7, 4, 52, 4, 3, 52), (1, 2, 2048, 64, 3, 4096), (3, 3, 1024, 64, 3, 4096),
    (1, 2, 1024, 16, 3, 1024), (5, 2, 3072, 64, 3, 4096), (2, 2, 4096, 64, 3, 4096), (0, 2, 4096, 512, 1, 4096),
)  # fmt: skip


def plan(layer: int, heads: int, length: int, block: int, number: int, longest: int) -> np.ndarray:
    """The random blocks of a layer in training, int[heads, blocks - 2, number], as its forward pass draws them."""
    config = transformers.BigBirdConfig(
        hidden_size=2 * heads, num_attention_heads=heads, block_size=block, num_random_blocks=number,
        max_position_embeddings=longest,
    )  # fmt: skip
    module, drawn = BigBirdBlockSparseAttention(config, seed=layer).train(), []
    gather = module.torch_gather_b2
    module.torch_gather_b2 = lambda params, indices: drawn.append(indices[0].numpy()) or gather(params, indices)
    mask = torch.ones(1, length)
    masks = transformers.BigBirdModel.create_masks_for_block_sparse_attn(mask, block)
    blocked, band, from_mask, to_mask = masks
    with torch.no_grad():
        module(torch.zeros(1, length, 2 * heads), band, from_mask, to_mask, blocked, blocked)
    return drawn[0]


def model_of(kind: type, **more: object) -> torch.nn.Module:
    """The model of the case ``big_bird`` without dropout."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    model = kind(transformers.BigBirdConfig(**CASES["big_bird"]["config"] | none | more))
    state = {key: torch.from_numpy(values(key, tuple(array.shape))) for key, array in model.state_dict().items()}
    model.load_state_dict(state)
    return model.to(torch.float64)


def main() -> None:
    arrays = {}
    batch = {key: torch.from_numpy(array) for key, array in inputs("big_bird", False).items()}
    model = model_of(transformers.BigBirdModel).train()
    arrays["training"] = model(**batch).last_hidden_state.detach().numpy()
    ids = batch["input_ids"].clone()
    ids[ids == 7] = 8
    ids[0, [6, 20]] = ids[1, 4] = 7
    model = model_of(transformers.BigBirdForQuestionAnswering, sep_token_id=7).eval()
    output = model(**batch | {"input_ids": ids})
    scores = torch.stack([output.start_logits, output.end_logits], -1).detach().numpy()
    arrays |= {"question/ids": ids.numpy(), "question/scores": scores + 1e6 * (scores < -5e5)}
    arrays["question/asked"] = scores[..., 0] < -5e5
    plans = {json.dumps(sizes): zlib.crc32(np.int32(plan(*sizes)).tobytes()) for sizes in PLANS}
    (FIXTURES / "big_bird_blocks.json").write_text(json.dumps(plans, indent=0) + "\n")
    stored = {key: np.float32(array) if array.dtype == np.float64 else array for key, array in arrays.items()}
    np.savez_compressed(FIXTURES / "big_bird_blocks.npz", **stored)


if __name__ == "__main__":
    main()
