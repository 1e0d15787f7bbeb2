"""Functions that the TPU kernels share: choice of the kernel, partition over devices, dropout bits.

The dropout bits are a hash of the position of each value in the global batch, not the output of the random
generator of the chip. They do not depend on device, mesh or block size, and the backward pass recomputes them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from bert_jax.model.dropout import DropoutKey, ShardKey
from bert_jax.parallel.axes import RULES, Axes

LANES = 128


def on_tpu(mesh: Mesh | None) -> bool:
    """Return True if the program runs on TPUs (the mesh may have TPUs that this host does not have)."""
    return (jax.default_backend() if mesh is None else mesh.devices.flat[0].platform) == "tpu"


def use_kernel(choice: str, option: str, mesh: Mesh | None, reason: str) -> bool:
    """Return True if ``choice``, the value of ``execution.<option>``, selects the Pallas kernel.

    ``reason`` states why the kernel cannot run; it is empty if it can. ``auto`` selects the kernel on TPU meshes if
    it can run; ``pallas`` raises ``ValueError`` if it cannot.
    """
    if choice == "pallas" and reason:
        raise ValueError(f"execution.{option}: pallas is not possible: {reason}; allowed here: xla, auto")
    return choice == "pallas" or (choice == "auto" and mesh is not None and on_tpu(mesh) and not reason)


def shard_mapped(
    function: Callable[..., Any], mesh: Mesh | None, in_axes: tuple[Axes, ...], out_axes: Axes
) -> Callable[..., Any]:
    """Return a function that calls ``function(device_index, *operands)`` on each device with the shards of the
    operands on that device. The logical axes ``in_axes`` and ``out_axes`` define the partition of the operands and
    of the result (the compiler cannot partition a kernel). ``device_index(axis)`` returns the index of the shard
    along a logical axis."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    cut = () if mesh is None else tuple(a for a in mesh.axis_names if mesh.shape[a] > 1 and a not in manual)

    def axes_of(axis: str | None) -> tuple[str, ...]:
        return tuple(name for name in RULES[axis] if name in cut) if axis else ()

    def device_index(axis: str) -> jax.Array | int:
        return jax.lax.axis_index(axes_of(axis)) if axes_of(axis) else 0

    def local(*operands: Any) -> Any:
        return function(device_index, *operands)

    def spec(axes: Axes) -> PartitionSpec:
        return PartitionSpec(*(axes_of(axis) or None for axis in axes))

    if not cut:
        return local
    # A region that is manual over other axes has its own mesh.
    return jax.shard_map(
        local,
        mesh=None if manual else mesh,
        in_specs=tuple(spec(axes) for axes in in_axes),
        out_specs=spec(out_axes),
        axis_names=set(cut),
        check_vma=False,  # the interpreter of kernels does not follow which values vary
    )


def seed_words(key: DropoutKey | None) -> jax.Array:
    """Return int32[3] for :func:`keep`: two words of the key and the index of row 0 in the global batch."""
    if key is None:
        return jnp.zeros(3, jnp.int32)
    whole, first_row = (key.key, key.first_row) if isinstance(key, ShardKey) else (key, jnp.uint32(0))
    words = jnp.stack([*jax.random.key_data(whole)[-2:], first_row])
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def keep(words: jax.Array, rate: float, axis: int) -> tuple[jax.Array, float]:
    """Return the mask of the values to keep, and the factor that scales them; ``rate`` is exact to 2**-17. Each of
    ``words`` (random int32) determines two elements of the mask: one in the first half of ``axis``, one in the
    second."""
    threshold = min(max(round(rate * 65536), 1), 65535)
    bits = jnp.concatenate([words & 0xFFFF, jax.lax.shift_right_logical(words, 16)], axis=axis)
    return bits >= threshold, 65536 / (65536 - threshold)


def mix(x: Any, salt: Any) -> Any:
    """Return a 32-bit hash of ``x`` (int32): "lowbias32" of Wellons, with an XOR with ``salt`` after the first
    multiplication."""
    x ^= jax.lax.shift_right_logical(x, 16)
    x = x * np.int32(0x7FEB352D) ^ salt
    x ^= jax.lax.shift_right_logical(x, 15)
    x = x * np.uint32(0x846CA68B).astype(np.int32)
    return x ^ jax.lax.shift_right_logical(x, 16)


def iota(shape: tuple[int, ...], dim: int) -> jax.Array:
    """Return an int32 array of ``shape`` that contains the index of each element along ``dim``."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, dim)
