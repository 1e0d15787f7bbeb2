"""Fill masks: the model's best pieces for each [MASK]."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bert_jax.batch import feature_shapes
from bert_jax.model import BertModel
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
            (answer,) = tokenizer.pieces([int(features["mlm_labels"][row, slot])])
            filled.append(FilledMask(_predictions(tokenizer, ids[row, slot], probabilities[row, slot]), answer))
        if filled:
            texts.append(FilledText(text, tuple(filled)))
    return texts


def fill_texts(
    model: BertModel, params: Any, tokenizer: Tokenizer, texts: Sequence[str], count: int = 5
) -> list[FilledText]:
    """Fill every ``[MASK]`` of each text. Raises ``ValueError`` for a text without one or longer than the model."""
    encoded = [encode_masked(tokenizer, text) for text in texts]
    longest = max(len(ids) for ids in encoded)
    limit = model.config.max_position_embeddings
    for text, ids in zip(texts, encoded, strict=True):
        if tokenizer.mask_id not in ids:
            raise ValueError(f"{text!r} holds no [MASK]; write [MASK] where a word is to be filled in")
        if len(ids) > limit and model.config.position_embeddings == "learned":
            raise ValueError(f"a text has {len(ids)} tokens with [CLS] and [SEP]; the model takes at most {limit}")
    masks = max(ids.count(tokenizer.mask_id) for ids in encoded)
    # Lengths are rounded up so that many calls share few compiled programs.
    length = min(-(-longest // 16) * 16, limit) if model.config.position_embeddings == "learned" else longest
    shapes = feature_shapes(len(texts), length, masks)
    features = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
    features["position_ids"][:] = np.arange(length)
    for row, ids in enumerate(encoded):
        features["input_ids"][row, : len(ids)] = ids
        features["sequence_ids"][row, : len(ids)] = 1
        positions = [i for i, token in enumerate(ids) if token == tokenizer.mask_id]
        features["mlm_positions"][row, : len(positions)] = positions
        features["mlm_weights"][row, : len(positions)] = 1
    probabilities, ids = top_pieces(model, params, features, count, tokenizer.vocab_size)
    return [
        FilledText(
            text,
            tuple(
                FilledMask(_predictions(tokenizer, ids[row, slot], probabilities[row, slot]))
                for slot in range(encoded[row].count(tokenizer.mask_id))
            ),
        )
        for row, text in enumerate(texts)
    ]


def encode_masked(tokenizer: Tokenizer, text: str) -> list[int]:
    """``[CLS] text [SEP]`` with each literal ``[MASK]`` as the mask token (plain text to the tokenizer)."""
    ids = [tokenizer.cls_id]
    for number, part in enumerate(re.split(r"\s*\[MASK\]", text)):
        if number:
            ids.append(tokenizer.mask_id)
        ids.extend(int(token) for token in tokenizer.encode(part))
    return [*ids, tokenizer.sep_id]


def _predictions(tokenizer: Tokenizer, ids: np.ndarray, probabilities: np.ndarray) -> tuple[tuple[str, float], ...]:
    pieces = tokenizer.pieces([int(token) for token in ids])
    return tuple((piece, float(p)) for piece, p in zip(pieces, probabilities, strict=True))
