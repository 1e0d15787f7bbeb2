"""The input path: order, resume, hosts, damage, foreign records, refusals. Small shards, one TensorFlow."""

import dataclasses
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bert_jax.batch import DataBudgetError, feature_shapes
from bert_jax.config.schema import DataConfig
from data_pipeline import shards
from data_pipeline.input import eval_batches, pretrain_batches
from data_pipeline.order import BatchSizes, HostRows, LaneOrder, permutation, usable_lanes
from data_pipeline.reader import LaneReader, RecordReader
from data_pipeline.tfexample import decode_example

S, M, VOCAB = 16, 3, 1000
TOKENIZER = SimpleNamespace(vocab_size=VOCAB)


def config(**options) -> DataConfig:
    return DataConfig(
        **{"seq_length": S, "max_predictions": M, "segment_records": 8, "window_segments": 2} | options
    )


def example_features(numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Features that tell which record they are: ids 1 and 2 of each row are its number in base 900, plus 5."""
    rng = np.random.default_rng(7)
    count = len(numbers)
    lengths = 6 + numbers[:, None] % (S - 6)
    mask = (np.arange(S) < lengths).astype(np.int64)
    ids = (rng.integers(5, VOCAB, (10_000, S))[numbers % 10_000]) * mask
    ids[:, 1], ids[:, 2] = 5 + numbers // 900, 5 + numbers % 900
    weights = np.ones((count, M), np.float32)
    weights[:, 2] = numbers % 2
    return {
        "input_ids": ids,
        "input_mask": mask,
        "segment_ids": mask * (np.arange(S) > 3),
        "masked_lm_positions": np.tile([1, 2, 4], (count, 1)),
        "masked_lm_ids": 5 + (numbers[:, None] * [1, 3, 7]) % 900,
        "masked_lm_weights": weights,
        "next_sentence_labels": numbers[:, None] % 2,
    }


def make_shards(folder: Path, *counts: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    start, entries = 0, []
    for i, count in enumerate(counts):
        records = shards.encode_examples(example_features(np.arange(start, start + count))) if count else []
        entries.append(shards.write_records(folder / f"shard-{i:05d}-of-{len(counts):05d}.tfrecord", records))
        start += count
    shards.write_index(folder, entries)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """512 records in files of uneven sizes, one of them empty."""
    return make_shards(tmp_path_factory.mktemp("shards"), 100, 0, 7, 250, 155)


def numbers_of(ids: np.ndarray) -> np.ndarray:
    return (ids[:, 1] - 5) * 900 + ids[:, 2] - 5


def record_numbers(batch: dict[str, np.ndarray]) -> np.ndarray:
    return numbers_of(batch["input_ids"])


def stream(folder: Path, data: DataConfig | None = None, **options):
    options = {"lanes": 8, "batch_size": 16, "seed": 3, "tokenizer": TOKENIZER} | options
    return pretrain_batches(data or config(), folder=folder, **options)


def take(batches, count: int) -> list[dict[str, np.ndarray]]:
    return [next(batches)[0] for _ in range(count)]


def assert_equal(left: list[dict], right: list[dict]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def order_of(records: int, lanes: int, batch: int, steps: int, *, segment=8, window=2, seed=3) -> np.ndarray:
    """Record numbers of the first ``steps`` batches by the order alone, without files."""
    order = LaneOrder(records=records, lanes=lanes, segment_records=segment, window_segments=window, seed=seed)
    out, share = [], batch // lanes
    for row in range(batch):
        for step in range(steps):
            position = step * share + row % share
            epoch, found = order.window(row // share, position)
            out.append(found.records[position - epoch * order.lane_records(row // share) - found.start])
    return np.array(out).reshape(batch, steps).T


# ------------------------------------------------------------------ the order


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


@pytest.mark.parametrize(("batch_size", "rows"), [(64, None), (128, range(32, 100))])
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


# ------------------------------------------------------------------ batches


def test_batches_keep_the_contract_and_hold_the_records(folder):
    batches = stream(folder)
    shapes = feature_shapes(16, S, M)
    for step in range(40):
        batch, info = next(batches)
        assert list(batch) == list(shapes)
        assert {n: (a.shape, a.dtype) for n, a in batch.items()} == {
            n: (s, np.dtype(d)) for n, (s, d) in shapes.items()
        }
        source = example_features(record_numbers(batch))
        pairs = {
            "input_ids": "input_ids", "token_type_ids": "segment_ids", "sequence_ids": "input_mask",
            "mlm_positions": "masked_lm_positions", "mlm_labels": "masked_lm_ids",
            "mlm_weights": "masked_lm_weights", "nsp_labels": "next_sentence_labels",
        }  # fmt: skip
        for name, stored in pairs.items():
            np.testing.assert_array_equal(batch[name], source[stored], err_msg=name)
        np.testing.assert_array_equal(batch["position_ids"], np.tile(np.arange(S), (16, 1)))
        assert not batch["cls_positions"].any() and (batch["nsp_weights"] == 1).all()
        assert (info.data_step, info.examples_seen, info.blank_records) == (step, 16 * (step + 1), 0)
        assert info.epoch == (step + 1) / 32
        np.testing.assert_array_equal(record_numbers(batch), order_of(512, 8, 16, step + 1)[-1])


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_see_what_one_host_sees(folder, hosts):
    whole = take(stream(folder, batch_ramp=(3, 8)), 12)
    share = 16 // hosts
    parts = [
        take(stream(folder, batch_ramp=(3, 8), rows=range(h * share, (h + 1) * share)), 12) for h in range(hosts)
    ]
    joined = [{n: np.concatenate([p[i][n] for p in parts]) for n in whole[i]} for i in range(12)]
    assert_equal(joined, whole)


def test_rows_may_be_any_and_are_checked(folder):
    whole = take(stream(folder), 6)
    rows = [13, 2, 3, 7]
    some = take(stream(folder, rows=rows), 6)
    assert_equal(some, [{name: values[rows] for name, values in batch.items()} for batch in whole])
    with pytest.raises(ValueError, match="rows"):
        stream(folder, rows=[16])
    with pytest.raises(ValueError, match=r"data\.lanes: 8 lanes cannot be dealt"):
        stream(folder, rows=[0], batch_ramp=(3, 8))


def test_resume_is_exact_at_every_step_and_ignores_what_was_read_ahead(folder):
    data = config(prefetch=5)
    batches = stream(folder, data, batch_ramp=(3, 8))
    expected, states = [], [batches.state()]
    for _ in range(45):
        expected.append(next(batches)[0])
        states.append(json.loads(json.dumps(batches.state())))
    again = stream(folder, data, batch_ramp=(3, 8))
    for step in (0, 1, 2, 3, 4, 16, 31, 32, 33, 40, 7):
        again.restore(states[step])
        assert again.state() == states[step]
        assert_equal(take(again, 3), expected[step : step + 3])


def test_state_stays_small_and_far_steps_start_at_once(folder):
    batches = stream(folder)
    batches.restore(batches.state() | {"data_step": 10**9})
    for _ in range(20):
        next(batches)
        batches.skip(123_456)
    state = batches.state()
    assert len(json.dumps(state)) < 1024
    assert state["data_step"] == 10**9 + 20 + 20 * 123_456
    expected = order_of(512, 8, 16, 1)[0]
    batches.restore(state | {"data_step": 0})
    np.testing.assert_array_equal(record_numbers(next(batches)[0]), expected)


def test_skipped_batches_are_left_out_and_recorded(folder):
    plain = take(stream(folder), 20)
    batches = stream(folder)
    got = take(batches, 4)
    batches.skip(3)
    batches.skip(2)
    batch, info = next(batches)
    assert_equal([*got, batch], [*plain[:4], plain[9]])
    assert (info.data_step, info.examples_seen, info.epoch) == (9, 5 * 16, 10 / 32)
    state = batches.state()
    assert state["skipped"] == [[4, 9]]
    again = stream(folder)
    again.restore(state)
    batch, info = next(again)
    assert_equal([batch], [plain[10]])
    assert info.examples_seen == 6 * 16
    with pytest.raises(ValueError, match="batches to skip"):
        batches.skip(0)


def test_batch_ramp_reads_the_same_order_in_smaller_batches(folder):
    ramped = take(stream(folder, batch_ramp=(4, 8)), 6)
    plain = take(stream(folder), 4)
    assert [len(b["input_ids"]) for b in ramped] == [8] * 4 + [16] * 2
    per_lane = lambda batches: [  # noqa: E731
        [n for b in batches for n in record_numbers(b).reshape(8, -1)[lane].tolist()] for lane in range(8)
    ]
    assert per_lane(ramped) == per_lane(plain)


def test_a_position_of_other_data_is_refused_with_the_difference(folder, tmp_path):
    state = stream(folder).state()
    for options, message in (
        ({"seed": 4}, r"training\.seed was 3, now 4"),
        ({"lanes": 4}, "lanes was 8, now 4"),
        ({"batch_size": 32}, r"training\.global_batch_size was 16, now 32"),
        ({"data": config(segment_records=9)}, r"data\.segment_records was 8, now 9"),
    ):
        with pytest.raises(ValueError, match=message):
            stream(folder, **options).restore(state)
    other = make_shards(tmp_path / "other", 512)
    with pytest.raises(ValueError, match="shards was"):
        stream(other).restore(state)
    stream(folder, config(prefetch=7, max_blank_records=5)).restore(state)


def test_few_records_make_few_lanes(tmp_path, caplog):
    few = make_shards(tmp_path, 3, 2)
    batches = stream(few)
    assert "data.lanes: 8 falls to 4" in caplog.text
    seen = Counter(record_numbers(next(batches)[0]).tolist())
    assert set(seen) == set(range(5)) and max(seen.values()) <= 4
    with pytest.raises(ValueError, match=r"data\.lanes: 5 is not allowed"):
        stream(few, lanes=5)


# ------------------------------------------------------------------ masking at read time

MASKER = SimpleNamespace(vocab_size=VOCAB, mask_id=4, cls_id=2, sep_id=3)


@pytest.fixture(scope="module")
def unmasked(tmp_path_factory) -> Path:
    """256 records without masks: [CLS], number, number, tokens, [SEP], padding; every other token begins a word."""
    features = example_features(np.arange(256))
    for name in ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights"):
        del features[name]
    last = features["input_mask"].sum(1) - 1
    features["input_ids"][:, 0], features["input_ids"][np.arange(256), last] = 2, 3
    features["word_starts"] = features["input_mask"] * (np.arange(S) % 2)
    folder = tmp_path_factory.mktemp("unmasked")
    shards.write_index(folder, [shards.write_records(folder / "a.tfrecord", shards.encode_examples(features))])
    return folder


def unmask(batch: dict[str, np.ndarray]) -> np.ndarray:
    ids = batch["input_ids"].copy()
    row, column = np.nonzero(batch["mlm_weights"])
    ids[row, batch["mlm_positions"][row, column]] = batch["mlm_labels"][row, column]
    return ids


@pytest.mark.parametrize("unit", ["token", "whole_word"])
def test_dynamic_masks_follow_epoch_and_example_alone(unmasked, unit):
    data = config(masking="dynamic", mask_unit=unit, mask_fraction=0.2)
    batches = stream(unmasked, data, tokenizer=MASKER)
    masked: dict[int, list[bytes]] = {}
    seen = take(batches, 32)
    for batch in seen:
        ids = unmask(batch)
        numbers = numbers_of(ids)
        predictions = batch["mlm_weights"].sum(1)
        lengths = batch["sequence_ids"].sum(1)
        assert predictions.any()
        if unit == "token":
            np.testing.assert_array_equal(predictions, np.clip(np.rint(lengths * 0.2), 1, M))
        assert not np.isin(batch["mlm_labels"][batch["mlm_weights"] > 0], [0, 2, 3]).any(), (
            "specials are never masked"
        )
        for row, number in enumerate(numbers.tolist()):
            masked.setdefault(number, []).append(
                batch["mlm_positions"][row].tobytes() + batch["input_ids"][row].tobytes()
            )
    assert sorted(masked) == list(range(256)) and all(len(versions) == 2 for versions in masked.values())
    assert np.mean([first != second for first, second in masked.values()]) > 0.7, "another epoch, other masks"

    again = stream(unmasked, data, tokenizer=MASKER)
    again.restore(batches.state() | {"data_step": 21})
    assert_equal(take(again, 4), seen[21:25])
    part = take(stream(unmasked, data, tokenizer=MASKER, rows=range(4, 8)), 3)
    assert_equal(part, [{name: values[4:8] for name, values in batch.items()} for batch in seen[:3]])
    with pytest.raises(ValueError, match="masking options differ"):
        stream(unmasked, dataclasses.replace(data, mask_fraction=0.3), tokenizer=MASKER).restore(batches.state())


def test_dynamic_evaluation_has_fixed_masks(unmasked):
    data = config(masking="dynamic")
    first, second = (
        list(eval_batches(data, folder=unmasked, batch_size=size, tokenizer=MASKER)) for size in (100, 64)
    )
    joined = [{n: np.concatenate([b[n] for b in batches])[:256] for n in batches[0]} for batches in (first, second)]
    assert_equal(*[[batch] for batch in joined])
    ids = unmask(joined[0])
    assert numbers_of(ids).tolist() == list(range(256))
    assert not any(values[56:].any() for values in first[-1].values())


def test_dynamic_masking_needs_unmasked_shards_and_a_vocabulary(unmasked, folder):
    with pytest.raises(ValueError, match=r"data\.masking: dynamic, but the shards .* were masked when built"):
        stream(folder, config(masking="dynamic"))
    with pytest.raises(ValueError, match=r"data\.masking: static, but the shards .* hold no masks"):
        stream(unmasked)
    with pytest.raises(ValueError, match=r"needs the vocabulary; give data\.vocab"):
        stream(unmasked, config(masking="dynamic"), tokenizer=None)


# ------------------------------------------------------------------ evaluation


@pytest.mark.parametrize("counts", [(40, 0, 9), (48,)])
def test_evaluation_reads_each_record_once_and_fills_with_blanks(tmp_path, counts):
    held_out = make_shards(tmp_path, *counts)
    total = sum(counts)
    batches = list(eval_batches(config(), folder=held_out, batch_size=16, tokenizer=TOKENIZER))
    assert len(batches) == -(-total // 16)
    joined = {n: np.concatenate([b[n] for b in batches]) for n in batches[0]}
    assert record_numbers(joined)[:total].tolist() == list(range(total))
    assert not any(values[total:].any() for values in joined.values())
    assert joined["nsp_weights"].sum() == total
    halves = [
        list(eval_batches(config(), folder=held_out, batch_size=16, rows=rows, tokenizer=None))
        for rows in (range(8), range(8, 16))
    ]
    assert_equal([{n: np.concatenate([a[n], b[n]]) for n in a} for a, b in zip(*halves, strict=True)], batches)
    some = eval_batches(config(), folder=held_out, batch_size=16, max_batches=2, tokenizer=TOKENIZER)
    assert_equal(list(some), batches[:2])


# ------------------------------------------------------------------ damage


def flip(at: int):
    def damage(path: Path, entry: shards.ShardEntry) -> set[int]:
        data = bytearray(path.read_bytes())
        data[entry.offsets()[20] + at] ^= 4
        path.write_bytes(data)
        return {20}

    return damage


def cut(at: int):
    def damage(path: Path, entry: shards.ShardEntry) -> set[int]:
        path.write_bytes(path.read_bytes()[: entry.offsets()[40] + at])
        return set(range(40, 64))

    return damage


def zero(path: Path, entry: shards.ShardEntry) -> set[int]:
    offsets = entry.offsets()
    data = bytearray(path.read_bytes())
    start, stop = int(offsets[10]) + 30, int(offsets[13]) + 3
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)
    return {10, 11, 12, 13}


def replace_all(contents):
    def damage(path: Path, entry: shards.ShardEntry) -> set[int]:
        path.write_bytes(contents(path))
        return set(range(64))

    return damage


def remove(path: Path, entry: shards.ShardEntry) -> set[int]:
    path.unlink()
    return set(range(64))


def folder_instead(path: Path, entry: shards.ShardEntry) -> set[int]:
    path.unlink()
    path.mkdir()
    return set(range(64))


def foreign_ids(path: Path, entry: shards.ShardEntry) -> set[int]:
    """Ids outside the vocabulary that the index hides: checksums fit, only the look at the ids can tell."""
    features = example_features(np.arange(64, 128))
    features["input_ids"][20, 5], features["masked_lm_ids"][33, 1] = VOCAB, -1
    forged = shards.write_records(path, shards.encode_examples(features))
    entries = [e for e in shards.read_index(path.parent).entries if e.name != path.name]
    shards.write_index(path.parent, [*entries, dataclasses.replace(forged, features=entry.features)])
    return {20, 33}


DAMAGES = {
    "flip in payload": flip(40),
    "flip in length": flip(1),
    "flip in length checksum": flip(9),
    "flip in payload checksum": flip(-2),  # of record 19
    "truncated inside a record": cut(25),
    "truncated at a border": cut(0),
    "zeroed block": zero,
    "empty": replace_all(lambda path: b""),
    "missing": remove,
    "a folder in its place": folder_instead,
    "garbage": replace_all(lambda path: np.random.default_rng(1).bytes(path.stat().st_size)),
    "swapped": replace_all(lambda path: path.with_name("shard-00002-of-00004.tfrecord").read_bytes()),
    "ids out of range": foreign_ids,
}


REASON_TEXTS = {
    "flip in payload checksum": "has another checksum stored with it",
    "flip in payload": "has other contents than the index says",
    "flip in length": "has another length",
    "truncated": "lies beyond the end of the file",
    "empty": "lies beyond the end of the file",
    "missing": "the file is missing or unreadable",
    "a folder": "the file is missing or unreadable",
    "ids": "token ids outside the vocabulary",
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> list[dict[str, np.ndarray]]:
    """Two and a half epochs of four undamaged shards of 64 records."""
    return take(stream(make_shards(tmp_path_factory.mktemp("intact"), 64, 64, 64, 64)), 40)


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_records_become_blank_rows_and_nothing_else_moves(tmp_path, intact, caplog, name):
    broken = make_shards(tmp_path, 64, 64, 64, 64)
    path = broken / "shard-00001-of-00004.tfrecord"
    damaged = DAMAGES[name](path, shards.read_index(broken).entries[1])
    damaged = {19} if name == "flip in payload checksum" else damaged
    batches, blanks = stream(broken, config(max_blank_records=10_000)), 0
    for expected in intact:
        batch, info = next(batches)
        bad = np.isin(record_numbers(expected), [64 + record for record in damaged])
        for feature, values in batch.items():
            np.testing.assert_array_equal(values[~bad], expected[feature][~bad], err_msg=feature)
            assert not values[bad].any(), feature
        blanks += int(bad.sum())
        assert info.blank_records == batches.state()["blank_records"] == blanks
    assert 2 * len(damaged) <= blanks <= 3 * len(damaged)
    lines = [r.getMessage() for r in caplog.records if "instead of a damaged record" in r.getMessage()]
    assert len(lines) == len(set(lines)) == len(damaged), "each damaged record is named once"
    for record in damaged:
        assert sum(f"{path}: record {record} " in line for line in lines) == 1
    reason = next((text for start, text in REASON_TEXTS.items() if name.startswith(start)), None)
    assert reason is None or all(reason in line for line in lines)

    held_out = eval_batches(config(max_blank_records=64), folder=broken, batch_size=100, tokenizer=TOKENIZER)
    evaluated = np.concatenate([batch["nsp_weights"] for batch in held_out]).sum()
    assert evaluated == 256 - len(damaged)


@pytest.mark.parametrize("budget", [0, 5])
def test_the_run_stops_above_the_budget(tmp_path, intact, budget):
    broken = make_shards(tmp_path, 64, 64, 64, 64)
    path = broken / "shard-00001-of-00004.tfrecord"
    damaged = zero(path, shards.read_index(broken).entries[1])
    totals = np.cumsum([np.isin(record_numbers(b), [64 + r for r in damaged]).sum() for b in intact])
    good = int(np.searchsorted(totals, budget, side="right"))
    batches = stream(broken, config(max_blank_records=budget))
    take(batches, good)
    state = batches.state()
    with pytest.raises(
        DataBudgetError, match=rf"{totals[good]} damaged records.*\({budget}\).*{path.name}: record"
    ):
        next(batches)
    assert batches.state() == state, "the batch that broke the budget does not count as returned"
    if budget == 0:
        with pytest.raises(DataBudgetError):
            list(eval_batches(config(), folder=broken, batch_size=16, tokenizer=TOKENIZER))


def test_blank_counts_survive_a_resume(tmp_path):
    broken = make_shards(tmp_path, 64, 64)
    flip(40)(broken / "shard-00001-of-00002.tfrecord", shards.read_index(broken).entries[1])
    batches = stream(broken, config(max_blank_records=2))
    take(batches, 16)
    state = batches.state()
    assert state["blank_records"] == 2
    again = stream(broken, config(max_blank_records=2))
    again.restore(state)
    with pytest.raises(DataBudgetError, match="3 damaged records"):
        take(again, 8)


def test_changed_sizes_are_told_at_the_start(tmp_path, caplog):
    longer = make_shards(tmp_path, 64, 64)
    path = longer / "shard-00000-of-00002.tfrecord"
    path.write_bytes(path.read_bytes() + b"more")
    batches = stream(longer)
    assert f"{path} has {path.stat().st_size} bytes, the index says" in caplog.text
    take(batches, 8)


# ------------------------------------------------------------------ foreign records


@pytest.mark.parametrize("form", ["protobuf", "unpacked", "second names"])
def test_records_of_other_writers_stream_in(folder, tmp_path, form):
    """As google-research/bert's and the Model Garden's builders write them."""
    import tensorflow as tf
    from test_shards import tf_example

    features = example_features(np.arange(512))
    if form == "second names":
        features["input_word_ids"] = features.pop("input_ids")
        features["input_type_ids"] = features.pop("segment_ids")
    with tf.io.TFRecordWriter(str(tmp_path / "tf_examples.tfrecord")) as writer:
        for row in range(512):
            example = {name: values[row].tolist() for name, values in features.items()}
            order = list(example)[:: 1 if row % 3 else -1] if form == "unpacked" else None
            writer.write(tf_example(example, packed=form != "unpacked", order=order))
    with pytest.raises(ValueError, match="bert-data index"):
        stream(tmp_path)
    shards.index_folder(tmp_path)
    assert_equal(take(stream(tmp_path), 33), take(stream(folder), 33))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_length": 32}, r"input_ids has 16 values a record, the config wants data\.seq_length 32"),
        ({"max_predictions": 4}, r"masked_lm_positions has 3 values .*data\.max_predictions 4"),
    ],
)
def test_shards_unlike_the_config_are_refused(folder, options, message):
    for open_stream in (
        lambda: stream(folder, config(**options)),
        lambda: eval_batches(config(**options), folder=folder, batch_size=4),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            open_stream()
        assert "\n" not in str(raised.value)


def test_unusable_values_are_refused_before_training(tmp_path):
    def with_features(name: str, **changes) -> Path:
        features = example_features(np.arange(32))
        for feature, value in changes.items():
            if value is None:
                del features[feature]
            else:
                features[feature][5, -1] = value
        entry = shards.write_records(tmp_path / name / "a.tfrecord", shards.encode_examples(features))
        shards.write_index(tmp_path / name, [entry])
        return tmp_path / name

    for name, changes, message in (
        (
            "a",
            {"input_ids": VOCAB},
            r"a\.tfrecord: input_ids from 0 to 1000, allowed: 0 to 999; .*another vocabulary",
        ),
        ("b", {"masked_lm_ids": -1}, "masked_lm_ids from -1"),
        ("c", {"masked_lm_positions": S}, "masked_lm_positions from 1 to 16, allowed: 0 to 15"),
        ("d", {"input_mask": 2}, "input_mask from 0 to 2"),
        ("e", {"next_sentence_labels": None}, "lack the feature next_sentence_labels"),
        ("f", {"masked_lm_ids": None}, "static, but the shards .* hold no masks"),
    ):
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=message):
            stream(with_features(name, **changes))
    no_pairs = stream(tmp_path / "e", config(next_sentence="none"))
    batch = next(no_pairs)[0]
    assert not batch["nsp_labels"].any() and not batch["nsp_weights"].any()
    shards.write_index(tmp_path / "f", [shards.write_records(tmp_path / "f" / "a.tfrecord", [])])
    with pytest.raises(ValueError, match="no records"):
        stream(tmp_path / "f")


def test_tensorflow_comes_late_sees_no_accelerator_and_leaves_quietly(folder, tmp_path):
    """Also: the interpreter may end while batches are being read ahead."""
    held_out = make_shards(tmp_path, 20_000)
    code = f"""
import sys
from pathlib import Path
from bert_jax.config.schema import DataConfig
from data_pipeline.input import eval_batches, pretrain_batches
data = DataConfig(seq_length={S}, max_predictions={M}, prefetch=200)
batches = pretrain_batches(data, folder=Path({str(folder)!r}), lanes=8, batch_size=16, seed=0)
assert "tensorflow" not in sys.modules and "jax" not in sys.modules
next(batches)
import tensorflow as tf
assert tf.config.get_visible_devices("GPU") == tf.config.get_visible_devices("TPU") == []
held_out = eval_batches(data, folder=Path({str(held_out)!r}), batch_size=4)
next(held_out)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
