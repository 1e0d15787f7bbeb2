"""Training of a run from its start to its last step: compilation of the step, the training loop, checkpoints."""

import contextlib
from collections.abc import Callable, Iterator

from bert_jax.json_values import Json
from bert_jax.parallel.hardware import find_chip, mfu
from bert_jax.parallel.prefetch import DevicePrefetcher
from bert_jax.training.checkpoint.writer import CheckpointWriter
from bert_jax.training.job import Context, Data, Job
from bert_jax.training.logging.meter import Recorder
from bert_jax.training.logging.run_log import RunLog
from bert_jax.training.loop import Loop, ProfilerWindow
from bert_jax.training.memory import explain_memory, state_advice, step_advice
from bert_jax.training.start import FirstState
from bert_jax.training.state import TrainState


def fit(job: Job, context: Context, start: FirstState, data: Data, upload: Callable[[], None]) -> TrainState:
    """Train from ``start`` to the last step and return the final state. A pending save is completed even if an
    error ends the training.

    ``upload`` is called before each save is committed. Raises ``exits.Stop`` if the run ends early and ``RollBack``
    if the run must go back to an earlier checkpoint.
    """
    programs, watchdog, config = context.programs, context.watchdog, job.config
    assert data.batches is not None
    batches = DevicePrefetcher(data.batches, programs.mesh, data.host_share, data.prefetch, data.features)
    checkpoints = CheckpointWriter(context.launch.workdir, config, programs.abstract, upload)
    watchdog.is_writing = checkpoints.is_writing
    profiler = ProfilerWindow(context.folder / "profile", config.training.profile_steps)

    def save(state: TrainState, step: int) -> None:
        context.log.require_file()
        meta: dict[str, Json] = {
            "data": batches.state,
            "phase_start": start.phase_start,
            "meter": start.meter.state(),
            "guard": start.guard.state(),
            "job": job.state(),
            "prng": config.execution.prng,
            "tokenizer": job.tokenizer.fingerprint,
            "parameters": programs.parameter_count,
        }
        with explain_memory("saving the state", state_advice(config)):
            checkpoints.save(state, meta)

    def finish_pending_save() -> None:
        context.log.require_file()
        with _workdir_named(context.log):
            checkpoints.wait()

    def poll(step: int) -> None:
        with _workdir_named(context.log):
            checkpoints.poll()
        context.log.tick(step)

    state, start.state = start.state, None  # the first step donates the buffers of the state
    assert state is not None
    try:
        with explain_memory("the training step", step_advice(config), lambda: programs.step_bytes):
            loop = Loop(
                config.training, programs.step_for, batches,
                Recorder(
                    config.training, start.meter, start.guard, line_writer(job, context), watchdog.beat,
                    context.log.line,
                ),
                evaluate=lambda state, step: job.evaluate(context, state, step),
                ends_early=lambda: context.log.ends_early,
                save=save, finish_pending_save=finish_pending_save, poll=poll, profiler=profiler,
                stop=context.launch.stop, watchdog=watchdog,
            )  # fmt: skip
            return loop.run(state, start.step)
    finally:
        profiler.close()
        batches.close()
        with watchdog.phase("completing the last save"), _workdir_named(context.log):
            checkpoints.close()


@contextlib.contextmanager
def _workdir_named(log: RunLog) -> Iterator[None]:
    """If a save fails because the workdir is gone, raise the error that names the workdir."""
    try:
        yield
    except Exception:
        log.require_file()
        raise


def line_writer(job: Job, context: Context) -> Callable[[int, dict[str, float | None]], None]:
    """Return a function that adds the MFU (model FLOP utilization) to a log line and writes the line."""
    mesh = context.programs.mesh
    device_kind = mesh.devices.flat[0].device_kind
    # Counting FLOPs traces the model, which takes seconds; the MFU is defined only if the peak is known.
    flops = job.flops_per_sequence() if find_chip(device_kind) else 0

    def write(step: int, values: dict[str, float | None]) -> None:
        rate = values.pop("sequences_per_second") or 0.0
        values["mfu"] = mfu(rate * flops, device_kind, mesh.size) if flops else None
        context.log.write(step, values)

    return write
