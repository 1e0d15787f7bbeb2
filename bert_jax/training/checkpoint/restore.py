"""Restoring and verifying checkpoints: state, data position and config as one unit.

Layout: ``WORKDIR/checkpoints/STEP/{state, meta, checksums.json}``. The tree on disk has the layout of the run that
wrote it (layers stacked or not, vocabulary padded or not). ``meta`` records this layout, and the tree is converted
to the layout of the current run. A checkpoint that fails a check is quarantined (moved to
``WORKDIR/damaged_checkpoints``, never deleted), and the previous checkpoint is used.
"""

import dataclasses
import errno
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from bert_jax.config import RunConfig, differences, from_dict
from bert_jax.io.errors import first_line
from bert_jax.io.storage import (
    Location,
    ObjectPath,
    StorageError,
    StorageUnavailable,
    is_transient,
    lacks_permission,
)
from bert_jax.model import from_canonical, to_canonical
from bert_jax.model.canonical import Params, clear_padding, path_name
from bert_jax.optim import make_optimizer
from bert_jax.process import hosts
from bert_jax.training.checkpoint.digest import check_files, json_digest, tree_digest
from bert_jax.training.checkpoint.folder import (
    DAMAGED,
    ROLLED_BACK,
    checkpoint_folder,
    finish_moves,
    move_aside,
    saved_steps,
)
from bert_jax.training.state import TrainState, abstract_state, flat, zero_carry

FORMAT = 1
META_FILE = "metadata"
# Maximum seconds that processes wait for each other while they check a checkpoint.
AGREEMENT_SECONDS = 900.0


# Function of the canonical arrays of a state.
Convert = Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]]


class NoCheckpoint(ValueError):
    """Raised if a required checkpoint is missing or unusable."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A verified checkpoint, converted to the layout of the current run."""

    step: int
    state: TrainState
    meta: dict[str, Any]
    config: RunConfig  # config of the run that saved the checkpoint


def nested(tree: Any) -> dict[str, Any]:
    """Convert a pytree with nodes of any type to nested dicts, the form in which checkpoints store it."""
    nodes: dict[str, Any] = unflatten_dict(flat(tree), sep="/")
    return nodes


def restore_newest(
    workdir: Location,
    config: RunConfig,
    mesh: Mesh,
    model: nn.Module,
    *,
    read_only: bool,
    may_change: set[str],
    report: Callable[[str], None],
    convert: Convert | None = None,
    carry: Params | None = None,
) -> Restored | None:
    """Restore the newest checkpoint of ``workdir`` that passes every check, in the layout of ``config``.

    ``convert`` changes the canonical arrays of the state (such as ``params/embeddings/layer_norm/scale``) after
    verification. ``carry`` is the ``carry`` of the abstract state of the run: stored arrays of other shapes are
    replaced by 0. Returns ``None`` for a run without checkpoints. A damaged checkpoint is quarantined (unless
    ``read_only``) and reported, and the previous checkpoint is tried. Must be called by every process of a run. All
    processes restore the same checkpoint: if one process rejects a checkpoint, all processes reject it.

    Raises:
        ValueError: the checkpoint was saved with another ``model`` section (except options in ``may_change``) or
            another optimizer.
        NoCheckpoint: all checkpoints are damaged.
    """
    if not read_only and hosts.is_lead() and isinstance(workdir, ObjectPath):
        finish_moves(workdir)
    steps = json.loads(hosts.all_gather_text("checkpoints", json.dumps(saved_steps(workdir)), AGREEMENT_SECONDS)[0])
    bad: list[str] = []
    for step in reversed(steps):
        restored = _verified(workdir, step, config, mesh, model, may_change, convert, carry)
        if isinstance(restored, Restored):
            return restored
        bad.append(f"step {step}: {restored}")
        where = ""
        if not read_only:
            where = f"; moved to {workdir.absolute() / DAMAGED}"
            if hosts.is_lead():
                where = f"; moved to {move_aside(workdir, step, DAMAGED)}"
        report(
            f"WARNING: checkpoint {step} is damaged ({restored}){where}; "
            "the previous checkpoint, if any, is tried next"
        )
    raise_if_damaged(workdir, bad)
    return None


def raise_if_damaged(workdir: Location, bad: list[str]) -> None:
    """Raise :class:`NoCheckpoint` if ``bad``, the list of damaged checkpoints, is not empty or if the run has
    quarantined checkpoints. Without this error, the run would silently start at step 0."""
    quarantine = workdir.absolute() / DAMAGED
    if bad or (quarantine.is_dir() and any(quarantine.iterdir())):
        raise NoCheckpoint(
            f"{workdir}: all checkpoints are damaged ({'; '.join(bad) or f'moved to {quarantine}'}); "
            "restore a checkpoint from a backup, or use another --workdir to start a new run"
        )


