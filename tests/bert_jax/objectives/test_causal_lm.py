"""The causal language model: targets, loss, its curve against torch, a run, its resume, and its refusals."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from curves import assert_as_one, assert_curve
from flax import linen as nn
from golden.cases import (
    CURVE_MODEL,
    causal_batch,
    original_tokens,
    weights,
)
from support import objective_of, random_batch, random_params, sums_of, tiny_config, whole_and_resumed

from bert_jax.config import DataConfig, ModelConfig, PretrainConfig
from bert_jax.interop.readers import read_weights
from bert_jax.model import from_canonical
from bert_jax.objectives.causal_lm import CausalLm, next_weights, original_ids
from bert_jax.training.state import abstract_params

OPTIONS = "--objective.name causal_lm --model.attention causal --data.next_sentence none"
RECORDED = Path(__file__).parents[2] / "golden" / "fixtures" / "causal_lm.npz"


def test_logits_up_to_a_token_do_not_see_the_next_one():
    objective, batch = objective_of(tiny_config(OPTIONS)), random_batch(tiny_config(OPTIONS), rows=2)
    params = random_params(objective.model, 0)
    logits = jax.jit(lambda ids: objective.model.apply({"params": params}, batch | {"input_ids": ids}))
    before, changed = np.asarray(logits(batch["input_ids"])), batch["input_ids"].copy()
    changed[:, 6] += 1
    after = np.asarray(logits(changed))
    assert np.array_equal(before[:, :6], after[:, :6]) and not np.array_equal(before[:, 6], after[:, 6])


def test_masked_tokens_are_put_back():
    batch = random_batch(tiny_config(OPTIONS), rows=3)
    ids = np.asarray(original_ids(batch))
    is_masked = np.zeros_like(ids, bool)
    for row in range(3):
        places = batch["mlm_positions"][row][batch["mlm_weights"][row] > 0]
        is_masked[row, places] = True
        assert (ids[row, places] == batch["mlm_labels"][row][batch["mlm_weights"][row] > 0]).all()
    assert is_masked.any() and (ids[~is_masked] == batch["input_ids"][~is_masked]).all()


def test_the_last_token_of_a_sequence_predicts_nothing():
    weights = np.asarray(next_weights(np.array([[1, 1, 2, 2, 0, 0]])))
    assert weights.tolist() == [[1, 0, 1, 0, 0]]


@pytest.mark.slow
def test_its_loss_is_the_mean_over_next_tokens():
    config = tiny_config(OPTIONS, "--model.hidden_dropout 0 --model.attention_dropout 0")
    objective, batch = objective_of(config), random_batch(config)
    params = random_params(objective.model, 1)
    ids = np.asarray(original_ids(batch))
    apply = jax.jit(objective.model.apply)
    logits = np.asarray(apply({"params": params}, batch | {"input_ids": ids}), np.float64)
    assert np.isneginf(logits[..., config.model.vocab_size :]).all()
    logits = logits[..., : config.model.vocab_size]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_p[:, :-1], ids[:, 1:, None], -1)[..., 0]
    used = (batch["sequence_ids"][:, 1:] > 0).astype(float)
    total, weight = sums_of(objective, params, batch)["lm_loss"]
    assert float(weight) == used.sum() == float(objective.denominators(batch)["lm_loss"])
    assert float(total) == pytest.approx((nll * used).sum(), rel=1e-5)


def of_the_curve(mesh: Any = None) -> CausalLm:
    """The objective of the recorded curve, without dropout."""
    model = ModelConfig(attention="causal", hidden_dropout=0.0, attention_dropout=0.0, **CURVE_MODEL)
    data = DataConfig(next_sentence="none", seq_length=16, max_predictions=3)
    return CausalLm(PretrainConfig(model=model, data=data), mesh)


def curve_weights() -> dict[str, np.ndarray]:
    """The shared weights of what its model has."""
    return {k: v for k, v in weights(CURVE_MODEL).items() if k.startswith(("embeddings/", "encoder/"))}


@pytest.mark.slow
def test_logits_equal_torch():
    """Of the encoder with torch's own modules (tests/golden/record_causal.py), at every token."""
    objective, batch = of_the_curve(), causal_batch(0)
    like = nn.unbox(abstract_params(objective.model))
    params = from_canonical(curve_weights(), like, objective.config.model.vocab_size)
    ids = original_tokens(batch)
    logits = np.asarray(jax.jit(objective.model.apply)({"params": params}, batch | {"input_ids": ids}))
    is_token = batch["sequence_ids"] > 0
    with np.load(RECORDED) as recorded:
        expected = recorded["logits"][is_token]
    np.testing.assert_allclose(logits[is_token, : CURVE_MODEL["vocab_size"]], expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_loss_curve_equals_torch():
    """50 whole training steps: targets, forward, backward, clipping, optimizer and schedule."""
    with np.load(RECORDED) as arrays:
        recorded = dict(arrays)
    assert_curve(of_the_curve(), curve_weights(), causal_batch, recorded, total="loss", names={}, falls_to=0.75)


@pytest.mark.slow
def test_devices_and_microbatches_are_as_one():
    assert_as_one(of_the_curve, curve_weights(), causal_batch(1))


def test_it_trains_evaluates_reports_and_resumes(tmp_path, curves):
    config = tiny_config(OPTIONS, "--training.num_steps 8 --training.eval_interval 4 --training.eval_batches 2")
    lines = whole_and_resumed(config, tmp_path, 9)
    evaluations = [line for line in lines if line.get("split") == "eval"]
    assert evaluations[0]["loss"] > evaluations[1]["loss"] == evaluations[1]["lm_loss"]
    assert evaluations[1]["perplexity"] == pytest.approx(np.exp(evaluations[1]["loss"]))
    data = json.loads((tmp_path / "cut" / "report_data.json").read_text())
    assert data["samples"] and all(sample["prompt"] and sample["continuation"] for sample in data["samples"])
    page = (tmp_path / "cut" / "report.html").read_text()
    assert "next-token loss (nats)" in page and "held-out perplexity" in page
    assert "perplexity" in (tmp_path / "cut" / "train.log").read_text()
    spec = read_weights(tmp_path / "cut").spec
    assert spec.model.attention == "causal" and not spec.heads.mlm


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ("--objective.name causal_lm --data.next_sentence none", "model.attention"),
        ("--objective.name causal_lm --model.attention causal", "data.next_sentence"),
    ],
)
def test_an_encoder_that_sees_its_target_and_sentence_pairs_are_refused(options, key):
    with pytest.raises(ValueError, match=rf"{key}: .* causal_lm"):
        objective_of(tiny_config(options))
