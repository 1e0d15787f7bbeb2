"""Numbers about attention probabilities: rollout, and entropy and mean distance of every head.

Shapes: L layers, A heads, T tokens. The rows of the last two axes are the tokens that attend; each sums to 1.
"""

import numpy as np


def rollout(attentions: np.ndarray) -> np.ndarray:
    """Return the attention rollout of Abnar and Zuidema (2020), float64[L, T, T], for float[L, A, T, T].

    The attention of a layer is the mean of its heads, and half of each token stays with the token because of the
    residual connection: (mean + I) / 2. Row i of entry l is the share of each input token in token i after the
    first l + 1 layers, the product of their matrices.
    """
    means = attentions.mean(axis=1, dtype=np.float64)
    steps = (means + np.eye(means.shape[-1])) / 2
    steps /= steps.sum(axis=-1, keepdims=True)
    found = [steps[0]]
    for step in steps[1:]:
        found.append(step @ found[-1])
    return np.stack(found)


def entropy(attentions: np.ndarray) -> np.ndarray:
    """Return the entropy of every head in nats, the mean over the tokens that attend: float64[L, A]."""
    values = attentions.astype(np.float64)
    logs = np.log(values, out=np.zeros_like(values), where=values > 0)
    return -(values * logs).sum(axis=-1).mean(axis=-1)


def mean_distance(attentions: np.ndarray) -> np.ndarray:
    """Return the mean number of tokens between a token and those that it attends to, weighted by attention, for
    every head: float64[L, A] (Vig and Belinkov 2019)."""
    places = np.arange(attentions.shape[-1])
    distances = np.abs(places[:, None] - places)
    return (attentions.astype(np.float64) * distances).sum(axis=-1).mean(axis=-1)
