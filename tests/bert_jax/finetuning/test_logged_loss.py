"""The loss that the evaluations of a task log, beside the training loss."""

import json

import jax
import numpy as np
import pytest
from finetune_cases import SPLITS, configured, lines, run
from support import random_params

from bert_jax.finetuning.evaluation import Predictor
from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.finetuning.supervision import LABELS_ONLY
from bert_jax.finetuning.task_objective import task_display
from bert_jax.parallel import make_mesh
from bert_jax.records import Answer, Record
from bert_jax.training.logging.report import run_page
from bert_jax.training.logging.run_files import read_run


def questions(count):
    """Questions of different lengths about a passage that contains the answer."""
    passages = [" ".join(f"w{(number + place) % 60}" for place in range(3 + number % 9)) for number in range(count)]
    return [
        Record(
            id=str(i),
            source=f"file:{i}",
            text=f"w{i}",
            text_pair=one,
            answers=(Answer(text=one.split()[i % 3], start=-1),),
        )
        for i, one in enumerate(passages)
    ]


def tagged(count):
    words = [("w1", f"w{i}", "w2")[: 1 + i % 3] for i in range(count)]
    return [
        Record(id=str(i), source=f"file:{i}", words=one, tags=("O", "B-X", "O")[: len(one)])
        for i, one in enumerate(words)
    ]


def test_it_is_the_mean_over_the_units_of_all_batches(source, tmp_path):
    config, start = configured(source, tmp_path / "w", "--task.kind qa")
    job = FinetuneJob(config, {"train": questions(4), "dev": questions(200)}, (), start)
    network = job.model.clone(heads=job.resolved.heads, all_layers=False)
    predictor, units = (
        Predictor(job.task, network, make_mesh(config.mesh, jax.devices()[:1])),
        job.resolved.inputs["dev"],
    )
    outputs = predictor.outputs(random_params(job.model), units)
    expected = [
        np.mean([np.log(np.exp(one[f"{side}_logits"]).sum()) - one[f"{side}_logits"][unit.targets[side]]
                 for side in ("start", "end")])
        for unit, one in zip(units, outputs, strict=True)
    ]  # fmt: skip
    assert np.std(expected) > 0.01 and predictor.loss == pytest.approx(np.mean(expected), rel=1e-5)
    unlabeled = [Record(id="x", source="file:1", text="w1", text_pair="w2 w3")]
    predictor.outputs(random_params(job.model), job.task.featurize(unlabeled, training=False))
    assert predictor.loss is None


@pytest.mark.slow
def test_evaluations_of_a_tagger_log_it_and_its_chart_has_both_curves(source, tmp_path):
    run(source, tmp_path / "w", "--task.kind tagging", {"train": tagged(40), "dev": tagged(12)})
    evaluations = [line for line in lines(tmp_path / "w") if line.get("split") == "dev"]
    assert len(evaluations) >= 2 and all(0 < line["loss"] < 5 for line in evaluations)
    assert "loss" not in json.loads((tmp_path / "w/metrics.json").read_text())[0]["metrics"]
    page = run_page(read_run(tmp_path / "w"), task_display(LABELS_ONLY))
    assert page.count("<h3>dev: loss</h3>") == 1 and "<h3>loss</h3>" not in page
    # Another loss is a part of that of training, so they cannot be compared.
    run(
        source,
        tmp_path / "v",
        "--task.kind tagging --loss.mlm_weight 0.1",
        {"train": tagged(40), "dev": tagged(12)},
    )
    assert not any("loss" in line for line in lines(tmp_path / "v") if line.get("split") == "dev")


@pytest.mark.slow
def test_of_regression_it_is_the_squared_error(source, tmp_path):
    run(source, tmp_path / "w", "--task.kind regression", SPLITS)
    evaluations = [line for line in lines(tmp_path / "w") if line.get("split") == "dev"]
    assert [line["loss"] for line in evaluations] == pytest.approx([line["mse"] for line in evaluations], rel=1e-5)
    assert len(evaluations) >= 2