def _verified(
    workdir: Location, step: int, config: RunConfig, mesh: Mesh, model: nn.Module, may_change: set[str],
    convert: Convert | None, carry: Params | None,
) -> Restored | str:  # fmt: skip
    """Return the checkpoint of ``step`` or, if any process finds a problem, a description of the first problem."""
    folder = checkpoint_folder(workdir) / str(step)
    meta: dict[str, Any] = {}
    stored: Any = None
    state: Any = None

    def files() -> str | None:
        return check_files(folder, (hosts.index(), hosts.count()))

    def contents() -> None:
        nonlocal stored, state
        meta.update(read_meta(folder))
        stored = fitting_config(folder, step, meta, config, may_change)
        state = _read_state(folder, stored, mesh, model, meta.get("carried"))

    def values() -> str | None:
        same = tree_digest(state, stored.model.vocab_size) == meta["digest"]
        return None if same else "its values differ from their digest"

    for check in (files, contents, values):
        problem = _agreed(f"{check.__name__} of {step}", problem_of(check))
        if problem is not None:
            return problem
    # The digest does not cover the padding rows.
    state = clear_padding(state, stored.model.vocab_size)
    return Restored(step, _adapt(state, stored, config, mesh, model, convert, carry), meta, stored)


def problem_of(check: Callable[[], str | None]) -> str | None:
    """Call ``check`` and return the problem that it reports, or None if it reports none.

    If ``check`` raises an exception that a damaged checkpoint can cause, the text of the exception is returned.
    Other exceptions are raised.
    """
    try:
        return check()
    except (Unfit, PermissionError, StorageError):
        raise
    except Exception as error:  # Orbax and tensorstore raise six types, including bare Exception.
        if _is_shortage(error):
            raise  # the machine is the cause, so the checkpoint is not quarantined
        problem = first_line(error)
        if is_transient(error):
            raise StorageUnavailable(
                f"a checkpoint cannot be read: {problem}; run the same command again"
            ) from None
        if lacks_permission(error):
            raise StorageError(f"a checkpoint cannot be read: {problem}; check the credentials") from None
        return problem


def _agreed(what: str, problem: str | None) -> str | None:
    """Return the problem that the lowest-numbered process with a problem reports, or None if no process has one.

    Must be called by every process.
    """
    problems = hosts.all_gather_text(what, problem or "", AGREEMENT_SECONDS)
    if len(problems) == 1:
        return problem
    return next((f"process {i}: {text}" for i, text in enumerate(problems) if text), None)


def _is_shortage(error: Exception) -> bool:
    """Return True if the machine ran out of a resource (device memory, file handles) or has an I/O error."""
    shortage = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)
    return shortage or isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def set_aside(workdir: Location, first_step: int) -> None:
    """Move the checkpoints of step ``first_step`` and of all later steps to ``WORKDIR/rolled_back_checkpoints``.

    Must be called by every process.
    """
    if hosts.is_lead():
        for step in saved_steps(workdir):
            if step >= first_step:
                move_aside(workdir, step, ROLLED_BACK)
    hosts.barrier("set_aside", AGREEMENT_SECONDS)


class Unfit(ValueError):
    """Raised if an undamaged checkpoint does not fit the config."""


def read_meta(folder: Location) -> dict[str, Any]:
    """Return the JSON part of a checkpoint. Raises ``ValueError`` if its digest differs from the stored digest."""
    unit = json.loads((folder / "meta" / META_FILE).read_text())
    digest = unit.pop("json_digest", None)
    if digest != json_digest(unit):
        raise ValueError("its JSON part differs from its digest")
    return unit


