"""Partition of parameters and optimizer state over a mesh, without any device."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from bert_jax.config import PretrainConfig
from bert_jax.model import BertForPretraining
from bert_jax.model.canonical import STACKED, VOCABULARY_ROWS, path_name
from bert_jax.optim import make_optimizer
from bert_jax.parallel import MESH_AXES, batch_sharding
from bert_jax.parallel.axes import RULES, axis_names, to_spec
from bert_jax.training.memory import device_bytes
from bert_jax.training.state import TrainState, abstract_params, abstract_state, flat, parameter_of

# Fields of a row that are added up over layers.
_SUMMED = ("count", "device_bytes", "optimizer_device_bytes")


@dataclass(frozen=True)
class Row:
    """One canonical parameter, or the same parameter of several layers that have equal shapes and shardings."""

    name: str
    # Canonical shape: of one layer, without padding.
    shape: tuple[int, ...]
    # Number of canonical parameters in the row: the number of layers or 1.
    count: int
    # Mesh axes that partition each dimension during computation, "-" if none does; preceded by "layers:" if the
    # stack of layers is partitioned.
    sharding: str
    # Sharding of the parameter and its optimizer state between steps, in the same format.
    state_sharding: str
    # Bytes of all ``count`` parameters between steps on one device, padding included.
    device_bytes: int
    # Bytes of their optimizer state and moving average.
    optimizer_device_bytes: int
    # Notes about mesh axes that do not divide their dimension.
    notes: tuple[str, ...]


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """Return a mesh without devices whose axes have the given ``sizes``."""
    return AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def abstract_train_state(config: PretrainConfig, mesh: Any) -> TrainState:
    """Return the train state on ``mesh``, with shapes and shardings in place of arrays."""
    model = BertForPretraining(config.model, config.execution, config.has_nsp)
    return abstract_state(config, model, make_optimizer(config.optimizer), mesh)


def batch_bytes(config: PretrainConfig, mesh: Any) -> int:
    """Return the number of bytes of a global batch that one device stores."""
    sharding = batch_sharding(mesh)
    shapes = config.row_shape.features(config.training.global_batch_size).values()
    return sum(math.prod(sharding.shard_shape(shape)) * 4 for shape, _ in shapes)


def sharding_table(config: PretrainConfig, sizes: Mapping[str, int]) -> list[Row]:
    """Return one row per canonical parameter, in the order of the model. Layers with the same shape and sharding
    share a row."""
    mesh = abstract_mesh(sizes)
    state = abstract_train_state(config, mesh)
    boxed = jax.tree_util.tree_leaves_with_path(
        abstract_params(BertForPretraining(config.model, config.execution, config.has_nsp)),
        is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned),
    )
    boxes = {path_name(path): leaf for path, leaf in boxed}
    moments: dict[str, list[jax.ShapeDtypeStruct]] = {}
    params = flat(state.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.opt_state, state.ema)):
        moments.setdefault(parameter_of(path, params), []).append(leaf)
    rows: dict[tuple[object, ...], Row] = {}
    for name, leaf in params.items():
        axes = getattr(boxes[name], "names", (None,) * len(leaf.shape))
        row = _row(config, name, leaf, moments.get(name, []), axes, sizes)
        key = row.name, row.shape, row.sharding, row.state_sharding
        if first := rows.get(key):
            sums = {each: getattr(first, each) + getattr(row, each) for each in _SUMMED}
            row = dataclasses.replace(first, **sums)
        rows[key] = row
    return list(rows.values())


def _row(
    config: PretrainConfig,
    name: str,
    leaf: jax.ShapeDtypeStruct,
    moments: list[jax.ShapeDtypeStruct],
    declared: tuple[str | None, ...],
    sizes: Mapping[str, int],
) -> Row:
    stacked = STACKED in name
    per_layer = name.replace(STACKED, "encoder/layer_*/") if stacked else re.sub(r"/layer_\d+/", "/layer_*/", name)
    shape = tuple(leaf.shape[1:]) if stacked else tuple(leaf.shape)
    if name.endswith(VOCABULARY_ROWS):
        shape = (config.model.vocab_size, *shape[1:])
    computed = _dimensions(to_spec(declared, leaf.shape, sizes), leaf)
    held = _dimensions(leaf.sharding.spec, leaf)
    notes = _notes(declared, computed, leaf, sizes)
    if sizes["data"] > 1 and config.mesh.shard_optimizer and not any("data" in axes for axes in held):
        notes.append(
            f"data {sizes['data']} divides no remaining dimension: each replica updates the whole parameter"
        )
    return Row(
        name=per_layer,
        shape=shape,
        count=leaf.shape[0] if stacked else 1,
        sharding=_words(computed, stacked),
        state_sharding=_words(held, stacked),
        device_bytes=device_bytes(leaf),
        optimizer_device_bytes=device_bytes(moments),
        notes=tuple(notes),
    )


def _dimensions(spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> list[tuple[str, ...]]:
    """Return the mesh axes that partition each dimension."""
    return [*map(axis_names, spec), *[()] * (len(leaf.shape) - len(spec))]


def _words(dimensions: list[tuple[str, ...]], stacked: bool) -> str:
    words = ["+".join(axes) or "-" for axes in dimensions]
    before = ""
    if stacked:
        before = f"layers:{words[0]} " if words[0] != "-" else ""
        words = words[1:]
    if not before and all(word == "-" for word in words):
        return "whole"
    return f"{before}({', '.join(words)})"


def _notes(
    declared: tuple[str | None, ...],
    dimensions: list[tuple[str, ...]],
    leaf: jax.ShapeDtypeStruct,
    sizes: Mapping[str, int],
) -> list[str]:
    """Return a line for each mesh axis that does not partition its declared dimension."""
    lines = []
    for dim, axis in enumerate(declared):
        for mesh_axis in RULES[axis] if axis else ():
            size = sizes[mesh_axis]
            if size == 1 or mesh_axis in dimensions[dim]:
                continue
            places = [d for d, axes in enumerate(dimensions) if mesh_axis in axes]
            what = f"{mesh_axis} {size} does not divide {axis} {leaf.shape[dim]}"
            lines.append(
                f"{what}: {f'{declared[places[0]]} is partitioned instead' if places else 'not partitioned'}"
            )
    return lines
