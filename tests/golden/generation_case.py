"""The model, prompts and filters of ``record_generation.py``. numpy only: the tests import it."""

from collections.abc import Callable

import numpy as np

CONFIG = {
    "vocab_size": 61, "n_embd": 20, "n_layer": 3, "n_head": 2, "n_inner": 14, "n_positions": 224, "pad_token_id": 0,
    "bos_token_id": 60, "eos_token_id": 60, "tie_word_embeddings": False,
}  # fmt: skip
NEW = 200
# Temperature, top_k (0: all), top_p (1: all).
FILTERS = ((1.0, 5, 1.0), (0.7, 0, 0.9), (1.5, 12, 0.6), (1.0, 0, 0.01), (2.0, 200, 1.0))


def drawn(name: str, shape: tuple[int, ...], values: Callable[[str, tuple[int, ...]], np.ndarray]) -> np.ndarray:
    """``family_cases.values``, without the last bias, which would make a few tokens the most probable ones always,
    and with larger kernels, so that a token depends on the earlier ones."""
    if name.endswith("ln_f.bias"):
        return np.zeros(shape, np.float32)
    return values(name, shape) * np.float32(3 if ".h." in name and len(shape) == 2 else 1)


def prompts() -> list[list[int]]:
    """Four prompts of 19, 7, 1 and 12 tokens."""
    rng = np.random.default_rng(3)
    return [rng.integers(1, 60, length).tolist() for length in (19, 7, 1, 12)]


def padded() -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of the prompts, int64[4, 19], with padding on the left."""
    length = max(map(len, prompts()))
    ids, mask = np.zeros((2, 4, length), np.int64)
    for row, prompt in enumerate(prompts()):
        ids[row, length - len(prompt) :], mask[row, length - len(prompt) :] = prompt, 1
    return ids, mask


def logits() -> np.ndarray:
    """float32[5, 61], normal values."""
    return 3 * np.random.default_rng(4).standard_normal((5, 61)).astype(np.float32)
