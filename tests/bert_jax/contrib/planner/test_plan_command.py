"""The command bert-jax plan, and one real compilation for a TPU."""

import importlib.util
import json
import math
import shlex
from pathlib import Path

import pytest

from bert_jax.commands import main as cli
from bert_jax.config import PretrainConfig, load_config
from bert_jax.contrib.planner.plan import Asked, make_plan
from bert_jax.contrib.planner.topology import parse_topology

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
TINY = shlex.split(
    "--model.vocab_size 512 --model.hidden_size 128 --model.num_layers 2 --model.num_attention_heads 2 "
    "--model.intermediate_size 256 --execution.dtype bfloat16 --execution.prng rbg --data.seq_length 128 "
    "--training.global_batch_size 64 --training.num_steps 3600"
)


def run(capsys, *words):
    code = cli.main(["plan", *words])
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_text_and_json_say_the_same(capsys):
    words = ("--config", str(CONFIGS / "bert_large.yaml"), "--topology", "h100:8", "--price_per_chip_hour", "2")
    code, text, _ = run(capsys, *words)
    assert code == 0
    values = json.loads(run(capsys, *words, "--json")[1])
    assert f"{1000 * values['predicted_step_seconds']:,.1f} ms, {values['predicted_mfu']:.1%} MFU" in text
    assert f"{values['cost']:,.0f} by --price_per_chip_hour" in text
    assert "An estimate by arithmetic alone, nothing was compiled or run" in text


def test_documented_fields_are_those_of_the_json(capsys):
    document = (CONFIGS.parent / "docs" / "planning.md").read_text()
    _, out, _ = run(capsys, "--topology", "h100:8", "--json", "--config", str(CONFIGS / "bert_large.yaml"))
    missing = [name for name in json.loads(out) if f"`{name}`" not in document]
    assert not missing


@pytest.mark.slow
def test_search_writes_a_recipe_that_loads(capsys, tmp_path):
    file = tmp_path / "best.yaml"
    words = ("--config", str(CONFIGS / "bert_large.yaml"), "--topology", "h100:8", "--search")
    code, out, progress = run(capsys, *words, "--output", str(file))
    assert code == 0
    assert f"best: {file}" in out
    assert "layouts by arithmetic" in progress
    config = load_config(PretrainConfig, ["--config", str(file)])
    original = load_config(PretrainConfig, ["--config", str(CONFIGS / "bert_large.yaml")])
    assert config.model == original.model
    assert config.optimizer == original.optimizer
    assert config.training.global_batch_size == original.training.global_batch_size
    assert make_plan(config, parse_topology("h100:8"), Asked()).fits


@pytest.mark.slow
def test_show_sharding_of_any_number_of_devices(capsys):
    words = (
        "--config",
        str(CONFIGS / "bert_large.yaml"),
        "--show_sharding",
        "--mesh.fsdp",
        "-1",
        "--mesh.data",
        "1",
    )
    code, text, _ = run(capsys, *words, "--devices", "512")
    assert code == 0
    assert "mesh data=1 fsdp=512 tensor=1" in text
    assert "encoder/layer_*/feed_forward/output/kernel x24" in text
    table = json.loads(run(capsys, *words, "--topology", "v5p-1024", "--json")[1])
    assert table["mesh"] == {"data": 1, "fsdp": 512, "tensor": 1}
    assert table["parameter_bytes"] == sum(row["device_bytes"] for row in table["parameters"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "--topology: "),
        ("--topology v5x:2x2", "'v5x:2x2' is not known; allowed: TPU: v2"),
        ("--topology h100:8 --mesh.fsdp 3", "does not fit 8 devices; use sizes whose product divides 8"),
        ("--topology h100:8 --model.num_layer 3", "did you mean 'model.num_layers'?"),
        ("--topolgy h100:8", "did you mean 'topology'?"),
        ("--topology h100:8 --devices 8", "--devices cannot be combined with --topology"),
        ("--topology h100:8 --price_per_chip_hour -1", "-1.0 is not allowed; use 0 or more"),
        ("--topology h100:8 --output x.yaml", "add --search"),
        ("--topology h100:8 --search --tries 0", "--tries: 0 is not allowed"),
        ("--topology h100:8 --search --batches 4,many", "'many' is not allowed"),
        ("--topology h100:8 --search --output no/such/folder/x.yaml", "--output no/such/folder/x.yaml: "),
    ],
)
def test_mistakes_are_one_line(capsys, words, says):
    code, out, error = run(capsys, "--config", str(CONFIGS / "bert_large.yaml"), *words.split())
    assert code == 2
    assert out == ""
    assert says in error
    assert error.count("\n") == 1


def test_without_libtpu_one_line_names_the_extra(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name))
    code, _, error = run(capsys, "--topology", "v5e:2x2", *TINY)
    assert code == 2
    assert "pip install 'bert_jax[tpu]'" in error
    assert error.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is for Linux on x86-64")
@pytest.mark.slow
def test_real_compilation_for_a_tpu(capsys):
    """A tiny recipe through the whole command: compiled for 4 chips, and refused for lack of memory."""
    code, out, _ = run(capsys, "--topology", "v5e:2x2", "--json", *TINY)
    assert code == 0
    plan = json.loads(out)
    assert plan["method"] == "compiled"
    assert plan["fits"]
    assert not plan["scan_layers"]
    assert plan["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1}
    assert plan["peak_bytes"] < plan["hbm_bytes"] == round(15.75 * 2**30)
    assert plan["argument_bytes"] <= plan["peak_bytes"]
    assert 0 < plan["predicted_mfu"] < 1
    assert plan["hours"] == pytest.approx(plan["predicted_step_seconds"])  # 3,600 steps
    assert math.isclose(sum(plan["shares"].values()), 1, rel_tol=1e-6)
    assert plan["unestimated_share"] == pytest.approx(sum(plan["unestimated"].values()))
    assert 0 < plan["unestimated_share"] < 0.5  # the attention kernel

    code, out, _ = run(capsys, "--topology", "v5e:2x2", *TINY, "--training.global_batch_size", str(2**20))
    assert code == 0
    assert "fits      no: it needs" in out
    assert "training.accumulation_steps" in out
