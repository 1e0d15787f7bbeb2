"""Predictions of classes and values: what is scored is as exact as what the model says."""

import dataclasses
import json

import numpy as np
import pytest
from finetune_cases import PIECES, records
from scipy import stats

from bert_jax.config import ModelConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.task import TaskConfig, TaskDataConfig
from bert_jax.finetuning.evaluation import result_lines, with_intervals
from bert_jax.metrics import value
from bert_jax.metrics.classification import auroc, classification_scores
from bert_jax.records import Record
from bert_jax.tasks.registry import TASKS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer


def scored(kind, found, logits):
    """Scores by name of the predictions, as they are read back from a file."""
    config = FinetuneConfig(
        task=TaskConfig(kind=kind, max_length=32),
        data=TaskDataConfig(labels=("0", "1")),
        model=ModelConfig(vocab_size=len(PIECES)),
    )
    task = TASKS[kind](config, WordPieceTokenizer(PIECES, lower_case=False))
    units = task.featurize(found, training=False)
    predictions = task.decode(found, units, [{"logits": row} for row in logits.astype(np.float32)])
    predictions = json.loads(json.dumps(predictions))
    return {score.name: value(score, len(found)) for score in task.scores(found, predictions)}


@pytest.mark.parametrize("kind", ["classification", "multi_label"])
def test_auroc_of_a_confident_model_is_that_of_its_logits(kind):
    rng = np.random.default_rng(0)
    found = records(400, 0)
    gold = np.array([record.label == "1" for record in found])
    # Odds up to e^32: the float64 next to 1 is reached at e^36.
    margins = (np.where(gold, 1, -1) * rng.uniform(2, 32, 400) * rng.choice([1, -1], 400, p=[0.9, 0.1])).round(2)
    if kind == "multi_label":
        logits = np.stack([-margins, margins], axis=1)
        found = [Record(id=r.id, source=r.source, text=r.text, labels=(r.label,)) for r in found]
    else:
        logits = np.stack([0 * margins, margins], axis=1)
    assert scored(kind, found, logits)["auroc"] == pytest.approx(auroc(gold, margins), abs=1e-12)


def test_values_keep_the_digits_of_float32():
    rng = np.random.default_rng(0)
    gold = rng.normal(size=100)
    found = [Record(id=str(i), source=f"file:{i}", text="w1", label=repr(x)) for i, x in enumerate(gold.tolist())]
    values = (1 + 1e-6 * (gold + rng.normal(size=100))).astype(np.float32)
    expected = stats.spearmanr(gold, values).statistic
    assert scored("regression", found, values[:, None])["spearman"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["classification", "multi_label"])
def test_a_class_may_be_in_the_cut_dev_split_alone(kind):
    found = [dataclasses.replace(record, labels=(record.label,)) for record in records(6, 0)]
    rare = dataclasses.replace(found[0], label="rare", labels=("rare",))
    splits = {"train": found, "dev": [rare]}
    config = FinetuneConfig(task=TaskConfig(kind=kind), data=TaskDataConfig(dev_fraction=0.1))
    assert TASKS[kind].from_data(config, splits).data.labels == ("0", "1", "rare")
    # Of a dev file it is a mistake, which the line of the record says.
    config = FinetuneConfig(task=TaskConfig(kind=kind), data=TaskDataConfig(dev=("dev.tsv",)))
    assert TASKS[kind].from_data(config, splits).data.labels == ("0", "1")


def test_choices_are_numbered():
    record = Record(id="0", source="file:1", text="w1", choices=("w2", "w3"), label="1")
    for labels in ((), ("0", "1")):
        config = FinetuneConfig(data=TaskDataConfig(labels=labels))
        assert TASKS["choice"].from_data(config, {"train": [record]}).data.labels == ("0", "1")
    with pytest.raises(ValueError, match=r"data\.labels: A, B is not allowed; .* \(0, 1\)"):
        TASKS["choice"].from_data(FinetuneConfig(data=TaskDataConfig(labels=("A", "B"))), {"train": [record]})


def test_the_metrics_that_matter_have_intervals():
    """Of many classes not every one."""
    labels = [str(i) for i in range(40)]
    rng = np.random.default_rng(0)
    gold, predicted, chances = np.arange(400) % 40, rng.integers(0, 40, 400), rng.dirichlet(np.ones(40), 400)
    scores = classification_scores(gold, predicted, labels, chances)
    found = with_intervals(scores, 400, 0, "f1/39")
    assert list(found) == [score.name for score in scores]
    without = {name for name, one in found.items() if one["ci95"] is None}
    assert without and all("/" in name for name in without) and "f1/39" not in without
    (line,) = result_lines({"split": "dev", "n": 400, "metrics": found}, "matthews")
    assert line.startswith(f"dev: 400 records  matthews {found['matthews']['value']:.4f} [")
