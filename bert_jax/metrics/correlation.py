"""Metrics of one number per record: correlations and errors."""

import numpy as np

from bert_jax.metrics.score import Score, count_records, mean_score


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return the Pearson correlation of x [n] and y [n]; NaN if either is constant or not finite."""
    x, y = _numbers("x", x), _numbers("y", y)
    count_records(x=x, y=y)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return float("nan")
    # Test the numbers, not their deviations: a constant minus its rounded mean need not be 0.
    if x.min() == x.max() or y.min() == y.max():
        return float("nan")
    return float(np.clip(_direction(x) @ _direction(y), -1, 1))


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman correlation of numbers [n], ties at their average rank; nan if either is constant or holds nan."""
    return _spearman_score(_numbers("x", x), _numbers("y", y)).of(np.arange(count_records(x=x, y=y)))


def regression_scores(gold: np.ndarray, predicted: np.ndarray) -> list[Score]:
    """pearson, spearman, mse and mae of numbers [n]."""
    gold, predicted = _numbers("gold", gold), _numbers("predicted", predicted)
    count_records(gold=gold, predicted=predicted)
    with np.errstate(invalid="ignore", over="ignore"):  # a diverged model has inf or nan for an error, no warning
        error = predicted - gold
        squared = error**2
    return [
        Score("pearson", lambda indices: pearson(gold[indices], predicted[indices])),
        _spearman_score(gold, predicted),
        mean_score("mse", squared, higher_is_better=False),
        mean_score("mae", np.abs(error), higher_is_better=False),
    ]


def _numbers(name: str, values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 1:
        raise ValueError(f"{name} must have shape [n], not {list(values.shape)}")
    return values


def _direction(x: np.ndarray) -> np.ndarray:
    """Deviations from the mean, scaled to length 1."""
    deviations = x - x.mean()
    deviations /= np.abs(deviations).max()  # so that no square overflows or vanishes
    return deviations / np.linalg.norm(deviations)


def _spearman_score(x: np.ndarray, y: np.ndarray) -> Score:
    """Sorts once: the average ranks of a resample follow from counts of the different values."""
    if np.isnan(x).any() or np.isnan(y).any():
        return Score("spearman", lambda indices: float("nan"))
    order_x, order_y = (np.unique(values, return_inverse=True)[1] for values in (x, y))
    return Score("spearman", lambda indices: pearson(_ranks(order_x[indices]), _ranks(order_y[indices])))


def _ranks(order: np.ndarray) -> np.ndarray:
    """float64[n] ranks from 1 of small non-negative int ``order`` [n], ties at their average."""
    counts = np.bincount(order)
    return (np.cumsum(counts) - (counts - 1) / 2)[order]
