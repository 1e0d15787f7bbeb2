"""Mesh, logical axes and their rules."""

from bert_jax.parallel.axes import (
    MESH_AXES,
    automatic_axes,
    axis_names,
    constrain,
    declared,
    place,
    shardings,
    to_spec,
)
from bert_jax.parallel.mesh import batch_sharding, check_batches, host_rows, make_mesh, to_global, to_host

__all__ = [
    "MESH_AXES",
    "automatic_axes",
    "axis_names",
    "batch_sharding",
    "check_batches",
    "constrain",
    "declared",
    "host_rows",
    "make_mesh",
    "place",
    "shardings",
    "to_global",
    "to_host",
    "to_spec",
]
