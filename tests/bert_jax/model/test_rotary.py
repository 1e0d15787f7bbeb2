"""Rotary positions: equal to a restatement in numpy, relative, and apart for the sequences of a packed row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf
from support import random_params

from bert_jax.config import ExecutionConfig, ModelConfig, PretrainConfig
from bert_jax.contrib.planner.arithmetic import parameter_count
from bert_jax.model import BertForPretraining, BertModel, to_canonical
from bert_jax.model.canonical import canonical_shapes
from bert_jax.model.kernels import tpu_attention, tpu_norm

MODEL = ModelConfig(
    vocab_size=97, hidden_size=32, num_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64, position_embeddings="rotary", rotary_base=100.0, initializer_range=0.3,
)  # fmt: skip


def network(**execution) -> BertModel:
    return BertForPretraining(MODEL, ExecutionConfig(vocab_multiple=1, **execution), has_nsp=False)


def features(*lengths: int) -> dict[str, np.ndarray]:
    """One row of packed sequences of random ids."""
    ids = np.random.default_rng(0).integers(0, 97, (1, sum(lengths)))
    return {
        "input_ids": ids,
        "token_type_ids": np.zeros_like(ids),
        "position_ids": np.concatenate([np.arange(n) for n in lengths])[None],
        "sequence_ids": np.repeat(1 + np.arange(len(lengths)), lengths)[None],
    }


def restated(params: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Hidden states [S, H] of one sequence, in float64. Pairs are turned as complex numbers."""
    p = {name: np.asarray(values, np.float64) for name, values in params.items()}

    def dense(x, name):
        return x @ p[f"{name}/kernel"] + p[f"{name}/bias"]

    def norm(x, name):
        centered = x - x.mean(-1, keepdims=True)
        return centered / np.sqrt(x.var(-1, keepdims=True) + 1e-12) * p[f"{name}/scale"] + p[f"{name}/bias"]

    def turned(x_SxAxD):
        half = x_SxAxD.shape[-1] // 2
        angles_SxE = np.arange(len(ids))[:, None] * MODEL.rotary_base ** (-2 * np.arange(half) / (2 * half))
        pairs = (x_SxAxD[..., :half] + 1j * x_SxAxD[..., half:]) * np.exp(1j * angles_SxE)[:, None]
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = p["embeddings/word_embeddings/embedding"][ids] + p["embeddings/token_type_embeddings/embedding"][0]
    x = norm(x, "embeddings/layer_norm")
    for i in range(MODEL.num_layers):
        layer = f"encoder/layer_{i}"
        query, key, value = (
            dense(x, f"{layer}/attention/{name}").reshape(len(ids), 4, 8) for name in ("query", "key", "value")
        )
        scores = np.einsum("sad,tad->ast", turned(query), turned(key)) / np.sqrt(8)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        context = np.einsum("ast,tad->sad", weights / weights.sum(-1, keepdims=True), value).reshape(len(ids), 32)
        x = norm(dense(context, f"{layer}/attention/output") + x, f"{layer}/attention/layer_norm")
        inner = dense(x, f"{layer}/feed_forward/intermediate")
        inner = inner * 0.5 * (1 + erf(inner / np.sqrt(2)))
        x = norm(dense(inner, f"{layer}/feed_forward/output") + x, f"{layer}/feed_forward/layer_norm")
    return x


def hidden_states(model, params, row):
    return jax.jit(model.apply)({"params": params}, row).sequence_output


@pytest.mark.parametrize(
    "execution",
    [pytest.param({}, marks=pytest.mark.slow), {"scan_layers": True, "fused_qkv": True, "remat": "full"}],
)
def test_hidden_states_equal_a_restatement_in_numpy(execution):
    model = network(**execution)
    params, row = random_params(model, 3), features(40)
    output = hidden_states(model, params, row)
    expected = restated(to_canonical(params, MODEL.vocab_size), row["input_ids"][0])
    assert np.abs(np.asarray(output[0]) - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.slow
def test_packed_sequences_are_as_they_are_apart():
    model = network()
    params, row = random_params(model, 3), features(17, 23)
    together = hidden_states(model, params, row)
    for begin, end in ((0, 17), (17, 40)):
        one = {name: values[:, begin:end] for name, values in row.items()}
        apart = hidden_states(model, params, one | {"sequence_ids": np.ones_like(one["input_ids"])})
        np.testing.assert_allclose(together[:, begin:end], apart, atol=2e-6)


@pytest.mark.slow
def test_positions_count_relative_to_each_other():
    model = network()
    params, row = random_params(model, 3, 0.3), features(20)
    output = hidden_states(model, params, row)
    moved = hidden_states(model, params, row | {"position_ids": row["position_ids"] + 30})
    np.testing.assert_allclose(output, moved, atol=1e-5)
    turned = hidden_states(model, params, row | {"position_ids": row["position_ids"][:, ::-1]})
    assert jnp.abs(output - turned).max() > 1e-2


def test_the_plan_counts_no_position_table():
    names = canonical_shapes(network())
    assert "embeddings/position_embeddings/embedding" not in names
    count = {kind: parameter_count(PretrainConfig(model=ModelConfig(position_embeddings=kind)))
             for kind in ("learned", "rotary")}  # fmt: skip
    assert count["learned"] - count["rotary"] == 512 * 768


@pytest.mark.slow
def test_gradients_in_bfloat16_are_finite_and_kernels_know_what_they_can_do():
    model = network(dtype="bfloat16")
    params, row = random_params(model, 3), features(16)
    grads = jax.jit(jax.grad(lambda p: jnp.mean(model.apply({"params": p}, row).mlm_logits ** 2)))(params)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    base = ModelConfig(position_embeddings="rotary", rotary_base=7.0)
    assert not tpu_attention.unsupported(base, 128) and not tpu_norm.unsupported(base, 128)


def test_heads_of_an_odd_width_are_refused():
    with pytest.raises(ValueError, match=r"model\.num_attention_heads"):
        ModelConfig(hidden_size=36, num_attention_heads=4, position_embeddings="rotary")
