"""metrics.jsonl, loggers and callbacks: every logged step exactly once, whatever happened before."""

import json
import math

import numpy as np
import pytest
from run_logs import open_log, train_metrics

from bert_jax.config import PretrainConfig
from bert_jax.training.logging.logger import Logger, scalars
from bert_jax.training.logging.metrics_file import MetricsWriter, read_metrics
from bert_jax.training.logging.tensorboard import TensorBoard, read_events


def run(workdir, start_step, stop_step, *, interval=10, eval_interval=30, close=True):
    """What a loop writes from the checkpoint of ``start_step`` on, evaluation after the train line."""
    writer = open_log(workdir, start_step, (TensorBoard(),))
    for step in range(start_step, stop_step + 1):
        if step > start_step and step % interval == 0:
            writer.write(step, train_metrics(step))
        if step % eval_interval == 0 and not writer.has(step, "eval"):
            writer.write(step, {"split": "eval", "mlm_loss": step / 7})
    if close:
        writer.close()
    return writer


def written(workdir):
    """(step, tag, value) of every scalar in the folder, in file and record order."""
    files = sorted((workdir / "tensorboard").glob("*tfevents*"))
    return [
        (event.step, value.tag, value.simple_value)
        for path in files
        for event in read_events(path)
        for value in event.summary.value
    ]


def test_round_trip(tmp_path):
    writer = open_log(tmp_path, 0, (TensorBoard(),))
    writer.write(10, {"loss": np.float32(1.5), "epoch": 0.25, "mfu": None, "skipped_steps": np.int32(2)})
    writer.write(10, {"split": "eval", "loss": 1.25})
    # Flushed at once: readable before close.
    assert read_metrics(tmp_path) == [
        {"step": 10, "loss": 1.5, "epoch": 0.25, "mfu": None, "skipped_steps": 2},
        {"step": 10, "split": "eval", "loss": 1.25},
    ]
    assert written(tmp_path) == [
        (10, "train/loss", 1.5),
        (10, "train/epoch", 0.25),
        (10, "train/skipped_steps", 2.0),
        (10, "eval/loss", 1.25),
    ]
    writer.close()
    writer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_non_finite_values_become_null(tmp_path, value):
    open_log(tmp_path, 0, (TensorBoard(),)).write(1, {"loss": value})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "loss": None}
    assert written(tmp_path) == []


def test_unlogged_types_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="list"):
        MetricsWriter(tmp_path).write(1, {"loss": [1.0]})


def test_resume_drops_later_lines_and_repeats_none(tmp_path):
    run(tmp_path / "whole", 0, 100)
    killed = tmp_path / "killed"
    run(killed, 0, 57, close=False)
    run(killed, 40, 99, close=False)
    run(killed, 90, 93, close=False)  # evaluated at 90 before it was killed: not evaluated again
    run(killed, 90, 100)
    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert whole.count(b"\n") == 10 + 4
    assert (killed / "metrics.jsonl").read_bytes() == whole
    assert written(killed) == written(tmp_path / "whole")
    assert len(list((killed / "tensorboard").iterdir())) == 1


def test_killed_before_the_first_checkpoint_starts_over(tmp_path):
    run(tmp_path, 0, 57, close=False)
    run(tmp_path, 0, 20)
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 10, 20]
    assert [step for step, tag, _ in written(tmp_path) if tag == "train/loss"] == [10, 20]


def test_line_of_the_very_next_step_is_dropped(tmp_path):
    run(tmp_path, 0, 50)
    MetricsWriter(tmp_path, start_step=49).close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 10, 20, 30, 30, 40]


def test_what_is_there_is_not_written_again(tmp_path):
    run(tmp_path, 0, 30)
    before = read_metrics(tmp_path)
    writer = MetricsWriter(tmp_path, start_step=30)
    assert writer.has(30) and writer.has(30, "eval") and not writer.has(31)
    assert not writer.write(30, {"loss": 7.0})
    assert not writer.write(30, {"split": "eval", "mlm_loss": 7.0})
    assert read_metrics(tmp_path) == before


def test_file_cut_at_every_byte(tmp_path):
    run(tmp_path, 0, 30)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    last_line = whole.rstrip(b"\n").rfind(b"\n") + 1
    for size in range(last_line, len(whole) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:size])
        assert len(read_metrics(tmp_path)) == (5 if size == len(whole) else 4)
        run(tmp_path, 30, 30)
        assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_torn_event_file_is_rebuilt(tmp_path):
    run(tmp_path, 0, 50)
    before = written(tmp_path)
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert len(written(tmp_path)) < len(before)
    run(tmp_path, 50, 50)
    assert written(tmp_path) == before
    # A running TensorBoard reads files in name order and restarts at a START event.
    (new_path,) = (tmp_path / "tensorboard").iterdir()
    assert new_path.name > path.name
    head = list(read_events(new_path))[:2]
    assert head[0].file_version == "brain.Event:2"
    assert head[1].session_log.status == head[1].session_log.START


