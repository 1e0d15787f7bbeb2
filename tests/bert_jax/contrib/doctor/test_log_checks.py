"""Checks of the log on lines that were written by hand."""

import pytest
from support import tiny_config

from bert_jax.contrib.doctor.findings import ordered
from bert_jax.contrib.doctor.log_checks import (
    check_log,
    check_options,
    dropout_rates,
    moving_average,
    schedule,
    weight_decay,
)

STEPS = 4000
CONFIG = tiny_config(f"--training.num_steps {STEPS} --optimizer.warmup_steps 100 --model.vocab_size 30000")


def lines(loss, last=STEPS, held_out=None, **more):
    """Lines every 100 steps; ``loss`` is a function of the step, ``more`` functions of the step or values."""
    made = []
    for step in range(100, last + 1, 100):
        row = {"step": step, "mlm_loss": loss(step), "skipped_steps": 0, "tokens_per_second": 1000.0}
        row |= {name: value(step) if callable(value) else value for name, value in more.items()}
        made.append(row | {"data_wait_fraction": row.get("data_wait_fraction", 0.0)})
    if held_out is not None:
        made.append({"step": last, "split": "eval", "mlm_loss": held_out})
    return made


def seen(step):
    """Examples of batches of 8 that begin again at step 2000."""
    return 8 * (step if step < 2000 else step - 1900)


def slowly(step):
    """A loss that is far above word frequencies after the whole run but falls."""
    return 10 - step / 2000


def rate(step, lost=0):
    """The learning rate of the schedule of CONFIG, which begins again after ``lost`` steps."""
    peak, done = CONFIG.optimizer.learning_rate, step - 1 - lost
    return peak * min(done / 100, 1 - (done - 100) / (STEPS - 100))


def again(step):
    """The learning rate of a schedule that begins again at step 2000."""
    return rate(step, lost=0 if step <= 2000 else 2000)


def falling(step):
    return 3 + 4 * 0.999**step


