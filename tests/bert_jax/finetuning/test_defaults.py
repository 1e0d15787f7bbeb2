"""Rate and length of a fine-tuning run that sets neither, and the options that a resumed run keeps."""

import dataclasses

import pytest
import yaml

from bert_jax.config import load_config
from bert_jax.config.finetune import FinetuneConfig, automatic_rate
from bert_jax.config.lengths import automatic_steps
from bert_jax.finetuning.resolve import automatic_notes, with_steps
from bert_jax.start.fixed_options import kept_settings


def load(words=""):
    return load_config(FinetuneConfig, words.split())


def of_width(width, words=""):
    config = load(words)
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, hidden_size=width, num_attention_heads=2)
    )


@pytest.mark.parametrize(
    ("width", "rate"), [(768, 2e-5), (1024, 1.1e-5), (384, 9.2e-5), (256, 2.2e-4), (128, 1e-3), (32, 1e-3)]
)
def test_the_rate_follows_from_the_width(width, rate):
    assert automatic_rate(of_width(width)) == rate
    assert with_steps(of_width(width), 5000).optimizer.learning_rate == rate


def test_a_frozen_encoder_and_one_that_is_no_transformer_have_one_rate():
    assert {automatic_rate(of_width(width, "--features.frozen_encoder true")) for width in (128, 768)} == {3e-3}
    assert automatic_rate(of_width(300, "--model.encoder none --model.num_layers 0")) == 9e-3


@pytest.mark.parametrize("words", ["--optimizer.learning_rate 0", "--optimizer.learning_rate 3e-5"])
def test_a_rate_that_is_set_stays(words):
    config = load(words)
    assert with_steps(config, 100).optimizer == dataclasses.replace(config.optimizer, warmup_steps=20)


@pytest.mark.parametrize(
    ("per_pass", "steps"), [(1, 200), (5, 200), (30, 600), (50, 1000), (333, 1000), (334, 1002), (12_000, 36_000)]
)
def test_few_records_are_read_more_often(per_pass, steps):
    assert automatic_steps(per_pass) == steps


def test_the_length_is_that_of_the_records_in_batches():
    training = with_steps(load("--training.global_batch_size 16"), 1600).training
    assert (training.num_steps, training.eval_interval, training.checkpoint_interval) == (1000, 100, 100)
    few = with_steps(load(), 20).training
    assert (few.num_steps, few.eval_interval) == (200, 20)  # not once per epoch, which has one step


@pytest.mark.parametrize(
    ("words", "interval"),
    [
        ("--training.num_steps 7", 1), ("--training.num_steps 400", 20), ("--training.num_steps 9000", 50),
        ("--training.num_steps 7 --training.log_interval 60", 60),
    ],
)  # fmt: skip
def test_a_short_run_has_a_curve_of_twenty_points(words, interval):
    assert with_steps(load(words), 100).training.log_interval == interval


@pytest.mark.parametrize(
    ("words", "steps"),
    [("--training.num_epochs 3", 12), ("--training.num_epochs 0.5", 2), ("--training.num_steps 7", 7)],
)
def test_a_length_that_is_set_stays(words, steps):
    training = with_steps(load(words), 100).training
    assert (training.num_steps, training.eval_interval) == (steps, 4)


def test_what_was_chosen_is_said():
    asked = of_width(128)
    (line,) = automatic_notes(asked, with_steps(asked, 5000), 5000)
    assert "optimizer.learning_rate 0.001" in line and "training.num_steps 1,000 (6.4 epochs" in line
    asked = of_width(128, "--optimizer.learning_rate 1e-4 --training.num_epochs 2")
    assert automatic_notes(asked, with_steps(asked, 5000), 5000) == []
    asked = of_width(128, "--optimizer.name lamb --training.num_epochs 2")
    (line,) = automatic_notes(asked, with_steps(asked, 5000), 5000)
    assert line.endswith("(measured for adamw, bert_adam, muon, not for lamb)")


def stored(folder, **sections):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"execution": {"prng": "hash"}, "training": {}} | sections))
    return folder


def kept(folder, **given):
    values = {key.replace("__", "."): (value, "command line") for key, value in given.items()}
    return {setting.key: setting.value for setting in kept_settings(folder, values)}


def test_a_resumed_task_keeps_the_defaults_with_which_it_began(tmp_path):
    options = {"task": {}, "optimizer": {"learning_rate": 2e-05}, "training": {"num_epochs": 3.0, "num_steps": 47}}
    folder = stored(tmp_path / "w", **options)
    found = kept(folder, execution__prng="hash")
    assert found == {"optimizer.learning_rate": "2e-05", "training.num_epochs": "3.0"}
    assert kept(folder, execution__prng="hash", optimizer__learning_rate=1e-3, training__num_steps=9) == {}


def test_a_resumed_pretraining_keeps_its_length(tmp_path):
    training = {"num_steps": 1_000_000, "global_batch_size": 256, "eval_interval": 0, "checkpoint_interval": 1000}
    folder = stored(tmp_path / "w", training=training, optimizer={"warmup_steps": 10_000, "learning_rate": 1e-4})
    found = kept(folder, execution__prng="hash", training__checkpoint_interval=50)
    assert found == {
        "training.num_steps": "1000000", "training.global_batch_size": "256", "training.eval_interval": "0",
        "optimizer.warmup_steps": "10000",
    }  # fmt: skip
    others = {key: value for key, value in found.items() if key != "training.num_steps"}
    others["training.checkpoint_interval"] = "1000"
    for length in ("training__num_steps", "training__num_tokens"):
        assert kept(folder, execution__prng="hash", **{length: 5}) == others
    del others["optimizer.warmup_steps"]
    assert kept(folder, execution__prng="hash", training__num_steps=5, optimizer__warmup_tokens=7) == others
