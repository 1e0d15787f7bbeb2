"""Arrays of a checkpoint by name: saved from and read into host memory, without the optimizer state of a run."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from bert_jax.config import MeshConfig, RunConfig
from bert_jax.io.storage import Location
from bert_jax.model import BertModel, to_canonical
from bert_jax.model.canonical import path_name
from bert_jax.parallel import make_mesh
from bert_jax.training.checkpoint.digest import digest_lines, lines_digest
from bert_jax.training.checkpoint.restore import (
    Unfit,
    checkpoint_folder,
    fitting_config,
    nested,
    problem_of,
    raise_if_damaged,
    read_meta,
    restore_newest,
    saved_steps,
)

_GROUP_BYTES = 16 << 20


class Parameters(NamedTuple):
    """Parameters of a run, by canonical name."""

    step: int
    arrays: dict[str, np.ndarray]
    averaged: bool  # their moving average
    meta: dict[str, Any]


def read_parameters(
    workdir: Location, config: RunConfig, model: BertModel, *, average: bool | None, report: Callable[[str], None]
) -> Parameters | None:
    """Read the parameters of the newest sound checkpoint of a run, or their moving average, and nothing else.

    Checkpoints are proven by the digest of the part that is read. One without such a digest, of an earlier version,
    is read and verified whole. For one process; nothing is moved. Returns None when there is no checkpoint.

    Args:
        config: the config of the run.
        model: the model of the run; its mesh does not matter.
        average: True for the moving average, False for the parameters, None for the average where it is stored.
        report: receives a line for each damaged checkpoint.

    Raises:
        ValueError: the checkpoint is of another model, or has no moving average where one is required.
        NoCheckpoint: all checkpoints are damaged.
    """
    bad: list[str] = []
    for step in reversed(saved_steps(workdir)):
        folder, read = checkpoint_folder(workdir) / str(step), list[Parameters | None]()
        problem = problem_of(lambda: read.append(_read_part(folder, step, config, average)))  # noqa: B023
        if problem is None:
            return read[0] or _read_whole(workdir, config, model, average, report)
        bad.append(f"step {step}: {problem}")
        report(f"WARNING: checkpoint {step} is damaged ({problem})")
    raise_if_damaged(workdir, bad)
    return None


def _part(workdir: Location, has_average: bool, average: bool | None) -> str:
    if average and not has_average:
        raise Unfit(f"{workdir}: no moving average there; optimizer.ema_decay was 0")
    return "ema" if has_average and average is not False else "params"


def _read_part(folder: Location, step: int, config: RunConfig, average: bool | None) -> Parameters | None:
    meta = read_meta(folder)
    fitting_config(folder, step, meta, config, set())
    if "digests" not in meta:
        return None
    part, vocab_size = _part(folder, "ema" in meta["digests"], average), config.model.vocab_size
    arrays = read_arrays(folder / "state", f"{part}/")
    if arrays_digest(arrays, vocab_size) != meta["digests"][part]:
        raise ValueError("its values differ from their digest")
    named = {name.removeprefix(f"{part}/"): values for name, values in arrays.items()}
    return Parameters(step, to_canonical(named, vocab_size), part == "ema", meta)


def _read_whole(
    workdir: Location, config: RunConfig, model: BertModel, average: bool | None, report: Callable[[str], None]
) -> Parameters | None:
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    restored = restore_newest(workdir, config, mesh, model, read_only=True, may_change=set(), report=report)
    if restored is None:
        return None
    part = _part(workdir, restored.state.ema is not None, average)
    canonical = to_canonical(getattr(restored.state, part), config.model.vocab_size)
    # numpy copies: the device buffers may go
    arrays = {name: np.asarray(values) for name, values in canonical.items()}
    return Parameters(restored.step, arrays, part == "ema", restored.meta)


# ------------------------------------------------------------------ arrays


def flat(tree: Any) -> dict[str, Any]:
    """Leaves of a tree by their paths; the inverse of :func:`nested`."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def arrays_digest(arrays: Mapping[str, np.ndarray], vocab_size: int) -> str:
    """The digest of ``arrays``, computed with one of them on the device at a time."""
    lines: list[str] = []
    for name, values in arrays.items():
        lines += digest_lines({name: jax.device_put(values, may_alias=True)}, vocab_size)
    return lines_digest(lines)


def save_arrays(folder: Location, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an Orbax checkpoint of ``arrays`` from where they lie.

    Orbax by itself copies host arrays first and holds all compressed chunks until the end: together once more the
    size of the model, for 8% less on disk.
    """
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    tree = nested({name: np.asarray(values) for name, values in arrays.items()})
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(epath.Path(str(folder)), args=ocp.args.PyTreeSave(tree))


def read_arrays(
    folder: Location, prefix: str = "", check: Callable[[Mapping[str, Any]], None] = lambda shapes: None
) -> dict[str, np.ndarray]:
    """Read the arrays of an Orbax checkpoint whose names begin with ``prefix``, after ``check`` of their shapes.

    Some at a time: a whole restore holds much of them twice.
    """
    arrays: dict[str, np.ndarray] = {}
    path = epath.Path(str(folder))
    handler = ocp.PyTreeCheckpointHandler()
    stored = flat(handler.metadata(path).tree)
    stored = {name: array for name, array in stored.items() if name.startswith(prefix)}
    check(stored)
    for names in _groups({name: 4 * math.prod(array.shape) for name, array in stored.items()}):
        args = ocp.args.PyTreeRestore(
            item=nested({n: jax.ShapeDtypeStruct(stored[n].shape, stored[n].dtype) for n in names}),
            restore_args=nested({n: ocp.RestoreArgs(restore_type=np.ndarray) for n in names}),
            partial_restore=True,
        )
        arrays |= flat(handler.restore(path, args=args))
    handler.close()
    return arrays


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in groups of at most ``_GROUP_BYTES`` together, or of one that is larger."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > _GROUP_BYTES:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group
