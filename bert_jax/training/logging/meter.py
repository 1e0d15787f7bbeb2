"""Values of the training log lines, such as weighted means of metrics over an interval of steps."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bert_jax.batch import BatchInfo, DataBudgetError
from bert_jax.config import TrainingConfig
from bert_jax.json_values import Json
from bert_jax.training.spikes import LossGuard
from bert_jax.training.step import StepMetrics, StepValues

# Maximum number of steps in flight: large enough to hide the work of the host, small enough to limit memory.
MAX_IN_FLIGHT = 2


class IntervalMeter:
    """Sums of metrics over an interval of steps. Checkpoints store them, so a resumed run logs the same lines.

    Every line contains the loss, the metrics named in ``keys``, the gradient norm and the padding fraction. A value
    is null if the model lacks the head that the metric needs, or if every step of the interval was skipped.
    """

    def __init__(self, max_blank_records: int, keys: Sequence[str] = ()) -> None:
        self._max_blank_records = max_blank_records
        self._keys = ("loss", *keys, "grad_norm", "padding_fraction")
        self.blank_records = 0  # blank rows on all processes since the phase began
        self.skipped_steps = 0  # since the phase began
        self.bad_in_a_row = 0
        self._sums: dict[str, list[float]] = {}
        self._last: dict[str, float] = {}

    def add(self, metrics: StepValues) -> None:
        """Add the metrics of one step (host values). A skipped step is counted, but its values are not added.

        The values in ``metrics["last"]`` are not averaged: a line contains those of the last step. Raises
        ``DataBudgetError`` if more than ``max_blank_records`` records are damaged. A process that reads all rows
        raises this error earlier, while it reads the rows.
        """
        self._last = dict(metrics["last"])
        self.blank_records += int(metrics["blank_rows"])
        allowed = self._max_blank_records
        if self.blank_records > allowed:
            raise DataBudgetError(
                f"data.max_blank_records: {self.blank_records} records are damaged, but at most {allowed} are "
                "allowed; restore the shards or raise the limit; the log of each process names the damaged records "
                "that it read"
            )
        if not metrics["finite"]:
            self.skipped_steps += 1
            self.bad_in_a_row += 1
            return
        self.bad_in_a_row = 0
        pairs = dict(metrics["sums"]) | {"loss": (metrics["loss"], 1), "grad_norm": (metrics["grad_norm"], 1)}
        for name, (total, weight) in pairs.items():
            pair = self._sums.setdefault(name, [0.0, 0.0])
            pair[0] += float(total)
            pair[1] += float(weight)

    def line(self) -> dict[str, float | int | None]:
        """Return the means over the steps since the previous line, and start a new interval."""
        means: dict[str, float | None] = dict.fromkeys(self._keys)
        means |= {name: total / weight if weight else None for name, (total, weight) in self._sums.items()}
        self._sums = {}
        counts = {"skipped_steps": self.skipped_steps, "blank_records": self.blank_records}
        return {**means, **self._last, **counts}

    def state(self) -> dict[str, Json]:
        """Return the state as JSON values, which preserve floats exactly."""
        sums = {name: list(pair) for name, pair in self._sums.items()}
        counts = {"skipped_steps": self.skipped_steps, "blank_records": self.blank_records}
        return {**counts, "bad_in_a_row": self.bad_in_a_row, "sums": sums}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state` returned."""
        self.skipped_steps, self.bad_in_a_row = state["skipped_steps"], state["bad_in_a_row"]
        self.blank_records = state["blank_records"]
        self._sums = {name: list(pair) for name, pair in state["sums"].items()}


@dataclasses.dataclass
class Clock:
    """Wall time and throughput of an interval of steps, excluding evaluations and saves."""

    started: float = dataclasses.field(default_factory=time.perf_counter)
    waited: float = 0.0
    steps: int = 0
    tokens: float = 0.0
    sequences: int = 0

    def line(self) -> dict[str, float]:
        """Return the seconds per step, the tokens (excluding padding) per second, the sequences per second, and the
        fraction of the time spent waiting for data."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        return {
            "seconds_per_step": seconds / max(self.steps, 1),
            "tokens_per_second": self.tokens / seconds,
            "sequences_per_second": self.sequences / seconds,
            "data_wait_fraction": self.waited / seconds,
        }


@dataclasses.dataclass
class Recorder:
    """Writer of the log lines. The metrics of a step are read a few steps later, so that the host does not wait."""

    config: TrainingConfig
    meter: IntervalMeter
    guard: LossGuard
    # Called with the step and the values of each log line.
    write: Callable[[int, dict[str, float | None]], None]
    # Called with the current activity whenever a step is complete.
    beat: Callable[[str], None] = lambda doing: None
    # Called with each message about the data.
    say: Callable[[str], None] = lambda text: None
    clock: Clock = dataclasses.field(default_factory=Clock)
    _in_flight: deque[tuple[int, StepMetrics, BatchInfo]] = dataclasses.field(default_factory=deque)

    def add(self, step: int, metrics: StepMetrics, info: BatchInfo) -> None:
        """Queue the ``StepMetrics`` of ``step``; read queued metrics until ``MAX_IN_FLIGHT`` steps remain."""
        self._in_flight.append((step, metrics, info))
        self.drain(MAX_IN_FLIGHT)

    def drain(self, leave: int = 0) -> None:
        """Read queued metrics until at most ``leave`` steps remain. Raises the errors of :meth:`LossGuard.add`."""
        while len(self._in_flight) > leave:
            step, packed, info = self._in_flight.popleft()
            metrics = packed.unpack()
            self.beat(f"step {step + 1:,}")
            self.meter.add(metrics)
            self.clock.steps += 1
            self.clock.tokens += float(metrics["tokens"])
            self.clock.sequences += info.sequences
            for note in info.notes:
                self.say(f"step {step:,}: {note}")
            if step % self.config.log_interval == 0 or step == self.config.num_steps:
                position = {"epoch": info.epoch, "examples_seen": info.examples_seen, **info.values}
                self.write(step, {**self.meter.line(), **self.clock.line(), **position})
                self.clock = Clock()
            self.guard.add(step, float(metrics["loss"]), self.meter.bad_in_a_row)
