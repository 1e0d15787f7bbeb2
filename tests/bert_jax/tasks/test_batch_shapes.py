"""Units in rows: each once, whole, in the fewest computed tokens; shapes few and sufficient."""

import time

import numpy as np
import pytest

from bert_jax.finetuning.batch_shapes import choose_shape, plan_shapes
from bert_jax.inference.batching import Shape, fill_rows, pack_batch
from bert_jax.tasks.task import Encoded, ModelInput, Target

OPTIONS = {"steps": 2000, "width": 384, "parts": 1, "most": 8, "packing": True, "limit": 128}


def short_lengths(count=20_000, seed=0):
    """Like sentiment phrases: most of 5 to 20 tokens, few of up to 60."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.gamma(1.7, 6.5, count).astype(int) + 3, 3, 64)


def test_every_unit_is_in_one_row_and_rows_hold_what_they_can():
    rng = np.random.default_rng(1)
    for _ in range(50):
        lengths = rng.integers(1, 65, rng.integers(1, 60)).tolist()
        rows = fill_rows(lengths, (64,), 5)
        assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
        assert all(sum(lengths[n] for n in row) <= 64 and len(row) <= 5 for row in rows)


def by_definition(lengths, length, units):
    """The longest unit first, into the row with the least space that takes it, the first of equals."""
    rows = []
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        space = [length - sum(lengths[n] for n in row) for row in rows]
        takes = [i for i, row in enumerate(rows) if space[i] >= lengths[number] and len(row) < units]
        if takes:
            rows[min(takes, key=space.__getitem__)].append(number)
        else:
            rows.append([number])
    return rows


def test_the_row_with_least_space_is_filled():
    rng = np.random.default_rng(2)
    for _ in range(100):
        lengths, units = rng.integers(1, 33, rng.integers(1, 60)).tolist(), int(rng.integers(1, 9))
        assert fill_rows(lengths, (32,), units) == by_definition(lengths, 32, units)


@pytest.mark.slow
def test_a_test_set_of_hundreds_of_thousands_takes_seconds():
    lengths = short_lengths(400_000).tolist()
    began = time.process_time()
    rows = fill_rows(lengths, (64,), 9)
    assert time.process_time() - began < 8 and sum(map(len, rows)) == 400_000


def test_what_does_not_fit_is_told():
    assert fill_rows([10, 65], (64,), 4) is None
    assert fill_rows([40, 40], (64,), 4, rows=1) is None
    assert fill_rows([10, 10, 10], (64,), 2, rows=1) is None


@pytest.mark.parametrize("parts", [1, 8])
def test_shapes_take_every_batch_and_waste_little(parts):
    lengths = short_lengths()
    shapes = plan_shapes(lengths, 32, **OPTIONS | {"parts": parts})
    assert len(shapes) <= 8 and all(shape.rows % parts == 0 for shape in shapes)
    rng = np.random.default_rng(2)
    computed = real = 0
    for _ in range(300):
        batch = lengths[rng.integers(0, len(lengths), 32)].tolist()
        shape, rows = choose_shape(batch, shapes)
        assert len(rows) <= shape.rows
        computed, real = computed + shape.rows * shape.length, real + sum(batch)
    assert 1 - real / computed < (0.15 if parts == 1 else 0.35)
    choose_shape([64] * 32, shapes)  # the worst batch that there can be
    choose_shape([3], shapes)  # what is left over at the end of an epoch


@pytest.mark.slow
def test_a_short_run_compiles_few_shapes():
    lengths = short_lengths()
    many = plan_shapes(lengths, 32, **OPTIONS | {"steps": 100_000})
    few = plan_shapes(lengths, 32, **OPTIONS | {"steps": 100})
    assert len(few) == 2 < len(many)


def test_without_packing_there_is_one_shape():
    assert plan_shapes(short_lengths(), 32, **OPTIONS | {"packing": False}) == [Shape(32, 128, 1)]


def test_a_batch_holds_sequences_targets_and_places():
    targets = {
        "label": Target("unit", np.int32),
        "start": Target("position", np.int32),
        "tag": Target("token", np.float32),
    }
    units = [
        ModelInput(0, (Encoded([2, 7, 3], [0, 0, 0]), Encoded([2, 8, 9, 3], [0, 0, 1, 1])),
             {"label": 4, "start": 1, "tag": np.arange(7)}, 0.5),
        ModelInput(1, (Encoded([2, 3], [0, 0]), Encoded([2, 6, 3], [0, 1, 1])),
             {"label": 5, "start": 2, "tag": np.arange(10, 15)}),
    ]  # fmt: skip
    packed = pack_batch(units, [[1, 0]], Shape(2, 16, 3), sequences=2, targets=targets, pad_id=1)
    batch = packed.features
    assert batch["input_ids"][0].tolist() == [2, 3, 2, 6, 3, 2, 7, 3, 2, 8, 9, 3, 1, 1, 1, 1]
    assert batch["sequence_ids"][0].tolist() == [1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 0, 0, 0, 0]
    assert batch["position_ids"][0].tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0, 0, 0, 0]
    assert batch["token_type_ids"][0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert batch["cls_positions"][0].tolist() == [0, 2, 5, 8, 0, 0]
    assert batch["weights"].tolist() == [[1, 0.5, 0], [0, 0, 0]]
    assert batch["label"].tolist() == [[5, 4, 0], [0, 0, 0]]
    assert batch["start"].tolist() == [[2, 6, 0], [0, 0, 0]]
    assert batch["tag"][0].tolist() == [10, 11, 12, 13, 14, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0]
    assert packed.places == [(1, 0, 0, 0), (0, 0, 1, 5)]
    assert np.all(batch["input_ids"][1] == 1) and not batch["sequence_ids"][1].any()
