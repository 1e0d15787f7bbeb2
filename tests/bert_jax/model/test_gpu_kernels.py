"""Kernels of attention for GPUs and TPUs, interpreted: every form equals the plain attention, with the same dropout
bits; and those for GPUs lowered for one that is not here."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.attention import dot_product_attention
from bert_jax.model.dropout import TokenKey
from bert_jax.model.kernels import gpu_attention, gpu_attention_bodies, gpu_norm, tpu_attention
from bert_jax.model.kernels.add_norm import add_norm
from bert_jax.model.kernels.ranges import Ranges, visible_keys
from bert_jax.model.kernels.tiles import Form
from bert_jax.model.positions import rotary_tables, rotate

ROWS, LENGTH = 2, 192
FORMS = {
    "plain": Form(64),
    "dropout": Form(64, 0.1),
    "window": Form(32, 0.0, 10),
    "causal": Form(32, 0.1, 0, True),
    "causal window": Form(64, 0.1, 40, True),
}
IDS = {
    "padding": [[1] * 150 + [0] * 42, [1] * 192],
    "left padding": [[0] * 50 + [1] * 142, [1] * 70 + [0] * 52 + [1] * 70],
    "packed": [[1] * 70 + [2] * 60 + [3] * 50 + [0] * 12, [1] * 10 + [2] * 182],
    "blank row": [[0] * 192, [1] * 100 + [2] * 92],
}


def operands(form, heads=3, length=LENGTH):
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (ROWS, length, heads * form.head_size)
    query, key, value, gradient = (np.asarray(jax.random.normal(k, shape)) for k in keys[:4])
    return (query, key, value, np.asarray(jax.random.normal(keys[4], (3, shape[-1])))), gradient


def token_key(length=LENGTH):
    places = np.tile(np.arange(length, dtype=np.int32), (ROWS, 1))
    return TokenKey(jax.random.key(3), places // 60 + 7 * np.arange(ROWS, dtype=np.int32)[:, None], places % 60)


def tokens_of(form, ids):
    key = token_key(ids.shape[1])
    return jnp.stack([ids, *key.words(), key.positions] if form.dropout_rate else [ids], 1)


def kernel(form, ids, in_one, query, key, value, biases):
    heads = (jnp.stack([query, key, value], 2),) if in_one else (query, key, value)
    return gpu_attention.attend(heads, biases, tokens_of(form, ids), jnp.zeros(1, jnp.int32), form, True)


def for_tpus(form, ids, *heads_and_biases):
    """The kernel for TPUs, which rotates queries and keys itself if the form is rotary."""
    tokens, turns = tokens_of(form, ids), ()
    if form.rotary:
        turns = tpu_attention.rotary_turns(*angles(form, ids.shape[1]))
    of_tokens = tokens[:, :3], jnp.moveaxis(tokens[:, ::3], 1, 2), turns, jnp.zeros(1, jnp.int32)
    return tpu_attention.attend(*heads_and_biases, *of_tokens, form, True)


def angles(form, length):
    positions = token_key(length).positions
    return [jnp.take(x, positions, axis=0) for x in rotary_tables(length, form.head_size, 100.0)]


def plain(form, ids, query, key, value, biases):
    heads = [
        (x + bias).astype(x.dtype).reshape(*x.shape[:2], -1, form.head_size)
        for x, bias in zip((query, key, value), biases, strict=True)
    ]
    if form.rotary:
        heads[:2] = [rotate(y, *(x[:, :, None] for x in angles(form, ids.shape[1]))) for y in heads[:2]]
    key_of_tokens = token_key(ids.shape[1]) if form.dropout_rate else None
    options = {"dropout_rate": form.dropout_rate, "dropout_key": key_of_tokens}
    sees = functools.partial(visible_keys, causal=form.causal, window=form.window)
    return dot_product_attention(*heads, ids, visible=sees, **options).reshape(query.shape)


def with_gradients(function, x, gradient, ids):
    """The outputs of the tokens, and the gradients of a loss of them alone."""
    real = (ids > 0)[..., None]
    out, back = jax.vjp(function, *x)
    return [jnp.where(real, out, 0), *back(jnp.where(real, gradient, 0))]


@functools.cache
def compiled(function, form, *options):
    """One program for all sequence ids."""

    def run(x, gradient, ids):
        return with_gradients(functools.partial(function, form, ids, *options), x, gradient, ids)

    return jax.jit(run)


def difference(one, other):
    one, other = (np.asarray(x, np.float32) for x in (one, other))
    return float(np.abs(one - other).max() / max(1, np.abs(other).max()))


# Every form sees packed and blank rows in the quick set; two of them see padding too.
def cases(whole, *others):
    marks = {"padding": [pytest.mark.slow], "left padding": [pytest.mark.slow]}
    return [
        *((one, which) for one in whole for which in IDS),
        *(pytest.param(one, which, marks=marks.get(which, [])) for one in others for which in IDS),
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "which"), cases(["window", "causal window"], "plain", "dropout", "causal"))
def test_a_kernel_equals_the_plain_attention(name, which, in_one=True):
    form, ids = FORMS[name], jnp.asarray(IDS[which], jnp.int32)
    x, gradient = operands(form)
    ours, theirs = compiled(kernel, form, in_one)(x, gradient, ids), compiled(plain, form)(x, gradient, ids)
    assert max(map(difference, ours, theirs)) <= 2e-6


@pytest.mark.parametrize(
    "which",
    ["packed", "blank row", *(pytest.param(name, marks=pytest.mark.slow) for name in ("padding", "left padding"))],
)
@pytest.mark.parametrize(
    ("form", "length", "heads"),
    [
        (Form(64, 0.1), 384, 2),
        pytest.param(Form(64, 0.0, 60), 384, 2, marks=pytest.mark.slow),
        (Form(32, 0.1, 10, True), 384, 4),
        pytest.param(Form(128, 0.1, 300), 384, 2, marks=pytest.mark.slow),
        (Form(64, 0.1), 640, 2),
        pytest.param(Form(32, 0.0, 0, True), 768, 4, marks=pytest.mark.slow),
        (Form(64, 0.1, rotary=True), 384, 2),
        pytest.param(Form(32, 0.0, 60, rotary=True), 384, 4, marks=pytest.mark.slow),
        pytest.param(Form(128, 0.1, 0, True, rotary=True), 640, 1, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_for_tpus_equals_the_plain_attention(form, length, heads, which):
    """Rows of one tile of keys, windows, and rows of several tiles, of which some are skipped; and rotary ones."""
    ids = jnp.asarray(np.repeat(IDS[which], -(-length // LENGTH), axis=1)[:, :length], jnp.int32)
    x, gradient = operands(form, heads, length)
    ours, theirs = compiled(for_tpus, form)(x, gradient, ids), compiled(plain, form)(x, gradient, ids)
    assert difference(ours[0], theirs[0]) <= 2e-6
    # The logarithms of sums are rounded: the query gradient is up to 2.4e-6 from float64 (plain: 1.4e-6).
    assert max(map(difference, ours[1:], theirs[1:])) <= 5e-6


@pytest.mark.parametrize("name", ["dropout", pytest.param("window", marks=pytest.mark.slow)])
def test_three_arrays_of_heads_are_as_good_as_one(name):
    test_a_kernel_equals_the_plain_attention(name, "packed", in_one=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "in_one"),
    [
        ("dropout", True),
        ("causal window", False),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("dropout", False), ("causal window", True))),
    ],
)
def test_the_kernel_of_short_rows_equals_the_plain_attention(name, in_one, monkeypatch):
    monkeypatch.setattr(gpu_attention_bodies, "holds_row", lambda *_: True)
    form, ids = FORMS[name], jnp.asarray(IDS["packed"], jnp.int32)[:, :128]
    x, gradient = operands(form, length=128)
    ours = compiled.__wrapped__(kernel, form, in_one)(x, gradient, ids)
    assert max(map(difference, ours, compiled(plain, form)(x, gradient, ids))) <= 2e-6


@pytest.mark.slow
def test_bfloat16_is_as_close_to_float32_as_in_the_kernel_for_tpus():
    form, ids = FORMS["dropout"], jnp.asarray(IDS["packed"], jnp.int32)[:, :128]
    x, gradient = operands(form, heads=2, length=128)
    exact = compiled(plain, form)(x, gradient, ids)
    rounded = [*(jnp.asarray(y, jnp.bfloat16) for y in x[:3]), jnp.asarray(x[3])]
    short = jnp.asarray(gradient, jnp.bfloat16)
    assert gpu_attention_bodies.holds_row(128, form, jnp.bfloat16)
    # Operation by operation: a compiled program may leave out a rounding.
    ours = with_gradients(functools.partial(kernel, form, ids, True), rounded, short, ids)
    theirs = with_gradients(functools.partial(for_tpus, form, ids), rounded, short, ids)

    def error(one, true):
        return float(np.sqrt(np.mean(np.square(np.asarray(one, np.float32) - np.asarray(true)))))

    for one, other, true in zip(ours, theirs, exact, strict=True):
        assert error(one, true) <= 1.1 * error(other, true)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [(32, 16), pytest.param((16, 64), marks=pytest.mark.slow)])
def test_block_sizes_change_no_dropout_bit(blocks, monkeypatch):
    form, ids = FORMS["dropout"], jnp.asarray(IDS["packed"], jnp.int32)
    x, gradient = operands(form)
    expected = compiled(kernel, form, True)(x, gradient, ids)
    monkeypatch.setattr(gpu_attention_bodies, "block_sizes", lambda *_: gpu_attention_bodies.Blocks(*blocks))
    found = compiled.__wrapped__(kernel, form, True)(x, gradient, ids)
    assert max(map(difference, found, expected)) <= 2e-6


@pytest.mark.parametrize("name", ["window", "causal"])
def test_blocks_that_no_query_sees_are_not_visited(name, monkeypatch):
    """NaN in a value that is read becomes NaN in the context, even of queries that do not see it."""
    form = FORMS[name]
    monkeypatch.setattr(gpu_attention_bodies, "block_sizes", lambda *_: gpu_attention_bodies.Blocks(32, 32))
    ids = jnp.ones((ROWS, LENGTH), jnp.int32)
    (query, key, value, biases), _ = operands(form)
    spoiled = value.copy()
    spoiled[:, 128:160] = np.nan
    out = jax.jit(functools.partial(kernel, form, ids, True))(query, key, spoiled, biases)
    spoiled = np.isnan(np.asarray(out)).any(axis=(0, 2)).reshape(-1, 32).any(axis=1)
    assert spoiled.tolist() == [False] * (3 if form.window else 4) + [True] * (3 if form.window else 2)


@pytest.mark.cases(1)
@pytest.mark.parametrize("which", IDS)
@pytest.mark.parametrize(("window", "causal"), [(0, False), (10, False), (0, True), (40, True)])
def test_ranges_hold_every_visible_key_and_begin_and_end_with_one(which, window, causal):
    ids = jnp.asarray(IDS[which], jnp.int32)
    queries, keys = 32, 64

    @jax.jit
    def computed(ids):
        ranges = Ranges(ids, window, causal)
        visible = visible_keys(ids, causal=causal, window=window)
        return visible, ranges.of_queries(queries, keys), ranges.of_keys(queries, keys)

    visible, of_queries, of_keys = jax.device_get(computed(ids))
    visible = visible[:, 0]
    for seen, bounds, own, others in (
        (visible, of_queries, queries, keys),
        (visible.swapaxes(1, 2), of_keys, keys, queries),
    ):
        tiles = seen.reshape(ROWS, LENGTH // own, own, LENGTH // others, others).any(axis=(2, 4))
        for row, of_row in zip(tiles.reshape(-1, tiles.shape[-1]), np.asarray(bounds).reshape(-1, 2), strict=True):
            places = np.flatnonzero(row)
            assert of_row.tolist() == ([places[0], places[-1] + 1] if len(places) else [0, 0])


def lowered_for_gpu(function, *shapes):
    """The program for an H100, which no plugin has to know: Pallas lowers the kernels itself."""
    context = contextlib.nullcontext()
    if jax.__version__ >= "0.11":  # the device is not a constant of Pallas any more
        device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
        context = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
    with context:
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.cases(1)
@pytest.mark.parametrize("length", [128, 512])
@pytest.mark.parametrize("name", FORMS)
def test_the_kernels_are_lowered_for_a_gpu(name, length):
    form = FORMS[name]
    width = 4 * form.head_size

    def loss(heads, biases, tokens):
        out = gpu_attention.attend((heads,), biases, tokens, jnp.zeros(1, jnp.int32), form, False)
        return jnp.sum(out.astype(jnp.float32))

    tokens = shape(2, 4 if form.dropout_rate else 1, length, dtype=jnp.int32)
    shapes = shape(2, length, 3, width), shape(3, width, dtype=jnp.float32), tokens
    text = lowered_for_gpu(jax.grad(loss, (0, 1)), *shapes)
    assert text.count("gpu.triton") >= (2 if length == 128 else 3)
    assert "bytes_accessed" in text


def test_the_norm_is_lowered_for_a_gpu():
    def loss(product, residual, vectors, words):
        out = add_norm(product, residual, vectors, (words,), 1e-12, 0.1, gpu_norm, False)
        return jnp.sum(out.astype(jnp.float32))

    vectors = (shape(768, dtype=jnp.float32),) * 3
    text = lowered_for_gpu(
        jax.value_and_grad(loss, (0, 1, 2)),
        shape(256, 768),
        shape(256, 768),
        vectors,
        shape(256, 2, dtype=jnp.int32),
    )
    assert text.count("gpu.triton") >= 2
