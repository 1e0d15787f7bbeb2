"""An encoder outside the project, by entry point and by ``--model.module``: FNet of docs/examples."""

import importlib.util
import json
import shlex
import shutil

import jax
import numpy as np
import pytest
from builders import drawn, tiny_model
from builders import words as some_words
from command import recipe
from outside import EXAMPLES, fresh, install  # noqa: F401 (fresh is a fixture)
from support import tiny_config, whole_and_resumed

from bert_jax import registry
from bert_jax.commands import data, finetune, pretrain
from bert_jax.commands.main import main
from bert_jax.commands.options import take_encoder, with_encoder
from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig, ModelSpec, PretrainConfig, spec_to_json
from bert_jax.config.loader import build_config, read_settings
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.interop.model_card import model_card
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.model.flops import training_flops_per_sequence
from bert_jax.process import hosts
from bert_jax.process.signals import StopRequest
from data_pipeline.build.ensure import require_shards

FNET = EXAMPLES / "fnet_encoder.py"
MODULE = ["--model.module", str(FNET)]
OPTIONS = (
    "--model.encoder fnet_encoder --model.attention_layers 1 --model.num_layers 2 --training.num_steps 4 "
    "--training.eval_interval 2 --training.eval_batches 1"
)


@pytest.fixture(params=["entry point", pytest.param("file", marks=pytest.mark.slow)])
def words(request, tmp_path, monkeypatch):
    """Make FNet known; the further words of a command that reads a model of it."""
    if request.param == "file":
        take_encoder(MODULE)
        yield MODULE
        return
    groups = (("encoders", "Encoder"), ("encoder_options", "Config"))
    points = {group: f"fnet_encoder = fnet_encoder:{name}" for group, name in groups}
    monkeypatch.syspath_prepend(install(tmp_path / "installed", FNET, points))
    yield []


def forget(words):
    """Undo ``--model.module``, as in a new process."""
    if words:
        registry._ADDED.clear()
        registry.names.cache_clear()


@pytest.mark.slow
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
    assert main(["plan", "--config", "quickstart_bert", *own, "--show_sharding", "--devices", "2"]) == 0
    shown = capsys.readouterr().out
    assert "feed_forward/output/kernel" in shown and "attention" not in shown


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is for Linux on x86-64")
def test_its_step_is_compiled_for_a_tpu(capsys):
    sizes = (
        "--model.num_layers 1 --model.hidden_size 64 --model.num_attention_heads 2 --model.intermediate_size 128 "
        "--model.vocab_size 400 --data.seq_length 32 --data.max_predictions 5 --training.global_batch_size 16"
    )
    plan = ["plan", "--config", "quickstart_bert", *MODULE, "--topology", "v5e:2x2", "--json", *sizes.split()]
    assert main(plan) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "compiled" and found["fits"] and found["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1}
    assert 0 < found["predicted_mfu"] < 1


@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["transformer", "lstm"])
def test_a_file_with_the_name_of_an_encoder_is_refused(name, tmp_path):
    file = shutil.copy(FNET, tmp_path / f"{name}.py")
    with pytest.raises(ValueError, match=rf"{name}\.py: {name} is the name of another encoder; rename the file$"):
        take_encoder(["--model.module", str(file)])


def test_a_config_of_another_kind_is_refused(tmp_path):
    for index, value in enumerate(("int", "5")):
        (tmp_path / f"other_{index}.py").write_text(f"{FNET.read_text()}\nConfig = {value}\n")
        with pytest.raises(ValueError, match=r"_\d\.py: Config does not extend bert_jax\.config\.ModelConfig$"):
            take_encoder(["--model.module", str(tmp_path / f"other_{index}.py")])


@pytest.mark.slow
def test_shards_of_its_recipe_are_built_by_the_command_that_a_run_on_several_hosts_names(tmp_path, capsys):
    file = recipe(tmp_path, model={"encoder": "fnet_encoder", "attention_layers": 1})
    given = with_encoder(read_settings(["--config", str(file), *MODULE]))
    config = build_config(PretrainConfig, given.all)
    with pytest.raises(ValueError, match="run on one host: bert-data shards") as error:
        require_shards(config, given)
    command = shlex.split(str(error.value).partition("run on one host: bert-data ")[2])
    forget(MODULE)
    assert data.main(command) == 0, capsys.readouterr().err
    assert list((tmp_path / "shards").glob("train/*"))


@pytest.mark.parametrize("command", [pretrain, finetune])
def test_its_file_is_run_after_the_processes_are_connected(command, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(hosts, "start", calls.append)
    (tmp_path / "late.py").write_text("from bert_jax.process import hosts\nhosts.start('the file')\n")
    with pytest.raises(ValueError, match="defines no class Encoder"):
        command._run(["--model.module", str(tmp_path / "late.py"), "--workdir", str(tmp_path)], "", StopRequest())
    assert len(calls) == 2 and calls[1] == "the file"


@pytest.mark.slow
def test_its_time_and_its_model_card(tmp_path, capsys):
    take_encoder(MODULE)
    pieces = some_words(40)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_layers": 1}
    model = ModelConfig.of(encoder="fnet_encoder", vocab_size=len(pieces) + 3, max_position_embeddings=32, **sizes)
    weights = drawn(ModelSpec(model=model, heads=HeadsConfig(pooler=True)), 0.2, pieces)
    card = model_card(ModelBundle(spec=weights.spec, params={}), "npz", "float32", None, [])
    assert (
        "\n- fnet_encoder\n---" in card
        and "\nAn encoder fnet_encoder of 1 layers" in card
        and "BERT enc" not in card
    )
    write_saved(tmp_path / "model", weights)
    forget(MODULE)
    words = ["--forms", "jax", "--batches", "1", "--lengths", "8", "--seconds", "0.01", "--repeats", "1"]
    found = main(["benchmark-inference", "--model", str(tmp_path / "model"), *MODULE, *words])
    assert found == 0, capsys.readouterr().err


def test_where_the_option_stands(capsys):
    for name in ("pretrain", "finetune", "data"):
        assert main([*MODULE, name]) == 2
        assert capsys.readouterr().err == f"error: {name}: write --model.module FILE after bert-jax {name}\n"
        forget(MODULE)
    for command in (pretrain, finetune):
        command._run(["--help_all"], "program", StopRequest())
        assert "--model.module FILE selects an encoder that a Python file defines" in capsys.readouterr().out


def test_help_lists_an_option_without_a_comment(tmp_path, capsys):
    lines = FNET.read_text().splitlines()
    bare = [line for line in lines if not line.startswith("    # Top layers")]
    assert len(bare) == len(lines) - 1
    (tmp_path / "bare.py").write_text("\n".join(bare))
    pretrain._run(["--model.module", str(tmp_path / "bare.py"), "--help_all"], "program", StopRequest())
    assert "--model.attention_layers INT  (default: 0)" in capsys.readouterr().out
