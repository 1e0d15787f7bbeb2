"""The answer without a text, beside the scores of a run, and the warning of a run that is not better."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
from builders import words
from finetune_cases import run, saved_model

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning.evaluation import baseline, result_lines, scores_of, warning_lines
from bert_jax.finetuning.resolve import ResolvedTask
from bert_jax.finetuning.supervision import LABELS_ONLY
from bert_jax.metrics import value as value_of
from bert_jax.records import Answer, Record
from bert_jax.tasks.registry import task_class
from bert_jax.tokenization import WordPieceTokenizer

TOKENIZER = WordPieceTokenizer(words(9), lower_case=False)


def resolved(kind, train, dev, **options):
    """A resolved task; ``options``: fields by section."""
    config = FinetuneConfig()
    sections = {"task": {"kind": kind}, **options}
    config = dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    )
    splits = {"train": train, "dev": dev}
    config = task_class(config).from_data(config, splits)
    task = task_class(config)(config, TOKENIZER, train)
    return ResolvedTask(config, task, splits, {}, ("dev",), (), LABELS_ONLY)


def record(**fields):
    return Record(**({"id": "1", "source": "file:1", "text": "w1"} | fields))


def classes(text):
    return [record(label=label) for label in text]


def certain(labels, label):
    return {"label": label, "score": 1.0, "probabilities": {one: float(one == label) for one in labels}}


@pytest.mark.parametrize(("predicted", "is_beaten"), [("aaab", True), ("aaaa", False), ("bbbb", False)])
def test_the_most_frequent_class_of_training(predicted, is_beaten):
    found = resolved("classification", classes("aaabb"), classes("aaab"))
    predictions = [certain("ab", label) for label in predicted]
    for metric, value in (("accuracy", 0.75), ("", 0.75), ("f1_macro", 3 / 7)):
        known = baseline(found, "dev", predictions, metric, {})
        assert known == {
            "answer": "class a for all", "metric": metric or "accuracy", "value": pytest.approx(value),
            "is_beaten": is_beaten,
        }  # fmt: skip
    assert baseline(found, "dev", predictions, "matthews", {})["value"] == 0


def test_the_most_frequent_labels_and_choice():
    train = [record(labels=labels) for labels in (("x",), ("x", "y"), ("y", "x"), ())]
    found = resolved("multi_label", train, [record(labels=("x", "y")), record(labels=())])
    one = {"labels": ["x"], "probabilities": {"x": 0.9, "y": 0.1}}
    known = baseline(found, "dev", [one, one], "", {})
    assert (known["answer"], known["value"], known["is_beaten"]) == ("labels x, y for all", 0.5, False)
    choices = [record(label=label, choices=("w1", "w2", "w3")) for label in "2210"]
    found = resolved("choice", choices, choices)
    known = baseline(found, "dev", [{"choice": int(one)} for one in "2212"], "", {})
    assert (known["answer"], known["value"], known["is_beaten"]) == ("choice 2 for all", 0.5, True)


@pytest.mark.parametrize(
    ("values", "is_beaten"),
    [
        ((1.0, 2.0, 3.0), True), ((7.0, 8.0, 9.0), True), ((2.2, 2.2, 2.2), True), ((9.0, 9.0, 9.0), False),
        ((9.0, 8.0, 7.0), False),
    ],
)  # fmt: skip
def test_a_mean_has_errors_but_no_correlation(values, is_beaten):
    train = [record(label=label) for label in ("1", "2", "3", "4")]
    found = resolved("regression", train, train[:3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = baseline(found, "dev", [{"value": value} for value in values], "spearman", {})
    assert known["answer"] == "the training mean 2.5 for all" and known["is_beaten"] is is_beaten
    assert known["metric"] == "mse" and known["value"] == pytest.approx((1.5**2 + 2 * 0.5**2) / 3)


def test_the_most_frequent_tag_finds_no_entity():
    train = [record(words=("w1", "w2", "w3"), tags=("O", "O", "B-x"), label="a")] * 2
    tokens = {"tokens": [{"text": "w1", "label": tag, "score": 0.5} for tag in ("O", "O", "O")]}
    found = resolved("tagging", train, train)
    known = baseline(found, "dev", [tokens] * 2, "", {})
    assert known == {"answer": "tag O for all", "metric": "f1", "value": 0.0, "is_beaten": False}
    assert baseline(found, "dev", [tokens] * 2, "accuracy", {})["value"] == pytest.approx(2 / 3)
    both = [*train, record(words=("w1",), tags=("O",), label="b")]
    found = resolved("joint", both, both)
    right = [{**tokens, **certain("ab", "a")}] * 2 + [{"tokens": tokens["tokens"][:1], **certain("ab", "b")}]
    known = baseline(found, "dev", right, "intent_accuracy", {})
    assert (known["answer"], known["is_beaten"]) == ("class a for all, tag O for all", True)
    assert known["value"] == pytest.approx(2 / 3)


def test_no_answer_for_every_question_where_that_is_an_answer():
    questions = [record(text_pair="w1 w2", answers=answers) for answers in ((Answer(text="w1", start=0),), (), ())]
    span = {"answer": "w1", "best_answer": "w1", "score": 1.0, "no_answer_score": 0.0}
    found = resolved("qa", questions, questions, qa={"no_answer": True})
    known = baseline(found, "dev", [span] * 3, "", {})
    assert known["answer"] == "no answer for all" and known["metric"] == "f1" and not known["is_beaten"]
    assert known["value"] == pytest.approx(baseline(found, "dev", [span] * 3, "exact", {})["value"])


def test_questions_are_compared_with_the_sentence_most_like_them():
    passages = {"W1 w2 w3. w4 w5, w6. w4": "w5 w7 w6", "天气好。今天去哪里？": "今天他去哪里", "": "w1"}
    found = [record(text=text, text_pair=passage) for passage, text in passages.items()]
    question = record(text="w2 w3 w1", text_pair="w4. W1 w2 w3. w5", answers=(Answer(text="w1", start=4),))
    task = resolved("qa", [question], [question])
    assert [task.task.plain_answer(one) for one in found] == ["w4 w5, w6.", "今天去哪里？", None]
    known = baseline(task, "dev", [{"answer": "w1", "score": 1.0, "no_answer_score": 0.0}], "", {})
    # One of three words is right, and it is the only correct one.
    expected = {"answer": "the sentence most like the question", "metric": "f1", "value": pytest.approx(0.5)}
    assert known == expected | {"is_beaten": True}


@pytest.mark.parametrize(("before", "is_beaten"), [(0.25, True), (0.5, False), (None, None)])
def test_vectors_are_compared_with_those_before_training(before, is_beaten):
    pairs = [record(text_pair="w2"), record(text_pair="w3")]
    found = resolved("sentence", pairs, pairs, sentence={"loss": "negatives"})
    known = baseline(found, "dev", [{"cosine": 0.1, "rank": 2}] * 2, "", {"mrr": before})
    if is_beaten is None:
        assert known is None
    else:
        assert known == {"answer": "before training", "metric": "mrr", "value": before, "is_beaten": is_beaten}


def test_one_warning_names_the_splits():
    def result(split, is_beaten):
        known = {"answer": "class a for all", "metric": "accuracy", "value": 0.5, "is_beaten": is_beaten}
        return {"split": split, "n": 4, "metrics": {}, "baseline": known}

    (line,) = result_lines(result("dev", False))
    assert line.endswith("(class a for all: accuracy 0.5000)")
    assert warning_lines([result("dev", True), {"split": "old", "n": 1, "metrics": {}}]) == []
    (line,) = warning_lines([result("dev", False), result("test", True), result("test2", False)])
    assert line.startswith("WARNING") and "dev (class a for all), test2 (" in line and "test (" not in line


def test_a_run_evaluates_vectors_before_training_and_says_so(tmp_path, capsys):
    pairs = [record(id=str(i), text=f"w{i} w{i + 1}", text_pair=f"w{i} w{2 * i}") for i in range(12)]
    options = "--task.kind sentence --sentence.loss negatives --training.num_epochs 1 --optimizer.learning_rate 0"
    run(saved_model(tmp_path / "model"), tmp_path / "w", options, {"train": pairs, "dev": pairs})
    first = json.loads((tmp_path / "w" / "metrics.jsonl").read_text().splitlines()[0])
    (entry,) = json.loads((tmp_path / "w" / "metrics.json").read_text())
    assert (first["step"], first["split"]) == (0, "dev")
    assert entry["baseline"]["value"] == first["mrr"] == entry["metrics"]["mrr"]["value"]
    out = capsys.readouterr().out
    assert f"(before training: mrr {first['mrr']:.4f})" in out and "WARNING" in out and "before training" in out


# ------------------------------------------------------------------ metrics of the user


def recall_of_a(correct, predicted, probabilities):
    """The share of the records of class a whose probability of a is at least 0.4."""
    return float(np.mean([p["a"] >= 0.4 for gold, p in zip(correct, probabilities, strict=True) if gold == "a"]))


def test_a_metric_with_the_parameter_probabilities_gets_those_of_the_predictions():
    records = classes("aab")
    one = resolved("classification", classes("aaab"), records)
    one.task.own_metrics = {
        "recall_of_a": recall_of_a,
        "second": lambda correct, predicted: float(predicted[1] == "b"),
    }
    predictions = [
        {"label": label, "score": max(p, 1 - p), "probabilities": {"a": p, "b": 1 - p}}
        for label, p in (("a", 0.9), ("b", 0.45), ("b", 0.2))
    ]
    found = {score.name: value_of(score, 3) for score in scores_of(one.task, records, predictions)[0]}
    assert (found["recall_of_a"], found["second"]) == (1.0, 1.0)
    # The constant answer, class a, has probabilities too.
    assert baseline(one, "dev", predictions, "recall_of_a", {})["value"] == 1.0


def test_a_metric_of_probabilities_is_refused_for_tasks_without_them():
    records = [record(label="1.0"), record(label="2.0")]
    task = resolved("regression", records, records).task
    task.own_metrics = {"mine": lambda correct, predicted, probabilities: 0.0}
    with pytest.raises(ValueError, match="metrics: mine has the parameter probabilities, which predictions"):
        scores_of(task, records, [{"value": 1.0}, {"value": 2.0}])


def test_a_metric_with_the_name_of_a_metric_of_the_task_is_refused():
    """Otherwise task.metric would select by the other one, and only one value would be logged."""
    records = classes("ab")
    task = resolved("classification", records, records).task
    task.own_metrics = {"accuracy": lambda correct, predicted: 0.0}
    predictions = [certain("ab", label) for label in "ab"]
    with pytest.raises(ValueError, match="metrics: this task has a metric accuracy itself; use another name"):
        scores_of(task, records, predictions)
