"""Packing of sequences into rows against plain statements, and masks of packed rows."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from input_shards import config
from support import tiny_config

from bert_jax.batch import RowShape
from bert_jax.hashing import hash_key
from bert_jax.parallel import check_batches
from data_pipeline.build.masking import mask_batch, mask_sequences
from data_pipeline.build.packing import (
    PackedShape,
    best_fit,
    pack,
    sequences_per_row,
)


def one_by_one(lengths: np.ndarray, size: int, most: int) -> list[int]:
    """Best fit, longest first, one sequence at a time: the sorted sums of the lengths of each row."""
    rows: list[list[int]] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fits = [row for row in rows if len(row) < most and sum(row) + length <= size]
        row = max(fits, key=sum, default=None)
        if row is None:
            rows.append(row := [])
        row.append(length)
    return sorted(map(sum, rows))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("size", [16, 64, 65])
def test_sequences_go_into_the_fullest_row_that_takes_them(size: int, most: int) -> None:
    rng = np.random.default_rng(size + most)
    for count in (0, 1, 2, 150):
        lengths = rng.choice([*range(1, size + 1), size, size, 3], count)
        row_of = best_fit(lengths, size, most)
        rows = [sorted(lengths[row_of == row].tolist()) for row in range(row_of.max(initial=-1) + 1)]
        if most >= size or most == 1:  # with a limit, rows of equal free space hold different numbers of sequences
            assert sorted(map(sum, rows)) == one_by_one(lengths, size, most)
        assert all(0 < len(row) <= most and sum(row) <= size for row in rows)
        shape = PackedShape(size, most, 0)
        order, counts = pack(lengths, shape)
        assert sorted(order.tolist()) == list(range(count))
        assert counts.tolist() == [np.sum(row_of == row_of[i]) for i in order[np.cumsum(counts) - counts]]
        first = order[np.cumsum(counts) - counts]
        assert (np.diff(first) > 0).all(), "rows have the order of their first sequences, which is random"
        for start, stop in pairwise(np.cumsum([0, *counts]).tolist()):
            assert len(set(row_of[order[start:stop]].tolist())) == 1
            assert lengths[order[start:stop]].tolist() == sorted(lengths[order[start:stop]].tolist(), reverse=True)


def test_the_limit_of_sequences_follows_from_the_histogram() -> None:
    assert sequences_per_row(np.bincount([16] * 9, minlength=17), 16) == 1
    assert sequences_per_row(np.bincount([8] * 9, minlength=17), 16) == 2
    assert sequences_per_row(np.bincount([4] * 1000, minlength=17), 16) == 4
    few_short = np.bincount([16] * 100_000 + [4] * 8, minlength=17)
    assert sequences_per_row(few_short, 16) == 1, "two rows more of 100,002 are below a hundredth"
    assert sequences_per_row(np.zeros(17, np.int64), 16) == 1


@pytest.mark.parametrize("fraction", [0.05, 0.15, 0.4, 1.0])
def test_the_predictions_of_any_row_fit(fraction: float) -> None:
    data = config(seq_length=64, max_predictions=30, mask_fraction=fraction)
    rng = np.random.default_rng(0)
    for most in (1, 2, 5, 21):
        for _ in range(300):
            lengths = 3 + rng.multinomial(64 - 3 * most, rng.dirichlet(np.full(most, 0.3)))
            assert np.clip(np.rint(lengths * fraction), 1, 30).sum() <= data.most_predictions(most)


def test_a_batch_counts_sequences() -> None:
    shape = RowShape(128, 20, 6, 1.7)
    for sequences in (1, 8, 32, 250, 256, 1000, 4096, 65_536):
        rows = shape.rows(sequences)
        assert abs(rows - sequences / 1.7) <= max(sequences / 1.7 / 32, 0.5) + 1e-9 or rows == 1
    assert (shape.rows(256), shape.rows(4096)) == (152, 2432)
    assert RowShape(128, 20).rows(250) == RowShape(128, 20, 6, 1.7, counts_rows=True).rows(250) == 250
    training = tiny_config("--training.global_batch_size 256 --training.accumulation_steps 4").training
    with pytest.raises(
        ValueError, match=r"256 \(152 packed rows\) in 4 microbatches is not divisible by the 8"
    ) as e:
        check_batches(training, {"data": 8, "fsdp": 1}, shape.rows)
    would_do = int(str(e.value).partition("use ")[2].partition(" ")[0])
    assert shape.rows(would_do) % 32 == 0
    with pytest.raises(ValueError, match=r"not divisible by the 66 parts .*use another mesh"):
        check_batches(training, {"data": 66, "fsdp": 1}, shape.rows)  # 33 never divides a number of packed rows
    sparse = RowShape(128, 20, 40, 30.0)
    with pytest.raises(ValueError, match="use ") as e:
        check_batches(training, {"data": 1024, "fsdp": 1}, sparse.rows)
    would_do = int(str(e.value).partition("use ")[2].partition(" ")[0].replace(",", ""))
    assert sparse.rows(would_do) % 4096 == 0


@pytest.mark.parametrize("unit", ["token", "whole_word", "span"])
def test_dynamic_masks_are_those_of_single_rows(unit: str) -> None:
    data = config(seq_length=80, max_predictions=9, mask_unit=unit, masking="dynamic", packing="best_fit")
    rng = np.random.default_rng(1)
    lengths = np.array([[40, 20, 3], [80, 0, 0], [0, 0, 0], [5, 65, 10]])
    ids = rng.integers(5, 100, (4, 80))
    sequence_ids = np.stack([np.repeat([1, 2, 3, 0], [*row, 80 - row.sum()]) for row in lengths])
    starts = rng.random((4, 80)) < 0.6
    maskable = sequence_ids > 0
    for row in range(4):  # the first and last token of a sequence are [CLS] and [SEP]
        for slot in range(3):
            maskable[row, np.flatnonzero(sequence_ids[row] == slot + 1)[[0, -1][: lengths[row, slot]]]] = False
    keys = np.arange(4, dtype=np.uint64)
    options: dict[str, Any] = {"data": data, "mask_id": 4, "vocab_size": 100}
    masked, positions, labels, weights = mask_sequences(
        ids, starts, maskable, sequence_ids, keys, 3, predictions=data.most_predictions(3), **options
    )
    expected = ids.copy()
    for row in range(4):
        found = []
        for slot in range(3):
            own = np.flatnonzero(sequence_ids[row] == slot + 1)
            if not len(own):
                continue
            key = hash_key(keys[row : row + 1], np.array([slot]))
            one, places, answers, used = (
                values[0] for values in mask_batch(ids[row, own][None], starts[row, own][None],
                                                   maskable[row, own][None], key, **options)
            )  # fmt: skip
            expected[row, own] = one
            found += [(own[0] + p, a) for p, a, u in zip(places, answers, used, strict=True) if u]
        used = weights[row] > 0
        assert list(zip(positions[row, used], labels[row, used], strict=True)) == found
        assert used.tolist() == [True] * len(found) + [False] * (len(used) - len(found))
    np.testing.assert_array_equal(masked, expected)
