"""The order in which records are read, and the readers that follow it."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from input_shards import assert_equal, make_shards, numbers_of, order_of, stream, take

from bert_jax.hashing import hash_key, permutation
from data_pipeline.read.order import BatchSizes, HostRows, LaneOrder, usable_lanes
from data_pipeline.read.reader import LaneReader, RecordReader
from data_pipeline.shards import shard_files as shards
from data_pipeline.shards.tfexample import decode_example


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """512 records in files of uneven sizes, one of them empty."""
    return make_shards(tmp_path_factory.mktemp("shards"), 100, 0, 7, 250, 155)


@pytest.mark.cases(1)
@pytest.mark.parametrize("lanes", [1, 4, 16])
@pytest.mark.parametrize(("segment", "window"), [(1, 1), (7, 3), (8, 2), (1024, 4)])
def test_one_epoch_is_every_record_once(lanes, segment, window):
    numbers = order_of(512, lanes, 16, 64, segment=segment, window=window)
    assert sorted(numbers[:32].ravel()) == sorted(numbers[32:].ravel()) == list(range(512))
    assert (numbers[:32] != numbers[32:]).any()


def test_lanes_differ_by_one_record_whatever_the_count():
    for records in (16, 17, 100, 511, 1000):
        order = LaneOrder(records=records, lanes=16, segment_records=8, window_segments=2, seed=0)
        sizes = [order.lane_records(lane) for lane in range(16)]
        assert sum(sizes) == records and max(sizes) - min(sizes) <= 1
        seen = Counter(order_of(records, 16, 16, records // 16 * 3).ravel().tolist())
        shortest = records // 16
        assert len(seen) == records
        assert max(seen.values()) <= 3 and min(seen.values()) >= 3 * shortest // (shortest + 1)


def test_segments_are_consecutive_and_bounded():
    order = LaneOrder(records=1000, lanes=4, segment_records=50, window_segments=3, seed=0)
    covered = []
    for lane in range(4):
        position = 0
        while position < order.lane_records(lane):
            _, window = order.window(lane, position)
            assert len(window.ranges) <= 3 and all(0 < b - a <= 50 for a, b in window.ranges)
            covered += window.ranges
            position = window.start + len(window.order)
    covered.sort()
    assert covered[0][0] == 0 and covered[-1][1] == 1000
    assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))


def test_order_changes_with_seed_lane_epoch_and_is_mixed():
    first = order_of(512, 8, 16, 64)
    assert (first != order_of(512, 8, 16, 64, seed=4)).mean() > 0.9
    assert (first[:32] != first[32:]).mean() > 0.9
    assert len({tuple(permutation(20, 1, lane, epoch)) for lane in range(5) for epoch in range(5)}) == 25
    counts = np.zeros((5, 5))
    for i in range(5000):
        counts[np.arange(5), permutation(5, 9, i)] += 1
    assert abs(counts / 1000 - 1).max() < 0.15


def test_order_is_frozen():
    """These numbers must never change: a running job's saved position depends on them."""
    assert permutation(8, 1, 2, 3).tolist() == GOLDEN_PERMUTATION
    assert order_of(100, 4, 8, 3).tolist() == GOLDEN_ORDER


GOLDEN_PERMUTATION = [5, 7, 1, 3, 2, 4, 6, 0]
GOLDEN_ORDER = [[1, 2, 84, 83, 90, 87, 67, 45], [0, 4, 32, 85, 88, 92, 68, 43], [5, 3, 35, 34, 89, 91, 70, 66]]


def test_order_does_not_depend_on_how_files_are_cut(folder, tmp_path):
    other = make_shards(tmp_path / "one", 512)
    assert_equal(take(stream(folder), 40), take(stream(other), 40))


def test_batch_sizes():
    sizes = BatchSizes(32, (3, 8, 2, 16))
    assert [sizes.size(i) for i in range(7)] == [8, 8, 8, 16, 16, 32, 32]
    assert [sizes.start(i) for i in (0, 3, 5, 7)] == [0, 24, 56, 120]
    assert usable_lanes(64, 5) == 4 and usable_lanes(12, 6) == 6 and usable_lanes(8, 100) == 8


def test_integers_have_the_hashes_of_arrays():
    parts = (0, 7, 2**62, 2**64 - 1)
    expected = hash_key(*(np.array([part], np.uint64) for part in parts))
    np.testing.assert_array_equal(hash_key(*parts), expected)
    np.testing.assert_array_equal(hash_key(0, 7, np.array([2**62, 3]), 2**64 - 1)[:1], expected)


def test_memory_is_bounded_by_windows(folder):
    index = shards.read_index(folder)
    order = LaneOrder(records=512, lanes=4, segment_records=8, window_segments=2, seed=0)
    sizes = BatchSizes(16)
    reader = LaneReader(RecordReader(index), order, sizes, HostRows.of(4, sizes, range(4, 12)))
    largest = max(entry.lengths.max() for entry in index.entries if entry.records) + shards.FRAME_BYTES
    for step in range(100):
        reader.batch(step)
        held = [len(loaded.data) for _, _, _, loaded in reader._windows.values()]
        assert len(held) == 2, "the host reads lanes 1 and 2 only"
        assert sum(held) <= 2 * 2 * 8 * largest


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "rows"), [(64, None), (128, range(32, 100)), (128, range(99, 31, -1))])
def test_many_lanes_read_the_order_from_any_step(folder, batch_size, rows):
    """More lanes than are loaded whole at once: the first batches of the others come record by record."""
    order = LaneOrder(records=512, lanes=64, segment_records=2, window_segments=2, seed=3)
    sizes = BatchSizes(batch_size)
    expected = order_of(512, 64, batch_size, 24, segment=2)[:, slice(None) if rows is None else list(rows)]
    records = RecordReader(shards.read_index(folder))
    for start in (0, 1, 5, 19):
        reader = LaneReader(records, order, sizes, HostRows.of(64, sizes, rows))
        for step in range(start, 24):
            raw = reader.batch(step)
            np.testing.assert_array_equal(raw.numbers, expected[step])
            assert not raw.status.any()
            ids = [decode_example(record)["input_ids"] for record in raw.records]
            np.testing.assert_array_equal(numbers_of(np.array(ids)), expected[step])
