"""The device mesh, and the mapping of logical axes to mesh axes."""

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
