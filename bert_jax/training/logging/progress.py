"""Progress of a run: a live bar on a terminal, plain lines elsewhere and in WORKDIR/train.log."""

import atexit
import datetime
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from bert_jax.objectives.display import RUN_COLUMNS, Column
from bert_jax.training.logging.logger import Row, Value

# Number of log lines whose mean speed determines the ETA: a compromise between stability and fast response.
_ETA_WINDOW = 20
# Maximum number of metrics of a task in one line.
_MOST_METRICS = 4


def format_duration(seconds: float) -> str:
    """Format a number of seconds: ``0:01:15`` for 75.4, ``1d 3:46:40`` for 100000. Negative values count as 0."""
    return re.sub(" days?, ", "d ", str(datetime.timedelta(seconds=max(0, int(seconds)))))


def format_age(seconds: float) -> str:
    """Format an age in words: ``40 s``, ``12 minutes``, ``5 hours``, ``3 days``. The script of a report does the
    same."""
    for limit, unit, name in ((100, 1, "s"), (6000, 60, "minutes"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{max(0.0, seconds) / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} days"


def format_count(value: float) -> str:
    """Format a number with three significant digits and a suffix: ``8.30k`` for 8300, ``950`` for 950, ``1.20B``
    for 1.2e9."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # The factor avoids "1000k" for 999,600, which is formatted with the next suffix instead.
        if value >= limit * 0.9995:
            scaled = value / limit
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{suffix}"
    return f"{value:.0f}"


def format_line(
    step: int,
    total_steps: int,
    metrics: Row,
    eta: float | None = None,
    columns: Sequence[Column] = (),
) -> str:
    """Return one log line, which includes the ``columns`` of the objective. Missing values are omitted; an unknown
    MFU is shown as n/a.

    Example: ``step 1,200/10,000  loss 5.123  token 4.812 (acc 0.214)  lr 9.9e-05  grad 1.42
    0.123 s/step  8.30k tok/s  mfu n/a  eta 0:12:03``
    """
    split = metrics.get("split", "")
    parts = [f"{split} step {step:,}/{total_steps:,}".strip()]
    if "loss" in metrics:
        parts.append(f"loss {_number(metrics['loss'], '.3f')}")
    # A run without a head reports null or no value for its metrics, and the line omits their columns.
    parts += [_column(column, metrics) for column in columns if metrics.get(column.key) is not None]
    parts += [_column(column, metrics) for column in RUN_COLUMNS if column.key in metrics]
    parts += _rate(metrics)
    if "mfu" in metrics:
        parts.append(f"mfu {_number(metrics['mfu'], '.1%')}")
    if split not in ("", "eval"):  # metrics of a fine-tuning task, the most important first
        numbers = [(name, value) for name, value in metrics.items() if isinstance(value, float)]
        parts += [f"{name} {value:.4f}" for name, value in numbers[:_MOST_METRICS]]
    if not split:
        parts += [_part(key.removeprefix("share_"), metrics) for key in metrics if key.startswith("share_")]
    for label, key in (("skipped", "skipped_steps"), ("blank", "blank_records")):
        if metrics.get(key):
            parts.append(f"{label} {metrics[key]:,}")
    if eta is not None and not split:
        parts.append(f"eta {format_duration(eta)}")
    return "  ".join(parts)


def _column(column: Column, metrics: Row) -> str:
    text = column.template.format(_number(metrics[column.key], column.style))
    return f"{text} (acc {_number(metrics.get(column.accuracy), column.style)})" if column.accuracy else text


def _rate(metrics: Row) -> list[str]:
    rate = metrics.get("tokens_per_second")
    return [f"{format_count(float(rate))} tok/s"] if rate is not None else []


def _part(name: str, metrics: Row) -> str:
    """Format the share of the rows, and the number of passes, of one part of a mixture."""
    return f"{name} {metrics[f'share_{name}']:.1%} epoch {metrics[f'epoch_{name}']:.2f}"


def _number(value: Value, style: str) -> str:
    return "n/a" if value is None else format(float(value), style)


class Progress:
    """Display of the progress of a run.

    On a terminal, a bar is shown at the bottom, with messages and evaluation lines above it; the log lines of
    training steps are written only to the log file. Without a terminal, log lines and messages are printed to
    standard output as plain text. In both cases, all of them are written to the log file.

    Args:
        total_steps: step at which the run ends.
        start_step: step from which the run continues.
        log_path: log file to which lines are appended, or None for no file.
        columns: columns of log lines that the objective defines; the bar also shows the first of them.
        lead: if False, nothing is shown or written; must be True on exactly one process of a run.
        console: console that shows the bar and the messages (default: standard output).
        report: called with each line, instead of the console.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        log_path: Path | None = None,
        *,
        columns: Sequence[Column] = (),
        lead: bool = True,
        console: Console | None = None,
        report: Callable[[str], None] | None = None,
    ):
        self._report = report
        self._total, self._columns = total_steps, columns
        self._lead = lead
        self._log: TextIO | None = None
        self._bar: Bar | None = None
        # (time, step) of the last log lines, without the first interval, which includes compilation.
        self._marks: deque[tuple[float, int]] = deque(maxlen=_ETA_WINDOW)
        if not lead:
            return
        self._console = console or Console()
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = log_path.open("a", encoding="utf-8")
        if self._console.is_terminal and report is None:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TextColumn("{task.fields[status]}"),
                console=self._console,
                refresh_per_second=2,  # a higher rate would cost host time
                expand=True,
            )
            self._task = self._bar.add_task(
                self._title(start_step), total=total_steps, completed=start_step, status="compiling"
            )
            self._bar.start()
            # Restore the cursor of the terminal even if the run ends with an error.
            atexit.register(self.close)

    def tick(self, step: int) -> None:
        """Move the bar to ``step``. Cheap enough to call at every step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=self._title(step))

    def update(self, step: int, metrics: Row) -> None:
        """Show the metrics of a logged step or, if ``metrics`` contains ``split``, of an evaluation."""
        if not self._lead:
            return
        evaluation = "split" in metrics
        if not evaluation:
            self._marks.append((time.monotonic(), step))
        eta = self._eta(step, metrics)
        line = format_line(step, self._total, metrics, eta, self._columns)
        self._write_log(line)
        if self._bar is None or evaluation:
            self._print(line)
        else:
            self.tick(step)
            self._bar.update(self._task, status=self._status(metrics, eta))

    def line(self, text: str, *, shows: bool = True) -> None:
        """Write a message to the log file and, with ``shows``, show it."""
        if self._lead:
            self._write_log(text)
            if shows:
                self._print(text)

    def close(self) -> None:
        """Remove the bar and close the log; may be called twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            atexit.unregister(self.close)
        if self._log is not None:
            self._log.close()
            self._log = None

    def _title(self, step: int) -> str:
        return f"step {step:,}/{self._total:,}"

    def _eta(self, step: int, metrics: Row) -> float | None:
        """Estimate the remaining seconds, including evaluations and saves, from the speed over the last log lines.
        Return None if the speed is unknown."""
        if len(self._marks) >= 2:
            (first_time, first_step), (last_time, last_step) = self._marks[0], self._marks[-1]
            if last_step > first_step:
                return (self._total - step) * (last_time - first_time) / (last_step - first_step)
        seconds = metrics.get("seconds_per_step")
        return None if seconds is None else (self._total - step) * float(seconds)

    def _write_log(self, text: str) -> None:
        if self._log is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            self._log.write(f"{stamp}  {text}\n")
            self._log.flush()

    def _print(self, text: str) -> None:
        if self._report is not None:
            self._report(text)
        elif self._console.is_terminal:
            self._console.print(escape(text), highlight=False)
        else:
            # Plain text, because rich would break long lines at 80 columns.
            self._console.file.write(text + "\n")
            self._console.file.flush()

    def _status(self, metrics: Row, eta: float | None) -> str:
        """Return the short status text that is shown to the right of the bar."""
        first = [column for column in self._columns[:1] if metrics.get(column.key) is not None]
        parts = [column.template.format(_number(metrics[column.key], column.style)) for column in first]
        parts += _rate(metrics)
        if eta is not None:
            parts.append(f"eta {format_duration(eta)}")
        return "  ".join(parts)
