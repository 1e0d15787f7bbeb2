"""A fine-tuning run from records to predictions: learns, resumes bitwise, stops early, keeps the best."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from builders import StopAt
from finetune_cases import (
    PIECES,
    SPLITS,
    configured,
    lines,
    records,
    results,
    run,
    saved_model,
    with_labels,
)

import bert_jax
from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.config import HeadsConfig, RunOptions
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import build_config, read_settings, take_options
from bert_jax.finetuning import finetune as module
from bert_jax.finetuning.best import BestCheckpoint
from bert_jax.finetuning.evaluation import Predictor, blank_scores
from bert_jax.finetuning.results import _export
from bert_jax.interop.readers import read_weights
from bert_jax.io.storage import location
from bert_jax.metrics import Score
from bert_jax.process import exits
from bert_jax.process.signals import Interrupted
from bert_jax.records import Record
from bert_jax.start.plan import plan_start
from bert_jax.training.job import Context
from bert_jax.training.logging.curves import draw_curves

# Some of the test records are labelled 0 whatever their words are.
TEST = [dataclasses.replace(one, label=one.label if i % 3 else "0") for i, one in enumerate(records(9, 5))]


@pytest.fixture(scope="module")
def learned(source, tmp_path_factory):
    """A finished run with its diagrams."""
    workdir = tmp_path_factory.mktemp("runs") / "w"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bert_jax.training.logging.report.draw_curves", draw_curves)
        run(source, workdir, "--training.num_epochs 5", {**SPLITS, "test": TEST}, tests=["test"])
    return workdir


@pytest.mark.slow
def test_it_learns_and_leaves_what_is_promised(learned):
    found = results(learned)
    assert found["dev"]["metrics"]["accuracy"]["value"] == 1.0 and found["dev"]["n"] == 21
    low, high = found["dev"]["metrics"]["accuracy"]["ci95"]
    assert low == high == 1.0
    assert set(found["dev"]) >= {"task", "split", "n", "metrics", "seed", "seconds"}
    predictions = [json.loads(line) for line in (learned / "predictions_dev.jsonl").read_text().splitlines()]
    assert [one["id"] for one in predictions] == [record.id for record in SPLITS["dev"]]
    assert all(one["label"] == one["gold"] for one in predictions)
    assert all(abs(sum(one["probabilities"].values()) - 1) < 1e-5 for one in predictions)
    assert (learned / "predictions_test.jsonl").exists() and (learned / "report.html").exists()


def test_the_export_says_what_it_learned(learned):
    card = (learned / "export" / "README.md").read_text()
    assert "from model; texts of at most 32 tokens" in card and "| dev: accuracy | 1 |" in card
    assert card.splitlines().count("# classification") == 1


def test_the_metrics_are_those_that_were_known_before(source, learned, tmp_path):
    config, start = configured(source, tmp_path / "w")
    job = module.FinetuneJob(config, SPLITS, (), start)
    units = job.task.featurize(SPLITS["dev"], training=False)
    names = [score.name for score in blank_scores(job.task, job.model, SPLITS["dev"], units)]
    assert list(results(learned)["dev"]["metrics"]) == names
    assert {"precision", "recall", "f1"} < set(names)  # of class 1 of two


def test_the_confusion_matrices(learned):
    found = results(learned)
    for split in ("dev", "test"):
        predictions = [json.loads(line) for line in (learned / f"predictions_{split}.jsonl").open()]
        pairs = Counter((one["gold"], one["label"]) for one in predictions)
        expected = [[pairs[given, predicted] for predicted in "01"] for given in "01"]
        assert found[split]["confusion_matrix"] == {"labels": ["0", "1"], "counts": expected}
    assert expected[0][1] > expected[1][0] and sum(map(sum, expected)) == 9
    # A row stands on a line of its own.
    assert f"[ {expected[1][0]}, {expected[1][1]} ]\n" in (learned / "metrics.json").read_text()
    page = (learned / "report.html").read_text()
    assert "dev: confusion matrix" in page and "test: confusion matrix" in page


@pytest.mark.slow
def test_the_export_and_the_best_parameters_say_the_same(learned):
    predictions = [json.loads(line) for line in (learned / "predictions_dev.jsonl").read_text().splitlines()]
    texts = [record.text for record in SPLITS["dev"]]
    for folder in ("export", "best", ""):
        found = bert_jax.load(learned / folder).predict(texts)
        for one, other in zip(found, predictions, strict=True):
            assert list(one) == [name for name in other if name not in ("id", "gold")]
            assert one["label"] == other["label"]
            assert abs(one["probabilities"]["1"] - other["probabilities"]["1"]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param("", marks=pytest.mark.slow),
        "--regularization.mixout 0.1 --optimizer.ema_decay 0.9 --optimizer.unfreeze_every 0.5",
    ],
)
def test_a_stopped_run_resumes_bitwise(source, tmp_path, options):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(source, whole, options)
    with pytest.raises(exits.Stop) as stopped:
        run(source, parts, options, stop=StopAt(12))
    assert stopped.value.code == exits.PREEMPTED and not (parts / "metrics.json").exists()
    if not (parts / "best").exists():
        with pytest.raises(ValueError, match="has no evaluated model yet"):
            read_weights(parts)
    run(source, parts, options)
    one, other = read_weights(whole / "best"), read_weights(parts / "best")
    assert all(np.array_equal(one.params[name], values) for name, values in other.params.items())
    assert lines(whole) == lines(parts)
    assert (whole / "predictions_dev.jsonl").read_bytes() == (parts / "predictions_dev.jsonl").read_bytes()


@pytest.mark.slow
def test_a_signal_between_two_dev_splits_leaves_the_whole_evaluation_to_be_made(source, tmp_path, monkeypatch):
    splits = {"train": SPLITS["train"], "one": SPLITS["dev"], "two": records(5, 8)}
    run(source, tmp_path / "whole", splits=splits)
    before, calls, stop = Context.before_batch, [], StopAt(10**6)

    def interrupted(self, step):
        calls.append(step)
        if len(calls) == 2:  # the batch of the second split
            stop.left = 0
            assert stop.reached()
            raise Interrupted
        before(self, step)

    monkeypatch.setattr(Context, "before_batch", interrupted)
    with pytest.raises(exits.Stop):
        run(source, tmp_path / "parts", splits=splits, stop=stop)
    assert not any("split" in line for line in lines(tmp_path / "parts"))
    run(source, tmp_path / "parts", splits=splits)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    one, other = (read_weights(tmp_path / name / "best").params for name in ("whole", "parts"))
    assert all(np.array_equal(one[name], values) for name, values in other.items())


def test_what_dev_lacks_is_told_before_training(source, tmp_path, capsys):
    for label, message in (("7", "label '7' is not in data.labels"), (None, "split dev has no labels")):
        splits = {"train": SPLITS["train"], "dev": [dataclasses.replace(SPLITS["dev"][0], label=label)]}
        with pytest.raises(ValueError, match=message):
            run(source, tmp_path / "w", splits=splits)
    with pytest.raises(ValueError, match="'bleu' is not allowed; allowed: accuracy, precision, "):
        run(source, tmp_path / "w", "--task.metric bleu")
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(("heads", "form"), [
    (HeadsConfig(pooler=True, sequence_labels=("a", "b")), "hf"),
    (HeadsConfig(pooler=True, sequence_labels=("a", "b"), token_labels=("O", "B-x")), "npz"),
])  # fmt: skip
def test_heads_that_no_class_of_transformers_has_are_exported_as_npz(tmp_path, heads, form):
    saved_model(tmp_path / "best", heads)
    lines = _export(tmp_path, "hf")
    assert f"export: {form}," in lines[-1] and any("no hf export: " in line for line in lines) == (form == "npz")
    assert read_weights(tmp_path / "export").spec.heads.token_labels == heads.token_labels


def test_records_without_a_label_are_counted(source, tmp_path):
    config, start = configured(source, tmp_path / "w")
    blank = [dataclasses.replace(one, label=None) for one in SPLITS["dev"][:3]]
    splits = {**SPLITS, "dev": [*blank, *SPLITS["dev"][3:]], "test": blank}
    resolved = module.FinetuneJob(config, splits, ["test"], start).resolved
    assert resolved.notes[1:] == (
        "dev: 3 of 21 records have no label and are not scored",
        "test: 3 of 3 records have no label and are not scored",
    )
    assert module.FinetuneJob(config, SPLITS, (), start).resolved.notes == ("2 classes: 0 34, 1 36",)


@pytest.mark.slow
def test_packing_changes_no_prediction_and_no_step(source, tmp_path):
    """The same examples in rows of their own: the same dropout, losses and predictions but for rounding."""
    run(source, tmp_path / "packed")
    run(source, tmp_path / "apart", "--input.packing false")
    packed, apart = lines(tmp_path / "packed"), lines(tmp_path / "apart")
    for one, other in zip(packed, apart, strict=True):
        assert {"loss", "accuracy"} & set(one)
        for name in ("loss", "grad_norm", "accuracy"):
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=2e-4, abs=1e-6), (name, one["step"])
    assert packed[0]["padding_fraction"] < 0.5 < apart[0]["padding_fraction"]


@pytest.mark.slow
def test_several_texts_in_a_row_of_their_own(source, tmp_path):
    """Rows as long as all choices together, in training and in evaluation."""
    choices = [
        Record(
            id=str(i), source="", text="w1 w2", choices=("good w3 w4 w5 w6", "bad w7 w8 w9 w1"), label=str(i % 2)
        )
        for i in range(12)
    ]
    splits = {"train": choices, "dev": choices[:5]}
    options = "--task.kind choice --task.max_length 12 --training.num_epochs 1"
    for packing in ("true", "false"):
        run(source, tmp_path / packing, f"{options} --model.hidden_dropout 0 --input.packing {packing}", splits)
    one, other = (
        [json.loads(line)["probabilities"] for line in (tmp_path / name / "predictions_dev.jsonl").open()]
        for name in ("true", "false")
    )
    assert len(one) == 5
    np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-3)


@pytest.mark.slow
def test_meshes_give_what_one_device_gives(source, tmp_path):
    # Without dropout: its bits belong to places in rows, and a batch on 8 devices has other rows.
    options = "--training.num_epochs 1 --model.hidden_dropout 0 --model.attention_dropout 0"
    run(source, tmp_path / "one", options)
    run(source, tmp_path / "eight", options, devices=8)
    for one, other in zip(lines(tmp_path / "one"), lines(tmp_path / "eight"), strict=True):
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5), one["step"]
    scores = [
        [json.loads(line)["probabilities"]["1"] for line in (tmp_path / name / "predictions_dev.jsonl").open()]
        for name in ("one", "eight")
    ]
    # All 21 records, once each, though 8 devices do not divide them.
    assert len(scores[0]) == len(scores[1]) == 21 and np.allclose(*scores, atol=1e-4)


@pytest.mark.slow
def test_it_stops_when_nothing_gets_better_and_keeps_the_best(source, tmp_path):
    workdir = tmp_path / "w"
    run(source, workdir, "--training.num_epochs 30 --training.patience 2")
    evaluations = [line for line in lines(workdir) if line.get("split") == "dev"]
    best = max(range(len(evaluations)), key=lambda i: (evaluations[i]["accuracy"], -i))
    assert len(evaluations) == best + 3 < 30
    assert results(workdir)["dev"]["step"] == evaluations[best]["step"]
    run(source, workdir, "--training.num_epochs 30 --training.patience 2")  # complete, not continued
    assert [line for line in lines(workdir) if line.get("split") == "dev"] == evaluations


def test_the_predictions_of_the_best_evaluation_are_kept(source, tmp_path, monkeypatch):
    workdir, passes = tmp_path / "w", []
    outputs = Predictor.outputs
    monkeypatch.setattr(Predictor, "outputs", lambda *given: passes.append(1) or outputs(*given))
    run(source, workdir, "--training.num_epochs 3 --training.patience 1")
    evaluations = [line for line in lines(workdir) if line.get("split") == "dev"]
    best, last = results(workdir)["dev"]["step"], evaluations[-1]["step"]
    assert len(passes) == len(evaluations) and best < last
    ending = f"step {last}: no better accuracy since step {best}; training.patience ends the run\n"
    assert ending in (workdir / "train.log").read_text()
    predictions = (workdir / "predictions_dev.jsonl").read_text()
    for name in ("metrics.json", "predictions_dev.jsonl", "report.html"):
        (workdir / name).unlink()
    run(source, workdir, "--training.num_epochs 3 --training.patience 1")
    assert len(passes) == len(evaluations) + 1
    assert (workdir / "predictions_dev.jsonl").read_text() == predictions


def test_an_equal_evaluation_is_not_better():
    best, accuracy = BestCheckpoint(), Score("accuracy", len)
    judged = [best.judge(accuracy, value, step, "dev") for step, value in enumerate((0.5, 0.5, 0.65))]
    assert judged == [True, False, True] and (best.value, best.step, best.waited) == (0.65, 2, 0)


@pytest.mark.slow
def test_the_last_parameters_where_the_best_are_not_asked_for(source, tmp_path):
    run(source, tmp_path / "w", "--training.restore_best false --training.num_epochs 1")
    assert results(tmp_path / "w")["dev"]["step"] == 9


def test_without_a_dev_split_the_last_parameters_are_kept(source, tmp_path):
    splits = {"train": SPLITS["train"], "test": SPLITS["dev"]}
    run(source, tmp_path / "w", splits=splits, tests=("test",))
    assert set(results(tmp_path / "w")) == {"test"}
    assert not any("accuracy" in line and "split" in line for line in lines(tmp_path / "w"))
    assert (tmp_path / "w" / "best" / "model.json").is_file()


def test_a_finished_task_starts_another_one_with_or_without_its_head(source, learned, tmp_path):
    """Intermediate-task training: the same classes keep the head, others drop it."""
    config, start = configured(learned / "best", tmp_path / "w")
    job = module.FinetuneJob(config, SPLITS, (), start)
    kept = job.start()
    assert "sequence_head/kernel" in kept.params and not any(
        "randomly initialized" in line for line in kept.messages
    )
    config, _ = configured(learned / "best", tmp_path / "w", "--regularization.reinit_head true")
    drawn = module.FinetuneJob(config, SPLITS, (), start).start()
    assert set(kept.params) - set(drawn.params) == {"sequence_head/kernel", "sequence_head/bias"}
    renamed = with_labels(SPLITS, lambda label: {"0": "no", "1": "yes"}[label])
    job = module.FinetuneJob(config, renamed, (), start)
    dropped = job.start()
    assert "sequence_head/kernel" not in dropped.params
    assert "randomly initialized: sequence_head" in dropped.messages


@pytest.mark.parametrize(
    ("arguments", "splits", "message"),
    [
        ("", {"dev": SPLITS["dev"]}, "data.train: no training records"),
        ("", with_labels(SPLITS, lambda label: "0"), "data.labels: .* 0; 2 or more are required"),
        (
            "",
            {"train": SPLITS["train"], "dev": [dataclasses.replace(SPLITS["dev"][0], label="7")]},
            "label '7' is not",
        ),
        ("--task.kind regression", with_labels(SPLITS, lambda label: "nan"), "label 'nan' "),
        ("--regularization.reinit_layers 3", SPLITS, "reinit_layers: 3 is not allowed; allowed: 0 to 1"),
        ("--optimizer.frozen layer_7", SPLITS, "optimizer.frozen: 'layer_7' is not allowed"),
        ("--features.layers concat_last_four", SPLITS, "another value with model.num_layers"),
        ("--input.few_shot 60", SPLITS, "input.few_shot: 60 .* 3[0-9] "),
        ("--training.eval_batches 3", SPLITS, "eval_batches: an option of pretraining only; omit it"),
        ("--training.num_tokens 9", SPLITS, "num_tokens: an option of pretraining only; omit it"),
        ("--training.batch_unit rows", SPLITS, "batch_unit: an option of pretraining only; omit it"),
        ("--optimizer.restart_schedule true", SPLITS, "restart_schedule: an option of pretraining only; omit it"),
        ("--task.kind sentence --sentence.loss simcse", SPLITS, "the record has a label but no second text"),
        ("--task.kind choice --task.truncation windows", SPLITS, "task.truncation: 'windows' is not allowed"),
    ],
)
def test_bad_input_is_one_line(source, tmp_path, arguments, splits, message):
    with pytest.raises(ValueError, match=message) as raised:
        run(source, tmp_path / "w", f"--training.num_epochs 1 {arguments}", splits)
    assert "\n" not in str(raised.value)


def test_what_pretraining_alone_can_do_is_refused(source, tmp_path):
    with pytest.raises(ValueError, match="add_words: an option of pretraining only; omit it"):
        take_options(FinetuneRunOptions, ["--init_from", str(source), "--add_words", "words.txt"])
    with pytest.raises(ValueError, match="memory://bucket/w: fine-tuning writes to a folder"):
        run(source, location("memory://bucket/w"))


def test_a_drawn_model_is_as_large_as_its_vocabulary(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")

    def size(*arguments):
        arguments = ("--data.vocab", str(tmp_path / "vocab.txt"), *arguments)
        start = plan_start(FinetuneConfig, RunOptions(), tmp_path, read_settings(arguments).all)
        return build_config(FinetuneConfig, [*read_settings(arguments).all, *start.settings]).model.vocab_size

    assert size() == len(PIECES) and size("--model.vocab_size", "80") == 80
    with pytest.raises(ValueError, match=f"model.vocab_size: 9, .* {len(PIECES)} pieces"):
        size("--model.vocab_size", "9")


@pytest.mark.slow
def test_fewer_records_than_a_batch(source, tmp_path, curves):
    splits = {"train": records(3, 1), "dev": records(2, 2)}
    run(source, tmp_path / "w", "--task.kind regression --training.num_epochs 2", splits)
    found = results(tmp_path / "w")["dev"]
    assert found["n"] == 2
    # Values have no classes to confuse.
    assert "confusion_matrix" not in found and "confusion matrix" not in (tmp_path / "w/report.html").read_text()


def test_the_metric_that_selects_comes_first(source, tmp_path):
    run(source, tmp_path / "w", "--training.num_epochs 1 --task.metric f1_macro")
    (line,) = [line for line in lines(tmp_path / "w") if line.get("split") == "dev"]
    assert [name for name in line if name not in ("step", "split")][:2] == ["f1_macro", "accuracy"]
    assert "dev step 9/9  f1_macro " in (tmp_path / "w" / "train.log").read_text()
