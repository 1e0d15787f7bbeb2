"""Metrics in Weights & Biases: equal to metrics.jsonl, and each step once after a kill."""

import json
import sys
import time

import pytest
from run_logs import log_with_a_kill, open_log, train_metrics

from bert_jax.contrib.experiments.wandb_logger import WeightsAndBiases
from bert_jax.training.logging.logger import make_loggers, scalars
from bert_jax.training.logging.metrics_file import read_metrics

BLOCK, HEADER = 1 << 15, 7  # of the log files of LevelDB, whose records are messages here


def history(path):
    """The rows in a file of an offline run; internal values begin with an underscore."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, offset = path.read_bytes(), HEADER
    while offset + HEADER <= len(content):
        if BLOCK - offset % BLOCK < HEADER:
            offset += BLOCK - offset % BLOCK
            continue
        start, size = offset + HEADER, int.from_bytes(content[offset + 4 : offset + 6], "little")
        assert content[offset + 6] == 1, "a record in one piece"
        record, offset = Record.FromString(content[start : start + size]), start + size
        if row := {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}:
            yield {name: value for name, value in row.items() if not name.startswith("_")}


@pytest.fixture
def offline(monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.mark.slow
def test_an_offline_run_equals_the_metrics_and_repeats_no_step(tmp_path, offline):
    workdir = tmp_path / "w"

    def start():
        time.sleep(1.0)  # the names of offline runs have seconds
        return WeightsAndBiases()

    log_with_a_kill(workdir, start)
    logged, deadline = [], time.monotonic() + 30
    while len(logged) < 6 and time.monotonic() < deadline:  # finish() returns before the file is complete
        logged = [row for path in sorted(workdir.glob("wandb/offline-run-*/*.wandb")) for row in history(path)]
    expected = [{"step": row["step"], **scalars(row)} for row in read_metrics(workdir)]
    # The evaluation of step 30 came before the kill, so only the service still has it.
    assert {"step": 30, "eval/mlm_loss": 30 / 7} in logged
    assert [row for row in logged if row != {"step": 30, "eval/mlm_loss": 30 / 7}] == expected
    assert len(list(workdir.glob("wandb/offline-run-*"))) == 2
    assert (workdir / "wandb_run.txt").read_text() in str(next(workdir.glob("wandb/offline-run-*")))


@pytest.mark.slow
def test_a_run_that_the_caller_has_started_is_used_and_left_open(tmp_path, offline):
    import wandb

    with wandb.init(dir=str(tmp_path)) as run:
        log = open_log(tmp_path / "w", 0, (WeightsAndBiases(),))
        log.write(10, train_metrics(10))
        log.close()
        assert wandb.run is run
        assert run.config["optimizer"]["name"] == "adamw"
        assert run.summary["train/loss"] == 9.9


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ValueError, match=r"--loggers wandb: wandb is not installed; run: pip install .bert_jax\[wandb"
    ):
        make_loggers(["wandb"])


def test_an_unknown_logger_is_one_line():
    with pytest.raises(
        ValueError, match="--loggers: 'wandbb' is not allowed; allowed: tensorboard, wandb; did you m"
    ):
        make_loggers(["tensorboard", "wandbb"])
