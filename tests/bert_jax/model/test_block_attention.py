"""Attention in blocks, some of them random (BigBird): values, gradients, dropout and blocks of transformers."""

import dataclasses
import functools
import json
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hf_folders import FIXTURES
from support import random_params

from bert_jax.config import (
    DataConfig,
    ExecutionConfig,
    FinetuneConfig,
    HeadsConfig,
    ModelConfig,
    PretrainConfig,
)
from bert_jax.config.task import TaskConfig
from bert_jax.model import local_attention as local
from bert_jax.model.attention import block_scores, dot_product_attention, random_blocks
from bert_jax.model.bert import BertModel
from bert_jax.model.canonical import abstract_params, to_canonical
from bert_jax.model.dropout import TokenKey
from bert_jax.model.layers import INTERMEDIATES
from bert_jax.model.task_layers import in_question

HEADS, SIZE = 3, 8
MODEL = ModelConfig(
    vocab_size=30, hidden_size=24, num_layers=3, num_attention_heads=HEADS, intermediate_size=8,
    max_position_embeddings=64, attention_block=4, random_blocks=2, initializer_range=0.4, hidden_dropout=0.0,
    attention_dropout=0.0,
)  # fmt: skip


def token_key(ids, seed=7):
    words = np.random.default_rng(0).integers(0, 2**31, ids.shape)
    places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return TokenKey(jax.random.key(seed), np.int32(words), places)


def padded(length, rows=2):
    """Sequence ids with padding on the right and on the left."""
    ids = np.ones((rows, length), np.int32)
    ids[0, -length // 7 :] = ids[1, :5] = 0
    return ids


def features_of(ids):
    words = np.random.default_rng(2).integers(3, 30, ids.shape)
    places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return {
        "input_ids": np.int32(words), "token_type_ids": np.zeros_like(ids), "sequence_ids": ids,
        "position_ids": places,
    }  # fmt: skip


def close(found, expected, bar=1e-6):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=bar * max(1, float(np.abs(theirs).max())), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "block", "number", "random", "rate"),
    [(46, 4, 3, False, 0), (45, 4, 2, True, 0), (45, 4, 2, True, 0.3), (1024, 64, 3, True, 0.3)],
)
def test_values_and_gradients_are_those_of_whole_rows_with_the_same_mask(length, block, number, random, rate):
    compare_with_whole_rows(length, block, number, random, rate, "float32", 1e-6)


@pytest.mark.parametrize("random", [False, True])
def test_in_float64_only_the_logarithms_of_counts_are_rounded(random):
    with jax.enable_x64(True):
        compare_with_whole_rows(46, 4, 3, random, 0, "float64", 1e-8)


def compare_with_whole_rows(length, block, number, random, rate, dtype, bar):
    ids, rng = padded(length), np.random.default_rng(length)
    heads = [np.asarray(rng.normal(0, 1, (2, length, HEADS, SIZE)), dtype) for _ in range(3)]
    plan = jnp.asarray(random_blocks(1, HEADS, length, block, number, 4096)) if random else None
    dropped = {"dropout_rate": rate, "dropout_key": token_key(ids) if rate else None}
    parts = functools.partial(local.block_attention, block=block, number=number, random_AxMxR=plan, **dropped)
    scores = jax.jit(lambda: block_scores(length, block, number, plan))()
    whole = functools.partial(dot_product_attention, relative=scores, **dropped)

    def run(attend):
        def loss(heads):
            context = attend(*heads, ids) * (ids > 0)[:, :, None, None]
            return jnp.sum(jnp.sin(context)), context

        return jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(heads))

    (_, context), gradients = run(parts)
    (_, whole_context), whole_gradients = run(whole)
    assert context.dtype == dtype
    close([context, *gradients], [whole_context, *whole_gradients], bar)


