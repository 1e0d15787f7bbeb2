"""Translations of ids, for models without a tokenizer."""

from collections.abc import Sequence

import jax
import numpy as np

from bert_jax.batch import Batch
from bert_jax.contrib.translation.config import EncoderDecoderConfig
from bert_jax.contrib.translation.network import (
    END_ID,
    LENGTH_PENALTY,
    MOST_TOKENS,
    OUTPUT_IDS,
    SOURCE_MASK,
    TARGET_IDS,
)
from bert_jax.inference.engine import Engine
from bert_jax.model.bert import bert_output, present
from bert_jax.model.canonical import Params


def ids_features(sources: np.ndarray, mask: np.ndarray, targets: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return the features of a batch with a pair in each row: ``sources``, ids int[B, S], where ``mask`` is 1, and
    ``targets``, inputs of the decoder of the same shape (None: none). Positions are the columns."""
    columns = np.broadcast_to(np.arange(sources.shape[1], dtype=np.int32), sources.shape)
    return {
        "input_ids": sources.astype(np.int32), SOURCE_MASK: mask.astype(np.int32),
        "token_type_ids": np.zeros_like(columns), "sequence_ids": np.ones_like(columns),
        "position_ids": columns,
        TARGET_IDS: np.zeros_like(columns) if targets is None else targets.astype(np.int32),
    }  # fmt: skip


def translate_ids(
    loaded: Engine,
    sources: Sequence[Sequence[int]],
    *,
    start_id: int,
    end_id: int,
    most_tokens: int,
    beams: int = 1,
    length_penalty: float = 1.0,
) -> list[list[int]]:
    """Return the ids of the translation of each of ``sources``, ids with their special tokens, by beam search
    (``search.search``). ``most_tokens`` counts the end token, which the result excludes. Raises ``ValueError`` for
    another model and for more tokens than its positions."""
    model = loaded.spec.model
    if not isinstance(model, EncoderDecoderConfig):
        raise ValueError(f"{loaded.name}: no translation model (model.encoder {model.encoder})")
    longest = max([most_tokens, *map(len, sources)])
    if longest > model.max_length:
        raise ValueError(f"{loaded.name}: {longest} tokens, but the model has {model.max_length} positions")
    ids, mask = np.zeros((2, len(sources), max(map(len, sources))), np.int32)
    for row, source in enumerate(sources):
        ids[row, : len(source)], mask[row, : len(source)] = source, 1
    each = np.ones((len(sources), 1), np.int32)
    features = ids_features(ids, mask) | {
        OUTPUT_IDS: np.full((len(sources), 1, beams, most_tokens), start_id, np.int32), END_ID: end_id * each,
        MOST_TOKENS: most_tokens * each, LENGTH_PENALTY: (length_penalty * each).astype(np.float32),
    }  # fmt: skip
    network = loaded.model

    def run(params: Params, batch: Batch) -> jax.Array:
        return present(bert_output(network.apply({"params": params}, batch)).translations)

    found = np.asarray(loaded.program(("translate ids",), run)(loaded.params, features))[:, 0]
    return [[int(i) for i in row if i >= 0] for row in found]
