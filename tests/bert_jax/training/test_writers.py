"""metrics.jsonl and TensorBoard events: every logged step exactly once, whatever happened before."""

import json
import math

import numpy as np
import pytest

from bert_jax.training.logging.metrics_file import MetricsWriter, read_events, read_metrics


def train_metrics(step):
    return {"loss": 10.0 - step / 100, "learning_rate": 1e-4, "mfu": None, "skipped_steps": 0}


def run(workdir, start_step, stop_step, *, interval=10, eval_interval=30, close=True):
    """What a loop writes from the checkpoint of ``start_step`` on, evaluation after the train line."""
    writer = MetricsWriter(workdir, start_step)
    for step in range(start_step, stop_step + 1):
        if step > start_step and step % interval == 0:
            writer.write(step, train_metrics(step))
        if step % eval_interval == 0 and not writer.has(step, "eval"):
            writer.write(step, {"split": "eval", "mlm_loss": step / 7})
    if close:
        writer.close()
    return writer


def scalars(workdir):
    """(step, tag, value) of every scalar in the folder, in file and record order."""
    files = sorted((workdir / "tensorboard").glob("*tfevents*"))
    return [
        (event.step, value.tag, value.simple_value)
        for path in files
        for event in read_events(path)
        for value in event.summary.value
    ]


def test_round_trip(tmp_path):
    writer = MetricsWriter(tmp_path)
    assert writer.write(10, {"loss": np.float32(1.5), "epoch": 0.25, "mfu": None, "skipped_steps": np.int32(2)})
    assert writer.write(10, {"split": "eval", "loss": 1.25})
    # Flushed at once: readable before close.
    assert read_metrics(tmp_path) == [
        {"step": 10, "loss": 1.5, "epoch": 0.25, "mfu": None, "skipped_steps": 2},
        {"step": 10, "split": "eval", "loss": 1.25},
    ]
    assert scalars(tmp_path) == [
        (10, "train/loss", 1.5),
        (10, "train/epoch", 0.25),
        (10, "train/skipped_steps", 2.0),
        (10, "eval/loss", 1.25),
    ]
    writer.close()
    writer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_non_finite_values_become_null(tmp_path, value):
    MetricsWriter(tmp_path).write(1, {"loss": value})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "loss": None}
    assert scalars(tmp_path) == []


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
    assert scalars(killed) == scalars(tmp_path / "whole")
    assert len(list((killed / "tensorboard").iterdir())) == 1


def test_killed_before_the_first_checkpoint_starts_over(tmp_path):
    run(tmp_path, 0, 57, close=False)
    run(tmp_path, 0, 20)
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 10, 20]
    assert [step for step, tag, _ in scalars(tmp_path) if tag == "train/loss"] == [10, 20]


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
    before = scalars(tmp_path)
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert len(scalars(tmp_path)) < len(before)
    run(tmp_path, 50, 50)
    assert scalars(tmp_path) == before
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
