"""Loss spikes and runs of non-finite steps: found, gone back from, left out, and all of it bitwise repeatable."""

import dataclasses
import json
import math
import random

import jax
import numpy as np
import pytest
from support import SyntheticIterator, SyntheticSource, objective_of, tiny_config, train_synthetic, untimed

from bert_jax.parallel import make_mesh
from bert_jax.process.exits import Stop
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.checkpoint.restore import restore_newest
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.spikes import LossGuard, RollBack

POLICY = "--training.spike_rollback 2 2 --training.max_bad_steps 2"
SPIKES = "--training.spike_limit 20 6"


@dataclasses.dataclass
class TroubledIterator(SyntheticIterator):
    """Marked data steps have a loss 21 times as high, or end the run as a fault would."""

    spikes: frozenset[int] = frozenset()
    breaks: frozenset[int] = frozenset()

    def __next__(self):
        if self.data_step in self.breaks:
            raise ConnectionError("the host is gone")
        spike = self.data_step in self.spikes
        batch, info = super().__next__()
        if spike:
            targets = batch["mlm_weights"] > 0
            # Weight over weight plus epsilon (1e-5): -1.05 over -0.05.
            batch["mlm_weights"][targets] = -1.05e-5 / targets.sum()
        return batch, info


@dataclasses.dataclass
class TroubledSource(SyntheticSource):
    spikes: frozenset[int] = frozenset()
    breaks: frozenset[int] = frozenset()

    def train(self, rows):
        return TroubledIterator(self.config, rows, self.poison, spikes=self.spikes, breaks=self.breaks)


@pytest.fixture(scope="module", autouse=True)
def small():
    """No drawing: it would take longer than the runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bert_jax.training.pretrain.PretrainJob.finish", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def spiked(tmp_path_factory):
    """A run that met a spike in the batch of step 13."""
    config, workdir = tiny_config(POLICY, SPIKES), tmp_path_factory.mktemp("spiked") / "run"
    train_synthetic(config, workdir, source=TroubledSource(config, spikes=frozenset({12})))
    return workdir


def newest(workdir, config):
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    return restore_newest(
        workdir, config, mesh, objective_of(config, mesh).model, read_only=True, may_change=set(), report=print
    )


def assert_equal_runs(first, second, config):
    one, other = newest(first, config), newest(second, config)
    assert one.step == other.step
    jax.tree.map(np.testing.assert_array_equal, one.state, other.state)
    assert {k: one.meta[k] for k in ("data", "meter", "guard")} == {
        k: other.meta[k] for k in ("data", "meter", "guard")
    }
    assert untimed(read_metrics(first)) == untimed(read_metrics(second))


def test_statistics_and_their_state():
    config = tiny_config("--training.spike_limit 3 50").training
    draws = random.Random(0)
    losses = [draws.gauss(5, 0.1) for _ in range(60)]
    guard = LossGuard(config)
    for step, loss in enumerate(losses[:50], 1):
        guard.add(step, 50.0 if step == 2 else loss, bad_in_a_row=0)  # before the window is full nothing is a spike
    guard = LossGuard(config)
    for step, loss in enumerate(losses, 1):
        guard.add(step, loss, bad_in_a_row=0)
    guard.add(61, math.nan, bad_in_a_row=1)  # counts nowhere
    state = guard.state()
    assert abs(state["mean"] - 5) < 0.05 and abs(math.sqrt(state["variance"]) - 0.1) < 0.03
    again = LossGuard(config)
    again.restore(json.loads(json.dumps(state)))
    for one in (guard, again):
        one.add(62, state["mean"] + 2.9 * math.sqrt(state["variance"]), bad_in_a_row=0)
    assert guard.state() == again.state()
    with pytest.raises(Stop, match=r"loss 5\.\d+ at step 63 is \d\.\d standard deviations .*spike_rollback,"):
        guard.add(63, 5.9, bad_in_a_row=0)


def test_what_is_gone_back_to():
    guard = LossGuard(tiny_config("--training.spike_rollback 1 --training.max_bad_steps 3").training)
    guard.add(9, math.nan, bad_in_a_row=2)
    with pytest.raises(RollBack, match="3 steps in a row, up to step 10") as back:
        guard.add(10, math.nan, bad_in_a_row=3)
    assert (back.value.first_step, back.value.last_step) == (8, 10)
    guard.rollbacks = 1
    with pytest.raises(Stop, match="after 1 rollbacks") as stop:
        guard.add(10, math.nan, bad_in_a_row=3)
    assert stop.value.code == 44 and stop.value.agreed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "left_out"),
    [
        ({"spikes": frozenset({12})}, [[10, 15]]),  # step 13 is one: back to 10, without 3 batches and 2 more
        ({"poison": frozenset({14, 15})}, [[10, 18]]),  # steps 15 and 16: that of 15 is from within, and goes
    ],
)
def test_going_back_and_leaving_out_repeats_bitwise(spiked, tmp_path, trouble, left_out):
    config = tiny_config(POLICY, SPIKES if "spikes" in trouble else "")
    train_synthetic(config, tmp_path / "a", source=TroubledSource(config, **trouble))
    if "spikes" in trouble:
        assert_equal_runs(tmp_path / "a", spiked, config)
    meta = newest(tmp_path / "a", config).meta
    assert meta["data"]["skipped"] == left_out and meta["guard"]["rollbacks"] == 1
    assert meta["data"]["data_step"] == 20 + left_out[0][1] - left_out[0][0]
    # The record holds every logged step once, and none of what was gone back from.
    lines = [line for line in read_metrics(tmp_path / "a") if "split" not in line]
    assert [line["step"] for line in lines] == list(range(2, 21, 2))
    assert all(line["skipped_steps"] == 0 and line["loss"] < 10 for line in lines)
    assert [line["examples_seen"] for line in lines] == [8 * step for step in range(2, 21, 2)]
    log = (tmp_path / "a" / "train.log").read_text()
    assert f"back to step 10, skipping {left_out[0][1] - 10} batches (rollback 1 of 2)" in log
    assert saved_steps(tmp_path / "a") == [10, 15, 20]


def test_broken_off_before_and_after_going_back(spiked, tmp_path):
    """Resumed before the next save, a run meets the spike again and goes back again; after it, it does not."""
    config = tiny_config(POLICY, SPIKES)
    spikes = frozenset({12})
    for gone_at in ({16}, {22}):
        with pytest.raises(ConnectionError):
            broken = TroubledSource(config, spikes=spikes, breaks=frozenset(gone_at))
            train_synthetic(config, tmp_path / "cut", source=broken)
    train_synthetic(config, tmp_path / "cut", source=TroubledSource(config, spikes=spikes))
    assert_equal_runs(spiked, tmp_path / "cut", config)
    assert (tmp_path / "cut" / "train.log").read_text().count("back to step 10") == 2


def test_none_to_go_back_to(tmp_path):
    config = tiny_config(POLICY)
    early = SyntheticSource(config, poison=frozenset({1, 2}))
    with pytest.raises(Stop, match="no earlier checkpoint exists") as stop:
        train_synthetic(config, tmp_path / "b", source=early)
    assert stop.value.code == 44
