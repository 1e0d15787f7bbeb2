"""Losses on embeddings: against sentence-transformers, and replicas against one device."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from recorded import Slots, assert_recorded, given

from bert_jax.model.task_layers import pair_features
from bert_jax.objectives.label_losses import softmax_loss
from bert_jax.objectives.objective import denominator
from bert_jax.objectives.sentence_losses import (
    cosent_loss,
    cosine_loss,
    in_batch_negatives_loss,
    triplet_loss,
)

SLOTS = Slots(6, (4, 2))


def softmax_of_pairs(x, targets, weights):
    logits = pair_features(x[:, :, 0], x[:, :, 1]) @ given("classifier")
    return softmax_loss(logits, SLOTS.fill(given("pair_labels"), -1), weights)


def without_targets(function):
    return lambda x, targets, weights: function(x, weights)


# name -> texts of an example, loss of embeddings, targets and weights
CASES = {
    "softmax": (2, softmax_of_pairs),
    "cosine": (2, cosine_loss),
    "cosent": (2, cosent_loss),
    "triplet": (3, without_targets(triplet_loss)),
    "negatives": (3, without_targets(in_batch_negatives_loss)),
    "negatives_of_pairs": (2, without_targets(in_batch_negatives_loss)),
}


def value_and_gradient(function, embeddings, targets, weights):
    """Sums, and the gradient of the loss's sum over its denominator, of embeddings."""

    def loss(embeddings):
        sums = function(embeddings, targets, weights)
        return sums["loss"][0] / denominator(weights), sums

    gradient, sums = jax.jit(jax.grad(loss, has_aux=True))(embeddings)
    return sums, np.asarray(gradient)


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES)
def test_equals_sentence_transformers(case):
    texts, function = CASES[case]
    examples = given("embeddings")
    # The softmax's product with the classifier is the test's own: nan would go through it.
    embeddings = SLOTS.fill(examples[:, :texts], 0.0 if case == "softmax" else np.nan)
    sums, gradient = value_and_gradient(function, embeddings, SLOTS.fill(given("targets"), np.nan), SLOTS.weights)
    own = np.zeros_like(examples)
    own[:, :texts] = SLOTS.take(gradient)
    assert float(sums["loss"][1]) == 6
    assert_recorded(case, sums["loss"][0] / 6, own, 1e-5, 1e-5)


@pytest.mark.parametrize("case", [name for name in CASES if name != "softmax"])
def test_an_empty_batch_is_nothing(case):
    texts, function = CASES[case]
    nan = np.full((*SLOTS.shape, texts, 8), np.nan, np.float32)
    sums, gradient = value_and_gradient(function, nan, nan[:, :, 0, 0], np.zeros(SLOTS.shape, np.float32))
    assert all(float(x) == 0 for pair in sums.values() for x in pair)
    assert not np.any(gradient)


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES)
def test_vectors_of_zeros_and_equal_ones_have_gradients(case):
    texts, function = CASES[case]
    targets = np.linspace(0, 1, SLOTS.weights.size, dtype=np.float32).reshape(SLOTS.shape)
    x = np.zeros((*SLOTS.shape, texts, 8), np.float32)
    x[1:] = 1.0
    sums, gradient = value_and_gradient(function, x, targets, np.ones(SLOTS.shape, np.float32))
    assert np.isfinite(sums["loss"][0])
    assert np.isfinite(gradient).all()


def data_mesh(sizes):
    return jax.make_mesh(sizes, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


OVER_REPLICAS = {
    "cosent": (2, cosent_loss),
    "negatives": (4, in_batch_negatives_loss),
    "negatives_of_any_number": (
        4,
        lambda x, targets, weights, axis: in_batch_negatives_loss(
            x, weights, texts_BxU=2 + (targets * 2).astype(int), axis=axis
        ),
    ),
    "negatives_of_classes": (
        2, lambda x, classes, weights, axis: in_batch_negatives_loss(x, weights, classes, axis=axis)
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8, 1), (2, 4)])
@pytest.mark.parametrize("case", OVER_REPLICAS)
def test_replicas_equal_one_device(case, sizes):
    """Unequal numbers of examples per replica, one of them without any; gradients of embeddings and of weights
    that every replica shares."""
    texts, function = OVER_REPLICAS[case]
    rng = np.random.default_rng(3)
    x = rng.normal(size=(16, 3, texts, 8)).astype(np.float32)
    kernel = rng.normal(size=(8, 16)).astype(np.float32)
    weights = (rng.random((16, 3)) < 0.7).astype(np.float32)
    weights[2:4] = 0
    targets = rng.integers(0, 5, (16, 3)).astype(np.float32) / 4
    labels = (targets,) if case in ("cosent", "negatives_of_classes", "negatives_of_any_number") else ()

    def loss(kernel, x, weights, *labels, axis=None):
        sums = function(x @ kernel, *labels, weights, axis=axis)
        return sums["loss"][0] / total, sums

    def both(*arrays, axis=None):
        return jax.value_and_grad(functools.partial(loss, axis=axis), argnums=(0, 1), has_aux=True)(*arrays)

    def of_replica(*arrays):
        (value, sums), (kernel, x) = both(*arrays, axis="data")
        return jax.tree.map(lambda y: y[None], (value, sums, kernel)), x

    total = denominator(weights)
    (value, sums), (kernel_gradient, x_gradient) = jax.jit(both)(kernel, x, weights, *labels)
    mesh = data_mesh(sizes)
    mapped = jax.shard_map(
        of_replica,
        mesh=mesh,
        in_specs=(P(), *[P("data")] * (2 + len(labels))),
        out_specs=P("data"),
        axis_names={axis for axis, size in mesh.shape.items() if axis == "data" or size == 1},
        check_vma=False,
    )
    cut = jax.NamedSharding(mesh, P(("data", "fsdp")))
    rows = jax.device_put((x, weights, *labels), cut)
    apart, x_apart = jax.jit(mapped)(kernel, *rows)
    value_apart, sums_apart, kernel_apart = jax.tree.map(lambda y: np.sum(y, axis=0), apart)
    assert abs(value_apart - value) <= 1e-6 * abs(value)
    assert np.linalg.norm(kernel_apart - kernel_gradient) <= 1e-6 * np.linalg.norm(kernel_gradient)
    assert np.linalg.norm(x_apart - x_gradient) <= 1e-6 * np.linalg.norm(x_gradient)
    assert not np.any(np.asarray(x_apart)[weights == 0])
    np.testing.assert_allclose(jax.tree.leaves(sums_apart), jax.tree.leaves(sums), rtol=1e-6)


