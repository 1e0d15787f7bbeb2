"""Mesh, logical axes and their rules."""

from bert_jax.parallel.axes import MESH_AXES, constrain, declared, shardings, to_spec
from bert_jax.parallel.mesh import batch_sharding, check_batch_size, host_rows, make_mesh, to_global

__all__ = [
    "MESH_AXES",
    "batch_sharding",
    "check_batch_size",
    "constrain",
    "declared",
    "host_rows",
    "make_mesh",
    "shardings",
    "to_global",
    "to_spec",
]
