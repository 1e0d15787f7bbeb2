"""An encoder outside the project, by entry point and by ``--model.module``: FNet of docs/examples."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from builders import tiny_model
from support import tiny_config, whole_and_resumed

from bert_jax import registry
from bert_jax.commands.main import main
from bert_jax.commands.options import take_encoder
from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig, ModelSpec, spec_to_json
from bert_jax.interop.readers import read_weights
from bert_jax.model.flops import training_flops_per_sequence

FNET = Path(__file__).parents[1] / "docs" / "examples" / "fnet_encoder.py"
MODULE = ["--model.module", str(FNET)]
OPTIONS = (
    "--model.encoder fnet_encoder --model.attention_layers 1 --model.num_layers 2 --training.num_steps 4 "
    "--training.eval_interval 2 --training.eval_batches 1"
)


@pytest.fixture(autouse=True)
def fresh():
    """No part that a test adds is known to the next one."""
    registry.names.cache_clear()
    yield
    registry._ADDED.clear()
    registry.names.cache_clear()


@pytest.fixture(params=["entry point", "file"])
def words(request, tmp_path, monkeypatch):
    """Make FNet known; the further words of a command that reads a model of it."""
    if request.param == "file":
        take_encoder(MODULE)
        yield MODULE
        return
    place = tmp_path / "installed"
    information = place / "others-1.0.dist-info"
    information.mkdir(parents=True)
    shutil.copy(FNET, place)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    groups = (("encoders", "Encoder"), ("encoder_options", "Config"))
    points = [f"[bert_jax.{group}]\nfnet_encoder = fnet_encoder:{name}\n" for group, name in groups]
    (information / "entry_points.txt").write_text("".join(points))
    monkeypatch.syspath_prepend(place)
    yield []


def forget(words):
    """Undo ``--model.module``, as in a new process."""
    if words:
        registry._ADDED.clear()
        registry.names.cache_clear()


def test_it_trains_resumes_embeds_and_is_exported(words, tmp_path, capsys):
    config = tiny_config(OPTIONS)
    lines = whole_and_resumed(config, tmp_path, 5)
    assert [line["step"] for line in lines if line.get("split") == "eval"] == [2, 4]
    assert training_flops_per_sequence(config.model, seq_length=16, max_predictions=3) > 0
    run = str(tmp_path / "whole")
    forget(words)
    capsys.readouterr()
    assert main(["embed", "--model", run, *words, "a text", "another one"]) == 0
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 2
    forget(words)
    target = tmp_path / "exported"
    assert main(["export", "--model", run, *words, "--format", "npz", "--to", str(target)]) == 0
    described = read_weights(target).spec.model
    assert described.encoder == "fnet_encoder" and described.attention_layers == 1
    forget(words)
    capsys.readouterr()
    assert main(["embed", "--model", str(target), *words, "a text", "another one"]) == 0
    assert capsys.readouterr().out == first
    forget(words)
    if words:
        assert main(["embed", "--model", str(target), "a text"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "model.encoder: 'fnet_encoder' is not allowed; allowed: transformer, " in line
        assert line.endswith("; install the package that brings it, or name its file with --model.module")


def test_it_is_planned(words, tmp_path, capsys):
    forget(words)
    own = words or ["--model.encoder", "fnet_encoder"]
    assert main(["plan", "--config", "quickstart", *own, "--show_sharding", "--devices", "2"]) == 0
    shown = capsys.readouterr().out
    assert "feed_forward/output/kernel" in shown and "attention" not in shown


def test_the_tokens_are_mixed_by_two_fourier_transforms():
    take_encoder(MODULE)
    from model_module_fnet_encoder import FourierMixing

    model = ModelConfig.of(vocab_size=40, encoder="fnet_encoder", hidden_size=12, num_layers=1, norm_epsilon=1e-9)
    x = np.random.default_rng(0).normal(size=(1, 10, 12)).astype(np.float32)
    ids = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0]])
    tokens = {"sequence_ids": ids, "position_ids": np.array([[*range(4), *range(5), 0]])}
    module = FourierMixing(model, ExecutionConfig())
    params = module.init(jax.random.key(0), x, tokens)
    found = np.asarray(module.apply(params, x, tokens))
    for first, last in ((0, 4), (4, 9)):
        own = x[0, first:last].astype(np.float64)
        mixed = own + np.fft.fft2(own).real
        expected = (mixed - mixed.mean(-1, keepdims=True)) / mixed.std(-1, keepdims=True)
        np.testing.assert_allclose(found[0, first:last], expected, atol=1e-4)


def test_the_options_of_its_class(tmp_path):
    take_encoder(MODULE)
    with pytest.raises(ValueError, match=r"model\.attention_layers: 3 is not allowed; allowed: at most model"):
        tiny_config(OPTIONS + " --model.attention_layers 3")
    with pytest.raises(ValueError, match=r"it exists only with model\.encoder fnet_encoder"):
        tiny_config("--model.attention_layers 1")
    for words in (["--model.module"], [*MODULE, *MODULE]):
        with pytest.raises(ValueError, match="needs one file, such as"):
            take_encoder(words)
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match=r"model\.module: .*empty\.py defines no class Encoder that extends "):
        take_encoder(["--model.module", str(tmp_path / "empty.py")])


def test_a_saved_model_names_its_encoder_and_runs_no_file(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    values = json.loads(spec_to_json(ModelSpec(model=tiny_model(40), heads=HeadsConfig())))
    for name in ("evil", "evil.py", "evil:Encoder", "os:system"):
        for also in ({}, {"module": "evil.py"}):
            values["model"] |= {"encoder": name, **also}
            (folder / "model.json").write_text(json.dumps(values))
            assert main(["embed", "--model", str(folder), "a text"]) == 2
            assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "ran").exists()
