"""Readers of indexed shards, which check every byte against the index and report damage without an exception.

A record is damaged if any byte of its frame (length, checksums, payload) differs from the index, or if it cannot be
read. Instead of a damaged record, None and the reason are returned, so the positions of later records do not
change.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from bert_jax.batch import DataBudgetError
from bert_jax.io.storage import Location, ObjectPath, StorageError
from data_pipeline.read.order import BatchSizes, HostRows, LaneOrder
from data_pipeline.shards.shard_files import (
    FRAME_BYTES,
    HEADER_BYTES,
    INDEX_NAME,
    ShardIndex,
    frame_headers,
    mask_crcs,
)

_log = logging.getLogger(__name__)

# Meaning of the status of a row (0: good), as the end of the log line "FILE: record N ...".
REASONS = (
    "is good",
    "cannot be read: the file is missing or unreadable",
    "is beyond the end of the file",
    "has a length that differs from the index, or a damaged length checksum",
    "has a stored checksum that differs from the index",
    "has contents that do not match the checksum in the index",
    "has token ids outside the vocabulary",
)
UNREADABLE, BEYOND_END, BAD_LENGTH, BAD_FOOTER, BAD_PAYLOAD, BAD_IDS = range(1, len(REASONS))

_BLOCK = 1024  # records between the byte offsets that are kept in memory
_LOADERS = 4  # threads that read windows of several lanes
_WHOLE_WINDOWS = 4  # largest number of windows that are read as a whole for one batch
_REQUESTS = 16  # concurrent requests to an object store
_NAMED_BLANKS = 100  # damaged records that are logged one by one; after them, only if the count is a power of two


@dataclass
class _Loaded:
    """Record ranges that have been read; ``data`` contains their bytes.

    The other fields contain, for each record in reading order, its index, payload offsets, checksum and status.
    """

    data: memoryview
    numbers: list[int]  # record numbers
    starts: list[int]
    ends: list[int]
    crcs: list[int]
    status: list[int]

    def __getitem__(self, place: int) -> tuple[bytes | None, int]:
        """Return (payload, 0), or (None, status) if the record is damaged.

        ``place`` is the index of the record in reading order.
        """
        if self.status[place]:
            return None, self.status[place]
        payload = bytes(self.data[self.starts[place] : self.ends[place]])
        if google_crc32c.value(payload) != self.crcs[place]:
            return None, BAD_PAYLOAD
        return payload, 0


class RecordReader:
    """Reader of ranges of records; records are numbered consecutively across all shards in file-name order."""

    def __init__(self, index: ShardIndex) -> None:
        self.index = index
        self._first = np.concatenate([[0], np.cumsum([entry.records for entry in index.entries])])
        self._blocks: dict[int, np.ndarray] = {}
        folder = index.folder
        self.files = ObjectFiles(folder) if isinstance(folder, ObjectPath) else LocalFiles(folder)

    def locate(self, number: int) -> tuple[Location, int]:
        """Return the path of the file that contains record ``number``, and the index of the record in this file."""
        shard = int(np.searchsorted(self._first, number, side="right")) - 1
        return self.index.folder / self.index.entries[shard].name, number - int(self._first[shard])

    def _block_offsets(self, shard: int) -> np.ndarray:
        """Return the byte offset of every ``_BLOCK``-th record of a file; the offsets are cached."""
        if shard in self._blocks:
            return self._blocks[shard]
        lengths = self.index.entries[shard].lengths
        sums = np.add.reduceat(lengths, np.arange(0, len(lengths), _BLOCK), dtype=np.int64)
        blocks = np.arange(1, len(sums) + 1) * _BLOCK
        self._blocks[shard] = np.concatenate([[0], np.cumsum(sums) + blocks * FRAME_BYTES])
        return self._blocks[shard]

    def _offset(self, shard: int, record: int) -> int:
        """Return the byte offset of the frame of ``record`` in its file."""
        block = record // _BLOCK
        rest = self.index.entries[shard].lengths[block * _BLOCK : record]
        return int(self._block_offsets(shard)[block]) + int(rest.sum(dtype=np.int64)) + len(rest) * FRAME_BYTES

    def _pieces(self, ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int]]:
        """Split the ranges at file borders; return (index of the file, start, stop) of each piece, where
        ``start`` and ``stop`` are indices of records in the file."""
        pieces = []
        for start, stop in ranges:
            shard = int(np.searchsorted(self._first, start, side="right")) - 1
            while start < stop:
                first = int(self._first[shard])
                end = min(stop, int(self._first[shard + 1]))
                if end > start:
                    pieces.append((shard, start - first, end - first))
                start, shard = max(start, end), shard + 1
        return pieces

    def load(self, ranges: tuple[tuple[int, int], ...], order: np.ndarray | None = None) -> _Loaded:
        """Read and verify ``ranges`` of records; ``order`` permutes their concatenation."""
        pieces = self._pieces(ranges)
        columns = [(self.index.entries[s].lengths[a:b], self.index.entries[s].crcs[a:b]) for s, a, b in pieces]
        lengths = np.concatenate([c[0] for c in columns]).astype(np.int64)
        crcs = np.concatenate([c[1] for c in columns])
        frame_ends = np.cumsum(lengths + FRAME_BYTES)
        frame_starts = frame_ends - lengths - FRAME_BYTES
        data = np.empty(int(frame_ends[-1]), np.uint8)
        status = np.zeros(len(lengths), np.int64)
        done, places, requests = 0, [], []
        for shard, first, end in pieces:
            here = slice(done, done + end - first)
            begin, stop = int(frame_starts[done]), int(frame_ends[here.stop - 1])
            places.append((here, begin, stop))
            name = self.index.entries[shard].name
            requests.append(_Request(name, self._offset(shard, first), data.data[begin:stop]))
            done = here.stop
        for (here, begin, stop), got in zip(places, self.files.read(requests), strict=True):
            data[begin + max(got, 0) : stop] = 0  # np.empty is not initialized
            status[here][frame_ends[here] > begin + got] = BEYOND_END if got >= 0 else UNREADABLE
        starts, ends = frame_starts + HEADER_BYTES, frame_ends - (FRAME_BYTES - HEADER_BYTES)
        footers = data[ends[:, None] + np.arange(4)] != mask_crcs(crcs)[:, None].view(np.uint8).reshape(-1, 4)
        status[(status == 0) & footers.any(1)] = BAD_FOOTER
        headers = data[frame_starts[:, None] + np.arange(HEADER_BYTES)] != frame_headers(lengths)
        status[(status == 0) & headers.any(1)] = BAD_LENGTH
        numbers = np.concatenate([np.arange(a, b) for a, b in ranges])
        if order is None:
            order = np.arange(len(numbers))
        picked = (column[order].tolist() for column in (starts, ends, crcs, status))
        return _Loaded(data.data, numbers[order].tolist(), *picked)


class _Request(NamedTuple):
    """Request to read ``len(target)`` bytes from ``offset`` in the file ``name``."""

    name: str
    offset: int
    target: memoryview


class LocalFiles:
    """Shards in a local folder: ``loaders`` threads read at most ``whole_windows`` complete windows for a batch."""

    loaders, whole_windows = _LOADERS, _WHOLE_WINDOWS

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, requests: Sequence[_Request]) -> list[int]:
        """Fill the targets of ``requests``; return the number of bytes read for each (-1: unreadable file)."""
        files: dict[str, int] = {}
        try:
            return [self._read(request, files) for request in requests]
        finally:
            for file in files.values():
                os.close(file)

    def _read(self, request: _Request, files: dict[str, int]) -> int:
        name, offset, target = request
        got = 0
        try:
            if name not in files:
                files[name] = os.open(self._folder / name, os.O_RDONLY)
            while got < len(target) and (count := os.preadv(files[name], [target[got:]], offset + got)):
                got += count
        except OSError:
            return -1
        return got


class ObjectFiles:
    """Shards in an object store. Complete windows are read with concurrent requests, because a request is slow."""

    loaders, whole_windows = _REQUESTS, 1 << 30

    def __init__(self, folder: ObjectPath) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="object-store")

    def read(self, requests: Sequence[_Request]) -> list[int]:
        """Read as :meth:`LocalFiles.read` does.

        Raises ``StorageError`` if the object store is not available or the whole folder is missing.
        """
        return list(self._pool.map(self._read, requests))

    def _read(self, request: _Request) -> int:
        name, offset, target = request
        try:
            content = (self._folder / name).read_range(offset, len(target))
        except FileNotFoundError:
            # A missing file is damage, as in a local folder. If the index is missing too, nothing more can be read.
            if not (self._folder / INDEX_NAME).is_file():
                raise StorageError(f"{self._folder}: the shards are missing; restore them and run again") from None
            return -1
        target[: len(content)] = content
        return len(content)


@dataclass(frozen=True)
class RawBatch:
    """Rows of one batch before parsing: payloads (None if missing), status, record indices, epochs of the lanes."""

    records: list[bytes | None]
    status: np.ndarray
    numbers: np.ndarray
    epochs: np.ndarray


class LaneReader:
    """Reader of training batches in the order of lanes and windows; keeps one window per lane in memory."""

    def __init__(self, reader: RecordReader, order: LaneOrder, sizes: BatchSizes, rows: HostRows) -> None:
        self.reader, self.order, self.sizes, self.rows = reader, order, sizes, rows
        self._windows: dict[int, tuple[int, int, int, _Loaded]] = {}  # lane -> first, end position, epoch, bytes

    def batch(self, data_step: int) -> RawBatch:
        """Read the rows of batch ``data_step`` that this host feeds; fastest for consecutive steps."""
        size = self.sizes.size(data_step)
        lanes, places = self.rows.at(size)
        positions = places + self.sizes.start(data_step) // self.order.lanes
        return self.read(lanes, positions, size // self.order.lanes)

    def read(self, lanes: np.ndarray, positions: np.ndarray, share: int) -> RawBatch:
        """Read the records at ``positions`` of ``lanes``, both int64[N]; a batch needs about ``share`` per lane."""
        runs = _runs(lanes, positions)
        self._load_together(runs, share)
        records: list[bytes | None] = []
        status, numbers, epochs = np.zeros(len(lanes), np.int64), list[int](), list[int]()
        checksum = google_crc32c.value
        for lane, start, stop in runs:
            while start < stop:
                first, end, epoch, loaded = self._windows[lane]
                if not first <= start < end:
                    first, end, epoch, loaded = self._load(lane, start)
                place, last = start - first, min(stop, end) - first
                data, starts, ends, crcs = loaded.data, loaded.starts, loaded.ends, loaded.crcs
                numbers += loaded.numbers[place:last]
                epochs += [epoch] * (last - place)
                while place < last:
                    record: bytes | None = bytes(data[starts[place] : ends[place]])
                    if checksum(record) != crcs[place] or loaded.status[place]:
                        record, status[len(records)] = loaded[place]
                    records.append(record)
                    place += 1
                start = first + last
        return RawBatch(records, status, np.array(numbers, np.int64), np.array(epochs, np.int64))

    def _load_together(self, runs: Sequence[tuple[int, int, int]], share: int) -> None:
        """Load the records of all lanes of ``runs`` (lane, start, stop), each from its smallest start on.

        Reading many complete windows for one batch would delay this batch by a second at the start of training.
        Therefore only some windows are read completely; from each other lane, only the records of the next few
        batches, which need ``share`` records each, are read, and the complete window is read later.
        """
        held, files = self._windows, self.reader.files
        starts: dict[int, int] = {}
        for lane, start, _ in runs:
            starts[lane] = min(start, starts.get(lane, start))
        missing = [v for v in starts if v not in held or not held[v][0] <= starts[v] < held[v][1]]
        for lane in missing:
            held.pop(lane, None)  # free the old window before the new one is read

        def load(rank: int) -> None:
            self._load(missing[rank], starts[missing[rank]], share * (rank // files.whole_windows) or None)

        if len(missing) > 1:
            with ThreadPoolExecutor(files.loaders) as pool:
                list(pool.map(load, range(len(missing))))
        elif missing:
            load(0)

    def _load(self, lane: int, position: int, count: int | None = None) -> tuple[int, int, int, _Loaded]:
        """Read the window that contains ``position``, or only ``count`` of its records from ``position`` on."""
        self._windows.pop(lane, None)
        epoch, window = self.order.window(lane, position)
        first = epoch * self.order.lane_records(lane) + window.start
        if count is None:
            loaded = self.reader.load(window.ranges, window.order)
        else:
            numbers = window.records[position - first :][:count].tolist()
            loaded = self.reader.load(tuple((number, number + 1) for number in numbers))
            first = position
        self._windows[lane] = entry = (first, first + len(loaded.starts), epoch, loaded)
        return entry


def _runs(lanes: np.ndarray, positions: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the runs of rows with consecutive positions [start, stop) of one lane, as (lane, start, stop)."""
    edges = np.flatnonzero((np.diff(lanes) != 0) | (np.diff(positions) != 1)) + 1
    first, last = np.append(0, edges), np.append(edges, len(lanes)) - 1
    return list(zip(lanes[first].tolist(), positions[first].tolist(), (positions[last] + 1).tolist(), strict=True))


