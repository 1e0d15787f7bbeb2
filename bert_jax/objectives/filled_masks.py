"""Fill masks: the model's best pieces for each [MASK]."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import PretrainConfig
from bert_jax.model import BertForPretraining, BertModel
from bert_jax.tokenization import Tokenizer


@dataclasses.dataclass(frozen=True)
class FilledMask:
    """One masked position: the best pieces with their probabilities, and the right one where known."""

    predictions: tuple[tuple[str, float], ...]
    answer: str | None = None


@dataclasses.dataclass(frozen=True)
class FilledText:
    """A text with ``[MASK]``s and what the model says of each, in order."""

    text: str
    masks: tuple[FilledMask, ...]


def top_pieces(
    model: BertModel, params: Any, features: Mapping[str, Any], count: int, pieces: int
) -> tuple[np.ndarray, np.ndarray]:
    """(probabilities float32[B, M, count], ids int32[B, M, count]) of the masked positions, best first; among
    the first ``pieces`` ids, because a model may have more rows than its vocabulary has pieces."""
    count = min(count, pieces)

    @jax.jit
    def run(params: Any, features: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        logits = model.apply({"params": params}, features, None).mlm_logits[..., :pieces]
        return jax.lax.top_k(jax.nn.softmax(logits, axis=-1), count)

    probabilities, ids = run(params, dict(features))
    return np.asarray(probabilities), np.asarray(ids)


def fill_batch(
    model: BertModel, params: Any, tokenizer: Tokenizer, features: Mapping[str, np.ndarray], count: int = 5
) -> list[FilledText]:
    """Each row of a masked batch that holds a [MASK], filled, with the answers from the labels."""
    probabilities, ids = top_pieces(model, params, features, count, tokenizer.vocab_size)
    texts = []
    for row in range(len(ids)):
        tokens = features["input_ids"][row]
        length = int((features["sequence_ids"][row] > 0).sum())
        text = tokenizer.decode([int(t) for t in tokens[:length] if t not in (tokenizer.cls_id, tokenizer.sep_id)])
        filled = []
        for slot, position in enumerate(features["mlm_positions"][row]):
            if not features["mlm_weights"][row, slot] or tokens[position] != tokenizer.mask_id:
                continue
            answer = tokenizer.decode([int(features["mlm_labels"][row, slot])])
            filled.append(FilledMask(_predictions(tokenizer, ids[row, slot], probabilities[row, slot]), answer))
        if filled:
            texts.append(FilledText(text, tuple(filled)))
    return texts


def fill_some(
    config: PretrainConfig, params: Any, tokenizer: Tokenizer, batch: Mapping[str, np.ndarray], rows: int = 8
) -> list[FilledText]:
    """Masks of the first ``rows`` of a held-out batch, filled on one device by ``params`` (host arrays)."""
    model = BertForPretraining(config.model, config.execution, config.has_nsp)
    features = {name: values[:rows] for name, values in batch.items()}
    return fill_batch(model, jax.tree.map(jnp.asarray, params), tokenizer, features)


def _predictions(tokenizer: Tokenizer, ids: np.ndarray, probabilities: np.ndarray) -> tuple[tuple[str, float], ...]:
    return tuple((tokenizer.decode([int(i)]), float(p)) for i, p in zip(ids, probabilities, strict=True))
