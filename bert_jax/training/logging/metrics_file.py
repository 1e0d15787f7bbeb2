"""Metrics of a run on disk: WORKDIR/metrics.jsonl.

A run that resumes from the checkpoint of step s removes every line after step s, because these steps run again.
Therefore the file contains every logged step exactly once and in order, even if the run was killed several times.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bert_jax.io.files import write_whole
from bert_jax.training.logging.logger import Row, Value, split_of, step_of

if TYPE_CHECKING:
    import jax
    import numpy as np

METRICS_FILE = "metrics.jsonl"
# Keys of values that differ between two equal runs; all other values of a line are reproducible.
TIMING_KEYS = ("seconds_per_step", "tokens_per_second", "mfu", "data_wait_fraction")


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Return the records of the complete lines of WORKDIR/metrics.jsonl, in order, or [] if the file is missing."""
    path = Path(workdir) / METRICS_FILE
    if not path.exists():
        return []
    return [record for _, record in rows_of(path.read_bytes())]


class MetricsWriter:
    """Writer of metrics.jsonl. Every process creates one writer per start of the run.

    Args:
        workdir: folder of the run; created if missing.
        start_step: step of the checkpoint from which the run continues, or 0 for a new run. Lines of later steps
            and incomplete lines are removed.
        lead: if False, every method does nothing; must be True on exactly one process of a run.
    """

    def __init__(self, workdir: Path | str, start_step: int = 0, *, lead: bool = True):
        self._lead = lead
        # The rows of the file at the start, and the last step by split before lines were removed.
        self.rows: list[Row] = []
        self.seen: dict[str, int] = {}
        # Last written step by split, so that no line is written twice.
        self._last_step: dict[str, int] = {}
        if not lead:
            return
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self._path = path = workdir / METRICS_FILE
        self.rows, self.seen = _trim(path, start_step)
        self._last_step = {split_of(row): step_of(row) for row in self.rows}
        self._file = path.open("ab")

    def has(self, step: int, split: str = "train") -> bool:
        """Return True if metrics.jsonl contains a line for ``step`` and ``split``."""
        return step <= self._last_step.get(split, -1)

    def write(self, step: int, metrics: "Mapping[str, Value | np.generic | jax.Array]") -> Row | None:
        """Append one line to metrics.jsonl and flush the file.

        Args:
            step: number of the step; must not decrease within a split.
            metrics: values by name: numbers (Python, numpy, JAX scalars), strings or None. Non-finite numbers
                become null. ``split: eval`` marks an evaluation.

        Returns:
            The written line. None if this process is not the lead, or if the file already contains the line,
            because a resumed run repeated an evaluation.
        """
        if not self._lead:
            return None
        record: dict[str, Value] = {"step": int(step)}
        record |= {name: _plain(value) for name, value in metrics.items() if name != "step"}
        if self.has(step, split_of(record)):
            return None
        # One write call per line, so that a kill leaves at most one incomplete line, the last one.
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self._last_step[split_of(record)] = int(step)
        return record

    def require_file(self) -> None:
        """Raise ``ValueError`` if the file is no longer in its folder, because the workdir was deleted, moved or
        replaced during the run."""
        if self._lead and not _is_at(self._file, self._path):
            raise ValueError(
                f"{self._path.parent}: deleted, moved or replaced during the run, so nothing more is saved "
                "there; put it back and run the command again, or start anew"
            )

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._lead:
            self._file.close()


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _plain(value: "Value | np.generic | jax.Array") -> Value:
    """Convert a metric to a JSON value: numpy and JAX scalars to Python numbers, non-finite numbers to None."""
    if value is not None and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    assert value is None or isinstance(value, bool | int | float | str), f"metric of type {type(value)}"
    return value


def rows_of(content: bytes) -> Iterator[tuple[bytes, dict[str, Value]]]:
    """Yield (raw line, parsed record) for each line that ends with a newline and is a JSON object with a step."""
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # incomplete or damaged: ignored
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record


def _trim(path: Path, start_step: int) -> tuple[list[Row], dict[str, int]]:
    """Remove lines of steps after ``start_step``, incomplete lines and duplicates. Return the remaining records,
    and the last step by split before the removal."""
    if not path.exists():
        return [], {}
    content = path.read_bytes()
    kept: list[tuple[bytes, Row]] = []
    last_step, seen = dict[str, int](), dict[str, int]()
    for line, record in rows_of(content):
        split, step = split_of(record), step_of(record)
        seen[split] = max(seen.get(split, -1), step)
        if last_step.get(split, -1) < step <= start_step:
            last_step[split] = step
            kept.append((line, record))
    trimmed = b"".join(line for line, _ in kept)
    if trimmed != content:
        write_whole(path, trimmed)
    return [record for _, record in kept], seen
