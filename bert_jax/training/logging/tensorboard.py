"""TensorBoard events under WORKDIR/tensorboard, derived from metrics.jsonl.

A run that resumes rebuilds the events from the rows that metrics.jsonl keeps. Therefore they contain every logged
step exactly once and in order, even if the run was killed several times.
"""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_jax.training.logging.logger import LoggedRun, Logger, Row, scalars, split_of, step_of

FOLDER = "tensorboard"


class TensorBoard(Logger):
    """The only TensorBoard event file of a folder. Writes are synchronous, so a flushed event is on disk.

    A new file contains the rows of the run and replaces all older event files. ``SummaryWriter(purge_step=...)``
    would keep the older files, in which readers miss all events after an incomplete one
    (test_torn_event_file_is_rebuilt).
    """

    def open(self, run: LoggedRun) -> None:
        # Imported here, because the import takes 0.3 s and only the lead process needs it.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder, self._event = run.folder / FOLDER, Event
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob("rebuilding.*"):
            unfinished.unlink()
        old = sorted(folder.glob("events.out.tfevents.*"))
        wall_times, now = _wall_times(old), time.time()
        self._writer = EventsWriter(str(folder / "rebuilding"))
        # A START event at step 0 makes a running TensorBoard discard the events of the older files.
        self._writer.write_event(Event(wall_time=now, step=0, session_log=SessionLog(status=SessionLog.START)))
        for row in run.rows:
            self._write(row, wall_times.get((split_of(row), step_of(row)), now))
        self._writer.flush()
        # Delete the old files before the rename: after a kill in between, the next start rebuilds the events. In
        # the other order, steps could occur twice.
        for path in old:
            path.unlink()
        (new,) = folder.glob("rebuilding.*")
        # TensorBoard reads files in the order of their names.
        seconds = [int(path.name.split(".")[3]) + 1 for path in old if path.name.split(".")[3].isdigit()]
        new.rename(folder / f"events.out.tfevents.{max([int(now), *seconds])}.{socket.gethostname()}")

    def line(self, row: Row) -> None:
        self._write(row, time.time())
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, row: Row, wall_time: float) -> None:
        """Append each number in one row as a scalar with the tag SPLIT/NAME, such as train/loss."""
        event = self._event(wall_time=wall_time, step=step_of(row))
        for tag, value in scalars(row).items():
            event.summary.value.add(tag=tag, simple_value=value)
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
