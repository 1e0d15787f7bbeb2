"""A pretraining objective in a file outside the package: it trains, evaluates, reports and resumes."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh
from support import (
    masked_lm,
    objective_of,
    random_batch,
    random_params,
    sums_of,
    tiny_config,
    train_synthetic,
    whole_and_resumed,
)

from bert_jax import registry
from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig, dump_yaml, from_dict, to_dict
from bert_jax.config.objective import ObjectiveConfig
from bert_jax.config.pretrain import PretrainConfig
from bert_jax.contrib.ancestors.config import GloveConfig, Word2VecConfig
from bert_jax.contrib.compression.config import DistillationConfig
from bert_jax.interop.readers import read_weights
from bert_jax.model import BertForPretraining, BertModel, to_canonical
from bert_jax.objectives.objective import PretrainObjective, denominator, padding_sums, weighted_cross_entropy
from bert_jax.objectives.registry import objective_class
from bert_jax.parallel import make_mesh
from bert_jax.training.programs import pretraining_batch, train_programs

MODULE = Path(__file__).parents[3] / "docs" / "examples" / "smoothed_objective.py"
OPTIONS = f"--objective.module {MODULE} --data.next_sentence none --training.num_steps 8"


@pytest.mark.slow
def test_it_trains_evaluates_reports_and_resumes(tmp_path, curves):
    config = tiny_config(OPTIONS, "--training.eval_interval 4 --training.eval_batches 2")
    lines = whole_and_resumed(config, tmp_path, 9)
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


@pytest.mark.slow
def test_another_objective_does_not_continue_its_checkpoint(tmp_path):
    train_synthetic(tiny_config(OPTIONS, "--training.num_steps 2"), tmp_path / "w")
    with pytest.raises(ValueError, match=r"objective: smoothed_objective\.py -> masked_lm"):
        train_synthetic(tiny_config("--data.next_sentence none"), tmp_path / "w")
    assert not (tmp_path / "w" / "damaged_checkpoints").exists()


@pytest.mark.slow
def test_its_loss_is_that_of_the_smoothed_targets():
    config = tiny_config(OPTIONS, "--model.hidden_dropout 0 --model.attention_dropout 0")
    objective, batch = objective_of(config), random_batch(config)
    params = random_params(objective.model, 1)
    logits = jax.jit(objective.model.apply)({"params": params}, batch).mlm_logits[..., : config.model.vocab_size]
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    targets = 0.9 * np.eye(config.model.vocab_size)[batch["mlm_labels"]] + 0.1 / config.model.vocab_size
    expected = -np.sum(targets * log_p * batch["mlm_weights"][..., None])
    sums = jax.jit(lambda params, batch: sums_of(objective, params, batch))
    total, weight = sums(params, batch)["smoothed_loss"]
    assert float(total) == pytest.approx(expected, rel=1e-5) and weight == batch["mlm_weights"].sum()


def test_masked_lm_is_the_default_and_of_configs_without_the_section():
    config = tiny_config()
    stored = to_dict(config)
    assert stored.pop("objective") == {"name": "masked_lm", "module": "", "z_loss": 0.0}
    assert from_dict(PretrainConfig, stored) == config and "objective:\n" in dump_yaml(config)
    assert type(masked_lm(objective_of(config).model)) is objective_class(ObjectiveConfig())


def test_an_unknown_name_and_a_file_without_the_class_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"objective\.name: 'masked_ml' .*did you mean 'masked_lm'"):
        objective_class(ObjectiveConfig(name="masked_ml"))
    (tmp_path / "empty.py").write_text("")
    old = MODULE.read_text().replace("params, aux, batch, key, *, axis", "params, batch, key, *, start, axis")
    (tmp_path / "old.py").write_text(old)
    with pytest.raises(ValueError, match=r"old\.py: sums has the arguments of another version .*; write sums\("):
        objective_class(ObjectiveConfig(module=str(tmp_path / "old.py")))
    for name in ("carried_sums", "taught_sums", "set_teacher"):
        (tmp_path / "old.py").write_text(f"{MODULE.read_text()}\n    def {name}(self): ...\n")
        with pytest.raises(ValueError, match=rf"old\.py: {name} is a method of another version.*; write sums\("):
            objective_class(ObjectiveConfig(module=str(tmp_path / "old.py")))
    for file in ("empty.py", "absent.py"):
        with pytest.raises(ValueError, match=rf"objective\.module: .*{file}.* class Objective"):
            objective_class(ObjectiveConfig(module=str(tmp_path / file)))


@pytest.mark.parametrize("name", ["StatefulObjective", "TaughtObjective", "PooledObjective"])
def test_a_base_class_of_another_version_is_refused(name, tmp_path, monkeypatch):
    file, line = tmp_path / "imports_old.py", f"from bert_jax.objectives.objective import {name}"
    file.write_text(f"{line} as Objective\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_ADDED", {})
    registry.add("objectives", "imports_old", "imports_old:Objective")
    for given in ({"module": str(file)}, {"name": "imports_old"}):
        with pytest.raises(ValueError, match=rf"^objective\.\w+.* cannot import name '{name}'"):
            objective_class(ObjectiveConfig(**given))
    monkeypatch.undo()
    registry.names.cache_clear()


class TwoNetworks(nn.Module):
    """A generator that replaces masked tokens, and a critic that finds them (Clark et al. 2020)."""

    config: ModelConfig
    execution: ExecutionConfig
    mesh: Mesh | None = None

    def setup(self):
        small = dataclasses.replace(self.config, intermediate_size=self.config.intermediate_size // 2)
        self.generator = BertForPretraining(small, self.execution, False, self.mesh)
        heads = HeadsConfig(token_labels=("original", "replaced"))
        self.critic = BertModel(self.config, self.execution, heads, mesh=self.mesh)

    def __call__(self, features, dropout_key=None):
        logits = self.generator(features, dropout_key).mlm_logits
        rows = jnp.arange(len(logits))[:, None]
        ids = features["input_ids"].at[rows, features["mlm_positions"]].set(jnp.argmax(logits, axis=-1))
        return logits, self.critic({**features, "input_ids": ids}, dropout_key).token_logits


class ReplacedTokens(PretrainObjective):
    """Two losses on two networks in one parameter tree."""

    @staticmethod
    def make_model(config, mesh):
        return TwoNetworks(config.model, config.execution, mesh)

    def denominators(self, batch):
        return {"mlm_loss": denominator(batch["mlm_weights"]), "token_loss": jnp.float32(batch["input_ids"].size)}

    def sums(self, params, aux, batch, key, *, axis):
        logits, replaced = self.model.apply({"params": params}, batch, key)
        ids = batch["input_ids"]
        sums = weighted_cross_entropy("mlm", logits, batch["mlm_labels"], batch["mlm_weights"])
        sums |= weighted_cross_entropy("token", replaced, 0 * ids, jnp.ones(ids.shape))
        return sums | padding_sums(batch["sequence_ids"]), aux.carried


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param("", marks=pytest.mark.slow), "--execution.scan_layers true --mesh.data 2 --mesh.tensor 2"],
)
def test_two_networks_are_one_parameter_tree(options):
    config = tiny_config("--data.next_sentence none --optimizer.ema_decay 0.9 --model.num_layers 2", options)
    objective = ReplacedTokens(config, make_mesh(config.mesh, jax.devices()[: 4 if options else 1]))
    programs = train_programs(objective)
    vocab_size = config.model.vocab_size
    drawn = jax.eval_shape(lambda: to_canonical(random_params(objective.model, 0), vocab_size))
    for tree in (programs.abstract.params, programs.abstract.ema):
        assert set(jax.eval_shape(lambda tree: to_canonical(tree, vocab_size), tree)) == set(drawn)
    shapes = {name: leaf.shape for name, leaf in drawn.items() if name.endswith("intermediate/kernel")}
    assert len(shapes) == 4 and {name.partition("/")[0] for name in shapes} == {"generator", "critic"}
    assert set(shapes.values()) == {(32, 32), (32, 64)}
    out = programs.lower(pretraining_batch(objective, 8)).out_info
    assert jax.tree.structure(out[0]) == jax.tree.structure(programs.abstract)


@pytest.mark.slow
def test_reading_a_workdir_does_not_run_its_file(tmp_path):
    train_synthetic(tiny_config(OPTIONS, "--training.num_steps 2"), tmp_path / "w")
    ran = tmp_path / "ran"
    (tmp_path / "hostile.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = tmp_path / "w" / "config.yaml"
    config.write_text(config.read_text().replace(str(MODULE), str(tmp_path / "hostile.py")))
    with pytest.raises(ValueError, match="objective"):  # not the objective of the checkpoint
        read_weights(tmp_path / "w")
    config.write_text(config.read_text().replace(str(tmp_path / "hostile.py"), str(MODULE)))
    assert read_weights(tmp_path / "w").spec.heads.mlm and not ran.exists()


@pytest.mark.parametrize(
    ("section", "names"), [(DistillationConfig, "distillation"), (GloveConfig, "glove"), (Word2VecConfig, "cbow")]
)
def test_a_class_that_needs_the_options_of_another_name(section, names):
    with pytest.raises(ValueError, match=f"masked_lm lacks options of objective.module; set {names}"):
        section.required(ObjectiveConfig(), names)
    assert section.required(section.of(name=names), names).name == names
