"""Mixtures of folders: shares, the order of each part, resume, hosts, damage, held-out records, log values."""

import json
from pathlib import Path

import numpy as np
import pytest
from input_shards import (
    TOKENIZER,
    assert_equal,
    config,
    example_features,
    make_shards,
    order_of,
    record_numbers,
    stream,
    take,
)

from bert_jax.batch import DataBudgetError
from data_pipeline.read.order import LaneOrder, MixtureOrder, part_counts
from data_pipeline.read.pretrain_input import eval_batches
from data_pipeline.shards import shard_files as shards
from data_pipeline.shards.mixture_parts import Part
from data_pipeline.shards.tfexample import encode_examples

COUNTS, WEIGHTS = (512, 100, 9), (7, 2, 1)
FIRST = (0, 1000, 2000)  # numbers of the first records of the parts


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> list[Part]:
    """Three folders whose records have different numbers; the last has fewer records than a batch has rows."""
    root = tmp_path_factory.mktemp("parts")
    folders = [
        make_shards(root / "wiki", 100, 400, 12),
        make_shards(root / "books", 100, start=1000),
        make_shards(root / "few", 5, 4, start=2000),
    ]
    return [Part(folder.name, weight, folder) for folder, weight in zip(folders, WEIGHTS, strict=True)]


def parts_of(numbers: np.ndarray) -> np.ndarray:
    return numbers // 1000


def mixed(weights=WEIGHTS, counts=COUNTS, lanes=8, seed=3) -> MixtureOrder:
    orders = (LaneOrder(count, lanes, segment_records=8, window_segments=2, seed=seed) for count in counts)
    return MixtureOrder(tuple(weights), tuple(orders))


# ------------------------------------------------------------------ order


@pytest.mark.parametrize("weights", [(1,), (7, 2, 1), (50, 1), (333_333, 666_667), (3, 1, 4, 1, 5, 9, 2, 6)])
def test_every_place_belongs_to_one_part_and_the_shares_hold(weights):
    places = np.arange(30_000)
    counts = part_counts(weights, places)
    steps = np.diff(counts, axis=0)
    assert (steps >= 0).all() and (steps.sum(1) == 1).all()
    exact = places[:, None] * np.array(weights) / sum(weights)
    assert abs(counts - exact).max() < len(weights)
    far = 1 << 42
    assert part_counts(weights, np.array(far)).sum() == far


