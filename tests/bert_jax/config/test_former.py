"""Options under their former names."""

import json

import pytest

from bert_jax.config import (
    HeadsConfig,
    ModelConfig,
    ModelSpec,
    PretrainConfig,
    dump_yaml,
    from_dict,
    load_config,
    spec_from_json,
    spec_to_json,
    to_dict,
)
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.former import MERGES, current_fields

# Fields of the network that hold former ones, and these.
FIELDS = [merge.option.removeprefix("model.") for merge in MERGES if merge.option.startswith("model.")]
ALL = {name.removeprefix("model.") for merge in MERGES for name in merge.former if name.startswith("model.")}
# Former fields, all with their former defaults.
DEFAULTS = dict.fromkeys(ALL, True) | {
    "mlm_activation": "same", "pooler_activation": "tanh", "sequence_activation": "same",
    "pooler_norm": False, "token_pooler": False, "span_transform": False,
}  # fmt: skip
# Changed former fields -> present fields.
READ = [
    ({}, {}),
    (
        {"mlm_output_bias": False, "qkv_bias": False, "norm_bias": False},
        {"without_bias": ("norm", "qkv", "mlm_output")},
    ),
    (
        {name: False for name in ALL if name.endswith("_bias")},
        {
            "without_bias": (
                "norm", "qkv", "attention_output", "feed_forward", "pooler_layer", "sequence_head", "mlm_layer",
                "mlm_output",
            )
        },
    ),
    ({"mlm_activation": "relu"}, {"mlm_layer": "relu"}),
    ({"mlm_transform": False, "mlm_activation": "relu"}, {"mlm_layer": "none"}),
    ({"token_pooler": True, "pooler_norm": True}, {"head_parts": ("pooler_norm", "token_pooler")}),
    ({"span_transform": True}, {"head_parts": ("span_transform",)}),
    ({"pooler_activation": "gelu"}, {"pooler_layer": ("gelu",)}),
    ({"sequence_activation": "gelu_sigmoid"}, {"pooler_layer": ("tanh", "gelu_sigmoid")}),
    ({"pooler_activation": "relu", "sequence_activation": "silu"}, {"pooler_layer": ("relu", "silu")}),
    ({"pooler_dense": False, "sequence_activation": "silu"}, {"pooler_layer": ("none",)}),
]  # fmt: skip


def load(words):
    return load_config(PretrainConfig, words.split()).model


@pytest.mark.parametrize(("former", "present"), READ)
def test_files_are_read(tmp_path, former, present):
    model, values = ModelConfig(**present), DEFAULTS | former
    spec = ModelSpec(model=model, heads=HeadsConfig())
    stored = json.loads(spec_to_json(spec))
    stored["model"] = {key: value for key, value in stored["model"].items() if key not in present} | values
    for field in FIELDS:
        stored["model"].pop(field, None)
    assert spec_from_json(json.dumps(stored), "x") == spec
    config = to_dict(PretrainConfig(model=model))
    for field in FIELDS:
        config["model"].pop(field)
    config["model"] |= values
    assert from_dict(PretrainConfig, config).model == model
    (tmp_path / "recipe.yaml").write_text(
        "model:\n" + "".join(f"  {key}: {str(value).lower()}\n" for key, value in values.items())
    )
    assert load(f"--config {tmp_path / 'recipe.yaml'}") == model
    (tmp_path / "now.yaml").write_text(dump_yaml(PretrainConfig(model=model)))
    assert load(f"--config {tmp_path / 'now.yaml'}") == model
    record = current_fields({f"model.{key}": value for key, value in values.items()}, "model.")
    assert record == {
        f"model.{field}": list(value) if isinstance(value := getattr(model, field), tuple) else value
        for field in FIELDS
    }


@pytest.mark.parametrize(
    ("words", "present"),
    [
        ("--model.qkv_bias false --model.without_bias norm", {"without_bias": ("norm",)}),
        ("--model.without_bias norm qkv --model.qkv_bias true", {"without_bias": ("norm",)}),
        ("--model.qkv_bias false --model.qkv_bias true", {}),
        (
            "--model.head_parts span_transform token_pooler --model.pooler_norm true --model.token_pooler false",
            {"head_parts": ("pooler_norm", "span_transform")},
        ),
        ("--model.mlm_activation gelu --model.mlm_transform false", {"mlm_layer": "none"}),
        (
            "--model.mlm_transform false --model.mlm_activation relu --model.mlm_transform true",
            {"mlm_layer": "relu"},
        ),
        ("--model.mlm_layer none --model.mlm_transform true", {}),
        ("--model.mlm_layer none --model.mlm_activation relu", {"mlm_layer": "none"}),
        ("--model.pooler_layer relu --model.sequence_activation gelu", {"pooler_layer": ("relu", "gelu")}),
        ("--model.pooler_layer none --model.pooler_dense true", {}),
    ],
)
def test_the_last_setting_wins(words, present):
    assert load(words) == ModelConfig(**present)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.qkv_bias maybe", "command line: model.qkv_bias: 'maybe' is not allowed; allowed: true, false"),
        ("--model.mlm_activation none", "command line: model.mlm_activation: 'none' is not allowed; allowed: same"),
        (
            "--model.pooler_activation tanh gelu",
            "command line: model.pooler_activation: requires exactly one value",
        ),
        ("--model.pooler_layer none tanh", r"command line: model.pooler_layer: ('none', 'tanh') is not allowed"),
        (
            "--model.pooler_layer",
            "command line: model.pooler_layer: () is not allowed; allowed: none, or one or two",
        ),
        ("--model.without_bias qvk", "command line: model.without_bias: 'qvk' is not allowed; allowed: norm, qkv"),
    ],
)
def test_values_are_refused(words, message):
    with pytest.raises(ValueError) as raised:
        load(words)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("value", [{"qkv_bias": 0}, {"mlm_activation": "none"}, {"sequence_activation": {}}])
