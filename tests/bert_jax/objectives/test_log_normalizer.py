"""The normalizer of logits: one pass over them, as on a GPU, equals two; gradients are those of JAX's logsumexp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.dense import add_bias_of_logits
from bert_jax.model.embeddings import few_rows
from bert_jax.objectives.objective import _one_pass, _two_passes, log_normalizer


def logits():
    """Large and small values, and classes that are no classes."""
    values = 40 * jax.random.normal(jax.random.key(0), (3, 5, 130))
    return values.at[0, 0].add(1e4).at[..., 128:].set(-jnp.inf)


@pytest.mark.slow
def test_one_pass_equals_two():
    for found, expected in zip(_one_pass(logits()), _two_passes(logits()), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
def test_its_gradient_is_that_of_logsumexp():
    weights = jax.random.normal(jax.random.key(1), (3, 5))
    found = jax.grad(lambda x: jnp.sum(log_normalizer(x)[0] * weights))(logits())
    expected = jax.grad(lambda x: jnp.sum(jax.nn.logsumexp(x, axis=-1) * weights))(logits())
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_gradient_of_logits_is_rounded_once_to_the_dtype_of_the_states():
    x, bias = jax.random.normal(jax.random.key(2), (2, 4, 9)), jnp.ones(9)
    gradient = jax.random.normal(jax.random.key(3), x.shape)
    for dtype in (jnp.float32, jnp.bfloat16):
        out, back = jax.vjp(lambda x, bias, dtype=dtype: add_bias_of_logits(x, bias, dtype), x, bias)
        rounded = gradient.astype(dtype).astype(jnp.float32)
        np.testing.assert_array_equal(out, x + 1)
        np.testing.assert_array_equal(back(gradient)[0], rounded)
        np.testing.assert_allclose(back(gradient)[1], rounded.sum((0, 1)), rtol=1e-6)


@pytest.mark.slow
def test_rows_of_a_small_table_are_those_of_a_lookup():
    for rows in (2, 9):
        table = jax.random.normal(jax.random.key(rows), (rows, 6))
        ids = jax.random.randint(jax.random.key(5), (3, 7), 0, rows)
        gradient = jax.random.normal(jax.random.key(6), (3, 7, 6))
        (out, back), (expected, their_back) = (
            jax.vjp(lambda t, i=ids: few_rows(i, t), table),
            jax.vjp(lambda t, i=ids: t[i], table),
        )
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_allclose(back(gradient)[0], their_back(gradient)[0], atol=1e-6)
