"""Checks of options (schedule, dropout, weight decay, moving average) and of metrics.jsonl: learning rate, passes
over the rows, loss against word frequencies, spikes, skipped steps, position in the data, held-out gap, speed."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import jax
import numpy as np

from bert_jax.config import PretrainConfig
from bert_jax.contrib.doctor.findings import Finding, finding
from bert_jax.contrib.doctor.probes import FIRST_LOSS, MASKED
from bert_jax.optim import make_schedule

# Nats above the loss of the unigram distribution: for FAIL, and for LOOK late in the run.
ABOVE, NEAR = 0.5, -0.1
# Share of the steps after which a loss near that of the unigram distribution is LOOK; steps before which none is.
LATE, EARLIEST = 0.25, 200
# A loss still falls if it is at most so many nats above the lowest one, and so many below the one halfway.
SLOW, FALL = 0.2, 0.1
# Nats below the logarithm of the size of the vocabulary, the loss of random guesses, above which nothing was
# learned.
UNMOVED = 0.3
# Nats above the median of the lines before it from which on a line is a spike, and number of these lines.
SPIKE, LINES = 0.5, 5
# Nats by which the held-out loss exceeds the training loss.
GAP = (0.3, 1.0)
SKIPPED = 0.01
# Share of the peak under which a learning rate trains nothing, and the share of the steps with such rates.
IDLE, IDLE_STEPS = 0.01, (0.2, 0.5)
# Share of the steps after which the warmup should have ended, and points at which the schedule is computed.
WARMUP, POINTS = 0.5, 1000
# Schedules that rise for most of the steps.
RISING = ("triangle", "slanted_triangular")
# Dropout rate, and weight decay: the part of a weight that a step takes at the peak rate and, in sum, the run.
DROPOUT, DECAY, DECAY_OF_RUN = 0.5, 1e-3, 1.0
# Part of the moving average that is still the initial parameters at the end, for LOOK and FAIL.
INITIAL = (0.05, 0.5)
# Difference of the logged learning rate from that of the schedule, as a share of the peak.
OTHER_RATE = 1e-3
# Times that a run reads each row with the same masks, for LOOK and FAIL.
PASSES = (10, 40)
# Share of the first speed, and share of the time spent waiting for data.
SLOWER, WAITING = 0.5, 0.1
_PLACES: tuple[Literal["embedding", "attention_output", "feed_forward"], ...] = (
    "embedding", "attention_output", "feed_forward",
)  # fmt: skip


def check_log(
    config: PretrainConfig, rows: Sequence[Mapping[str, Any]], name: str, unigram: float | None
) -> list[Finding]:
    """Return the results of the checks of the lines of metrics.jsonl.

    Args:
        rows: the lines as dicts.
        name: the loss to check, such as ``mlm_loss``.
        unigram: loss of the unigram distribution of the training targets; None if it is unknown.
    """
    lines = [row for row in rows if "split" not in row]
    found = [data_position(lines), skipped_steps(lines), learning_rate(config, lines)]
    if name == MASKED:
        found.append(passes(config, lines))
    found += [loss_against_frequencies(config, rows, name, unigram), spikes(lines, name)]
    found += [held_out_gap(rows, name), speed(lines)]
    return [one for one in found if one is not None]


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.array([row[name] for row in rows if isinstance(row.get(name), int | float)], np.float64)


def check_options(config: PretrainConfig) -> list[Finding]:
    """Return the results of the checks of the schedule, of dropout, of weight decay and of the moving average."""
    return [*schedule(config), dropout_rates(config), *weight_decay(config), *moving_average(config)]


def moving_average(config: PretrainConfig) -> list[Finding]:
    """Return the part of the moving average that is still the initial parameters at the end of the run; [] without
    a moving average."""
    decay, steps = config.optimizer.ema_decay, config.training.num_steps
    part = decay**steps
    look, fail = INITIAL
    return [finding(
        "moving average", f"{part:.0%} of the moving average are the initial parameters at the end of the run",
        f"at most {look:.0%}",
        f"optimizer.ema_decay {decay:g} is too slow for {steps:,} steps; set it to {max(1 - 10 / steps, 0):.2g} or "
        "less, or to 0",
        fail=part > fail, look=part > look, number=part,
    )] if decay and steps else []  # fmt: skip


def learning_rate(config: PretrainConfig, lines: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Compare the learning rate in the last line with that of the schedule. Earlier lines may be from a run with
    other options."""
    optimizer, training = config.optimizer, config.training
    known = [row for row in lines if isinstance(row.get("learning_rate"), int | float)]
    if not known or not optimizer.learning_rate:
        return None
    step, rate = int(known[-1]["step"]), float(known[-1]["learning_rate"])
    wanted = float(make_schedule(optimizer, training.num_steps, training.first_step)(step - 1))
    return finding(
        "learning rate", f"{rate:.3g} at step {step:,}; the schedule has {wanted:.3g}", "equal",
        "the schedule does not count the steps of the run, as after a resume that starts it again; it must read "
        "the step of the training state",
        look=abs(rate - wanted) > OTHER_RATE * optimizer.learning_rate, number=rate,
    )  # fmt: skip


