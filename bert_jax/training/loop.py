"""The training loop of pretraining and fine-tuning. :meth:`Loop.run` documents the order of its operations."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import jax

from bert_jax.batch import Batch, BatchInfo, BatchShapes, DataBudgetError
from bert_jax.config import TrainingConfig
from bert_jax.process import exits
from bert_jax.process.signals import Interrupted, StopRequest
from bert_jax.process.watchdog import Watchdog
from bert_jax.training.logging.meter import Recorder
from bert_jax.training.programs import StepFunction
from bert_jax.training.state import TrainState

Batches = Iterator[tuple[Batch, BatchInfo]]
Answer = TypeVar("Answer")


class ProfilerWindow:
    """Profiler trace of steps ``steps[0]`` to ``steps[1]``, written to ``folder``. Without ``steps``, no trace is
    written."""

    def __init__(self, folder: Path, steps: tuple[int, ...]) -> None:
        self._folder, self._steps = folder, steps
        self._running = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Annotate the dispatch of step ``number`` (counted from 1) in the trace. Start the trace at the first step
        of the window."""
        if not self._steps:
            yield
            return
        if not self._running and self._steps[0] <= number <= self._steps[1]:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._running = True
        with jax.profiler.StepTraceAnnotation("train_step", step_num=number):
            yield

    def finish(self, number: int, result: jax.Array) -> None:
        """After the last step of the window, wait until ``result`` is computed, then stop the trace."""
        if self._running and number >= self._steps[1]:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Stop the trace if it is running."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False


@dataclasses.dataclass
class Loop:
    """Loop over the steps of a run, with evaluations and saves in a fixed order."""

    config: TrainingConfig
    step_for: Callable[[BatchShapes], StepFunction]
    batches: Batches
    recorder: Recorder
    # Returns True if the run should end after this step.
    evaluate: Callable[[TrainState, int], bool]
    # Returns True, on every process, after a log line that ends the run.
    ends_early: Callable[[], bool]
    save: Callable[[TrainState, int], None]
    finish_pending_save: Callable[[], None]
    # Called after each step.
    poll: Callable[[int], None]
    profiler: ProfilerWindow
    stop: StopRequest
    watchdog: Watchdog

    def run(self, state: TrainState, first_step: int) -> TrainState:
        """Train from ``first_step`` to ``config.num_steps``, or until ``evaluate`` or ``ends_early`` returns True,
        and return the final state.

        The order of operations is fixed: read a batch, dispatch the step, log its line, evaluate, save, and only
        then read the next batch. Each checkpoint therefore contains the data position after its step, and when a
        checkpoint is written, the log contains every line up to the step of the checkpoint. There is one exception:
        if damaged records (``DataBudgetError``) or a signal (``Interrupted``) interrupt an evaluation, the state is
        saved although the line of the evaluation is missing. The resumed run starts with this evaluation.
        """
        config, step, saved, last = self.config, first_step, first_step, False
        self.watchdog.beat(f"step {step + 1:,}")
        while step < config.num_steps and not last:
            self.watchdog.doing = f"step {step + 1:,}"
            if self.stop.reached():
                if step > saved:
                    self._timed(self.save, state, step, "saving")
                raise self._stopped(step)
            if (step + 1) % config.checkpoint_interval == 0 and step > first_step:
                # Complete the previous save, so that a killed run loses fewer than two checkpoint intervals.
                self._timed(lambda *_: self.finish_pending_save(), state, step, "completing a save")
            state, step = self._step(state, step + 1), step + 1
            last = step == config.num_steps or self.ends_early()
            if last or (config.eval_interval and step % config.eval_interval == 0):
                last = self._evaluate(state, step) or last or self.ends_early()
            if last or step % config.checkpoint_interval == 0:
                self._timed(self.save, state, step, "saving")
                saved = step
            self.poll(step)
        self.recorder.drain()
        return state

    def _step(self, state: TrainState, step: int) -> TrainState:
        """Read the next batch, dispatch step ``step`` on it and return the new state."""
        began = time.perf_counter()
        batch, info = next(self.batches)
        self.recorder.clock.waited += time.perf_counter() - began
        with self.watchdog.phase("compiling the training step"):
            run = self.step_for({name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()})
        with self.profiler.step(step):
            state, metrics = run(state, batch)
        del batch  # freed here, because freeing takes milliseconds that must not count as waiting for data
        self.profiler.finish(step, state.step)
        self.recorder.add(step, metrics, info)
        return state

    def _evaluate(self, state: TrainState, step: int) -> bool:
        """Evaluate ``state``. After an interruption, save the state and raise an error that ends the run."""
        try:
            return bool(self._timed(self.evaluate, state, step))
        except Interrupted:
            self._timed(self.save, state, step, "saving")
            raise self._stopped(step) from None
        except DataBudgetError as error:
            self._timed(self.save, state, step, "saving")
            raise DataBudgetError(
                f"evaluation at step {step:,}: {error}; the state is saved; run the same command to "
                "repeat the evaluation"
            ) from None

    def _timed(
        self, action: Callable[[TrainState, int], Answer], state: TrainState, step: int, phase: str = ""
    ) -> Answer:
        """Call ``action(state, step)`` and exclude its duration from the timing of the next log line."""
        self.recorder.drain()
        began = time.perf_counter()
        with self.watchdog.phase(phase) if phase else contextlib.nullcontext():
            answer = action(state, step)
        self.recorder.clock.started += time.perf_counter() - began
        self.watchdog.beat(f"step {step + 1:,}")
        return answer

    def _stopped(self, step: int) -> exits.Stop:
        return exits.Stop(
            self.stop.exit_code, f"stopped at step {step:,} of {self.config.num_steps:,}", agreed=True
        )
