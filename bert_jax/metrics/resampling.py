"""Intervals of metrics and of shares, and tests of the difference between two models on the same records."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy

from bert_jax.metrics.score import Score, count_records, value


class Interval(NamedTuple):
    """The value of a metric over all records, and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


class Difference(NamedTuple):
    """The metric of model a minus the metric of model b, the bounds of its interval, and the two-sided p-value."""

    difference: float
    low: float
    high: float
    p_value: float


class McNemar(NamedTuple):
    """Numbers of records that only model a, or only model b, predicts correctly, and the two-sided p-value."""

    only_a: int
    only_b: int
    p_value: float


def confidence_intervals(
    scores: Sequence[Score], n: int, seed: int, resamples: int = 1000, level: float = 0.95
) -> list[Interval]:
    """Return the percentile bootstrap interval (Efron 1979) of each score over ``n`` records.

    All scores share the resamples, which depend on ``seed`` alone. Resamples on which a metric is undefined are
    ignored; if it is undefined on all resamples, the bounds are NaN. Raises ``ValueError`` if ``n`` is 0.
    """
    wholes = [value(score, n) for score in scores]
    values = _resampled(scores, n, seed, resamples) if scores else ()
    return [Interval(whole, *_bounds(row, level)) for whole, row in zip(wholes, values, strict=True)]


def wilson_interval(right: int, n: int, level: float = 0.95) -> Interval:
    """Return the share ``right / n`` and its Wilson score interval (Wilson 1927), which stays inside 0 to 1 and has
    a width for shares of 0 and 1 too. Raises ``ValueError`` if ``n`` is 0."""
    if n < 1:
        raise ValueError("accuracy: no records to score; give one or more")
    bounds = scipy.stats.binomtest(right, n).proportion_ci(level, method="wilson")
    return Interval(right / n, float(bounds.low), float(bounds.high))


def paired_bootstrap(
    score_a: Score, score_b: Score, n: int, seed: int, resamples: int = 1000, level: float = 0.95
) -> Difference:
    """Return the difference of two scores of the same ``n`` records, both computed on the same resamples.

    The p-value is twice the share of resamples whose difference is 0 or has the opposite sign, which is consistent
    with the interval. The original set of records counts as one more resample (Davison and Hinkley 1997, 4.2.3),
    which keeps the p-value above 0.
    """
    whole = value(score_a, n) - value(score_b, n)
    values = _resampled((score_a, score_b), n, seed, resamples)
    differences = values[0] - values[1]
    defined = differences[~np.isnan(differences)]
    tail = min((defined <= 0).sum(), (defined >= 0).sum())
    p_value = min(1.0, 2 * float(tail + 1) / (defined.size + 1)) if defined.size else float("nan")
    return Difference(whole, *_bounds(differences, level), p_value)


def mcnemar(correct_a: np.ndarray, correct_b: np.ndarray) -> McNemar:
    """Return the result of the exact McNemar test for two arrays bool[n]: a binomial test on the records that only
    one of the models predicts correctly."""
    count_records(correct_a=correct_a, correct_b=correct_b)
    a, b = np.asarray(correct_a, bool), np.asarray(correct_b, bool)
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    p_value = float(scipy.stats.binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0
    return McNemar(only_a, only_b, p_value)


def _resampled(scores: Sequence[Score], n: int, seed: int, resamples: int) -> np.ndarray:
    """Return float64[S, resamples]: the value of each of S scores on each resample."""
    if resamples < 1:
        raise ValueError(f"resamples: {resamples} is not allowed; allowed: 1 or more")
    rng = np.random.default_rng(seed)
    values = np.empty((len(scores), resamples))
    for number in range(resamples):
        indices = rng.integers(n, size=n)
        values[:, number] = [score.of(indices) for score in scores]
    return values


def _bounds(values: np.ndarray, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise ValueError(f"level: {level} is not allowed; it must be above 0 and below 1")
    if np.isnan(values).all():
        return float("nan"), float("nan")
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
