"""Two runs on the same records: figures by hand, the metrics of the task itself, and what cannot be compared."""

import json
from math import comb

import numpy as np
import pytest

from bert_jax.commands import main as cli
from bert_jax.config import dump_yaml, load_config
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.contrib.experiments.compare import compare, table
from bert_jax.finetuning.artifacts import read_predictions
from bert_jax.metrics import value
from bert_jax.metrics.correlation import regression_scores

CLASSES = "--task.kind classification --data.labels no yes"


def workdir(folder, arguments, lines, split="dev"):
    """The files of a finished run that a comparison reads."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump_yaml(load_config(FinetuneConfig, arguments.split())))
    (folder / f"predictions_{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def of_class(number, label, prediction):
    chance = 0.9 if prediction == "yes" else 0.1
    return {
        "id": f"r{number}", "label": prediction, "score": 0.9, "probabilities": {"no": 1 - chance, "yes": chance},
        "gold": label,
    }  # fmt: skip


# Of 40 records: 1 that A alone has right, 9 that B alone has, 20 both, 10 neither.
RIGHT_A = [True] + [False] * 9 + [True] * 20 + [False] * 10
RIGHT_B = [False] + [True] * 9 + [True] * 20 + [False] * 10
GOLD = ["yes" if i % 3 else "no" for i in range(40)]


def guesses(right):
    other = {"yes": "no", "no": "yes"}
    return [of_class(i, gold, gold if ok else other[gold]) for i, (gold, ok) in enumerate(zip(GOLD, right))]  # noqa: B905


@pytest.fixture
def runs(tmp_path):
    """A and B, the records of B in another order."""
    a = workdir(tmp_path / "a", CLASSES, guesses(RIGHT_A))
    return a, workdir(tmp_path / "b", CLASSES, guesses(RIGHT_B)[::-1])


def test_accuracy_by_mcnemar(runs):
    found = compare(*runs)
    assert (found.metric, found.records, found.test) == ("accuracy", 40, "McNemar, exact")
    assert (found.value_a, found.value_b) == (21 / 40, 29 / 40)
    assert (found.only_a, found.only_b) == (1, 9)
    assert found.p_value == pytest.approx(2 * (comb(10, 0) + comb(10, 1)) / 2**10)
    assert found.difference == pytest.approx(-8 / 40)
    # The bootstrap's interval is near that of the normal approximation.
    spread = 1.96 * np.sqrt((10 / 40 - (8 / 40) ** 2) / 40)
    assert found.low == pytest.approx(-0.2 - spread, abs=0.03) and found.high == pytest.approx(
        -0.2 + spread, abs=0.03
    )
    assert compare(*runs) == found != compare(*runs, seed=5)
    back = compare(*runs[::-1])
    assert (back.difference, back.p_value, back.only_a) == (-found.difference, found.p_value, 9)


def test_other_metrics_by_the_bootstrap(runs):
    found = compare(*runs, metric="f1")
    assert found.test == "paired bootstrap" and found.only_a is None
    hits = sum(ok and gold == "yes" for gold, ok in zip(GOLD, RIGHT_A, strict=True))
    guessed = hits + sum(not ok and gold == "no" for gold, ok in zip(GOLD, RIGHT_A, strict=True))
    assert found.value_a == pytest.approx(2 * hits / (guessed + GOLD.count("yes")))
    assert found.low < found.difference < found.high and 0 < found.p_value < 0.1
    same = compare(runs[0], runs[0], metric="f1")
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1)


def test_the_order_of_labels_does_not_matter(runs, tmp_path):
    """F1 is that of A's second class in both."""
    other = workdir(tmp_path / "c", CLASSES.replace("no yes", "yes no"), guesses(RIGHT_A))
    found = compare(runs[0], other, metric="f1")
    assert found.value_a == found.value_b and found.difference == 0


def test_the_metric_of_the_config_is_the_default(tmp_path):
    folder = workdir(tmp_path / "a", f"{CLASSES} --task.metric matthews", guesses(RIGHT_A))
    assert compare(folder, folder).metric == "matthews"


def test_records_without_a_label_are_left_out(runs):
    for folder in runs:
        lines = [json.loads(line) for line in (folder / "predictions_dev.jsonl").read_text().splitlines()]
        for line in lines:
            if line["id"] in ("r0", "r39"):
                del line["gold"]
        workdir(folder, CLASSES, lines)
    found = compare(*runs)
    assert (found.records, found.only_a, found.only_b) == (38, 0, 9)
    for folder in runs:
        workdir(folder, CLASSES, [{k: v for k, v in line.items() if k != "gold"} for line in guesses(RIGHT_A)])
    with pytest.raises(ValueError, match="split dev has no labels"):
        compare(*runs)


