"""Metrics of a run on disk: WORKDIR/metrics.jsonl and TensorBoard events under WORKDIR/tensorboard.

The events are derived from metrics.jsonl. A run that resumes from the checkpoint of step s removes every line after
step s, because these steps run again, and rebuilds the events. Therefore both contain every logged step exactly
once and in order, even if the run was killed several times.
"""

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from bert_jax.io.files import write_whole

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
# Keys of values that differ between two equal runs; all other values of a line are reproducible.
TIMING_KEYS = ("seconds_per_step", "tokens_per_second", "mfu", "data_wait_fraction")


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Return the records of the complete lines of WORKDIR/metrics.jsonl, in order, or [] if the file is missing."""
    path = Path(workdir) / METRICS_FILE
    if not path.exists():
        return []
    return [record for _, record in _complete_lines(path.read_bytes())]


class MetricsWriter:
    """Writer of metrics.jsonl and TensorBoard events. Every process creates one writer per start of the run.

    Args:
        workdir: folder of the run; created if missing.
        start_step: step of the checkpoint from which the run continues, or 0 for a new run. Lines of later steps
            and incomplete lines are removed.
        lead: if False, every method does nothing; must be True on exactly one process of a run.
    """

    def __init__(self, workdir: Path | str, start_step: int = 0, *, lead: bool = True):
        self._lead = lead
        if not lead:
            self._last_step: dict[str, int] = {}
            return
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self._path = path = workdir / METRICS_FILE
        records = _trim(path, start_step)
        # Last written step by split, so that no line is written twice.
        self._last_step = {_split(record): record["step"] for record in records}
        self._events = _EventFile(workdir / TENSORBOARD_FOLDER, records)
        self._file = path.open("ab")

    def has(self, step: int, split: str = "train") -> bool:
        """Return True if metrics.jsonl contains a line for ``step`` and ``split``."""
        return step <= self._last_step.get(split, -1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Append one line to metrics.jsonl, append the numbers of the line to the events, and flush both files.

        Args:
            step: number of the step; must not decrease within a split.
            metrics: values by name: numbers (Python, numpy, JAX scalars), strings or None. Non-finite numbers
                become null. ``split: eval`` marks an evaluation.

        Returns:
            True if the line was written. False if this process is not the lead, or if the file already contains the
            line, because a resumed run repeated an evaluation.
        """
        if not self._lead:
            return False
        record = {"step": int(step)} | {name: _plain(value) for name, value in metrics.items() if name != "step"}
        if self.has(step, _split(record)):
            return False
        # One write call per line, so that a kill leaves at most one incomplete line, the last one.
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self._events.write(record, time.time())
        self._events.flush()
        self._last_step[_split(record)] = int(step)
        return True

    def require_file(self) -> None:
        """Raise ``ValueError`` if the file is no longer in its folder, because the workdir was deleted, moved or
        replaced during the run."""
        if self._lead and not _is_at(self._file, self._path):
            raise ValueError(
                f"{self._path.parent}: deleted, moved or replaced during the run, so nothing more is saved "
                "there; put it back and run the command again, or start anew"
            )

    def close(self) -> None:
        """Close both files; may be called twice."""
        if self._lead and not self._file.closed:
            self._file.close()
            self._events.close()


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _split(record: Mapping[str, Any]) -> str:
    return record.get("split", "train")


def _plain(value: Any) -> Any:
    """Convert a metric to a JSON value: numpy and JAX scalars to Python numbers, non-finite numbers to None."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    assert value is None or isinstance(value, bool | int | float | str), f"metric of type {type(value)}"
    return value


def _complete_lines(content: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
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


def _trim(path: Path, start_step: int) -> list[dict[str, Any]]:
    """Remove lines of steps after ``start_step``, incomplete lines and duplicates; return the remaining records."""
    if not path.exists():
        return []
    content = path.read_bytes()
    kept: list[tuple[bytes, dict[str, Any]]] = []
    last_step: dict[str, int] = {}
    for line, record in _complete_lines(content):
        if last_step.get(_split(record), -1) < record["step"] <= start_step:
            last_step[_split(record)] = record["step"]
            kept.append((line, record))
    trimmed = b"".join(line for line, _ in kept)
    if trimmed != content:
        write_whole(path, trimmed)
    return [record for _, record in kept]


# TensorBoard ----------------------------------------------------------------------------------------------------


class _EventFile:
    """The only TensorBoard event file of a folder. Writes are synchronous, so a flushed event is on disk.

    A new file contains ``records`` and replaces all older event files. ``SummaryWriter(purge_step=...)`` would keep
    the older files, in which readers miss all events after an incomplete one (test_torn_event_file_is_rebuilt).
    """

    def __init__(self, folder: Path, records: list[dict[str, Any]]):
        # Imported here, because the import takes 0.3 s and only the lead process needs it.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event = Event
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob("rebuilding.*"):
            unfinished.unlink()
        old = sorted(folder.glob("events.out.tfevents.*"))
        wall_times, now = _wall_times(old), time.time()
        self._writer = EventsWriter(str(folder / "rebuilding"))
        # A START event at step 0 makes a running TensorBoard discard the events of the older files.
        self._writer.write_event(Event(wall_time=now, step=0, session_log=SessionLog(status=SessionLog.START)))
        for record in records:
            self.write(record, wall_times.get((_split(record), record["step"]), now))
        self._writer.flush()
        # Delete the old files before the rename: after a kill in between, the next start rebuilds the events. In
        # the other order, steps could occur twice.
        for path in old:
            path.unlink()
        (new,) = folder.glob("rebuilding.*")
        # TensorBoard reads files in the order of their names.
        seconds = [int(path.name.split(".")[3]) + 1 for path in old if path.name.split(".")[3].isdigit()]
        new.rename(folder / f"events.out.tfevents.{max([int(now), *seconds])}.{socket.gethostname()}")
        self.flush, self.close = self._writer.flush, self._writer.close

    def write(self, record: Mapping[str, Any], wall_time: float) -> None:
        """Append each number in one record as a scalar with the tag SPLIT/NAME, such as train/loss."""
        event = self._event(wall_time=wall_time, step=record["step"])
        for name, value in record.items():
            if name not in ("step", "split") and isinstance(value, int | float):
                event.summary.value.add(tag=f"{_split(record)}/{name}", simple_value=value)
        self._writer.write_event(event)


def read_events(path: Path) -> Iterator[Any]:
    """Yield the events (tensorboardX protos) of one file, up to the first incomplete or damaged record."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event

    content, offset = path.read_bytes(), 0
    # A record is the length of an event (8 bytes), a checksum of the length, the event, and its checksum.
    while offset + 12 <= len(content):
        end = offset + 12 + int.from_bytes(content[offset : offset + 8], "little")
        if end + 4 > len(content):
            return
        try:
            yield Event.FromString(content[offset + 12 : end])
        except DecodeError:
            return
        offset = end + 4


def _wall_times(paths: list[Path]) -> dict[tuple[str, int], float]:
    """Return the recorded wall time of each (split, step), so that rebuilt events keep their times."""
    return {
        (event.summary.value[0].tag.split("/")[0], event.step): event.wall_time
        for path in paths
        for event in read_events(path)
        if event.summary.value
    }
