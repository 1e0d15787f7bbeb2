"""Outputs, gradients and loss curves against transformers' BERT in torch, as recorded by tests/golden/record.py."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from golden.cases import (
    CURVE_MODEL,
    CURVE_PEAK,
    CURVE_STEPS,
    CURVE_WARMUP,
    MODEL_CASES,
    Case,
    batch,
    curve_case,
    weights,
)
from support import masked_lm

from bert_jax.config import ExecutionConfig, ModelConfig, OptimizerConfig, TrainingConfig
from bert_jax.model import BertForPretraining, BertModel, from_canonical, to_canonical
from bert_jax.optim import make_optimizer
from bert_jax.training.state import TrainState, abstract_params, key_words, make_prng_key
from bert_jax.training.step import loss_and_gradients, make_train_step

FIXTURES = Path(__file__).parents[2] / "golden" / "fixtures"
OUTPUTS = ("sequence_output", "pooled_output", "mlm_logits", "nsp_logits")
CASES = {case.name: case for case in MODEL_CASES}
# Another way to run the same function is held to the same bars.
EXECUTIONS = {
    "unrolled": ExecutionConfig(),
    "scanned": ExecutionConfig(scan_layers=True, remat="full", fused_qkv=True),
}
# Sizes, padding and activation differ; the other cases differ from them in one size alone.
QUICK = (("padded", "unrolled"), ("tanh_gelu", "unrolled"), ("odd_sizes", "scanned"))
RUNS = [
    pytest.param(*run, marks=[] if run in QUICK else [pytest.mark.slow])
    for run in (*((name, "unrolled") for name in CASES), ("padded", "scanned"), ("odd_sizes", "scanned"))
]


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / f"{name}.npz") as stored:
        return dict(stored)


def build(model: dict, execution: ExecutionConfig) -> tuple[BertModel, dict]:
    """The network without dropout and the shared weights in its running layout."""
    config = ModelConfig(hidden_dropout=0.0, attention_dropout=0.0, **model)
    network = BertForPretraining(config, execution)
    return network, from_canonical(weights(model), nn.unbox(abstract_params(network)), config.vocab_size)


def compiled_gradients(network: BertForPretraining):
    """Jitted ``(params, batch) -> (loss, gradients, sums, None)`` without dropout."""
    return jax.jit(lambda params, features: loss_and_gradients(masked_lm(network), params, features, None, 1))


def assert_gradients_agree(given: dict, recorded: dict, bar: float) -> None:
    """norm(g - g0) <= bar * max(norm(g0), 1e-4 * global norm), for every parameter."""
    assert set(given) == set(recorded)
    norms = {name: np.linalg.norm(value) for name, value in recorded.items()}
    global_norm = np.sqrt(sum(norm**2 for norm in norms.values()))
    errors = {
        name: np.linalg.norm(np.asarray(given[name]) - value) / max(norms[name], 1e-4 * global_norm)
        for name, value in recorded.items()
    }
    worst = max(errors, key=errors.get)
    assert errors[worst] <= bar, f"{worst}: {errors[worst]:.1e}"


@pytest.mark.parametrize(("name", "execution"), RUNS)
def test_outputs_equal_transformers(name: str, execution: str) -> None:
    """All positions, padding queries included; MLM logits at the masked positions."""
    case, recorded = CASES[name], load(f"model_{name}")
    network, params = build(case.model, EXECUTIONS[execution])
    outputs = jax.jit(network.apply)({"params": params}, batch(case))
    for output in OUTPUTS:
        value = np.asarray(getattr(outputs, output))
        if output == "mlm_logits":
            assert np.all(value[..., case.model["vocab_size"] :] == -np.inf)
            value = value[..., : case.model["vocab_size"]]
        assert value.shape == recorded[output].shape
        np.testing.assert_allclose(value, recorded[output], rtol=0, atol=2e-5, err_msg=output)


@pytest.mark.parametrize(("name", "execution"), [run for run in RUNS if CASES[run.values[0]].gradients])
def test_loss_and_gradients_equal_transformers(name: str, execution: str) -> None:
    case, recorded = CASES[name], load(f"model_{name}")
    network, params = build(case.model, EXECUTIONS[execution])
    loss, grads, sums, _ = compiled_gradients(network)(params, batch(case))
    assert abs(float(loss) - float(recorded["loss"])) <= 2e-5
    mlm_sum, mlm_weight = sums["mlm_loss"]
    assert abs(float(mlm_sum / (mlm_weight + 1e-5)) - float(recorded["mlm_loss"])) <= 2e-5
    assert abs(float(sums["nsp_loss"][0] / sums["nsp_loss"][1]) - float(recorded["nsp_loss"])) <= 2e-5
    vocab_size = case.model["vocab_size"]
    prefix = "gradient:"
    assert_gradients_agree(
        to_canonical(grads, vocab_size),
        {name.removeprefix(prefix): value for name, value in recorded.items() if name.startswith(prefix)},
        1e-4,
    )
    # Rows that exist in memory only must stay out of the norm and the moments.
    table = grads["embeddings"]["word_embeddings"]["embedding"]
    assert not np.any(np.asarray(table)[vocab_size:])
    assert not np.any(np.asarray(grads["mlm_head"]["output_bias"])[vocab_size:])


@pytest.mark.parametrize("mode", ["standard", "bert2018"])
def test_loss_curve_equals_torch(mode: str) -> None:
    """50 whole training steps: forward, backward, clipping, optimizer and schedule."""
    recorded = load(f"curve_{mode}")
    bert2018 = mode == "bert2018"
    network, params = build(CURVE_MODEL | ({"activation": "gelu_tanh"} if bert2018 else {}), ExecutionConfig())
    config = OptimizerConfig(
        name="bert_adam" if bert2018 else "adamw",
        schedule="bert2018" if bert2018 else "linear",
        learning_rate=CURVE_PEAK,
        warmup_steps=CURVE_WARMUP,
        clip_norm=1.0,
    )
    optimizer = make_optimizer(config)
    objective = masked_lm(network)
    training = TrainingConfig(num_steps=CURVE_STEPS)
    objective.config = dataclasses.replace(objective.config, optimizer=config, training=training)
    step = make_train_step(objective, optimizer)
    compiled = jax.jit(step, donate_argnums=0)
    words = key_words(make_prng_key(ExecutionConfig(), 0))
    state = TrainState(jnp.zeros((), jnp.int32), params, jax.jit(optimizer.init)(params))
    for i in range(CURVE_STEPS):
        state, packed = compiled(state, batch(curve_case(i)), objective.fixed, words)
        metrics = packed.unpack()
        # The rate of step 0 is 0 in both, so the first parameters to differ are those of step 2.
        assert abs(float(metrics["last"]["learning_rate"]) - recorded["learning_rate"][i]) <= 1e-9
        assert abs(float(metrics["loss"]) - recorded["loss"][i]) <= 1e-4, f"step {i}"
        assert abs(float(metrics["grad_norm"]) / recorded["grad_norm"][i] - 1) <= 1e-3, f"step {i}"
    given = to_canonical(state.params, CURVE_MODEL["vocab_size"])
    for name, value in given.items():
        np.testing.assert_allclose(value, recorded[f"parameter:{name}"], rtol=0, atol=5e-4, err_msg=name)


def test_packed_sequences_equal_separate_rows() -> None:
    """Two sequences in one row: the outputs of each, and the loss, are those of rows of their own."""
    case = Case(
        name="packed", model=CASES["padded"].model, seq_length=12, lengths=(7, 5), masked=(2, 2), max_predictions=2
    )
    apart = batch(case)
    packed = {
        name: np.concatenate([apart[name][0, :7], apart[name][1, :5]])[None]
        for name in ("input_ids", "token_type_ids", "sequence_ids", "position_ids")
    }
    packed["sequence_ids"][0, 7:] = 2
    for name in ("mlm_positions", "mlm_labels", "mlm_weights", "cls_positions", "nsp_labels", "nsp_weights"):
        packed[name] = np.concatenate([apart[name][0], apart[name][1]])[None]
    packed["mlm_positions"][0, 2:] += 7
    packed["cls_positions"][0, 1] = 7
    network, params = build(case.model, ExecutionConfig())
    apply, gradients = jax.jit(network.apply), compiled_gradients(network)
    one, two = (apply({"params": params}, b) for b in (packed, apart))
    np.testing.assert_allclose(one.sequence_output[0, :7], two.sequence_output[0, :7], atol=5e-6)
    np.testing.assert_allclose(one.sequence_output[0, 7:], two.sequence_output[1, :5], atol=5e-6)
    np.testing.assert_allclose(one.nsp_logits[0], two.nsp_logits[:, 0], atol=5e-6)
    losses = [gradients(params, b) for b in (packed, apart)]
    assert abs(float(losses[0][0] - losses[1][0])) <= 1e-5
    assert_gradients_agree(
        to_canonical(losses[0][1], case.model["vocab_size"]),
        {n: np.asarray(v) for n, v in to_canonical(losses[1][1], case.model["vocab_size"]).items()},
        1e-4,
    )


def test_blank_rows_change_nothing() -> None:
    """A row of padding alone gives finite outputs and neither loss nor gradient."""
    case = CASES["padded"]
    plain = batch(case)
    blank = {name: np.concatenate([value, np.zeros_like(value[:1])]) for name, value in plain.items()}
    blank["position_ids"][-1] = plain["position_ids"][0]
    network, params = build(case.model, ExecutionConfig())
    assert np.all(np.isfinite(jax.jit(network.apply)({"params": params}, blank).sequence_output))
    with_blank, without = (compiled_gradients(network)(params, b) for b in (blank, plain))
    assert abs(float(with_blank[0] - without[0])) <= 2e-6
    gradients = [to_canonical(result[1], case.model["vocab_size"]) for result in (with_blank, without)]
    found, expected = ({n: np.asarray(v) for n, v in result.items()} for result in gradients)
    for name in [name for name in expected if name.endswith("key/bias")]:
        # A bias of the keys adds the same to all scores of a query, so its gradient is 0, but for rounding.
        assert max(np.linalg.norm(result.pop(name)) for result in (found, expected)) <= 1e-6
    assert_gradients_agree(found, expected, 1e-5)
