"""Peak speed and memory of the accelerators that this software is used on.

Figures are dense bf16 peaks and memory sizes from the vendors' public data sheets, per chip (TPU) or per board
(GPU). ``jax.devices()[0].device_kind`` names the hardware; on TPU v2, v3 and TPU7x one chip shows up as two
jax devices, so a device has half of the chip's figures there.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator."""

    name: str
    # Dense bf16 TFLOP/s of the whole chip.
    peak_tflops: float
    # Memory of the whole chip, decimal GB.
    memory_gb: float
    # jax devices that one chip shows up as.
    devices_per_chip: int = 1

    @property
    def device_peak_flops(self) -> float:
        """bf16 operations per second of one jax device."""
        return self.peak_tflops * 1e12 / self.devices_per_chip

    @property
    def device_memory_bytes(self) -> int:
        """Memory of one jax device."""
        return int(self.memory_gb * 1e9) // self.devices_per_chip


_V5E = Chip("TPU v5e", 197, 16)
_V5P = Chip("TPU v5p", 459, 95)
_V6E = Chip("TPU v6e", 918, 32)

# jax's device_kind of each TPU, exactly.
TPUS: dict[str, Chip] = {
    "TPU v2": Chip("TPU v2", 46, 16, devices_per_chip=2),
    "TPU v3": Chip("TPU v3", 123, 32, devices_per_chip=2),
    "TPU v4": Chip("TPU v4", 275, 32),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": Chip("TPU7x", 2307, 192, devices_per_chip=2),
}

# Words that must all be in a GPU's name; the first match wins, so special boards come before the plain name.
GPUS: tuple[tuple[tuple[str, ...], Chip], ...] = (
    (("B200",), Chip("B200", 2250, 180)),
    (("H200",), Chip("H200", 989, 141)),
    (("H100", "PCIE"), Chip("H100 PCIe", 756, 80)),
    (("H100", "NVL"), Chip("H100 NVL", 835, 94)),
    (("H100",), Chip("H100 SXM", 989, 80)),
    (("A100", "40GB"), Chip("A100 40 GB", 312, 40)),
    (("A100",), Chip("A100 80 GB", 312, 80)),
)


def find_chip(device_kind: str) -> Chip | None:
    """The chip behind jax's ``device_kind``, or None when it is not in the table (every CPU, for instance)."""
    if device_kind in TPUS:
        return TPUS[device_kind]
    words = set(device_kind.upper().replace("-", " ").split())
    # Slices of a board (MIG) have neither its speed nor its memory.
    if "MIG" in words:
        return None
    return next((chip for required, chip in GPUS if words.issuperset(required)), None)


def mfu(flops_per_second: float, device_kind: str, num_devices: int) -> float | None:
    """Model FLOP utilisation: the share of the devices' bf16 peak that ``flops_per_second`` is.

    Args:
        flops_per_second: operations per second over all devices, by the formula of ``planner.flops``.
        device_kind: ``jax.devices()[0].device_kind``.
        num_devices: jax devices that take part, over all hosts.

    Returns:
        A share (1.0 = peak), or None for hardware whose peak is not known.
    """
    chip = find_chip(device_kind)
    if chip is None:
        return None
    return flops_per_second / (chip.device_peak_flops * num_devices)
