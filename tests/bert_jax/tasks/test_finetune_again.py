"""The same command, or nearly the same, on a workdir that holds a run: stopped, finished, of other data."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from finetune_cases import SPLITS, StopAt, lines, records, results, run, saved_model

from bert_jax import exits
from bert_jax.interop.readers import read_weights
from bert_jax.parallel import make_mesh
from bert_jax.training.run import Context
from bert_jax.training.signals import Interrupted


@pytest.fixture(autouse=True, scope="module")
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bert_jax.training.run.make_mesh", lambda config: make_mesh(config, jax.devices()[:1]))
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "w"
    run(source, workdir)
    return workdir


@pytest.fixture
def workdir(finished, tmp_path):
    """A copy of a finished run."""
    return shutil.copytree(finished, tmp_path / "w")


def flipped(found):
    return [dataclasses.replace(record, label="10"[int(record.label)]) for record in found]


def contents(workdir):
    return {path.name: path.read_bytes() for path in workdir.glob("*.json*")}


def test_a_finished_run_says_so_and_changes_nothing(source, workdir, capsys):
    before = contents(workdir)
    run(source, workdir)
    assert "is complete: 18 steps" in capsys.readouterr().out
    assert contents(workdir) == before


@pytest.mark.parametrize("train", [records(70, 9), flipped(SPLITS["train"])], ids=["texts", "labels"])
def test_changed_training_records_are_refused(source, workdir, train):
    before = contents(workdir)
    with pytest.raises(ValueError, match="the training examples are not those"):
        run(source, workdir, splits={**SPLITS, "train": train})
    assert contents(workdir) == before


def test_another_model_is_refused(source, workdir, tmp_path):
    other = saved_model(tmp_path / "other")
    message = f"--init_from {other}: the run in {workdir} began from {source}; give another --workdir"
    with pytest.raises(ValueError, match=message):
        run(other, workdir)
    # The same one by another name is the same.
    (tmp_path / "link").symlink_to(source)
    run(tmp_path / "link", workdir)


def test_a_finished_run_predicts_what_is_asked_of_it_later(source, workdir):
    before, test = contents(workdir), records(9, 5)
    run(source, workdir, splits={**SPLITS, "test": test}, tests=["test"])
    assert results(workdir)["test"]["n"] == 9
    now = contents(workdir)
    assert now["predictions_dev.jsonl"] == before["predictions_dev.jsonl"]
    # As many records, but other ones.
    run(source, workdir, splits={**SPLITS, "test": flipped(test)}, tests=["test"])
    assert contents(workdir)["predictions_test.jsonl"] != now["predictions_test.jsonl"]


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
    options = "--optimizer.learning_rate 1e-12 --training.num_epochs 3"  # a tie: the first is the best
    run(source, tmp_path / "whole", options)
    before = Context.before_batch

    def interrupted(self, step):
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(Context, "before_batch", interrupted)
        with pytest.raises(exits.Stop):
            run(source, tmp_path / "parts", options, stop=StopAt(10**6))
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
            run(source, tmp_path / "parts", options)
    assert {9, 18} == set(evaluated)
    run(source, tmp_path / "parts", options)
    assert results(tmp_path / "parts")["dev"]["step"] == results(tmp_path / "whole")["dev"]["step"] == 9
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    one, other = (read_weights(tmp_path / name / "best").params for name in ("whole", "parts"))
    assert all(np.array_equal(one[name], values) for name, values in other.items())