@pytest.mark.slow
def test_each_query_sees_the_blocks_of_the_paper():
    scores = np.asarray(block_scores(32, 4, 1, None).bias_AxSxT)
    times = np.where(scores > -1e8, np.rint(np.exp(scores)), 0)[0, ::4, ::4]
    near = np.abs(np.subtract.outer(np.arange(8), np.arange(8))) <= 1
    near[:, [0, -1]] = near[[0, -1]] = True
    expected = near.astype(float)
    expected[1:-1, 0] += 1
    assert np.array_equal(times, expected)


def test_each_question_of_a_packed_row_is_that_of_its_own_row():
    """Separators (2) bound the question of each sequence; one without a separator has no question."""
    texts = [[9, 5, 6, 2, 7, 7, 2], [9, 8, 2, 7, 2], [9, 7, 7], [9, 2, 7]]

    def asked(rows, sequences):
        size = max(map(len, rows))
        ids = np.array([row + [0] * (size - len(row)) for row in rows], np.int32)
        numbers = np.array([row + [0] * (size - len(row)) for row in sequences], np.int32)
        return np.asarray(jax.jit(in_question, static_argnums=2)(ids, numbers, 2)).astype(int).tolist()

    alone = [asked([text], [[1] * len(text)])[0] for text in texts]
    assert alone == [[0, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0], [0, 1, 0]]
    numbers = [1 + i for i, text in enumerate(texts) for _ in text]
    packed = [token for text in texts for token in text]
    assert asked([packed], [numbers]) == [[one for row in alone for one in row]]
    # As in transformers, the first column of the row is the exception, also if it is padding.
    assert asked([[0, 0, 9, 5, 2, 7, 2]], [[0, 0, 1, 1, 1, 1, 1]]) == [[0, 1, 1, 1, 1, 0, 0]]


def test_random_blocks_are_those_of_transformers():
    recorded = json.loads((FIXTURES / "families" / "big_bird_blocks.json").read_text())
    for sizes, checksum in recorded.items():
        plan = random_blocks(*json.loads(sizes))
        assert plan.dtype == np.int32 and zlib.crc32(plan.tobytes()) == checksum, sizes
    with pytest.raises(ValueError, match=r"attention_block: 256 leaves fewer than 2 random blocks in 4096 tokens"):
        random_blocks(1, 2, 4096, 256, 2, 4096)