class SequentialReader:
    """Reader of held-out batches in file order, each record once; rows after the last record have no payload."""

    def __init__(self, reader: RecordReader, batch_size: int, rows: HostRows) -> None:
        self.reader, self.batch_size = reader, batch_size
        share = batch_size // rows.lanes
        lanes, places = rows.at(batch_size)
        self._rows = lanes * share + places

    def wanted(self, number: int) -> np.ndarray:
        """Return the indices, int64[N], of the rows that this host feeds to batch ``number``.

        The rows of all batches are numbered consecutively.
        """
        return number * self.batch_size + self._rows

    def batch(self, number: int) -> RawBatch:
        """Read the rows of batch ``number`` that this host feeds."""
        return self.read(self.wanted(number))

    def read(self, wanted: np.ndarray) -> RawBatch:
        """Read the records with the indices ``wanted`` int64[N], which are close together; rows after the last
        record have status 0."""
        exists = wanted < self.reader.index.records
        records: list[bytes | None] = [None] * len(wanted)
        status = np.zeros(len(wanted), np.int64)
        if exists.any():
            first = int(wanted[exists].min())
            loaded = self.reader.load(((first, int(wanted[exists].max()) + 1),))
            for row in np.flatnonzero(exists).tolist():
                records[row], status[row] = loaded[int(wanted[row]) - first]
        return RawBatch(records, status, wanted, np.zeros(len(wanted), np.int64))


