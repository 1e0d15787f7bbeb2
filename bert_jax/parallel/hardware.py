"""Peak speed, memory and interconnect of accelerators.

All values are per chip (TPU) or per board (GPU). Sources for peak, memory, memory bandwidth and hosts: the public
data sheets of the vendors (Cloud TPU's page for each generation; NVIDIA's data sheet for each board). ``clock_ghz``
of a TPU is its bf16 peak divided by the operations of its matrix units per cycle (v5e: 4 units of 128 x 128); it
equals the published clock where Google publishes one. ``vector_width``: 1,024 lanes, 4 operations per cycle (v2,
v3: 2; Jouppi et al. 2020). ``fast_memory_mib`` comes from ``jax.experimental.pallas.tpu.get_tpu_info``.
``program_memory_gib`` is the memory that libtpu 0.0.42 leaves to a program, according to its out-of-memory message.
TPU links: 90% of the figure in the data sheet per link and direction, which "How to Scale Your Model" (jax-
ml.github.io/scaling-book) reports as achievable; v2 and v3: from "A Domain Specific Supercomputer for Training Deep
Neural Networks" (2020). ``jax.devices()[0].device_kind`` names the hardware. Each chip of TPU v2, v3 and TPU7x
appears as two JAX devices, each with half of the speed and memory of the chip.
"""

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator."""

    name: str
    # Dense bf16 TFLOP/s of the whole chip.
    peak_tflops: float
    # Memory of the whole chip, decimal GB.
    memory_gb: float
    # Memory bandwidth of the whole chip, GB/s.
    memory_gb_per_s: float
    # Bandwidth of one link between neighbors in one direction, GB/s. GPU: from a board to the others of its host.
    link_gb_per_s: float
    # Number of axes of the grid of links: 2 or 3 on TPU (two links per axis), 0 if a switch connects the boards.
    link_axes: int = 0
    # Clock of the matrix units, GHz (TPU).
    clock_ghz: float = 0.0
    # GiB that a program may use on one JAX device; 0: unknown.
    program_memory_gib: float = 0.0
    # Number of JAX devices of one chip.
    devices_per_chip: int = 1
    # Elements on which the vector units of one core operate per cycle (TPU).
    vector_width: int = 4096
    # MiB of vector memory of one core, which Pallas calls VMEM (TPU).
    fast_memory_mib: int = 16
    # Network bandwidth from a board to other hosts, GB/s (GPU).
    network_gb_per_s: float = 0.0
    # 32-bit integer operations, 10^12 per second (GPU; for random bits).
    integer_tops: float = 0.0
    # Chips per host, in slices of more than one host.
    chips_per_host: int = 4

    @property
    def device_peak_flops(self) -> float:
        """Peak bf16 FLOP/s of one JAX device."""
        return self.peak_tflops * 1e12 / self.devices_per_chip

    @property
    def vector_operations_per_second(self) -> float:
        """Operations of the vector units of one JAX device (TPU), each on one 32-bit element."""
        return self.vector_width * self.clock_ghz * 1e9

    @property
    def device_memory_bytes(self) -> int:
        """Memory of one JAX device, in bytes."""
        return int(self.memory_gb * 1e9) // self.devices_per_chip

    @property
    def device_program_bytes(self) -> int:
        """Memory that a program may use on one JAX device, in bytes."""
        return int(self.program_memory_gib * 2**30) or self.device_memory_bytes

    @property
    def device_memory_bandwidth(self) -> float:
        """Memory bandwidth of one JAX device, in bytes per second."""
        return self.memory_gb_per_s * 1e9 / self.devices_per_chip

    @property
    def link_bandwidth(self) -> float:
        """Bandwidth of one link of the chip in one direction, in bytes per second."""
        return self.link_gb_per_s * 1e9


# Keys: ``device_kind`` of a JAX device.
TPUS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("TPU v2", 46, 16, 700, 62, 2, 0.7, 7.48, 2, 2048),
        Chip("TPU v3", 123, 32, 900, 82, 2, 0.94, 15.48, 2, 2048),
        Chip("TPU v4", 275, 32, 1228, 45, 3, 1.05, 30.75),
        Chip("TPU v5e", 197, 16, 819, 45, 2, 1.5, 15.75, fast_memory_mib=128),
        Chip("TPU v5p", 459, 95, 2765, 90, 3, 1.75, 95.74, fast_memory_mib=64),
        Chip("TPU v6e", 918, 32, 1640, 90, 2, 1.75, 31.25, fast_memory_mib=128),
        Chip("TPU7x", 2307, 192, 7380, 90, 3, 2.2, 94.75, 2, fast_memory_mib=64),
    )
}
TPUS |= {"TPU v5 lite": TPUS["TPU v5e"], "TPU v5": TPUS["TPU v5p"], "TPU v6 lite": TPUS["TPU v6e"]}

_gpu = functools.partial(Chip, chips_per_host=8)
# Words that must all occur in the name of a GPU. The first match is used, so specific boards precede generic names.
# Network: one adapter per board, 200 Gbit/s (A100) or 400 Gbit/s. PCIe boards: PCIe 5.0 x16; NVL: bridged pairs.
# Integers: 64 lanes per multiprocessor (B200: 128) at the boost clock.
GPUS: tuple[tuple[tuple[str, ...], Chip], ...] = (
    (("B200",), _gpu("B200", 2250, 180, 8000, 900, network_gb_per_s=50, integer_tops=37)),
    (("H200",), _gpu("H200", 989, 141, 4800, 450, network_gb_per_s=50, integer_tops=17)),
    (("H100", "PCIE"), _gpu("H100 PCIe", 756, 80, 2000, 64, network_gb_per_s=50, integer_tops=13)),
    (("H100", "NVL"), _gpu("H100 NVL", 835, 94, 3900, 300, network_gb_per_s=50, integer_tops=15)),
    (("H100",), _gpu("H100 SXM", 989, 80, 3350, 450, network_gb_per_s=50, integer_tops=17)),
    (("A100", "40GB"), _gpu("A100 40 GB", 312, 40, 1555, 300, network_gb_per_s=25, integer_tops=10)),
    (("A100",), _gpu("A100 80 GB", 312, 80, 2039, 300, network_gb_per_s=25, integer_tops=10)),
)


def find_chip(device_kind: str) -> Chip | None:
    """Return the chip that JAX calls ``device_kind``, or None if it is not in the tables (a CPU, for example)."""
    if device_kind in TPUS:
        return TPUS[device_kind]
    words = set(device_kind.upper().replace("-", " ").split())
    # Slices of a board (MIG) have neither the speed nor the memory of the board.
    if "MIG" in words:
        return None
    return next((chip for required, chip in GPUS if words.issuperset(required)), None)


def mfu(flops_per_second: float, device_kind: str, num_devices: int) -> float | None:
    """Return the model FLOP utilization: ``flops_per_second`` as a fraction of the bf16 peak of all devices.

    Args:
        flops_per_second: floating-point operations per second of all devices, counted as in ``model.flops``.
        device_kind: ``jax.devices()[0].device_kind``.
        num_devices: number of JAX devices in use, over all hosts.

    Returns:
        The fraction (1.0 = peak), or None for hardware with an unknown peak.
    """
    chip = find_chip(device_kind)
    return flops_per_second / (chip.device_peak_flops * num_devices) if chip else None
