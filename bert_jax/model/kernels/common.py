"""Functions that the kernels share: choice of the kernel, partition over devices, dropout bits.

The dropout bits are the hash of ``bert_jax.model.dropout``, not the output of the random generator of the chip.
They do not depend on device, mesh or block size, and the backward pass recomputes them.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from bert_jax.config.switches import ANY, SIZES, Supported
from bert_jax.model.dropout import DropoutKey, ShardKey, TokenKey, drop_threshold, whole_key
from bert_jax.parallel.axes import RULES, Axes
from bert_jax.parallel.hardware import TPUS, find_chip

# The gradients of operands; those of integers are arrays of the dtype float0.
Gradients = tuple[jax.Array | np.ndarray | tuple[jax.Array | np.ndarray, ...], ...]
R = TypeVar("R")
LANES = 128
# Compute capability of the first GPUs with bfloat16 matrix units; Triton compiles for no older ones.
_LEAST_CAPABILITY = 8.0
# The kernels that a CPU interprets, tpu or gpu.
INTERPRETED = "tpu"
# Fields of ``ModelConfig`` of which the attention kernels and, except for ``norm``, those of dropout, residual and
# LayerNorm support any value. The attention kernels check the numbers of heads.
SUPPORTED: Supported = SIZES | dict.fromkeys(
    (
        "layer_heads", "layer_units", "word_rank",
        "position_offset", "embedding_scale", "embedding_size", "shared_layers", "embedding_dropout",
        "attention_output_dropout", "feed_forward_dropout", "activation", "feed_forward", "norm", "norm_position",
        "norm_epsilon", "without_bias", "embedding_norm", "final_norm", "separator_id", "pooling", "pooler_layer",
        "head_parts", "mlm_layer", "tied_output", "initialization",
        "position_embeddings", "rotary_base", "rotary_window_base", "attention", "attention_windows",
    ),
    ANY,
)  # fmt: skip


def triton() -> Any:
    """Return Pallas's module of Triton, through which the GPU kernels are lowered. None: this version of jax has
    none (docs/design/gpu-performance.md)."""
    try:
        from jax.experimental.pallas import triton as found
    except ImportError:
        return None
    return found


def platform_of(mesh: Mesh | None) -> str:
    """Return tpu, gpu or cpu: where the program runs (the mesh may have devices that this host does not have)."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def kernels_for(mesh: Mesh | None) -> str:
    """Return the kernels that run on ``mesh``, tpu or gpu; a CPU interprets the kernels in :data:`INTERPRETED`."""
    platform = platform_of(mesh)
    return platform if platform in ("tpu", "gpu") else INTERPRETED


def capability_of(mesh: Mesh | None) -> float:
    """Return the compute capability of the GPUs of ``mesh``; 9 for other devices, which interpret the kernels."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return float(getattr(device, "compute_capability", 9.0)) if device.platform == "gpu" else 9.0


def fast_memory_of(mesh: Mesh | None) -> int:
    """Return the bytes of vector memory on each TPU in ``mesh``.

    Other devices interpret the kernels; for them, the largest value of any TPU is returned.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    chip = find_chip(device.device_kind) if device.platform == "tpu" else TPUS["TPU v5e"]
    return chip.fast_memory_mib * 2**20 if chip else 2**24


def on_tpu(mesh: Mesh | None) -> bool:
    """Return True if the program runs on TPUs (the mesh may have TPUs that this host does not have)."""
    return platform_of(mesh) == "tpu"


def kernel_module(platform: str, subject: Literal["attention", "norm"]) -> ModuleType:
    """Return the module of the kernels of ``platform``, tpu or gpu. It imports Pallas, so it is imported only where
    a kernel may run."""
    return importlib.import_module(f"bert_jax.model.kernels.{platform}_{subject}")


def use_kernel(choice: str, option: str, mesh: Mesh | None, unsupported: Callable[[], str]) -> bool:
    """Return True if ``choice``, the value of ``execution.<option>``, selects the Pallas kernel.

    ``unsupported()`` returns why the kernel cannot run; it is empty if it can. ``auto`` selects the kernel on
    meshes of TPUs and GPUs if it can run; ``pallas`` raises ``ValueError`` if it cannot.
    """
    if choice != "pallas" and (choice != "auto" or mesh is None or platform_of(mesh) == "cpu"):
        return False
    reason = unsupported()
    if capability_of(mesh) < _LEAST_CAPABILITY:
        reason = f"the compute capability of the GPU is {capability_of(mesh)}, below {_LEAST_CAPABILITY}"
    if choice == "pallas" and reason:
        raise ValueError(f"execution.{option}: pallas is not possible: {reason}; allowed here: xla, auto")
    return not reason


def shard_mapped(
    function: Callable[..., R], mesh: Mesh | None, in_axes: tuple[Axes, ...], out_axes: Axes
) -> Callable[..., R]:
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

    def local(*operands: jax.Array) -> R:
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


def stated_cost(
    operations: float, num_bytes: float, vector_operations: float = 0.0, steps: float = 0.0, overlap: float = 0.0
) -> dict[str, str]:
    """Return the metadata of a kernel that the planner reads from the compiled program, which has no other trace of
    them.

    Args:
        operations: multiplications and additions of the matrix units, in lanes of zeros too.
        num_bytes: bytes read from and written to the memory of the device.
        vector_operations: operations of the vector units, one per element (TPU).
        steps: number of consecutive tiles; each tile waits once for the results of the units (TPU).
        overlap: fraction of the shorter of both times during which matrix and vector units run together (TPU).
    """
    counts = (operations, num_bytes, vector_operations, steps, 100 * overlap)
    names = ("flops", "bytes_accessed", "vector_operations", "steps", "overlap_percent")
    return {name: str(round(count)) for name, count in zip(names, counts, strict=True)}


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
