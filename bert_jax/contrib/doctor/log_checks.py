"""Checks of metrics.jsonl: loss against word frequencies, spikes, skipped steps, held-out gap, speed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.config import PretrainConfig
from bert_jax.contrib.doctor.findings import Finding, finding

# Nats above the loss of the unigram distribution: for FAIL, and for LOOK late in the run.
ABOVE, NEAR = 0.5, -0.1
# Share of the steps after which a loss near that of the unigram distribution is LOOK; steps before which none is.
LATE, EARLIEST = 0.25, 200
# Nats above the median of the lines before it from which on a line is a spike, and number of these lines.
SPIKE, LINES = 0.5, 5
# Nats by which the held-out loss exceeds the training loss.
GAP = (0.3, 1.0)
SKIPPED = 0.01
# Share of the first speed, and share of the time spent waiting for data.
SLOWER, WAITING = 0.5, 0.1


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
    found = [skipped_steps(lines), loss_against_frequencies(config, rows, name, unigram), spikes(lines, name)]
    found += [held_out_gap(rows, name), speed(lines)]
    return [one for one in found if one is not None]


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.array([row[name] for row in rows if isinstance(row.get(name), int | float)], np.float64)


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
    advice = "the network has learned frequencies only; try a tenth and ten times of optimizer.learning_rate"
    if above > ABOVE:
        expected, advice = (
            f"below {unigram + ABOVE:.2f}",
            "training diverged; set optimizer.learning_rate to a tenth",
        )
    return finding(
        "loss", value, expected, advice,
        fail=not early and above > ABOVE, look=late and above > NEAR, number=loss,
    )  # fmt: skip


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