def test_texts_that_an_example_lacks_are_no_candidates():
    """Against a softmax over the texts that are there; the vectors of the others are not read."""
    rng = np.random.default_rng(1)
    x, counts = rng.normal(size=(2, 3, 4, 8)).astype(np.float32), np.array([[2, 4, 3], [2, 2, 3]])
    weights = np.ones((2, 3), np.float32)
    unit = (x / np.linalg.norm(x, axis=-1, keepdims=True)).reshape(6, 4, 8).astype(np.float64)
    there = np.arange(1, 4) < counts.reshape(6, 1)
    scores = 20 * unit[:, 0] @ unit[:, 1:].reshape(18, 8).T
    sums = np.log(np.exp(scores[:, there.reshape(-1)]).sum(1))
    expected = (sums - 20 * np.sum(unit[:, 0] * unit[:, 1], axis=-1)).sum()
    x[np.arange(4) >= counts[..., None]] = np.nan

    def loss(x):
        return in_batch_negatives_loss(x, weights, texts_BxU=counts)["loss"][0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(x)
    assert float(value) == pytest.approx(expected, rel=1e-5)
    assert np.isfinite(gradient).all() and not np.any(np.asarray(gradient)[np.isnan(x)])


def test_accuracies():
    x = np.zeros((1, 4, 3, 2), np.float32)
    x[0, :, 0], x[0, :, 1], x[0, :, 2] = [1, 0], [1, 0.1], [0, 1]
    x[0, 1, 1], x[0, 1, 2] = [-1, 0], [1, 1]  # its negative, and others' positives, are nearer
    weights = np.array([[1, 2, 0.5, 0]], np.float32)
    np.testing.assert_allclose(jax.jit(triplet_loss)(x, weights)["accuracy"], (1.5, 3.5))
    # Equal positives are each other's negatives; a tie counts as found.
    np.testing.assert_allclose(jax.jit(in_batch_negatives_loss)(x, weights)["accuracy"], (1.5, 3.5))


def test_examples_count_as_their_weights():
    """Among the candidates of the others an example is one, whatever its weight; with weight 0 none."""
    x, targets = given("embeddings"), given("targets")
    weights = np.array([2, 1, 0.5, 1, 1, 3], np.float32)
    unit = x.astype(np.float64) / np.linalg.norm(x, axis=-1, keepdims=True)
    scores = 20 * unit[:, 0] @ np.concatenate([unit[:, 1], unit[:, 2]]).T
    cosines = np.diag(scores) / 20
    distances = np.linalg.norm(x[:, :1] - x[:, 1:], axis=-1)
    is_pair = targets[:, None] < targets
    all_pairs = np.log1p(np.exp(20 * (cosines[:, None] - cosines))[is_pair].sum())
    expected = {
        "negatives": np.log(np.exp(scores).sum(1)) - np.diag(scores),
        "triplet": np.maximum(distances[:, 0] - distances[:, 1] + 5, 0),
        "cosine": (cosines - targets) ** 2,
        "cosent": np.full(6, all_pairs),
    }
    # The last slot is empty, but what stands there looks like an example.
    x, targets, slots = np.append(x, x[:1, ::-1], 0), np.append(targets, 0.6), np.append(weights, 0)
    for case, costs in expected.items():
        texts, function = CASES[case]
        sums = jax.jit(function)(x[None, :, :texts], targets[None], slots[None])
        np.testing.assert_allclose(sums["loss"], (weights @ costs, 8.5), rtol=1e-6, err_msg=case)


def test_texts_of_the_own_class_are_no_wrong_answers():
    x, classes = given("embeddings")[:, :2], np.array([0, 1, 0, 2, 1, 1])
    unit = x.astype(np.float64) / np.linalg.norm(x, axis=-1, keepdims=True)
    scores = 20 * unit[:, 0] @ unit[:, 1].T
    allowed = (classes[:, None] != classes) | np.eye(6, dtype=bool)
    expected = np.log((np.exp(scores) * allowed).sum(1)) - np.diag(scores)
    found = jax.jit(in_batch_negatives_loss)(x[None], np.ones((1, 6), np.float32), classes[None])
    np.testing.assert_allclose(found["loss"], (expected.sum(), 6), rtol=1e-6)
    is_found = np.where(allowed, scores, -np.inf).max(1) <= np.diag(scores) + 1e-6  # there are equal texts
    np.testing.assert_allclose(found["accuracy"], (is_found.sum(), 6))


@pytest.mark.slow
def test_pairs_of_one_target_have_no_cosent_loss():
    x = given("embeddings")[None, :, :2]
    assert float(cosent_loss(x, np.full((1, 6), 0.5), np.ones((1, 6), np.float32))["loss"][0]) == 0
