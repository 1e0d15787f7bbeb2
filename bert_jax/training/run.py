"""A run of training, top to bottom: workdir, mesh, model, state, data, compile, loop, end.

Pretraining and fine-tuning are jobs that it does.
"""

import time
from typing import Any

import jax

from bert_jax.config import differences, dump_yaml, to_dict
from bert_jax.io.files import write_whole
from bert_jax.io.folder_lock import FolderTaken
from bert_jax.io.storage import Location
from bert_jax.parallel import make_mesh
from bert_jax.parallel.hardware import mfu
from bert_jax.process import exits, hosts
from bert_jax.process.signals import Interrupted, StopRequest
from bert_jax.process.watchdog import PHASE_FACTOR, Watchdog
from bert_jax.tokenization import Tokenizer
from bert_jax.training.checkpoint.digest import json_digest
from bert_jax.training.checkpoint.restore import NoCheckpoint, Restored, restore_newest, saved_steps, set_aside
from bert_jax.training.checkpoint.writer import CheckpointWriter
from bert_jax.training.initial_model import RECORD, InitialModel
from bert_jax.training.job import Context, Job
from bert_jax.training.logging.meter import IntervalMeter
from bert_jax.training.logging.metrics_file import MetricsWriter
from bert_jax.training.logging.profiler import ProfilerWindow
from bert_jax.training.logging.progress import Progress
from bert_jax.training.loop import Recorder, run_steps
from bert_jax.training.prefetch import DevicePrefetcher
from bert_jax.training.programs import (
    explain_memory,
    state_advice,
    state_bytes,
    step_advice,
    step_bytes,
)
from bert_jax.training.spikes import LossGuard, RollBack
from bert_jax.training.state import TrainState, initial_state, parameter_count
from bert_jax.training.workdir import Logs, hold_workdir

# What a new phase may change of the model: it changes no parameter.
PHASE_MAY_CHANGE = {"model.hidden_dropout", "model.attention_dropout"}


def train(job: Job, *, workdir: Location, **inputs: Any) -> None:
    """Do ``job`` in ``workdir``, continuing what is there; see :func:`run` for ``inputs``.

    Raises ``ValueError`` for what the user can mend and ``exits.Stop`` when the run ends early.
    """
    rollback, stop = None, inputs["stop"]

    def check_stop() -> None:
        if stop:
            line = f"stopped while waiting for {workdir}, {stop.reason()}: run the same command to continue"
            raise exits.Stop(stop.exit_code, line)

    taken = "another run is using this workdir; wait for it or give another --workdir"
    with (
        hold_workdir(workdir, taken, lead=hosts.is_lead(), check_stop=check_stop) as logs,
        Watchdog(job.config.training.watchdog_seconds) as watchdog,
    ):
        watchdog.others = hosts.exchange_activity(lambda: watchdog.doing, watchdog.dump_if_stuck)
        while True:
            try:
                return run(job, workdir=workdir, logs=logs, watchdog=watchdog, rollback=rollback, **inputs)
            except RollBack as back:
                # Going back is a resume that leaves batches out. Without its traceback, which holds the state.
                rollback = back.with_traceback(None)
                inputs |= {"warm_start": None, "started": None}


