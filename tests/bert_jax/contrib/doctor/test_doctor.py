"""The command, ``training.doctor``, Python and the section of the report."""

import json
import shutil
from dataclasses import replace
from unittest import mock

import command
import jax
import jax.numpy as jnp
import pytest
from support import objective_of, tiny_config, train_synthetic

import bert_jax
from bert_jax.commands.main import main
from bert_jax.contrib.doctor.examine import optimizer_state
from bert_jax.contrib.doctor.findings import (
    CHECKS,
    CONSEQUENCES,
    OF_RATE,
    diagnosis,
    finding,
    ordered,
    section,
    summary,
)
from bert_jax.start import state as start_state
from bert_jax.training.checkpoint.parameters import read_parameters


def test_the_most_severe_and_specific_lines_are_first():
    found = [
        finding("loss", "7", "below 6", "lower the rate", fail=True, number=7.0),
        finding("speed", "100%", "70%", "unused"),
        finding("padding share", "60%", "50%", "pack", look=True),
        finding("masks", "80%", "15%", "build again", fail=True),
    ]
    assert [one.check for one in ordered(found)] == ["masks", "loss", "padding share", "speed"]
    assert str(ordered(found)[0]) == "FAIL  masks             80% (expected: 15%); build again"
    assert str(found[1]) == "OK    speed             100% (expected: 70%)"
    assert summary(found) == "2 FAIL, 1 LOOK, 1 OK"
    assert len(set(CHECKS)) == len(CHECKS)


@pytest.mark.parametrize("cause", CONSEQUENCES)
def test_what_follows_from_another_error_is_omitted(cause):
    others = [finding(check, "1", "0", "advice", fail=True) for check in (*CONSEQUENCES[cause], "speed")]
    found = diagnosis([*others, finding(cause, "1", "0", "advice", fail=True)])
    assert [one.check for one in found] == [cause, "speed"]
    assert len(diagnosis([*others, finding(cause, "0", "0", "advice", look=True)])) == 2 + len(CONSEQUENCES[cause])


@pytest.mark.parametrize("is_low", [True, False])
def test_a_learning_rate_outside_its_range_decides_the_advice(is_low):
    of_rate = [finding(check, "1", "0", "set a tenth", fail=check == "loss", look=True) for check in OF_RATE]
    rate = finding("updates", "0.0004", "0.002 to 0.2", "multiply by 10", look=is_low)
    first, *rest = diagnosis([*of_rate, rate])
    assert (first.check, first.status) == (("updates", "FAIL") if is_low else ("loss", "FAIL"))
    assert {one.check for one in (first, *rest) if one.advice == "set a tenth"} == (set() if is_low else {*OF_RATE})
    kept = diagnosis([finding("loss", "1", "0", "train longer", look=True), rate])
    assert [one.status for one in kept if one.check == "updates"] == [rate.status]


def test_the_section_escapes_what_it_shows():
    rows = [{"check": "masks", "status": "FAIL", "value": "<b>", "allowed": None, "advice": ""}]
    heading, body = section({"step": 3, "summary": "1 FAIL", "findings": rows})
    assert heading == "Doctor at step 3: 1 FAIL"
    assert "&lt;b&gt;" in body
    assert section({"findings": "damaged"})[1] == ""


def test_what_is_refused(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert f"{tmp_path}: not the workdir of a pretraining run; name one" in capsys.readouterr().err


def test_a_run_checks_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("bert_jax.contrib.doctor.in_training.SHARE", 100.0)
    config = tiny_config("--training.doctor true --training.eval_interval 10 --data.dupe_factor 1")
    train_synthetic(config, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "doctor.json").read_text())
    status = {one["check"]: one["status"] for one in found["findings"]}
    assert found["step"] == 20
    assert status["padding"] == status["other rows"] == status["tied table"] == "OK"
    # The rows of this source have [MASK] at every predicted place.
    assert status["masks"] == "FAIL"
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("doctor: FAIL") == log.count("doctor: FAIL  masks") == 1
    assert "Doctor at step 20: 1 FAIL" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("is_restored", [True, False])
def test_an_optimizer_that_starts_again(tmp_path, is_restored):
    """Moments of 0 at a resume, and moments that the checkpoint has."""
    config = tiny_config("--training.keep_checkpoints 4")
    train_synthetic(config, tmp_path / "run")
    for step in (15, 20):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    resumed = start_state._resumed

    def without_moments(restored, *more):
        moments = jax.tree.map(jnp.zeros_like, restored.state.opt_state)
        return resumed(replace(restored, state=restored.state.replace(opt_state=moments)), *more)

    with mock.patch.object(start_state, "_resumed", resumed if is_restored else without_moments):
        train_synthetic(config, tmp_path / "run")
    objective = objective_of(config)
    stored = read_parameters(tmp_path / "run", config, objective.model, average=None, report=print)
    (one,) = optimizer_state(tmp_path / "run", objective, stored)
    assert (one.status, one.number) == (("OK", 0) if is_restored else ("FAIL", -10))


@pytest.mark.slow
def test_a_run_without_held_out_text_has_no_remark_about_it(tmp_path):
    recipe = command.recipe(tmp_path, training={"num_steps": 2, "eval_interval": 0})
    options = {"data.eval_fraction": 0.0, "data.seq_length": 32, "data.next_sentence": "none"}
    run = bert_jax.pretrain(recipe, workdir=tmp_path / "run", report=lambda line: None, options=options)
    assert "held-out text" not in {one.check for one in run.doctor()}


@pytest.mark.slow
def test_a_run_without_time_for_checks_has_those_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr("bert_jax.contrib.doctor.in_training.SHARE", -1.0)
    config = tiny_config("--training.doctor true --training.eval_interval 10")
    train_synthetic(config, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "doctor.json").read_text())
    assert "skipped steps" in {one["check"] for one in found["findings"]}
    assert "padding" not in {one["check"] for one in found["findings"]}


@pytest.mark.slow
def test_the_command_examines_a_run_and_python_has_the_same_lines(tmp_path, capsys):
    recipe = command.recipe(tmp_path, training={"num_steps": 20, "eval_interval": 10})
    run = bert_jax.pretrain(recipe, workdir=tmp_path / "run", report=lambda line: None)
    assert main(["doctor", str(tmp_path / "run")]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = run.doctor()
    assert lines == [str(one) for one in found]
    assert last.startswith("step 20: ")
    checks = {"vocabulary", "masks", "padding", "updates", "loss", "first loss", "gradients", "passes"}
    assert checks | {"rounded weights"} <= {one.check for one in found}
    assert main(["doctor", str(tmp_path / "run"), "--step", "10", "--json"]) == 0
    stored = json.loads((tmp_path / "run" / "doctor.json").read_text())
    assert json.loads(capsys.readouterr().out) == stored
    assert stored["step"] == 10
    assert "Doctor at step 10" in bert_jax.report(run).read_text()
