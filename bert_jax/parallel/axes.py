"""Logical axis names, their mapping to mesh axes, and the checked way to use them.

Flax's own logical axes fail silently (a misspelt name replicates, a constraint outside a mesh is a no-op), so
names come from one closed set, an unknown one raises, and the rules are a frozen value derived from the mesh.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes that it may be cut over. Activations' axes begin with "act_".
RULES: dict[str, tuple[str, ...]] = {
    "layers": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),  # heads times head size, heads first
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
    """Mesh axes of an array with the given logical ``axes``; raises ``ValueError`` on an unknown name.

    ``sizes`` are those of the mesh axes. An axis that does not divide its dimension falls to the next one that
    may be cut and divides; where there is none the array is replicated over it.
    """
    assert len(axes) == len(shape), (axes, tuple(shape))
    check_axes(axes)
    placed: list[list[str]] = [[] for _ in axes]
    size = [int(n) for n in shape]
    used: set[str] = set()
    for dim, axis in enumerate(axes):
        for mesh_axis in RULES[axis] if axis else ():
            count = sizes[mesh_axis]
            if mesh_axis in used or count == 1:
                continue
            candidates = [dim, *(d for d, a in enumerate(axes) if d != dim and a and not a.startswith("act_"))]
            fallback = candidates if not axis.startswith("act_") else [dim]
            for target in fallback:
                if (
                    axes[target] != "layers"
                    and size[target] % count == 0
                    and not (target != dim and placed[target])
                ):
                    placed[target].append(mesh_axis)
                    size[target] //= count
                    used.add(mesh_axis)
                    break
    return PartitionSpec(*(tuple(p) if len(p) > 1 else (p[0] if p else None) for p in placed))


def check_axes(axes: Axes) -> None:
    """Raises ``ValueError`` on an unknown logical axis."""
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r}; allowed: {', '.join(RULES)}")


def automatic_axes(mesh: Mesh | None) -> frozenset[str]:
    """Mesh axes of more than one device that the compiler cuts arrays over by itself at this point of a program.

    Inside ``jax.shard_map`` the axes that it maps over are missing: there an array is what one part holds.
    """
    if mesh is None:
        return frozenset()
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return frozenset(axis for axis, size in mesh.shape.items() if size > 1 and axis not in manual)


def constrain(x: jax.Array, axes: Axes, mesh: Mesh | None) -> jax.Array:
    """Tell the compiler how activation ``x`` is cut. Without a mesh (one device) only the names are checked."""
    check_axes(axes)
    assert len(axes) == x.ndim, (axes, x.shape)
    if mesh is None or not automatic_axes(mesh):
        return x
    return jax.lax.with_sharding_constraint(x, sharding_here(mesh, to_spec(axes, x.shape, sizes_here(mesh))))


def axis_names(part: Any) -> tuple[str, ...]:
    """Mesh axes of one entry of a ``PartitionSpec``."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def sizes_here(mesh: Mesh) -> dict[str, int]:
    """Size of every mesh axis, 1 for those that are not :func:`automatic_axes`."""
    free = automatic_axes(mesh)
    return {axis: size if axis in free else 1 for axis, size in mesh.shape.items()}


def sharding_here(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Return the sharding ``spec`` on ``mesh`` or, inside ``jax.shard_map``, on its abstract mesh."""
    inside = jax.sharding.get_abstract_mesh()
    return NamedSharding(inside if inside.manual_axes else mesh, spec)


def constrain_tree(tree: Any, shardings: Any, mesh: Mesh | None) -> Any:
    """``tree`` of arrays laid out as ``shardings`` say, over those of their mesh axes that are automatic here."""
    free = automatic_axes(mesh)

    def one(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        parts = map(axis_names, sharding.spec)
        spec = PartitionSpec(*(tuple(axis for axis in part if axis in free) or None for part in parts))
        return jax.lax.with_sharding_constraint(x, sharding_here(sharding.mesh, spec))

    return jax.tree.map(one, tree, shardings) if free else tree


def with_logical_axes(initializer: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """``initializer`` whose parameter carries its logical axes; raises ``ValueError`` on an unknown name."""
    check_axes(axes)
    return nn.with_partitioning(initializer, axes)


def over_replicas(spec: PartitionSpec, axes: Axes, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """``spec`` cut further over the replicas (mesh axis ``data``): in the first dimension that they divide, stacked
    layers last; where there is none, unchanged."""
    parts = [axis_names(part) for part in spec]
    parts += [()] * (len(shape) - len(parts))
    order = sorted(range(len(shape)), key=lambda dim: axes[dim] == "layers")
    for dim in order:
        left = shape[dim] // math.prod(sizes[axis] for axis in parts[dim])
        if sizes["data"] > 1 and left % sizes["data"] == 0:
            parts[dim] = (*parts[dim], "data")
            break
    return PartitionSpec(*(tuple(p) if len(p) > 1 else (p[0] if p else None) for p in parts))


def shardings(boxed: Any, mesh: Mesh, *, replicas: bool = False) -> Any:
    """Sharding of every leaf of a tree of boxed parameters (``nn.Partitioned`` of arrays or shape structs); with
    ``replicas`` cut over the replicas as well, as optimizer state is."""

    def one(leaf: Any) -> NamedSharding:
        if not isinstance(leaf, nn.Partitioned):
            return NamedSharding(mesh, PartitionSpec())
        spec = to_spec(leaf.names, leaf.value.shape, mesh.shape)
        if replicas:
            spec = over_replicas(spec, leaf.names, leaf.value.shape, mesh.shape)
        return NamedSharding(mesh, spec)

    return jax.tree.map(one, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))