class BlankCounter:
    """Counter that logs blank rows and raises ``DataBudgetError`` if there are more than ``budget``.

    With ``at_once``, :meth:`add` raises the error. Otherwise, only :meth:`check` raises it, because this process
    reads only some of the rows of a batch, and other processes wait for these rows.
    """

    def __init__(self, locate: Callable[[int], tuple[Location, int]], budget: int, *, at_once: bool) -> None:
        """Create a counter; ``locate`` is :meth:`RecordReader.locate`."""
        self.locate, self.budget, self.at_once, self.count = locate, budget, at_once, 0
        self._last = ""
        self._named: set[int] = set()

    def add(self, batch: Mapping[str, np.ndarray]) -> None:
        """Count the blank rows of a batch; if ``DataBudgetError`` is raised, the count remains unchanged."""
        damaged = np.flatnonzero(batch["status"])
        if not len(damaged):
            return
        for row in damaged:
            self._last = self._name(int(batch["numbers"][row]), int(batch["status"][row]))
        if self.at_once:
            self.check(len(damaged))
        self.count += len(damaged)

    def check(self, more: int = 0) -> None:
        """Raise ``DataBudgetError`` if the count plus ``more`` exceeds the budget."""
        if self.count + more > self.budget:
            raise DataBudgetError(
                f"{self.count + more} damaged records, more than data.max_blank_records ({self.budget}); restore "
                f"the shards or increase this option; the last damaged record: {self._last}"
            )

    def _name(self, number: int, reason: int) -> str:
        file, record = self.locate(number)
        text = f"{file}: record {record} {REASONS[reason]}"
        if number not in self._named:
            self._named.add(number)
            if len(self._named) <= _NAMED_BLANKS or len(self._named).bit_count() == 1:
                _log.warning("blank row instead of a damaged record (%d so far): %s", len(self._named), text)
        return text
