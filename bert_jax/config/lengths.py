"""Lengths in tokens (``training.num_tokens`` and others), and their conversion to steps when a config is loaded.

A token is a position of a row of a batch, padding included: a batch has (rows) x ``data.seq_length`` tokens. All
lengths are those of one phase; they follow from the config and from the step at which the phase starts. The rest of
the code reads steps only.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bert_jax.config.options import Option
from bert_jax.config.schema import MOST, Value

# Options that state the length of a pretraining run, and those that otherwise follow from the size of the text too.
LENGTH, *_ = LENGTHS = "training.num_steps", "training.num_tokens"
OF_LENGTH = (
    "training.global_batch_size", "training.eval_interval", "training.checkpoint_interval",
    "optimizer.warmup_steps",
)  # fmt: skip
# Steps of a run without a length, as docs/finetuning.md states them.
PASSES, MOST_PASSES, ENOUGH_STEPS, FEWEST_STEPS = 3, 20, 1000, 200

RAMP = "training.batch_ramp"
# Option in tokens -> option in steps that follows from it. The last one needs the first ones.
STEPS_OF = {
    "training.num_tokens": "training.num_steps",
    "optimizer.warmup_tokens": "optimizer.warmup_steps",
    "optimizer.wsd_decay_tokens": "optimizer.wsd_decay_steps",
}

# Key of an option -> its typed value, and the source of the value for messages.
Parsed = dict[str, tuple[Value, str]]


def automatic_steps(per_pass: int) -> int:
    """Return the number of steps of a run whose length is not set, with ``per_pass`` steps in a pass over its data:
    3 passes; more, up to 20, while there are fewer than 1,000 steps; at least 200 steps.

    Small sets need more passes than 3 (Mosbach et al. 2021; Zhang et al. 2021; Gururangan et al. 2020).
    """
    return max(PASSES * per_pass, min(ENOUGH_STEPS, MOST_PASSES * per_pass), FEWEST_STEPS)


class Batches(NamedTuple):
    """Batch sizes of a phase.

    ``ramp`` is a flattened sequence of pairs (number of steps, rows per batch); after the ramp, every batch has
    ``rows`` rows. Every row has ``length`` tokens.
    """

    ramp: Sequence[int]
    rows: int
    length: int

    def _ramp_pairs(self) -> Iterator[tuple[int, int]]:
        return zip(self.ramp[::2], self.ramp[1::2], strict=True)

    def tokens(self, steps: int) -> int:
        """Return the number of tokens of the first ``steps`` batches."""
        total = 0
        for count, rows in self._ramp_pairs():
            taken = min(count, steps)
            total += taken * rows
            steps -= taken
        return (total + steps * self.rows) * self.length

    def steps_within(self, tokens: int) -> int:
        """Return the largest number of batches, from the first, that have at most ``tokens`` tokens."""
        steps, left = 0, tokens // self.length
        for count, rows in self._ramp_pairs():
            taken = min(count, left // rows)
            steps, left = steps + taken, left - taken * rows
            if taken < count:
                return steps
        return steps + left // self.rows

    def steps_of(self, tokens: int) -> int:
        """Return the smallest number of batches, from the first, that have at least ``tokens`` tokens."""
        steps = self.steps_within(tokens)
        return steps + (self.tokens(steps) < tokens)


def token_ramp(ramp: Sequence[int], rows: int, length: int) -> tuple[int, ...]:
    """Return the pairs (number of steps, batch size) of a batch size that grows to ``rows``.

    ``ramp``: the length T of the ramp in tokens, the first batch size and the increment.

    The size b is used until the number of tokens before the batch reaches T * (sum of the sizes up to and including
    b) / (sum of all sizes), rounded up, so every size has nearly the same number of steps
    (``BatchSizeWarmupScheduler`` of AnswerDotAI/ModernBERT, ``src/sequence_packer.py``, whose sizes count
    microbatches).
    """
    tokens, first, increment = ramp
    sizes, pairs, seen = range(first, rows, increment), list[int](), 0
    for size, below in zip(sizes, itertools.accumulate(sizes), strict=True):
        threshold = -(-tokens * below // sum(sizes))
        steps = max(-(-(threshold - seen) // (size * length)), 0)
        seen += steps * size * length
        pairs += [steps, size] if steps else []
    return tuple(pairs)


def with_steps(parsed: Parsed, options: Mapping[str, Option]) -> Parsed:
    """Return ``parsed``, which lists its keys in the order in which they were set last, with the steps that follow
    from the lengths in tokens.

    Of a length in tokens and the same length in steps, the one from the later source counts. Raises ``ValueError``
    if one source sets both to different lengths, or if a length is not allowed.
    """
    parsed = _latest(parsed)

    def get(key: str) -> Any:
        return parsed[key][0] if key in parsed else options[key].default

    ramp = get(RAMP)
    asked = [RAMP] * (len(ramp) % 2) + [key for key in STEPS_OF if get(key)]
    if not asked:
        return parsed

    def refuse(key: str, allowed: str) -> None:
        raise ValueError(f"{parsed[key][1]}: {key}: {get(key)!r} is not allowed; allowed: {allowed}")

    if get("data.packing") != "none" and get("training.batch_unit") != "rows":
        refuse(asked[0], "with data.packing, training.batch_unit rows, because the shards determine other rows")
    rows, length, first = get("training.global_batch_size"), get("data.seq_length"), get("training.first_step")
    found: dict[str, int] = {}
    if RAMP in asked:
        if len(ramp) != 3 or min(ramp) < 1 or ramp[1] >= rows:
            pairs = "pairs of (steps, batch size)"
            refuse(RAMP, f"{pairs}, or tokens, first size (below {rows}), increment; all above 0")
        ramp = token_ramp(ramp, rows, length)
        parsed[RAMP] = ramp, parsed[RAMP][1]
    batches = Batches(ramp, rows, length)
    if (tokens := get("training.num_tokens")) > 0:
        found["training.num_steps"] = first + batches.steps_of(tokens)
    if (tokens := get("optimizer.warmup_tokens")) > 0:
        if first and not get("optimizer.restart_schedule"):
            refuse("optimizer.warmup_tokens", "0 in a later phase, or with optimizer.restart_schedule true")
        found["optimizer.warmup_steps"] = batches.steps_of(tokens)
    if (tokens := get("optimizer.wsd_decay_tokens")) > 0:
        steps = found.get("training.num_steps", get("training.num_steps")) - first
        total = batches.tokens(steps)
        if tokens > total:
            refuse("optimizer.wsd_decay_tokens", f"at most {total:,}, the tokens of the phase")
        found["optimizer.wsd_decay_steps"] = steps - batches.steps_within(total - tokens)
    return _joined(parsed, found)


def _joined(parsed: Parsed, found: Mapping[str, int]) -> Parsed:
    """Return ``parsed`` with ``found``, the steps by option. Raises ``ValueError`` if other steps are set, or if
    JAX cannot count them."""
    for tokens, steps in STEPS_OF.items():
        if isinstance(number := found.get(steps), int) and number > MOST:
            value, source = parsed[tokens]
            raise ValueError(
                f"{source}: {tokens}: {value} is not allowed, because it gives {number} steps with this batch; "
                f"allowed: at most {MOST} steps; set {steps}, or a larger batch"
            )
        if steps in found and steps in parsed and parsed[steps][0] not in (found[steps], 0, ()):
            value, source = parsed[steps]
            raise ValueError(
                f"{source}: {steps}: {value}, but {tokens} {parsed[tokens][0]} of the same source gives "
                f"{found[steps]}; set one of them, or {tokens} again after this source"
            )
    return parsed | {
        steps: (found[steps], parsed[tokens][1]) for tokens, steps in STEPS_OF.items() if steps in found
    }


def _latest(parsed: Parsed) -> Parsed:
    """Remove each length in tokens that a later source replaces by steps, and steps that it replaces by tokens."""
    order, parsed = list(parsed), dict(parsed)
    for tokens, steps in STEPS_OF.items():
        if tokens not in parsed or steps not in parsed or not parsed[tokens][0]:
            continue
        if _origin(parsed[tokens][1]) != _origin(parsed[steps][1]):
            del parsed[min(tokens, steps, key=order.index)]
    return parsed


def _origin(source: str) -> str:
    """Return ``source`` without the line number of a file."""
    return re.sub(r":\d+$", "", source)
