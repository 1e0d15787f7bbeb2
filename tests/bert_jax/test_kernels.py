"""TPU kernels, interpreted: equal to the plain implementation, dropout of the right rate, no mesh changes a bit."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import MeshConfig
from bert_jax.model.attention import choose, dot_product_attention, kernel_attention
from bert_jax.model.dropout import ShardKey
from bert_jax.parallel import make_mesh

ROWS, LENGTH, HEADS, SIZE = 4, 256, 4, 64


def sequence_ids():
    """Two packed sequences, padding, a full row and a blank one."""
    ids = np.ones((ROWS, LENGTH), np.int32)
    ids[0, 60:], ids[0, 200:], ids[1, 100:], ids[3] = 2, 0, 0, 0
    return jnp.asarray(ids)


def operands(rows=ROWS, length=LENGTH, heads=HEADS):
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (rows, length, heads, SIZE)) for key in keys]


def with_gradients(attend, query, key, value, gradient, **options):
    out, back = jax.vjp(lambda *x: attend(*x, **options), query, key, value)
    return out, *back(gradient)


def kernel(*x, ids=None, mesh=None, **options):
    options = {"dropout_rate": 0.0, "dropout_key": None, **options}
    return kernel_attention(*x, sequence_ids() if ids is None else ids, mesh=mesh, **options)


def test_attention_and_its_gradients_equal_the_plain_ones():
    plain = with_gradients(
        lambda *x: dot_product_attention(*x, sequence_ids(), dropout_rate=0.0, dropout_key=None), *operands()
    )
    for ours, theirs in zip(with_gradients(kernel, *operands()), plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_dropout_of_probabilities_has_its_rate_and_scale():
    """Values that single out one key each show the dropped probabilities themselves."""
    rows, length = 2, 128
    zeros = jnp.zeros((rows, length, 2, SIZE))
    ids = jnp.ones((rows, length), jnp.int32)
    rate = 0.1
    kept = []
    for begin in (0, 64):
        value = zeros + jnp.eye(length)[None, :, None, begin : begin + SIZE]
        out = kernel(zeros, zeros, value, ids=ids, dropout_rate=rate, dropout_key=jax.random.key(3))
        kept.append(np.asarray(out) * length)
    kept = np.concatenate(kept, axis=-1)  # [rows, queries, heads, keys]
    threshold = round(rate * 65536)
    np.testing.assert_allclose(kept[kept > 0], 65536 / (65536 - threshold), rtol=1e-5)
    drops = kept == 0
    # Four standard deviations of the count, over everything and along each axis.
    for axes in ((0, 1, 2, 3), (1, 3), (0, 2, 3), (0, 1, 2)):
        count = np.prod([drops.shape[axis] for axis in axes])
        share = drops.mean(axis=axes)
        assert np.abs(share - rate).max() < 5 * np.sqrt(rate * (1 - rate) / count), axes
    # Rows, heads, queries and the two draws of a word are not alike.
    for one, other in (
        (drops[0], drops[1]), (drops[:, :, 0], drops[:, :, 1]), (drops[:, :64], drops[:, 64:]),
        (drops[:, 1:], drops[:, :-1]), (drops[..., 1:], drops[..., :-1]),
    ):  # fmt: skip
        assert abs((one & other).mean() - rate**2) < 5 * np.sqrt(rate**2 / one.size)


def test_attention_gradients_use_the_bits_of_the_forward_pass():
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(5)}
    query, key, value, gradient = operands(rows=1, length=128, heads=2)
    ids = jnp.ones((1, 128), jnp.int32)

    def loss(*x):
        return jnp.sum(kernel(*x, ids=ids, **options) * gradient)

    back = jax.grad(loss, argnums=(0, 1, 2))(query, key, value)
    for i, x in enumerate((query, key, value)):
        direction = jax.random.normal(jax.random.key(i), x.shape)
        step = 1e-2
        inputs = [query, key, value]
        inputs[i] = x + step * direction
        above = loss(*inputs)
        inputs[i] = x - step * direction
        slope = (above - loss(*inputs)) / (2 * step)
        np.testing.assert_allclose(jnp.vdot(back[i], direction), slope, rtol=2e-3)


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 1, 2), (1, 2, 2)])
def test_attention_dropout_is_the_same_on_every_mesh(sizes):
    options = {"dropout_rate": 0.1, "dropout_key": jax.random.key(5)}
    mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]), jax.devices()[: np.prod(sizes)])
    x = operands(length=128)
    ids = sequence_ids()[:, :128]
    one = with_gradients(kernel, *x, ids=ids, **options)
    cut = jax.jit(lambda *x: with_gradients(kernel, *x, ids=ids, mesh=mesh, **options))(*x)
    for ours, theirs in zip(cut, one, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_rows_of_a_replica_draw_the_bits_of_the_whole_batch():
    x = operands(length=128)[:3]
    ids = sequence_ids()[:, :128]
    whole = kernel(*x, ids=ids, dropout_rate=0.1, dropout_key=jax.random.key(5))
    part = ShardKey(jax.random.key(5), jnp.uint32(2), ROWS)
    np.testing.assert_array_equal(
        kernel(*(y[2:] for y in x), ids=ids[2:], dropout_rate=0.1, dropout_key=part), whole[2:]
    )


def test_what_the_kernel_cannot_do():
    for length, width, size in ((100, 768, 64), (4096, 768, 64), (128, 320, 64), (128, 480, 96)):
        with pytest.raises(ValueError, match="attention pallas"):
            choose("pallas", None, length, width, size)
        assert choose("auto", None, length, width, size) is dot_product_attention
    assert choose("auto", None, 128, 768, 64) is dot_product_attention  # no TPU here
