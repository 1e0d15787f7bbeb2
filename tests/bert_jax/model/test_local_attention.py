"""Attention in blocks for windows and causality against attention over whole rows: values, gradients, dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model import local_attention as local
from bert_jax.model.attention import dot_product_attention, visible_keys
from bert_jax.model.dropout import TokenKey

HEADS, SIZE = 3, 8


def tensors(length, rows=2):
    rng = np.random.default_rng(length)
    shape = (rows, length, HEADS, SIZE)
    ids = np.sort(rng.integers(1, 5, (rows, length)), axis=1)  # packed sequences
    ids[0, -length // 7 :] = 0
    positions = np.concatenate([np.arange(n) for row in ids for n in np.unique(row, return_counts=True)[1]])
    key = TokenKey(
        jax.random.key(7), jnp.asarray(rng.integers(0, 2**31, (rows, length)), jnp.int32),
        jnp.asarray(positions.reshape(rows, length), jnp.int32),
    )  # fmt: skip
    return [jnp.asarray(rng.normal(0, 1, shape), jnp.float32) for _ in range(3)], jnp.asarray(ids, jnp.int32), key


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(
    ("length", "window", "causal"),
    [(260, 5, False), (512, 64, False), (577, 129, False), (300, 20, True), (1024, 0, True)],
)
def test_values_and_gradients_are_those_of_whole_rows(length, window, causal, dropped):
    heads, ids, key = tensors(length)
    rate, key = (0.3, key) if dropped else (0.0, None)
    assert local.is_shorter(length, window, causal, rate, key)
    sees = functools.partial(visible_keys, causal=causal, window=window)
    whole = functools.partial(dot_product_attention, dropout_rate=rate, dropout_key=key, visible=sees)
    parts = functools.partial(
        local.local_attention, dropout_rate=rate, dropout_key=key, window=window, causal=causal
    )
    real = (ids > 0)[:, :, None, None]

    def run(attend):
        def loss(heads):
            context = attend(*heads, ids) * real
            return jnp.sum(jnp.sin(context)), context

        (_, context), gradients = jax.value_and_grad(loss, has_aux=True)(heads)
        return [context, *gradients]

    for ours, expected in zip(run(parts), run(whole), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6 * max(1, float(jnp.abs(expected).max())))


def test_rows_that_are_short_or_have_other_bits_are_whole():
    key = jax.random.key(0)
    assert not local.is_shorter(256, 64, False, 0.0, None) and local.is_shorter(257, 64, False, 0.0, None)
    assert not local.is_shorter(512, 64, False, 0.1, key) and local.is_shorter(512, 64, False, 0.0, key)
    assert not local.is_shorter(1020, 0, True, 0.0, None) and not local.is_shorter(4096, 0, False, 0.0, None)
    seen = []
    jax.jit(lambda x: seen.append(local.is_shorter(x.shape[0], 64, False, 0.0, None)) or x).lower(
        jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.float32)
    )
    assert seen == [False]


def test_the_scores_of_a_window_grow_with_the_length_and_those_of_causal_attention_are_fewer():
    def scores(length, **options):
        heads = [jax.ShapeDtypeStruct((1, length, HEADS, SIZE), jnp.float32)] * 3
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        run = functools.partial(local.local_attention, dropout_rate=0.0, dropout_key=None, **options)
        jaxpr = jax.make_jaxpr(run)(*heads, ids)
        sizes = [e.outvars[0].aval.size for e in jaxpr.jaxpr.eqns if e.primitive.name == "exp"]
        return sum(sizes) or max(v.aval.size for e in jaxpr.jaxpr.eqns for v in e.outvars)

    one, eight = (scores(n, window=64, causal=False) for n in (1024, 8192))
    assert eight == 8 * one == 8 * HEADS * 1024 * 256
    assert scores(2048, window=0, causal=True) <= 0.6 * HEADS * 2048**2
