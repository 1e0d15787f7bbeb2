"""The box at the top of a report: the result of a run, its cause of an early end, and the commands that go on."""

import json
from pathlib import Path

import pytest
from report_runs import LOG, TASK, page_of, task_run, without_spans, write_run
from support import tiny_config, train_synthetic

from bert_jax.finetuning.evaluation import warning_lines
from bert_jax.objectives.masked_lm import MaskedLm
from bert_jax.training.logging.report import run_page, write_report
from bert_jax.training.logging.run_files import read_log, read_run


def test_a_stopped_run_tells_when_and_why_it_ended_and_how_to_continue(tmp_path):
    folder = write_run(tmp_path / "w")
    (folder / "train.log").write_text("2026-01-01 10:00:00  step 20/40  loss 2\n")
    page = run_page(read_run(folder), TASK)
    for words in ("2026-01-01 10:00:00", "No end was recorded", "No checkpoint is saved", "step 20 of 40 (50%)"):
        assert words in page
    assert f"bert-jax pretrain --config {folder}/config.yaml --workdir {folder}" in without_spans(page)
    (folder / "checkpoints/10").mkdir(parents=True)
    with (folder / "train.log").open("a") as log:
        log.write("2026-01-01 10:00:09  ended early: RuntimeError: device lost\n")
    page = run_page(read_run(folder), TASK)
    for words in (
        "2026-01-01 10:00:09",
        "It ended early: RuntimeError: device lost.",
        "checkpoint is of step 10; the 10 steps after it that the log shows are lost. This command",
    ):
        assert words in page
    with (folder / "train.log").open("a") as log:  # another attempt, without an end
        log.write("2026-01-01 11:00:00  step 21/40  loss 2\n")
    assert "No end was recorded" in run_page(read_run(folder), TASK)


