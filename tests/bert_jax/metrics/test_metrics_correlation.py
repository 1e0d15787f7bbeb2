"""Correlations and errors: equal to scipy's, nan and silent where they are undefined."""

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from bert_jax.metrics import value
from bert_jax.metrics.correlation import pearson, regression_scores


def values(gold, predicted):
    """By name; nothing may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {score.name: value(score, len(gold)) for score in regression_scores(gold, predicted)}


def test_by_hand():
    found = values([1, 2, 3, 4], [1, 3, 2, 4])
    assert found == pytest.approx({"pearson": 0.8, "spearman": 0.8, "mse": 0.5, "mae": 0.5}, abs=1e-15)
    # Ranks 1 2.5 2.5 4 and 1 2 3 4: covariance 4.5, squared lengths 4.5 and 5.
    tied = values([0, 7, 7, 9], [1, 2, 3, 100])
    assert tied["spearman"] == pytest.approx(4.5 / math.sqrt(4.5 * 5), abs=1e-15)
    assert pearson([0, 1], [5, 3]) == pytest.approx(-1, abs=1e-15)


@pytest.mark.parametrize("seed", range(8))
def test_equal_to_scipy(seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
        n = int(rng.integers(2, 50))
        x = rng.normal(rng.normal() * 100, 1, n)
        y = rng.integers(0, 4, n) if rng.random() < 0.5 else x * rng.normal() + rng.normal(0, 2, n)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of constant input
            expected = {"pearson": stats.pearsonr(x, y)[0], "spearman": stats.spearmanr(x, y)[0]}
        expected |= {"mse": np.mean((x - y) ** 2), "mae": np.mean(abs(x - y))}
        assert values(x, y) == pytest.approx(expected, abs=1e-12, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("constant", [0.0, 0.1, -3e300, 5e-324])
def test_constant_scores_are_nan_without_a_warning(constant):
    rng = np.random.default_rng(0)
    for n in (1, 3, 10, 77):
        for pair in ((np.full(n, constant), rng.normal(size=n)), (rng.normal(size=n), np.full(n, constant))):
            found = values(*pair)
            assert math.isnan(found["pearson"]) and math.isnan(found["spearman"])


def test_a_diverged_model_is_nan_without_a_warning():
    found = values([1.0, 2.0, 3.0], [1.0, math.nan, 3.0])
    assert all(map(math.isnan, found.values()))
    found = values([1.0, 2.0, 3.0], [1.0, math.inf, 3.0])
    assert math.isnan(found["pearson"]) and found["mse"] == math.inf
    assert found["spearman"] == pytest.approx(0.5, abs=1e-15)


def test_large_and_small_numbers_do_not_overflow_or_vanish():
    x = np.array([1.0, 2.0, 4.0])
    for scale in (1e200, 1e-200):
        assert pearson(x * scale, x) == pytest.approx(1, abs=1e-15)


def test_wrong_input_is_refused():
    for function in (pearson, regression_scores):
        with pytest.raises(ValueError, match=r"x 2, y 1|gold 2, predicted 1"):
            function([1, 2], [1])
        with pytest.raises(ValueError, match="no records"):
            function([], [])
        with pytest.raises(ValueError, match=r"shape \[1, 2\] .* one-dimensional"):
            function([[1, 2]], [[1, 2]])