def test_rebuilt_events_keep_their_times(tmp_path):
    def times():
        (path,) = (tmp_path / "tensorboard").iterdir()
        return [event.wall_time for event in read_events(path) if event.summary.value]

    run(tmp_path, 0, 30)
    before = times()
    run(tmp_path, 30, 30)
    assert times() == before


def test_damaged_and_repeated_lines_go(tmp_path):
    lines = ['{"step": 1, "loss": 1.0}', "\x00\x00\x00", '{"step": 1, "loss": 2.0}', "[3]", '{"loss": 3.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 2, "loss": 4.0}']) + "\n")
    MetricsWriter(tmp_path, start_step=5).close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 4.0}]


def test_untouched_file_is_not_rewritten(tmp_path):
    run(tmp_path, 0, 30)
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    run(tmp_path, 30, 60)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == inode


def test_other_processes_write_nothing(tmp_path):
    writer = MetricsWriter(tmp_path / "run", 0, lead=False)
    assert not writer.write(1, {"loss": 1.0})
    writer.close()
    assert not (tmp_path / "run").exists()


class Recorder(Logger):
    """What a logger is told; ``fails`` is the method that raises."""

    def __init__(self, fails=""):
        self.calls, self._fails = [], fails

    def _add(self, name, *values):
        self.calls.append((name, *values))
        if name == self._fails:
            raise RuntimeError("the service\nis down")

    def open(self, run):
        self.run = run
        self._add("open", [row["step"] for row in run.rows], dict(run.seen))

    def line(self, row):
        self._add("line", row["step"], scalars(row))

    def evaluation(self, row):
        self._add("evaluation", row["step"], scalars(row))

    def report(self, page, image):
        self._add("report", page.name, image.name)

    def close(self):
        self._add("close")


def test_a_logger_gets_each_row_once_and_what_was_logged_before(tmp_path):
    for start, last in ((0, 30), (20, 40)):
        logger = Recorder()
        log = open_log(tmp_path, start, (logger,))
        for step in range(start + 10, last + 1, 10):
            log.write(step, train_metrics(step))
        log.write(last, {"split": "eval", "mlm_loss": 2.0})
        log.write(last, {"split": "eval", "mlm_loss": 2.0})  # a repeated evaluation
        log.report()
        log.close()
        log.close()
    numbers = {"train/learning_rate": 1e-4, "train/skipped_steps": 0}
    assert logger.run.config["training"]["num_steps"] == PretrainConfig().training.num_steps
    assert logger.calls == [
        ("open", [10, 20], {"train": 30, "eval": 30}),
        ("line", 30, {"train/loss": 9.7} | numbers),
        ("line", 40, {"train/loss": 9.6} | numbers),
        ("evaluation", 40, {"eval/mlm_loss": 2.0}),
        ("report", "report.html", "report.png"),
        ("close",),
    ]


@pytest.mark.parametrize("fails", ["open", "line", "evaluation", "report", "close"])
def test_a_logger_that_fails_does_not_end_the_run(tmp_path, fails, capsys):
    broken, other = Recorder(fails), Recorder()
    log = open_log(tmp_path, 0, (broken, other))
    log.write(10, train_metrics(10))
    log.write(10, {"split": "eval", "mlm_loss": 2.0})
    log.report()
    log.close()
    assert [call[0] for call in other.calls] == ["open", "line", "evaluation", "report", "close"]
    assert [call[0] for call in broken.calls][-1] == fails
    line = "WARNING: Recorder: the service is down; the run continues without this logger"
    assert capsys.readouterr().out.splitlines().count(line) == 1
    assert len(read_metrics(tmp_path)) == 2


def test_callbacks_get_each_row_and_end_the_run_with_true(tmp_path):
    rows, answers = [], iter([None, 1, np.bool_(True), False])

    def callback(row):
        rows.append(dict(row))
        row.clear()  # its own copy
        return next(answers)

    log = open_log(tmp_path, 0, (), (callback,))
    ends = []
    for step in (10, 20, 30, 40):
        log.write(step, train_metrics(step))
        ends.append(log.ends_early)
    log.close()
    assert rows == read_metrics(tmp_path)
    assert ends == [False, False, True, True]
    assert "step 30: a callback ends the run here" in (tmp_path / "train.log").read_text()


def test_an_error_in_a_callback_is_raised(tmp_path):
    with pytest.raises(ZeroDivisionError):
        open_log(tmp_path, 0, (), (lambda row: 1 / 0,)).write(10, train_metrics(10))
