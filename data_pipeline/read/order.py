"""The order of training data: a pure function of (seed, data_step).

The records of a folder, in file-name order, are split into segments of at most ``segment_records`` consecutive
records. There are V lanes, and segment i belongs to lane i mod V. Every lane has the same number of segments, and
the sizes of lanes differ by at most one record. A segment may therefore span two files, and file borders do not
influence how often a record is read.

In every epoch of a lane, its segments are permuted by (seed, lane, epoch). W (``window_segments``) consecutive
segments of this permutation form a window. The records of a window are read together and are permuted by (seed,
lane, epoch, window); contiguous rows keep their order. After its last window, a lane starts its next
epoch, independently of other lanes. The first window of most lanes is shorter, so that lanes do not load their
windows at the same step.

Row r of a global batch of B rows comes from lane r // (B / V), so hosts that feed contiguous rows read contiguous
lanes. The order does not depend on hosts, files or time.

The rows of a mixture come from several folders, its parts. Every part has the lanes and windows described above. A
balanced sequence (:func:`part_counts`) assigns each position of a lane to a part, and the positions of a part in a
lane are read in the order of this lane of the part.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.hashing import hash_key, permutation
from bert_jax.json_values import Json
from data_pipeline.shards.shard_files import ShardIndex


@dataclass(frozen=True)
class BatchSizes:
    """Batch size of each data step.

    ``ramp`` is a flattened tuple of (steps, size) pairs; after the ramp, the batch size is ``final``.
    """

    final: int
    ramp: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """All batch sizes of the ramp, and the final size."""
        return (*self.ramp[1::2], self.final)

    def start(self, data_step: int) -> int:
        """Return the number of examples before batch ``data_step``."""
        seen = 0
        for steps, size in zip(self.ramp[::2], self.ramp[1::2], strict=True):
            if data_step <= steps:
                return seen + data_step * size
            seen, data_step = seen + steps * size, data_step - steps
        return seen + data_step * self.final

    def size(self, data_step: int) -> int:
        """Return the number of rows of batch ``data_step``."""
        return self.start(data_step + 1) - self.start(data_step)


def usable_lanes(lanes: int, records: int) -> int:
    """Return the largest divisor of ``lanes`` that is at most ``records``, so that no lane is empty."""
    return max(n for n in range(1, lanes + 1) if lanes % n == 0 and n <= max(records, 1))


@dataclass(frozen=True)
class LaneWindow:
    """A window of one epoch of a lane: its record ranges [start, stop), and the order of its records.

    ``order`` permutes the concatenation of the ranges; ``start`` is the position in the epoch at which the window
    starts.
    """

    start: int
    ranges: tuple[tuple[int, int], ...]
    order: np.ndarray

    @property
    def records(self) -> np.ndarray:
        """Record indices in reading order, int64."""
        return np.concatenate([np.arange(a, b) for a, b in self.ranges])[self.order]


@dataclass(frozen=True)
class LaneOrder:
    """Lanes and windows of a folder with ``records`` records, as described in the docstring of this module."""

    records: int
    lanes: int
    segment_records: int
    window_segments: int
    seed: int
    is_contiguous: bool = False  # records keep their order within a segment

    def __post_init__(self) -> None:
        assert 0 < self.lanes <= self.records

    @property
    def segments_per_lane(self) -> int:
        """Number of segments of every lane."""
        longest = -(-self.records // self.lanes)
        return -(-longest // self.segment_records)

    def lane_records(self, lane: int) -> int:
        """Return the number of records of ``lane``."""
        return self.records // self.lanes + (lane < self.records % self.lanes)

    @cached_property
    def _segment_starts(self) -> np.ndarray:
        """First record index of every segment, then the number of records.

        The array is int64[V * segments_per_lane + 1].
        """
        count = self.segments_per_lane
        sizes = np.array([self.lane_records(v) for v in range(self.lanes)])
        cuts = np.arange(count + 1)[:, None] * sizes // count
        return np.concatenate([[0], np.cumsum(np.diff(cuts, axis=0).ravel())])

    def lane_windows(self, lane: int, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the segments of one epoch of a lane in reading order, and the boundaries of its windows.

        Each boundary is returned twice: as the number of segments and as the number of records that precede it in
        the epoch.
        """
        count, window = self.segments_per_lane, self.window_segments
        order = permutation(count, self.seed, 1, lane, epoch)
        first = 1 + lane % window if count > window else count
        edges = np.append(np.arange(first - window, count, window).clip(0), count)
        segments = order * self.lanes + lane
        sizes = self._segment_starts[segments + 1] - self._segment_starts[segments]
        return segments, edges, np.concatenate([[0], np.cumsum(sizes)])[edges]

    def window(self, lane: int, position: int) -> tuple[int, LaneWindow]:
        """Return the epoch and the window that contain ``position``.

        ``position`` is the number of records already read from ``lane``, in all epochs.
        """
        epoch, offset = divmod(position, self.lane_records(lane))
        segments, edges, record_edges = self.lane_windows(lane, epoch)
        number = int(np.searchsorted(record_edges, offset, side="right")) - 1
        starts = self._segment_starts
        chosen = segments[edges[number] : edges[number + 1]].tolist()
        ranges = tuple((int(starts[s]), int(starts[s + 1])) for s in chosen)
        size = int(record_edges[number + 1] - record_edges[number])
        order = np.arange(size) if self.is_contiguous else permutation(size, self.seed, 2, lane, epoch, number)
        return epoch, LaneWindow(start=int(record_edges[number]), ranges=ranges, order=order)


