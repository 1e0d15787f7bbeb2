"""The same command, or nearly the same, on a workdir that holds a run: stopped, finished, of other data."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from builders import StopAt
from finetune_cases import SPLITS, configured, lines, records, results, run, saved_model

import bert_jax
from bert_jax.finetuning.best import BestCheckpoint
from bert_jax.finetuning.finetune import FinetuneJob, finetune
from bert_jax.interop.readers import read_weights
from bert_jax.io.folder_lock import FolderTaken
from bert_jax.parallel import make_mesh
from bert_jax.process import exits
from bert_jax.process.signals import Interrupted, StopRequest
from bert_jax.records import Answer, Record
from bert_jax.training.job import Context
from bert_jax.training.launch import Launch


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "w"
    run(source, workdir)
    return workdir


@pytest.fixture
def workdir(finished, tmp_path):
    """A copy of a finished run."""
    return shutil.copytree(finished, tmp_path / "w")


# Nothing is learned, so all evaluations tie and the first is the best.
TIE = "--optimizer.learning_rate 1e-12 --training.num_epochs 3"


def flipped(found):
    return [dataclasses.replace(record, label="10"[int(record.label)]) for record in found]


def contents(workdir):
    return {path.name: path.read_bytes() for path in workdir.glob("*.json*")}


@pytest.mark.slow
def test_a_finished_run_says_so_and_changes_nothing(source, workdir, capsys):
    before = contents(workdir)
    run(source, workdir)
    said = capsys.readouterr().out
    assert "is complete: 18 steps" in said and "have an effect" not in said
    run(source, workdir, "--task.name other --optimizer.learning_rate 1e-3")
    said = capsys.readouterr().out
    assert "changed since the checkpoint: task.name: " in said
    assert "have an effect: other dev and test files, " in said
    assert contents(workdir) == before


@pytest.mark.parametrize("train", [records(70, 9), flipped(SPLITS["train"])], ids=["texts", "labels"])
def test_changed_training_records_are_refused(source, workdir, train):
    before = contents(workdir)
    with pytest.raises(ValueError, match=r"data: the training examples .* --workdir"):
        run(source, workdir, splits={**SPLITS, "train": train})
    assert contents(workdir) == before


def test_hosts_compare_what_they_evaluate_on(source, tmp_path):
    """Another dev file would give other numbers of batches, and another end by patience."""
    config, start = configured(source, tmp_path / "w")
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    one, same, other = (
        FinetuneJob(config, {**SPLITS, "dev": dev}, (), start).data(mesh, complete=False).order
        for dev in (SPLITS["dev"], list(SPLITS["dev"]), flipped(SPLITS["dev"]))
    )
    assert one == same != other


def test_another_model_is_refused(source, workdir, tmp_path):
    other = saved_model(tmp_path / "other")
    message = f"--init_from {other}: the run in {workdir} started from {source}; "
    with pytest.raises(ValueError, match=message):
        run(other, workdir)
    # The same one by another name is the same.
    (tmp_path / "link").symlink_to(source)
    run(tmp_path / "link", workdir)


@pytest.mark.slow
def test_a_finished_run_predicts_what_is_asked_of_it_later(source, workdir):
    before, test = contents(workdir), records(9, 5)
    run(source, workdir, splits={**SPLITS, "test": test}, tests=["test"])
    assert results(workdir)["test"]["n"] == 9
    now = contents(workdir)
    assert now["predictions_dev.jsonl"] == before["predictions_dev.jsonl"]
    # As many records, but other ones.
    run(source, workdir, splits={**SPLITS, "test": flipped(test)}, tests=["test"])
    assert contents(workdir)["predictions_test.jsonl"] != now["predictions_test.jsonl"]


@pytest.mark.slow
def test_another_dev_file_of_a_finished_run_chooses_nothing(source, tmp_path):
    workdir, options = tmp_path / "w", "--optimizer.learning_rate 1e-12"
    run(source, workdir, options)  # nothing is learned: the first evaluation is the best
    saved = read_weights(workdir / "best")
    assert saved.origin["step"] == 9
    predicted = [json.loads(line)["label"] for line in (workdir / "predictions_dev.jsonl").open()]
    right = [dataclasses.replace(one, label=label) for one, label in zip(SPLITS["dev"], predicted, strict=True)]
    run(source, workdir, options, splits={"train": SPLITS["train"], "right": right})
    assert read_weights(workdir / "best").origin == saved.origin
    found = results(workdir)
    assert found["right"]["metrics"]["accuracy"]["value"] == 1 and "chosen_by" not in found["right"]
    assert found["dev"]["chosen_by"]["metric"] == "accuracy"


def test_values_of_another_kind_are_not_compared(source, workdir):
    before = contents(workdir)
    with pytest.raises(ValueError, match=r"task\.metric: f1 .* accuracy"):
        run(source, workdir, "--training.num_epochs 3 --task.metric f1")
    with pytest.raises(ValueError, match=r"data\.dev: .* other records"):
        run(source, workdir, "--training.num_epochs 3", splits={**SPLITS, "dev": records(21, 3)})
    assert contents(workdir) == before
    # Nothing is left to choose.
    run(source, workdir, "--task.metric f1", splits={**SPLITS, "test": records(9, 5)}, tests=["test"])
    assert results(workdir)["dev"]["chosen_by"]["metric"] == "accuracy"


def test_a_checkpoint_of_an_older_version_goes_on():
    state = {"value": 0.5, "step": 9, "waited": 1, "over": False, "judged": 18, "metric": "f1"}
    restored = BestCheckpoint(step=3, metric="accuracy", split="a")
    restored.restore(state)
    assert restored == BestCheckpoint(value=0.5, step=9, waited=1, judged=18, metric="f1")
    restored.restore(dataclasses.asdict(BestCheckpoint(step=3, metric="f1", split="a")))
    assert restored == BestCheckpoint(step=3, metric="f1", split="a")


@pytest.mark.slow
def test_the_step_is_that_of_the_parameters(source, tmp_path, capsys):
    run(source, tmp_path / "w", f"{TIE} --training.restore_best false")
    capsys.readouterr()
    run(source, tmp_path / "w", f"{TIE} --training.restore_best true")
    assert results(tmp_path / "w")["dev"]["step"] == 27
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "parameters of step 27" in line)
    assert "step 9" in line


ANSWER = Answer(text="good", start=3)


@pytest.mark.slow
def test_another_threshold_of_a_finished_run_predicts_again(source, tmp_path):
    questions = [
        Record(id=f"{i}", source=f"file:{i}", text="w1 w2", text_pair=f"w{i} good", answers=(ANSWER,))
        for i in range(8)
    ]
    splits = {"train": questions, "dev": questions}
    options = "--task.kind qa --qa.no_answer true --qa.doc_stride 4 --training.num_epochs 1 --qa.null_threshold"
    for threshold, is_empty in ((-1e4, True), (1e4, False)):
        run(source, tmp_path / "w", f"{options} {threshold}", splits)
        texts = [json.loads(line)["answer"] for line in (tmp_path / "w" / "predictions_dev.jsonl").open()]
        assert len(texts) == 8 and all((text == "") == is_empty for text in texts)
        assert results(tmp_path / "w")["dev"]["chosen_by"]["metric"] == "f1"
        # The saved model and the export follow.
        for folder in ("best", "export"):
            found = bert_jax.load(tmp_path / "w" / folder).predict([(one.text, one.text_pair) for one in questions])
            assert [one["answer"] for one in found] == texts


@pytest.mark.slow
def test_a_split_that_is_not_asked_for_keeps_its_results(source, workdir):
    run(source, workdir, splits={**SPLITS, "test": records(9, 5)}, tests=["test"])
    before = contents(workdir)
    run(source, workdir)
    assert contents(workdir) == before and [*results(workdir)] == ["dev", "test"]
    # Of two only the changed one is predicted.
    run(source, workdir, splits={**SPLITS, "test": records(9, 6)}, tests=["test"])
    assert results(workdir)["dev"] == json.loads(before["metrics.json"])[0]


def test_a_checkpoint_that_is_gone_is_no_fresh_start(source, workdir):
    config, start = configured(source, workdir)
    shutil.rmtree(workdir / "checkpoints")
    before = contents(workdir)
    with pytest.raises(FolderTaken, match="its checkpoint"):
        finetune(
            config, Launch(workdir=workdir, start=start, stop=StopRequest()), splits=SPLITS, tests=(), start=start
        )
    assert contents(workdir) == before


@pytest.mark.slow
def test_more_patience_goes_on(source, tmp_path):
    # Nothing is learned, so nothing gets better after the first evaluation.
    options = "--optimizer.learning_rate 1e-12 --training.num_epochs 6 --training.patience"
    run(source, tmp_path / "w", f"{options} 1")
    assert lines(tmp_path / "w")[-1]["step"] == 18
    run(source, tmp_path / "w", f"{options} 3")
    assert lines(tmp_path / "w")[-1]["step"] == 36
    run(source, tmp_path / "w", options.replace("num_epochs 6", "num_epochs 8") + " 9")
    assert lines(tmp_path / "w")[-1]["step"] == 72


def test_an_evaluation_made_on_resume_is_not_forgotten_by_a_kill(source, tmp_path, monkeypatch):
    """Stopped while evaluating, resumed, killed before the next save, resumed: the same best parameters."""
    run(source, tmp_path / "whole", TIE)
    before = Context.before_batch

    def interrupted(self, step):
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(Context, "before_batch", interrupted)
        with pytest.raises(exits.Stop):
            run(source, tmp_path / "parts", TIE, stop=StopAt(10**6))
    assert not any("split" in line for line in lines(tmp_path / "parts"))
    evaluated = []

    def killed(self, step):
        evaluated.append(step)
        if step > 9:
            raise KeyboardInterrupt
        before(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Context, "before_batch", killed)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "parts", TIE)
    assert {9, 18} == set(evaluated)
    run(source, tmp_path / "parts", TIE)
    assert results(tmp_path / "parts")["dev"]["step"] == results(tmp_path / "whole")["dev"]["step"] == 9
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    one, other = (read_weights(tmp_path / name / "best").params for name in ("whole", "parts"))
    assert all(np.array_equal(one[name], values) for name, values in other.items())
