"""Masking against plain restatements of its rules and against what chance allows."""

from typing import Any

import numpy as np
import pytest

from bert_jax.config.pretrain import DataConfig
from bert_jax.hashing import hash_key
from data_pipeline.build.masking import mask_batch, prediction_counts, span_probabilities

MASK, VOCAB = 4, 30_000


def settings(unit: str = "token", **changes: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "mask_unit": unit, "mask_fraction": 0.15, "mask_token_share": 0.8, "random_token_share": 0.1,
        "span_lengths": (3.8, 10),
    }  # fmt: skip
    return {"data": DataConfig(**(options | changes)), "mask_id": MASK, "vocab_size": VOCAB}


def batch(rows: int, size: int = 128, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ids, word starts, candidates and lengths of [CLS] A [SEP] B [SEP] rows of random lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, size + 1, rows)
    lengths[: rows // 2] = size
    column = np.arange(size)
    middle = rng.integers(2, lengths - 2)
    inside = (column > 0) & (column < lengths[:, None] - 1) & (column != middle[:, None])
    ids = np.where(inside, rng.integers(5, VOCAB, (rows, size)), 0).astype(np.int32)
    ids[:, 0] = 2
    ids[np.arange(rows), middle] = ids[np.arange(rows), lengths - 1] = 3
    return ids, (rng.random((rows, size)) < 0.7) | ~inside, inside, lengths


def run(unit: str = "token", rows: int = 3000, limit: int = 20, **changes: float):
    ids, starts, inside, lengths = batch(rows)
    out = mask_batch(
        ids, starts, inside, hash_key(7, np.arange(rows)), **settings(unit, max_predictions=limit, **changes)
    )
    return ids, starts, inside, lengths, out


@pytest.mark.parametrize(
    ("tokens", "expected"), [(3, 1), (10, 2), (30, 4), (50, 8), (90, 14), (128, 19), (140, 20), (512, 20)]
)
def test_count_rounds_as_python_3(tokens: int, expected: int) -> None:
    assert prediction_counts(np.array([tokens]), 0.15, 20)[0] == expected == min(20, max(1, round(tokens * 0.15)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("unit", ["token", "whole_word", "span"])
@pytest.mark.parametrize("limit", [1, 20, 200])
def test_positions_labels_and_weights(unit: str, limit: int) -> None:
    ids, _, inside, lengths, (masked, positions, labels, weights) = run(unit, 500, limit)
    rule = [min(limit, max(1, round(n * 0.15))) for n in lengths.tolist()]
    used = weights > 0
    for row in range(len(ids)):
        chosen = positions[row, used[row]]
        assert used[row, : len(chosen)].all() and not labels[row, ~used[row]].any()
        assert not positions[row, ~used[row]].any()
        assert (np.diff(chosen) > 0).all()
        assert inside[row, chosen].all()
        np.testing.assert_array_equal(ids[row, chosen], labels[row, used[row]])
        untouched = np.ones(ids.shape[1], bool)
        untouched[chosen] = False
        np.testing.assert_array_equal(masked[row, untouched], ids[row, untouched])
        if unit == "token":
            assert len(chosen) == min(rule[row], int(inside[row].sum()))
        else:
            assert len(chosen) <= rule[row]
    assert masked.dtype == positions.dtype == labels.dtype == np.int32
    assert weights.dtype == np.float32
    assert positions.shape == labels.shape == weights.shape == (500, limit)


@pytest.mark.slow
def test_shares_over_a_million_tokens() -> None:
    _, _, _, lengths, (masked, positions, labels, weights) = run(rows=76_000)
    used = weights > 0
    total = int(used.sum())
    assert total > 1_000_000
    assert total == prediction_counts(lengths, 0.15, 20).sum()
    now = np.take_along_axis(masked, positions, 1)[used]
    is_mask = now == MASK
    is_same = now == labels[used]
    is_random = ~is_mask & ~is_same
    for share, count in ((0.8, is_mask.sum()), (0.1, is_same.sum()), (0.1, is_random.sum())):
        assert abs(count - share * total) < 3 * np.sqrt(total * share * (1 - share)) + 2 * total * 0.1 / VOCAB
    # Random tokens come evenly from the whole vocabulary: ten equal parts of it are equally likely.
    parts = np.bincount(now[is_random] * 10 // VOCAB, minlength=10)
    expected = is_random.sum() / 10
    assert len(parts) == 10
    assert ((parts - expected) ** 2 / expected).sum() < 27.9  # chi-square, 9 degrees, p = 0.001


def test_every_candidate_is_equally_likely() -> None:
    rows = 40_000
    ids = np.full((rows, 32), 9, np.int32)
    inside = np.zeros((rows, 32), bool)
    inside[:, 1:31] = True
    _, positions, _, weights = mask_batch(
        ids, inside, inside, hash_key(1, np.arange(rows)), **settings(max_predictions=20)
    )
    counts = np.bincount(positions[weights > 0], minlength=32)[1:31]
    expected = rows * 5 / 30  # round(32 * 0.15) = 5 of 30
    # 30 cells with a fixed sum per row: variance per cell is n p (1 - p).
    assert np.abs(counts - expected).max() < 4 * np.sqrt(expected * (1 - 5 / 30))


@pytest.mark.parametrize("unit", ["token", "whole_word", "span"])
def test_a_row_depends_on_its_key_alone(unit: str) -> None:
    ids, starts, inside, _ = batch(64)
    keys = hash_key(3, np.arange(64))
    whole = mask_batch(ids, starts, inside, keys, **settings(unit, max_predictions=20))
    order = np.random.default_rng(1).permutation(64)
    for rows in (order, order[:1], order[:7]):
        part = mask_batch(ids[rows], starts[rows], inside[rows], keys[rows], **settings(unit, max_predictions=20))
        for a, b in zip(whole, part, strict=True):
            np.testing.assert_array_equal(a[rows], b)
    other = mask_batch(ids, starts, inside, keys + np.uint64(1), **settings(unit, max_predictions=20))
    assert (other[1] != whole[1]).any(1).mean() > 0.9


def words_of(starts: np.ndarray, inside: np.ndarray) -> list[list[int]]:
    """Words of a row as lists of positions."""
    words: list[list[int]] = []
    for at in range(len(starts)):
        if inside[at] and (starts[at] or not inside[at - 1]):
            words.append([at])
        elif inside[at]:
            words[-1].append(at)
    return words


def test_whole_words_as_the_reference() -> None:
    ids, starts, inside, lengths = batch(400)
    starts &= np.random.default_rng(5).random(starts.shape) < 0.3  # long words
    _, positions, _, weights = mask_batch(
        ids, starts, inside, hash_key(7, np.arange(400)), **settings("whole_word", max_predictions=20)
    )
    skipped = 0
    for row in range(len(ids)):
        chosen = set(positions[row, weights[row] > 0].tolist())
        words = words_of(starts[row], inside[row])
        quota = min(20, max(1, round(int(lengths[row]) * 0.15)))
        taken = [word for word in words if chosen & set(word)]
        assert all(set(word) <= chosen for word in taken)
        # Skipping ends only when nothing fits: every word that was left out is longer than what is left.
        left = quota - len(chosen)
        assert all(len(word) > left for word in words if not chosen & set(word))
        skipped += left > 0
    assert skipped  # the case occurs


def test_words_longer_than_the_count_are_skipped() -> None:
    ids = np.full((1, 16), 9, np.int32)
    inside = np.zeros((1, 16), bool)
    inside[:, 1:9] = True
    starts = np.zeros((1, 16), bool)
    starts[:, [1, 5]] = True  # two words of four pieces; the count is round(10 * 0.15) = 2
    _, _, _, weights = mask_batch(
        ids, starts, inside, np.array([5], np.uint64), **settings("whole_word", max_predictions=4)
    )
    assert weights.sum() == 0


def test_spans() -> None:
    size, rows = 512, 4000
    ids = np.full((rows, size), 9, np.int32)
    inside = np.zeros((rows, size), bool)
    inside[:, 1 : size - 1] = True
    inside[:, 200] = False
    starts = np.ones((rows, size), bool)
    _, positions, _, weights = mask_batch(
        ids,
        starts,
        inside,
        hash_key(2, np.arange(rows)),
        **settings("span", mask_fraction=0.02, max_predictions=80),
    )
    assert (weights.sum(1) == 10).all()  # round(512 * 0.02)
    runs = []
    for row in positions[:, :10]:
        breaks = np.flatnonzero(np.diff(row) > 1)
        runs += np.diff(np.concatenate([[-1], breaks, [9]])).tolist()
    # Ten tokens hold far fewer runs than single tokens would: spans of 3.8 words, the last one cut short.
    assert 2.5 < np.mean(runs) < 4.5
    assert not (positions[weights > 0] == 200).any()


def test_spans_end_with_their_segment() -> None:
    rows = 8000
    ids = np.full((rows, 20), 9, np.int32)
    inside = np.zeros((rows, 20), bool)
    inside[:, 1:19] = True
    inside[:, 3] = False  # A is positions 1 and 2
    _, positions, _, weights = mask_batch(
        ids, inside, inside, hash_key(2, np.arange(rows)),
        **settings("span", span_lengths=(9.0, 10), max_predictions=3),
    )  # fmt: skip
    assert (weights.sum(1) == 3).all()
    # A span from 2 into B would make one row in 17 like this; two spans do so in about one of 250.
    assert (positions == [2, 4, 5]).all(1).mean() < 0.02


def test_span_lengths() -> None:
    shares = span_probabilities(3.8, 10)
    lengths = np.arange(1, 11)
    assert shares.sum() == pytest.approx(1)
    assert (shares * lengths).sum() == pytest.approx(3.8, abs=1e-6)
    np.testing.assert_allclose(shares[1:] / shares[:-1], 0.8, atol=2e-3)  # SpanBERT's p = 0.2
    np.testing.assert_allclose(span_probabilities(1.0, 10), np.eye(10)[0], atol=1e-6)
    np.testing.assert_allclose(span_probabilities(9.0, 10), np.full(10, 0.1), atol=1e-6)


def test_shares_are_configurable() -> None:
    ids, _, _, _, (masked, positions, _, weights) = run(mask_token_share=0.0, random_token_share=0.0, rows=50)
    np.testing.assert_array_equal(masked, ids)
    _, _, _, _, (masked, positions, _, weights) = run(mask_token_share=1.0, random_token_share=0.0, rows=50)
    assert (np.take_along_axis(masked, positions, 1)[weights > 0] == MASK).all()


def test_blank_rows_get_no_predictions() -> None:
    ids = np.zeros((2, 16), np.int32)
    none = np.zeros((2, 16), bool)
    masked, _, _, weights = mask_batch(ids, none, none, np.array([1, 2], np.uint64), **settings(max_predictions=4))
    assert not weights.any() and not masked.any()