@pytest.mark.cases(1)
@pytest.mark.parametrize(("lanes", "batch"), [(64, 64), (64, 256), (8, 16), (1, 8)])
def test_shares_of_100_000_rows_and_of_every_batch(lanes, batch):
    order = mixed(counts=(5000, 500, 100), lanes=lanes)
    share, steps = batch // lanes, -(-100_000 // batch)
    rows = np.arange(batch)
    found = np.array(
        [
            np.bincount(order.locate(rows // share, step * share + rows % share)[0], minlength=3)
            for step in range(steps)
        ]
    )
    expected = np.array(WEIGHTS) / 10
    sigma = np.sqrt(found.sum() * expected * (1 - expected))
    assert (abs(found.sum(0) - found.sum() * expected) < 3 * sigma).all()
    assert abs(found - batch * expected).max() <= 3 * share
    for step in (1, 2, 77, steps):
        np.testing.assert_array_equal(order.rows(step * share), found[:step].sum(0))


@pytest.mark.slow
def test_a_lane_reads_each_part_in_the_order_of_this_part(parts):
    numbers = np.array([record_numbers(batch) for batch in take(stream(parts), 200)])
    assert numbers.shape == (200, 16)
    for part, (count, first) in enumerate(zip(COUNTS, FIRST, strict=True)):
        expected = order_of(count, 8, 8, 400)
        for lane in range(8):
            read = numbers[:, 2 * lane : 2 * lane + 2].ravel()
            read = read[parts_of(read) == part] - first
            assert len(read) > 30
            np.testing.assert_array_equal(read, expected[: len(read), lane])


@pytest.mark.slow
def test_a_part_is_read_evenly(parts):
    """Of the part that is read 35 times, no record is seen more often than another."""
    numbers = np.concatenate([record_numbers(batch) for batch in take(stream(parts, lanes=1), 200)])
    seen = np.bincount(numbers[parts_of(numbers) == 2] - 2000, minlength=9)
    assert seen.min() >= 35 and seen.max() - seen.min() <= 1


def test_the_seed_moves_the_parts():
    rows = np.arange(16)
    patterns = {tuple(mixed(seed=seed).locate(rows // 2, rows % 2)[0].tolist()) for seed in range(20)}
    assert len(patterns) > 5


def test_the_order_is_frozen():
    """These numbers must never change: a running job's saved position depends on them."""
    found, positions = mixed().locate(np.arange(16) // 2, 5 + np.arange(16) % 2)
    assert found.tolist() == GOLDEN_PARTS and positions.tolist() == GOLDEN_POSITIONS


def test_a_folder_alone_keeps_its_order_and_fingerprint(parts):
    """A folder without a mixture, and a mixture of one part, is read as it was before mixtures existed."""
    alone, one = stream(parts[0].folder), stream([parts[0]])
    numbers = np.array([record_numbers(batch) for batch in take(alone, 40)])
    np.testing.assert_array_equal(numbers, order_of(512, 8, 16, 40))
    state = alone.state()
    assert state["fingerprint"] == GOLDEN_FINGERPRINT and "data.mixture" not in state["order"]
    one.restore(state)
    assert_equal(take(one, 2), take(alone, 2))


GOLDEN_PARTS = [1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 2, 2, 0]
GOLDEN_POSITIONS = [0, 4, 3, 4, 3, 1, 1, 4, 3, 4, 3, 4, 4, 0, 0, 4]
GOLDEN_FINGERPRINT = "bd05c5da55515851"  # recorded before mixtures existed


# ------------------------------------------------------------------ streams


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"batch_ramp": (3, 8)}])
def test_resume_and_skip_at_any_step(parts, options):
    batches = stream(parts, **options)
    expected, states = [], [batches.state()]
    for _ in range(60):
        expected.append(next(batches)[0])
        states.append(json.loads(json.dumps(batches.state())))
    assert len(json.dumps(states[-1])) < 1024
    again = stream(parts, config(reader="numpy"), **options)
    for step in (0, 2, 3, 4, 31, 57, 7):
        again.restore(states[step])
        assert_equal(take(again, 3), expected[step : step + 3])
    again.restore(states[5])
    again.skip(20)
    assert_equal(take(again, 2), expected[25:27])


def test_far_steps_start_at_once(parts):
    batches = stream(parts)
    batches.restore(batches.state() | {"data_step": 10**9})
    _, info = next(batches)
    assert abs(info.values["share_wiki"] - 0.7) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_read_what_one_host_reads(parts, hosts):
    options = {"batch_ramp": (3, 8)}
    whole, share = take(stream(parts, **options), 30), 16 // hosts
    some = [take(stream(parts, rows=range(h * share, (h + 1) * share), **options), 30) for h in range(hosts)]
    assert_equal([{n: np.concatenate([p[i][n] for p in some]) for n in whole[i]} for i in range(30)], whole)
    scattered = take(stream(parts, rows=[9, 2, 14]), 20)
    for batch, expected in zip(scattered, take(stream(parts), 20), strict=True):
        np.testing.assert_array_equal(record_numbers(batch), record_numbers(expected)[[9, 2, 14]])


def test_both_readers_return_the_same_batches(parts):
    one, other = (take(stream(parts, config(reader=reader)), 40) for reader in ("tensorflow", "numpy"))
    assert_equal(one, other)
    held_out = [
        list(eval_batches(config(reader=reader), folder=parts, batch_size=100, tokenizer=TOKENIZER))
        for reader in ("tensorflow", "numpy")
    ]
    assert_equal(*held_out)


def test_masks_of_a_part_do_not_repeat_those_of_another(tmp_path):
    """Equal folders are masked differently: records are numbered through the parts."""
    features = example_features(np.arange(64))
    features = {name: values for name, values in features.items() if not name.startswith("masked")}
    features["word_starts"] = features["input_mask"]
    folders = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        entry = shards.write_records(tmp_path / name / "a.tfrecord", encode_examples(features))
        shards.write_index(tmp_path / name, [entry])
        folders.append(Part(name, 1, tmp_path / name))
    tokenizer = type("Ids", (), {"vocab_size": 1000, "cls_id": 1, "sep_id": 2, "mask_id": 3})()
    data = config(masking="dynamic", reader="numpy")
    batches = list(eval_batches(data, folder=folders, batch_size=128, tokenizer=tokenizer))
    assert len(batches) == 1
    positions = batches[0]["mlm_positions"]
    assert (positions[::2] != positions[1::2]).any(1).mean() > 0.5


def test_a_position_of_another_mixture_is_refused(parts):
    state = stream(parts).state()
    other = [part._replace(weight=weight) for part, weight in zip(parts, (5, 3, 2), strict=True)]
    with pytest.raises(ValueError, match=r"data\.mixture was \[7, 2, 1\], now \[5, 3, 2\]; .* start a new phase"):
        stream(other).restore(state)
    with pytest.raises(ValueError, match=r"data\.mixture was \[7, 2, 1\], now none"):
        stream(parts[0].folder).restore(state)
    with pytest.raises(ValueError, match=r"data\.mixture was none, now \[7, 2, 1\]"):
        stream(parts).restore(stream(parts[0].folder).state())
    with pytest.raises(ValueError, match="shards was"):
        stream([parts[1]._replace(weight=7), parts[0]._replace(weight=2), parts[2]]).restore(state)
    # Folders may move: their names are not part of the order.
    stream([part._replace(name=f"other/{part.name}") for part in parts]).restore(state)


@pytest.mark.slow
def test_damage_is_named_by_the_file_of_its_part(tmp_path, caplog):
    folders = [make_shards(tmp_path / name, 64, start=1000 * i) for i, name in enumerate(("a", "b"))]
    mixture = [Part(folder.name, 1, folder) for folder in folders]
    intact = take(stream(mixture), 16)
    broken = folders[1] / "shard-00000-of-00001.tfrecord"
    broken.write_bytes(broken.read_bytes()[:-1])
    batches = stream(mixture, config(max_blank_records=10))
    for expected in intact:
        batch, _ = next(batches)
        bad = record_numbers(expected) == 1063
        for feature, values in batch.items():
            np.testing.assert_array_equal(values[~bad], expected[feature][~bad], err_msg=feature)
            assert not values[bad].any()
    assert batches.state()["blank_records"] == 2
    lines = [r.getMessage() for r in caplog.records if "instead of a damaged record" in r.getMessage()]
    assert len(lines) == 1 and f"{broken}: record 63 is beyond the end of the file" in lines[0]
    assert any(f"{broken} has " in r.getMessage() for r in caplog.records)
    with pytest.raises(DataBudgetError, match=f"{broken}: record 63"):
        list(eval_batches(config(), folder=mixture, batch_size=16, tokenizer=TOKENIZER))


# ------------------------------------------------------------------ held-out records


def test_each_held_out_record_occurs_once_and_first_batches_represent_all_parts(parts):
    total = sum(COUNTS)
    batches = list(eval_batches(config(), folder=parts, batch_size=64, tokenizer=TOKENIZER))
    assert len(batches) == -(-total // 64)
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    numbers = record_numbers(joined)[:total]
    expected = np.concatenate([first + np.arange(count) for first, count in zip(FIRST, COUNTS, strict=True)])
    assert sorted(numbers) == sorted(expected)
    assert not any(values[total:].any() for values in joined.values())
    for part in range(3):
        assert (np.diff(numbers[parts_of(numbers) == part]) == 1).all(), "file order"
    in_first = np.bincount(parts_of(numbers[:64]), minlength=3)
    assert abs(in_first - 64 * np.array(COUNTS) / total).max() <= 2
    halves = [
        list(eval_batches(config(), folder=parts, batch_size=64, rows=rows, tokenizer=TOKENIZER))
        for rows in (range(32), range(32, 64))
    ]
    assert_equal([{n: np.concatenate([a[n], b[n]]) for n in a} for a, b in zip(*halves, strict=True)], batches)
    some = eval_batches(config(), folder=parts, batch_size=64, max_batches=2, tokenizer=TOKENIZER)
    assert_equal(list(some), batches[:2])


# ------------------------------------------------------------------ refusals and the log


def test_a_part_unlike_the_config_is_named(parts, tmp_path):
    short = {
        name: values[:, :8] for name, values in example_features(np.arange(9)).items() if values.shape[1] == 16
    }
    entry = shards.write_records(tmp_path / "a.tfrecord", encode_examples(example_features(np.arange(9)) | short))
    shards.write_index(tmp_path, [entry])
    mixture = [*parts[:2], Part("short", 1, tmp_path)]
    for call in (
        lambda: stream(mixture),
        lambda: eval_batches(config(), folder=mixture, batch_size=4, tokenizer=TOKENIZER),
    ):
        with pytest.raises(
            ValueError, match=r"data\.mixture: short: .*input_ids has 8 values per record"
        ) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_a_part_with_other_names_of_features_is_refused(parts, tmp_path):
    features = example_features(np.arange(32))
    features["input_word_ids"] = features.pop("input_ids")
    shards.write_index(tmp_path, [shards.write_records(tmp_path / "a.tfrecord", encode_examples(features))])
    with pytest.raises(ValueError, match=rf"data\.mixture: other: the features in {tmp_path} have other names"):
        stream([parts[0], Part("other", 1, tmp_path)])
    assert len(next(stream(tmp_path))[0]["input_ids"]) == 16


def test_the_smallest_part_limits_the_lanes(parts, caplog):
    batches = stream(parts, lanes=16)
    assert f"data.lanes: 16 is reduced to 8, because there are 9 records in {parts[2].folder}" in caplog.text
    assert batches.state()["order"]["lanes"] == 8


@pytest.mark.slow
def test_shares_passes_and_ended_passes_are_logged(parts):
    batches, numbers, notes = stream(parts, batch_ramp=(5, 8)), [], []
    for step in range(200):
        batch, info = next(batches)
        numbers += record_numbers(batch).tolist()
        notes += [(step, note) for note in info.notes]
        rows = np.bincount(parts_of(np.array(numbers)), minlength=3)
        expected = dict(zip(("wiki", "books", "few"), rows.tolist(), strict=True))
        values = {f"share_{name}": count / len(numbers) for name, count in expected.items()}
        values |= {f"epoch_{n}": c / size for (n, c), size in zip(expected.items(), COUNTS, strict=True)}
        assert info.values == pytest.approx(values, rel=1e-12)
        assert info.epoch == len(numbers) / sum(COUNTS)
    assert notes[0] == (
        0, "mixture: wiki 70.0% of the rows (512 records), books 20.0% of the rows (100 records), "
        "few 10.0% of the rows (9 records)",
    )  # fmt: skip
    told = [note for _, note in notes[1:] if " few " in note]
    assert [int(note.split()[-5]) for note in told] == [1, 2, 4, 8, 16, 32]
    assert told[0] == "mixture: all 9 records of few are read 1 time(s); it starts again"
    assert sum(" wiki " in note for _, note in notes[1:]) == 3 and rows[0] // 512 == 4
    again = stream(parts, batch_ramp=(5, 8))
    again.restore(again.state() | {"data_step": 100})
    later = [(step, note) for step in range(100, 200) for note in next(again)[1].notes]
    assert later == [pair for pair in notes if pair[0] >= 100]


def test_names_in_the_log_are_short_unless_they_repeat(parts):
    paths = [part._replace(name=f"/data/{part.name}") for part in parts]
    assert "share_books" in next(stream(paths))[1].values
    same = [
        part._replace(name=name) for part, name in zip(parts, ("en/wiki", "de/wiki", "gs://b/books/"), strict=True)
    ]
    assert {"share_en/wiki", "share_de/wiki", "share_books"} < set(next(stream(same))[1].values)
    _, info = next(stream(Path(parts[0].folder)))
    assert info.values == {} and info.notes == ()
