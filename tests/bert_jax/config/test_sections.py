"""Sections whose class follows from the name of an encoder or of an objective."""

import json

import pytest

from bert_jax import registry
from bert_jax.config import (
    FinetuneConfig,
    HeadsConfig,
    ModelConfig,
    ModelSpec,
    PretrainConfig,
    differences,
    dump_yaml,
    from_dict,
    load_config,
    spec_from_json,
    spec_to_json,
    to_dict,
)
from bert_jax.config.finetune import FinetuneTrainingConfig
from bert_jax.config.former import FORMER_FIELDS
from bert_jax.config.loader import parse_settings, read_settings, show_help
from bert_jax.contrib.ancestors.config import BidirectionalLstmConfig, CbowConfig, LstmConfig
from bert_jax.contrib.compression.config import DistillationConfig

LSTM = "--model.encoder lstm --model.num_layers 2 --model.lstm_cells 9 --objective.name causal_lm"


def load(words):
    return load_config(PretrainConfig, words.split())


def test_the_name_chooses_the_class_in_any_order(tmp_path):
    config = load(LSTM)
    assert type(config.model) is LstmConfig and config.model.lstm_cells == 9
    turned = load("--model.lstm_cells 9 --objective.name causal_lm --model.num_layers 2 --model.encoder lstm")
    (tmp_path / "recipe.yaml").write_text(dump_yaml(config))
    again = load(f"--config {tmp_path / 'recipe.yaml'}")
    assert config == turned == again == from_dict(PretrainConfig, to_dict(config)) and hash(config) == hash(again)
    other = load(f"--config {tmp_path / 'recipe.yaml'} --model.lstm_cells 10")
    assert differences(config, other) == ["model.lstm_cells: 9 -> 10"]
    assert "model.encoder: lstm -> transformer" in differences(config, PretrainConfig())
    assert type(load("--objective.name cbow").objective) is CbowConfig
    assert type(load("--objective.name distillation --objective.z_loss 0.1").objective) is DistillationConfig


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--model.lstm_cells 5",
            "command line: model.lstm_cells: unknown option with model.encoder transformer; it exists only with "
            "model.encoder lstm, bidirectional_lstm",
        ),
        (
            "--model.encoder lstm --model.context_size 5",
            "command line: model.context_size: unknown option with model.encoder lstm; it exists only with "
            "model.encoder nnlm",
        ),
        (
            "--objective.window 3",
            "command line: objective.window: unknown option with objective.name masked_lm; it exists only with "
            "objective.name skip_gram, cbow, glove",
        ),
        ("--model.lstm_cels 5", "command line: model.lstm_cels: unknown option; did you mean 'model.lstm_cells'?"),
        ("--model.lstm_cells x", "command line: model.lstm_cells: 'x' is not a whole number"),
        (
            "--model.encoder lstmm",
            "command line: model.encoder: 'lstmm' is not allowed; allowed: transformer, none, nnlm, lstm, "
            "bidirectional_lstm, encoder_decoder; did you mean 'lstm'?",
        ),
    ],
)
def test_an_option_of_another_part_is_refused(words, message):
    with pytest.raises(ValueError) as raised:
        load(words)
    assert str(raised.value) == message


def test_an_option_is_parsed_before_its_part_is_known():
    given = parse_settings(PretrainConfig, read_settings(["--model.lstm_cells", "5"]).all)
    assert given == {"model.lstm_cells": (5, "command line")}


def test_help_shows_the_chosen_section(capsys):
    shown = []
    for words in ("", "--model.encoder lstm", "--objective.name glove"):
        show_help(PretrainConfig, read_settings(words.split()), "program", whole=True)
        shown.append(capsys.readouterr().out)
    assert ["--model.lstm_cells" in text for text in shown] == [False, True, False]
    assert ["--objective.count_power" in text for text in shown] == [False, False, True]
    assert "add such an option to program --help_all:\n    --model.encoder none, nnlm, lstm, bidir" in shown[0]
    assert "\n    --objective.name bidirectional_lm, skip_gram" in shown[0]


def test_a_section_in_python():
    assert type(ModelConfig.of(encoder="bidirectional_lstm", embedding_size=384)) is BidirectionalLstmConfig
    with pytest.raises(ValueError, match="the section of encoder lstm is LstmConfig"):
        ModelConfig(encoder="lstm")
    for encoder, section in (("transformer", "ModelConfig"), ("lstm", "LstmConfig")):
        with pytest.raises(ValueError, match=f"the section of encoder {encoder} is {section}"):
            BidirectionalLstmConfig(encoder=encoder, num_layers=1)


def test_specs_are_read_back_and_those_of_before_too():
    for model in (ModelConfig(), ModelConfig.of(encoder="lstm", lstm_cells=9, num_layers=2, tied_output=False)):
        spec = ModelSpec(model=model, heads=HeadsConfig())
        values = json.loads(spec_to_json(spec))
        assert spec_from_json(json.dumps(values), "x") == spec
        values["model"] = FORMER_FIELDS | values["model"]
        assert spec_from_json(json.dumps(values), "x") == spec
    values["model"]["context_size"] = 5
    with pytest.raises(ValueError, match="x: model: unknown key context_size; allowed: "):
        spec_from_json(json.dumps(values), "x")


def test_a_part_that_is_not_installed_is_named_in_one_line(monkeypatch):
    config = to_dict(load("--objective.name glove"))
    values = json.loads(spec_to_json(ModelSpec(model=ModelConfig.of(encoder="lstm"), heads=HeadsConfig())))
    names = registry.names
    own = {"encoders": {"transformer": ""}, "objectives": {"masked_lm": ""}}
    monkeypatch.setattr(registry, "names", lambda kind: own.get(kind, {} if "options" in kind else names(kind)))
    with pytest.raises(ValueError, match=r"^objective\.name: 'glove' is not allowed; allowed: masked_lm; install "):
        from_dict(PretrainConfig, config)
    with pytest.raises(ValueError, match=r"^x: model: model\.encoder: 'lstm' is not allowed; allowed: transformer"):
        spec_from_json(json.dumps(values), "x")


def test_fine_tuning_lacks_the_options_of_pretraining_but_reads_them_in_stored_configs(tmp_path):
    stored = to_dict(FinetuneConfig())
    assert "batch_ramp" not in stored["training"] and "warmup_tokens" not in stored["optimizer"]
    older = stored | {"training": stored["training"] | {"batch_ramp": [], "batch_unit": "sequences"}}
    assert from_dict(FinetuneConfig, older) == FinetuneConfig()
    (tmp_path / "config.yaml").write_text("training:\n  batch_unit: rows\n")
    with pytest.raises(ValueError, match=r"config\.yaml:2: training\.batch_unit: an option of pretraining only"):
        load_config(FinetuneConfig, ["--config", str(tmp_path / "config.yaml")])
    with pytest.raises(ValueError, match=r"training\.batch_ramp: \(2, 4\) is not allowed; allowed: only \(\)"):
        FinetuneTrainingConfig(batch_ramp=(2, 4))
