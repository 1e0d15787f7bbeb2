"""Metrics of a run on disk: WORKDIR/metrics.jsonl and TensorBoard events under WORKDIR/tensorboard.

metrics.jsonl is the record; the events are a view of it. A run that was killed and resumed from the checkpoint
of step s drops every line after s (those steps run again) and rebuilds the events, so that both hold every
logged step exactly once, in order, however often and wherever the run was killed.
"""

import json
import math
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import google_crc32c

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
# Values that differ between two equal runs; everything else in a line is reproducible.
TIMING_KEYS = ("seconds_per_step", "tokens_per_second", "mfu", "data_wait_fraction")


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Return all complete lines of WORKDIR/metrics.jsonl in order; empty without a file. Skips a torn line."""
    path = Path(workdir) / METRICS_FILE
    if not path.exists():
        return []
    return [record for _, record in _complete_lines(path.read_bytes())]


class MetricsWriter:
    """Appends metrics to metrics.jsonl and TensorBoard; made once per start, by every process.

    Args:
        workdir: folder of the run; made if missing.
        start_step: step of the checkpoint that the run continues from (0: from the beginning). Lines of later
            steps and torn lines are removed.
        lead: False makes every method do nothing; only one process of a run may write.
    """

    def __init__(self, workdir: Path | str, start_step: int = 0, *, lead: bool = True):
        self._lead = lead
        # Last step written, per split: what is on disk already is not written twice.
        self._last_step: dict[str, int] = {}
        if not lead:
            return
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / METRICS_FILE
        records = _trim(path, start_step)
        for record in records:
            self._last_step[_split(record)] = record["step"]
        self._events = _EventFile(workdir / TENSORBOARD_FOLDER, records)
        self._file = path.open("ab")

    def has(self, step: int, split: str = "train") -> bool:
        """Return True if the line of ``step`` is on disk already."""
        return step <= self._last_step.get(split, -1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Append one line and flush it.

        Args:
            step: number of the step; must not decrease within a split.
            metrics: numbers (Python, numpy or jax scalars), strings or None by name. Non-finite numbers become
                null. ``split: eval`` marks an evaluation.

        Returns:
            False if the line was on disk before (a resumed run repeats an evaluation) and nothing was written.
        """
        if not self._lead:
            return False
        record = {"step": int(step)} | {name: _plain(value) for name, value in metrics.items() if name != "step"}
        if self.has(step, _split(record)):
            return False
        # One write call per line: a kill leaves at most one torn line, the last.
        self._file.write(_encode(record))
        self._file.flush()
        self._events.write(record, time.time())
        self._last_step[_split(record)] = int(step)
        return True

    def close(self) -> None:
        """Close both files; may be called twice."""
        if self._lead:
            self._file.close()
            self._events.close()


def _split(record: Mapping[str, Any]) -> str:
    return record.get("split", "train")


def _plain(value: Any) -> Any:
    """A JSON value; numpy and jax scalars become Python numbers, non-finite ones None."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    assert value is None or isinstance(value, bool | int | float | str), f"metric of type {type(value)}"
    return value


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _complete_lines(content: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Lines that end in a newline and hold a JSON object with a step, raw and parsed."""
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue
        try:
            record = json.loads(line)
        except ValueError:  # torn or damaged: not distinguishable from a line that was never written
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record


def _trim(path: Path, start_step: int) -> list[dict[str, Any]]:
    """Drop lines after ``start_step``, torn lines and repeated steps from the file; returns what stays."""
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
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(trimmed)
        temporary.replace(path)
    return [record for _, record in kept]


# TensorBoard ----------------------------------------------------------------------------------------------------


class _EventFile:
    """One TensorBoard event file; written synchronously, so that a flushed event is on disk.

    Making one replaces all older event files of the folder by a file that holds ``records``.
    """

    def __init__(self, folder: Path, records: list[dict[str, Any]]):
        from tensorboardX.proto import event_pb2  # 0.3 s, and only the lead process needs it

        self._proto = event_pb2
        folder.mkdir(parents=True, exist_ok=True)
        old = sorted(folder.glob("events.out.tfevents.*"))
        wall_times = _wall_times(old)
        path = folder / _next_name(old)
        temporary = folder / "rebuilding.tmp"
        now = time.time()
        with temporary.open("wb") as file:
            self._file = file
            self._append(event_pb2.Event(wall_time=now, file_version="brain.Event:2"))
            # A START at step 0 makes a TensorBoard that is running forget what it read from the older files.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(event_pb2.Event(wall_time=now, step=0, session_log=start))
            for record in records:
                self.write(record, wall_times.get((_split(record), record["step"]), now))
        # Old files go first: killed in between, the next start rebuilds; the other order could leave steps twice.
        for other in old:
            other.unlink()
        temporary.rename(path)
        self._file = path.open("ab")

    def write(self, record: Mapping[str, Any], wall_time: float) -> None:
        """Append the numbers of one line as scalars train/NAME or eval/NAME and flush."""
        event = self._proto.Event(wall_time=wall_time, step=record["step"])
        for name, value in record.items():
            if name not in ("step", "split") and isinstance(value, int | float):
                event.summary.value.add(tag=f"{_split(record)}/{name}", simple_value=value)
        self._append(event)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _append(self, event: Any) -> None:
        payload = event.SerializeToString()
        header = struct.pack("<Q", len(payload))
        checksums = [struct.pack("<I", _masked_crc(part)) for part in (header, payload)]
        self._file.write(header + checksums[0] + payload + checksums[1])


def _masked_crc(data: bytes) -> int:
    """The checksum of the TFRecord framing: crc32c rotated by 15 bits plus a constant."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _next_name(old: list[Path]) -> str:
    """A name that sorts after the old ones: TensorBoard reads files in the order of their names."""
    seconds = [int(path.name.split(".")[3]) for path in old if path.name.split(".")[3].isdigit()]
    return f"events.out.tfevents.{max([int(time.time()), *(s + 1 for s in seconds)])}.{socket.gethostname()}"


def read_events(path: Path) -> Iterator[Any]:
    """The events (tensorboardX protos) of one file, up to a torn or damaged record."""
    from tensorboardX.proto import event_pb2

    content = path.read_bytes()
    offset = 0
    while offset + 12 <= len(content):
        header = content[offset : offset + 8]
        (length,) = struct.unpack("<Q", header)
        payload = content[offset + 12 : offset + 12 + length]
        footer = content[offset + 12 + length : offset + 16 + length]
        if len(footer) < 4 or footer != struct.pack("<I", _masked_crc(payload)):
            return
        yield event_pb2.Event.FromString(payload)
        offset += 16 + length


def _wall_times(paths: list[Path]) -> dict[tuple[str, int], float]:
    """When each (split, step) was first written, so that rebuilt events keep their place on the time axis."""
    times: dict[tuple[str, int], float] = {}
    for path in paths:
        for event in read_events(path):
            if event.summary.value:
                times[event.summary.value[0].tag.split("/")[0], event.step] = event.wall_time
    return times
