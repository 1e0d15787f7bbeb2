"""Checkpoints: state, data position and config as one unit, written asynchronously, verified when read.

Layout: ``WORKDIR/checkpoints/STEP/{state, meta, checksums.json}``. The tree on disk has the running layout
(stacked or not, padded or not), which ``meta`` names; restoring converts. A checkpoint that fails a check is
moved to ``WORKDIR/damaged_checkpoints`` (renamed, never deleted) and the one before it is used.
"""

import dataclasses
import errno
import functools
import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from orbax.checkpoint import checkpoint_managers

from bert_jax.config import PretrainConfig, differences, from_dict, to_dict
from bert_jax.model import BertForPretraining, from_canonical, to_canonical
from bert_jax.model.layout import path_name
from bert_jax.optim import make_optimizer
from bert_jax.parallel import hosts
from bert_jax.training.integrity import check_files, json_digest, tree_digest, write_checksums
from bert_jax.training.state import TrainState, abstract_state

FORMAT = 1


class NoCheckpoint(ValueError):
    """There is no usable checkpoint where one is needed."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A verified checkpoint in the running layout."""

    step: int
    state: TrainState
    meta: dict[str, Any]
    config: PretrainConfig  # the config it was saved with


def checkpoint_folder(workdir: Path) -> Path:
    """Where the checkpoints of a run lie."""
    return workdir.absolute() / "checkpoints"


def saved_steps(workdir: Path) -> list[int]:
    """Committed steps, oldest first, from the directory itself."""
    folder = checkpoint_folder(workdir)
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.is_dir() and path.name.isdigit())


def _nested(tree: Any) -> dict[str, Any]:
    """A tree of any node types as nested dicts keyed by path, the form that is stored."""
    nested: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, last = path_name(path).split("/")
        node = nested
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return nested


@functools.cache
def _quiet_failed_saves() -> None:
    """Keep a failed save to the one exception that :class:`CheckpointWriter` raises.

    Orbax also logs it with its traceback from each thread, asyncio logs the tasks that are left over, and
    tensorstore prints a traceback for each write that comes back to the event loop closed meanwhile.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    hook = sys.unraisablehook

    def without_late_writes(unraisable: Any) -> None:
        if unraisable.exc_type is not RuntimeError or str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = without_late_writes


class CheckpointWriter:
    """Saves checkpoints of one run. ``close()`` waits for the last one to be complete."""

    def __init__(self, workdir: Path, config: PretrainConfig) -> None:
        _quiet_failed_saves()
        self.config = config
        self.folder = checkpoint_folder(workdir)
        training = config.training
        policies = [checkpoint_managers.LatestN(training.keep_checkpoints)]
        if training.keep_every:
            policies.append(checkpoint_managers.EveryNSteps(training.keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._unlisted: int | None = None
        self._lister: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, state: TrainState, meta: Mapping[str, Any]) -> None:
        """Start to save ``state`` and ``meta`` (JSON) under ``state.step``; returns once the values are copied,
        so the state may be donated. Raises what an earlier save failed with."""
        self.wait()
        step = int(state.step)
        unit = {
            "format": FORMAT,
            "step": step,
            "config": to_dict(self.config),
            "digest": tree_digest(state, self.config.model.vocab_size),
            **meta,
        }
        # A copy: it is written in the background, while the run goes on and changes what it was made from.
        unit = json.loads(json.dumps(unit))
        unit["json_digest"] = json_digest(unit)
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.PyTreeSave(_nested(state)), meta=ocp.args.JsonSave(unit)),
            force=True,
        )
        assert saved, f"checkpoint {step} was not taken"
        self._unlisted = step

    def poll(self) -> None:
        """List the files of a save that has been committed meanwhile. Cheap; call it at every step."""
        if self._unlisted is not None and not self._manager.is_saving_in_progress():
            step, self._unlisted = self._unlisted, None
            self._manager.check_for_errors()
            self._lister = threading.Thread(target=self._list, args=(step,), name="checkpoint-checksums")
            self._lister.start()

    def _list(self, step: int) -> None:
        try:
            if jax.process_index() == 0:
                write_checksums(self.folder / str(step))
        except BaseException as error:
            self._failure = error

    def is_saving(self) -> bool:
        """Whether a save is still being written or listed."""
        return self._unlisted is not None or (self._lister is not None and self._lister.is_alive())

    def wait(self) -> None:
        """Block until the save under way is committed and listed; raises what it failed with."""
        try:
            self._manager.wait_until_finished()
        except BaseException:
            self._unlisted = None  # not committed, so there is nothing to list
            raise
        self.poll()
        if self._lister is not None:
            self._lister.join()
            self._lister = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Finish the save under way and release the manager."""
        self.wait()
        self._manager.close()