def test_regression(tmp_path):
    rng = np.random.default_rng(0)
    gold = rng.normal(size=60).round(3)
    guessed = [gold + rng.normal(0, spread, 60) for spread in (0.3, 1.5)]
    a, b = (
        workdir(tmp_path / name, "--task.kind regression", [
            {"id": str(i), "gold": float(gold[i]), "value": round(float(x), 6)} for i, x in enumerate(values)
        ]) for name, values in zip("ab", guessed, strict=True)
    )  # fmt: skip
    expected = [{s.name: value(s, 60) for s in regression_scores(gold, values.round(6))} for values in guessed]
    for name in (None, "spearman", "mse"):
        found = compare(a, b, metric=name)
        assert found.metric == (name or "pearson") and found.test == "paired bootstrap"
        assert found.value_a == pytest.approx(expected[0][found.metric])
        assert found.value_b == pytest.approx(expected[1][found.metric])
        assert found.p_value == pytest.approx(2 / 1001) and found.low * found.high > 0


def sentences(right, field):
    if field == "rank":
        return [{"id": str(i), "cosine": 0.5, "rank": 1 if ok else 3} for i, ok in enumerate(right)]
    return [{"id": str(i), "cosine": 0.5, "cosine_negative": 0.2 if ok else 0.7} for i, ok in enumerate(right)]


@pytest.mark.parametrize(("field", "metric"), [("rank", "precision@1"), ("cosine_negative", "triplet_accuracy")])
def test_sentence_pairs_and_triplets(tmp_path, field, metric):
    a, b = (
        workdir(tmp_path / name, "--task.kind sentence --sentence.loss negatives", sentences(right, field))
        for name, right in (("a", RIGHT_A), ("b", RIGHT_B))
    )
    found = compare(a, b, metric=metric)
    assert (found.only_a, found.only_b, found.value_a) == (1, 9, 21 / 40)
    if field == "rank":
        assert compare(a, b).metric == "mrr" and compare(a, b).value_a == pytest.approx((21 + 19 / 3) / 40)


@pytest.mark.slow
def test_sentence_values_and_choices_and_several_labels(tmp_path):
    lines = [{"id": str(i), "gold": f"{i}.0", "cosine": i / 10} for i in range(6)]
    a = workdir(tmp_path / "a", "--task.kind sentence --sentence.loss cosine", lines)
    assert (compare(a, a).metric, compare(a, a).value_a) == ("spearman", pytest.approx(1))
    a = workdir(tmp_path / "a", "--task.kind sentence --sentence.loss cosine", [
        *lines, {"id": "6", "cosine": 0.1, "rank": 2}
    ])  # fmt: skip
    assert compare(a, a).records == 6
    lines = [{"id": str(i), "gold": i % 2, "choice": 1, "probabilities": [0.2, 0.8]} for i in range(6)]
    a = workdir(tmp_path / "a", "--task.kind choice --data.labels 0 1", lines)
    assert (compare(a, a).metric, compare(a, a).value_a) == ("accuracy", 0.5)
    scores = {"x": 1.0, "y": 0.5}
    guessed = [["x", "y"][: 1 + i % 2] for i in range(6)]
    lines = [
        {"id": str(i), "gold": ["y", "x"], "labels": one, "probabilities": scores} for i, one in enumerate(guessed)
    ]
    a = workdir(tmp_path / "a", "--task.kind multi_label --data.labels x y", lines)
    b = workdir(tmp_path / "b", "--task.kind multi_label --data.labels x y", [
        {**line, "gold": ["x", "y"], "labels": ["y", "x"]} for line in lines
    ])  # fmt: skip
    found = compare(a, b)
    assert (found.value_a, found.value_b, found.only_b) == (0.5, 1, 3)


@pytest.mark.parametrize("kind", ["tagging", "qa", "joint"])
def test_predictions_that_do_not_say_what_was_right(tmp_path, kind):
    folder = workdir(tmp_path / "a", f"--task.kind {kind}", [{"id": "0", "tags": ["O"]}])
    with pytest.raises(ValueError, match=f"task.kind {kind} .*whose task.kind is one of classification, m"):
        compare(folder, folder)


