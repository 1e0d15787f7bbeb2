"""Values that are not allowed, and configs that are written and read back."""

import dataclasses
import re
from typing import get_origin, get_type_hints

import pytest
from config_words import load, refusal

from bert_jax import config as sections
from bert_jax.config import PretrainConfig, RunOptions, dump_yaml, from_dict, to_dict
from bert_jax.config.loader import take_options
from bert_jax.config.objective import ObjectiveConfig

pytestmark = pytest.mark.usefixtures("here")


INVALID = [
    *((f"model.{name}", "0", "a number above 0") for name in (
        "vocab_size", "hidden_size", "num_attention_heads", "intermediate_size",
        "max_position_embeddings", "norm_epsilon", "initializer_range")),
    *((f"model.{name}", value, "a number from 0 to below 1")
      for name in ("hidden_dropout", "attention_dropout") for value in ("1", "-0.1")),
    ("model.num_layers", "0", "1 or more"),
    ("model.num_layers", "2 --model.encoder none", "0 with encoder none"),
    ("model.num_attention_heads", "7", "a divisor of model.hidden_size (768)"),
    ("model.hidden_size", "27 --model.num_attention_heads 3 --model.position_embeddings sinusoidal",
     "an even number with sinusoidal positions"),
    ("model.hidden_size", "15 --model.num_attention_heads 3 --model.position_embeddings rotary",
     "an even number with rotary positions"),
    ("model.type_vocab_size", "-1", "0 or more"),
    ("model.type_vocab_size", "1", "2 or more with data.next_sentence nsp"),
    ("execution.vocab_multiple", "0", "a number above 0"),
    *((f"data.{name}", "0", "a number above 0") for name in (
        "max_predictions", "dupe_factor", "num_shards", "window_segments", "segment_records",
        "prefetch")),
    ("data.seq_length", "7", "8 or more"),
    ("data.seq_length", "513", "at most model.max_position_embeddings (512)"),
    *((f"data.{name}", value, "a number from 0 to below 1")
      for name in ("short_sequence_fraction", "eval_fraction") for value in ("1", "-0.1")),
    *(("data.mask_fraction", value, "above 0, at most 1") for value in ("0", "1.1")),
    *(("data.span_lengths", value, "a mean length and a longest length in whole words, both 1 or more")
      for value in ("0.9 10", "3.8", "3.8 0", "3.8 9.5")),
    *(("training.spike_limit", value, "deviations, and a number of steps") for value in ("0", "3 0.5", "1 2 3")),
    *(("training.spike_rollback", value, "a number of rollbacks, and a number of batches")
      for value in ("-1", "1 2 3")),
    *(("objective.generator_size", f"{value} --objective.name replaced_tokens --data.next_sentence none",
       "a share of the width, or shares of width and layers; above 0") for value in ("0", "1 0", "1 1 1")),
    *((f"data.{name}", "-1", "0 or more") for name in ("workers", "lanes", "max_blank_records")),
    ("data.lanes", "3", "a divisor of every batch size, including 256"),
    *((f"optimizer.{name}", "-1", "0 or more")
      for name in ("learning_rate", "warmup_steps", "decay_steps", "weight_decay", "clip_norm", "epsilon")),
    *((f"optimizer.{name}", value, "a number from 0 to below 1")
      for name in ("beta1", "beta2", "ema_decay") for value in ("1", "-0.1")),
    *((f"optimizer.{name}", value, "from 0 to 1")
      for name in ("final_fraction", "wsd_decay_fraction") for value in ("1.1", "-0.1")),
    *((f"training.{name}", "0", "a number above 0") for name in (
        "global_batch_size", "accumulation_steps", "log_interval", "checkpoint_interval", "keep_checkpoints",
        "max_bad_steps")),
    *((f"training.{name}", "-1", "0 or more")
      for name in ("num_steps", "eval_interval", "eval_batches", "eval_batch_size", "keep_every", "seed")),
    ("training.accumulation_steps", "3", "a divisor of every batch size, including 256"),
    ("training.batch_ramp", "10",
     "pairs of (steps, batch size), or tokens, first size (below 256), increment; all above 0"),
    ("training.batch_ramp", "10 -64", "pairs of (steps, batch size), all above 0"),
    ("training.batch_ramp", "0 64", "pairs of (steps, batch size), all above 0"),
    *(("training.profile_steps", value, "two steps, first and last") for value in ("3", "5 3", "1 2 3")),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "allowed"), INVALID)
