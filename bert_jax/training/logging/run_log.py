"""The logs of a run: metrics.jsonl, train.log, the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.objectives.display import Column
from bert_jax.training.logging.metrics_file import MetricsWriter, read_metrics
from bert_jax.training.logging.progress import Progress


class RunLog:
    """The logs of a run in ``folder``, continued after ``first_step``.

    Only the lead process writes and shows them.
    """

    def __init__(
        self, folder: Path, total_steps: int, first_step: int, columns: Sequence[Column], *, lead: bool
    ) -> None:
        self.folder = folder
        self._progress = Progress(total_steps, first_step, folder / "train.log", columns=columns, lead=lead)
        self._metrics = MetricsWriter(folder, first_step, lead=lead)
        self.line, self.tick = self._progress.line, self._progress.tick
        self.has, self.require_file = self._metrics.has, self._metrics.require_file

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write and show the log line of a step or, if ``values`` contains ``split``, of an evaluation."""
        self._metrics.write(step, values)
        self._progress.update(step, values)

    def last(self, split: str) -> dict[str, Any]:
        """Return the last line of ``split`` in metrics.jsonl, or an empty dict if no such line exists."""
        return next((line for line in reversed(read_metrics(self.folder)) if line.get("split") == split), {})

    def at(self, step: int, split: str) -> dict[str, Any]:
        """Return the line of ``step`` and ``split`` in metrics.jsonl, or an empty dict if no such line exists."""
        lines = (line for line in read_metrics(self.folder) if (line["step"], line.get("split")) == (step, split))
        return next(lines, {})

    def close(self) -> None:
        """Close the files and remove the progress bar; may be called twice."""
        self._metrics.close()
        self._progress.close()
