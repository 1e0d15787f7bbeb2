"""Pretraining, top to bottom: workdir, mesh, model, state, data, compile, loop, report."""

import shutil
import time
from pathlib import Path
from typing import Any

import jax

from bert_jax import exits
from bert_jax.batch import PretrainSource
from bert_jax.config import PretrainConfig, differences, dump_yaml, to_dict
from bert_jax.parallel import host_rows, hosts, make_mesh, to_host
from bert_jax.planner.flops import training_flops_per_sequence
from bert_jax.planner.hardware import mfu
from bert_jax.storage import Location, write_whole
from bert_jax.tokenization import Tokenizer
from bert_jax.training.checkpoint import (
    NoCheckpoint,
    Restored,
    restore_newest,
    saved_steps,
    set_aside,
)
from bert_jax.training.checkpoint_writer import CheckpointWriter
from bert_jax.training.compile import (
    OutOfMemory,
    explain_memory,
    state_advice,
    state_bytes,
    step_advice,
    step_bytes,
    train_programs,
)
from bert_jax.training.evaluate import evaluate_held_out
from bert_jax.training.fill import FilledText, fill_some
from bert_jax.training.finish import finish
from bert_jax.training.integrity import json_digest
from bert_jax.training.loop import Recorder, run_steps
from bert_jax.training.meter import IntervalMeter
from bert_jax.training.prefetch import DevicePrefetcher
from bert_jax.training.profiler import ProfilerWindow
from bert_jax.training.progress import Progress
from bert_jax.training.signals import Interrupted, StopRequest
from bert_jax.training.spikes import LossGuard, RollBack
from bert_jax.training.state import TrainState, initial_state, parameter_count
from bert_jax.training.step import make_eval_step
from bert_jax.training.warm_start import RECORD, WarmStart
from bert_jax.training.watchdog import PHASE_FACTOR, Watchdog
from bert_jax.training.workdir import Logs, hold_workdir
from bert_jax.training.writers import MetricsWriter

# What a new phase may change of the model: it changes no parameter.
PHASE_MAY_CHANGE = {"model.hidden_dropout", "model.attention_dropout"}


def pretrain(config: PretrainConfig, *, workdir: Location, **inputs: Any) -> None:
    """Train as ``config`` says in ``workdir``, continuing what is there; see :func:`run` for ``inputs``.

    Raises ``ValueError`` for what the user can mend and ``exits.Stop`` when the run ends early.
    """
    rollback, stop = None, inputs["stop"]

    def check_stop() -> None:
        if stop:
            line = f"stopped while waiting for {workdir}, {stop.told()}: run the same command to continue"
            raise exits.Stop(stop.exit_code, line)

    taken = "another run is using this workdir; wait for it or give another --workdir"
    with (
        hold_workdir(workdir, taken, lead=hosts.is_lead(), check_stop=check_stop) as logs,
        Watchdog(config.training.watchdog_seconds) as watchdog,
    ):
        watchdog.others = hosts.peers_doing(lambda: watchdog.doing, watchdog.dump_if_stuck)
        while True:
            try:
                return run(config, workdir=workdir, logs=logs, watchdog=watchdog, rollback=rollback, **inputs)
            except RollBack as back:
                # Going back is a resume that leaves batches out. Without its traceback, which holds the state.
                rollback = back.with_traceback(None)
                inputs |= {"warm_start": None, "started": None}


