"""Logical axis names, their mapping to mesh axes, and functions that check and apply them.

Flax's own logical axes fail silently: an array with a misspelled name is replicated, and a constraint outside a
mesh has no effect. Here all names are defined in ``RULES``, and an unknown name raises ``ValueError``.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes over which it may be sharded. The axes of activations begin with "act_".
RULES: dict[str, tuple[str, ...]] = {
    "layers": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),  # all heads, with the features of one head adjacent
    "mlp": ("tensor",),
    "position": (),
    "segment": (),
    "norm": (),
    "pooled": (),
    "classes": (),
    "act_batch": ("data", "fsdp"),
    "act_length": (),
    "act_embed": (),
    "act_heads": ("tensor",),
    "act_mlp": ("tensor",),
    "act_predictions": (),
    "act_vocab": ("tensor",),
}

Axes = tuple[str | None, ...]


def to_spec(axes: Axes, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """Return the ``PartitionSpec`` of an array with logical ``axes``. Raises ``ValueError`` for unknown axis names.

    ``sizes`` maps the mesh axes to their sizes. If the size of a mesh axis does not divide the dimension of its
    logical axis, the mesh axis shards another dimension instead: the first that may be sharded and that the size
    divides. If no dimension qualifies, the array is replicated over the mesh axis.
    """
    assert len(axes) == len(shape), (axes, tuple(shape))
    check_axes(axes)
    placed: list[tuple[str, ...]] = [()] * len(axes)
    left = list(shape)
    for dim, axis in enumerate(axes):
        if axis is None:
            continue
        for mesh_axis in RULES[axis]:
            count = sizes[mesh_axis]
            if count == 1 or any(mesh_axis in names for names in placed):
                continue
            others = [d for d, a in enumerate(axes) if a not in (None, "layers") and d != dim and not placed[d]]
            for target in [dim] if axis.startswith("act_") else [dim, *others]:
                if left[target] % count == 0:
                    placed[target] += (mesh_axis,)
                    left[target] //= count
                    break
    return _to_spec(placed)


def _to_spec(placed: Iterable[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(names if len(names) > 1 else (names[0] if names else None) for names in placed))


def check_axes(axes: Axes) -> None:
    """Raise ``ValueError`` if ``axes`` contains an unknown logical axis."""
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r}; allowed: {', '.join(RULES)}")


def automatic_axes(mesh: Mesh | None) -> frozenset[str]:
    """Return the mesh axes of size > 1 over which the compiler shards arrays at the current point of the program.

    Inside ``jax.shard_map``, its manual axes are excluded, because the arrays there are already split along these
    axes.
    """
    if mesh is None:
        return frozenset()
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return frozenset(axis for axis, size in mesh.shape.items() if size > 1 and axis not in manual)


def constrain(x: jax.Array, axes: Axes, mesh: Mesh | None) -> jax.Array:
    """Constrain activation ``x`` to the sharding of its logical ``axes``. Without a mesh, only check ``axes``."""
    check_axes(axes)
    assert len(axes) == x.ndim, (axes, x.shape)
    if mesh is None or not automatic_axes(mesh):
        return x
    free = automatic_axes(mesh)
    sizes = {axis: size if axis in free else 1 for axis, size in mesh.shape.items()}
    return jax.lax.with_sharding_constraint(x, sharding_here(mesh, to_spec(axes, x.shape, sizes)))


def axis_names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes that one entry of a ``PartitionSpec`` names."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def sharding_here(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> NamedSharding:
    """Return the sharding ``spec`` on ``mesh`` or, inside ``jax.shard_map``, on the current abstract mesh."""
    inside = jax.sharding.get_abstract_mesh()
    return NamedSharding(inside if inside.manual_axes else mesh, spec)


def constrain_tree(tree: Tree, shardings: Any, mesh: Mesh | None) -> Tree:
    """Constrain a tree of arrays (None: empty) to ``shardings``, restricted to the mesh axes in
    :func:`automatic_axes`."""
    free = automatic_axes(mesh)

    def one(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        parts = map(axis_names, sharding.spec)
        spec = PartitionSpec(*(tuple(axis for axis in part if axis in free) or None for part in parts))
        return jax.lax.with_sharding_constraint(x, sharding_here(sharding.mesh, spec))

    return jax.tree.map(one, tree, shardings) if free and tree is not None else tree


def with_logical_axes(initializer: Callable[..., jax.Array], axes: Axes) -> Callable[..., Any]:
    """Return ``initializer`` with logical ``axes`` attached to the parameter that it creates.

    Raises ``ValueError`` for an unknown axis name.
    """
    check_axes(axes)
    return nn.with_partitioning(initializer, axes)


def over_replicas(spec: PartitionSpec, axes: Axes, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """Return ``spec`` with one dimension additionally sharded over the replicas (mesh axis ``data``).

    This is the first dimension that is divisible by the number of replicas; the dimension of stacked layers is
    tried last. If no dimension is divisible, ``spec`` is returned unchanged.
    """
    parts = [axis_names(part) for part in spec]
    parts += [()] * (len(shape) - len(parts))
    order = sorted(range(len(shape)), key=lambda dim: axes[dim] == "layers")
    for dim in order:
        left = shape[dim] // math.prod(sizes[axis] for axis in parts[dim])
        if sizes["data"] > 1 and left % sizes["data"] == 0:
            parts[dim] = (*parts[dim], "data")
            break
    return _to_spec(parts)


def shardings(boxed: Any, mesh: Mesh, *, replicas: bool = False) -> Any:
    """Return the sharding of every leaf of a tree of parameters: arrays or ``jax.ShapeDtypeStruct``, boxed in
    ``nn.Partitioned``. With ``replicas``, the leaves are also sharded over the replicas, like the state of the
    optimizer."""

    def one(leaf: Any) -> NamedSharding:
        if not isinstance(leaf, nn.Partitioned):
            return NamedSharding(mesh, PartitionSpec())
        spec = to_spec(leaf.names, leaf.value.shape, mesh.shape)
        if replicas:
            spec = over_replicas(spec, leaf.names, leaf.value.shape, mesh.shape)
        return NamedSharding(mesh, spec)

    return jax.tree.map(one, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))