def run(
    job: Job,
    *,
    workdir: Location,
    logs: Logs,
    stop: StopRequest,
    watchdog: Watchdog,
    rollback: RollBack | None = None,
    continue_from: Location | None = None,
    warm_start: InitialModel | None = None,
    allow_numeric_change: bool = False,
    host_timeout: float = 300.0,
    started: float | None = None,
) -> None:
    """The run itself, in a workdir that the lead process holds. ``stop`` is asked between steps; ``rollback`` is
    why the run before this one in the same process ended, and what batches are left out now.

    The parameters of ``warm_start`` are those of step 0; a run that has a checkpoint only repeats what it says.
    Every process of the run comes here with the same config; they wait ``host_timeout`` seconds for each other.
    """
    started = time.perf_counter() if started is None else started
    warm_start = warm_start or InitialModel()

    # --- Workdir ---------------------------------------------------------------------------------------------
    config, training, lead, folder = job.config, job.config.training, hosts.is_lead(), logs.folder
    hosts.require_shared(workdir, host_timeout)
    hosts.require_equal(
        "config", json_digest(to_dict(config)), "give every host the same command and recipe", host_timeout
    )
    if training.compilation_cache != "none":
        cache = training.compilation_cache or str(workdir.absolute() / "compilation_cache")
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

    # --- Mesh, model, optimizer ------------------------------------------------------------------------------
    mesh = make_mesh(config.mesh)
    programs = job.programs(mesh)
    model, optimizer, abstract = programs.model, programs.optimizer, programs.abstract

    # --- State: own checkpoint, else the phase before, else step 0 (read or drawn) ------------------------------
    messages: list[str] = [*warm_start.messages]
    if rollback is not None:
        set_aside(workdir, rollback.first_step)
    state_memory = "the model's state", state_advice(config), lambda: state_bytes(abstract)
    with explain_memory(*state_memory):
        restored = restore_newest(
            workdir, config, mesh, model, read_only=False, may_change=set(), report=messages.append
        )
    meter, guard = IntervalMeter(job.max_blank_records), LossGuard(training)
    phase_start = 0
    if restored is not None:
        state, first_step = restored.state, restored.step
        phase_start = restored.meta["phase_start"]
        messages += _resume_messages(restored, job, allow_numeric_change)
        meter.restore(restored.meta["meter"])
        if "guard" in restored.meta:  # older checkpoints have none
            guard.restore(restored.meta["guard"])
        job.restore(restored.meta.get("job", {}))
    elif warm_start.resumes:
        raise FolderTaken(f"{workdir}: its checkpoint is gone; another process ended the run meanwhile")
    elif rollback is not None:
        raise exits.Stop(exits.NON_FINITE, f"stopped: {rollback}; there is no checkpoint before it", agreed=True)
    elif continue_from is not None:
        with explain_memory(*state_memory):
            before = restore_newest(
                continue_from, config, mesh, model,
                read_only=True, may_change=PHASE_MAY_CHANGE, report=messages.append,
            )  # fmt: skip
        if before is None:
            raise NoCheckpoint(f"--continue_from {continue_from}: there is no checkpoint")
        _check_vocabulary(before, job.tokenizer)
        if before.step >= training.num_steps:
            raise ValueError(
                f"training.num_steps: {training.num_steps} is not above step {before.step}, where {continue_from} "
                "ended; it counts the steps of earlier phases too"
            )
        state, first_step = before.state, before.step
        phase_start = first_step
        messages.append(f"new phase from {continue_from} at step {first_step:,}")
    else:
        with explain_memory(*state_memory):
            start = initial_state(model, optimizer, abstract, training.seed, warm_start.params)
            state, first_step = jax.block_until_ready(start), 0
            del start
            warm_start.params.clear()

    # --- Data: before anything in the workdir changes, because data that differ are refused here ----------------
    if stop.reached():
        raise _stopped(stop, f"stopped at step {first_step:,}", workdir)
    complete = first_step >= training.num_steps or job.is_over(first_step)
    if complete and restored is not None and differences(restored.config, config):
        messages.append(f"the run is complete, it heeds {job.what_a_complete_run_heeds}")
    began = time.perf_counter()
    data = job.data(mesh, complete=complete)
    order = [job.tokenizer.fingerprint, data.order]
    hosts.require_equal(
        "data", json_digest(order), "let every host read the same shards and vocabulary", host_timeout
    )
    if data.batches is not None and restored is not None:
        data.batches.restore(restored.meta["data"])
        if rollback is not None:
            messages.append(guard.go_back(rollback, restored.step, data.batches))
    data_seconds = time.perf_counter() - began

    # --- Log -------------------------------------------------------------------------------------------------
    if lead and not complete:
        write_whole(folder / "config.yaml", dump_yaml(config))
        if warm_start.record:
            write_whole(folder / RECORD, warm_start.record)
        (folder / "report.html").unlink(missing_ok=True)  # an older one would pass for this run's
        job.write_tokenizer(folder)
    progress = Progress(training.num_steps, first_step, folder / "train.log", lead=lead)
    for message in messages:
        progress.line(message)
    writer = MetricsWriter(folder, first_step, lead=lead)
    context = Context(programs, workdir, folder, writer, progress, watchdog, stop, host_timeout)
    count = parameter_count(state.params, config.model.vocab_size)
    processes = f" in {hosts.count()} processes" if hosts.count() > 1 else ""
    progress.line(
        f"{count:,} parameters, {mesh.size} x {mesh.devices.flat[0].device_kind}{processes}, mesh "
        f"{'x'.join(f'{name}={size}' for name, size in mesh.shape.items())}, {config.execution.dtype}"
    )

    # A checkpoint whose evaluation could not be made gets it now, before anything is added to it.
    is_due = first_step == training.num_steps or (
        not complete and training.eval_interval > 0 and first_step % training.eval_interval == 0
    )
    is_made = writer.has(first_step, job.eval_split) and job.knows_evaluation(first_step)
    is_due = is_due and restored is not None and job.evaluates() and not is_made
    if hosts.broadcast_from_lead("evaluation_is_due", is_due, host_timeout):
        try:
            complete = job.evaluate(context, state, first_step) or complete
        except Interrupted:
            raise _stopped(stop, f"stopped at step {first_step:,}", workdir) from None

    if data.batches is None or complete:
        if hosts.broadcast_from_lead("report_is_due", not job.is_finished(folder), host_timeout):
            job.finish(context, state)
        progress.line(f"{workdir} is complete: {first_step:,} steps; see report.html there")
        writer.close()
        progress.close()
        return

    # --- Compile ---------------------------------------------------------------------------------------------
    batches = DevicePrefetcher(data.batches, mesh, data.host_share, data.prefetch)
    with watchdog.phase("compiling the training step"):
        programs.step_for(job.batch_shapes(mesh, first_step - phase_start))
        # Processes compile at their own pace; a collective would not wait as long as this does.
        hosts.barrier("compiled", PHASE_FACTOR * host_timeout)
    progress.line(
        f"start-up {began - started:.1f} s, data {data_seconds:.1f} s, "
        f"compiling the training step {programs.compile_seconds:.1f} s"
    )

    # --- Log, save ---------------------------------------------------------------------------------------------
    device_kind = mesh.devices.flat[0].device_kind
    flops = job.flops_per_sequence()

    def write(step: int, values: dict[str, Any]) -> None:
        rate = values.pop("sequences_per_second")
        values["mfu"] = mfu(rate * flops, device_kind, mesh.size) if flops else None
        context.write(step, values)

    checkpoints = CheckpointWriter(workdir, config, abstract, logs.upload)
    watchdog.is_writing = checkpoints.is_writing

    def save(state: TrainState, step: int) -> None:
        meta = {
            "data": batches.state,
            "phase_start": phase_start,
            "meter": meter.state(),
            "guard": guard.state(),
            "job": job.state(),
            "prng": config.execution.prng,
            "tokenizer": job.tokenizer.fingerprint,
            "parameters": count,
        }
        with explain_memory("saving the state", state_advice(config)):
            checkpoints.save(state, meta)

    def poll(step: int) -> None:
        checkpoints.poll()
        progress.tick(step)

    profiler = ProfilerWindow(folder / "profile", training.profile_steps)

    # --- Loop ------------------------------------------------------------------------------------------------
    try:
        with explain_memory("the training step", step_advice(config), lambda: step_bytes(programs.memory)):
            state = run_steps(
                state,
                first_step,
                training,
                step_for=programs.step_for,
                batches=batches,
                recorder=Recorder(training, meter, guard, programs.unpack, write, watchdog.beat),
                evaluate=lambda state, step: job.evaluate(context, state, step),
                save=save,
                settle=checkpoints.wait,
                poll=poll,
                profiler=profiler,
                stop=stop,
                watchdog=watchdog,
            )
    except exits.Stop as early:
        if early.code in (exits.INTERRUPTED, exits.PREEMPTED):
            with watchdog.phase("completing the last save"):
                checkpoints.wait()
            raise _stopped(stop, str(early), workdir) from None
        raise
    except RollBack:
        progress.close()
        raise
    finally:
        profiler.close()
        batches.close()
        # The save under way is completed on every way out.
        with watchdog.phase("completing the last save"):
            checkpoints.close()
        writer.close()

    # --- End -------------------------------------------------------------------------------------------------
    with watchdog.phase("writing the report"):
        job.finish(context, state)
    progress.close()


