"""A pretraining objective in a file outside the package: it trains, evaluates, reports and resumes."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from support import masked_lm, objective_of, random_batch, tiny_config, train_synthetic, untimed

from bert_jax.config import dump_yaml, from_dict, to_dict
from bert_jax.config.pretrain import ObjectiveConfig, PretrainConfig
from bert_jax.objectives.registry import check_name, objective_class
from bert_jax.process.exits import Stop
from bert_jax.process.signals import StopRequest
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.state import initial_params

MODULE = Path(__file__).parents[3] / "docs" / "examples" / "smoothed_objective.py"
OPTIONS = f"--objective.module {MODULE} --data.next_sentence none --training.num_steps 8"


class StopAt(StopRequest):
    """A stop request that arrives when it is asked for the so-manieth time."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def reached(self):
        self.calls -= 1
        if self.calls < 0:
            self._handle(15, None)
        return bool(self)


def test_it_trains_evaluates_reports_and_resumes(tmp_path):
    config = tiny_config(OPTIONS, "--training.eval_interval 4 --training.eval_batches 2")
    train_synthetic(config, tmp_path / "whole")
    with pytest.raises(Stop):
        train_synthetic(config, tmp_path / "cut", stop=StopAt(9))
    train_synthetic(config, tmp_path / "cut")
    lines = read_metrics(tmp_path / "whole")
    assert untimed(read_metrics(tmp_path / "cut")) == untimed(lines)
    train = [line for line in lines if "split" not in line]
    assert {"smoothed_loss", "token_loss", "token_accuracy"} < set(train[0]) and "mlm_loss" not in train[0]
    # A mean over steps, and one over tokens.
    assert train[0]["loss"] == pytest.approx(train[0]["smoothed_loss"], rel=0.01)
    evaluations = [line for line in lines if line.get("split") == "eval"]
    assert [line["step"] for line in evaluations] == [4, 8]
    assert evaluations[0]["loss"] > evaluations[1]["loss"] == evaluations[1]["token_loss"]
    page = (tmp_path / "cut" / "report.html").read_text()
    assert "token loss (nats)" in page and "held-out token loss" in page and "sentence-pair" not in page
    data = json.loads((tmp_path / "cut" / "report_data.json").read_text())
    assert data["evaluation"]["token_loss"] == evaluations[1]["token_loss"]
    assert "token " in (tmp_path / "cut" / "train.log").read_text()


def test_another_objective_does_not_continue_its_checkpoint(tmp_path):
    train_synthetic(tiny_config(OPTIONS, "--training.num_steps 2"), tmp_path / "w")
    with pytest.raises(ValueError, match=r"objective: smoothed_objective\.py -> masked_lm"):
        train_synthetic(tiny_config("--data.next_sentence none"), tmp_path / "w")
    assert not (tmp_path / "w" / "damaged_checkpoints").exists()


def test_its_loss_is_that_of_the_smoothed_targets():
    config = tiny_config(OPTIONS, "--model.hidden_dropout 0 --model.attention_dropout 0")
    objective, batch = objective_of(config), random_batch(config)
    params = initial_params(objective.model, 1)
    logits = objective.model.apply({"params": params}, batch).mlm_logits[..., : config.model.vocab_size]
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    targets = 0.9 * np.eye(config.model.vocab_size)[batch["mlm_labels"]] + 0.1 / config.model.vocab_size
    expected = -np.sum(targets * log_p * batch["mlm_weights"][..., None])
    total, weight = objective.sums(params, batch, None, start=None, axis=None)["smoothed_loss"]
    assert float(total) == pytest.approx(expected, rel=1e-5) and weight == batch["mlm_weights"].sum()


def test_masked_lm_is_the_default_and_of_configs_without_the_section():
    config = tiny_config()
    stored = to_dict(config)
    assert stored.pop("objective") == {"name": "masked_lm", "module": ""}
    assert from_dict(PretrainConfig, stored) == config and "objective:\n" in dump_yaml(config)
    assert type(masked_lm(objective_of(config).model)) is objective_class(ObjectiveConfig())


def test_an_unknown_name_and_a_file_without_the_class_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"objective\.name: 'masked_ml' .*did you mean 'masked_lm'"):
        check_name(ObjectiveConfig(name="masked_ml"))
    (tmp_path / "empty.py").write_text("")
    for file in ("empty.py", "absent.py"):
        with pytest.raises(ValueError, match=rf"objective\.module: .*{file}.* class Objective"):
            objective_class(ObjectiveConfig(module=str(tmp_path / file)))
