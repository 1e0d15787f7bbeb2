"""Whitening of sentence vectors (Su et al. 2021, "Whitening Sentence Representations for Better Semantics and
Faster Retrieval").

Shapes: N vectors, E width of a vector, D dimensions kept.
"""

from dataclasses import dataclass

import numpy as np

from bert_jax.analysis.collection import blocks

# Directions whose variance is below this fraction of the greatest variance are rounding noise of float32.
_NOISE = 1e-10


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
    mean = np.mean(vectors, axis=0, dtype=np.float64)
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
        raise ValueError(f"dimensions: {dimensions} is not allowed; allowed: {allowed}")
    kept = varying if dimensions is None else dimensions
    return Whitening(mean, directions[:, :kept] / np.sqrt(variances[:kept]))
