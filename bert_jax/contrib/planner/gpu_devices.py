"""Descriptions of GPUs that need not be attached; XLA's CUDA compiler needs nothing else.

The fields are those of XLA's ``GpuTargetConfigProto``, with the numbers that XLA publishes for these boards
(xla/backends/gpu/target_config/specs in openxla/xla) and, for the H100 NVL, of NVIDIA's data sheet. Without a board
there is no autotuning: products of matrices and collectives get the compiler's default algorithms.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

from bert_jax.parallel.hardware import Chip


@dataclass(frozen=True)
class _Board:
    """Fields of a board that the compiler reads, in addition to :class:`~bert_jax.parallel.hardware.Chip`."""

    device_kind: str
    capability: int
    cores: int
    clock_ghz: float
    memory_bytes: int
    cache_bytes: int
    # Bytes of shared memory of a core, and most of one block of threads.
    shared_bytes: int = 233472
    shared_of_block: int = 232448
    lanes: int = 128


_BOARDS = {
    "A100 40 GB": _Board("NVIDIA A100-SXM4-40GB", 8, 108, 1.41, 42331013120, 41943040, 167936, 166912, 64),
    "A100 80 GB": _Board("NVIDIA A100-SXM4-80GB", 8, 108, 1.41, 85100068864, 41943040, 167936, 166912, 64),
    "H100 PCIe": _Board("NVIDIA H100 PCIe", 9, 114, 1.755, 84942979072, 52428800),
    "H100 NVL": _Board("NVIDIA H100 NVL", 9, 132, 1.785, 100500000000, 52428800),
    "H100 SXM": _Board("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 84942979072, 52428800),
    "H200": _Board("NVIDIA H200 141GB HBM3e", 9, 132, 1.98, 151397597184, 52428800),
    "B200": _Board("NVIDIA B200", 10, 148, 1.965, 191514411008, 132644864),
}


def can_compile() -> bool:
    """Return True if the CUDA compiler of JAX is installed (extra ``gpu``)."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def gpu_devices(chip: Chip, boards: int) -> list[Any]:
    """Return JAX devices that describe ``boards`` boards of ``chip`` in hosts of ``chip.chips_per_host``. Programs
    can be compiled for them, but not run on them. Raises ``ValueError`` if the CUDA compiler is not installed."""
    if not can_compile():
        raise ValueError("compiling for a GPU requires the CUDA compiler of JAX; run pip install 'bert_jax[gpu]'")
    from jax.experimental import topologies

    hosts = -(-boards // chip.chips_per_host)
    try:
        described = topologies.get_topology_desc(
            platform="cuda",
            topology_name="gpu",
            topology=f"1x{hosts}x{boards // hosts}",
            target_config=target_config(chip),
        )
    except NotImplementedError:  # JAX looked for a GPU first, and gave its compiler up
        raise ValueError(
            "compiling for an absent GPU requires the environment variable JAX_PLATFORMS=cpu"
        ) from None
    return list(described.devices)


def target_config(chip: Chip) -> str:
    """Return the description of a board of ``chip`` for XLA, a ``GpuTargetConfigProto`` as text."""
    board = _BOARDS[chip.name]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {board.shared_bytes}
  shared_memory_per_block_optin: {board.shared_of_block}
  threads_per_core_limit: 2048
  core_count: {board.cores}
  fpus_per_core: {board.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {round(chip.device_memory_bandwidth)}
  l2_cache_size: {board.cache_bytes}
  clock_rate_ghz: {board.clock_ghz}
  device_memory_size: {board.memory_bytes}
  cuda_compute_capability {{ major: {board.capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{board.device_kind}"
"""
