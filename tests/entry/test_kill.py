"""kill -9 at any moment of a run, then the same command again: nothing is lost, nothing is doubled.

BERT_JAX_KILLS: number of kills (default 2).
"""

import json
import os
import signal
import time

import command
import jax
import numpy as np
import pytest
from support import objective_of, untimed

from bert_jax.config import PretrainConfig, load_config
from bert_jax.parallel import make_mesh
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.checkpoint.restore import restore_newest
from bert_jax.training.logging.metrics_file import TIMING_KEYS, read_metrics
from bert_jax.training.logging.tensorboard import read_events

pytestmark = [pytest.mark.entry, pytest.mark.slow]
KILLS = int(os.environ.get("BERT_JAX_KILLS", "2"))
DEVICES = 2


def scalars(workdir):
    """(tag, step, value) of every TensorBoard scalar, timings left out."""
    found = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        for event in read_events(path):
            for value in event.summary.value:
                if value.tag.rpartition("/")[2] not in TIMING_KEYS:
                    found.append((value.tag, event.step, value.simple_value))
    return sorted(found)


def newest_state(workdir, recipe):
    config = load_config(PretrainConfig, ["--config", str(recipe)])
    mesh = make_mesh(config.mesh, jax.devices()[:DEVICES])
    return restore_newest(
        workdir, config, mesh, objective_of(config, mesh).model, read_only=True, may_change=set(), report=print
    )


def logged_step(workdir):
    path = workdir / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith(b"}")]
    return max(steps, default=0)


def kill_when(process, condition):
    """kill -9 as soon as ``condition`` holds; False when the run ended before."""
    while process.poll() is None:
        if condition():
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return True
        time.sleep(0.002)
    process.communicate()
    return False


def moments(workdir, count):
    """Moments spread over start-up, training, saves and evaluation: each a condition on what is on disk."""
    checkpoints = workdir / "checkpoints"

    def saving():
        return checkpoints.is_dir() and any("orbax-checkpoint-tmp" in p.name for p in checkpoints.iterdir())

    def after(step):
        return lambda: logged_step(workdir) >= step

    def after_seconds(seconds):
        began = time.monotonic()
        return lambda: time.monotonic() - began > seconds

    def saving_after(step):
        return lambda: logged_step(workdir) >= step and saving()

    chosen = [
        lambda: saving_after(5), lambda: after_seconds(1.5), lambda: after(25), lambda: after(20),
        lambda: saving_after(30), lambda: after_seconds(4.0), lambda: after(35), lambda: saving_after(40),
        lambda: after(45), lambda: saving_after(50), lambda: after(55),
    ]  # fmt: skip
    return [chosen[i % len(chosen)] for i in range(count)]


# The state of every optimizer after a stop: bert_jax/training/test_optimizer_state.py.
@pytest.mark.parametrize(
    ("optimizer", "data"),
    [("adamw", {"reader": "tensorflow"}), ("muon", {"packing": "best_fit", "seq_length": 32})],
    ids=["adamw", "muon packed"],
)
def test_kills_leave_the_result_bitwise_the_same(tmp_path, optimizer, data):
    batch = {"global_batch_size": 40 if "packing" in data else 8}  # 40 sequences make an even number of rows
    recipe = command.recipe(
        tmp_path, mesh={"data": DEVICES}, optimizer={"name": optimizer}, data=data, training=batch
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    code, _, err = command.run("--config", recipe, "--workdir", whole, devices=DEVICES)
    assert code == 0, err
    kills, repeated = 0, []
    for moment in moments(cut, KILLS):
        process = command.start("--config", recipe, "--workdir", cut, devices=DEVICES)
        if not kill_when(process, moment()):
            break
        kills += 1
        reached, safe = logged_step(cut), max(saved_steps(cut), default=0)
        repeated.append(reached - safe)
    assert kills == KILLS
    interval = 10
    assert max(repeated) <= 2 * interval - 1, repeated
    code, _, err = command.run("--config", recipe, "--workdir", cut, devices=DEVICES)
    assert code == 0, err
    first, second = newest_state(whole, recipe), newest_state(cut, recipe)
    assert first.step == second.step == 60
    jax.tree.map(np.testing.assert_array_equal, first.state, second.state)
    assert first.meta["digest"] == second.meta["digest"]  # restoring clears the padding, the digest counts it
    assert untimed(read_metrics(whole)) == untimed(read_metrics(cut))
    steps = [(line["step"], line.get("split")) for line in read_metrics(cut)]
    assert len(set(steps)) == len(steps) == 12 + 3
    assert scalars(whole) == scalars(cut)
    print(f"{kills} kills, logged steps repeated per kill: {repeated}")