def test_a_score_that_improves_while_the_loss_rises_is_one_sentence(tmp_path):
    folder = write_run(tmp_path / "w", config="task: {kind: classification}\n", split="dev")
    values = [(10, 0.8, 0.5), (20, 0.81, 0.45), (30, 0.85, 0.6)]
    for rises in (True, False):
        rows = [
            {"step": step, "split": "dev", "accuracy": accuracy, "log_loss": loss if rises else 1 - accuracy}
            for step, accuracy, loss in values
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        page = run_page(read_run(folder), TASK)
        start = "It still improved at the last evaluation (81.0% at step 20)"
        both = f"{start}, but the dev log loss has risen from 0.4500 at step 20 to 0.6000: wrong answers"
        assert (both in page) == rises and (f"{start}." in page) != rises
        assert "<h3>dev: log loss</h3>" in page


@pytest.mark.slow
def test_the_log_records_the_reason_of_an_early_end(tmp_path):
    def fails(row):
        raise ArithmeticError("no more")

    config = tiny_config("--training.num_steps 4 --training.log_interval 1")
    with pytest.raises(ArithmeticError):
        train_synthetic(config, tmp_path / "w", callbacks=(fails,))
    assert read_log((tmp_path / "w/train.log").read_text()).ending == "ArithmeticError: no more"
    assert "It ended early: ArithmeticError: no more." in page_of(tmp_path / "w")


def test_the_verdict_compares_the_score_with_its_baseline(tmp_path):
    page = task_run(tmp_path / "a", 0.5, [0.4, 0.6])
    assert "dev: f1 50.0% (95% interval 40.0% to 60.0%), better than tag O for all (f1 12.5%)." in page
    assert '<div class="card verdict good">' in page
    page = task_run(tmp_path / "b", 0.5, [0.1, 0.6])
    assert "not clearly better than tag O for all" in page and '<div class="card verdict doubtful">' in page
    assert "not better than tag O" in task_run(tmp_path / "c", 0.1, [0.05, 0.2])
    for splits, count in ((("dev",), 0), (("dev", "test"), 1)):  # the verdict is about the first split
        folder = tmp_path / str(count)
        task_run(folder, 0.1, None)
        (entry,) = json.loads((folder / "metrics.json").read_text())
        entry["baseline"]["is_beaten"] = False
        entries = [entry | {"split": split} for split in splits]
        (folder / "metrics.json").write_text(json.dumps(entries))
        page = write_report(folder, TASK, {"summary": warning_lines(entries)}).read_text()
        assert "longer training" in page and page.count("WARNING") == count
    # Of an error, lower values are better.
    assert "), better than tag O" in task_run(tmp_path / "d", 1.0, [0.5, 1.5], 2.0, "mse")
    assert "not clearly better" in task_run(tmp_path / "e", 1.0, [0.5, 2.5], 2.0, "mse")


def test_predictions_that_hardly_vary_are_doubtful(tmp_path):
    folder = write_run(tmp_path / "w", config="task: {kind: regression}\n", split="dev")
    cases = {
        0.1: "The predictions are nearly constant",
        0.9: "",
        0.5: "from 0 to 11, the predictions only from 0 to 5.5.",
    }
    for spread, words in cases.items():
        values = [(float(n), spread * n) for n in range(12)]
        points = {"title": "predicted over label", "x": "label", "y": "predicted", "values": values}
        page = write_report(folder, TASK, {"findings": {"dev": {"points": points}}}).read_text()
        assert words in page and ("nearly constant" in page, "only from" in page) == (spread == 0.1, spread == 0.5)


@pytest.mark.parametrize("option", ["--workdir runs/old", "--workdir 'runs/an old one'", "--workdir=old"])
def test_the_command_that_continues_a_moved_run_names_its_folder(tmp_path, option):
    folder = write_run(tmp_path / "new one")
    line = f"2026-01-01 10:00:00  command: bert-jax pretrain {option} --training.num_steps 40"
    (folder / "train.log").write_text(f"{line}\n")
    page = without_spans(run_page(read_run(folder), TASK)).replace("&#x27;", "'")
    assert f"bert-jax pretrain {option[:9]}{option[9]}'{folder}' --training.num_steps 40</pre>" in page


def test_a_run_in_progress_says_that_it_can_be_stopped(tmp_path):
    folder = write_run(tmp_path / "w")
    (folder / "train.log").write_text(LOG[: LOG.index("2026-01-01 12:00:30")])
    (folder / "checkpoints/10").mkdir(parents=True)
    page = without_spans(run_page(read_run(folder, "running"), TASK))
    for words in ("The log has no warning so far. The newest checkpoint is of step 10. If the process were killed "
                  "now, the 10 steps from there to the last line and those since then would be lost. You can stop",
                  "are added when the run is complete", f"<bdi>{folder}/checkpoints, step 10</bdi>"):  # fmt: skip
        assert words in page
    (folder / "train.log").write_text(LOG)
    assert "no warning so far" not in run_page(read_run(folder, "running"), TASK)


@pytest.mark.parametrize(("kind", "words"), [("qa", "predict --model {} --input FILE"), ("translation", None),
                                             ("sentence", "embed --model {} --input texts.txt")])  # fmt: skip
def test_a_complete_run_names_its_parameters_and_a_command_that_uses_them(tmp_path, kind, words):
    folder = write_run(tmp_path / "w", config=f"task: {{kind: {kind}}}\n", split="dev")
    page = without_spans(write_report(folder, TASK, {}).read_text())
    assert f"<dt>parameters in</dt><dd><bdi>{folder}/best</bdi>" in page
    assert (f"bert-jax {words.format(folder)}" in page) if words else "to use the result" not in page


def test_the_training_curve_tells_the_direction_of_a_run_with_one_evaluation(tmp_path):
    display = MaskedLm.display
    for last, words in ((5.0, "still fell at the end (5.500 at step 20, 5 at step 40), so more steps may help"),
                        (5.5, "no longer fell at the end (5.500, then 5.500)")):  # fmt: skip
        rows = [{"step": 20, "mlm_loss": 5.5}, {"step": 40, "mlm_loss": last}]
        rows.append({"step": 40, "split": "eval", "mlm_loss": 6.0})
        folder = write_run(tmp_path / str(last))
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        page = write_report(folder, display, {}).read_text()
        assert f"The masked-token loss in training {words}." in page


def test_the_kept_step_is_named_with_the_last_one(tmp_path):
    page = task_run(tmp_path / "w", 0.25, None, chosen_by={"metric": "f1"}, step=10)
    assert (
        "kept <b>25.0%</b> (step 10, ringed), last <b>25.0%</b>" in page and page.count('class="ring"') == 2
    )  # f1, loss
    assert (
        "The parameters are those of step 10, the first one with the best f1 (equal at the last step, 20)." in page
    )
    assert "the dev records also selected the step of the parameters, so the score on other texts" in page
    (entry,) = json.loads((tmp_path / "w/metrics.json").read_text())
    (tmp_path / "w/metrics.json").write_text(json.dumps([entry, {**entry, "split": "test"}]))
    assert "also selected the step" not in run_page(read_run(tmp_path / "w"), TASK)
    page = task_run(tmp_path / "v", 0.5, None, chosen_by={"metric": "f1"}, step=10)
    assert "The parameters are those of step 10, which has the best f1 (25.0% at the last step, 20)." in page


def test_the_verdict_ends_with_advice_about_the_number_of_steps(tmp_path):
    task_run(tmp_path / "w", 0.5, None, chosen_by={"metric": "f1"}, step=10)
    cases = {
        (3.0, 2.0, 1.0): "The dev loss still falls at the end (1): more steps may help.</p>",
        (
            2.0,
            1.5,
            2.0,
        ): "The dev loss rises (1.500 at step 20, 2 at the end) while the training loss falls: the run "
        "overfits since step 20; fewer steps or more records may help.</p>",
        (2.0, 1.5, 1.5): "",
    }
    for losses, words in cases.items():
        rows = [{"step": 10 * n, "loss": 4.0 / n} for n in (1, 2, 3)]
        rows += [{"step": 10 * n, "split": "dev", "loss": loss, "f1": 0.5} for n, loss in enumerate(losses, 1)]
        (tmp_path / "w/metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        page = run_page(read_run(tmp_path / "w"), TASK)
        assert words in page and ("may help" in page) == bool(words)


def test_training_classes_are_those_of_the_log(tmp_path):
    folder = write_run(tmp_path / "w", config="task: {kind: classification}\n")
    (folder / "train.log").write_text("2026-01-01 10:00:00  3 classes: <b> 5, c 7\n")
    assert "<dt>training classes</dt><dd>3 classes: <bdi>&lt;b&gt; 5</bdi>, <bdi>c 7</bdi>" in run_page(
        read_run(folder), TASK
    )


def test_types_of_entities_are_named_in_place_of_tags(tmp_path):
    (tmp_path / "config.yaml").write_text("task: {kind: tagging}\n")
    lines = ("3 tags: B-X 5, I-X 7, O 9", "1 types of entities: X 5")
    (tmp_path / "train.log").write_text("".join(f"2026-01-01 10:00:00  {line}\n" for line in lines))
    assert "<dt>training classes</dt><dd>1 types of entities: <bdi>X 5</bdi>" in run_page(read_run(tmp_path), TASK)


def test_a_killed_run_tells_what_is_left_and_whether_it_became_slow(tmp_path):
    folder = write_run(tmp_path / "w")
    (folder / "checkpoints/20").mkdir(parents=True)
    for last, words in ((2.0, "not slow, compared with the median of all lines of the log: 2 s per step"),
                        (6.0, "slow, compared with the median of all lines of the log: 6 s per step")):  # fmt: skip
        rows = [{"step": 10 * n, "seconds_per_step": own} for n, own in enumerate((2.0, 2.0, last), 1)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        page = run_page(read_run(folder), TASK)
        assert "step 20; the 10 steps after it" in page
        left = "A continued run has 20 steps left, about 0:00:40 of training."
        assert f"The last steps are {words}, median 2 s, fastest line 2 s. {left}" in page
        assert "Memory use is not recorded" in page
    (folder / "train.log").write_text("2026-01-01 10:00:09  ended early: preempted\n")
    assert "Memory use is not recorded" not in run_page(read_run(folder), TASK)


def test_a_complete_run_says_how_many_warnings_its_log_has(tmp_path):
    folder = write_run(tmp_path / "w")
    (folder / "report_data.json").write_text("{}")
    assert "The log has" not in run_page(read_run(folder), TASK)  # there is no log
    for count, words in enumerate(("no warning.", "1 warning, shown below.", "2 warnings, shown below.")):
        lines = [f"2026-01-01 10:00:00  WARNING: number {number}\n" for number in range(count)]
        (folder / "train.log").write_text("2026-01-01 10:00:00  step 10/40  loss 2\n" + "".join(lines))
        page = run_page(read_run(folder), TASK)
        assert f"The log has {words}" in page and page.count('<div class="warning">') == count


def test_of_equal_scores_the_step_with_the_lowest_loss_is_named(tmp_path):
    folder = tmp_path / "w"
    task_run(folder, 0.75, None, name="accuracy", chosen_by={"metric": "accuracy"}, step=10)
    (folder / "checkpoints/20").mkdir(parents=True)
    sentence = "Of the steps with this score, step 20 has the lowest log loss (0.2500; 0.5000 at the kept step)"
    cases = {
        (0.5, 0.25): f"{sentence}; its parameters are in checkpoints/20.",
        (0.5, 0.75): "Of these steps, it also has the lowest log loss.",
        (None, None): "",
    }
    for losses, words in cases.items():
        rows = [
            {"step": step, "split": "dev", "accuracy": 0.75, "log_loss": loss}
            for step, loss in zip((10, 20), losses, strict=True)
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        page = run_page(read_run(folder), TASK)
        assert f"with the best accuracy (equal at the last step, 20). {words}".strip() in page
        assert ("the lowest log loss" in page) == bool(words)


def test_the_command_and_the_folder_of_a_moved_run_are_those_of_today(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "new")
    (folder / "train.log").write_text("2026-01-01 10:00:00  command: bert-jax pretrain --workdir old\n")
    (folder / "report_data.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    page = without_spans(run_page(read_run(Path("new")), TASK))
    assert f"<dt>workdir</dt><dd><bdi>{folder}</bdi>" in page and "--workdir new</pre>" in page
    assert "--workdir old" not in page
