"""The device mesh, and transfers of batches and arrays between hosts and the mesh."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count, takewhile
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bert_jax.config import MeshConfig, TrainingConfig
from bert_jax.parallel.axes import MESH_AXES

Tree = TypeVar("Tree")


def mesh_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Return the sizes of the mesh axes for ``num_devices`` devices. Raises ``ValueError`` if they do not fit."""
    sizes = [config.data, config.fsdp, config.tensor]
    words = f"mesh: data {config.data} x fsdp {config.fsdp} x tensor {config.tensor}"
    if -1 in sizes:
        fixed = -math.prod(sizes)
        if num_devices % fixed:
            raise ValueError(
                f"{words} does not fit {num_devices} devices; use sizes whose product divides {num_devices}"
            )
        sizes[sizes.index(-1)] = num_devices // fixed
    if math.prod(sizes) != num_devices:
        raise ValueError(
            f"{words} needs {math.prod(sizes)} devices, but {num_devices} are available; set one size to -1 for "
            "the remaining devices"
        )
    return dict(zip(MESH_AXES, sizes, strict=True))


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of ``devices`` (default: all), which may belong to several slices. Raises ``ValueError`` if the
    mesh sizes do not fit."""
    devices = jax.devices() if devices is None else devices
    sizes = tuple(mesh_sizes(config, len(devices)).values())
    # Auto axes, because JAX 0.10 creates Explicit axes by default, and ordinary gathers raise errors with these.
    types = (AxisType.Auto,) * 3
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return jax.make_mesh(sizes, MESH_AXES, axis_types=types, devices=devices)
    outer = _slices_per_axis(sizes, slices)
    inner = tuple(size // number for size, number in zip(sizes, outer, strict=True))
    arranged = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    return Mesh(arranged, MESH_AXES, axis_types=types)


def _slices_per_axis(sizes: Sequence[int], slices: int) -> tuple[int, ...]:
    """Return the number of slices that each mesh axis spans. The first axes, which communicate least, span as many
    as they can: the network between slices (TPU slices, or GPUs without NVLink) is slower than inside one.
    """
    left, found = slices, list[int]()
    for size in sizes:
        found.append(math.gcd(left, size))
        left //= found[-1]
    return tuple(found)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of batch features: the rows are sharded over the mesh axes ``data`` and ``fsdp``."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def _next_allowed(size: int, unit: int, rows_of: Callable[[int], int]) -> int:
    """Return the smallest batch size from ``size`` on whose rows are a multiple of ``unit``; 0 if there is none.

    A number of packed rows is at most 32 times a power of two, so some units divide none; all others divide one
    below the limit of the search.
    """
    limit = 64 * max(rows_of(size), unit)
    sizes = takewhile(lambda n: rows_of(n) <= limit, count(size))
    return next((n for n in sizes if rows_of(n) % unit == 0), 0)


def check_batches(
    training: TrainingConfig, sizes: Mapping[str, int], rows_of: Callable[[int], int] = lambda sequences: sequences
) -> None:
    """Raise ``ValueError`` unless the rows of every batch can be divided equally over the mesh axes ``data`` and
    ``fsdp``.

    ``sizes`` maps the mesh axes to their sizes; ``rows_of`` maps batch sizes, in sequences, to numbers of rows.
    Microbatches, all batches of the ramp and evaluation batches are checked. The message names the nearest allowed
    batch sizes.
    """
    parts, steps = sizes["data"] * sizes["fsdp"], training.accumulation_steps
    batches = [("training.global_batch_size", training.global_batch_size, steps)]
    batches += [("training.batch_ramp", size, steps) for size in training.batch_ramp[1::2]]
    batches.append(("training.eval_batch_size", training.eval_batch_size or training.global_batch_size, 1))
    for name, size, microbatches in batches:
        unit, rows = parts * microbatches, rows_of(size)
        if rows % unit == 0:
            continue
        below = next((n for n in range(size, 0, -1) if rows_of(n) % unit == 0), 0)
        above = _next_allowed(size, unit, rows_of)
        would_do = " or ".join(f"{n:,}" for n in dict.fromkeys((below, above)) if n) or "another mesh"
        counts = [n for n in range(1, microbatches + 1) if rows % (parts * n) == 0]
        other = f", or training.accumulation_steps {counts[-1]}" if counts else ""
        micro = f" in {microbatches} microbatches" if microbatches > 1 else ""
        packed = f" ({rows:,} packed rows)" if rows != size else ""
        raise ValueError(
            f"{name}: {size:,}{packed}{micro} is not divisible by the {parts} parts (data x fsdp) of the mesh; "
            f"use {would_do}{other}, or raise mesh.tensor, which leaves fewer parts"
        )


def host_rows(mesh: Mesh, batch_size: int, process: int | None = None) -> list[int]:
    """Return the indices, in the global batch, of the rows that a process (None: this process) supplies.

    The sharding determines the indices; the process index does not.
    """
    process = jax.process_index() if process is None else process
    places: Mapping[Any, tuple[slice, ...]] = batch_sharding(mesh).devices_indices_map((batch_size,))
    own = [index[0] for device, index in places.items() if device.process_index == process]
    return sorted({row for rows in own for row in range(*rows.indices(batch_size))})


def to_global(batch: Mapping[str, np.ndarray], mesh: Mesh, batch_size: int) -> dict[str, jax.Array]:
    """Return one global array per feature. The rows in ``batch`` are copied to the devices of this host."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, rows, (batch_size, *rows.shape[1:]))
        for name, rows in batch.items()
    }


def to_host(tree: Tree) -> Tree:
    """Return the values of a tree of global arrays, as numpy arrays, on every process.

    Must be called by every process. Arrays that are sharded over processes are gathered one at a time, so the
    devices need extra memory for only one complete array.
    """

    def fetch(array: jax.Array) -> np.ndarray:
        if array.is_fully_addressable or array.is_fully_replicated:
            return np.asarray(array)
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

    return jax.tree.map(fetch, tree)
