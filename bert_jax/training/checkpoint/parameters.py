"""Reading the parameters of a run without its optimizer state; saving and reading named host arrays."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from bert_jax.config import MeshConfig, RunConfig
from bert_jax.io.storage import Location
from bert_jax.json_values import Json
from bert_jax.model import to_canonical
from bert_jax.model.canonical import canonical_leaves
from bert_jax.model.embeddings import vocabulary_params
from bert_jax.parallel import make_mesh
from bert_jax.tokenization import Tokenizer
from bert_jax.training.checkpoint.digest import digest_lines, lines_digest
from bert_jax.training.checkpoint.folder import COMMIT_FILE, checkpoint_folder, saved_steps
from bert_jax.training.checkpoint.restore import (
    Unfit,
    fitting_config,
    nested,
    problem_of,
    raise_if_damaged,
    read_meta,
    restore_newest,
)
from bert_jax.training.state import flat, initial_params

# Approximate number of bytes that are read at a time; at least one array is read.
_GROUP_BYTES = 16 << 20


class Parameters(NamedTuple):
    """Parameters of a run, or their moving average, by canonical name."""

    step: int
    arrays: dict[str, np.ndarray]
    averaged: bool  # True if the arrays are the moving average
    meta: dict[str, Json]


def read_parameters(
    workdir: Location,
    config: RunConfig,
    model: nn.Module,
    *,
    average: bool | None,
    report: Callable[[str], None],
    step: int | None = None,
) -> Parameters | None:
    """Read only the parameters, or their moving average, of the newest undamaged checkpoint of a run, or of the
    checkpoint of ``step``.

    Only these arrays are verified, against a separate digest. A checkpoint without this digest, saved by an earlier
    version of bert_jax, is read and verified completely. Damaged checkpoints are not moved. Returns None for a run
    without checkpoints. This function does not support several processes.

    Args:
        config: the config of the run.
        model: the model of the run; its mesh is ignored.
        average: True to read the moving average, False to read the parameters, None to read the moving average if
            the checkpoint contains it and the parameters otherwise.
        report: function that receives a line for each damaged checkpoint.

    Raises:
        ValueError: the checkpoint was saved with another model, or lacks the required moving average; the run has
            no checkpoint of ``step``, or an older version of bert_jax saved it.
        NoCheckpoint: all checkpoints are damaged.
    """
    bad: list[str] = []
    steps = saved_steps(workdir)
    if step is not None:
        return _read_step(workdir, step, steps, config, average)
    for step in reversed(steps):
        folder, read = checkpoint_folder(workdir) / str(step), list[Parameters | None]()
        problem = problem_of(lambda: read.append(_read_part(folder, step, config, average)))  # noqa: B023
        if problem is None:
            return read[0] or _read_whole(workdir, config, model, average, report)
        bad.append(f"step {step}: {problem}")
        report(f"WARNING: checkpoint {step} is damaged ({problem}); the previous checkpoint, if any, is tried next")
    raise_if_damaged(workdir, bad)
    return None


def _read_step(
    workdir: Location, step: int, steps: list[int], config: RunConfig, average: bool | None
) -> Parameters:
    if step not in steps:
        has = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{workdir}: no checkpoint of step {step}; its checkpoints: {has}")
    read = _read_part(checkpoint_folder(workdir) / str(step), step, config, average)
    if read is None:
        raise ValueError(f"{workdir}: an older version of bert_jax saved step {step}; only its newest can be read")
    return read


def random_parameters(config: RunConfig, model: nn.Module, tokenizer: Tokenizer) -> Parameters:
    """Return the randomly initialized parameters of step 0 of a run that starts from no other model. The last bits
    can differ from those of the run, because they depend on its devices."""
    fixed = {name: jnp.asarray(x) for name, x in vocabulary_params(config.model, tokenizer).items()}
    params = jax.jit(lambda fixed: initial_params(model, config.training.seed, fixed))(fixed)
    arrays = to_canonical(params, config.model.vocab_size)
    meta: dict[str, Json] = {"tokenizer": tokenizer.fingerprint}
    return Parameters(0, {name: np.asarray(values) for name, values in arrays.items()}, False, meta)


def _part(workdir: Location, has_average: bool, average: bool | None) -> str:
    if average and not has_average:
        raise Unfit(f"{workdir}: has no moving average, because optimizer.ema_decay was 0; omit --ema")
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
    return Parameters(
        step, {name: np.asarray(x) for name, x in canonical_leaves(named, vocab_size)}, part == "ema", meta
    )


def _read_whole(
    workdir: Location, config: RunConfig, model: nn.Module, average: bool | None, report: Callable[[str], None]
) -> Parameters | None:
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    restored = restore_newest(workdir, config, mesh, model, read_only=True, may_change=set(), report=report)
    if restored is None:
        return None
    part = _part(workdir, restored.state.ema is not None, average)
    canonical = to_canonical(getattr(restored.state, part), config.model.vocab_size)
    # Copied to the host, because the device buffers may be freed.
    arrays = {name: np.asarray(values) for name, values in canonical.items()}
    return Parameters(restored.step, arrays, part == "ema", restored.meta)


# ------------------------------------------------------------------ arrays


def arrays_digest(arrays: Mapping[str, np.ndarray], vocab_size: int) -> str:
    """Return the digest of ``arrays`` without the padding rows of the vocabulary.

    Only one array at a time is copied to the device.
    """
    lines: list[str] = []
    for name, values in arrays.items():
        lines += digest_lines({name: jax.device_put(values, may_alias=True)}, vocab_size)
    return lines_digest(lines)


def save_arrays(folder: Location, arrays: Mapping[str, np.ndarray]) -> None:
    """Write ``arrays`` to an Orbax checkpoint without copying or compressing them.

    By default, Orbax copies host arrays and keeps all compressed chunks in memory until the save ends. The copy
    would need as much memory as the model, and compression would reduce the size on disk by only 8%.
    """
    import orbax.checkpoint as ocp  # takes 0.2 s, which models in other formats need not spend
    from etils import epath

    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    tree = nested({name: np.asarray(values) for name, values in arrays.items()})
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(epath.Path(str(folder)), args=ocp.args.PyTreeSave(tree))
    if (folder / COMMIT_FILE).is_file():  # Orbax writes the path, which may be private
        (folder / COMMIT_FILE).write_text("complete\n")


def read_arrays(
    folder: Location, prefix: str = "", check: Callable[[Mapping[str, Any]], None] = lambda shapes: None
) -> dict[str, np.ndarray]:
    """Read the arrays whose names begin with ``prefix`` from an Orbax checkpoint.

    Before any array is read, ``check`` is called with a mapping from array names to metadata (shape, dtype);
    ``check`` may raise. The arrays are read in groups, because Orbax needs memory for two copies of most arrays
    that one call restores.
    """
    import orbax.checkpoint as ocp  # see save_arrays
    from etils import epath

    arrays: dict[str, np.ndarray] = {}
    path = epath.Path(str(folder))
    handler = ocp.PyTreeCheckpointHandler()
    stored = flat(handler.metadata(path).tree)
    stored = {name: array for name, array in stored.items() if name.startswith(prefix)}
    check(stored)
    ends = itertools.accumulate(4 * math.prod(array.shape) for array in stored.values())
    for _, group in itertools.groupby(zip(stored, ends, strict=True), key=lambda item: item[1] // _GROUP_BYTES):
        names = [name for name, _ in group]
        args = ocp.args.PyTreeRestore(
            item=nested({n: jax.ShapeDtypeStruct(stored[n].shape, stored[n].dtype) for n in names}),
            restore_args=nested({n: ocp.RestoreArgs(restore_type=np.ndarray) for n in names}),
            partial_restore=True,
        )
        arrays |= flat(handler.restore(path, args=args))
    handler.close()
    return arrays
