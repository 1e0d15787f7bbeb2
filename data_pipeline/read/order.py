"""The order of training data: a pure function of (seed, data_step).

The records of a folder, in file-name order, are cut into segments of at most ``segment_records`` consecutive
records. Segment i belongs to lane i mod V. Sizes are chosen so that every lane has the same number of segments
and lanes differ by at most one record in all (a segment may therefore span two files): no record is seen more
often than another because of how the files happen to be cut. In every epoch of a lane its segments are permuted
by (seed, lane, epoch); windows of W of them are read whole and their records permuted by (seed, lane, epoch,
window). A lane that ends starts its own next epoch. The first window of a lane is shorter for most lanes, so
that lanes do not all load a window at the same step.

Row r of a global batch of B rows is drawn from lane r // (B / V), so hosts that feed contiguous rows read
contiguous lanes, whatever their number. Nothing here depends on hosts, files or time.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.hashing import permutation
from data_pipeline.shards.shard_files import ShardIndex


@dataclass(frozen=True)
class BatchSizes:
    """Batch size by data step: ``ramp`` is pairs of (steps, size), ``final`` holds after them."""

    final: int
    ramp: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """All batch sizes: those of the ramp and the final one."""
        return (*self.ramp[1::2], self.final)

    def start(self, data_step: int) -> int:
        """Examples before batch ``data_step``."""
        seen = 0
        for steps, size in zip(self.ramp[::2], self.ramp[1::2], strict=True):
            if data_step <= steps:
                return seen + data_step * size
            seen, data_step = seen + steps * size, data_step - steps
        return seen + data_step * self.final

    def size(self, data_step: int) -> int:
        """Rows of batch ``data_step``."""
        return self.start(data_step + 1) - self.start(data_step)


def usable_lanes(lanes: int, records: int) -> int:
    """``lanes``, or its largest divisor that ``records`` allows, so that no lane is empty."""
    return max(n for n in range(1, lanes + 1) if lanes % n == 0 and n <= max(records, 1))


@dataclass(frozen=True)
class LaneWindow:
    """A part of one lane's epoch that is read whole: record ranges [start, stop) and the order of their records.

    ``order`` permutes the concatenation of the ranges; ``start`` is the window's first position in the epoch.
    """

    start: int
    ranges: tuple[tuple[int, int], ...]
    order: np.ndarray

    @property
    def records(self) -> np.ndarray:
        """Record numbers in reading order, int64."""
        return np.concatenate([np.arange(a, b) for a, b in self.ranges])[self.order]


@dataclass(frozen=True)
class LaneOrder:
    """Lanes and windows over ``records`` records; see the head of this file."""

    records: int
    lanes: int
    segment_records: int
    window_segments: int
    seed: int

    def __post_init__(self) -> None:
        assert 0 < self.lanes <= self.records

    @property
    def segments_per_lane(self) -> int:
        """Segments of every lane."""
        longest = -(-self.records // self.lanes)
        return -(-longest // self.segment_records)

    def lane_records(self, lane: int) -> int:
        """Records of ``lane``."""
        return self.records // self.lanes + (lane < self.records % self.lanes)

    @cached_property
    def _segment_starts(self) -> np.ndarray:
        """First record of segment i, and the number of records at the end: int64[V * segments_per_lane + 1]."""
        count = self.segments_per_lane
        sizes = np.array([self.lane_records(v) for v in range(self.lanes)])
        cuts = np.arange(count + 1)[:, None] * sizes // count
        return np.concatenate([[0], np.cumsum(np.diff(cuts, axis=0).ravel())])

    def lane_windows(self, lane: int, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Plan of one epoch of a lane: its segments in order, window edges in segments, and in records."""
        count, window = self.segments_per_lane, self.window_segments
        order = permutation(count, self.seed, 1, lane, epoch)
        first = 1 + lane % window if count > window else count
        edges = np.append(np.arange(first - window, count, window).clip(0), count)
        segments = order * self.lanes + lane
        sizes = self._segment_starts[segments + 1] - self._segment_starts[segments]
        return segments, edges, np.concatenate([[0], np.cumsum(sizes)])[edges]

    def window(self, lane: int, position: int) -> tuple[int, LaneWindow]:
        """The epoch and the window that hold ``position`` (records drawn from ``lane`` since the start)."""
        epoch, offset = divmod(position, self.lane_records(lane))
        segments, edges, record_edges = self.lane_windows(lane, epoch)
        number = int(np.searchsorted(record_edges, offset, side="right")) - 1
        starts = self._segment_starts
        chosen = segments[edges[number] : edges[number + 1]].tolist()
        ranges = tuple((int(starts[s]), int(starts[s + 1])) for s in chosen)
        size = int(record_edges[number + 1] - record_edges[number])
        return epoch, LaneWindow(
            start=int(record_edges[number]),
            ranges=ranges,
            order=permutation(size, self.seed, 2, lane, epoch, number),
        )