# ------------------------------------------------------------------ mixtures


def part_counts(weights: Sequence[int], places: np.ndarray) -> np.ndarray:
    """Return the number of places that each part has among the first ``places`` places of a balanced sequence.

    Of n places, part 1 has n w_1 / (w_1 + ... + w_K), rounded down; of all others, part 2 has the share w_2 /
    (w_2 + ... + w_K), rounded down; and so on. Therefore the next place adds one to exactly one count, each count
    differs from its exact share by less than K, and the sum of the weights is the period of the sequence.

    Args:
        weights: whole numbers above 0, one per part.
        places: int64[...], with products of places and weights below 2 ** 63.

    Returns:
        int64[..., K]
    """
    left, total, counts = places, sum(weights), []
    for weight in weights:
        counts.append(left * weight // total)
        left, total = left - counts[-1], total - weight
    return np.stack(counts, -1)


def assign_places(weights: Sequence[int], places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the part of each of ``places`` int64[N], and its :func:`part_counts`, int64[N, K]."""
    before = part_counts(weights, places)
    return np.argmax(part_counts(weights, places + 1) - before, -1), before


@dataclass(frozen=True)
class MixtureOrder:
    """The order of a mixture: the weights of its parts, and their orders, which have the same lanes and seed.

    Position p of lane v has place p + v + (a number that the seed determines) in the sequence of the parts. Places
    are therefore consecutive within a lane, and at the same position of all lanes, so that the shares of the
    parts in every batch are close to the weights. A folder without a mixture counts as a mixture of one part.
    """

    weights: tuple[int, ...]
    orders: tuple[LaneOrder, ...]

    @property
    def seed(self) -> int:
        """Seed of the order."""
        return self.orders[0].seed

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.orders[0].lanes

    @property
    def records(self) -> int:
        """Number of records of all parts."""
        return sum(order.records for order in self.orders)

    @cached_property
    def _first_places(self) -> np.ndarray:
        """Place of position 0 of every lane, int64[V]."""
        return np.arange(self.lanes) + int(hash_key(self.seed, 4)[0] % np.uint64(sum(self.weights)))

    def locate(self, lanes: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each position, and the position in this lane of the part; all arrays are int64[N]."""
        first = self._first_places[lanes]
        parts, before = assign_places(self.weights, first + positions)
        counts = before - part_counts(self.weights, first)
        return parts, counts[np.arange(len(parts)), parts]

    def rows(self, position: int) -> np.ndarray:
        """Return the number of rows of each part before ``position`` in all lanes, int64[K]."""
        counts = [part_counts(self.weights, self._first_places + place) for place in (position, 0)]
        return (counts[0] - counts[1]).sum(0)


# ------------------------------------------------------------------ hosts


@dataclass(frozen=True)
class HostRows:
    """Rows of the global batch that one host feeds."""

    lanes: int
    sizes: BatchSizes
    rows: tuple[int, ...]

    @classmethod
    def of(cls, lanes: int, sizes: BatchSizes, rows: Sequence[int] | None) -> "HostRows":
        """Return the :class:`HostRows` of the host that feeds ``rows``, indices in the global batch (None: all).

        Raises ``ValueError`` if a row is outside the batch, or if a ramp changes the batch size and
        :meth:`cuts_lanes` is true.
        """
        rows = tuple(range(sizes.final) if rows is None else map(int, rows))
        if not rows or min(rows) < 0 or max(rows) >= sizes.final:
            raise ValueError(f"rows: {rows} is not allowed; use indices from 0 to {sizes.final - 1}")
        own = cls(lanes, sizes, rows)
        if sizes.ramp and own.cuts_lanes():
            raise ValueError(
                f"data.lanes: {lanes} lanes cannot be divided among the hosts while training.batch_ramp changes "
                "the batch size; use a multiple of the number of hosts that feed different rows"
            )
        return own

    @property
    def are_all(self) -> bool:
        """True if this host feeds every row."""
        return len(self.rows) == self.sizes.final

    @cached_property
    def _of_final(self) -> np.ndarray:
        """``rows`` as int64[N]."""
        return np.array(self.rows)

    def _of_whole_lanes(self, size: int) -> np.ndarray:
        """Return all rows of the lanes from which this host feeds any row, for a batch of ``size`` rows."""
        lanes = list(dict.fromkeys(row // (self.sizes.final // self.lanes) for row in self.rows))
        share = size // self.lanes
        return (np.array(lanes)[:, None] * share + np.arange(share)).ravel()

    def cuts_lanes(self) -> bool:
        """Return True if this host feeds only a part of a lane, or if its rows are not sorted by lane."""
        return not np.array_equal(self.rows, self._of_whole_lanes(self.sizes.final))

    def at(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the lane, and the index within the lane, of each row of this host in a batch of ``size`` rows."""
        share = size // self.lanes
        rows = self._of_final if size == self.sizes.final else self._of_whole_lanes(size)
        return rows // share, rows % share


def shards_digest(indexes: Sequence[ShardIndex]) -> str:
    """Return a digest of the contents of all shards, in order."""
    entries = [[[e.records, e.bytes, e.crc32c] for e in index.entries] for index in indexes]
    text = json.dumps(entries if len(indexes) > 1 else entries[0])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def order_facts(
    indexes: Sequence[ShardIndex], data: DataConfig, order: MixtureOrder, sizes: BatchSizes
) -> dict[str, Json]:
    """Return the values that determine the data order, and a fingerprint of them and of the masking options."""
    is_mixture = len(indexes) > 1
    unit = "" if data.packing == "none" else " (in packed rows)"
    facts: dict[str, Json] = {
        "training.seed": order.seed,
        f"training.global_batch_size{unit}": sizes.final,
        f"training.batch_ramp{unit}": list(sizes.ramp),
        "lanes": order.lanes,
        "data.window_segments": data.window_segments,
        "data.segment_records": data.segment_records,
        "records": order.records,
        "shards": shards_digest(indexes),
    }
    if is_mixture:
        facts["data.mixture"] = list(order.weights)
    if data.is_contiguous:
        facts["data.contiguous"] = True
    content: list[str | int | float] = [data.masking]
    if data.masking == "dynamic":
        content += [data.mask_unit, data.mask_fraction, data.mask_token_share, data.random_token_share]
        content += [data.max_predictions, data.span_lengths[0], int(data.span_lengths[1])]
        if data.final_masking:
            content += [data.final_masking[0], int(data.final_masking[1])]
        if data.mask_special_tokens:
            content += ["mask_special_tokens"]
    text = json.dumps([1, facts, content], sort_keys=True)
    return facts | {"fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16]}
