"""A profiler trace over a window of steps."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax


class ProfilerWindow:
    """Traces steps ``first..last`` (``training.profile_steps``) into ``WORKDIR/profile``; every step is named."""

    def __init__(self, folder: Path, steps: tuple[int, ...]) -> None:
        self._folder, self._steps = folder, steps
        self._running = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surround the dispatch of step ``number`` (from 1)."""
        if not self._steps:
            yield
            return
        if not self._running and self._steps[0] <= number <= self._steps[1]:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._running = True
        with jax.profiler.StepTraceAnnotation("train_step", step_num=number):
            yield

    def finish(self, number: int, result: Any) -> None:
        """End the trace once ``result`` of its last step is there."""
        if self._running and number >= self._steps[1]:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """End a trace that is still running, as when the run ends inside the window."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