def test_a_stored_value_of_another_type_is_refused(value):
    stored = json.loads(spec_to_json(ModelSpec(model=ModelConfig(), heads=HeadsConfig())))
    for field in FIELDS:
        del stored["model"][field]
    stored["model"] |= value
    with pytest.raises(ValueError, match=rf"^x: model: {next(iter(value))}: "):
        spec_from_json(json.dumps(stored), "x")


LSTM = "--model.encoder lstm --model.num_layers 1 --model.position_embeddings none --objective.name causal_lm"
ELECTRA = "--objective.name replaced_tokens --data.next_sentence none"
ORDERED = f"{LSTM} --data.next_sentence none"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (
            "--data.contiguous true --data.next_sentence none",
            "--data.row_order contiguous --data.next_sentence none",
        ),
        ("--data.row_order contiguous --data.contiguous false", ""),
        (f"{ORDERED} --objective.carry_state true --data.contiguous true", f"{ORDERED} --data.row_order carried"),
        (
            f"{ORDERED} --data.contiguous true --objective.carry_state false",
            f"{ORDERED} --data.row_order contiguous",
        ),
        (
            "--data.masking dynamic --data.mask_fraction_steps 10 --data.final_mask_fraction 0.1",
            "--data.masking dynamic --data.final_masking 0.1 10",
        ),
        ("--data.mask_fraction_steps 0 --data.final_mask_fraction 0", ""),
        ("--data.span_max 5", "--data.span_lengths 3.8 5"),
        ("--data.span_max 10 --data.span_mean 2", "--data.span_lengths 2 10"),
        (f"{ELECTRA} --objective.generator_depth 0.5", f"{ELECTRA} --objective.generator_size 0.25 0.5"),
        (
            f"{ELECTRA} --objective.generator_depth 1 --objective.generator_width 1",
            f"{ELECTRA} --objective.generator_size 1",
        ),
        ("--training.spike_window 50 --training.spike_deviations 3", "--training.spike_limit 3 50"),
        ("--training.spike_limit 3 50 --training.spike_deviations 4", "--training.spike_limit 4 50"),
        ("--training.spike_deviations 3", "--training.spike_limit 3 200"),
        ("--training.spike_deviations 0 --training.spike_window 50", ""),
        ("--training.spike_skip_batches 9 --training.spike_rollbacks 2", "--training.spike_rollback 2 9"),
        ("--training.spike_rollbacks 0 --training.spike_skip_batches 100", ""),
        ("--training.batch_ramp_tokens 1e6 8 8", "--training.batch_ramp 1e6 8 8"),
        ("--training.batch_ramp 9 8 --training.batch_ramp_tokens", "--training.batch_ramp 9 8"),
        ("--training.batch_ramp 1e6 8 8 --training.batch_ramp_tokens", ""),
    ],
)
def test_former_options_set_those_that_hold_them(before, now):
    assert load_config(PretrainConfig, before.split()) == load_config(PretrainConfig, now.split())


def test_a_stored_config_keeps_what_followed_from_a_former_option():
    stored = to_dict(PretrainConfig())
    stored["training"] |= {"batch_ramp": [3, 64, 5, 128], "batch_ramp_tokens": [10**6, 64, 64]}
    del stored["training"]["spike_limit"], stored["data"]["row_order"]
    stored["training"] |= {"spike_deviations": 0.0, "spike_window": 200}
    stored["data"] |= {"contiguous": False}
    assert from_dict(PretrainConfig, stored).training.batch_ramp == (3, 64, 5, 128)
    del stored["training"]["batch_ramp"]
    stored["training"]["batch_ramp_tokens"] = []
    assert from_dict(PretrainConfig, stored) == PretrainConfig()


def test_a_former_option_of_pretraining_is_refused_in_fine_tuning():
    assert load_config(FinetuneConfig, ["--training.spike_deviations", "3"]).training.spike_limit == (3, 200)
    with pytest.raises(ValueError, match=r"training\.batch_ramp_tokens"):
        load_config(FinetuneConfig, ["--training.batch_ramp_tokens", "1000", "8", "8"])