@dataclass(frozen=True)
class HostRows:
    """The rows of the global batch that one host feeds, as (lane, place in the lane's share), in row order."""

    lanes: int
    sizes: BatchSizes
    rows: tuple[int, ...] | None = None

    @classmethod
    def of(cls, lanes: int, sizes: BatchSizes, rows: Sequence[int] | None) -> "HostRows":
        """``ValueError`` when rows lie outside the batch, or cut a lane while the batch size changes."""
        if rows is None:
            return cls(lanes, sizes)
        rows = tuple(int(row) for row in rows)
        if not rows or min(rows) < 0 or max(rows) >= sizes.final:
            raise ValueError(f"rows: must be numbers from 0 to below the batch size ({sizes.final})")
        own = cls(lanes, sizes, rows)
        if sizes.ramp and own.cuts_lanes():
            raise ValueError(
                f"data.lanes: {lanes} lanes cannot be dealt to these hosts while training.batch_ramp changes the "
                "batch; give a multiple of the number of hosts that feed different rows"
            )
        return own

    def cuts_lanes(self) -> bool:
        """Return True if this host feeds a lane only in part (or its rows are not in the order of lanes)."""
        if self.rows is None:
            return False
        share = self.sizes.final // self.lanes
        lanes = dict.fromkeys(row // share for row in self.rows)
        return list(self.rows) != [lane * share + i for lane in lanes for i in range(share)]

    def at(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the lane and the place of each row of this host in a batch of ``size`` rows, int64 each."""
        share = size // self.lanes
        if self.rows is None:
            rows = np.arange(size)
        elif size == self.sizes.final:
            rows = np.array(self.rows)
        else:
            lanes = list(dict.fromkeys(r // (self.sizes.final // self.lanes) for r in self.rows))
            rows = (np.array(lanes)[:, None] * share + np.arange(share)).ravel()
        return rows // share, rows % share


def order_facts(index: ShardIndex, data: DataConfig, order: LaneOrder, sizes: BatchSizes) -> dict[str, Any]:
    """Return what the order of data depends on, readable, with a fingerprint that covers the masking too."""
    shards = json.dumps([[e.records, e.bytes, e.crc32c] for e in index.entries]).encode()
    facts: dict[str, Any] = {
        "training.seed": order.seed,
        "training.global_batch_size": sizes.final,
        "training.batch_ramp": list(sizes.ramp),
        "lanes": order.lanes,
        "data.window_segments": order.window_segments,
        "data.segment_records": order.segment_records,
        "records": order.records,
        "shards": hashlib.sha256(shards).hexdigest()[:16],
    }
    content = [data.masking]
    if data.masking == "dynamic":
        content += [data.mask_unit, data.mask_fraction, data.mask_token_share, data.random_token_share]
        content += [data.max_predictions, data.span_mean, data.span_max]
    text = json.dumps([1, facts, content], sort_keys=True)
    return facts | {"fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16]}
