"""Several processes save and restore one checkpoint: what one of them finds bad is used by none."""

import json
import shutil
import time
from pathlib import Path

import command
import pytest

from bert_jax.training.checkpoint.digest import check_files
from bert_jax.training.checkpoint.folder import saved_steps

pytestmark = pytest.mark.entry
PROGRAM = Path(__file__).with_name("one_with_checkpoints.py")


def run(case, folder):
    return command.run_hosts(2, 2, case, folder, program=PROGRAM, timeout=500)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The workdir of a finished run of two processes, with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    for code, _, err in run("train", folder):
        assert code == 0, err
    assert saved_steps(folder / "run") == [2, 4, 6]
    for step in (2, 4, 6):
        checkpoint = folder / "run" / "checkpoints" / str(step)
        assert (checkpoint / "checksums.json").is_file() and check_files(checkpoint) is None
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["restore_bad_files", "restore_bad_contents"])
def test_a_checkpoint_that_one_process_finds_damaged_is_skipped_by_all(trained, tmp_path, case):
    shutil.copytree(trained, tmp_path / "run")
    meta = json.loads((trained / "checkpoints" / "4" / "meta" / "metadata").read_text())
    for code, out, err in run(case, tmp_path):
        assert code == 0, err
        assert f"restored 4 {meta['digest']}" in out
        assert "checkpoint 6 is damaged (process 1: what one host sees); moved to" in out
    assert saved_steps(tmp_path / "run") == [2, 4]
    assert check_files(tmp_path / "run" / "damaged_checkpoints" / "6") is None  # moved whole, once


@pytest.mark.slow
def test_a_save_that_fails_on_one_process_ends_all(tmp_path):
    began = time.monotonic()
    results = run("fail_to_save", tmp_path)
    for code, _, err in results:
        assert code == 2, err
        assert "the disk of this host is gone" in err and "Traceback" not in err
    assert "process 1" in results[0][2].splitlines()[-1]
    assert saved_steps(tmp_path / "run") == [2]
    assert time.monotonic() - began < 300