def test_values_that_cannot_work(key, value, allowed):
    message = refusal(f"--{key} {value}")
    assert message.startswith(f"command line: {key}: ") and message.endswith(f" is not allowed; allowed: {allowed}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model:\n  num_layers: " + "[" * 20_000 + "]" * 20_000,
            "recipe.yaml:2: num_layers: lists or mappings are",
        ),
        ("[" * 20_000 + "]" * 20_000, "recipe.yaml:1: lists or mappings are nested too deeply"),
        ("\n".join(" " * i + f"k{i}:" for i in range(2000)), "recipe.yaml:51: k49: lists or mappings are nested"),
        ("training:\n  seed: " + "9" * 6000, f"recipe.yaml:2: training.seed: '{'9' * 60}...' has 6000 digits"),
        ("optimizer: {beta1: 0." + "9" * 6000 + "}", "recipe.yaml:1: optimizer.beta1: 1.0 is not allowed"),
        ("training:\n  seed: 1." + "5" * 6000, f"recipe.yaml:2: training.seed: '1.{'5' * 58}...' is not a whole"),
        ("data:\n  next_sentence: " + "q" * 6000, f"recipe.yaml:2: data.next_sentence: '{'q' * 60}...' is not"),
    ],
    ids=["lists", "top", "mappings", "digits", "nines", "fives", "letters"],
)
def test_deep_files_and_long_values_are_refused_with_their_place(text, message):
    found = refusal(text=text)
    assert found.startswith(message) and len(found) < 300


def test_values_that_cannot_work_together():
    assert refusal("--data.mask_token_share 0.9 --data.random_token_share 0.2").endswith(
        "two shares, 0 or more, whose sum is at most 1"
    )
    assert "two shares" in refusal("--data.mask_token_share 1.1 --data.random_token_share -0.1")
    for sizes in ("--mesh.data -1 --mesh.tensor -1", "--mesh.data 0", "--mesh.fsdp -2"):
        assert refusal(sizes).endswith("sizes above 0, or -1 for at most one of them")
    # What would fail above is right in other company.
    assert load("--model.position_embeddings sinusoidal --data.seq_length 1024").data.seq_length == 1024
    assert load("--data.next_sentence none --model.type_vocab_size 1").has_nsp is False
    assert load("--training.accumulation_steps 3 --training.global_batch_size 6").data.lanes_for(6) == 2
    assert "including 32" in refusal("--training.batch_ramp 10 32 --training.accumulation_steps 64")
    assert "including 32" in refusal("--training.batch_ramp 10 32 --data.lanes 64")


@pytest.mark.parametrize(
    "key", sorted({key for key, _, _ in INVALID if not key.endswith(("lanes", "type_vocab_size"))})
)
def test_sections_check_themselves_without_the_loader(key):
    """Also nan, which compares as false, must not pass a section's own check."""
    name, field = key.split(".")
    section = {"model": sections.ModelConfig, "execution": sections.ExecutionConfig, "data": sections.DataConfig,
               "objective": ObjectiveConfig, "optimizer": sections.OptimizerConfig,
               "training": sections.TrainingConfig}[name]  # fmt: skip
    wrong = (1.5, 2, 3) if get_origin(get_type_hints(section)[field]) is tuple else float("nan")
    with pytest.raises(ValueError, match=re.escape(key)):
        section(**{field: wrong})


# ------------------------------------------------------------------ round trip, frozen

CHANGED = (
    "--training.mode bert2018 --data.corpus a.txt dir/b.txt --optimizer.learning_rate 1.5e-5 --mesh.data -1 "
    "--training.batch_ramp 10 64 20 128 --model.norm_epsilon 1e-7 --execution.scan_layers true "
    "--data.json_field null --data.vocab 010"
)


def test_dumped_configs_read_back_equal():
    for config in (PretrainConfig(), load(CHANGED)):
        assert from_dict(PretrainConfig, to_dict(config)) == config
        assert load(text=dump_yaml(config)) == config
    assert load(CHANGED).data.json_field == "null"
    stored = to_dict(PretrainConfig())
    stored["model"]["width"] = 3
    with pytest.raises(ValueError, match=r"stored config: model\.width: unknown option"):
        from_dict(PretrainConfig, stored)


def test_configs_are_frozen_and_hashable():
    config = load(CHANGED)
    assert hash(config) == hash(load(CHANGED)) and hash(config) != hash(PretrainConfig())
    for section in (config, *(getattr(config, field.name) for field in dataclasses.fields(config))):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(section, dataclasses.fields(section)[0].name, 3)


def test_options_of_a_run_are_taken_out():
    words = ["--workdir", "w", "--config", "a.yaml", "--model.num_layers", "2", "--print_config"]
    options, rest = take_options(RunOptions, [*words, "--mesh.data", "-1"])
    assert (options.workdir, options.print_config, options.config) == ("w", True, ("a.yaml",))
    assert options.folder("pretrain") == "w" and RunOptions().folder("pretrain") == "runs/pretrain"
    assert RunOptions(config=("x/a.yaml", "x/b.yaml")).folder("pretrain") == "runs/b"
    assert rest.words() == ["--config", "a.yaml", "--model.num_layers", "2", "--mesh.data", "-1"]
    assert take_options(RunOptions, ["--print_config", "false"])[0].print_config is False
    with pytest.raises(
        ValueError, match="command line: print_config: 'maybe' is not allowed; allowed: true, false"
    ):
        take_options(RunOptions, ["--print_config", "maybe"])