def run(
    config: PretrainConfig,
    *,
    workdir: Location,
    logs: Logs,
    source: PretrainSource,
    tokenizer: Tokenizer,
    vocabulary: Path,
    stop: StopRequest,
    watchdog: Watchdog,
    rollback: RollBack | None = None,
    continue_from: Location | None = None,
    warm_start: WarmStart | None = None,
    allow_numeric_change: bool = False,
    host_timeout: float = 300.0,
    started: float | None = None,
) -> None:
    """The run itself, in a workdir that the lead process holds. ``stop`` is asked between steps; ``rollback`` is
    why the run before this one in the same process ended, and what batches are left out now.

    ``vocabulary``, the file of ``tokenizer``, is copied beside the checkpoints, so the workdir is whole. The
    parameters of ``warm_start`` are those of step 0; a run that has a checkpoint only repeats what it says.
    Every process of the run comes here with the same config; they wait ``host_timeout`` seconds for each other.
    """
    started = time.perf_counter() if started is None else started
    warm_start = warm_start or WarmStart()

    # --- Workdir ---------------------------------------------------------------------------------------------
    training, lead, folder = config.training, hosts.is_lead(), logs.folder
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
    programs = train_programs(config, mesh)
    model, optimizer, abstract = programs.model, programs.optimizer, programs.abstract
    eval_batch_size = training.eval_batch_size or training.global_batch_size

    # --- State: own checkpoint, else the phase before, else step 0 (read or drawn) ------------------------------
    messages: list[str] = [*warm_start.messages]
    if rollback is not None:
        set_aside(workdir, rollback.first_step)
    state_memory = "the model's state", state_advice(config), lambda: state_bytes(abstract)
    with explain_memory(*state_memory):
        restored = restore_newest(workdir, config, mesh, read_only=False, may_change=set(), report=messages.append)
    meter, guard = IntervalMeter(config.data.max_blank_records), LossGuard(training)
    phase_start = 0
    if restored is not None:
        state, first_step = restored.state, restored.step
        phase_start = restored.meta["phase_start"]
        messages += _resume_messages(restored, config, tokenizer, allow_numeric_change)
        meter.restore(restored.meta["meter"])
        if "guard" in restored.meta:  # older checkpoints have none
            guard.restore(restored.meta["guard"])
    elif rollback is not None:
        raise exits.Stop(exits.NON_FINITE, f"stopped: {rollback}; there is no checkpoint before it", agreed=True)
    elif continue_from is not None:
        with explain_memory(*state_memory):
            before = restore_newest(
                continue_from, config, mesh, read_only=True, may_change=PHASE_MAY_CHANGE, report=messages.append
            )
        if before is None:
            raise NoCheckpoint(f"--continue_from {continue_from}: there is no checkpoint")
        _check_vocabulary(before, tokenizer)
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
    complete = first_step >= training.num_steps
    began = time.perf_counter()
    rows = host_rows(mesh, training.global_batch_size)
    eval_rows = host_rows(mesh, eval_batch_size)
    evaluates = source.held_out(eval_batch_size, eval_rows, 1) is not None
    iterator = None if complete else source.train(rows)
    order = [tokenizer.fingerprint, evaluates, {} if iterator is None else iterator.state()]
    hosts.require_equal(
        "data", json_digest(order), "let every host read the same shards and vocabulary", host_timeout
    )
    if iterator is not None and restored is not None:
        iterator.restore(restored.meta["data"])
        if rollback is not None:
            messages.append(guard.go_back(rollback, restored.step, iterator))
    data_seconds = time.perf_counter() - began

    # --- Log -------------------------------------------------------------------------------------------------
    if lead and not complete:
        write_whole(folder / "config.yaml", dump_yaml(config))
        if warm_start.record:
            write_whole(folder / RECORD, warm_start.record)
        (folder / "report.html").unlink(missing_ok=True)  # an older one would pass for this run's
        if vocabulary.resolve() != (folder / vocabulary.name).resolve():
            shutil.copyfile(vocabulary, folder / vocabulary.name)
    progress = Progress(training.num_steps, first_step, folder / "train.log", lead=lead)
    for message in messages:
        progress.line(message)
    writer = MetricsWriter(folder, first_step, lead=lead)
    count = parameter_count(state.params, config.model.vocab_size)
    processes = f" in {hosts.count()} processes" if hosts.count() > 1 else ""
    progress.line(
        f"{count:,} parameters, {mesh.size} x {mesh.devices.flat[0].device_kind}{processes}, mesh "
        f"{'x'.join(f'{name}={size}' for name, size in mesh.shape.items())}, {config.execution.dtype}"
    )

    def report() -> None:
        """Every process calls it, because the lead may hold only a part of the parameters."""
        batch = next(source.held_out(eval_batch_size, eval_rows, 1) or iter(()), None)
        filled: list[FilledText] = []
        try:
            if batch is not None:
                with explain_memory("filling masks", "the report goes without them"):
                    params = to_host(state.params if state.ema is None else state.ema)
                    filled = fill_some(config, params, tokenizer, batch) if lead else []
        except OutOfMemory as shortage:
            progress.line(str(shortage))
        for line in finish(folder, filled, workdir) if lead else []:
            progress.line(line)

    # --- Evaluate --------------------------------------------------------------------------------------------
    eval_step = watchdog.first_call(jax.jit(make_eval_step(model)), "compiling the evaluation step")

    def evaluate(state: TrainState, step: int) -> None:
        last = step == training.num_steps
        held_out = source.held_out(eval_batch_size, eval_rows, 0 if last else training.eval_batches)
        if held_out is None:
            return
        advice = f"lower training.eval_batch_size (now {eval_batch_size})"

        def before_batch() -> None:
            watchdog.beat(f"evaluating at step {step:,}")
            if stop.reached():
                raise Interrupted

        with explain_memory("an evaluation step", advice):
            params = programs.gather(state.params if state.ema is None else state.ema)
            values = evaluate_held_out(
                held_out, eval_step, params, mesh, eval_batch_size, before_batch, host_timeout
            )
        if last:
            with watchdog.phase("counting the unigram distribution"):
                if lead:
                    values["unigram_cross_entropy"] = source.unigram_cross_entropy()
                hosts.barrier("counted", PHASE_FACTOR * host_timeout)
        writer.write(step, {"split": "eval", **values})
        progress.update(step, {"split": "eval", **values})

    # A checkpoint whose evaluation could not be made gets it now, before anything is added to it.
    is_due = first_step == training.num_steps or (
        not complete and training.eval_interval > 0 and first_step % training.eval_interval == 0
    )
    is_due = is_due and restored is not None and not writer.has(first_step, "eval")
    if hosts.lead_says("evaluation_is_due", is_due, host_timeout):
        try:
            evaluate(state, first_step)
        except Interrupted:
            raise _stopped(stop, f"stopped at step {first_step:,}", workdir) from None

    if iterator is None:
        if hosts.lead_says("report_is_due", not (folder / "report.html").exists(), host_timeout):
            report()
        progress.line(f"{workdir} is complete: {first_step:,} steps; see report.html there")
        writer.close()
        progress.close()
        return

    # --- Compile ---------------------------------------------------------------------------------------------
    batches = DevicePrefetcher(iterator, mesh, len(rows) / training.global_batch_size, config.data.prefetch)
    with watchdog.phase("compiling the training step"):
        programs.step_for(_batch_size_at(config, first_step - phase_start))
        # Processes compile at their own pace; a collective would not wait as long as this does.
        hosts.barrier("compiled", PHASE_FACTOR * host_timeout)
    progress.line(
        f"start-up {began - started:.1f} s, data {data_seconds:.1f} s, "
        f"compiling the training step {programs.compile_seconds:.1f} s"
    )

    # --- Log, save ---------------------------------------------------------------------------------------------
    device_kind = mesh.devices.flat[0].device_kind
    flops = training_flops_per_sequence(
        config.model,
        seq_length=config.data.seq_length,
        max_predictions=config.data.max_predictions,
        has_nsp=config.has_nsp,
    )

    def write(step: int, values: dict[str, Any]) -> None:
        rate = values.pop("sequences_per_second")
        values["mfu"] = mfu(rate * flops, device_kind, mesh.size)
        writer.write(step, values)
        progress.update(step, values)

    checkpoints = CheckpointWriter(workdir, config, abstract, logs.upload)

    def save(state: TrainState, step: int) -> None:
        meta = {
            "data": batches.state,
            "phase_start": phase_start,
            "meter": meter.state(),
            "guard": guard.state(),
            "prng": config.execution.prng,
            "tokenizer": tokenizer.fingerprint,
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
                evaluate=evaluate,
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

    # --- Report ----------------------------------------------------------------------------------------------
    with watchdog.phase("writing the report"):
        report()
    progress.close()


def _stopped(stop: StopRequest, what: str, workdir: Location) -> exits.Stop:
    saved = f"saved in {workdir}" if saved_steps(workdir) else "nothing to save yet"
    line = f"{what}, {stop.told()}; {saved}: run the same command to continue"
    return exits.Stop(stop.exit_code, line, agreed=True)


def _batch_size_at(config: PretrainConfig, data_step: int) -> int:
    training = config.training
    for steps, size in zip(training.batch_ramp[::2], training.batch_ramp[1::2], strict=True):
        if data_step < steps:
            return size
        data_step -= steps
    return training.global_batch_size


def _resume_messages(
    restored: Restored, config: PretrainConfig, tokenizer: Tokenizer, allow_numeric_change: bool
) -> list[str]:
    """What to say on resume. Raises ``ValueError`` for a change that would alter what is learned."""
    _check_vocabulary(restored, tokenizer)
    if restored.meta["prng"] != config.execution.prng and not allow_numeric_change:
        raise ValueError(
            f"execution.prng: the checkpoint was made with {restored.meta['prng']}, now {config.execution.prng}: "
            "dropout would draw other numbers; add --allow_numeric_change if that is meant"
        )
    changed = differences(restored.config, config)
    lines = [f"continuing at step {restored.step:,}"]
    return lines + [f"changed since the checkpoint: {line}" for line in changed]


def _check_vocabulary(restored: Restored, tokenizer: Tokenizer) -> None:
    if restored.meta["tokenizer"] != tokenizer.fingerprint:
        raise ValueError(
            "data.vocab: the checkpoint was trained with another vocabulary (fingerprint "
            f"{restored.meta['tokenizer'][:12]}, now {tokenizer.fingerprint[:12]}); give the same one"
        )
