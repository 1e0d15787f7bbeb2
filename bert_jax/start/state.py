"""The state from which a run starts: its newest checkpoint, the last checkpoint of an earlier phase, or step 0."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import ModelConfig, RunConfig, differences
from bert_jax.io.folder_lock import FolderTaken
from bert_jax.io.storage import Location
from bert_jax.model.embeddings import vocabulary_params
from bert_jax.process import exits
from bert_jax.start.fixed_options import OF_PHASE, PHASE_MAY_CHANGE, TABLE_ROWS, vocabulary_file
from bert_jax.start.start import Start
from bert_jax.tokenization import Tokenizer
from bert_jax.training.checkpoint.folder import checkpoint_folder, saved_steps
from bert_jax.training.checkpoint.restore import (
    NoCheckpoint,
    Restored,
    Unfit,
    fitting_config,
    read_meta,
    restore_newest,
    set_aside,
)
from bert_jax.training.job import Job
from bert_jax.training.launch import Launch
from bert_jax.training.logging.meter import IntervalMeter
from bert_jax.training.memory import device_bytes, explain_memory, state_advice
from bert_jax.training.programs import TrainPrograms
from bert_jax.training.spikes import LossGuard, RollBack
from bert_jax.training.start import FirstState
from bert_jax.training.state import POSITIONS, flat, initial_state, zero_carry


def first_state(
    start: Start, job: Job, programs: TrainPrograms, launch: Launch, rollback: RollBack | None,
    report: Callable[[str], None],
) -> FirstState:  # fmt: skip
    """Return the state from which a run starts: initialized, or restored from a checkpoint.

    Args:
        start: the start of the run if it has no checkpoint.
        rollback: if set, restore the newest checkpoint before ``rollback.first_step``.
        report: function that receives messages for the log.

    Raises:
        ValueError: the checkpoint does not fit the config, or a parameter at the start is NaN or infinite.
        exits.Stop: no checkpoint exists before ``rollback.first_step``.
    """
    if rollback is not None:
        set_aside(launch.workdir, rollback.first_step)
    memory = "the model's state", state_advice(job.config), lambda: device_bytes(programs.abstract)
    with explain_memory(*memory):
        restored = restore_newest(
            launch.workdir, job.config, programs.mesh, programs.model,
            read_only=False, may_change=set(), report=report, carry=programs.abstract.carry,
        )  # fmt: skip
        meter = IntervalMeter(job.max_blank_records, programs.objective.display.keys)
        guard = LossGuard(job.config.training)
        if restored is not None:
            return _resumed(restored, start, job, meter, guard, launch, report)
        if rollback is not None:
            advice = "lower optimizer.learning_rate, then run the command again"
            line = f"stopped: {rollback}; no earlier checkpoint exists; {advice}"
            raise exits.Stop(exits.NON_FINITE, line, agreed=True)
        if start.resumes:
            raise FolderTaken(f"{launch.workdir}: another process ended this run and deleted its checkpoint")
        if start.continue_from is not None:
            before = _end_of_phase(start, job, programs, report)
            return FirstState(before.state, before.step, before.step, meter, guard)
        params: Mapping[str, Any] = dict(start.params)
        start.params.clear()  # so that their host memory is free during the run
        _require_finite(params, "the initial model")
        params = {**vocabulary_params(job.config.model, job.tokenizer), **params}
        seed = job.config.training.seed
        state = initial_state(programs.model, programs.optimizer, programs.abstract, seed, params)
        return FirstState(jax.block_until_ready(state), 0, 0, meter, guard)


def _require_finite(params: Mapping[str, np.ndarray], source: str) -> None:
    """Raise ``ValueError``, which names the first parameter of ``source`` with NaN or infinite values."""
    for name, values in params.items():
        finite = np.isfinite(values) if isinstance(values, np.ndarray) else jnp.isfinite(values)
        if not bool(finite.all()):
            raise ValueError(f"{source}: {name} has NaN or infinite values; start from weights without them")


def _end_of_phase(start: Start, job: Job, programs: TrainPrograms, report: Callable[[str], None]) -> Restored:
    """Return the newest checkpoint of the earlier phase whose workdir is ``start.continue_from``."""
    folder, num_steps, how = start.continue_from, job.config.training.num_steps, start.extend_positions
    assert folder is not None
    has_table = job.config.model.position_embeddings == "learned"
    try:
        before = restore_newest(
            folder, job.config, programs.mesh, programs.model, read_only=True,
            may_change=PHASE_MAY_CHANGE | ({TABLE_ROWS} if how or not has_table else set()), report=report,
            convert=_extension(job.config.model, how) if how and has_table else None,
            carry=programs.abstract.carry,
        )  # fmt: skip
    except Unfit as error:
        remedy = "; --extend_positions extends the position table" if TABLE_ROWS in str(error) else ""
        raise ValueError(f"{error}{remedy}") from None
    if before is None:
        raise NoCheckpoint(f"--continue_from {folder}: has no checkpoint; use the workdir of a run that has one")
    _check_vocabulary(before.meta, job.tokenizer, folder)
    _require_finite(flat(before.state.params), f"--continue_from {folder}")
    _check_steps(before.step, num_steps, folder)
    report(f"starting a new phase from step {before.step:,} of {folder}")
    # Rows of the new phase do not follow those of the earlier one.
    return replace(before, state=replace(before.state, carry=zero_carry(before.state.carry)))


def check_checkpoint(
    workdir: Location, continue_from: Location | None, config: RunConfig, tokenizer: Tokenizer | None
) -> None:
    """Raise ``ValueError`` if the newest checkpoint of ``workdir`` or, without one, of ``continue_from`` does not
    fit the run. :func:`first_state` checks this too, but only when the data are prepared. A damaged checkpoint is
    left to it, and so is the vocabulary if ``tokenizer`` is None."""
    for folder, may_change in ((workdir, set[str]()), (continue_from, PHASE_MAY_CHANGE | {TABLE_ROWS})):
        if folder is None or not (steps := saved_steps(folder)):
            continue
        try:
            meta = read_meta(checkpoint_folder(folder) / str(steps[-1]))
            fitting_config(checkpoint_folder(folder) / str(steps[-1]), steps[-1], meta, config, may_change)
        except Unfit:
            raise
        except (OSError, ValueError, KeyError, TypeError):
            return
        if tokenizer is not None:
            _check_vocabulary(meta, tokenizer, folder)
        if folder is continue_from:
            _check_steps(steps[-1], config.training.num_steps, folder)
        return


def _check_steps(step: int, num_steps: int, folder: Location) -> None:
    if step >= num_steps:
        raise ValueError(
            f"training.num_steps: {num_steps} is not above {step}, the last step of {folder}; use a larger "
            "value, because training.num_steps includes the steps of earlier phases"
        )


def _extension(
    model: ModelConfig, how: Literal["tile", "interpolate"]
) -> Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]:
    """Return a function that extends the position table in the canonical arrays of a state to the rows of
    ``model``, and likewise its moments and its moving average."""
    rows, offset = model.max_position_embeddings, model.position_offset

    def extend(state: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            name: extend_positions(leaf, rows, offset, how)
            if name.endswith(POSITIONS) and len(leaf) < rows
            else leaf
            for name, leaf in state.items()
        }

    return extend


def extend_positions(table: Any, rows: int, offset: int, how: Literal["tile", "interpolate"]) -> Any:
    """Return a position table (numpy or jax, float32[positions, H]), or its moments, extended to ``rows`` rows.

    The first ``offset`` rows belong to no position and are copied. If ``how`` is "tile", the rows of the positions
    are repeated (Beltagy et al. 2020), so that the rows of the old positions are unchanged. If ``how`` is
    "interpolate", the rows of the positions are interpolated linearly: the row of the first position is unchanged,
    the new last position gets the row of the old last position, and all positions between them get other rows.
    """
    xp = np if isinstance(table, np.ndarray) else jnp
    before, positions = table[:offset], table[offset:]
    count = rows - offset
    assert count >= len(positions), "fewer rows than the table has"
    if how == "tile":
        return xp.concatenate([before, positions[np.arange(count) % len(positions)]])
    place = np.linspace(0, len(positions) - 1, count)
    low = np.minimum(place.astype(np.int64), len(positions) - 1)
    high = np.minimum(low + 1, len(positions) - 1)
    weight = (place - low)[:, None]
    stretched = positions[low] * (1 - weight) + positions[high] * weight
    return xp.concatenate([before, stretched.astype(np.float32)])


def _resumed(
    restored: Restored,
    start: Start,
    job: Job,
    meter: IntervalMeter,
    guard: LossGuard,
    launch: Launch,
    report: Callable[[str], None],
) -> FirstState:
    """Return the state of a run that continues from ``restored``, its own checkpoint.

    Raises ``ValueError`` if the vocabulary or the first step of the phase differs from that of the checkpoint, or
    if ``execution.prng`` differs without ``allow_numeric_change``.
    """
    prng = job.config.execution.prng
    _check_vocabulary(restored.meta, job.tokenizer, launch.workdir)
    _check_first_step(restored, job.config)
    if restored.meta["prng"] != prng and not start.allow_numeric_change:
        raise ValueError(
            f"execution.prng: {prng} is not allowed for a checkpoint with {restored.meta['prng']}, because dropout "
            "would use different random numbers; use the value of the checkpoint, or add --allow_numeric_change"
        )
    report(f"continuing at step {restored.step:,}")
    changed = tuple(differences(restored.config, job.config))
    for line in changed:
        report(f"changed since the checkpoint: {line}")
    meta = restored.meta
    meter.restore(meta["meter"])
    if "guard" in meta:  # older checkpoints lack this state
        guard.restore(meta["guard"])
    job.restore(meta.get("job", {}))
    return FirstState(restored.state, restored.step, meta["phase_start"], meter, guard, meta, changed)


def _check_first_step(restored: Restored, config: RunConfig) -> None:
    now, start = config.training.first_step, restored.meta["phase_start"]
    expected = restored.config.training.first_step or start
    counts = [key for key in OF_PHASE if operator.attrgetter(key)(config)]
    if counts and now not in (expected, start):
        raise ValueError(
            f"training.first_step: {now}, but {counts[0]} counts from the first step of this phase; set "
            f"training.first_step {expected}"
        )


def _check_vocabulary(meta: Mapping[str, Any], tokenizer: Tokenizer, workdir: Location) -> None:
    if meta["tokenizer"] != tokenizer.fingerprint:
        path = vocabulary_file(workdir)
        remedy = (
            f"use --data.vocab {path} with its data.lower_case" if path else "use the vocabulary of the checkpoint"
        )
        raise ValueError(
            f"data.vocab: the checkpoint in {workdir} was trained with another vocabulary or letter case "
            f"(fingerprint {meta['tokenizer'][:12]}, not {tokenizer.fingerprint[:12]}); {remedy}, and set another "
            "data.shards"
        )
