"""Hashed dropout: the bits of a token follow from its step, site, sequence and position alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from support import masked_lm, random_batch, random_params, relative_difference, tiny_config

from bert_jax.config import ExecutionConfig, MeshConfig
from bert_jax.model import BertForPretraining, to_canonical
from bert_jax.model.dropout import Site, TokenKey, dropout, dropout_of_probabilities, site_key
from bert_jax.parallel import make_mesh, to_global
from bert_jax.training.step import loss_and_gradients

CONFIG = tiny_config("--model.num_layers 2 --training.global_batch_size 16")
MASK = 2**32 - 1


def loss_and_grads(batch, *, mesh=None, accumulation=1, step=1, **execution):
    model = BertForPretraining(CONFIG.model, ExecutionConfig(prng="hash", **execution), CONFIG.has_nsp, mesh)
    params = random_params(model, 3)
    if mesh is not None:
        batch = to_global(batch, mesh, len(batch["input_ids"]))
    key = jax.random.fold_in(jax.random.key(1), step)
    run = jax.jit(lambda p, b: loss_and_gradients(masked_lm(model), p, b, key, accumulation))
    loss, grads, *_ = run(params, batch)
    return float(loss), to_canonical(jax.device_get(grads), CONFIG.model.vocab_size)


def assert_equal(one, other):
    assert abs(one[0] - other[0]) <= 1e-6 * abs(other[0])
    assert relative_difference(one[1], other[1]) <= 2e-6


@pytest.fixture(scope="module")
def whole():
    return loss_and_grads(random_batch(CONFIG))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_microbatches_drop_the_values_of_the_whole_batch(whole, count):
    assert_equal(loss_and_grads(random_batch(CONFIG), accumulation=count), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "count"), [((8, 1, 1), 2), pytest.param((2, 2, 2), 1, marks=pytest.mark.slow)], ids=str
)
def test_meshes_drop_the_values_of_one_device(whole, sizes, count):
    mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    assert_equal(loss_and_grads(random_batch(CONFIG), mesh=mesh, accumulation=count), whole)


@pytest.mark.slow
def test_rows_in_another_order_drop_the_same_values(whole):
    order = np.random.default_rng(0).permutation(16)
    batch = {name: values[order] for name, values in random_batch(CONFIG).items()}
    assert_equal(loss_and_grads(batch), whole)


@pytest.mark.slow
def test_steps_and_sequences_drop_different_values(whole):
    assert abs(loss_and_grads(random_batch(CONFIG), step=2)[0] - whole[0]) > 1e-4
    batch = random_batch(CONFIG)
    batch["sequence_keys"] += np.uint32(1)
    assert abs(loss_and_grads(batch)[0] - whole[0]) > 1e-4


def packed_in_pairs(single):
    """The sequences of ``single``, two in each row of twice the length, with a gap of padding between them."""
    rows, length = single["input_ids"].shape
    packed = {name: np.concatenate([x[::2], x[1::2]], axis=1) for name, x in single.items()}
    packed["sequence_ids"][:, length:] *= 2
    packed["mlm_positions"][:, single["mlm_positions"].shape[1] :] += length
    packed["cls_positions"][:, 1] += length
    assert packed["sequence_keys"].shape == (rows // 2, 2)
    return packed


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"scan_layers": True, "remat": "full", "fused_qkv": True}],
    ids=str,
)
def test_packed_sequences_drop_the_values_of_single_ones(whole, options):
    assert_equal(loss_and_grads(packed_in_pairs(random_batch(CONFIG)), **options), whole)


def mix(x, salt):
    """One hash of Python integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK ^ salt
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def token_words(key, sequence, position):
    first, second = (int(word) for word in jax.random.key_data(key))
    one = mix((mix(sequence ^ first, second) + position) & MASK, second)
    return one, mix((mix(sequence ^ second, first) + position) & MASK, first)


SEQUENCES, POSITIONS = np.array([[3, 3, 2**32 - 1]], np.uint32), np.array([[0, 1, 8191]], np.int32)


def test_bits_equal_a_restatement_in_integers():
    key = site_key(TokenKey(jax.random.key(9), jnp.asarray(SEQUENCES.view(np.int32)), POSITIONS), 2, Site.TASK_HEAD)
    width, heads, rate = 5, 3, 0.5
    ones = np.ones((1, 3, width), np.float32), np.ones((1, heads, 3, 3), np.float32)
    drop = jax.jit(lambda x, y: (dropout(x, rate, key), dropout_of_probabilities(y, rate, key)))
    values, probabilities = jax.device_get(drop(*ones))
    for token in range(3):
        one, other = token_words(key.key, int(SEQUENCES[0, token]), int(POSITIONS[0, token]))
        for column in range(width):
            word = mix((column % 3 + one) & MASK, other)
            bits = word >> 16 if column >= 3 else word & 0xFFFF
            assert values[0, token, column] == 2 * (bits >= 2**15)
        for head in range(heads):
            pair = head // 2
            first, second = one ^ pair * 0x9E3779B1 & MASK, (other + pair * 0x85EBCA77) & MASK
            for place in range(3):
                word = mix((int(POSITIONS[0, place]) + first) & MASK, second)
                bits = word >> 16 if head % 2 else word & 0xFFFF
                assert probabilities[0, head, token, place] == 2 * (bits >= 2**15)


@pytest.mark.slow
def test_rate_and_scale_are_exact_and_values_uniform():
    rows, length, width = 8, 64, 512
    keys, places = (
        jnp.arange(rows)[:, None] + jnp.zeros((1, length), int),
        jnp.arange(length)[None] + 0 * jnp.arange(rows)[:, None],
    )
    for number in range(8):
        key = TokenKey(jax.random.key(number), keys, places)
        kept = np.asarray(dropout(jnp.ones((rows, length, width)), 0.1, key))
        np.testing.assert_allclose(kept[kept > 0], 65536 / (65536 - 6554), rtol=1e-6)
        drops = kept == 0
        for axes in ((1, 2), (0, 2), (0, 1)):
            counts = drops.sum(axis=axes)
            share = 6554 / 65536
            each = drops.size / len(counts)
            assert (
                chisquare(
                    np.stack([counts, each - counts]).ravel(),
                    np.repeat([each * share, each * (1 - share)], len(counts)),
                ).pvalue
                > 1e-4
            )


@pytest.mark.slow
def test_sites_layers_and_tokens_drop_different_values():
    base = TokenKey(jax.random.key(0), np.zeros((1, 2), np.int32), np.arange(2, dtype=np.int32)[None])
    sites = [(layer, site) for layer in range(2) for site in Site]
    found = jax.jit(lambda x: [dropout(x, 0.5, site_key(base, *one)) for one in sites])(np.ones((1, 2, 256)))
    draws = [np.asarray(one)[0, token] for one in found for token in range(2)]
    assert len({draw.tobytes() for draw in draws}) == len(draws)
