"""Measure the anisotropy of text vectors and, per frequency band, of piece embeddings, and remove it by whitening.

Anisotropic vectors tend to share a direction. Whitening follows Su et al. (2021, "Whitening Sentence
Representations for Better Semantics and Faster Retrieval").

Shapes: N vectors, V pieces, E width of a vector, D dimensions kept.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.contrib.analysis.texts_or_vectors import blocks, lengths_of
from bert_jax.inference.engine import Engine
from bert_jax.model.embeddings import word_table

# Last frequency rank of every band of pieces except the last band.
_BAND_ENDS = (100, 500, 5000)
# Directions whose variance is below this fraction of the greatest variance are rounding noise of float32.
_NOISE = 1e-10


def anisotropy(vectors: np.ndarray) -> float:
    """Return the mean cosine similarity over all pairs of rows of ``vectors`` [N, E] (Ethayarajh 2019).

    It is 0 for isotropic vectors. Rows of zeros have no cosine and are skipped. Raises ``ValueError`` if fewer than
    two rows remain.
    """
    total, count = np.zeros(vectors.shape[1]), 0
    for part in blocks(len(vectors)):
        block = np.asarray(vectors[part], np.float64)
        block = block[block.any(axis=1)]
        total += (block / lengths_of(block)[:, None]).sum(axis=0)
        count += len(block)
    if count < 2:
        raise ValueError(f"anisotropy: the collection has {count} vectors; at least 2 are needed")
    # The square of the sum is the sum of all products; the product of a vector with itself is 1.
    return float((total @ total - count) / (count * (count - 1)))


@dataclass(frozen=True)
class Band:
    """A band of pieces with similar frequencies.

    The fields are the first and the last rank (from 1, inclusive), the mean Euclidean norm of the embeddings, and
    the mean cosine similarity over all pairs.
    """

    first: int
    last: int
    mean_length: float
    anisotropy: float


def frequency_bands(table: np.ndarray, counts: np.ndarray) -> list[Band]:
    """Return the mean norm and the anisotropy of the rows of an embedding table [V, E], for each frequency band.

    ``counts`` (int[V]) contains the frequencies of the pieces.

    The bands follow Li et al. 2020 ("On the Sentence Embeddings from Pre-trained Language Models", table 1):
    the 100 most frequent pieces, ranks up to 500, ranks up to 5,000, and all others. Pieces that do not occur and
    bands of one piece are skipped.
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
    """Return the piece embeddings of the model, float32[V, E], and the count of each piece in ``texts``, int64[V].

    The special tokens of model inputs are not counted. Raises ``ValueError`` for a network without such a table.
    """
    tokenizer, size = model.need_tokenizer(), model.spec.model.vocab_size
    counts = np.zeros(size, np.int64)
    for part in blocks(len(texts)):
        counts += np.bincount(tokenizer.encode_flat(texts[part])[0], minlength=size)
    table = word_table(model.params)
    if table is None:
        raise ValueError(f"{model.name}: the network has no table of piece embeddings")
    return table[:size], counts


# ------------------------------------------------------------------ whitening


@dataclass(frozen=True)
class Whitening:
    """The map ``(x - mean) @ matrix``, with mean float64[E] and matrix float64[E, D].

    The columns of the matrix are sorted by decreasing variance.
    """

    mean: np.ndarray
    matrix: np.ndarray

    def apply(self, vectors: np.ndarray) -> np.ndarray:
        """Return whitened vectors, float32[N, D]. Raises ``ValueError`` if the width of ``vectors`` is not E."""
        if vectors.shape[1] != len(self.mean):
            needed = f"the whitening needs width {len(self.mean)}; use vectors of the same model"
            raise ValueError(f"vectors of width {vectors.shape[1]} cannot be whitened; {needed}")
        found = np.empty((len(vectors), self.matrix.shape[1]), np.float32)
        for part in blocks(len(vectors)):
            found[part] = (vectors[part] - self.mean) @ self.matrix
        return found


def fit_whitening(vectors: np.ndarray, dimensions: int | None = None) -> Whitening:
    """Return the map that transforms ``vectors`` [N, E] to mean 0 and identity covariance (divided by N).

    ``dimensions`` is the number of directions to keep, in order of decreasing variance; None: all directions in
    which the vectors vary, at most N - 1. Raises ``ValueError`` if ``dimensions`` exceeds the number of these
    directions.
    """
    mean = vectors.mean(axis=0, dtype=np.float64)
    covariance = np.zeros((len(mean), len(mean)))
    for part in blocks(len(vectors)):
        centered = vectors[part] - mean
        covariance += centered.T @ centered / len(vectors)
    variances, directions = np.linalg.eigh(covariance)
    variances, directions = variances[::-1], directions[:, ::-1]
    varying = int((variances > max(_NOISE * variances[0], 0)).sum())
    if not varying:
        raise ValueError(f"whitening: the {len(vectors)} vectors are all the same; give texts that differ")
    if dimensions is not None and not 1 <= dimensions <= varying:
        allowed = f"1 to {varying}, the number of directions in which the {len(vectors)} vectors vary"
        raise ValueError(f"dimensions: {dimensions} is not allowed; use {allowed}")
    kept = varying if dimensions is None else dimensions
    return Whitening(mean, directions[:, :kept] / np.sqrt(variances[:kept]))