BAD_LINES = [
    (
        {"id": "r0", "gold": "maybe", "label": "no", "probabilities": {"no": 1, "yes": 0}},
        "not a prediction of classif",
    ),
    ({"id": "r0", "gold": "no", "label": "no", "probabilities": {"no": 1}}, "not a prediction of classification"),
    ({"id": "r0", "gold": "no"}, "not a prediction of classification"),
    (
        {"id": 0, **{k: v for k, v in of_class(0, "no", "no").items() if k != "id"}},
        "not a prediction of classification",
    ),
    (of_class(3, "no", "no"), ":4: the record 'r3' occurs twice"),
    (of_class(99, "no", "no"), "the record 'r0' of .*a"),
    (of_class(0, "yes", "no"), "the record 'r0' has a different label in"),
    ([1], "not a JSON object"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_lines_that_do_not_fit(runs, line, message):
    workdir(runs[1], CLASSES, [line, *guesses(RIGHT_B)[1:]])
    if message.startswith(":4"):
        message = "predictions_dev.jsonl" + message
    with pytest.raises(ValueError, match=message):
        compare(*runs)


def test_runs_that_do_not_fit(runs, tmp_path):
    a, b = runs
    values = [{"id": "r0", "gold": 1.0, "value": 1.0}]
    for arguments, lines, message in (
        ("--task.kind regression", values, "task.kind classification, .* regression|task.kind .*regression"),
        ("--task.kind classification --data.labels no yes maybe", [
            {**line, "probabilities": {**line["probabilities"], "maybe": 0.0}} for line in guesses(RIGHT_B)
        ], "labels: no, yes and maybe, no, yes"),
    ):  # fmt: skip
        workdir(b, arguments, lines)
        with pytest.raises(ValueError, match=message):
            compare(a, b)
    for options, message in (
        ({"split": "test"}, "predictions_test.jsonl: .* predictions: dev"),
        ({"metric": "bleu"}, "metric: 'bleu' is not a metric of both runs; allowed: accuracy, precision"),
        ({"resamples": 0}, "resamples: 0 is not allowed"),
        ({"seed": -1}, "seed: -1 is not allowed"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(a, a, **options)
    with pytest.raises(ValueError, match=r"no config\.yaml"):
        compare(a, tmp_path)
    for content, message in (
        ("model:\n  num_layers: 2\n", r"no task\.kind"),
        ("task:\n  kind: other\n", r"config\.yaml:2: task\.kind"),
    ):
        (b / "config.yaml").write_text(content)
        with pytest.raises(ValueError, match=message):
            compare(a, b)


OLD_FORM = [
    (
        {"id": "0", "label": "no", "prediction": "yes", "scores": {"no": 0.2, "yes": 0.8}},
        {"id": "0", "label": "yes", "score": 0.8, "probabilities": {"no": 0.2, "yes": 0.8}, "gold": "no"},
    ),
    (
        {"id": "0", "label": ["x"], "prediction": [], "scores": {"x": 0.2}},
        {"id": "0", "labels": [], "probabilities": {"x": 0.2}, "gold": ["x"]},
    ),
    ({"id": "0", "label": 1.5, "prediction": 2.0}, {"id": "0", "value": 2.0, "gold": 1.5}),
    (
        {"id": "0", "label": 0, "prediction": 1, "scores": [0.2, 0.8]},
        {"id": "0", "choice": 1, "probabilities": [0.2, 0.8], "gold": 0},
    ),
    ({"id": "0", "label": "3.5", "cosine": 0.5}, {"id": "0", "cosine": 0.5, "gold": "3.5"}),
    ({"id": "0", "cosine": 0.5, "rank": 2}, {"id": "0", "cosine": 0.5, "rank": 2}),
]


@pytest.mark.parametrize(("old", "new"), OLD_FORM)
def test_predictions_of_older_runs_are_read(tmp_path, old, new):
    folder = workdir(tmp_path / "a", CLASSES, [old, new])
    assert [line for _, line in read_predictions(folder, "dev")] == [new, new]


def test_options_of_another_version_do_not_matter(runs):
    file = runs[1] / "config.yaml"
    file.write_text(file.read_text() + "gone:\n  option: 3\n")
    assert compare(*runs).only_b == 9


def test_the_command(runs, capsys):
    words = ["compare", *map(str, runs)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert out == table(compare(*runs))
    assert out[2] == "dev: 40 records; p by McNemar, exact; correct only in A: 1, only in B: 9"
    assert out[4].split()[:4] == ["accuracy", "0.5250", "0.7250", "-0.2000"] and out[4].endswith("0.0215")
    assert cli.main([*words, "--json", "--metric", "f1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == compare(*runs, metric="f1").as_dict() and found["only_a"] is None
    assert cli.main([*words, "--metric", "bleu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
