"""Base of every metric: a score that can be taken of any resample, and checked inputs."""

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """A metric of a fixed set of records, bound to what it needs of each of them.

    ``of`` takes int64 indices of records, repeats allowed, and gives the metric of that resample; nan where it is
    undefined. So one bootstrap serves all metrics. Indices must not be written to afterwards: scores share what
    they count of the same array.
    """

    name: str
    of: Callable[[np.ndarray], float]
    higher_is_better: bool = True


def value(score: Score, n: int) -> float:
    """The metric of all ``n`` records."""
    if n < 1:
        raise ValueError(f"{score.name}: there are no records to score")
    return score.of(np.arange(n))


def count_records(**columns: Sized) -> int:
    """Return the common number of records of the named columns; raise ``ValueError`` if it differs or is 0."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"the columns must have as many records as each other: {counts}")
    count = next(iter(lengths.values()))
    if not count:
        raise ValueError(f"there are no records to score in {', '.join(lengths)}")
    return count


def mean_score(
    name: str, values: np.ndarray, where: np.ndarray | None = None, higher_is_better: bool = True
) -> Score:
    """Mean of ``values`` [n], over the records of ``where`` (bool[n]) if given; nan if a resample has none."""
    values = np.asarray(values, np.float64)

    def of(indices: np.ndarray) -> float:
        if where is not None:
            indices = indices[where[indices]]
        return float(values[indices].mean()) if indices.size else float("nan")

    return Score(name, of, higher_is_better)


def divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Elementwise quotient, 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator, np.float64), where=denominator != 0)


def precision_recall_f1(counts: np.ndarray) -> np.ndarray:
    """float64[3, ...] precision, recall, F1 of ``counts`` [3, ...] (hits, gold, predicted); 0 for 0 / 0."""
    hits, gold, predicted = counts
    return np.stack([divide(hits, predicted), divide(hits, gold), divide(2 * hits, gold + predicted)])


def once(function: Callable[[np.ndarray], T]) -> Callable[[np.ndarray], T]:
    """``function`` of an array of indices, kept for the last array: all scores of a resample share it."""
    last: list[tuple[np.ndarray, T]] = []

    def of(indices: np.ndarray) -> T:
        if not last or last[0][0] is not indices:
            last[:] = [(indices, function(indices))]
        return last[0][1]

    return of


def repeats(indices: np.ndarray, n: int) -> np.ndarray:
    """float64[n]: how often the resample holds each record. Sums with it as weight need no copy of the records."""
    return np.bincount(indices, minlength=n).astype(np.float64)