def restore_newest(
    workdir: Path,
    config: PretrainConfig,
    mesh: Mesh,
    *,
    read_only: bool,
    may_change: set[str],
    report: Callable[[str], None],
) -> Restored | None:
    """The newest checkpoint of ``workdir`` that passes every check, in the layout of ``config``.

    Returns ``None`` when there is no checkpoint at all. Raises ``ValueError`` when it was saved with another
    ``model`` section (options in ``may_change`` aside) or another optimizer. A bad one is moved aside
    (with ``read_only``: left where it is), reported, and the one before it tried; when all are bad, raises
    :class:`NoCheckpoint`.
    """
    steps = saved_steps(workdir)
    bad: list[str] = []
    for step in reversed(steps):
        folder = checkpoint_folder(workdir) / str(step)
        try:
            problem = check_files(folder)
            if problem is None:
                return _restore(folder, step, config, mesh, may_change)
        except (_Unfit, PermissionError):
            raise
        except Exception as error:  # Orbax and tensorstore raise six types, bare Exception among them.
            if _is_shortage(error):
                raise  # the machine's fault, not the checkpoint's: nothing is moved
            problem = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        bad.append(f"step {step}: {problem}")
        where = "" if read_only else f"; moved to {_move_aside(workdir, step)}"
        report(f"WARNING: checkpoint {step} is damaged ({problem}){where}")
    aside = workdir.absolute() / "damaged_checkpoints"
    if bad or (aside.is_dir() and any(aside.iterdir())):
        raise NoCheckpoint(
            f"{workdir}: all checkpoints are damaged ({'; '.join(bad) or f'they lie in {aside}'}); "
            "restore one from a copy, or give another --workdir to start anew"
        )
    return None


def _is_shortage(error: Exception) -> bool:
    """Did the machine run out of something (device memory, file handles) rather than find damage?"""
    shortage = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)
    return shortage or isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def set_aside(workdir: Path, first_step: int) -> None:
    """Move the checkpoints of ``first_step`` and later to ``WORKDIR/rolled_back_checkpoints``: the run goes back to
    before them."""
    if hosts.is_lead():
        for step in saved_steps(workdir):
            if step >= first_step:
                _move_aside(workdir, step, "rolled_back_checkpoints")
    hosts.barrier("set_aside", 300)


def _move_aside(workdir: Path, step: int, where: str = "damaged_checkpoints") -> Path:
    target_folder = workdir.absolute() / where
    target_folder.mkdir(exist_ok=True)
    target = target_folder / str(step)
    count = 1
    while target.exists():
        count += 1
        target = target_folder / f"{step}.{count}"
    (checkpoint_folder(workdir) / str(step)).rename(target)
    return target


class _Unfit(ValueError):
    """The checkpoint is sound but does not fit this config."""


def read_meta(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint, checked against its own digest (``ValueError``)."""
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        unit = checkpointer.restore(folder / "meta")
    digest = unit.pop("json_digest", None)
    if digest != json_digest(unit):
        raise ValueError("its JSON part differs from its digest")
    return unit


def _restore(folder: Path, step: int, config: PretrainConfig, mesh: Mesh, may_change: set[str]) -> Restored:
    meta = read_meta(folder)
    if meta["step"] != step:
        raise ValueError(f"its JSON part belongs to step {meta['step']}")
    # From here on the JSON part is proven sound: what it says is not damage.
    try:
        stored_config = from_dict(PretrainConfig, meta["config"])
    except ValueError as error:
        raise _Unfit(f"{folder}: saved by a version with other options: {error}") from None
    if meta["format"] != FORMAT:
        raise _Unfit(f"{folder}: checkpoint format {meta['format']}, this version reads {FORMAT}")
    changed = [line for line in differences(stored_config, config) if line.startswith("model.")]
    changed = [line for line in changed if line.partition(":")[0] not in may_change]
    if changed or stored_config.has_nsp != config.has_nsp:
        changed = changed or ["data.next_sentence: the sentence-pair head comes or goes"]
        raise _Unfit(
            f"{folder}: the checkpoint was saved with another model (saved -> now): {'; '.join(changed)}; "
            "use the saved values or another --workdir"
        )
    stored_like = _abstract(stored_config, mesh)
    nested = _nested(stored_like)
    restore_args = ocp.checkpoint_utils.construct_restore_args(nested)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        values = checkpointer.restore(
            folder / "state", args=ocp.args.PyTreeRestore(item=nested, restore_args=restore_args)
        )
    by_name = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(values)}
    state = jax.tree_util.tree_map_with_path(lambda path, _: by_name[path_name(path)], stored_like)
    if tree_digest(state, stored_config.model.vocab_size) != meta["digest"]:
        raise ValueError("its values differ from their digest")
    return Restored(step, _adapt(state, stored_config, config, mesh), meta, stored_config)


def _abstract(config: PretrainConfig, mesh: Mesh) -> TrainState:
    model = BertForPretraining(config.model, config.execution, config.has_nsp, mesh)
    optimizer = make_optimizer(config.optimizer)
    return abstract_state(model, optimizer, mesh, with_ema=config.optimizer.ema_decay > 0)


def _adapt(state: TrainState, stored: PretrainConfig, config: PretrainConfig, mesh: Mesh) -> TrainState:
    """The stored state in the layout that ``config`` runs, its moving average started or dropped as asked."""
    like = _abstract(config, mesh)
    same_layout = (stored.execution.scan_layers, stored.execution.vocab_multiple) == (
        config.execution.scan_layers,
        config.execution.vocab_multiple,
    )
    if config.optimizer.ema_decay > 0 and state.ema is None:
        state = state.replace(ema=jax.tree.map(lambda x: x.copy(), state.params))
    elif config.optimizer.ema_decay == 0:
        state = state.replace(ema=None)
    if same_layout and jax.tree.structure(state) == jax.tree.structure(like):
        return state
    vocab_size = stored.model.vocab_size
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    try:
        convert = jax.jit(
            lambda tree: from_canonical(to_canonical(tree, vocab_size), like, vocab_size), out_shardings=shardings
        )
        return convert(state)
    except ValueError as error:
        raise _Unfit(f"the checkpoint does not fit the configured optimizer or heads: {error}") from None
