"""Lengths in tokens: the steps that follow from them, and which of several settings counts."""

import math

import pytest

from bert_jax.config import PretrainConfig, dump_yaml, from_dict, load_config, to_dict
from bert_jax.config.lengths import Batches, token_ramp

TOKENS = 32 * 16  # of a batch of the command below
BASE = "--data.seq_length 16 --training.global_batch_size 32"


def resolved(*arguments):
    return load_config(PretrainConfig, " ".join([BASE, *arguments]).split())


def thresholds(smallest, largest, warmup_tokens):
    """``BatchSizeWarmupScheduler._calculate_step_thresholds`` of AnswerDotAI/ModernBERT, restated."""
    sizes = range(smallest, largest)
    per_unit = warmup_tokens / sum(sizes)
    return [math.ceil(per_unit * sum(range(smallest, size + 1))) for size in sizes]


def size_at(tokens, smallest, largest, warmup_tokens):
    """Its ``__call__``: the size of the batch before which ``tokens`` tokens were seen."""
    if tokens >= warmup_tokens:
        return largest
    return smallest + next(i for i, t in enumerate(thresholds(smallest, largest, warmup_tokens)) if tokens < t)


@pytest.mark.parametrize(("smallest", "largest", "length"), [(3, 9, 4), (1, 2, 16), (5, 40, 8)])
@pytest.mark.parametrize("warmup_tokens", [1, 999, 10_007, 123_456])
def test_a_ramp_in_tokens_is_that_of_its_source(smallest, largest, length, warmup_tokens):
    ramp = token_ramp((warmup_tokens, smallest, 1), largest, length)
    sizes = [size for count, size in zip(ramp[::2], ramp[1::2], strict=True) for _ in range(count)]
    seen, expected = 0, []
    while (size := size_at(seen, smallest, largest, warmup_tokens)) < largest:
        expected.append(size)
        seen += size * length
    assert sizes == expected
    assert sum(sizes) * length >= warmup_tokens


def test_a_ramp_of_larger_increments():
    ramp = token_ramp((50_000_000_000, 768, 768), 4608, 1024)
    counts, sizes = ramp[::2], ramp[1::2]
    assert sizes == (768, 1536, 2304, 3072, 3840)
    assert max(counts) - min(counts) <= 1  # tokens in proportion to the size
    assert 0 <= sum(n * size for n, size in zip(counts, sizes, strict=True)) * 1024 - 50_000_000_000 < 3840 * 1024


@pytest.mark.parametrize("ramp", [(), (3, 4), (2, 4, 5, 8)])
def test_batches_count_their_tokens(ramp):
    sizes = [size for count, size in zip(ramp[::2], ramp[1::2], strict=True) for _ in range(count)] + [16] * 20
    batches, seen = Batches(ramp, 16, 8), 0
    for steps, size in enumerate(sizes):
        assert batches.tokens(steps) == seen
        assert batches.steps_within(seen) == batches.steps_of(seen) == steps
        assert batches.steps_within(seen + 1) == steps and batches.steps_of(seen + 1) == steps + 1
        seen += size * 8


def test_steps_follow_from_tokens_and_both_are_shown():
    config = resolved(
        f"--training.num_tokens {100 * TOKENS - 1} --optimizer.warmup_tokens {7 * TOKENS + 1}",
        f"--optimizer.schedule wsd --optimizer.wsd_decay_tokens {20 * TOKENS}",
    )
    training, optimizer = config.training, config.optimizer
    assert (training.num_steps, optimizer.warmup_steps, optimizer.wsd_decay_steps) == (100, 8, 20)
    shown = to_dict(config)
    assert shown["training"]["num_tokens"] == 100 * TOKENS - 1 and shown["training"]["num_steps"] == 100


def test_a_ramp_counts_in_every_length():
    words = f"--training.batch_ramp {20 * TOKENS} 8 8 --optimizer.warmup_tokens {20 * TOKENS}"
    config = resolved(words, f"--training.num_tokens {50 * TOKENS} --optimizer.wsd_decay_tokens {10 * TOKENS}")
    ramp = config.training.batch_ramp
    assert ramp[1::2] == (8, 16, 24)
    batches = Batches(ramp, 32, 16)
    steps = sum(ramp[::2])
    assert config.optimizer.warmup_steps == steps
    assert batches.tokens(config.training.num_steps - 1) < 50 * TOKENS <= batches.tokens(config.training.num_steps)
    assert config.optimizer.wsd_decay_steps in (10, 11)


