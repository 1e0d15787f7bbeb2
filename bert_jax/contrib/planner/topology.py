"""Names of accelerator slices (``v5e:16x16``, Google Cloud's ``v5e-256``, ``h100:8``), and the devices of TPU
slices.

libtpu describes the devices of TPU slices that are not attached; programs can be compiled for these devices.
"""

import contextlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bert_jax.contrib.planner.cycles import even_grid
from bert_jax.contrib.planner.gpu_devices import gpu_devices
from bert_jax.io.errors import one_line
from bert_jax.parallel.hardware import GPUS, TPUS, Chip
from bert_jax.process.accelerators import keep_to_cpu


@dataclass(frozen=True)
class _Generation:
    chip: Chip
    # True if the number in Google Cloud's names counts TensorCores (two per chip), False if it counts chips.
    cloud_counts_cores: bool
    # Chips along each axis of the largest slice.
    pod: tuple[int, ...]


_GENERATIONS: dict[str, _Generation] = {
    "v2": _Generation(TPUS["TPU v2"], True, (16, 16)),
    "v3": _Generation(TPUS["TPU v3"], True, (32, 32)),
    "v4": _Generation(TPUS["TPU v4"], True, (16, 16, 16)),
    "v5e": _Generation(TPUS["TPU v5e"], False, (16, 16)),
    "v5p": _Generation(TPUS["TPU v5p"], True, (16, 16, 24)),
    "v6e": _Generation(TPUS["TPU v6e"], False, (16, 16)),
    "tpu7x": _Generation(TPUS["TPU7x"], True, (16, 24, 24)),
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p", "v6": "v6e", "v7x": "tpu7x", "ironwood": "tpu7x"}

_BOARDS: dict[str, Chip] = {
    "-".join(words).lower(): chip for words, chip in GPUS
} | {"a100-80gb": next(chip for words, chip in GPUS if words == ("A100",))}  # fmt: skip

EXAMPLES = (
    "TPU: v2, v3, v4, v5e, v5p, v6e, tpu7x with chips per axis (v5e:16x16, v5p:4x4x8) or Cloud's name (v5e-256, "
    f"v5p-512); GPU: {', '.join(sorted(_BOARDS))} with the number of boards (h100:8)"
)


@dataclass(frozen=True)
class Topology:
    """A slice of TPU chips or a number of GPUs."""

    # The name in messages and recipes: v5e:16x16 or h100:8.
    name: str
    chip: Chip
    # Chips along each axis; for GPUs the number of boards.
    shape: tuple[int, ...]
    # True for each axis that forms a ring; False for GPUs.
    wraps: tuple[bool, ...]

    @property
    def is_tpu(self) -> bool:
        """True for a TPU slice. Programs can be compiled for a TPU slice that is not attached."""
        return bool(self.chip.link_axes)

    @property
    def num_chips(self) -> int:
        """Number of TPU chips or GPU boards."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """Number of JAX devices."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def num_hosts(self) -> int:
        """Number of hosts if each host has the usual number of chips."""
        return -(-self.num_chips // self.chip.chips_per_host)


def parse_topology(text: str) -> Topology:
    """Return the slice named ``text``; raise ``ValueError`` with examples for an unknown name."""
    match = re.fullmatch(r"([a-z0-9]+(?:-(?:pcie|nvl|\d+gb))?)[:-](\d{1,18}(?:x\d{1,18})*)", text.strip().lower())
    if match:
        name, numbers = match.groups()
        name = _ALIASES.get(name, name)
        sizes = tuple(int(part) for part in numbers.split("x"))
        if name in _GENERATIONS and 0 not in sizes:
            is_count = len(sizes) == 1
            return _slice(text, name, _cloud_shape(text, name, sizes[0]) if is_count else sizes)
        if name in _BOARDS and len(sizes) == 1 and sizes[0]:
            chip = _BOARDS[name]
            if sizes[0] > chip.chips_per_host and sizes[0] % chip.chips_per_host:
                most = chip.chips_per_host
                raise ValueError(
                    f"--topology: {text!r}: a topology with more than {most} boards must consist of complete "
                    f"hosts; use a multiple of {most} boards"
                )
            return Topology(f"{name}:{sizes[0]}", chip, sizes, (False,))
    raise ValueError(f"--topology: {text!r} is not known; allowed: {EXAMPLES}")


def _slice(text: str, name: str, shape: tuple[int, ...]) -> Topology:
    generation = _GENERATIONS[name]
    pod = generation.pod
    if len(shape) != len(pod):
        example = f"{name}:{'x'.join('4' * len(pod))}"
        raise ValueError(
            f"--topology: {text!r}: {name} has {len(pod)} axes; give a size for each, such as {example}"
        )
    if any(size > most for size, most in zip(sorted(shape), pod, strict=True)):
        raise _too_large(text, name)
    # Rules of Google Cloud: in 2-D generations an axis as long as the pod's forms a ring. In 3-D generations,
    # switches connect whole 4x4x4 cubes, so that every axis forms a ring.
    if len(pod) == 2:
        wraps = tuple(size == pod[0] for size in shape)
    else:
        wraps = (all(size % 4 == 0 for size in shape),) * 3
    return Topology(f"{name}:{'x'.join(map(str, shape))}", generation.chip, shape, wraps)


def _too_large(text: str, name: str) -> ValueError:
    pod = "x".join(map(str, _GENERATIONS[name].pod))
    return ValueError(f"--topology: {text!r}: the largest slice of {name} has {pod} chips")


def _cloud_shape(text: str, name: str, number: int) -> tuple[int, ...]:
    """Return the shape of the Google Cloud slice whose name ends with ``number``, its number of chips or cores."""
    generation = _GENERATIONS[name]
    axes = len(generation.pod)
    chips = number // 2 if generation.cloud_counts_cores else number
    counted = "cores, two per chip" if generation.cloud_counts_cores else "chips"
    problem = ValueError(
        f"--topology: {text!r} does not determine a shape (the number counts {counted}); give the shape, such as "
        f"{name}:{'x'.join('4' * axes)}"
    )
    if chips < 1 or (generation.cloud_counts_cores and number % 2):
        raise problem
    if chips > math.prod(generation.pod):
        raise _too_large(text, name)
    if axes == 2:
        if chips & (chips - 1):  # not a power of two
            raise problem
        return even_grid(chips, 2)
    small = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
    if chips in small:
        return small[chips]
    if chips % 64:
        raise problem
    return tuple(4 * cubes for cubes in even_grid(chips // 64, 3))


def prepare_environment() -> None:
    """Set the environment variables with which libtpu describes slices that are not attached. Must be called before
    JAX creates its first device.

    JAX itself then runs on the CPU, so other programs can use the accelerators of the machine.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no Cloud metadata server exists here
    # No device is used, so several plans can run simultaneously.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    keep_to_cpu()


def tpu_devices(topology: Topology) -> list[Any]:
    """Return JAX devices that describe a TPU slice. Programs can be compiled for them, but not run on them.

    Raises ``ValueError`` if libtpu is not installed or does not support the shape.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"--topology {topology.name}: compiling for a TPU requires libtpu (Linux on x86-64); run pip install "
            "'bert_jax[tpu]'"
        )
    prepare_environment()
    import jax
    from jax.experimental import topologies

    shape = (*topology.shape, 1)[:3]
    host = tuple(min(size, most) for size, most in zip(shape, (2, 2, 1), strict=True))
    options: dict[str, Any] = {"chips_per_host_bounds": host, "wrap": (*topology.wraps, False)[:3]}
    if topology.name.startswith("v4"):
        options["chip_config_name"] = "megacore"  # both cores of a chip as one device, as on Cloud
    try:
        with _quiet():
            described = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"--topology {topology.name}: libtpu does not support this slice: {one_line(error)}"
        ) from None
    devices = list(described.devices)
    assert len(devices) == topology.num_devices, (topology, len(devices))
    return devices


def topology_devices(topology: Topology) -> list[Any]:
    """Return JAX devices that describe ``topology``. Raises ``ValueError`` if the compiler for them is not
    installed."""
    if topology.is_tpu:
        return tpu_devices(topology)
    prepare_environment()
    return gpu_devices(topology.chip, topology.num_chips)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard everything written to standard error, including the output of native code, because libtpu warns
    about every missing Cloud service."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
