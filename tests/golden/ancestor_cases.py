"""Models, weights and batches of the systems before BERT, for ``record_ancestors.py`` and the tests that compare.

Weights depend on their names only, so that torch and the library draw the same ones.
"""

import zlib

import numpy as np

COMMON = {
    "vocab_size": 23, "position_embeddings": "none", "type_vocab_size": 0, "embedding_norm": "no",
    "final_norm": "no", "mlm_layer": "none", "max_position_embeddings": 16, "hidden_dropout": 0.0,
}  # fmt: skip
# Small clips and large weights, so that cells and projections reach their limits.
MODELS = {
    "nnlm": {
        **COMMON, "encoder": "nnlm", "num_layers": 1, "context_size": 3, "embedding_size": 5, "hidden_size": 7,
        "tied_output": False,
    },
    "lstm": {**COMMON, "encoder": "lstm", "num_layers": 3, "hidden_size": 6, "lstm_cells": 9},
    "elmo": {
        **COMMON, "encoder": "bidirectional_lstm", "num_layers": 2, "hidden_size": 12, "embedding_size": 6,
        "lstm_cells": 10, "lstm_cell_clip": 0.6, "lstm_projection_clip": 0.5, "lstm_skip": True,
        "tied_output": False, "character_filters": (1, 4, 3, 8), "character_size": 4, "max_characters": 9,
        "highway_layers": 2,
    },
}  # fmt: skip
SEQUENCE_IDS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 0, 0]], np.int32)
# Entries of a matrix of counts: words, contexts, counts (above and below the largest that counts fully).
ENTRIES = np.array([3, 5, 3, 20]), np.array([5, 3, 7, 1]), np.array([2.5, 0.5, 140.0, 30.0])
VECTORS = {"words": (23, 6), "contexts": (23, 6), "word_bias": (23,), "context_bias": (23,)}
LARGEST_COUNT, COUNT_POWER = 100.0, 0.75


def token_ids() -> np.ndarray:
    """int32[2, 9]: tokens, 0 at padding."""
    drawn = np.random.default_rng(5).integers(5, 23, SEQUENCE_IDS.shape)
    return np.where(SEQUENCE_IDS > 0, drawn, 0).astype(np.int32)


def characters() -> np.ndarray:
    """int32[23, 9]: ids of the characters of every token, from 0 to 260."""
    return np.random.default_rng(6).integers(0, 261, (23, 9)).astype(np.int32)


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values of the parameter ``name``."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    return (0.8 * drawn).astype(np.float32)


def next_weights() -> np.ndarray:
    """float64[2, 8]: 1 where a token and the next one are of the same sequence."""
    first, second = SEQUENCE_IDS[:, :-1], SEQUENCE_IDS[:, 1:]
    return ((first == second) & (first > 0)).astype(np.float64)


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a model, by canonical name."""
    model = MODELS[name]
    vocabulary, width = model["vocab_size"], model["hidden_size"]
    found: dict[str, tuple[int, ...]] = {"mlm_head/output_bias": (vocabulary,)}
    if name == "nnlm":
        embedding = model["embedding_size"]
        found |= {
            "embeddings/word_embeddings/embedding": (vocabulary, embedding),
            "encoder/layer_0/hidden/kernel": (3 * embedding, width), "encoder/layer_0/hidden/bias": (width,),
            "mlm_head/output_embeddings/embedding": (vocabulary, width),
        }  # fmt: skip
    if name == "lstm":
        found["embeddings/word_embeddings/embedding"] = (vocabulary, width)
        inputs = width
        for i, cells in enumerate((model["lstm_cells"], model["lstm_cells"], width)):
            layer = f"encoder/layer_{i}/forward"
            found |= {
                f"{layer}/input_kernel": (inputs, 4 * cells), f"{layer}/recurrent_kernel": (cells, 4 * cells),
                f"{layer}/bias": (4 * cells,),
            }  # fmt: skip
            inputs = cells
    if name == "elmo":
        half, cells = width // 2, model["lstm_cells"]
        found["mlm_head/output_embeddings/embedding"] = (vocabulary, half)
        for i in range(2):
            for direction in ("forward", "backward"):
                layer = f"encoder/layer_{i}/{direction}"
                found |= {
                    f"{layer}/input_kernel": (half, 4 * cells), f"{layer}/recurrent_kernel": (half, 4 * cells),
                    f"{layer}/bias": (4 * cells,), f"{layer}/projection_kernel": (cells, half),
                }  # fmt: skip
        found |= {f"embeddings/characters/{part}": shape for part, shape in _character_shapes(model).items()}
    return found


def _character_shapes(model: dict) -> dict[str, tuple[int, ...]]:
    size, filters = model["character_size"], model["character_filters"]
    total = sum(filters[1::2])
    found: dict[str, tuple[int, ...]] = {"character_embeddings": (261, size)}
    for i, (width, count) in enumerate(zip(filters[::2], filters[1::2], strict=True)):
        found |= {f"filter_{i}_kernel": (width, size, count), f"filter_{i}_bias": (count,)}
    for i in range(model["highway_layers"]):
        for part in ("transform", "carry"):
            found |= {f"highway_{i}_{part}_kernel": (total, total), f"highway_{i}_{part}_bias": (total,)}
    return found | {
        "projection_kernel": (total, model["embedding_size"]), "projection_bias": (model["embedding_size"],)
    }  # fmt: skip


def weights(name: str) -> dict[str, np.ndarray]:
    """The parameters of a model, by canonical name; without the ids of the characters."""
    return {key: values(key, shape) for key, shape in shapes(name).items()}
