"""Log lines, durations and the bar."""

import io
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
from rich.console import Console

from bert_jax.batch import BatchInfo
from bert_jax.config import TrainingConfig
from bert_jax.objectives.masked_lm import COLUMNS
from bert_jax.training.logging import progress
from bert_jax.training.logging.meter import IntervalMeter, Recorder
from bert_jax.training.logging.progress import Progress, format_count, format_duration, format_line
from bert_jax.training.spikes import LossGuard

METRICS = {
    "loss": 5.1234,
    "mlm_loss": 4.8121,
    "mlm_accuracy": 0.2141,
    "nsp_loss": 0.6307,
    "nsp_accuracy": 0.62,
    "learning_rate": 9.9e-5,
    "grad_norm": 1.4213,
    "seconds_per_step": 0.1234,
    "tokens_per_second": 8300.0,
    "mfu": None,
    "skipped_steps": 0,
    "blank_records": 0,
}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (75.4, "0:01:15"), (3600, "1:00:00"), (100_000, "1d 3:46:40"), (-3, "0:00:00")],
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.00k"),
        (8300, "8.30k"),
        (12_345, "12.3k"),
        (123_456, "123k"),
        (999_600, "1.00M"),
        (1.2e9, "1.20B"),
        (9_996, "10.0k"),
    ],
)
def test_format_count(value, text):
    assert format_count(value) == text


def test_train_line():
    assert format_line(1200, 10_000, METRICS, 723, COLUMNS) == (
        "step 1,200/10,000  loss 5.123  mlm 4.812 (acc 0.214)  nsp 0.631 (acc 0.620)  lr 9.9e-05  grad 1.42  "
        "0.123 s/step  8.30k tok/s  mfu n/a  eta 0:12:03"
    )


def test_line_shows_trouble_and_mfu():
    line = format_line(5, 10, METRICS | {"loss": None, "mfu": 0.4567, "skipped_steps": 3, "blank_records": 1200})
    assert "loss n/a" in line
    assert line.endswith("mfu 45.7%  skipped 3  blank 1,200")


def test_line_shows_the_parts_of_a_mixture():
    parts = {"share_wiki": 0.7004, "epoch_wiki": 0.816, "share_few": 0.2996, "epoch_few": 12.5}
    assert "  wiki 70.0% epoch 0.82  few 30.0% epoch 12.50  eta" in format_line(5, 10, METRICS | parts, 60, COLUMNS)
    assert "wiki" not in format_line(5, 10, METRICS | parts | {"split": "eval"}, 60, COLUMNS)


def test_values_and_notes_of_a_batch_reach_the_log():
    """The values are those of the step of the line; a note comes when its step is done."""
    config, lines, notes = TrainingConfig(num_steps=4, log_interval=2), [], []
    meter = IntervalMeter(0)
    recorder = Recorder(
        config, meter, LossGuard(config), lambda step, line: lines.append((step, line)), say=notes.append
    )
    scalars = {
        "loss": 1.0,
        "tokens": 1.0,
        "finite": True,
        "blank_rows": 0,
        "grad_norm": 1.0,
        "sums": {},
        "last": {},
    }
    for step in range(1, 5):
        metrics = SimpleNamespace(unpack=lambda: scalars)
        told = ("all 9 records of few are read 1 time(s)",) if step == 3 else ()
        recorder.add(step, metrics, BatchInfo(step - 1, 0.0, step, 1, values={"share_few": step / 10}, notes=told))
    recorder.drain()
    assert [(step, line["share_few"]) for step, line in lines] == [(2, 0.2), (4, 0.4)]
    assert notes == ["step 3: all 9 records of few are read 1 time(s)"]


def test_eval_line_without_nsp():
    metrics = {"split": "eval", "loss": 4.5, "mlm_loss": 4.5, "mlm_accuracy": 0.25, "nsp_loss": None}
    assert format_line(50, 100, metrics, 60, COLUMNS) == "eval step 50/100  loss 4.500  mlm 4.500 (acc 0.250)"


def test_plain_output_and_log_file(tmp_path):
    output = io.StringIO()
    shown = Progress(100, 0, tmp_path / "logs" / "train.log", columns=COLUMNS, console=Console(file=output))
    shown.line("training on [MASK] tokens")
    shown.tick(5)
    shown.update(10, METRICS)
    shown.update(10, {"split": "eval", "loss": 4.5})
    shown.close()
    shown.close()
    lines = output.getvalue().splitlines()
    assert lines[0] == "training on [MASK] tokens"
    assert lines[1].startswith("step 10/100  loss 5.123") and lines[1].endswith("eta 0:00:11")
    assert lines[2] == "eval step 10/100  loss 4.500"
    logged = (tmp_path / "logs" / "train.log").read_text().splitlines()
    assert [line.split("  ", 1)[1] for line in logged] == lines
    # A resumed run appends.
    with closing(Progress(100, 10, tmp_path / "logs" / "train.log", console=Console(file=io.StringIO()))) as shown:
        shown.line("resumed at step 10")
    assert len((tmp_path / "logs" / "train.log").read_text().splitlines()) == 4


def test_terminal_shows_bar_and_messages(tmp_path):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=110, color_system=None)
    with closing(Progress(100, 0, tmp_path / "train.log", columns=COLUMNS, console=console)) as shown:
        shown.line("filled: the [mask] sat")
        shown.update(40, METRICS)
        shown.update(40, {"split": "eval", "loss": 4.5})
    text = output.getvalue()
    assert "filled: the [mask] sat" in text  # not taken for markup
    assert "step 40/100" in text and "40%" in text and "mlm 4.812" in text
    assert "eval step 40/100  loss 4.500" in text
    assert "loss 5.123" not in text  # the bar stands for log lines
    assert "loss 5.123" in (tmp_path / "train.log").read_text()
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_eta_follows_the_last_intervals(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    output = io.StringIO()
    shown = Progress(1000, 0, console=Console(file=output))
    for step, moment in ((10, 100.0), (20, 105.0), (30, 110.0)):  # 100 s to the first line: compilation
        now[0] = moment
        shown.update(step, {"seconds_per_step": 0.25})
    etas = [line.split("eta ")[1] for line in output.getvalue().splitlines()]
    assert etas == ["0:04:07", "0:08:10", "0:08:05"]


def test_other_processes_show_nothing(tmp_path, capsys):
    shown = Progress(100, 0, tmp_path / "train.log", lead=False)
    shown.line("hello")
    shown.tick(1)
    shown.update(10, METRICS)
    shown.close()
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "train.log").exists()


def test_an_error_leaves_the_terminal_usable():
    program = (
        "from rich.console import Console; from bert_jax.training.logging.progress import Progress; "
        "shown = Progress(10, 0, console=Console(force_terminal=True)); raise SystemExit(44)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 44, done.stderr
    assert done.stdout.rfind("\x1b[?25h") > done.stdout.rfind("\x1b[?25l") > -1  # cursor hidden, then shown


def test_a_line_of_a_task_shows_its_first_metrics():
    values = {"split": "dev", "f1": 0.51239, "exact": 0.25, "n": None, "a": 1.0, "b": 0.5, "c": 0.1}
    assert format_line(20, 100, values) == "dev step 20/100  f1 0.5124  exact 0.2500  a 1.0000  b 0.5000"
