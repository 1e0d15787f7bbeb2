"""A run without TensorFlow is the run with it."""

from pathlib import Path

import command
import pytest
from support import untimed

from bert_jax.training.logging.metrics_file import read_metrics

pytestmark = pytest.mark.entry
PROGRAM = Path(__file__).with_name("without_tensorflow.py")


def run(*words):
    """Run in a process that cannot import TensorFlow."""
    ((code, out, err),) = command.run_hosts(1, 2, *words, program=PROGRAM)
    return code, out, err


@pytest.mark.slow
def test_without_tensorflow_a_run_prepares_text_trains_and_resumes(tmp_path):
    training = {"num_steps": 6, "log_interval": 1, "checkpoint_interval": 3, "eval_interval": 3}
    recipe = command.recipe(tmp_path, training=training, mesh={"data": 2})
    code, _, err = run("--config", recipe, "--workdir", tmp_path / "without")
    assert (code, err) == (0, "")
    code, _, err = command.run("--config", recipe, "--workdir", tmp_path / "with", devices=2)
    assert (code, err) == (0, "")
    expected = untimed(read_metrics(tmp_path / "with"))
    assert untimed(read_metrics(tmp_path / "without")) == expected
    code, _, err = command.run(
        "--config", recipe, "--workdir", tmp_path / "both", "--training.num_steps", 3, devices=2
    )
    assert (code, err) == (0, "")
    code, out, err = run("--config", recipe, "--workdir", tmp_path / "both")
    assert (code, err) == (0, "") and "continuing at step 3" in out


@pytest.mark.slow
def test_tensorflow_is_asked_for_by_name(tmp_path):
    recipe = command.recipe(tmp_path, mesh={"data": 2})
    code, _, err = run("--config", recipe, "--workdir", tmp_path / "w", "--data.reader", "tensorflow")
    assert (
        code == 2 and err.startswith("error: data.reader: tensorflow is not installed; ") and err.count("\n") == 1
    )