def passes(config: PretrainConfig, lines: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Return how often the whole run reads each row with the same masks, by the passes up to the last line."""
    known = [row for row in lines if isinstance(row.get("epoch"), int | float)]
    first = config.training.first_step
    if not known or config.data.masking != "static" or known[-1]["step"] <= first:
        return None
    share = (config.training.num_steps - first) / (known[-1]["step"] - first)
    times, (look, fail) = float(known[-1]["epoch"]) * share, PASSES
    return finding(
        "passes", f"the run reads each row {times:.1f} times, with the same masks", f"at most {look}",
        "the network learns the masked words by heart; set data.masking dynamic or a larger data.dupe_factor, and "
        "use more text",
        fail=times > fail, look=times > look, number=times,
    )  # fmt: skip


def dropout_rates(config: PretrainConfig) -> Finding:
    """Return the highest dropout rate."""
    model = config.model
    rates = {name: getattr(model, name) for name in ("hidden_dropout", "attention_dropout")}
    rates |= {f"{place}_dropout": model.dropout_at(place) for place in _PLACES}
    name = max(rates, key=lambda name: rates[name])
    return finding(
        "dropout rates", f"model.{name} is {rates[name]:g}", f"at most {DROPOUT:g}",
        "a rate is the part of the values that is dropped, not the part that is kept; 0 to 0.1 is usual",
        look=rates[name] > DROPOUT, number=rates[name],
    )  # fmt: skip


def weight_decay(config: PretrainConfig) -> list[Finding]:
    """Return the size to which weight decay alone reduces weights in the phase. LOOK if it is below 1 / e and a
    step at the peak rate takes more than ``DECAY`` of a weight. Usual recipes take 1e-7 to 1e-4, and reach 1 / e
    only in long runs. Returns [] without weight decay apart from the gradient, or if the rate is always 0."""
    optimizer, training = config.optimizer, config.training
    rates = _rates(config)[1]
    if optimizer.weight_decay_type == "l2" or not optimizer.weight_decay or not rates.max(initial=0) > 0:
        return []
    by_step = optimizer.weight_decay * rates
    if optimizer.weight_decay_type == "independent":
        by_step = by_step / optimizer.learning_rate
    most, total = float(by_step.max()), float(by_step.mean()) * (training.num_steps - training.first_step)
    return [finding(
        "weight decay", f"without updates, weights shrink to {math.exp(-total):.2g} of their size in the run, by "
        f"{most:.2g} in a step at the peak rate", f"1 / e or more, or at most {DECAY:g} in a step",
        f"weight decay removes what the network learns; lower optimizer.weight_decay "
        f"({optimizer.weight_decay:g}, {optimizer.weight_decay_type}; usual: 0.01 decoupled, 1e-5 independent)",
        look=total > DECAY_OF_RUN and most > DECAY, number=total,
    )]  # fmt: skip


def _rates(config: PretrainConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return up to ``POINTS`` steps of the phase, and their learning rates."""
    optimizer, training = config.optimizer, config.training
    steps = np.unique(np.linspace(training.first_step, max(training.num_steps - 1, 0), POINTS).astype(np.int64))
    return steps, np.asarray(jax.jit(make_schedule(optimizer, training.num_steps, training.first_step))(steps))


def schedule(config: PretrainConfig) -> list[Finding]:
    """Return the share of the steps of the phase whose learning rate is nearly 0. LOOK if the rate rises for most
    of the steps. Returns [] if the rate is always 0."""
    optimizer, training = config.optimizer, config.training
    steps, rates = _rates(config)
    if not rates.max(initial=0) > 0:
        return []
    highest = int(rates.argmax())
    is_idle = (np.arange(len(rates)) > highest) & (rates < IDLE * optimizer.learning_rate)
    idle = float(is_idle.mean())
    rises = optimizer.schedule not in RISING and highest > WARMUP * len(rates)
    value, advice = f"the learning rate is nearly 0 in {idle:.0%} of the steps", ""
    expected = f"at most {IDLE_STEPS[0]:.0%}"
    if idle > IDLE_STEPS[0]:
        value += f", from step {steps[is_idle.argmax()]:,} of {training.num_steps:,}"
        advice = f"optimizer.decay_steps is {optimizer.decay_steps:,}; set 0, so that the decay ends with the run"
    elif rises:
        value = f"the learning rate rises in {highest / len(rates):.0%} of the steps"
        expected = f"at most {WARMUP:.0%}"
        advice = f"set optimizer.warmup_steps to a tenth of the steps, {training.num_steps // 10:,}"
    return [finding(
        "schedule", value, expected, advice,
        fail=idle > IDLE_STEPS[1], look=idle > IDLE_STEPS[0] or rises, number=idle,
    )]  # fmt: skip


def data_position(lines: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Return how often the number of examples falls from a line to the next one, although the step rises."""
    seen = [(int(row["step"]), row["examples_seen"]) for row in lines if isinstance(row.get("examples_seen"), int)]
    falls = [
        (after[0], before[1], after[1])
        for before, after in pairwise(seen)
        if after > before and after[1] < before[1]
    ]
    value = f"the number of examples read falls {len(falls)} times"
    if falls:
        step, before, after = falls[-1]
        value += f"; at step {step:,} it is {after:,} after {before:,}"
    return finding(
        "data position", value, "0 times",
        "the data started again when the run was resumed, so the first rows are read again and others never; "
        "restore the position of the reader with the checkpoint",
        fail=bool(falls), number=float(len(falls)),
    ) if len(seen) > 1 else None  # fmt: skip


def skipped_steps(lines: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Return the number of steps without a finite loss and gradient."""
    if not lines:
        return None
    skipped, step = int(lines[-1].get("skipped_steps") or 0), int(lines[-1]["step"])
    return finding(
        "skipped steps", f"{skipped:,} of {step:,} steps had no finite loss or gradient", "0",
        "lower optimizer.learning_rate; set execution.dtype float32 to find the cause",
        fail=skipped > SKIPPED * step, look=skipped > 0, number=float(skipped),
    )  # fmt: skip


def loss_against_frequencies(
    config: PretrainConfig, rows: Sequence[Mapping[str, Any]], name: str, unigram: float | None
) -> Finding | None:
    """Compare the last held-out loss (without one, the training loss) with that of the unigram distribution."""
    own = [row for row in rows if row.get("split") == "eval" and isinstance(row.get(name), int | float)]
    own = own or [row for row in rows if "split" not in row and isinstance(row.get(name), int | float)]
    if not own or unigram is None:
        return None
    loss, step, total = float(own[-1][name]), int(own[-1]["step"]), config.training.num_steps
    above, early = loss - unigram, step < max(EARLIEST, 2 * config.optimizer.warmup_steps)
    late = not early and step >= LATE * total
    value = f"{loss:.2f} nats at step {step:,}; word frequencies alone have {unigram:.2f}"
    expected = f"below {unigram + NEAR:.2f} after a quarter of the steps" if not early else "no range this early"
    advice = (
        "the network has learned frequencies only. Each network does so early, and the plateau usually ends later: "
        f"{step:,} steps may be too few. If more steps do not help, try a tenth and ten times of "
        "optimizer.learning_rate"
    )
    losses = _numbers([row for row in rows if "split" not in row], name)
    guess = math.log(config.model.vocab_size)
    falls = len(losses) > 0 and loss < guess and _still_falls(losses)
    if above > ABOVE:
        expected = f"below {unigram + ABOVE:.2f}"
        advice = (
            "the loss stopped far above that of word frequencies; follow the other lines first, then try a tenth "
            "and ten times of optimizer.learning_rate"
        )
        if falls:
            advice = "the loss falls, but slowly; multiply optimizer.learning_rate by 10"
        elif len(losses) and guess - UNMOVED < losses.min() <= losses.max() < guess + FIRST_LOSS[1]:
            advice = (
                f"it has stayed near {guess:.2f}, the loss of random guesses, so the parameters have hardly moved; "
                "multiply optimizer.learning_rate by 10, and check warmup, schedule and frozen parameters"
            )
        elif len(losses) and losses[-1] > min(losses[0], losses.min() + SLOW):
            advice = "training diverged; set optimizer.learning_rate to a tenth"
    return finding(
        "loss", value, expected, advice,
        fail=not early and above > ABOVE and not falls,
        look=(not early and above > ABOVE) or (late and above > NEAR), number=loss,
    )  # fmt: skip


def _still_falls(losses: np.ndarray) -> bool:
    """Return True if the last loss is near the lowest one, and below the one halfway."""
    last = losses[-1]
    return bool(last <= losses.min() + SLOW and last < losses[len(losses) // 2] - FALL)


def spikes(lines: Sequence[Mapping[str, Any]], name: str) -> Finding | None:
    """Return the number of lines with a loss far above that of the lines before it. FAIL if it does not return."""
    losses = _numbers(lines, name)
    if len(losses) <= LINES:
        return None
    before = np.array([np.median(losses[i - LINES : i]) for i in range(LINES, len(losses))])
    count = int((losses[LINES:] > before + SPIKE).sum())
    best, last = float(losses.min()), float(np.median(losses[-LINES:]))
    return finding(
        "loss spikes", f"{count} lines are {SPIKE} nats above the {LINES} lines before them; "
        f"the last lines are {last - best:.2f} above the lowest", "0 lines",
        "lower optimizer.learning_rate or set training.spike_limit and training.spike_rollback",
        fail=count > 0 and last > best + 2 * SPIKE, look=count > 0, number=float(count),
    )  # fmt: skip


def held_out_gap(rows: Sequence[Mapping[str, Any]], name: str) -> Finding | None:
    """Compare the last held-out loss with the training loss of the lines around it."""
    own = [row for row in rows if row.get("split") == "eval" and isinstance(row.get(name), int | float)]
    if not own:
        return None
    step = own[-1]["step"]
    near = _numbers([row for row in rows if "split" not in row and row["step"] <= step][-LINES:], name)
    if not len(near):
        return None
    gap = float(own[-1][name]) - float(near.mean())
    look, fail = GAP
    return finding(
        "held-out gap", f"the held-out loss is {gap:+.2f} nats above the training loss", f"at most {look}",
        "the text was read too often or the held-out text is of another kind; use more text or fewer steps",
        fail=gap > fail, look=gap > look, number=gap,
    )  # fmt: skip


def speed(lines: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Compare the tokens per second of the last third of the lines with those of the first third."""
    rates, waits = _numbers(lines[1:], "tokens_per_second"), _numbers(lines[1:], "data_wait_fraction")
    if len(rates) < 3 * LINES:
        return None
    third = len(rates) // 3
    share = float(np.median(rates[-third:]) / max(np.median(rates[:third]), 1e-9))
    waiting = float(np.median(waits)) if len(waits) else 0.0
    advice = "the machine is shared, hot or out of memory; compare data_wait_fraction and seconds_per_step"
    if waiting > WAITING:
        advice = "the step waits for data; raise data.prefetch, put the shards on a local disk"
    return finding(
        "speed",
        f"the last third has {share:.0%} of the speed of the first; {waiting:.0%} of the time waits for data",
        f"{SLOWER:.0%} or more; at most {WAITING:.0%}", advice,
        look=share < SLOWER or waiting > WAITING, number=share,
    )  # fmt: skip
