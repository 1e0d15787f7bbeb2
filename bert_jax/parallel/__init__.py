"""Mesh, logical axes and their rules."""

from bert_jax.parallel.axes import (
    MESH_AXES,
    automatic_axes,
    axis_names,
    constrain,
    constrain_tree,
    shardings,
    to_spec,
    with_logical_axes,
)
from bert_jax.parallel.mesh import batch_sharding, check_batches, host_rows, make_mesh, to_global, to_host

__all__ = [
    "MESH_AXES",
    "automatic_axes",
    "axis_names",
    "batch_sharding",
    "check_batches",
    "constrain",
    "constrain_tree",
    "host_rows",
    "make_mesh",
    "shardings",
    "to_global",
    "to_host",
    "to_spec",
    "with_logical_axes",
]
