"""Anisotropy: the common direction of vectors of texts, and of pieces by their frequency.

Shapes: N vectors, V pieces, E width of a vector.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.analysis.collection import BLOCK, lengths_of
from bert_jax.inference.engine import Engine

# Ranks of frequency at which a band of pieces ends, but for the last one.
_BAND_ENDS = (100, 500, 5000)


def anisotropy(vectors: np.ndarray) -> float:
    """Mean cosine of all pairs of different rows of ``vectors`` [N, E] (Ethayarajh 2019): 0 where they point every
    way. Rows of zeros, which have no cosine, are skipped; ``ValueError`` for fewer than two others."""
    total, count = np.zeros(vectors.shape[1]), 0
    for start in range(0, len(vectors), BLOCK):
        block = np.asarray(vectors[start : start + BLOCK], np.float64)
        block = block[block.any(axis=1)]
        total += (block / lengths_of(block)[:, None]).sum(axis=0)
        count += len(block)
    if count < 2:
        raise ValueError(f"anisotropy: the collection has {count} vectors; at least 2 are needed")
    # The square of a sum is the sum of all products, those of each vector with itself (1) among them.
    return float((total @ total - count) / (count * (count - 1)))


@dataclass(frozen=True)
class Band:
    """Pieces of like frequency: their ranks, from 1, both ends included, the mean Euclidean length of their vectors
    and the mean cosine of all pairs of them."""

    first: int
    last: int
    mean_length: float
    anisotropy: float


def frequency_bands(table: np.ndarray, counts: np.ndarray) -> list[Band]:
    """Length and anisotropy of rows of an embedding table [V, E] by ``counts`` (int[V]) of pieces.

    The bands of Li et al. 2020 ("On the Sentence Embeddings from Pre-trained Language Models", table 1): the 100
    most frequent pieces, those up to 500, up to 5,000, and the rest. Pieces that do not occur are skipped, as is
    a band of one piece.
    """
    ranked = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    ends = (*(end for end in _BAND_ENDS if end < len(ranked)), len(ranked))
    bands = []
    for start, end in itertools.pairwise((0, *ends)):
        vectors = np.asarray(table[ranked[start:end]], np.float64)
        if len(vectors) > 1:
            bands.append(Band(start + 1, end, float(lengths_of(vectors).mean()), anisotropy(vectors)))
    return bands


def counted_embeddings(model: Engine, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The model's table of piece embeddings, float32[V, E], and how often each piece occurs in ``texts``, int64[V],
    special tokens not counted."""
    tokenizer, size = model.need_tokenizer(), model.spec.model.vocab_size
    counts = np.zeros(size, np.int64)
    for start in range(0, len(texts), BLOCK):
        counts += np.bincount(tokenizer.encode_flat(texts[start : start + BLOCK])[0], minlength=size)
    return np.asarray(model.params["embeddings"]["word_embeddings"]["embedding"])[:size], counts