class TestModel:
    def made(self, **execution):
        network = BertModel(MODEL, ExecutionConfig(vocab_multiple=1, **execution), HeadsConfig())
        features = features_of(padded(45))
        return network, random_params(network, 0, 0.3), features

    def run(self, network, params, features, key):
        real = (features["sequence_ids"] > 0)[:, :, None]

        def loss(params):
            output = network.apply({"params": params}, features, key).sequence_output * real
            return jnp.sum(jnp.sin(output)), output

        (_, output), gradients = jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))
        parts = to_canonical(gradients, MODEL.vocab_size)
        return output, np.concatenate([parts[name].ravel() for name in sorted(parts)])

    @pytest.mark.slow
    @pytest.mark.parametrize("rate", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
    def test_scanned_and_recomputed_layers_have_the_random_blocks_of_their_layer(self, monkeypatch, rate):
        """Whole rows with one layer after the other, the same in a loop, and in blocks."""
        monkeypatch.setattr(sys.modules[__name__], "MODEL", dataclasses.replace(MODEL, attention_dropout=rate))
        network, params, features = self.made()
        key = token_key(features["sequence_ids"])
        blocks = self.run(network, params, features, key)
        for execution in ({"scan_layers": True, "remat": "full"}, {"remat": "attention"})[: 1 if rate else 2]:
            other = BertModel(MODEL, ExecutionConfig(vocab_multiple=1, **execution), HeadsConfig())
            close(self.run(other, random_params(other, 0, 0.3), features, key), blocks, 5e-6)
        monkeypatch.setattr("bert_jax.model.local_attention.has_cut_bits", lambda *_: False)
        close(self.run(network, params, features, key), blocks, 5e-6)
        if not rate:
            evaluated = self.run(network, params, features, None)[0]
            assert float(np.abs(evaluated - blocks[0]).max()) > 0.01

    @pytest.mark.slow
    def test_hidden_states_and_probabilities_can_be_seen(self):
        network, params, features = self.made()
        output = jax.jit(network.apply)({"params": params}, features).sequence_output
        see = jax.jit(functools.partial(network.apply, mutable=[INTERMEDIATES]))
        seen, kept = see({"params": params}, features)
        close(seen.sequence_output, output, 5e-6)
        (probabilities,) = kept[INTERMEDIATES]["encoder"]["layer_0"]["attention"]["attentions"]
        assert probabilities.shape == (2, HEADS, 45, 45) and float(probabilities[1, 0, 20, 36]) == 0

    @pytest.mark.slow
    def test_short_rows_are_whole(self):
        network, params, _ = self.made()
        whole = BertModel(dataclasses.replace(MODEL, attention_block=0), network.execution, HeadsConfig())
        for length, same in ((36, True), (37, False)):
            features = features_of(np.ones((2, length), np.int32))
            ours, theirs = (
                jax.jit(one.apply)({"params": params}, features).sequence_output for one in (network, whole)
            )
            assert np.array_equal(ours, theirs) == same

    def test_several_sequences_in_a_row_of_blocks_are_refused(self):
        network = BertModel(MODEL, ExecutionConfig(vocab_multiple=1), HeadsConfig())
        params, features = nn.unbox(abstract_params(network)), features_of(padded(45))
        packed = features | {"cls_positions": jnp.array([[0, 9], [0, 9]])}
        with pytest.raises(
            ValueError, match=r"attention_block: 4 does not allow 2 sequences in a row of 45 tokens"
        ):
            jax.eval_shape(network.apply, {"params": params}, packed)


def test_the_scores_grow_with_the_length():
    def scores(length):
        heads = [jax.ShapeDtypeStruct((1, length, HEADS, SIZE), jnp.float32)] * 3
        plan = jax.ShapeDtypeStruct((HEADS, length // 64 - 2, 3), jnp.int32)
        run = functools.partial(local.block_attention, block=64, number=3, dropout_rate=0.0, dropout_key=None)
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        jaxpr = jax.make_jaxpr(lambda *x: run(*x[:4], random_AxMxR=x[4]))(*heads, ids, plan)
        return sum(e.outvars[0].aval.size for e in _equations(jaxpr.jaxpr) if e.primitive.name == "exp")

    for length in (1024, 8192):
        assert scores(length) == HEADS * 64 * (8 * (length - 128) + 2 * length)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from _equations(value.jaxpr)


def test_whole_rows_have_the_scores_of_their_blocks_at_any_length():
    sizes = {"block": 2, "number": 1, "random_AxMxR": None}
    (symbol,) = jax.export.symbolic_shape("n", constraints=["n <= 64"])
    anything = jax.ShapeDtypeStruct((symbol,), jnp.float32)
    made = jax.export.export(jax.jit(lambda x: block_scores(x.shape[0], **sizes).bias_AxSxT))(anything)
    whole = jax.jit(lambda length: block_scores(length, **sizes).bias_AxSxT, static_argnums=0)
    for length in (13, 14, 15, 16, 40):
        found = made.call(np.zeros(length, np.float32))
        expected = whole(length) if length > 14 else np.zeros((1, length, length))
        assert np.array_equal(found, expected), length


@pytest.mark.parametrize(
    "other", [{"attention_windows": (4,)}, {"attention": "causal"}, {"relative_positions": "alibi"}]
)
def test_options_that_blocks_do_not_allow(other):
    with pytest.raises(ValueError, match=r"model\.attention_block: 4 is not allowed"):
        dataclasses.replace(MODEL, **other)


def test_packed_rows_are_refused():
    with pytest.raises(
        ValueError, match=r"input\.packing: True is not allowed; allowed: false with model\.attention_"
    ):
        FinetuneConfig(model=MODEL, task=TaskConfig(max_length=64))
    with pytest.raises(
        ValueError, match=r"data\.packing: 'best_fit' is not allowed; allowed: none with model\.attenti"
    ):
        PretrainConfig(model=MODEL, data=DataConfig(seq_length=64, packing="best_fit"))
