"""What every task measures, and of which records: known, and task.metric checked, before anything is trained."""

import dataclasses

import pytest
from golden.task_cases import PIECES, TASK_CASES

from bert_jax.config import ModelConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning.evaluation import blank_scores
from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.records import Answer, Record
from bert_jax.start.start import Start
from bert_jax.tasks.registry import TASKS

CASES = {case.name: case for case in TASK_CASES}
AVERAGES = ("micro", "macro", "weighted")


def job_of(case, metric=""):
    """The job of a case, whose dev records are its training records."""
    fields = [
        one | {"answers": tuple(Answer(**answer) for answer in one["answers"])} if "answers" in one else one
        for one in case.records
    ]
    records = [Record(id=str(i), source=f"file:{i}", **one) for i, one in enumerate(fields)]
    options = {"task": {"kind": case.kind, "max_length": 64, "metric": metric}, **case.options}
    plain = FinetuneConfig()
    sections = {name: dataclasses.replace(getattr(plain, name), **given) for name, given in options.items()}
    start = Start(tokenizer_content=("\n".join(PIECES) + "\n").encode())
    config = FinetuneConfig(model=ModelConfig(**case.model), **sections)
    return FinetuneJob(config, {"train": records, "dev": records}, (), start), records


def names_of(case):
    job, records = job_of(case)
    units = job.task.featurize(records, training=False)
    return [score.name for score in blank_scores(job.task, job.model, records, units)]


def of_classes(names):
    """Precision, recall and F1 in all averages and of each class."""
    return {f"{kind}{end}" for kind in ("precision", "recall", "f1") for end in
            (*(f"_{average}" for average in AVERAGES), *(f"/{name}" for name in names))}  # fmt: skip


THREE = of_classes(("no", "perhaps", "yes"))
EXPECTED = {
    "classification": ("accuracy", THREE | {"matthews", "auroc", "log_loss"}),
    "multi_label": ("accuracy", THREE | {"mean_average_precision", "auroc"}),
    "regression": ("pearson", {"spearman", "mse", "mae"}),
    "choice": ("accuracy", of_classes("012") | {"matthews"}),
    "qa": ("f1", {"exact", "f1/has_answer", "f1/no_answer", "exact/has_answer", "exact/no_answer",
                  *(f"{name}/best_threshold{end}" for name in ("f1", "exact") for end in ("", "_value"))}),
    "crf": ("f1", {"precision", "recall", "accuracy"} | {f"{k}/{n}" for k in ("precision", "recall", "f1")
                                                        for n in "AB"}),
    "joint": ("sentence_accuracy", {"intent_accuracy", "slot_accuracy"} | {
        f"slot_{k}{end}" for k in ("precision", "recall", "f1") for end in ("", "/A", "/B")}),
    "pair_softmax": ("accuracy", THREE | {"matthews", "auroc", "log_loss"}),
    "negatives": ("triplet_accuracy", set()),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_the_metrics_of_a_task(name):
    """The first one chooses where task.metric is not given."""
    first, *others = names_of(CASES[name])
    assert (first, set(others)) == EXPECTED[name] and len(others) == len(EXPECTED[name][1])


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["classification", "regression", "qa"])
def test_another_metric_is_refused_before_training(name):
    first, others = EXPECTED[name]
    with pytest.raises(ValueError) as raised:
        job_of(CASES[name], "bleu")
    said = str(raised.value)
    assert said.startswith("task.metric: 'bleu' is not allowed; allowed: ") and "\n" not in said
    allowed = said.partition("allowed: ")[2].partition(" and ")[0].split(", ")
    parts = {one for one in others if "/" in one}
    assert allowed[0] == first and set(allowed) == {first, *others} - parts
    assert not parts or f" and {len(parts)} with a suffix, such as " in said
    job_of(CASES[name], sorted({first, *others})[-1])


GOLD = {"label": "yes", "labels": ("yes",), "tags": ("O",), "answers": ()}
NEEDED = {
    "classification": {"label"}, "regression": {"label"}, "choice": {"label"}, "multi_label": {"labels"},
    "tagging": {"tags"}, "joint": {"tags", "label"}, "qa": {"answers"}, "sentence": {"label"},
}  # fmt: skip


@pytest.mark.parametrize("kind", TASKS)
def test_a_record_is_scored_when_it_says_what_the_task_asks_for(kind):
    """A file may hold what other tasks ask for too."""
    given = {name: GOLD[name] for name in NEEDED[kind]}
    assert TASKS[kind].is_labelled(Record(id="0", source="", **given))
    for name in given:
        without = {other: one for other, one in GOLD.items() if other != name}
        assert not TASKS[kind].is_labelled(Record(id="0", source="", **without))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "metric", "label", "is_defined"),
    [
        ("classification", "auroc", "yes", False),
        ("classification", "accuracy", "yes", True),
        ("regression", "", "1.5", False),
        ("regression", "spearman", "2", False),
        ("regression", "mse", "2", True),
    ],
)
def test_a_metric_that_dev_leaves_undefined_is_named_before_training(name, metric, label, is_defined):
    case = CASES[name]
    job, records = job_of(case, metric)
    assert job._evaluator.notes == ()
    one = {"train": records, "dev": [dataclasses.replace(record, label=label) for record in records]}
    start = Start(tokenizer_content=("\n".join(PIECES) + "\n").encode())
    config = dataclasses.replace(job.config, data=dataclasses.replace(job.config.data, labels=()))
    lines = FinetuneJob(config, one, (), start)._evaluator.notes
    assert len(lines) == (not is_defined)
    assert is_defined or lines[0].startswith(f"WARNING: dev: {metric or 'pearson'} is undefined")
