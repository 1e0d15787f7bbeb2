"""Numbers about attention probabilities: rollout, entropy, mean distance, heads of places, share on special tokens.

Shapes: L layers, A heads, T tokens. The rows of the last two axes are the tokens that attend; each sums to 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class PlaceHead(NamedTuple):
    """The head that attends most to a place: its layer and number, from 1, its mean attention to the place, and the
    mean that equal attention would have in its layer (``equal_attention``)."""

    place: str
    layer: int
    head: int
    mean: float
    equal: float


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


def equal_attention(attentions: np.ndarray) -> np.ndarray:
    """Return equal attention to all tokens that a layer can read, float64[L, 1, T, T], for float[L, A, T, T]. A
    token can read those that have a positive attention in a head of the layer: all tokens, unless the attention is
    causal or has windows."""
    can_read = (attentions > 0).any(axis=1, keepdims=True).astype(np.float64)
    return can_read / can_read.sum(axis=-1, keepdims=True)


def place_heads(attentions: np.ndarray, special: Sequence[bool]) -> list[PlaceHead]:
    """Return the head that attends most to each of these places, the largest mean first: the previous, the next and
    the same token, the first token of the input, and the separators, which are the other special tokens. The mean
    is over the tokens that are not special and have such a place.

    ``attentions``: float[L, A, T, T]; ``special``: bool[T].
    """
    equal = equal_attention(attentions)
    is_special, size = np.array(special, bool), attentions.shape[-1]
    others = np.tile(is_special & (np.arange(size) > 0), (size, 1))
    places: dict[str, np.ndarray] = {
        "previous token": np.eye(size, k=-1),
        "next token": np.eye(size, k=1),
        "the token itself": np.eye(size),
        "first token": np.eye(1, size).repeat(size, axis=0),
        "separators": others,
    }
    found = []
    for name, mask in places.items():
        rows = ~is_special & mask.any(axis=1)
        if rows.any():
            means, equal_means = (
                (values.astype(np.float64) * mask).sum(axis=-1)[..., rows].mean(axis=-1)
                for values in (attentions, equal)
            )
            layer, head = np.unravel_index(means.argmax(), means.shape)
            found.append(
                PlaceHead(name, int(layer) + 1, int(head) + 1, float(means.max()), float(equal_means[layer, 0]))
            )
    return sorted(found, key=lambda one: -one.mean)


def special_share(attentions: np.ndarray, special: Sequence[bool]) -> np.ndarray:
    """Return the share of the attention of every head on the special tokens, the mean over the tokens that are not
    special: float64[L, A] for float[L, A, T, T] and bool[T]; 0 if all tokens are special."""
    is_special = np.array(special, bool)
    rows = attentions[:, :, ~is_special].astype(np.float64)
    return rows[..., is_special].sum(axis=(2, 3)) / max(rows.shape[2], 1)


def mean_distance(attentions: np.ndarray) -> np.ndarray:
    """Return the mean number of tokens between a token and those that it attends to, weighted by attention, for
    every head: float64[L, A] (Vig and Belinkov 2019)."""
    places = np.arange(attentions.shape[-1])
    distances = np.abs(places[:, None] - places)
    return (attentions.astype(np.float64) * distances).sum(axis=-1).mean(axis=-1)
