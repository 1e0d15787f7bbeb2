"""Classifiers of vectors against plain statements in float64."""

import numpy as np
import pytest
from scipy.optimize import minimize

from bert_jax.contrib.analysis.linear_probe import (
    Splits,
    fit_logistic,
    linear,
    nearest_centroid,
    predict_logistic,
    standardized,
)


def data(rng, count, classes=3, width=5):
    labels = rng.integers(0, classes, count)
    centers = rng.normal(size=(classes, width)) * 2
    return (centers[labels] + rng.normal(size=(count, width))).astype(np.float32), labels


@pytest.mark.parametrize("decay", [1e-1, 1e-3])
def test_logistic_regression_against_float64(decay):
    features, labels = data(np.random.default_rng(0), 80)
    weights = fit_logistic(features, labels, 3, decay)

    def loss(flat):
        w = flat.reshape(3, 6)
        logits = features.astype(np.float64) @ w[:, :-1].T + w[:, -1]
        log_sum = np.log(np.exp(logits).sum(axis=1))
        return (log_sum - logits[np.arange(80), labels]).mean() + decay / 2 * (w[:, :-1] ** 2).sum()

    best = minimize(loss, np.zeros(18), method="L-BFGS-B", options={"ftol": 1e-14, "maxiter": 1000})
    assert loss(weights.ravel()) - best.fun < 1e-4
    expected = best.x.reshape(3, 6)
    assert np.abs(weights[:, :-1] - expected[:, :-1]).max() < 0.05 * np.abs(expected).max()
    np.testing.assert_array_equal(fit_logistic(features, labels, 3, decay), weights)


@pytest.mark.slow
def test_the_weight_decay_is_chosen_on_held_out_sentences():
    rng = np.random.default_rng(1)
    features, labels = data(rng, 60, width=30)
    noisy = np.where(rng.random(60) < 0.4, rng.integers(0, 3, 60), labels)
    held = np.arange(60) % 3 == 2
    splits = Splits(features, features[held], held)
    decays = (1.0, 1e-2, 1e-6)
    got = linear(splits, noisy, 3, decays)
    accuracies = []
    for decay in decays:
        weights = fit_logistic(features[~held], noisy[~held], 3, decay)
        accuracies.append((predict_logistic(features[held], weights) == noisy[held]).mean())
    assert len(set(accuracies)) > 1 and got.decay == decays[int(np.argmax(accuracies))]
    whole = fit_logistic(features, noisy, 3, got.decay)
    assert (predict_logistic(features[held], whole) == got.predicted).mean() > 0.9


def test_nearest_centroids():
    features, labels = data(np.random.default_rng(2), 50)
    asked, _ = data(np.random.default_rng(3), 20)
    got = nearest_centroid(features, asked, labels, 4)
    means = [features[labels == c].mean(axis=0) for c in range(3)]
    expected = [int(np.argmax([x @ m / np.linalg.norm(m) for m in means])) for x in asked]
    assert got.predicted.tolist() == expected


def test_standardized_features():
    train, test = (np.random.default_rng(i).normal(3, 2, (30, 4)).astype(np.float32) for i in range(2))
    train[:, 1] = 7
    a, b = standardized(train, test)
    np.testing.assert_allclose(a[:, 0], (train[:, 0] - train[:, 0].mean()) / train[:, 0].std(), atol=1e-5)
    np.testing.assert_allclose(b[:, 2], (test[:, 2] - train[:, 2].mean()) / train[:, 2].std(), atol=1e-5)
    assert not a[:, 1].any()


def test_a_feature_that_varies_by_rounding_is_zero():
    train = np.array([[1], [1], [np.nextafter(np.float32(1), np.float32(2))]], np.float32)
    assert not standardized(train, train + 1)[0].any() and not standardized(train, train + 1)[1].any()
