"""Losses of one vector of logits per example, against torch and transformers and against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import Slots, assert_recorded, given

from bert_jax.objectives.label_losses import multilabel_loss, regression_loss, softmax_denominator, softmax_loss
from bert_jax.objectives.objective import denominator

SLOTS = Slots(7, (5, 2))
LOGITS = SLOTS.fill(given("logits"), np.nan)


def class_weights(names):
    return jnp.asarray(given("class_weights")) if "class_weights_L" in names else None


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("cross_entropy", {}),
        ("cross_entropy_smoothed", {"label_smoothing": 0.1}),
        ("cross_entropy_weighted", {"class_weights_L": True}),
        ("cross_entropy_both", {"label_smoothing": 0.1, "class_weights_L": True}),
    ],
)
def test_softmax_equals_torch(case, options):
    labels = SLOTS.fill(given("labels"), -100)
    options = options | {"class_weights_L": class_weights(options)}
    total = softmax_denominator(labels, SLOTS.weights, options["class_weights_L"])

    def loss(logits):
        value, weight = softmax_loss(logits, labels, SLOTS.weights, **options)["loss"]
        return value / total, weight

    (value, weight), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(LOGITS)
    assert_recorded(case, value, SLOTS.take(gradient), 1e-6, 1e-6)
    assert float(weight) == float(total)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "function", "targets", "bar"),
    [("multilabel", multilabel_loss, "label_sets", 1e-6), ("regression", regression_loss, "numbers", 1e-5)],
)
def test_other_problem_types_equal_transformers(case, function, targets, bar):
    targets = SLOTS.fill(given(targets), np.nan)

    def loss(logits):
        return function(logits, targets, SLOTS.weights)["loss"][0] / denominator(SLOTS.weights)

    value, gradient = jax.jit(jax.value_and_grad(loss))(LOGITS)
    assert_recorded(case, value, SLOTS.take(gradient), bar, 1e-6)
    assert float(function(LOGITS, targets, SLOTS.weights)["loss"][1]) == 7


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_softmax_is_its_formula(gamma):
    logits, labels, weights = given("logits").astype(np.float64), given("labels"), given("class_weights")
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    costs = -weights * (1 - p) ** gamma * np.log(p)
    expected = np.sum(0.8 * costs[np.arange(7), labels] + 0.2 * costs.mean(1))
    options = {"label_smoothing": 0.2, "focal_gamma": gamma, "class_weights_L": jnp.asarray(weights)}
    sums = softmax_loss(LOGITS, SLOTS.fill(labels, -100), SLOTS.weights, **options)
    np.testing.assert_allclose(sums["loss"][0], expected, rtol=1e-6)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_multilabel_is_its_formula(gamma):
    logits, targets = given("logits").astype(np.float64), given("label_sets")
    p = 1 / (1 + np.exp(-logits))
    p_target = np.where(targets == 1, p, 1 - p)
    expected = np.sum(np.mean(-((1 - p_target) ** gamma) * np.log(p_target), axis=1))
    sums = multilabel_loss(LOGITS, SLOTS.fill(targets, np.nan), SLOTS.weights, focal_gamma=gamma)
    np.testing.assert_allclose(sums["loss"][0], expected, rtol=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_certain_logits_have_finite_gradients(gamma):
    logits, ones = jnp.array([[[200.0, 0.0], [-200.0, 0.0]]]), jnp.ones((1, 2))
    labels = jnp.zeros((1, 2), jnp.int32)
    gradient = jax.jit(jax.grad(lambda x: softmax_loss(x, labels, ones, focal_gamma=gamma)["loss"][0]))(logits)
    assert np.isfinite(gradient).all()
    assert not np.any(gradient[0, 0])
    assert gradient[0, 1, 0] < -0.5
    targets = jnp.zeros((1, 2, 2)).at[:, :, 0].set(1)
    gradient = jax.jit(jax.grad(lambda x: multilabel_loss(x, targets, ones, focal_gamma=gamma)["loss"][0]))(logits)
    assert np.isfinite(gradient).all()
    assert gradient[0, 1, 0] < -0.2


def test_examples_count_as_their_weights():
    logits, labels = jnp.array([[[1.0, 0.0], [3.0, 0.0]]]), jnp.array([[0, 1]])
    weights = jnp.array([[0.25, 2.0]])
    sums = jax.jit(softmax_loss)(logits, labels, weights, class_weights_L=jnp.array([4.0, 3.0]))
    expected = 0.25 * 4 * np.log1p(np.exp(-1)) + 2 * 3 * np.log1p(np.exp(3))
    np.testing.assert_allclose(sums["loss"], (expected, 0.25 * 4 + 2 * 3), rtol=1e-6)
    np.testing.assert_allclose(sums["accuracy"], (0.25, 2.25))
    targets = jnp.array([[[1.0, 1.0], [1.0, 1.0]]])
    np.testing.assert_allclose(jax.jit(multilabel_loss)(logits, targets, weights)["accuracy"], (2.25 / 2, 2.25))
    np.testing.assert_allclose(
        jax.jit(regression_loss)(logits, targets, weights)["loss"], (0.25 * 0.5 + 2 * 2.5, 2.25)
    )


@pytest.mark.slow
def test_an_empty_batch_is_nothing():
    nan, nothing = jnp.full((2, 3, 4), jnp.nan), jnp.zeros((2, 3))
    labels = jnp.full((2, 3), -1)
    assert float(denominator(nothing)) == 1
    assert float(softmax_denominator(labels, nothing, jnp.ones(4))) == 1
    for function, targets in ((softmax_loss, labels), (multilabel_loss, nan), (regression_loss, nan)):
        loss = jax.value_and_grad(lambda x, f=function, t=targets: f(x, t, nothing)["loss"][0])
        value, gradient = jax.jit(loss)(nan)
        assert float(value) == 0
        assert not np.any(gradient)
