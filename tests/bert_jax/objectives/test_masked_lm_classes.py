"""Classes beside masked tokens and sentence pairs: the curve against torch, a run, its head, and its refusals."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from curves import assert_curve
from golden.cases import (
    CURVE_CLASS_WEIGHT,
    CURVE_CLASSES,
    CURVE_MODEL,
    class_batch,
    class_weights,
)
from support import (
    objective_of,
    random_batch,
    random_params,
    relative_difference,
    sums_of,
    tiny_config,
    whole_and_resumed,
)

from bert_jax.config import DataConfig, ModelConfig, PretrainConfig
from bert_jax.config.objective import ObjectiveConfig
from bert_jax.interop.readers import read_weights
from bert_jax.model import to_canonical
from bert_jax.objectives.masked_lm_classes import MaskedLmClasses
from bert_jax.optim import make_optimizer
from bert_jax.parallel import make_mesh, to_global
from bert_jax.training.state import abstract_state, make_prng_key
from bert_jax.training.step import loss_and_gradients

OPTIONS = "--objective.name masked_lm_classes --data.label_field topic --data.classes law medicine code"
RECORDED = Path(__file__).parents[2] / "golden" / "fixtures" / "masked_lm_classes.npz"


@pytest.mark.slow
def test_loss_curve_equals_torch():
    """50 whole training steps from given weights (tests/golden/record_classes.py)."""
    config = PretrainConfig(
        model=ModelConfig(hidden_dropout=0.0, attention_dropout=0.0, **CURVE_MODEL),
        data=DataConfig(seq_length=16, max_predictions=3, label_field="topic", classes=CURVE_CLASSES),
        objective=ObjectiveConfig(name="masked_lm_classes", class_weight=CURVE_CLASS_WEIGHT),
    )
    with np.load(RECORDED) as recorded:
        expected = dict(recorded)
    assert expected["class_loss"][-1] < 0.7 * expected["class_loss"][0]
    objective, names = MaskedLmClasses(config, None), {"class_loss": 1.0}
    assert_curve(objective, class_weights(), class_batch, expected, total="loss", names=names, falls_to=1.0)


def run(config: PretrainConfig, *, accumulation: int = 1, devices: int = 1) -> tuple[float, dict[str, Any]]:
    """Loss and canonical gradients of a batch with dropout."""
    mesh = make_mesh(config.mesh, jax.devices()[:devices]) if devices > 1 else None
    objective, batch = objective_of(config, mesh), random_batch(config, rows=8)
    params, key = random_params(objective.model), make_prng_key(config.execution, 1)
    if mesh is not None:
        like = abstract_state(config, objective.model, make_optimizer(config.optimizer), mesh).params
        params = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, like))
        batch = to_global(batch, mesh, 8)
    compute = jax.jit(lambda p, b: loss_and_gradients(objective, p, b, key, accumulation))
    loss, gradients, *_ = compute(params, batch)
    return float(loss), to_canonical(jax.device_get(gradients), config.model.vocab_size)


@pytest.mark.slow
def test_devices_and_accumulation_are_as_one():
    loss, gradients = run(tiny_config(OPTIONS))
    other, others = run(tiny_config(OPTIONS, "--mesh.data 2 --mesh.fsdp 2"), accumulation=2, devices=4)
    assert other == pytest.approx(loss, rel=1e-6)
    assert relative_difference(others, gradients) <= 1e-6


def test_a_batch_without_classes_has_the_loss_of_masked_lm():
    config = tiny_config(OPTIONS, "--model.hidden_dropout 0 --model.attention_dropout 0")
    objective, batch = objective_of(config), random_batch(config, rows=8)
    params = random_params(objective.model)

    compute = jax.jit(lambda batch: sums_of(objective, params, batch))

    def loss_of(batch: dict[str, np.ndarray]) -> dict[str, float]:
        denominators = objective.denominators(batch)
        sums = jax.device_get(compute(batch))
        return {name: float(sums[name][0] / value) for name, value in denominators.items()}

    with_classes, without = loss_of(batch), loss_of(batch | {"document_classes": np.zeros((8, 1), np.int32)})
    assert with_classes["class_loss"] > 0.5 and without["class_loss"] == 0
    assert all(with_classes[name] == without[name] for name in ("mlm_loss", "nsp_loss"))


@pytest.mark.slow
def test_it_trains_evaluates_reports_resumes_and_its_head_is_read(tmp_path, curves):
    config = tiny_config(OPTIONS, "--training.num_steps 8 --training.eval_interval 4 --training.eval_batches 2")
    lines = whole_and_resumed(config, tmp_path, 9)
    evaluations = [line for line in lines if line.get("split") == "eval"]
    for line in evaluations:
        assert line["loss"] == pytest.approx(line["mlm_loss"] + line["nsp_loss"] + line["class_loss"])
    assert evaluations[0]["mlm_loss"] > evaluations[1]["mlm_loss"]
    data = json.loads((tmp_path / "cut" / "report_data.json").read_text())
    assert any(line.startswith("classes: accuracy") for line in data["summary"])
    assert "class accuracy" in (tmp_path / "cut" / "report.html").read_text()
    spec = read_weights(tmp_path / "cut").spec
    assert spec.heads.sequence_labels == ("law", "medicine", "code") and spec.heads.mlm and spec.heads.nsp


def test_without_classes_it_is_refused():
    with pytest.raises(ValueError, match=r"data.classes: none are given, .* data.label_field"):
        objective_of(tiny_config("--objective.name masked_lm_classes"))
    for words in (
        "--data.label_field topic",
        "--data.classes law code",
        "--data.label_field t --data.classes law law",
    ):
        with pytest.raises(ValueError, match=r"data.classes: .* is not allowed"):
            tiny_config(words)
