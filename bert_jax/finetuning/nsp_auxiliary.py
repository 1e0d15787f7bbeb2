"""A next-sentence loss beside the task's own: does the second part of a text belong to the first?

The loss of pretraining (Devlin et al. 2018, section 3.1) on the task's own text. Every example of a batch comes a
second time, as two parts of which the second is its own or, half of the time, another record's; the task's own loss
does not see these.
"""

from collections.abc import Sequence

import numpy as np

from bert_jax.tasks.task import Encoded, ModelInput, Target
from bert_jax.tokenization import Tokenizer
from bert_jax.tokenization.tokenizer import longest_first

# Of the units that this module makes; 0 = is next, 1 = another's, as in pretraining.
TARGETS = {"nsp_labels": Target("unit", np.int32), "nsp_weights": Target("unit", np.float32)}


def text_parts(sequence: Encoded, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The two texts of a pair, or the two halves of a text, cut before a word; without special tokens."""
    ids = np.asarray(sequence.ids)
    special = tokenizer.special[ids]
    # Runs of text between special tokens.
    runs = [run[~tokenizer.special[run]] for run in np.split(ids, np.flatnonzero(special))]
    runs = [run for run in runs if len(run)]
    if len(runs) > 1:
        return runs[0].tolist(), np.concatenate(runs[1:]).tolist()
    if not runs:
        return [], []
    starts = np.flatnonzero(~tokenizer.continuation[runs[0]])
    cut = int(starts[np.argmin(np.abs(starts - len(runs[0]) / 2))]) if len(starts) else 0
    return runs[0][:cut].tolist(), runs[0][cut:].tolist()


def next_text_units(
    chosen: Sequence[ModelInput],
    units: Sequence[ModelInput],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    types: int,
    key: tuple[int, int],
) -> list[ModelInput]:
    """A unit for each of ``chosen`` that has two parts, of at most ``max_length`` tokens; ``units`` are those that
    other parts are drawn from, by ``key`` (seed, data step). ``types``: how many segments the model knows."""
    rng = np.random.default_rng([*key, 12])
    found = []
    room = max_length - len(tokenizer.build_inputs([], [])[0])
    for unit in chosen:
        other = units[int(rng.integers(0, len(units)))]
        first, second = text_parts(unit.sequences[0], tokenizer)
        foreign = text_parts(other.sequences[0], tokenizer)[1]
        is_other = bool(rng.random() < 0.5) and other.record != unit.record and bool(foreign)
        second = foreign if is_other else second
        if not first or not second:
            continue
        kept = longest_first(len(first), len(second), room)
        ids, segments = tokenizer.build_inputs(first[: kept[0]], second[: kept[1]])
        sequence = Encoded(ids, segments if types > 1 else [0] * len(ids))
        found.append(
            ModelInput(unit.record, (sequence,), {"nsp_labels": int(is_other), "nsp_weights": 1.0}, weight=0.0)
        )
    return found
