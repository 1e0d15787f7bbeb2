"""Classifiers of vectors without hidden layers: multinomial logistic regression, and nearest centroids.

Shapes: N examples, F features, C classes.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

Classifier = Literal["linear", "centroid"]
CLASSIFIERS: tuple[Classifier, ...] = get_args(Classifier)
# Weight decays to choose from, from the strongest: each solution is the start of the next.
DECAYS = (1e-1, 1e-2, 1e-3, 1e-4)
# The weight decay without examples that choose it.
_DEFAULT_DECAY = 1e-2
_ITERATIONS = 60


class Fitted(NamedTuple):
    """Predicted classes int64[N] of the test examples, and the weight decay that was chosen (None: centroids)."""

    predicted: np.ndarray
    decay: float | None


class Splits(NamedTuple):
    """Standardized features float32[N, F] of the training and of the test examples, and the mask bool[N] of the
    training examples that choose the weight decay."""

    train: np.ndarray
    test: np.ndarray
    held_out: np.ndarray


def standardized(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both arrays [N, F] as float32, shifted and scaled so that every feature has the mean 0 and the
    standard deviation 1 in ``train``. A constant feature becomes 0."""
    mean = train.mean(axis=0, dtype=np.float64)
    deviation = train.std(axis=0, dtype=np.float64)
    # Values that differ by rounding only are constant.
    varies = deviation > 1e-6 * np.abs(mean)
    scale = np.divide(1, deviation, out=np.zeros_like(deviation), where=varies & (deviation > 0))
    return ((train - mean) * scale).astype(np.float32), ((test - mean) * scale).astype(np.float32)


def fit_logistic(
    features: np.ndarray, labels: np.ndarray, classes: int, decay: float, start: np.ndarray | None = None
) -> np.ndarray:
    """Return float64[C, F + 1], weights and bias that minimize the mean cross-entropy plus ``decay`` / 2 times the
    squared norm of the weights, by at most 60 iterations of L-BFGS from ``start`` (None: zeros). The problem is
    convex, and the result depends on no seed."""
    start = np.zeros((classes, features.shape[1] + 1)) if start is None else start
    on_device = jnp.asarray(features), jnp.asarray(labels, jnp.int32), jnp.float32(decay)

    def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = _value_and_gradient(flat.reshape(start.shape).astype(np.float32), *on_device)
        return float(value), np.asarray(gradient, np.float64).ravel()

    # The loss is float32: smaller differences are rounding.
    options = {"maxiter": _ITERATIONS, "ftol": 1e-6}
    found = minimize(value_and_gradient, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    return np.asarray(found.x).reshape(start.shape)


@jax.jit
@jax.value_and_grad
def _value_and_gradient(weights: jax.Array, features: jax.Array, labels: jax.Array, decay: jax.Array) -> jax.Array:
    # Classes first: this order of the product takes a fraction of the time of the other on a CPU.
    logits_CxN = jnp.matmul(weights[:, :-1], features.T, precision="float32") + weights[:, -1:]
    label_logits_N = jnp.take_along_axis(logits_CxN, labels[None], axis=0)[0]
    loss = jnp.mean(jax.nn.logsumexp(logits_CxN, axis=0) - label_logits_N)
    return loss + decay / 2 * jnp.sum(weights[:, :-1] ** 2)


def predict_logistic(features: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the class of the greatest logit of each row, int64[N]."""
    return (weights[:, :-1].astype(np.float32) @ features.T + weights[:, -1:]).argmax(axis=0)


def linear(splits: Splits, labels: np.ndarray, classes: int, decays: Sequence[float] = DECAYS) -> Fitted:
    """Fit logistic regression to the training examples and return its predictions for the test examples.

    Of several ``decays``, the one with the best accuracy on the held-out training examples is chosen (the strongest
    if tied), and the classifier is fitted again to all training examples. Without held-out examples it is 1e-2.
    """
    held, start = splits.held_out, None
    decay = decays[0] if len(decays) == 1 else _DEFAULT_DECAY
    if len(decays) > 1 and held.any() and not held.all():
        weights, best = None, -1.0
        for one in sorted(decays, reverse=True):
            weights = fit_logistic(splits.train[~held], labels[~held], classes, one, weights)
            accuracy = float((predict_logistic(splits.train[held], weights) == labels[held]).mean())
            if accuracy > best:
                best, decay, start = accuracy, one, weights
    return Fitted(predict_logistic(splits.test, fit_logistic(splits.train, labels, classes, decay, start)), decay)


def nearest_centroid(train: np.ndarray, test: np.ndarray, labels: np.ndarray, classes: int) -> Fitted:
    """Return for each test example the class whose mean training vector has the greatest cosine, as Loureiro et al.
    2021 do for senses; a class without training examples is never predicted."""
    sums = np.zeros((classes, train.shape[1]))
    np.add.at(sums, labels, train)
    norms = np.linalg.norm(sums, axis=1)
    scores = test @ (sums / np.maximum(norms, 1e-30)[:, None]).T.astype(np.float32)
    scores[:, np.bincount(labels, minlength=classes) == 0] = -np.inf
    return Fitted(scores.argmax(axis=1), None)
