"""The z-loss of masked and causal language models against a float64 statement of value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import objective_of, random_batch, random_params, tiny_config

from bert_jax.objectives.objective import weighted_cross_entropy, z_loss
from bert_jax.training.step import loss_and_gradients

COEFFICIENT = 0.03
CAUSAL = "--objective.name causal_lm --model.attention causal --data.next_sentence none"


def log_normalizer(logits):
    top = logits.max(-1, keepdims=True)
    return (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]


def test_value_and_gradient_are_those_of_float64():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (5, 7, 13)).astype(np.float32)
    logits[..., 11:] = -np.inf  # rows that pad the vocabulary
    labels, weights = rng.integers(0, 11, (5, 7)), rng.integers(0, 3, (5, 7)).astype(np.float32)

    def loss(logits):
        sums = weighted_cross_entropy("mlm", logits, labels, weights) | z_loss("mlm", COEFFICIENT, logits, weights)
        return sum(sums[name][0] / sums[name][1] for name in ("mlm_loss", "mlm_z_loss"))

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(logits))
    exact = np.float64(logits[..., :11])
    log_z, share = log_normalizer(exact), weights / weights.sum()
    label = np.take_along_axis(exact, labels[..., None], -1)[..., 0]
    expected = np.sum(share * (log_z - label + COEFFICIENT * log_z**2))
    assert abs(value - expected) <= 1e-6 * expected
    softmax = np.exp(exact - log_z[..., None])
    slope = softmax - np.eye(11)[labels] + 2 * COEFFICIENT * log_z[..., None] * softmax
    np.testing.assert_allclose(gradient[..., :11], share[..., None] * slope, rtol=0, atol=1e-6)
    assert not np.any(gradient[..., 11:])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("mlm", ""), ("lm", CAUSAL)])
def test_the_objective_adds_it_to_its_loss(name, options):
    words, batch = f"--training.accumulation_steps 2 {options}", random_batch(tiny_config())
    plain = objective_of(tiny_config(words))
    objective = objective_of(tiny_config(words, f"--objective.z_loss {COEFFICIENT}"))
    params = random_params(objective.model)
    loss, gradients, sums, _ = jax.jit(lambda p: loss_and_gradients(objective, p, batch, None, 2))(params)
    before, others, plain_sums, _ = jax.jit(lambda p: loss_and_gradients(plain, p, batch, None, 2))(params)
    assert sums.keys() - plain_sums.keys() == {f"{name}_z_loss"}
    total, weight = (float(x) for x in sums[f"{name}_z_loss"])
    assert weight == float(sums[f"{name}_loss"][1]) > 0
    assert float(loss - before) == pytest.approx(total / weight, rel=1e-4)
    # Logits near 0 have the normalizer of 211 pieces.
    assert total / weight == pytest.approx(COEFFICIENT * np.log(211) ** 2, rel=0.05)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (gradients, others)), strict=True))


def test_a_negative_coefficient_is_refused():
    with pytest.raises(ValueError, match=r"objective\.z_loss: -1\.0 is not allowed; allowed: 0 or more"):
        tiny_config("--objective.z_loss -1")
