"""The training loop: one for pretraining and fine-tuning. Its order is fixed; see :func:`run_steps`."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from bert_jax.batch import BatchInfo, DataBudgetError
from bert_jax.config import TrainingConfig
from bert_jax.process import exits
from bert_jax.process.signals import Interrupted, StopRequest
from bert_jax.process.watchdog import Watchdog
from bert_jax.training.logging.meter import IntervalMeter
from bert_jax.training.logging.profiler import ProfilerWindow
from bert_jax.training.prefetch import DevicePrefetcher
from bert_jax.training.spikes import LossGuard
from bert_jax.training.state import TrainState

# Steps that may be under way while the host goes on: enough to hide the host, few enough to bound memory.
MAX_IN_FLIGHT = 2

StepFunction = Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, jax.Array]]


@dataclasses.dataclass
class Clock:
    """Wall time of an interval, without what is neither training nor input (evaluation, saves)."""

    started: float = dataclasses.field(default_factory=time.perf_counter)
    waited: float = 0.0
    steps: int = 0
    tokens: float = 0.0
    sequences: int = 0

    def exclude(self, seconds: float) -> None:
        """Take ``seconds`` out of the interval."""
        self.started += seconds

    def line(self) -> dict[str, float]:
        """Seconds per step, real tokens and sequences per second, share of the time spent waiting for data."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        return {
            "seconds_per_step": seconds / max(self.steps, 1),
            "tokens_per_second": self.tokens / seconds,
            "sequences_per_second": self.sequences / seconds,
            "data_wait_fraction": self.waited / seconds,
        }


class Recorder:
    """Turns steps into log lines. ``unpack`` makes a step's metrics of its array, ``write`` gets (step, line);
    values are read a few steps late, and each that comes is a ``beat``: a step was done."""

    def __init__(
        self,
        config: TrainingConfig,
        meter: IntervalMeter,
        guard: LossGuard,
        unpack: Callable[[np.ndarray], Mapping[str, Any]],
        write: Callable[[int, dict[str, Any]], None],
        beat: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self.config, self.meter, self.guard, self._unpack, self._write = config, meter, guard, unpack, write
        self._beat = beat
        self._in_flight: collections.deque[tuple[int, Any, BatchInfo]] = collections.deque()
        self.clock = Clock()

    def add(self, step: int, metrics: Any, info: BatchInfo) -> None:
        """Take the metrics of ``step`` (a device array) without waiting for them."""
        self._in_flight.append((step, metrics, info))
        self.drain(MAX_IN_FLIGHT)

    def drain(self, leave: int = 0) -> None:
        """Read metrics until ``leave`` steps are under way; raises what :class:`LossGuard` does."""
        while len(self._in_flight) > leave:
            step, metrics, info = self._in_flight.popleft()
            metrics = self._unpack(np.asarray(metrics))
            self._beat(f"step {step + 1:,}")
            self.meter.add(metrics)
            self.clock.steps += 1
            self.clock.tokens += float(metrics["tokens"])
            self.clock.sequences += info.sequences
            if step % self.config.log_interval == 0 or step == self.config.num_steps:
                position = {"epoch": info.epoch, "examples_seen": info.examples_seen}
                self._write(step, {**self.meter.line(), **self.clock.line(), **position})
                self.clock = Clock()
            self.guard.add(step, float(metrics["loss"]), self.meter.bad_in_a_row)


def run_steps(
    state: TrainState,
    first_step: int,
    config: TrainingConfig,
    *,
    step_for: Callable[[Mapping[str, jax.Array]], StepFunction],
    batches: DevicePrefetcher,
    recorder: Recorder,
    evaluate: Callable[[TrainState, int], bool],
    save: Callable[[TrainState, int], None],
    settle: Callable[[], None],
    poll: Callable[[int], None],
    profiler: ProfilerWindow,
    stop: StopRequest,
    watchdog: Watchdog,
) -> TrainState:
    """Train from ``first_step`` to ``config.num_steps``, or until ``evaluate`` says that it was enough, and return
    the final state.

    The order is law: a batch is taken, the step is dispatched, its line is logged, then evaluation, then the
    save; only then the next batch is taken. So a checkpoint holds the position after its own step, and every
    line up to its step is in the log before it exists. One exception: an evaluation that is broken off, by
    damaged records (``DataBudgetError``) or a signal (``Interrupted``), has no line, but what was trained is saved;
    resumed, the run begins with that evaluation.
    """

    def timed(action: Callable[[TrainState, int], Any], state: TrainState, step: int, phase: str = "") -> Any:
        recorder.drain()
        began = time.perf_counter()
        with watchdog.phase(phase) if phase else contextlib.nullcontext():
            answer = action(state, step)
        recorder.clock.exclude(time.perf_counter() - began)
        watchdog.beat(f"step {step + 1:,}")
        return answer

    def stopped(step: int) -> exits.Stop:
        return exits.Stop(stop.exit_code, f"stopped at step {step:,} of {config.num_steps:,}", agreed=True)

    step, saved = first_step, first_step
    watchdog.beat(f"step {step + 1:,}")
    last = False
    while step < config.num_steps and not last:
        watchdog.doing = f"step {step + 1:,}"
        if stop.reached():
            if step > saved:
                timed(save, state, step, "saving")
            raise stopped(step)
        if (step + 1) % config.checkpoint_interval == 0 and step > first_step:
            # The save before is complete before the next one is due: a kill costs less than two intervals.
            timed(lambda state, step: settle(), state, step, "completing a save")
        began = time.perf_counter()
        batch, info = next(batches)
        recorder.clock.waited += time.perf_counter() - began
        with watchdog.phase("compiling the training step"):
            run = step_for(batch)
        step += 1
        with profiler.step(step):
            state, metrics = run(state, batch)
        del batch  # here, because giving its buffers back takes milliseconds that are no waiting for data
        profiler.finish(step, state.step)
        recorder.add(step, metrics, info)
        last = step == config.num_steps
        if last or (config.eval_interval and step % config.eval_interval == 0):
            try:
                last = timed(evaluate, state, step) or last
            except Interrupted:
                timed(save, state, step, "saving")
                raise stopped(step) from None
            except DataBudgetError as error:
                timed(save, state, step, "saving")
                raise DataBudgetError(
                    f"evaluation at step {step:,}: {error}; the step is saved, and the same command continues with "
                    "this evaluation"
                ) from None
        if last or step % config.checkpoint_interval == 0:
            timed(save, state, step, "saving")
            saved = step
        poll(step)
    recorder.drain()
    return state
