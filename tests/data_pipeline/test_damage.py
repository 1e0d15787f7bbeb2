"""Damaged shards: blank rows that are named and counted, and the budget that stops a run."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from input_shards import (
    TOKENIZER,
    VOCAB,
    config,
    example_features,
    make_shards,
    offsets_of,
    record_numbers,
    stream,
    take,
)

from bert_jax.batch import DataBudgetError
from data_pipeline.read.pretrain_input import eval_batches
from data_pipeline.shards import shard_files as shards
from data_pipeline.shards.tfexample import encode_examples


def flip(at: int):
    def damage(path: Path, entry: shards.ShardEntry) -> set[int]:
        data = bytearray(path.read_bytes())
        data[offsets_of(entry)[20] + at] ^= 4
        path.write_bytes(data)
        return {20}

    return damage


def cut(at: int):
    def damage(path: Path, entry: shards.ShardEntry) -> set[int]:
        path.write_bytes(path.read_bytes()[: offsets_of(entry)[40] + at])
        return set(range(40, 64))

    return damage


def zero(path: Path, entry: shards.ShardEntry) -> set[int]:
    offsets = offsets_of(entry)
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
    forged = shards.write_records(path, encode_examples(features))
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
    "flip in payload checksum": "has a stored checksum that differs from the index",
    "flip in payload": "has contents that do not match the checksum in the index",
    "flip in length": "has a length that differs from the index",
    "truncated": "is beyond the end of the file",
    "empty": "is beyond the end of the file",
    "missing": "the file is missing or unreadable",
    "a folder": "the file is missing or unreadable",
    "ids": "token ids outside the vocabulary",
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> list[dict[str, np.ndarray]]:
    """Two and a half epochs of four undamaged shards of 64 records."""
    return take(stream(make_shards(tmp_path_factory.mktemp("intact"), 64, 64, 64, 64)), 40)


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["tensorflow", "numpy"])
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_records_become_blank_rows_and_nothing_else_moves(tmp_path, intact, caplog, name, reader):
    broken = make_shards(tmp_path, 64, 64, 64, 64)
    path = broken / "shard-00001-of-00004.tfrecord"
    damaged = DAMAGES[name](path, shards.read_index(broken).entries[1])
    damaged = {19} if name == "flip in payload checksum" else damaged
    batches, blanks = stream(broken, config(max_blank_records=10_000, reader=reader)), 0
    for expected in intact:
        batch, _ = next(batches)
        bad = np.isin(record_numbers(expected), [64 + record for record in damaged])
        for feature, values in batch.items():
            np.testing.assert_array_equal(values[~bad], expected[feature][~bad], err_msg=feature)
            assert not values[bad].any(), feature
        blanks += int(bad.sum())
        assert batches.state()["blank_records"] == blanks
    assert 2 * len(damaged) <= blanks <= 3 * len(damaged)
    lines = [r.getMessage() for r in caplog.records if "instead of a damaged record" in r.getMessage()]
    assert len(lines) == len(set(lines)) == len(damaged), "each damaged record is named once"
    for record in damaged:
        assert sum(f"{path}: record {record} " in line for line in lines) == 1
    reason = next((text for start, text in REASON_TEXTS.items() if name.startswith(start)), None)
    assert reason is None or all(reason in line for line in lines)

    data = config(max_blank_records=64, reader=reader)
    held_out = eval_batches(data, folder=broken, batch_size=100, tokenizer=TOKENIZER)
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
    assert f"{path} has {path.stat().st_size} bytes, but" in caplog.text
    take(batches, 8)
