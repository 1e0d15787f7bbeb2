"""Batches of packed rows: the contract, hosts, resumes, mixtures, damage."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_shards import TOKENIZER, VOCAB, M, S, assert_equal, config, example_features, stream, take
from test_damage import DAMAGES

from bert_jax.batch import RowShape, first_sequences
from data_pipeline.build.packing import (
    PackedShape,
    encode_sequences,
    row_features,
)
from data_pipeline.read.pretrain_input import eval_batches
from data_pipeline.shards import shard_files as shards
from data_pipeline.shards.mixture_parts import Part
from data_pipeline.shards.tfexample import encode_examples

PAIRS = config(seq_length=2 * S, packing="best_fit", sequences_per_row=2, max_blank_records=10_000)


def packed_shards(folder: Path) -> Path:
    """Four files of 64 rows; row r has the sequences 2 r and 2 r + 1."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for shard in range(4):
        numbers = np.arange(128 * shard, 128 * (shard + 1))
        sequences = encode_sequences(example_features(numbers) | {"sequence_keys": numbers[:, None]})
        features = row_features(sequences, np.full(64, 2), PackedShape(2 * S, 2, 2 * M), 0)
        path = folder / f"shard-{shard:05d}-of-00004.tfrecord"
        entries.append(shards.write_records(path, encode_examples(features)))
    shards.write_index(folder, entries)
    shards.write_manifest(folder, {"counts": {"instances": 512, "rows": 256}})
    return folder


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """Two and a half epochs of undamaged packed rows."""
    return take(stream(packed_shards(tmp_path_factory.mktemp("intact")), PAIRS), 40)


@pytest.mark.slow
def test_batches_keep_the_contract(tmp_path: Path, intact: list[dict[str, np.ndarray]]) -> None:
    shapes = RowShape(2 * S, 2 * M, 2, 2.0).features(16)
    assert {n: (a.shape, a.dtype) for n, a in intact[0].items()} == {
        n: (s, np.dtype(d)) for n, (s, d) in shapes.items()
    }
    for batch in intact:
        source = example_features(batch["sequence_keys"].astype(np.int64).ravel())
        lengths = source["input_mask"].sum(1).reshape(-1, 2)
        np.testing.assert_array_equal(batch["cls_positions"], np.stack([0 * lengths[:, 0], lengths[:, 0]], 1))
        np.testing.assert_array_equal(batch["nsp_labels"], source["next_sentence_labels"].reshape(-1, 2))
        assert (batch["nsp_weights"] == 1).all()
        for row in range(16):
            pieces = [np.arange(length) for length in lengths[row]]
            positions = np.concatenate(pieces)
            np.testing.assert_array_equal(batch["position_ids"][row, : len(positions)], positions)
            assert not batch["position_ids"][row, len(positions) :].any()
    batches = stream(packed_shards(tmp_path), PAIRS)
    for step in range(3):
        _, info = next(batches)
        assert (info.sequences, info.examples_seen, info.epoch) == (32, 32 * (step + 1), (step + 1) / 16)


def test_parts_of_a_mixture_count_their_own_sequences(tmp_path: Path) -> None:
    packed_shards(tmp_path / "pairs")
    single = packed_shards(tmp_path / "single")
    shards.write_manifest(single, {"counts": {"instances": 320, "rows": 256}})
    batches = stream([Part("pairs", 3, tmp_path / "pairs"), Part("single", 1, single)], PAIRS)  # type: ignore[arg-type]
    mean = 0.75 * 2 + 0.25 * 1.25
    for step in range(4):
        batch, info = next(batches)
        assert len(batch["input_ids"]) == 16
        assert info.examples_seen == round(16 * mean * (step + 1))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_and_resumes_see_the_same_rows(tmp_path: Path, intact: Any, hosts: int) -> None:
    folder, share = packed_shards(tmp_path), 16 // hosts
    parts = []
    for host in range(hosts):
        rows = range(host * share, (host + 1) * share)
        before = stream(folder, dataclasses.replace(PAIRS, reader="numpy"), rows=rows)
        first = take(before, 11)
        after = stream(folder, PAIRS, rows=rows)
        after.restore(before.state())
        parts.append(first + take(after, 29))
    assert_equal([{n: np.concatenate([p[i][n] for p in parts]) for n in intact[i]} for i in range(40)], intact)


@pytest.mark.cases(1)
@pytest.mark.parametrize("reader", ["numpy", pytest.param("tensorflow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(set(DAMAGES) - {"ids out of range"}))
def test_damaged_rows_become_blank_and_nothing_else_moves(
    tmp_path: Path, intact: Any, name: str, reader: Any
) -> None:
    broken = packed_shards(tmp_path)
    damaged = DAMAGES[name](broken / "shard-00001-of-00004.tfrecord", shards.read_index(broken).entries[1])
    damaged = {19} if name == "flip in payload checksum" else damaged
    batches, blanks = stream(broken, dataclasses.replace(PAIRS, reader=reader)), 0
    for expected in intact:
        batch, _ = next(batches)
        bad = np.isin(expected["sequence_keys"][:, 0] // 2, [64 + row for row in damaged])
        for feature, values in batch.items():
            np.testing.assert_array_equal(values[~bad], expected[feature][~bad], err_msg=feature)
            assert not values[bad].any(), feature
        blanks += int(bad.sum())
        assert batches.state()["blank_records"] == blanks


def test_ids_outside_the_vocabulary_become_blank(tmp_path: Path) -> None:
    folder = packed_shards(tmp_path)
    entry = shards.read_index(folder).entries[0]
    records = list(shards.read_records(folder / entry.name))
    numbers = np.arange(128)
    features = row_features(
        encode_sequences(example_features(numbers) | {"sequence_keys": numbers[:, None]}), np.full(64, 2),
        PackedShape(2 * S, 2, 2 * M), 0,
    )  # fmt: skip
    features["input_ids"][7, 3] = VOCAB
    records[7] = encode_examples(features)[7]
    forged = shards.write_records(folder / entry.name, records)
    forged = dataclasses.replace(forged, features=entry.features)
    shards.write_index(folder, [forged, *shards.read_index(folder).entries[1:]])
    (batch,) = eval_batches(PAIRS, folder=folder, batch_size=256, tokenizer=TOKENIZER)
    assert np.flatnonzero((batch["sequence_ids"] == 0).all(1)).tolist() == [7]


def test_samples_see_the_first_sequences(intact: Any) -> None:
    first = first_sequences(intact[0], 0)
    numbers = intact[0]["sequence_keys"][:, 0].astype(np.int64)
    source = example_features(numbers)
    for name, stored in (
        ("input_ids", "input_ids"),
        ("token_type_ids", "segment_ids"),
        ("sequence_ids", "input_mask"),
    ):
        np.testing.assert_array_equal(first[name][:, :S], source[stored])
        assert not first[name][:, S:].any()
    np.testing.assert_array_equal(first["mlm_weights"][:, :M], source["masked_lm_weights"])
    assert first["cls_positions"].shape == (16, 1)
