"""Functions that the TPU kernels share: choice of the kernel, partition over devices, dropout bits.

The dropout bits are the hash of ``bert_jax.model.dropout``, not the output of the random generator of the chip.
They do not depend on device, mesh or block size, and the backward pass recomputes them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from bert_jax.model.dropout import DropoutKey, ShardKey, TokenKey, drop_threshold, whole_key
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


def token_key(key: DropoutKey, rows: int, length: int) -> TokenKey:
    """Return the key of the tokens of ``rows`` rows of ``length`` tokens.

    With threefry and rbg, which a kernel cannot generate, the index of a row in the microbatch is the key of its
    sequence.
    """
    if isinstance(key, TokenKey):
        return key
    words = jax.random.key_data(whole_key(key))[-2:]
    first_row = key.first_row.astype(jnp.int32) if isinstance(key, ShardKey) else jnp.int32(0)
    places = (iota((rows, length), dim) for dim in (0, 1))
    return TokenKey(jax.random.wrap_key_data(words, impl="threefry2x32"), first_row + next(places), next(places))


def scale_or_drop(bits: jax.Array, rate: float) -> jax.Array:
    """Return the dropout factor of each value, float32: 0, or the scale. ``bits`` are from 0 to 65535."""
    threshold = drop_threshold(rate)
    return jnp.where(bits >= threshold, 65536 / (65536 - threshold), 0.0)


def iota(shape: tuple[int, ...], dim: int) -> jax.Array:
    """Return an int32 array of ``shape`` that contains the index of each element along ``dim``."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, dim)
