"""Attention in blocks for windows and causality against attention over whole rows: values, gradients, dropout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import random_params

from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig
from bert_jax.model import local_attention as local
from bert_jax.model.attention import dot_product_attention
from bert_jax.model.bert import BertModel
from bert_jax.model.dropout import TokenKey
from bert_jax.model.kernels.ranges import visible_keys

HEADS, SIZE = 3, 8


def tensors(length, rows=2):
    rng = np.random.default_rng(length)
    shape = (rows, length, HEADS, SIZE)
    ids = np.sort(rng.integers(1, 5, (rows, length)), axis=1)  # packed sequences
    ids[0, -length // 7 :] = 0
    positions = np.concatenate([np.arange(n) for row in ids for n in np.unique(row, return_counts=True)[1]])
    key = TokenKey(
        jax.random.key(7), np.int32(rng.integers(0, 2**31, (rows, length))),
        np.int32(positions.reshape(rows, length)),
    )  # fmt: skip
    return [np.float32(rng.normal(0, 1, shape)) for _ in range(3)], np.int32(ids), key


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("dropped", "dtype", "bar"), [(False, "float32", 1e-6), (True, "float32", 1e-6), (False, "float64", 1e-13)]
)
@pytest.mark.parametrize(
    ("length", "window", "causal"),
    [
        (260, 5, False),
        (300, 20, True),
        pytest.param(512, 64, False, marks=pytest.mark.slow),
        pytest.param(577, 129, False, marks=pytest.mark.slow),
        pytest.param(1024, 0, True, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_are_those_of_whole_rows(length, window, causal, dropped, dtype, bar):
    with jax.enable_x64(dtype == "float64"):
        compare_with_whole_rows(length, window, causal, dropped, dtype, bar)


def compare_with_whole_rows(length, window, causal, dropped, dtype, bar):
    heads, ids, key = tensors(length)
    heads = [np.asarray(x, dtype) for x in heads]
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

        (_, context), gradients = jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(heads))
        return [context, *gradients]

    for ours, expected in zip(run(parts), run(whole), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, expected, atol=bar * max(1, float(np.abs(expected).max())))


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


class TestGlobalTokens:
    MODEL = ModelConfig(
        vocab_size=30, hidden_size=24, num_layers=2, num_attention_heads=HEADS, intermediate_size=8,
        max_position_embeddings=400, attention_windows=(6, 3), global_tokens=5, separator_id=2,
        initializer_range=0.4,
    )  # fmt: skip

    def features(self, length):
        _, ids, key = tensors(length)
        words = np.random.default_rng(2).integers(3, 30, ids.shape)
        stated = np.random.default_rng(3).random(ids.shape) < 0.02
        features = {
            "input_ids": np.int32(words), "token_type_ids": np.zeros_like(ids), "sequence_ids": ids,
            "position_ids": key.positions, "global_tokens": stated,
        }  # fmt: skip
        return features, key

    @pytest.mark.parametrize("rate", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
    def test_packed_rows_in_blocks_are_those_of_whole_rows(self, monkeypatch, rate):
        features, key = self.features(300)
        config = dataclasses.replace(self.MODEL, hidden_dropout=0.0, attention_dropout=rate)
        network = BertModel(config, ExecutionConfig(vocab_multiple=1), HeadsConfig())
        params = random_params(network, 0, 0.3)
        real = (features["sequence_ids"] > 0)[:, :, None]

        def run():
            def loss(params):
                output = network.apply({"params": params}, features, key if rate else None).sequence_output * real
                return jnp.sum(jnp.sin(output)), output

            (_, output), gradients = jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))
            return output, np.concatenate([x.ravel() for x in jax.tree.leaves(gradients)])

        blocks = run()
        monkeypatch.setattr("bert_jax.model.local_attention.is_shorter", lambda *_: False)
        for ours, whole in zip(blocks, run(), strict=True):
            np.testing.assert_allclose(ours, whole, atol=5e-6 * max(1, float(np.abs(whole).max())))

    @pytest.mark.parametrize(
        ("heads", "expected"),
        [
            (HeadsConfig(sequence_labels=("a", "b"), pooler=True), [[1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]]),
            (HeadsConfig(span=True), [[1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]]),
            (HeadsConfig(choice=True, pooler=True), [[0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0]]),
        ],
    )
    def test_the_head_determines_the_global_tokens_of_each_sequence(self, heads, expected):
        features = {
            "input_ids": np.array([[5, 6, 2, 2, 7, 2, 8, 2, 2, 9, 2, 0]]),
            "sequence_ids": np.array([[1] * 6 + [2] * 5 + [0]]), "cls_positions": np.array([[0, 6]]),
        }  # fmt: skip
        found = jax.jit(lambda x: local.global_features(self.MODEL, heads, x))(features)
        assert np.array_equal(found["is_global"], expected)
        slots = np.flatnonzero(expected)
        assert found["global_slots"][0, : len(slots)].tolist() == slots.tolist()

    def test_no_head_no_global_tokens_and_no_more_than_the_option_allows(self):
        features, _ = self.features(300)
        heads = HeadsConfig(mlm=True)
        compute = jax.jit(lambda x: local.global_features(self.MODEL, heads, x))
        stated = np.asarray(compute(features)["is_global"])
        assert int(stated.sum(1).max()) == 5 and not (stated & (features["sequence_ids"] == 0)).any()
        assert not local.global_features(self.MODEL, heads, {"sequence_ids": features["sequence_ids"]})

    @pytest.mark.parametrize(
        "other",
        [{"attention_windows": ()}, {"attention_windows": (0, 4)}, {"attention": "causal"},
         {"position_embeddings": "rotary"}, {"relative_positions": "alibi"}],
    )  # fmt: skip
    def test_options_that_global_tokens_do_not_allow(self, other):
        with pytest.raises(ValueError, match="global_tokens"):
            dataclasses.replace(self.MODEL, **other)

    def test_windows_of_layers_that_the_model_has_count(self):
        one = dataclasses.replace(self.MODEL, num_layers=1, attention_windows=(6,))
        assert dataclasses.replace(one, attention_windows=(6, 0)).layer_windows == (6,)
