"""Counts of tokens, and random draws from distributions over the vocabulary.

Shapes: V vocabulary size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import PretrainSource
from bert_jax.tokenization import Tokenizer


def special_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that are not words of a text: padding, unknown words, marks and masks."""
    found = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    return sorted({token for token in found if token is not None and token >= 0})


def training_ids(source: PretrainSource) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the token ids before masking and the sequence ids, each int32[B, S], of every training record once."""
    for batch in source.training_pass():
        ids_BxS = batch["input_ids"].copy()
        rows, slots = np.nonzero(batch["mlm_weights"] > 0)
        ids_BxS[rows, batch["mlm_positions"][rows, slots]] = batch["mlm_labels"][rows, slots]
        yield ids_BxS, batch["sequence_ids"]


def token_counts(source: PretrainSource, tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Return the number of occurrences of each token in the training records, int64[V]; 0 for special tokens.
    Raises ``ValueError`` if there are only special tokens."""
    counts_V = np.zeros(vocab_size, np.int64)
    for ids_BxS, sequence_ids_BxS in training_ids(source):
        counts_V += np.bincount(ids_BxS[sequence_ids_BxS > 0], minlength=vocab_size)
    counts_V[special_ids(tokenizer)] = 0
    if not counts_V.any():
        raise ValueError("data.shards: the training records contain no word of the vocabulary; build them again")
    return counts_V


@dataclass(frozen=True)
class AliasTable:
    """A distribution over V items from which a draw costs two lookups (Walker 1977; Vose 1991)."""

    kept_V: np.ndarray  # float32: probability of the item itself, given its column
    other_V: np.ndarray  # int32: the item that is drawn otherwise

    @classmethod
    def of(cls, weights_V: np.ndarray) -> "AliasTable":
        """Return the alias table of the distribution proportional to ``weights`` (0 or more, not all 0)."""
        size = len(weights_V)
        scaled = np.asarray(weights_V, np.float64) * (size / np.sum(weights_V, dtype=np.float64))
        kept, other = np.ones(size), np.arange(size, dtype=np.int32)
        small, large = (list(np.flatnonzero(part)) for part in (scaled < 1, scaled >= 1))
        while small and large:
            low, high = small.pop(), large[-1]
            kept[low], other[low] = scaled[low], high
            scaled[high] -= 1 - scaled[low]
            if scaled[high] < 1:
                small.append(large.pop())
        return cls(kept.astype(np.float32), other)

    def draw(self, words: jax.Array, more_words: jax.Array) -> jax.Array:
        """Return one item per pair of random 32-bit words (int32 arrays of one shape), as int32."""
        columns = one_of(len(self.kept_V), words)
        is_own = uniform(more_words) < jnp.asarray(self.kept_V)[columns]
        return jnp.where(is_own, columns, jnp.asarray(self.other_V)[columns])


def one_of(size: int, words: jax.Array) -> jax.Array:
    """Return int32 values from 0 to below ``size`` with equal probabilities (to size / 2**32), from random 32-bit
    words (int32). A high product would be exact, but XLA cannot partition it over a mesh."""
    return (words.astype(jnp.uint32) % jnp.uint32(size)).astype(jnp.int32)


def uniform(words: jax.Array) -> jax.Array:
    """Return float32 values from 0 to below 1, multiples of 2**-24, from random 32-bit words (int32)."""
    return jax.lax.shift_right_logical(words, 8).astype(jnp.float32) * jnp.float32(2**-24)
