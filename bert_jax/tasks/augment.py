"""What training does to an input beside learning from it: masked tokens, words left out."""

import dataclasses

import numpy as np

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.inference.batching import Encoded
from bert_jax.tasks.base import Unit
from bert_jax.tokenization import Tokenizer

# Targets whose places in a text a deletion would move.
_KEEPS_WORDS = {"qa", "tagging", "joint"}


def check_augmentation(config: FinetuneConfig) -> None:
    """``ValueError`` for deletions where each word has its own label."""
    options = config.input
    if (options.word_dropout or options.span_deletion) and config.task.kind in _KEEPS_WORDS:
        raise ValueError(
            f"input.word_dropout, input.span_deletion: not for {config.task.kind}, whose labels belong to words; "
            "use input.mask_fraction"
        )


def augmented(unit: Unit, config: FinetuneConfig, tokenizer: Tokenizer, key: tuple[int, int]) -> Unit:
    """``unit`` as training sees it at (data step, number of the unit); itself where nothing is asked for."""
    options = config.input
    if not (options.mask_fraction or options.word_dropout or options.span_deletion):
        return unit
    rng = np.random.default_rng([config.training.seed, *key])
    sequences = tuple(_augmented(sequence, config, tokenizer, rng) for sequence in unit.sequences)
    return dataclasses.replace(unit, sequences=sequences)


def _augmented(
    sequence: Encoded, config: FinetuneConfig, tokenizer: Tokenizer, rng: np.random.Generator
) -> Encoded:
    options = config.input
    ids, types = np.asarray(sequence.ids), np.asarray(sequence.types)
    special = tokenizer.special[ids]
    word = np.cumsum(~tokenizer.continuation[ids] | special)
    words = np.unique(word[~special])
    gone: set[int] = set()
    if options.span_deletion and len(words) > 1:
        while len(gone) < round(options.span_deletion * len(words)):
            length = int(rng.integers(1, options.span_max + 1))
            first = int(rng.integers(0, len(words)))
            gone |= set(words[first : first + length].tolist())
    if options.word_dropout:
        gone |= set(words[rng.random(len(words)) < options.word_dropout].tolist())
    if len(gone) < len(words):  # a text without any word would teach nothing
        keep = special | ~np.isin(word, list(gone))
        ids, types, special = ids[keep], types[keep], special[keep]
    if options.mask_fraction:
        masked = ~special & (rng.random(len(ids)) < options.mask_fraction)
        ids = np.where(masked, tokenizer.mask_id, ids)
    return Encoded(ids.tolist(), types.tolist(), sequence.extra)
