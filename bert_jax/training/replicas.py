"""Compute the gradient of each replica (index along the mesh axis ``data``) separately, and sum the gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from bert_jax.model.canonical import Params, Shardings
from bert_jax.objectives.objective import Gradients
from bert_jax.parallel import axis_names


def over_replicas(replica_gradients: Callable[..., Gradients], mesh: Mesh, inputs: tuple[Any, ...]) -> Gradients:
    """Return the :data:`Gradients` of all replicas, stacked along a new first dimension, except for the carried
    arrays, which are those of all rows.

    Each replica calls ``replica_gradients`` with ``inputs``, in which the third input (the rows, and their carried
    arrays) and the last input (the replica indices) are reduced to the shard of this replica.
    """

    def replica(*inputs: Any) -> Gradients:
        loss, grads, sums, carried = replica_gradients(*inputs)
        return (*jax.tree.map(lambda x: x[None], (loss, grads, sums)), carried)

    whole, by_rows = PartitionSpec(), PartitionSpec("data")
    # Manual over data only; the compiler partitions the work of a replica over fsdp and tensor.
    apart = jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(whole, whole, by_rows, whole, whole, by_rows),
        out_specs=by_rows,
        axis_names={axis for axis, size in mesh.shape.items() if axis == "data" or size == 1},
        check_vma=False,
    )
    return apart(*inputs)


def sum_replicas(stacked: Params, shardings: Shardings | None, dtype: jnp.dtype) -> Params:
    """Sum the arrays of a tree over the replicas (the first dimension of each array) and shard the sums as
    ``shardings`` specifies.

    The sums are computed in ``dtype`` and returned as float32. Each array needs one collective: an all-reduce if
    every replica needs the complete array, a reduce-scatter if each replica needs only a shard of the array.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    replicas = mesh.shape["data"]
    # With several processes on CPU, gloo's reduce-scatter returns wrong values at array ends (jaxlib 0.10.2).
    scatters = mesh.devices.flat[0].platform != "cpu"
    leaves, tree = jax.tree.flatten(stacked)
    targets = jax.tree.leaves(shardings)
    parts = [[axis_names(part) for part in sharding.spec] for sharding in targets]
    own = [PartitionSpec("data", *(tuple(a for a in part if a != "data") or None for part in p)) for p in parts]

    def add(*leaves: jax.Array) -> list[jax.Array]:
        sums = []
        for leaf, part in zip(leaves, parts, strict=True):
            x = leaf[0].astype(dtype)
            cut = [dim for dim, axes in enumerate(part) if "data" in axes]
            if cut and scatters:
                x = jax.lax.psum_scatter(x, "data", scatter_dimension=cut[0], tiled=True)
            else:
                x = jax.lax.psum(x, "data")
                if cut:
                    size = x.shape[cut[0]] // replicas
                    x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("data") * size, size, cut[0])
            sums.append(x.astype(jnp.float32))
        return sums

    mapped = jax.shard_map(
        add,
        mesh=mesh,
        in_specs=tuple(own),
        out_specs=[sharding.spec for sharding in targets],
        check_vma=False,
    )
    return jax.tree.unflatten(tree, mapped(*leaves))