def _stopped(stop: StopRequest, what: str, workdir: Location) -> exits.Stop:
    saved = f"saved in {workdir}" if saved_steps(workdir) else "nothing to save yet"
    line = f"{what}, {stop.reason()}; {saved}: run the same command to continue"
    return exits.Stop(stop.exit_code, line, agreed=True)


def _resume_messages(restored: Restored, job: Job, allow_numeric_change: bool) -> list[str]:
    """What to say on resume. Raises ``ValueError`` for a change that would alter what is learned."""
    prng = job.config.execution.prng
    _check_vocabulary(restored, job.tokenizer)
    if restored.meta["prng"] != prng and not allow_numeric_change:
        raise ValueError(
            f"execution.prng: the checkpoint was made with {restored.meta['prng']}, now {prng}: "
            "dropout would draw other numbers; add --allow_numeric_change if that is meant"
        )
    changed = differences(restored.config, job.config)
    lines = [f"continuing at step {restored.step:,}"]
    return lines + [f"changed since the checkpoint: {line}" for line in changed]


def _check_vocabulary(restored: Restored, tokenizer: Tokenizer) -> None:
    if restored.meta["tokenizer"] != tokenizer.fingerprint:
        raise ValueError(
            "data.vocab: the checkpoint was trained with another vocabulary (fingerprint "
            f"{restored.meta['tokenizer'][:12]}, now {tokenizer.fingerprint[:12]}); give the same one"
        )
