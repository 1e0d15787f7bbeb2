"""Kernels, interpreted: equal to the plain implementation, dropout of the right rate, no mesh changes a bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.model.attention import attention_kernel_of, dot_product_attention, kernel_attention
from bert_jax.model.dropout import ShardKey, TokenKey, dropout
from bert_jax.model.kernels import gpu_attention, gpu_norm, tpu_attention, tpu_attention_bodies, tpu_norm
from bert_jax.model.kernels.add_norm import add_norm as fused
from bert_jax.model.kernels.tiles import Form
from bert_jax.parallel import make_mesh

ROWS, LENGTH, HEADS, SIZE = 4, 256, 4, 64


def sequence_ids():
    """Two packed sequences, padding, a full row and a blank one."""
    ids = np.ones((ROWS, LENGTH), np.int32)
    ids[0, 60:], ids[0, 200:], ids[1, 100:], ids[3] = 2, 0, 0, 0
    return jnp.asarray(ids)


def operands(rows=ROWS, length=LENGTH, heads=HEADS):
    rng = np.random.default_rng(0)
    return [np.float32(rng.normal(size=(rows, length, heads, SIZE))) for _ in range(4)]


def with_gradients(attend, query, key, value, gradient, **options):
    out, back = jax.vjp(lambda *x: attend(*x, **options), query, key, value)
    return out, *back(gradient)


def kernel(*x, biases=None, ids=None, mesh=None, which="tpu", dropout_rate=0.0, dropout_key=None):
    flat = tuple(y.reshape(*y.shape[:2], -1) for y in x)
    biases = jnp.zeros((3, flat[0].shape[-1])) if biases is None else biases
    ids = sequence_ids() if ids is None else ids
    options = {"kernel": which, "form": Form(SIZE, dropout_rate), "dropout_key": dropout_key}
    return kernel_attention(flat, biases, ids, mesh=mesh, **options).reshape(x[0].shape)


def plain(query, key, value, biases):
    heads = [x + bias.reshape(HEADS, SIZE) for x, bias in zip((query, key, value), biases, strict=True)]
    return dot_product_attention(*heads, sequence_ids(), dropout_rate=0.0, dropout_key=None)


@pytest.mark.slow
def test_attention_and_its_gradients_equal_the_plain_ones():
    *x, gradient = operands()
    biases = jax.random.normal(jax.random.key(1), (3, HEADS * SIZE))
    gradient *= (jnp.arange(ROWS) < 3)[:, None, None, None]  # no loss uses a blank row
    ours, our_back = jax.vjp(lambda *x: kernel(*x[:3], biases=x[3]), *x, biases)
    theirs, their_back = jax.vjp(plain, *x, biases)
    np.testing.assert_allclose(ours[:3], theirs[:3], atol=2e-6 * float(jnp.abs(theirs).max()))
    assert not ours[3].any()
    for one, other in zip(our_back(gradient)[:3], their_back(gradient)[:3], strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6)
    sums = [back(gradient)[3] for back in (our_back, their_back)]
    assert jnp.abs(sums[0] - sums[1]).max() < 1e-6 * jnp.abs(sums[1]).max() * ROWS * LENGTH


@pytest.mark.slow
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

    @jax.jit
    def loss(*x):
        return jnp.sum(kernel(*x, ids=ids, **options) * gradient)

    back = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, key, value)
    for i, x in enumerate((query, key, value)):
        direction = jax.random.normal(jax.random.key(i), x.shape)
        step = 1e-2
        inputs = [query, key, value]
        inputs[i] = x + step * direction
        above = loss(*inputs)
        inputs[i] = x - step * direction
        slope = (above - loss(*inputs)) / (2 * step)
        np.testing.assert_allclose(jnp.vdot(back[i], direction), slope, rtol=2e-3)


@pytest.mark.parametrize(
    ("which", "sizes"),
    [
        pytest.param("tpu", (4, 1, 1), marks=pytest.mark.slow),
        pytest.param("tpu", (1, 2, 2), marks=pytest.mark.slow),
        ("tpu", (2, 1, 2)),
        ("gpu", (1, 2, 2)),
    ],
)
def test_attention_dropout_is_the_same_on_every_mesh(which, sizes):
    options = {"dropout_rate": 0.1, "dropout_key": jax.random.key(5), "which": which}
    mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]), jax.devices()[: np.prod(sizes)])
    x = operands(length=128)
    ids = sequence_ids()[:, :128]
    one = jax.jit(lambda *x: with_gradients(kernel, *x, ids=ids, **options))(*x)
    cut = jax.jit(lambda *x: with_gradients(kernel, *x, ids=ids, mesh=mesh, **options))(*x)
    for ours, theirs in zip(cut, one, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.slow
def test_rows_of_a_replica_draw_the_bits_of_the_whole_batch():
    x = operands(length=128)[:3]
    ids = sequence_ids()[:, :128]
    whole = kernel(*x, ids=ids, dropout_rate=0.1, dropout_key=jax.random.key(5))
    part = ShardKey(jax.random.key(5), jnp.uint32(2), ROWS)
    np.testing.assert_array_equal(
        kernel(*(y[2:] for y in x), ids=ids[2:], dropout_rate=0.1, dropout_key=part), whole[2:]
    )


def test_what_the_kernel_cannot_do():
    for length, width, size in ((100, 768, 64), (16384, 768, 64), (128, 320, 64), (128, 480, 96)):
        model = ModelConfig(hidden_size=width, num_attention_heads=width // size)
        with pytest.raises(ValueError, match=r"execution\.attention: pallas"):
            attention_kernel_of("pallas", None, model, length)
        assert not attention_kernel_of("auto", None, model, length)
    base = ModelConfig()
    pruned = ModelConfig(layer_heads=(12, 4) * 6, layer_units=(8,) * 12)
    assert not tpu_attention.unsupported(pruned, 128) and not tpu_norm.unsupported(pruned, 128)
    assert not tpu_attention.unsupported(pruned, 128, 2)
    pruned = dataclasses.replace(pruned, layer_heads=(12, 6) * 6)
    assert "width 192 with heads of size 64" in tpu_attention.unsupported(pruned, 128, 2)
    assert "does not fit into 16 MiB" in tpu_attention.unsupported(base, 2048, fast_memory=2**24)
    assert not tpu_attention.unsupported(base, 8192)
    rotary = ModelConfig(position_embeddings="rotary")  # 15 MiB more
    assert not tpu_attention.unsupported(base, 6144, fast_memory=70 * 2**20)
    assert "does not fit into 70 MiB" in tpu_attention.unsupported(rotary, 6144, fast_memory=70 * 2**20)
    assert attention_kernel_of("pallas", None, base, 128) == "tpu"
    assert not attention_kernel_of("auto", None, base, 128)  # no accelerator here
    assert not attention_kernel_of("xla", None, base, 128)


def test_what_the_gpu_kernel_cannot_do():
    reasons = {
        "is not a multiple of 16": gpu_attention.unsupported(ModelConfig(), 100),
        "heads of size 96": gpu_attention.unsupported(ModelConfig(num_attention_heads=8), 128),
        "cannot be divided into 5": gpu_attention.unsupported(ModelConfig(), 128, 5),
        "7 heads cannot be divided into 2": gpu_attention.unsupported(
            ModelConfig(layer_heads=(12, 7) * 6, layer_units=(8,) * 12), 128, 2
        ),
        "model.relative_positions: alibi": gpu_attention.unsupported(ModelConfig(relative_positions="alibi"), 128),
        "model.attention_block: 64": gpu_attention.unsupported(ModelConfig(attention_block=64), 128),
        "model.global_tokens: 2": gpu_attention.unsupported(
            ModelConfig(global_tokens=2, attention_windows=(64,)), 128
        ),
    }
    for expected, found in reasons.items():
        assert expected in found
    modern = ModelConfig(position_embeddings="rotary", attention_windows=(0, 64, 64), feed_forward="gated")
    assert not gpu_attention.unsupported(modern, 8192)


def test_an_old_gpu_has_no_kernels(monkeypatch):
    monkeypatch.setattr("bert_jax.model.kernels.common.capability_of", lambda mesh: 7.5)
    with pytest.raises(ValueError, match=r"the compute capability of the GPU is 7\.5, below 8\.0"):
        attention_kernel_of("pallas", None, ModelConfig(), 128)
    assert not attention_kernel_of("auto", None, ModelConfig(), 128)


def test_kernels_of_a_jax_without_triton(monkeypatch):
    monkeypatch.setattr(gpu_attention, "triton", lambda: None)
    monkeypatch.setattr(gpu_norm, "triton", lambda: None)
    assert "no Triton" in gpu_attention.unsupported(ModelConfig(), 128)
    assert "no Triton" in gpu_norm.unsupported(ModelConfig(), 128)


def test_kernels_refuse_a_switch_that_they_do_not_list():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Extended(ModelConfig):
        new_switch: int = 0

    for kernel in (tpu_attention, tpu_norm, gpu_attention, gpu_norm):
        assert not kernel.unsupported(Extended(), 128)
        assert kernel.unsupported(Extended(new_switch=1), 128).startswith("model.new_switch: 1 is not supported")
    assert tpu_norm.unsupported(ModelConfig(norm="rms_norm"), 128).startswith("model.norm: rms_norm")
    assert gpu_norm.unsupported(ModelConfig(norm_position="pre"), 128).startswith("model.norm_position: pre")
    with pytest.raises(ValueError, match=r"model\.new_switch: 1"):
        attention_kernel_of("pallas", None, Extended(new_switch=1), 128)
    assert not attention_kernel_of("auto", None, Extended(new_switch=1), 128)


def norm_operands(width=512):
    rng = np.random.default_rng(2)
    return *np.float32(rng.normal(size=(3, 48, width))), *np.float32(rng.normal(size=(3, width)))


def norm_key(seed=3):
    """The key of one row of 48 tokens."""
    return TokenKey(jax.random.key(seed), np.full((1, 48), 7, np.int32), np.arange(48, dtype=np.int32)[None])


def add_norm(product, residual, bias, scale, shift, *, rate=0.0, seed=3, tokens=slice(None), module=tpu_norm):
    words = jnp.stack(norm_key(seed).words(), axis=-1)[0, tokens]
    words = (words,) if rate else ()
    return fused(product, residual, (bias, scale, shift), words, 1e-12, rate, module, True)


NORMS = pytest.mark.parametrize("module", [tpu_norm, gpu_norm], ids=["tpu", "gpu"])


@pytest.mark.slow
@NORMS
@pytest.mark.parametrize("width", [512, 768])
def test_add_norm_and_its_gradients_equal_the_plain_ones(module, width):
    product, residual, gradient, *vectors = norm_operands(width)

    def plain(product, residual, bias, scale, shift):
        total = residual + product + bias
        centered = total - total.mean(-1, keepdims=True)
        return centered / jnp.sqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-12) * scale + shift

    def run(function):
        out, back = jax.vjp(function, product, residual, *vectors)
        return out, *back(gradient)

    ours, theirs = (jax.jit(run, static_argnums=0)(one) for one in (lambda *x: add_norm(*x, module=module), plain))
    np.testing.assert_allclose(ours[0], theirs[0], atol=5e-6)
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.slow
@NORMS
def test_add_norm_drops_at_its_rate_and_sends_gradients_through_what_stayed(module):
    run = functools.partial(add_norm, module=module)
    product, residual, gradient, bias, scale, shift = norm_operands()
    rate, threshold = 0.1, round(0.1 * 65536)
    back = jax.vjp(lambda *x: run(*x, bias, scale, shift, rate=rate), product, residual)[1]
    for_product, for_residual = back(gradient)
    stayed = for_product != 0
    np.testing.assert_allclose(
        np.asarray(for_product)[stayed], np.asarray(for_residual)[stayed] * 65536 / (65536 - threshold), rtol=1e-6
    )
    for axes in ((0, 1), (0,), (1,)):
        count = np.prod([stayed.shape[axis] for axis in axes])
        assert np.abs(1 - stayed.mean(axis=axes) - rate).max() < 5 * np.sqrt(rate * (1 - rate) / count), axes
    # What the gradients say was dropped is what the forward pass dropped.
    factor = jnp.where(stayed, 65536 / (65536 - threshold), 0.0)
    np.testing.assert_array_equal(factor, dropout(jnp.ones_like(product)[None], rate, norm_key())[0])
    expected = run((product + bias) * factor, residual, jnp.zeros_like(bias), scale, shift)
    np.testing.assert_allclose(run(product, residual, bias, scale, shift, rate=rate), expected, atol=5e-6)


@pytest.mark.slow
@NORMS
def test_add_norm_bits_depend_on_the_place_of_a_token_alone(module):
    run = functools.partial(add_norm, module=module)
    product, residual, _, *vectors = norm_operands()
    whole = run(product, residual, *vectors, rate=0.1)
    np.testing.assert_array_equal(
        run(product[16:32], residual[16:32], *vectors, rate=0.1, tokens=slice(16, 32)), whole[16:32]
    )
    assert (run(product, residual, *vectors, rate=0.1, seed=4) != whole).any()


def test_norm_before_a_block_adds_the_gradient_of_the_residual():
    x, gradient, beside, scale, shift, _ = norm_operands(256)

    def plain(x, scale, shift):
        centered = x - x.mean(-1, keepdims=True)
        return centered / jnp.sqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5) * scale + shift, x

    ours, our_back = jax.vjp(lambda x, *vectors: tpu_norm.norm_beside(x, vectors, 1e-5, True), x, scale, shift)
    theirs, their_back = jax.vjp(plain, x, scale, shift)
    gradients = [back((gradient, beside)) for back in (our_back, their_back)]
    for one, other in zip((*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    np.testing.assert_array_equal(ours[1], x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention_tokens", "queries", "norm_tokens"),
    [(256, 64, 16), pytest.param(512, 128, 24, marks=pytest.mark.slow)],
)
def test_block_sizes_change_no_bit(monkeypatch, attention_tokens, queries, norm_tokens):
    keys = jnp.arange(ROWS)[:, None] + jnp.zeros((1, LENGTH), jnp.int32)
    key = TokenKey(jax.random.key(7), keys, jnp.broadcast_to(jnp.arange(LENGTH), keys.shape))

    def values():
        attention = jax.jit(lambda *x: with_gradients(kernel, *x, dropout_rate=0.3, dropout_key=key))(*operands())
        product, residual, _, *vectors = norm_operands()
        return *attention, add_norm(product, residual, *vectors, rate=0.3)

    expected = values()
    assert (attention_tokens, queries) != (tpu_attention._BLOCK_TOKENS, tpu_attention_bodies._TILE)
    monkeypatch.setattr(tpu_attention, "_BLOCK_TOKENS", attention_tokens)
    monkeypatch.setattr(tpu_attention_bodies, "_TILE", queries)
    monkeypatch.setattr(tpu_norm, "_BLOCK_TOKENS", norm_tokens)
    for found, wanted in zip(values(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)  # a bit that differs changes a value by about 1
        assert ((found == 0) == (wanted == 0)).all()
