"""Whole models with kernels, interpreted: losses and gradients of the plain model, with dropout, on meshes."""

import dataclasses

import jax
import pytest
from support import masked_lm, random_batch, relative_difference, tiny_config

from bert_jax.config import ExecutionConfig, MeshConfig
from bert_jax.model import BertForPretraining, to_canonical
from bert_jax.parallel import make_mesh, to_global
from bert_jax.training.state import initial_params, make_prng_key
from bert_jax.training.step import loss_and_gradients


def model_config(dropout, **switches):
    config = tiny_config("--model.num_layers 2")
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 256, "max_position_embeddings": 128}
    rates = {"hidden_dropout": dropout, "attention_dropout": dropout}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **sizes, **rates, **switches),
        data=dataclasses.replace(config.data, seq_length=128),
    )


def loss_of_model(config, mesh=None, **execution):
    """Loss and canonical gradients of one step."""
    execution = ExecutionConfig(**execution)
    model = BertForPretraining(config.model, execution, True, mesh)
    params, batch = initial_params(model, 3), random_batch(config)
    if mesh is not None:
        batch = to_global(batch, mesh, len(batch["input_ids"]))
    key = make_prng_key(execution, 1)
    loss, grads, *_ = jax.jit(lambda p, b: loss_and_gradients(masked_lm(model), p, b, key, 1))(params, batch)
    return loss, to_canonical(grads, config.model.vocab_size)


KERNELS = {"attention": "pallas", "residual_norm": "pallas"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"scan_layers": True, "remat": "attention", "fused_qkv": True}], ids=str)
def test_a_model_of_kernels_equals_the_plain_model(options):
    config = model_config(dropout=0.0)
    plain = loss_of_model(config)
    loss, grads = loss_of_model(config, **KERNELS, **options)
    assert abs(loss - plain[0]) <= 1e-6 * abs(plain[0])
    assert relative_difference(grads, plain[1]) <= 5e-6


MODERN = {
    "norm_position": "pre_skip_first", "without_bias": ("norm", "qkv", "feed_forward"),
    "feed_forward": "gated", "position_embeddings": "rotary", "attention_windows": (0, 10),
}  # fmt: skip


@pytest.mark.slow
def test_a_pruned_model_of_kernels_equals_the_plain_model():
    config = model_config(dropout=0.1, layer_heads=(2, 4), layer_units=(100, 256))
    plain = loss_of_model(config)
    loss, grads = loss_of_model(config, **KERNELS)
    assert abs(loss - plain[0]) <= 1e-6 * abs(plain[0])
    assert relative_difference(grads, plain[1]) <= 5e-6


@pytest.mark.parametrize("on_mesh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_modern_model_of_kernels_equals_the_plain_model(on_mesh):
    """Rotary positions, windows and LayerNorm before the blocks."""
    config = model_config(dropout=0.1, **MODERN)
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), jax.devices()[:4]) if on_mesh else None
    plain = loss_of_model(config)
    loss, grads = loss_of_model(config, mesh, **KERNELS)
    assert abs(loss - plain[0]) <= 1e-6 * abs(plain[0])
    assert relative_difference(grads, plain[1]) <= 5e-6


def test_a_loop_over_layers_stacks_each_value_once_in_the_shape_of_its_product():
    """Stacked arrays of the loop, per layer [B, S, H] if a kernel wrote the value, [N, H] if a product wrote it."""
    config = model_config(dropout=0.1)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, intermediate_size=512))
    execution = ExecutionConfig(scan_layers=True, **KERNELS)
    model, batch, sizes = BertForPretraining(config.model, execution, True), random_batch(config), config.model
    layers, width, wide = sizes.num_layers, sizes.hidden_size, sizes.intermediate_size
    params, key = initial_params(model, 3), make_prng_key(execution, 1)
    trace = jax.make_jaxpr(lambda p: loss_and_gradients(masked_lm(model), p, batch, key, 1))(params)
    forward = next(e for e in trace.eqns if e.primitive.name == "scan" and e.params["length"] == layers)
    shapes = [x.aval.shape[1:] for x in forward.outvars[forward.params["num_carry"] :]]
    rows, length = batch["input_ids"].shape
    # Input, input of the feed-forward block, context (twice in one shape, which the compiler merges); query, key,
    # value and two outputs; before the activation.
    expected = [(rows, length, width)] * 4 + [(rows * length, width)] * 5 + [(rows * length, wide)]
    assert sorted(x for x in shapes if x[-1] in (width, wide) and x[0] > 3) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [pytest.param("tpu", marks=pytest.mark.slow), "gpu"])
def test_a_model_of_kernels_drops_the_values_of_the_plain_model(kernels, monkeypatch):
    monkeypatch.setattr("bert_jax.model.kernels.common.INTERPRETED", kernels)
    config = model_config(dropout=0.1)
    plain = loss_of_model(config)
    loss, grads = loss_of_model(config, **KERNELS)
    assert abs(loss - plain[0]) <= 1e-6 * abs(plain[0])
    assert relative_difference(grads, plain[1]) <= 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("prng", ["hash", "threefry"])
def test_a_model_of_kernels_drops_the_same_values_on_every_mesh(prng):
    config = model_config(dropout=0.1)
    one = loss_of_model(config, prng=prng, **KERNELS)
    assert abs(one[0] - loss_of_model(model_config(dropout=0.0), **KERNELS)[0]) > 1e-4
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), jax.devices()[:4])
    loss, grads = loss_of_model(config, mesh, prng=prng, **KERNELS)
    assert abs(loss - one[0]) <= 1e-6 * abs(one[0])
    assert relative_difference(grads, one[1]) <= 5e-6