def fitting_config(
    folder: Location, step: int, meta: Mapping[str, Any], config: RunConfig, may_change: set[str]
) -> RunConfig:
    """Return the config stored in a checkpoint. Raises :class:`Unfit` if a run with ``config`` cannot continue from
    the checkpoint."""
    if meta["step"] != step:
        raise ValueError(f"its JSON part is that of step {meta['step']}, not of step {step}")
    # The JSON part is verified, so errors from here on are not caused by damage.
    try:
        stored_config = from_dict(type(config), meta["config"])
    except ValueError as error:
        raise Unfit(
            f"{folder}: the checkpoint was saved by a version of bert_jax with different options ({error}); use "
            "that version or another --workdir"
        ) from None
    if meta["format"] != FORMAT:
        raise Unfit(f"{folder}: checkpoint format {meta['format']} is not supported; allowed: format {FORMAT}")
    changed = [line for line in differences(stored_config, config) if line.startswith("model.")]
    changed = [line for line in changed if line.partition(":")[0] not in may_change]
    old, new = stored_config.parameter_layout, config.parameter_layout
    changed += [f"{name}: {old[name]} -> {value}" for name, value in new.items() if old[name] != value]
    if config.stores_start_params and not stored_config.stores_start_params:
        changed.append("start parameters (regularization.mixout, optimizer.decay_to_start): missing -> required")
    if changed:
        raise Unfit(
            f"{folder}: the checkpoint was saved with another model (saved -> now): {'; '.join(changed)}; "
            "use the saved values or another --workdir"
        )
    return stored_config


def _read_state(
    folder: Location, stored: RunConfig, mesh: Mesh, model: nn.Module, carried: Mapping[str, Any] | None
) -> TrainState:
    """Read the stored state without verifying it. Each process reads only the shards for its own devices.

    ``carried``: :func:`carried_shapes` of the state; None: not recorded, by an earlier version.
    """
    import orbax.checkpoint as ocp  # takes 0.2 s, which models in other formats need not spend
    from etils import epath

    path = epath.Path(str(folder / "state"))
    handler = ocp.PyTreeCheckpointHandler()  # not a Checkpointer, which would wait for the other processes
    if carried is None:
        tree = handler.metadata(path).tree
    else:
        tree = nested({name: jax.ShapeDtypeStruct(*described) for name, described in carried.items()})
    stored_like = _abstract(stored, mesh, model, tree.get("carry"))
    item = nested(stored_like)
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    values = handler.restore(path, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args))
    handler.close()
    by_name = flat(values)
    return jax.tree_util.tree_map_with_path(lambda path, _: by_name[path_name(path)], stored_like)


def carried_shapes(state: TrainState) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and dtype of the carried arrays of ``state`` by name, as checkpoints record them: reading
    them from the arrays opens all arrays, and the objective of the run may not be known."""
    return {name: (x.shape, str(x.dtype)) for name, x in flat({"carry": state.carry}).items()}


def _abstract(config: RunConfig, mesh: Mesh, model: nn.Module, carried: Any) -> TrainState:
    model = model.clone(config=config.model, execution=config.execution, mesh=mesh)
    return abstract_state(config, model, make_optimizer(config.optimizer), mesh, carried)


def _adapt(
    state: TrainState, stored: RunConfig, config: RunConfig, mesh: Mesh, model: nn.Module, convert: Convert | None,
    carry: Params | None,
) -> TrainState:  # fmt: skip
    """Convert the stored state to the layout of ``config``, and add or remove the moving average if necessary."""
    like = _abstract(config, mesh, model, carry)
    layouts = {(each.execution.scan_layers, each.execution.vocab_multiple) for each in (stored, config)}
    if config.optimizer.ema_decay > 0 and state.ema is None:
        state = dataclasses.replace(state, ema=jax.tree.map(lambda x: x.copy(), state.params))
    elif config.optimizer.ema_decay == 0:
        state = dataclasses.replace(state, ema=None)
    if like.start is None:
        state = dataclasses.replace(state, start=None)
    state = dataclasses.replace(state, carry=_carry(flat(state.carry), like.carry))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    if convert is None and len(layouts) == 1 and len({jax.tree.structure(one) for one in (state, like)}) == 1:
        return jax.device_put(state, shardings)
    vocab_size = stored.model.vocab_size

    def adapt(tree: TrainState) -> TrainState:
        arrays = to_canonical(tree, vocab_size)
        adapted: TrainState = from_canonical(convert(arrays) if convert else arrays, like, vocab_size)
        return adapted

    try:
        return jax.jit(adapt, out_shardings=shardings)(state)
    except ValueError as error:
        raise Unfit(
            f"the checkpoint does not fit the configured optimizer or heads ({error}); use the options with which "
            "it was saved or another --workdir"
        ) from None


def _carry(stored: Mapping[str, jax.Array], like: Params | None) -> Params | None:
    """Return the ``stored`` arrays in the tree ``like``, or 0 if their names or shapes differ from it."""
    if {name: x.shape for name, x in stored.items()} != {name: x.shape for name, x in flat(like).items()}:
        return zero_carry(like)
    return jax.tree_util.tree_map_with_path(lambda path, _: stored[path_name(path)], like)
