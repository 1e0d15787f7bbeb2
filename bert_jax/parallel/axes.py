"""Logical axis names, their mapping to mesh axes, and the checked way to use them.

Flax's own logical axes fail silently (a misspelt name replicates, a constraint outside a mesh is a no-op), so
names come from one closed set, an unknown one raises, and the rules are a frozen value derived from the mesh.
"""

from collections.abc import Callable, Sequence
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


def to_spec(axes: Axes, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Mesh axes of an array with the given logical ``axes``; raises ``ValueError`` on an unknown name.

    A mesh axis that does not divide its dimension falls to the next dimension that may be cut and divides;
    where there is none the array is replicated over it.
    """
    assert len(axes) == len(shape), (axes, tuple(shape))
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r}; allowed: {', '.join(RULES)}")
    placed: list[list[str]] = [[] for _ in axes]
    size = [int(n) for n in shape]
    used: set[str] = set()
    for dim, axis in enumerate(axes):
        for mesh_axis in RULES[axis] if axis else ():
            count = mesh.shape[mesh_axis]
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


def constrain(x: jax.Array, axes: Axes, mesh: Mesh | None) -> jax.Array:
    """Tell the compiler how activation ``x`` is cut. Without a mesh (one device) only the names are checked."""
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r}; allowed: {', '.join(RULES)}")
    assert len(axes) == x.ndim, (axes, x.shape)
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, to_spec(axes, x.shape, mesh)))


def declared(initializer: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """``initializer`` whose parameter carries its logical axes; raises ``ValueError`` on an unknown name."""
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r}; allowed: {', '.join(RULES)}")
    return nn.with_partitioning(initializer, axes)


def shardings(boxed: Any, mesh: Mesh) -> Any:
    """Sharding of every leaf of a tree of boxed parameters (``nn.Partitioned`` of arrays or shape structs)."""

    def one(leaf: Any) -> NamedSharding:
        if isinstance(leaf, nn.Partitioned):
            return NamedSharding(mesh, to_spec(leaf.names, leaf.value.shape, mesh))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(one, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))
