"""One function, many ways to run it: layouts, remat, fusion, meshes and accumulation agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from support import masked_lm, random_batch, random_params, relative_difference, tiny_config

from bert_jax.config import ExecutionConfig, MeshConfig, PretrainConfig
from bert_jax.model import BertForPretraining, from_canonical, to_canonical
from bert_jax.parallel import make_mesh, to_global
from bert_jax.training.state import abstract_params, abstract_state, initial_params, make_prng_key
from bert_jax.training.step import loss_and_gradients

CONFIG = tiny_config("--model.num_layers 2")
VOCAB = CONFIG.model.vocab_size


def run(config, execution, *, mesh=None, accumulation=1, batch=None, dropout=True):
    """Loss and canonical gradients of one step from the same canonical parameters."""
    model = BertForPretraining(config.model, execution, config.has_nsp, mesh)
    params = random_params(model, 3)
    batch = random_batch(config) if batch is None else batch
    if mesh is not None:
        shardings = jax.tree.map(lambda x: x.sharding, _abstract(model, mesh).params)
        params = jax.device_put(params, shardings)
        batch = to_global(batch, mesh, len(batch["input_ids"]))
    key = make_prng_key(execution, 1) if dropout else None
    run = jax.jit(lambda p, b: loss_and_gradients(masked_lm(model), p, b, key, accumulation))
    loss, grads, *_ = run(params, batch)
    return float(loss), to_canonical(jax.device_get(grads), VOCAB)


def _abstract(model, mesh):
    import optax

    return abstract_state(PretrainConfig(), model, optax.identity(), mesh)


@functools.cache
def reference(*, dropout=True):
    return run(CONFIG, ExecutionConfig(), dropout=dropout)


VARIANTS = {
    "scanned": {"scan_layers": True},
    "remat_attention": {"remat": "attention"},
    "remat_full": {"remat": "full"},
    "remat_full_scanned": {"remat": "full", "scan_layers": True},
    "fused_qkv": {"fused_qkv": True},
    "unpadded_vocabulary": {"vocab_multiple": 1},
    "fused_qkv_scanned": {"fused_qkv": True, "scan_layers": True, "remat": "attention", "vocab_multiple": 1},
}


# The last one has each option of the others; full recomputation: data_pipeline/test_packed_rows.py.
@pytest.mark.parametrize(
    "name",
    [name if name == "fused_qkv_scanned" else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS],
)
def test_execution_does_not_change_the_function(name):
    loss, grads = run(CONFIG, ExecutionConfig(**VARIANTS[name]))
    assert abs(loss - reference()[0]) <= 1e-6 * abs(reference()[0])
    assert relative_difference(grads, reference()[1]) <= 2e-6


def test_the_masked_positions_order_on_tpu_does_not_change_the_function(monkeypatch):
    monkeypatch.setattr("bert_jax.model.task_layers.on_tpu", lambda mesh: True)
    loss, grads = run(CONFIG, ExecutionConfig())
    assert abs(loss - reference()[0]) <= 1e-6 * abs(reference()[0])
    assert relative_difference(grads, reference()[1]) <= 2e-6


def test_dropout_is_on_in_the_comparison():
    assert abs(reference(dropout=False)[0] - reference()[0]) > 1e-4


@pytest.mark.parametrize("remat", ["attention", "full"])
def test_remat_is_in_the_program(remat):
    def jaxpr(execution):
        model = BertForPretraining(CONFIG.model, execution)
        params, batch = random_params(model), random_batch(CONFIG)
        return str(jax.make_jaxpr(lambda p: loss_and_gradients(masked_lm(model), p, batch, None, 1)[0])(params))

    assert "remat" in jaxpr(ExecutionConfig(remat=remat)) or "checkpoint" in jaxpr(ExecutionConfig(remat=remat))
    plain = jaxpr(ExecutionConfig())
    assert "remat" not in plain and "checkpoint" not in plain


@pytest.mark.parametrize("count", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_accumulation_equals_one_pass_with_unequal_mask_counts(count):
    batch = random_batch(CONFIG, rows=8)
    batch["mlm_weights"][::2, 1:] = 0
    batch["nsp_weights"][1] = 0
    whole = run(CONFIG, ExecutionConfig(), batch=batch, dropout=False)
    loss, grads = run(CONFIG, ExecutionConfig(), batch=batch, dropout=False, accumulation=count)
    assert abs(loss - whole[0]) <= 1e-6 * abs(whole[0])
    assert relative_difference(grads, whole[1]) <= 2e-6


@pytest.mark.slow  # tests/bert_jax/model/test_hash_dropout.py compares such a step with one pass
def test_accumulation_on_a_mesh_equals_accumulation_on_one_device():
    one = run(CONFIG, ExecutionConfig(), accumulation=2)
    mesh = make_mesh(MeshConfig(data=4), jax.devices()[:4])
    loss, grads = run(CONFIG, ExecutionConfig(), accumulation=2, mesh=mesh)
    assert abs(loss - one[0]) <= 1e-6 * abs(one[0])
    assert relative_difference(grads, one[1]) <= 2e-6


def test_padding_content_does_not_reach_real_tokens():
    batch = random_batch(CONFIG)
    changed = dict(batch, input_ids=np.where(batch["sequence_ids"] == 0, 17, batch["input_ids"]))
    model = BertForPretraining(CONFIG.model, ExecutionConfig())
    params = random_params(model)
    apply = jax.jit(lambda p, b: model.apply({"params": p}, b).sequence_output)
    first, second = apply(params, batch), apply(params, changed)
    real = batch["sequence_ids"] > 0
    assert not np.array_equal(first[~real], second[~real])
    np.testing.assert_array_equal(first[real], second[real])


def test_packed_sequences_equal_single_ones():
    single = random_batch(CONFIG, rows=2)
    lengths = (single["sequence_ids"] > 0).sum(1)
    width = int(lengths.sum())
    packed = {name: np.zeros((1, width), np.int32) for name in ("input_ids", "token_type_ids")}
    packed |= {name: np.zeros((1, width), np.int32) for name in ("sequence_ids", "position_ids")}
    at = 0
    for row, length in enumerate(lengths):
        for name in ("input_ids", "token_type_ids", "position_ids"):
            packed[name][0, at : at + length] = single[name][row, :length]
        packed["sequence_ids"][0, at : at + length] = row + 1
        at += length
    packed |= {"mlm_positions": np.zeros((1, 1), np.int32), "cls_positions": np.array([[0, lengths[0]]])}
    model = BertForPretraining(CONFIG.model, ExecutionConfig())
    params = random_params(model)
    apply = jax.jit(model.apply)
    apart, together = apply({"params": params}, single), apply({"params": params}, packed)
    expected = np.concatenate([apart.sequence_output[row, :n] for row, n in enumerate(lengths)])
    np.testing.assert_allclose(together.sequence_output[0], expected, atol=2e-6)
    np.testing.assert_allclose(together.pooled_output[0], apart.pooled_output[:, 0], atol=2e-6)


def test_layers_drop_different_values():
    config = dataclasses.replace(CONFIG.model, attention_dropout=0.0)
    model = BertForPretraining(config, ExecutionConfig(scan_layers=True))
    text = str(jax.make_jaxpr(lambda p, k: model.apply({"params": p}, random_batch(CONFIG), k).mlm_logits)(
        random_params(model), jax.random.key(0)))  # fmt: skip
    assert "random_bits" in text
    from bert_jax.model.dropout import Site, random_uint16, site_key

    draws = [
        np.asarray(random_uint16(site_key(jax.random.key(0), layer, site), (64,)))
        for layer in range(3)
        for site in Site
    ]
    assert len({draw.tobytes() for draw in draws}) == len(draws)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_dropout_rate_is_exact(impl):
    from bert_jax.model.dropout import dropout

    x = jnp.ones((1000, 1001))
    y = np.asarray(dropout(x, 0.1, jax.random.key(5, impl=impl)))
    dropped = (y == 0).mean()
    assert abs(dropped - 0.1) < 4 * np.sqrt(0.09 / x.size)
    np.testing.assert_allclose(y[y != 0], 1 / 0.9, rtol=1e-4)


def test_running_tree_round_trips_through_canonical_names():
    found = []
    for execution in (ExecutionConfig(), ExecutionConfig(scan_layers=True, vocab_multiple=64)):
        model = BertForPretraining(CONFIG.model, execution)
        params = jax.jit(lambda model=model: initial_params(model, 0))()
        flat = {name: np.asarray(values) for name, values in to_canonical(params, VOCAB).items()}
        found.append(flat)
        assert flat["embeddings/word_embeddings/embedding"].shape == (VOCAB, 32)
        assert flat["encoder/layer_1/attention/query/kernel"].shape == (32, 32)
        again = from_canonical(flat, nn.unbox(abstract_params(model)), VOCAB)
        jax.tree.map(np.testing.assert_array_equal, params, again)
        with pytest.raises(ValueError, match=r"missing pooler/bias.*unexpected extra"):
            from_canonical(
                {**{n: v for n, v in flat.items() if n != "pooler/bias"}, "extra": flat["pooler/bias"]},
                nn.unbox(abstract_params(model)),
                VOCAB,
            )
    jax.tree.map(np.testing.assert_array_equal, *found)  # the values do not depend on the layout


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters():
    execution = ExecutionConfig(dtype="bfloat16")
    loss, grads = run(CONFIG, execution)
    assert abs(loss - reference()[0]) < 0.02
    assert all(g.dtype == jnp.float32 for g in grads.values())
    model = BertForPretraining(CONFIG.model, execution)
    output = jax.eval_shape(model.apply, {"params": random_params(model)}, random_batch(CONFIG))
    assert output.sequence_output.dtype == jnp.bfloat16 and output.mlm_logits.dtype == jnp.float32


@pytest.mark.parametrize(
    "arguments",
    [
        "--model.position_embeddings sinusoidal",
        "--model.activation gelu_sigmoid",
        "--model.activation relu",
        # Values of these are compared elsewhere.
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                "--model.norm_position pre",
                "--model.position_embeddings rotary",
                "--data.next_sentence none",
            )
        ),
    ],
)
def test_model_options_change_the_function_and_have_gradients(arguments):
    config = tiny_config("--model.num_layers 2", arguments)
    loss, grads = run(config, ExecutionConfig(scan_layers=True), dropout=False)
    assert abs(loss - reference(dropout=False)[0]) > 1e-6
    for name, grad in grads.items():
        # A constant added to every key moves no softmax, so the key bias has no gradient by nature.
        if not name.endswith("key/bias"):
            assert float(jnp.max(jnp.abs(grad))) > 0, name


def test_unknown_logical_axis_raises():
    from bert_jax.parallel import constrain, with_logical_axes

    with pytest.raises(ValueError, match="unknown logical axis 'act_bacth'"):
        constrain(jnp.zeros((2, 2)), ("act_bacth", None), None)
    with pytest.raises(ValueError, match="unknown logical axis 'embd'"):
        with_logical_axes(nn.initializers.zeros_init(), ("embd",))
