"""Mask attention heads and feed-forward units of a network, choose the most important ones, and remove the others.

Shapes: L layers; of each layer A heads of size D, N = A * D, and F units.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.interop.model_bundle import ModelBundle

_HEADS, _UNITS = "encoder/layer_{i}/attention/", "encoder/layer_{i}/feed_forward/"
_OUTPUT = "output/kernel"


class Parts(NamedTuple):
    """One array [A] for the attention heads, and one array [F] for the feed-forward units, of each layer."""

    heads: tuple[Any, ...]
    units: tuple[Any, ...]


def whole_masks(model: ModelConfig) -> Parts:
    """Return masks, float32, that keep all heads and units of ``model``."""
    counts = model.heads_by_layer, model.units_by_layer
    return Parts(*(tuple(np.ones(count, np.float32) for count in sizes) for sizes in counts))


def masked(params: Mapping[str, Any], masks: Parts, head_size: int) -> dict[str, Any]:
    """Return the canonical ``params`` (numpy or jax) of a network in which the output of each head and unit is
    multiplied by its mask.

    The rows of the output projections are multiplied, which gives the same sums.
    """
    found = dict(params)
    for i, (heads, units) in enumerate(zip(*masks, strict=True)):
        xp = np if isinstance(heads, np.ndarray) else jnp
        for place, rows in ((_HEADS, xp.repeat(heads, head_size)), (_UNITS, units)):
            name = place.format(i=i) + _OUTPUT
            found[name] = params[name] * rows[:, None]
    return found


def kept(scores: Sequence[np.ndarray], share: float, *, even: bool, option: str) -> tuple[np.ndarray, ...]:
    """Return masks, bool, of the parts with the highest ``scores``, one array for each layer.

    Of all parts of all layers together, ``share`` (above 0, up to 1) are kept, the best of each layer among them;
    with ``even``, ``share`` of the parts of each layer. ``option`` names the share in messages. Raises
    ``ValueError`` if a layer is left with none.
    """
    if not 0 < share <= 1:
        raise ValueError(f"{option}: {share:g} is not allowed; allowed: a share to keep, above 0 and up to 1")
    sizes = [len(each) for each in scores]
    groups = scores if even else [np.concatenate(scores)]
    counts = [round(share * len(group)) for group in groups]
    if min(counts) < (1 if even else len(sizes)):
        least = max(1 / size for size in sizes) if even else len(sizes) / sum(sizes)
        few = f"{share:g} of {sum(sizes)} leaves a layer with none"
        raise ValueError(f"{option}: {few}; allowed: {least:.3g} or more, so that each layer keeps one")
    if not even:  # the best of each layer comes before all others
        firsts = [np.arange(len(each)) == np.argmax(each) for each in scores]
        groups = [np.where(np.concatenate(firsts), np.inf, groups[0])]
    flat = np.concatenate([_best(group, count) for group, count in zip(groups, counts, strict=True)])
    return tuple(np.split(flat, np.cumsum(sizes)[:-1]))


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    mask = np.zeros(len(scores), bool)
    mask[np.argsort(-scores, kind="stable")[:count]] = True
    return mask


def cut(weights: ModelBundle, masks: Parts) -> ModelBundle:
    """Return ``weights`` without the heads and units whose masks are 0. The outputs are those of the network with
    :func:`masked` parameters, up to rounding."""
    model, params = weights.spec.model, dict(weights.params)
    for i, (heads, units) in enumerate(zip(*masks, strict=True)):
        lanes = np.flatnonzero(np.repeat(heads, model.head_size))
        for place, rows in ((_HEADS.format(i=i), lanes), (_UNITS.format(i=i), np.flatnonzero(units))):
            for name in [name for name in params if name.startswith(place) and "/layer_norm/" not in name]:
                if name == place + _OUTPUT:
                    params[name] = params[name][rows]
                elif not name.startswith(f"{place}output/"):
                    params[name] = np.ascontiguousarray(params[name][..., rows])
    counts = [tuple(int(np.count_nonzero(mask)) for mask in of_layers) for of_layers in masks]
    smaller = dataclasses.replace(weights.spec, model=with_counts(model, *counts))
    return dataclasses.replace(weights, spec=smaller, params=params)


def with_counts(model: ModelConfig, heads: tuple[int, ...], units: tuple[int, ...]) -> ModelConfig:
    """Return ``model`` with so many heads and units in its layers, in the plainest form: equal numbers of units are
    ``intermediate_size``, which every format holds."""
    if len({*units}) == 1 and "span_transform" not in model.head_parts:
        model = dataclasses.replace(model, intermediate_size=units[0], layer_units=())
    layer_heads = () if {*heads} == {model.num_attention_heads} else heads
    layer_units = () if {*units} == {model.intermediate_size} else units
    return dataclasses.replace(model, layer_heads=layer_heads, layer_units=layer_units)
