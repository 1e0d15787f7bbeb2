"""Auxiliary loss of fine-tuning, which predicts whether the second part of a text follows the first part.

This is the pretraining loss (Devlin et al. 2018, section 3.1) on the texts of the task. Every example of a batch is
added a second time, split into two parts; in half of these copies, the second part comes from another record. The
task loss ignores the copies.
"""

from collections.abc import Sequence

import numpy as np

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.tasks.task import Encoded, ModelInput, Target
from bert_jax.tokenization import Tokenizer
from bert_jax.tokenization.tokenizer import longest_first

# Targets of the copies; 0 = next part, 1 = part of another record, as in pretraining.
TARGETS = {"nsp_labels": Target("unit", np.int32), "nsp_weights": Target("unit", np.float32)}


def text_parts(sequence: Encoded, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the token ids of two texts, without special tokens: the texts of a pair, or the two halves of a
    single text, which is split at the start of a word."""
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
    config: FinetuneConfig,
    tokenizer: Tokenizer,
    data_step: int,
) -> list[ModelInput]:
    """Return a copy, split into two parts, of each model input in ``chosen`` for which both parts are
    non-empty. Second parts that come from other records are sampled from ``units``."""
    rng = np.random.default_rng([config.training.seed, data_step, 12])
    copies = []
    room = config.task.max_length - len(tokenizer.build_inputs([], [])[0])
    for unit in chosen:
        other = units[int(rng.integers(0, len(units)))]
        first, second = text_parts(unit.sequences[0], tokenizer)
        foreign = text_parts(other.sequences[0], tokenizer)[1]
        is_other = bool(rng.random() < 0.5) and other.record != unit.record and bool(foreign)
        second = foreign if is_other else second
        if not first or not second:
            continue
        kept = longest_first(len(first), len(second), room)
        ids, types = tokenizer.build_inputs(first[: kept[0]], second[: kept[1]])
        sequence = Encoded(ids, types if config.model.type_vocab_size > 1 else [0] * len(ids))
        targets = {"nsp_labels": int(is_other), "nsp_weights": 1.0}
        copies.append(ModelInput(unit.record, (sequence,), targets, weight=0.0))
    return copies
