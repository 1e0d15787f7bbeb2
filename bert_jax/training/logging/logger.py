"""Loggers: where the metrics of a run go, in addition to metrics.jsonl. This module does not import jax."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bert_jax import registry
from bert_jax.json_values import Json

# A line of metrics.jsonl: ``step`` int, ``split`` str (only of an evaluation), and numbers, texts or None by name.
Value = str | float | None
Row = Mapping[str, Value]
# Function that is called with each line of metrics.jsonl; after one returns True, the run ends.
Callback = Callable[[dict[str, Value]], bool | None]


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger opens."""

    # Local folder of the logs.
    folder: Path
    # Name of the workdir.
    name: str
    # Every option of the run, by section and name.
    config: Mapping[str, Json]
    # Rows up to the step from which the run continues.
    rows: Sequence[Row] = ()
    # Last step by split that a run in this folder has logged, ``train`` included. Those after the last of ``rows``
    # are logged again, with equal values except for timings; a service that cannot remove values skips them.
    seen: Mapping[str, int] = field(default_factory=dict)


class Logger:
    """Base class of loggers. Every process constructs them, but only the lead process calls their methods.

    A logger that raises an exception gets no further call: the run prints one line and goes on. The constructor
    takes no arguments and raises ``ValueError`` if the logger cannot work, such as without its package; this ends
    the run before it begins.
    """

    def open(self, run: LoggedRun) -> None:
        """Called once, before the other methods. A rollback closes the loggers and opens them again."""

    def line(self, row: Row) -> None:
        """Add the metrics of training steps, the row that metrics.jsonl got."""

    def evaluation(self, row: Row) -> None:
        """Add the metrics of an evaluation, whose split is ``row["split"]``."""
        self.line(row)

    def report(self, page: Path, image: Path) -> None:
        """Add the report of a finished run: a HTML page and the same curves as PNG."""

    def close(self) -> None:
        """Called at the end of the run, also after an error."""


def split_of(row: Row) -> str:
    """Return the split of a row: ``train`` or, of an evaluation, its split."""
    return str(row.get("split", "train"))


def step_of(row: Row) -> int:
    """Return the step of a row."""
    step = row["step"]
    assert isinstance(step, int)
    return step


def scalars(row: Row) -> dict[str, float]:
    """Return the numbers of a row by SPLIT/NAME, such as ``train/loss``."""
    return {
        f"{split_of(row)}/{name}": value
        for name, value in row.items()
        if name not in ("step", "split") and isinstance(value, int | float)
    }


def make_loggers(names: Sequence[str]) -> tuple[Logger, ...]:
    """Return the loggers with the ``names`` of ``--loggers``. Raises ``ValueError`` for an unknown name and for a
    logger that cannot work."""
    for name in names:
        registry.check("loggers", name, "--loggers")
    return tuple(registry.load("loggers", name)() for name in names)