def test_a_decay_of_all_tokens_is_one_of_all_steps():
    config = resolved("--training.num_tokens 5001 --optimizer.wsd_decay_tokens 5001 --training.first_step 7")
    assert config.training.num_steps - 7 == config.optimizer.wsd_decay_steps == 10


def test_packed_rows_are_counted_only_if_the_batch_counts_them():
    packed = "--data.packing best_fit --data.next_sentence none"
    with pytest.raises(ValueError, match=r"num_tokens: 5000 is not allowed; allowed: .*training\.batch_unit rows"):
        resolved(packed, "--training.num_tokens 5000")
    config = resolved(packed, "--training.num_tokens 5000 --training.batch_unit rows")
    assert config.training.num_steps == 10


def test_a_phase_counts_its_own_tokens():
    phase = f"--training.num_tokens {10 * TOKENS} --training.first_step 123"
    assert resolved(phase).training.num_steps == 133
    with pytest.raises(ValueError, match=r"warmup_tokens: 512 .*restart_schedule true"):
        resolved(phase, "--optimizer.warmup_tokens 512")
    config = resolved(phase, "--optimizer.warmup_tokens 512 --optimizer.restart_schedule true")
    assert config.optimizer.warmup_steps == 1


def files(folder, **contents):
    paths = []
    for name, text in contents.items():
        paths.append(folder / f"{name}.yaml")
        paths[-1].write_text(text)
    return " ".join(f"--config {path}" for path in paths)


def test_the_later_of_steps_and_tokens_counts(tmp_path):
    steps, tokens = "training:\n  num_steps: 77\n", f"training:\n  num_tokens: {10 * TOKENS}\n"
    for one, two, expected in ((steps, tokens, (10, 10 * TOKENS)), (tokens, steps, (77, 0))):
        training = resolved(files(tmp_path, one=one, two=two)).training
        assert (training.num_steps, training.num_tokens) == expected
    training = resolved(files(tmp_path, one=tokens), "--training.num_steps 5").training
    assert (training.num_steps, training.num_tokens) == (5, 0)
    training = resolved(files(tmp_path, one=steps), "--training.num_tokens 0").training
    assert (training.num_steps, training.num_tokens) == (77, 0)


def test_one_source_may_repeat_the_steps_but_not_change_them(tmp_path):
    config = resolved(f"--training.num_tokens {10 * TOKENS} --training.batch_ramp {3 * TOKENS} 8 8")
    stored = files(tmp_path, stored=dump_yaml(config))
    assert load_config(PretrainConfig, stored.split()) == config
    assert from_dict(PretrainConfig, to_dict(config)) == config
    with pytest.raises(ValueError, match=r"stored\.yaml:\d+: training\.num_steps: .* of the same source gives"):
        load_config(PretrainConfig, [*stored.split(), "--data.seq_length", "32"])
    with pytest.raises(ValueError, match=r"^command line: training\.num_steps: 5, but training\.num_tokens 512"):
        resolved("--training.num_steps 5 --training.num_tokens 512")


def test_tokens_that_give_more_steps_than_jax_counts_are_refused():
    refused = r"training\.num_tokens: 1099511627776 is not allowed, .*; set training\.num_steps"
    with pytest.raises(ValueError, match=refused):
        resolved(f"--training.num_tokens {2**40}")


def test_a_stored_config_keeps_the_steps_of_its_run():
    """Another version might convert them otherwise."""
    stored = to_dict(resolved(f"--training.num_tokens {10 * TOKENS}"))
    stored["training"]["num_steps"] = 11
    assert from_dict(PretrainConfig, stored).training.num_steps == 11


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--training.batch_ramp 100 8 8 8 8", "tokens, first size"),
        ("--training.batch_ramp 100 32 8", r"first size \(below 32\)"),
        ("--training.batch_ramp 100 8 0", "all above 0"),
        ("--training.num_tokens 512 --optimizer.wsd_decay_tokens 513", "at most 512, the tokens of the phase"),
        ("--training.num_tokens -1", "0 or more"),
    ],
)
def test_lengths_that_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        resolved(words)
