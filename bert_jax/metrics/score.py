"""The class ``Score``, which represents a metric that can be computed on any resample of the records, and functions
that several metrics share."""

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """A metric of a fixed set of records, which can be computed on any resample of them.

    ``of`` is a function from int64 indices of records, which may repeat, to the value of the metric on that
    resample, or NaN if the metric is undefined. All metrics can therefore share one bootstrap. Do not modify an
    array of indices after passing it: scores share counts that are cached by the identity of the array.
    """

    name: str
    of: Callable[[np.ndarray], float]
    higher_is_better: bool = True


def value(score: Score, n: int) -> float:
    """Return the value of the metric over all ``n`` records; raise ``ValueError`` if ``n`` is 0."""
    if n < 1:
        raise ValueError(f"{score.name}: no records to score; give one or more")
    return score.of(np.arange(n))


def count_records(**columns: Sized) -> int:
    """Return the number of records, the length of each column; raise ``ValueError`` if the lengths differ or are
    0."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"the numbers of records differ: {counts}; they must be equal")
    count = next(iter(lengths.values()))
    if not count:
        raise ValueError(f"{', '.join(lengths)}: no records to score; give one or more")
    return count


def mean_score(
    name: str, values: np.ndarray, where: np.ndarray | None = None, higher_is_better: bool = True
) -> Score:
    """Return the score whose value is the mean of ``values`` [n] over all records or, if ``where`` (bool[n]) is
    set, over the records that ``where`` selects; NaN if a resample contains none of these records."""
    values = np.asarray(values, np.float64)

    def of(indices: np.ndarray) -> float:
        if where is not None:
            indices = indices[where[indices]]
        return float(values[indices].mean()) if indices.size else float("nan")

    return Score(name, of, higher_is_better)


def mean_of_groups(name: str, values: np.ndarray, groups: np.ndarray, count: int) -> Score:
    """Return the score whose value is the mean of ``values`` [n]. Its ``count`` records are groups of values, such
    as the sentences of words: ``groups`` int[n] is the record of each value. NaN if a resample contains no
    value."""
    sums, sizes = np.bincount(groups, values, count), np.bincount(groups, minlength=count)

    def of(indices: np.ndarray) -> float:
        total = sizes[indices].sum()
        return float(sums[indices].sum() / total) if total else float("nan")

    return Score(name, of)


def divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return the elementwise quotient, with 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator, np.float64), where=denominator != 0)


def precision_recall_f1(counts: np.ndarray) -> np.ndarray:
    """Return precision, recall and F1 as one array, float64[3, ...]; 0 / 0 counts as 0.

    ``counts`` [3, ...] contains the numbers of correct, gold and predicted labels (or entities).
    """
    hits, gold, predicted = counts
    return np.stack([divide(hits, predicted), divide(hits, gold), divide(2 * hits, gold + predicted)])


def once(function: Callable[[np.ndarray], T]) -> Callable[[np.ndarray], T]:
    """Return ``function`` with its last result cached by array identity, so that all scores of a resample share the
    result."""
    last: list[tuple[np.ndarray, T]] = []

    def of(indices: np.ndarray) -> T:
        if not last or last[0][0] is not indices:
            last[:] = [(indices, function(indices))]
        return last[0][1]

    return of


def repeats(indices: np.ndarray, n: int) -> np.ndarray:
    """Return float64[n], the number of occurrences of each record in the resample, for use as weights in sums."""
    return np.bincount(indices, minlength=n).astype(np.float64)
