"""Training with rounded weights and inputs: values, gradients, and the exported int8 program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exported import SPECS, random_weights
from flax import traverse_util

from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig
from bert_jax.interop.programs import serving
from bert_jax.interop.programs.onnx_graph import write_onnx
from bert_jax.interop.programs.onnx_int8 import quantize
from bert_jax.model import BertModel
from bert_jax.model.dense import rounded_inputs, rounded_weight

INT8 = ExecutionConfig(vocab_multiple=1, quantization="int8")


def test_rounding_is_that_of_an_export_and_gradients_ignore_it():
    values = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    stored, scales = quantize(values, 1)
    np.testing.assert_allclose(rounded_weight(jnp.asarray(values)), stored * scales, atol=1e-6)
    inputs = jnp.asarray(values + 1)
    rounded = rounded_inputs(inputs)
    steps = rounded * 127 / np.abs(inputs).max(axis=1, keepdims=True)
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
    assert np.all(np.abs(rounded - inputs) <= 0.51 * np.abs(inputs).max(axis=1, keepdims=True) / 127)
    for function in (rounded_weight, rounded_inputs):
        slopes = jax.grad(lambda x, function=function: (function(x) * values).sum())(inputs)
        np.testing.assert_array_equal(slopes, values)
    assert not np.any(rounded_inputs(jnp.zeros((2, 3))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["plain", pytest.param("rotary", marks=pytest.mark.slow), pytest.param("pre", marks=pytest.mark.slow)]
)
def test_the_network_is_the_int8_program(name, tmp_path):
    """Without calibration, each token has a scale of its own in both."""
    onnxruntime = pytest.importorskip("onnxruntime")
    weights = random_weights(dataclasses.replace(SPECS[name], heads=HeadsConfig()))
    write_onnx(tmp_path, weights, dtype="int8")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(0, 101, (3, 40))
    sample = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    (program,) = session.run(["last_hidden_state"], sample)
    params = traverse_util.unflatten_dict({key: jnp.asarray(x) for key, x in weights.params.items()}, sep="/")
    features = {
        "input_ids": ids, "token_type_ids": sample["token_type_ids"], "sequence_ids": sample["attention_mask"],
        "position_ids": serving.position_ids(weights.spec, jnp.asarray(ids)),
    }  # fmt: skip

    def states(execution):
        network = BertModel(weights.spec.model, execution, HeadsConfig())
        return np.asarray(jax.jit(network.apply)({"params": params}, features).sequence_output)

    exact = states(dataclasses.replace(INT8, quantization="none"))
    for execution in (INT8, dataclasses.replace(INT8, fused_qkv=True)):
        # A value at the border of two steps may fall on either side, but most agree.
        difference = np.abs(states(execution) - program).mean()
        assert difference < 0.25 * np.abs(exact - program).mean() and np.abs(exact - program).mean() > 1e-3


def test_another_encoder_is_refused():
    model = BertModel(ModelConfig.of(vocab_size=11, encoder="none", num_layers=0), INT8, HeadsConfig())
    ids = jnp.zeros((1, 4), jnp.int32)
    features = dict.fromkeys(("input_ids", "token_type_ids", "sequence_ids", "position_ids"), ids)
    with pytest.raises(ValueError, match=r"execution.quantization: int8 is not allowed with model.encoder none"):
        model.init(jax.random.key(0), features)
