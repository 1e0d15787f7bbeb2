"""Augmentation of training inputs by deleting words, and masks of the auxiliary masked-LM loss."""

import dataclasses

import numpy as np

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.tasks.task import Encoded, ModelInput
from bert_jax.tokenization import Tokenizer

MLM_SHARE = 0.15
# Most words of a removed span.
_LONGEST_SPAN = 5


def augmented(unit: ModelInput, config: FinetuneConfig, tokenizer: Tokenizer, key: tuple[int, int]) -> ModelInput:
    """Return ``unit``, a model input, with the augmentations of ``config.input`` applied; if all augmentations are
    off, return ``unit`` itself. The random choices depend on the training seed and on ``key``: (data step, index of
    the unit)."""
    options = config.input
    if not (options.word_dropout or options.span_deletion):
        return unit
    rng = np.random.default_rng([config.training.seed, *key])
    sequences = tuple(_augmented(sequence, config, tokenizer, rng) for sequence in unit.sequences)
    return dataclasses.replace(unit, sequences=sequences)


def mask_for_mlm_loss(features: dict[str, np.ndarray], tokenizer: Tokenizer, seed: int, data_step: int) -> None:
    """Mask 15% of the tokens of a batch in place, and add ``mlm_positions``, ``mlm_labels`` and ``mlm_weights``,
    each [B, M]. Of the selected tokens, 80% are replaced by [MASK] and 10% by a random piece; 10% remain unchanged
    (Devlin et al. 2018, section 3.1)."""
    tokenizer.require_mask("loss.mlm_weight")
    ids = features["input_ids"]
    rows, length = ids.shape
    rng = np.random.default_rng([seed, data_step, 15])
    count = max(1, round(MLM_SHARE * length))
    features["mlm_positions"] = np.zeros((rows, count), np.int32)
    features["mlm_labels"] = np.zeros((rows, count), np.int32)
    features["mlm_weights"] = np.zeros((rows, count), np.float32)
    for i in range(rows):
        places = np.flatnonzero((features["sequence_ids"][i] > 0) & ~tokenizer.special[ids[i]])
        chosen = np.sort(rng.permutation(places)[: min(count, round(MLM_SHARE * len(places)))])
        features["mlm_positions"][i, : len(chosen)] = chosen
        features["mlm_labels"][i, : len(chosen)] = ids[i, chosen]
        features["mlm_weights"][i, : len(chosen)] = 1
        draw, other = rng.random(len(chosen)), rng.integers(0, tokenizer.vocab_size, len(chosen))
        ids[i, chosen] = np.where(draw < 0.8, tokenizer.mask_id, np.where(draw < 0.9, other, ids[i, chosen]))


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
            length = int(rng.integers(1, _LONGEST_SPAN + 1))
            first = int(rng.integers(0, len(words)))
            gone |= set(words[first : first + length].tolist())
    if options.word_dropout:
        gone |= set(words[rng.random(len(words)) < options.word_dropout].tolist())
    if len(gone) < len(words):  # a text without words has no training signal
        keep = special | ~np.isin(word, list(gone))
        ids, types = ids[keep], types[keep]
    return Encoded(ids.tolist(), types.tolist(), sequence.extra)
