"""Metrics of one predicted number per record: correlations and errors."""

import numpy as np

from bert_jax.metrics.score import Score, count_records, mean_score


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return the Pearson correlation of x [n] and y [n]; NaN if either is constant or not finite."""
    x, y = _numbers("x", x), _numbers("y", y)
    count_records(x=x, y=y)
    is_finite = np.isfinite(x).all() and np.isfinite(y).all()
    # Test the numbers, not their deviations: a constant minus its rounded mean need not be 0.
    if not is_finite or x.min() == x.max() or y.min() == y.max():
        return float("nan")
    return float(np.clip(_direction(x) @ _direction(y), -1, 1))


def regression_scores(gold: np.ndarray, predicted: np.ndarray) -> list[Score]:
    """Return the scores pearson, spearman, mse and mae of the numbers ``predicted`` against ``gold``.

    For spearman, ties get their average rank. Correlations are NaN if ``gold`` or ``predicted`` is constant or
    contains NaN. Raises ``ValueError`` for wrong shapes.
    """
    gold, predicted = _numbers("gold", gold), _numbers("predicted", predicted)
    count_records(gold=gold, predicted=predicted)
    with np.errstate(invalid="ignore", over="ignore"):  # errors of a diverged model may be inf or NaN
        error = predicted - gold
        squared = error**2
    is_defined = not (np.isnan(gold).any() or np.isnan(predicted).any())
    # Sorted once: the average ranks of a resample follow from counts of the different values.
    order_x, order_y = (np.unique(values, return_inverse=True)[1] for values in (gold, predicted))

    def spearman(indices: np.ndarray) -> float:
        return pearson(_ranks(order_x[indices]), _ranks(order_y[indices])) if is_defined else float("nan")

    return [
        Score("pearson", lambda indices: pearson(gold[indices], predicted[indices])),
        Score("spearman", spearman),
        mean_score("mse", squared, higher_is_better=False),
        mean_score("mae", np.abs(error), higher_is_better=False),
    ]


def _numbers(name: str, values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 1:
        raise ValueError(f"{name}: shape {list(values.shape)} is not allowed; give a one-dimensional array")
    return values


def _direction(x: np.ndarray) -> np.ndarray:
    """Return the deviations of ``x`` from its mean, scaled to unit length."""
    deviations = x - x.mean()
    deviations /= np.abs(deviations).max()  # so that no square overflows or vanishes
    return deviations / np.linalg.norm(deviations)


def _ranks(order: np.ndarray) -> np.ndarray:
    """Return the ranks (from 1) of the small non-negative ints in ``order``; ties get their average rank."""
    counts = np.bincount(order)
    return (np.cumsum(counts) - (counts - 1) / 2)[order]