CASES = [
    (lines(falling, held_out=3.1), {}),
    (lines(lambda step: 6.5, held_out=6.5), {"loss": "LOOK"}),
    (lines(lambda step: 7.5, last=400), {"loss": "FAIL"}),
    (lines(lambda step: 7.5, last=100), {}),
    (lines(lambda step: 6.5, last=500), {}),
    (lines(lambda step: falling(step) + (step == 2000)), {"loss spikes": "LOOK"}),
    (lines(lambda step: falling(step) + 3 * (step > 2000)), {"loss spikes": "FAIL"}),
    (lines(falling, held_out=3.6), {"held-out gap": "LOOK"}),
    (lines(falling, held_out=4.5), {"held-out gap": "FAIL"}),
    (lines(falling, examples_seen=lambda step: 8 * step), {}),
    (lines(falling, examples_seen=seen), {"data position": "FAIL"}),
    (lines(falling, learning_rate=rate), {}),
    (lines(falling, learning_rate=again), {"learning rate": "LOOK"}),
    # A run that is resumed with other options: the last line counts.
    (lines(falling, learning_rate=lambda step: rate(step, lost=-500 * (step < 2000))), {}),
    (lines(falling, last=2000, epoch=lambda step: step / 800), {}),
    (lines(falling, last=2000, epoch=lambda step: step / 200), {"passes": "LOOK"}),
    (lines(falling, last=2000, epoch=lambda step: step / 80), {"passes": "FAIL"}),
    (lines(slowly), {"loss": "LOOK"}),
    (lines(falling, skipped_steps=lambda step: step // 1000), {"skipped steps": "LOOK"}),
    (lines(falling, skipped_steps=lambda step: step // 10), {"skipped steps": "FAIL"}),
    (lines(falling, tokens_per_second=lambda step: 1000 - step / 5), {"speed": "LOOK"}),
    (lines(falling, data_wait_fraction=0.2), {"speed": "LOOK"}),
    ([], {}),
]


@pytest.mark.parametrize("rows, remarks", CASES)
def test_remarks(rows, remarks):
    found = ordered(check_log(CONFIG, rows, "mlm_loss", 6.5))
    assert {one.check: one.status for one in found if one.status != "OK"} == remarks


@pytest.mark.parametrize(
    "options, status",
    [
        ("", "OK"),
        ("--optimizer.decay_steps 400", "FAIL"),
        ("--optimizer.decay_steps 3000", "LOOK"),
        ("--optimizer.decay_steps 400 --optimizer.final_fraction 0.1", "OK"),
        ("--optimizer.warmup_steps 3000", "LOOK"),
        ("--optimizer.schedule cosine", "OK"),
        ("--optimizer.schedule triangle", "OK"),
        ("--optimizer.schedule slanted_triangular --optimizer.warmup_steps 3000", "OK"),
        ("--optimizer.schedule constant --optimizer.warmup_steps 0", "OK"),
        ("--optimizer.learning_rate 0", None),
    ],
)
def test_the_schedule(options, status):
    config = tiny_config(f"--training.num_steps {STEPS} --optimizer.warmup_steps 100", options)
    found = schedule(config)
    assert [one.status for one in found] == ([status] if status else [])
    if status == "FAIL":
        assert "in 90% of the steps, from step 400 of 4,000" in found[0].value


@pytest.mark.parametrize(
    "options, status",
    [
        ("", "OK"),
        ("--optimizer.weight_decay_type independent", "LOOK"),
        ("--optimizer.weight_decay_type independent --optimizer.weight_decay 1e-5", "OK"),
        ("--optimizer.weight_decay 2 --optimizer.learning_rate 1e-3", "LOOK"),
        # Usual in long runs of language models: a small part in a step, which removes old weights in the run.
        ("--optimizer.weight_decay 0.5 --optimizer.learning_rate 1e-3", "OK"),
        # A large part in a step, in a run that is too short for it.
        ("--optimizer.weight_decay 2 --optimizer.learning_rate 1e-3 --training.num_steps 400", "OK"),
        ("--optimizer.weight_decay_type l2", None),
        ("--optimizer.weight_decay 0", None),
    ],
)
def test_the_weight_decay(options, status):
    config = tiny_config(f"--training.num_steps {STEPS} --optimizer.warmup_steps 100", options)
    found = weight_decay(config)
    assert [one.status for one in found] == ([status] if status else [])


@pytest.mark.parametrize(
    "options, status",
    [
        ("", "OK"),
        ("--model.hidden_dropout 0.5", "OK"),
        ("--model.hidden_dropout 0.9", "LOOK"),
        ("--model.attention_dropout 0.9", "LOOK"),
        ("--model.embedding_dropout 0.9", "LOOK"),
    ],
)
def test_the_dropout_rates(options, status):
    one = dropout_rates(tiny_config(options))
    assert one.status == status
    assert status == "OK" or options.split()[0][2:] in one.value


@pytest.mark.parametrize(
    "decay, steps, status",
    [("0", 300, []), ("0.9999", 300, ["FAIL"]), ("0.999", STEPS, ["OK"]), ("0.9995", STEPS, ["LOOK"])],
)
def test_the_moving_average(decay, steps, status):
    found = moving_average(tiny_config(f"--optimizer.ema_decay {decay} --training.num_steps {steps}"))
    assert [one.status for one in found] == status
    assert status != ["FAIL"] or "set it to 0.97 or less" in found[0].advice


def test_masks_that_are_chosen_anew_are_no_repetition():
    config = tiny_config(f"--training.num_steps {STEPS} --model.vocab_size 30000 --data.masking dynamic")
    found = check_log(config, lines(falling, epoch=lambda step: step / 10), "mlm_loss", 6.5)
    assert "passes" not in {one.check for one in found}


def test_options_without_faults_have_no_remark():
    found = check_options(CONFIG)
    assert {one.check: one.status for one in found} == dict.fromkeys(
        ("schedule", "dropout rates", "weight decay"), "OK"
    )


def test_a_falling_loss_has_not_diverged():
    config = tiny_config(f"--training.num_steps {STEPS} --model.vocab_size 30000")
    (one,) = [one for one in check_log(config, lines(slowly), "mlm_loss", 6.5) if one.check == "loss"]
    assert "multiply optimizer.learning_rate by 10" in one.advice


@pytest.mark.parametrize(
    "loss, words",
    [
        # The logarithm of the size of the vocabulary is 10.31.
        (lambda step: 10.35 + 0.01 * (step % 300 // 100) - step / 50000, "near 10.31, the loss of random guesses"),
        (lambda step: 10.31 + step / 2000, "diverged"),
        (lambda step: 7.5 + 2 * (step > 2000), "diverged"),
        (lambda step: 9 - 2 * (step == 1000), "diverged"),
        (lambda step: 7.5 + (step == 100), "stopped far above"),
    ],
)
def test_only_a_loss_that_rises_has_diverged(loss, words):
    (one,) = [one for one in check_log(CONFIG, lines(loss), "mlm_loss", 6.5) if one.check == "loss"]
    assert one.status == "FAIL"
    assert words in one.advice
    assert ("diverged" in one.advice) == ("a tenth" in one.advice and "ten times" not in one.advice)


def test_a_plateau_of_word_frequencies_is_normal_early():
    (one,) = [one for one in check_log(CONFIG, lines(lambda step: 6.5), "mlm_loss", 6.5) if one.check == "loss"]
    assert one.status == "LOOK"
    assert "4,000 steps may be too few" in one.advice


def test_without_word_frequencies_the_loss_has_no_range():
    assert "loss" not in {one.check for one in check_log(CONFIG, lines(falling), "mlm_loss", None)}
