"""A run on a mixture of folders, from the command line: log, resume, other hosts, other weights."""

import re

import command
import pytest
from support import untimed

from bert_jax.commands.data import main
from bert_jax.training.logging.metrics_file import read_metrics

pytestmark = pytest.mark.entry


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe that mixes two parts, one of which is much smaller, both built with one vocabulary."""
    folder = tmp_path_factory.mktemp("mixture")
    training = {"num_steps": 24, "log_interval": 4, "checkpoint_interval": 8, "eval_interval": 12}
    path = command.recipe(folder, training=training, mesh={"data": 1})
    command.write_text(folder / "small.txt", documents=8, seed=5)
    vocab = ["--output", str(folder / "vocab.txt")]
    assert main(["vocab", "--config", str(path), *vocab]) == 0
    for name, corpus, passes in (("large", "corpus", 4), ("small", "small", 1)):
        words = ["--corpus", str(folder / f"{corpus}.txt"), "--shards", str(folder / "shards" / name)]
        words += ["--vocab", str(folder / "vocab.txt"), "--dupe_factor", str(passes)]
        assert main(["shards", "--config", str(path), *words]) == 0
    data = {"corpus": [], "vocab": str(folder / "vocab.txt"), "mixture": {"large": 0.75, "small": 0.25}}
    return command.recipe(folder, training=training, mesh={"data": 1}, data=data)


def trained(recipe, workdir, *arguments):
    code, out, err = command.run("--config", recipe, "--workdir", workdir, *arguments, devices=1)
    assert code == 0, err
    return out


@pytest.mark.slow
def test_a_mixture_is_logged_and_resumed_and_changes_only_with_a_phase(recipe, tmp_path):
    out = trained(recipe, tmp_path / "whole")
    assert re.search(r"step 1: mixture: large 75\.0% of the rows \(\d+ records\), small 25\.0%", out)
    assert re.search(r"step \d+: mixture: all \d+ records of small are read 1 time\(s\)", out)
    assert re.search(r"step 24/24 .*  large 7\d\.\d% epoch 0\.\d\d  small 2\d\.\d% epoch \d+\.\d\d", out)
    lines = untimed(read_metrics(tmp_path / "whole"))
    assert [line["step"] for line in lines if line.get("split") == "eval"] == [12, 24]
    last = [line for line in lines if "split" not in line][-1]
    assert last["epoch_small"] > 1 > last["epoch_large"] and abs(last["share_small"] - 0.25) < 0.02

    trained(recipe, tmp_path / "parts", "--training.num_steps", 12)
    assert "continuing at step 12" in trained(recipe, tmp_path / "parts")
    expected = [line for line in lines if "split" not in line]
    resumed = [line for line in untimed(read_metrics(tmp_path / "parts")) if "split" not in line]
    keys = ("step", "share_small", "epoch_large", "examples_seen")
    assert [[line[key] for key in keys] for line in resumed] == [[line[key] for key in keys] for line in expected]

    other = ("--data.mixture", "large=1", "small=1", "--training.num_steps", 28)
    code, _, err = command.run("--config", recipe, "--workdir", tmp_path / "parts", *other, devices=1)
    assert code == 2 and "data.mixture was [3, 1], now [1, 1]" in err and err.count("\n") == 1
    trained(recipe, tmp_path / "phase", *other, "--continue_from", tmp_path / "whole")
    assert abs(read_metrics(tmp_path / "phase")[-2]["share_small"] - 0.5) < 0.02


@pytest.mark.slow
def test_two_processes_read_the_mixture_of_one(recipe, tmp_path):
    code, _, err = command.run(
        "--config", recipe, "--workdir", tmp_path / "one", "--mesh.data", 2, "--training.num_steps", 8, devices=2
    )
    assert code == 0, err
    results = command.run_hosts(
        2, 1, "--config", recipe, "--workdir", tmp_path / "two", "--mesh.data", 2, "--training.num_steps", 8
    )
    assert [code for code, _, _ in results] == [0, 0], results[0][2]
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert [line.get("share_small") for line in one] == [line.get("share_small") for line in two]
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
