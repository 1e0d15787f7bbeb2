"""Length of a pretraining run that follows from the size of the text."""

import pytest

from bert_jax.config import PretrainConfig, load_config
from bert_jax.config.pretrain import with_text_length


def lengths(examples, words="", given=()):
    config, line = with_text_length(load_config(PretrainConfig, words.split()), examples, given)
    training = config.training
    return (
        training.num_steps,
        training.global_batch_size,
        training.eval_interval,
        config.optimizer.warmup_steps,
        line,
    )


@pytest.mark.parametrize(
    ("examples", "steps", "batch"),
    [
        (40, 200, 32),
        (600, 380, 32),
        (5_000, 1000, 32),
        (25_000, 1173, 64),
        (50_000, 1173, 128),
        (1_000_000, 11_718, 256),
    ],
)
def test_passes_and_batch_follow_from_the_number_of_examples(examples, steps, batch):
    found, size, interval, warmup, line = lengths(examples)
    assert (found, size, interval, warmup) == (steps, batch, steps // 10, steps // 10)
    assert f"training.num_steps {steps:,}" in line and f"{steps * batch / examples:.1f} passes" in line


def test_what_is_set_stays():
    words = "--training.global_batch_size 16 --training.eval_interval 7 --optimizer.warmup_tokens 4096"
    steps, batch, interval, warmup, _ = lengths(
        1600, words, ("training.global_batch_size", "training.eval_interval", "optimizer.warmup_tokens")
    )
    assert (steps, batch, interval, warmup) == (1000, 16, 7, 2)
