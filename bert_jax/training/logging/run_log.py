"""The logs of a run: metrics.jsonl, train.log, the terminal, loggers and callbacks."""

import contextlib
import os
import platform
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax import __version__
from bert_jax.config import RunConfig, to_dict
from bert_jax.io.errors import one_line
from bert_jax.objectives.display import Display, ReportData
from bert_jax.process import hosts
from bert_jax.training.launch import Launch
from bert_jax.training.logging.logger import LoggedRun, Row
from bert_jax.training.logging.metrics_file import MetricsWriter, read_metrics
from bert_jax.training.logging.progress import Progress
from bert_jax.training.logging.report import LiveReport
from bert_jax.training.logging.run_files import COMMAND, ENDED, HTML_FILE, IMAGE_FILE, PLACE

# Programs whose command line is recorded.
_PROGRAMS = ("bert-jax", "run_pretrain.py", "run_finetune.py")


class RunLog:
    """The logs of a run in ``folder``, continued after ``first_step``, and its report until it is complete.

    Only the lead process writes and shows them, and calls the loggers and callbacks of ``launch``.
    """

    def __init__(self, folder: Path, config: RunConfig, launch: Launch, first_step: int, display: Display) -> None:
        lead, total_steps = hosts.is_lead(), config.training.num_steps
        self.folder, self._launch = folder, launch
        self._progress = Progress(
            total_steps, first_step, folder / "train.log", columns=display.columns, lead=lead, report=launch.report
        )
        self._metrics = MetricsWriter(folder, first_step, lead=lead)
        self.line, self.tick = self._progress.line, self._progress.tick
        self.has, self.require_file = self._metrics.has, self._metrics.require_file
        self._display = display
        # The report, from its first to its last page before the run is complete.
        self._live: LiveReport | None = None
        # True on every process after a callback of the lead process has returned True.
        self.ends_early = False
        self._loggers = [*launch.loggers] if lead else []
        rows, seen = self._metrics.rows, self._metrics.seen
        self._tell("open", LoggedRun(folder, launch.workdir.name, to_dict(config), rows, seen))

    def write(self, step: int, values: Row, *, shows: bool = False) -> None:
        """Write and show the log line of a step or, if ``values`` contains ``split``, of an evaluation, unless the
        log already contains it. Must be called by every process. Exceptions of callbacks are raised. ``shows``:
        the caller writes the report by :meth:`show`."""
        row = self._metrics.write(step, values)
        if row is not None:
            self._tell("evaluation" if "split" in row else "line", row)
            self._progress.update(step, values)
            if self._live is not None:
                self._live.write(is_due="split" in row and not shows)
        if not self._launch.callbacks:
            return
        answers = [] if row is None else [callback(dict(row)) for callback in self._launch.callbacks]
        ends = any(isinstance(answer, bool | np.bool_) and answer for answer in answers)
        if hosts.broadcast_from_lead("a_callback_ends_the_run", ends, self._launch.host_timeout):
            self.ends_early = True
            self.line(f"step {step:,}: a callback ends the run here; the same call continues it")

    def begin_report(self) -> None:
        """Write the report now and after every evaluation."""
        if hosts.is_lead():
            self._live = LiveReport(self.folder, self._display, self._launch.workdir, self.line)
            self._live.write()

    def show(self, find: Callable[[], ReportData]) -> None:
        """Write the report with what ``find`` returns, which an evaluation found besides its metrics. Only the lead
        process calls ``find``, when it writes the report."""
        if self._live is not None:
            self._live.add(find)
            self._live.write()

    def report(self) -> None:
        """Pass the report in the folder, which is complete, to the loggers."""
        self._live = None
        self._tell("report", self.folder / HTML_FILE, self.folder / IMAGE_FILE)

    def last(self, split: str) -> dict[str, Any]:
        """Return the last line of ``split`` in metrics.jsonl, or an empty dict if no such line exists."""
        return next((line for line in reversed(read_metrics(self.folder)) if line.get("split") == split), {})

    def at(self, step: int, split: str) -> dict[str, Any]:
        """Return the line of ``step`` and ``split`` in metrics.jsonl, or an empty dict if no such line exists."""
        lines = (line for line in read_metrics(self.folder) if (line["step"], line.get("split")) == (step, split))
        return next(lines, {})

    def write_origin(self) -> None:
        """Write the host, the versions of jax and bert_jax and the command to train.log, for the report."""
        versions = f"jax {metadata.version('jax')}, bert_jax {__version__}"
        self._progress.line(f"{PLACE}{platform.node()}, {_processor()}, {versions}", shows=False)
        program, *options = sys.argv
        if Path(program).name in _PROGRAMS:
            self._progress.line(COMMAND + shlex.join([Path(program).name, *options]), shows=False)

    def write_end(self, reason: str) -> None:
        """Write the reason why the run ends before it is complete to train.log, for the report. A full disk does
        not hide the reason: this error is not raised."""
        with contextlib.suppress(OSError):
            self._progress.line(ENDED + reason, shows=False)

    def close(self) -> None:
        """Close the files and the loggers, and remove the progress bar; may be called twice."""
        self._tell("close")
        self._loggers = []
        if self._live is not None:
            self._live.write(running=False)
            self._live = None
        self._metrics.close()
        self._progress.close()

    def _tell(self, method: str, *arguments: LoggedRun | Row | Path) -> None:
        """Call ``method`` of each logger. A logger that fails is removed, because it must not end a run."""
        for logger in [*self._loggers]:
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:
                self._loggers.remove(logger)
                name = type(logger).__name__
                self.line(f"WARNING: {name}: {one_line(error)}; the run continues without this logger")


def _processor() -> str:
    """Return the number of CPUs and, if it is known, their name."""
    name = ""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return f"{os.cpu_count()} CPUs" + (f" {name}" if name else "")
