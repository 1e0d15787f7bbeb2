"""Selection and replacement of the tokens that the masked language model predicts, in numpy, one batch at a time.

Randomness is counter-based: every random value is the SplitMix64 hash (``bert_jax.hashing``) of (row key, stream,
position). The masks of a row therefore depend only on its key, not on the batch, the process or earlier random
values.

Legend: B rows, S tokens per row, at most M predictions and C sequences per row, W words.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.hashing import hash_key
from bert_jax.tokenization import Tokenizer
from data_pipeline.build.packing import sequence_starts
from data_pipeline.shards.compatibility import Layout

# (ids, word starts or None, sequence ids, keys of the rows, index of the batch) -> (masked ids, positions, labels,
# weights)
Masker = Callable[[np.ndarray, np.ndarray | None, np.ndarray, np.ndarray, int], Sequence[np.ndarray]]

# Streams of the key of a row.
_CHOICE, _REPLACEMENT, _RANDOM_TOKEN, _SPAN_LENGTH = range(4)
_POSITION_BITS = 16
_NEVER = np.uint64(2**64 - 1)
_NARROWEST = 32  # smallest width, in tokens, of the windows in which packed sequences are masked


def draw_bits(keys: np.ndarray, stream: int, size: int) -> np.ndarray:
    """Return random bits uint64[B, size]: the hash of (key, stream, column) for each key in ``keys`` uint64[B]."""
    return hash_key(keys[:, None], stream, np.arange(size))


def uniform(bits: np.ndarray) -> np.ndarray:
    """Map random uint64 values to floats in [0, 1)."""
    return (bits >> np.uint64(11)) * 2.0**-53


def below(bits: np.ndarray, limit: int) -> np.ndarray:
    """Map the upper 32 bits of random uint64 values to integers in [0, limit); ``limit`` is at most 2**32."""
    return ((bits >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)


def prediction_counts(lengths: np.ndarray, fraction: float, max_predictions: int) -> np.ndarray:
    """Return the number of tokens to predict per row, int64[B]: min(max_predictions, max(1, round(n * fraction))).

    n is the element of ``lengths`` for the row and counts all tokens, including [CLS] and [SEP]; halves are rounded
    to even. Both rules follow create_pretraining_data.py of google-research/bert.
    """
    return np.clip(np.rint(lengths * fraction).astype(np.int64), 1, max_predictions)


def mask_batch(
    input_ids: np.ndarray,
    word_starts: np.ndarray,
    maskable: np.ndarray,
    keys: np.ndarray,
    *,
    data: DataConfig,
    mask_id: int,
    vocab_size: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mask ``input_ids`` int[B, S] of a batch.

    Returns (masked ids int32[B, S], positions int32[B, M], labels int32[B, M], weights float32[B, M]). Positions
    are ascending; unused columns have position, label and weight 0. Raises ``ValueError`` if S is 65536 or more.

    ``maskable`` bool[B, S] marks the candidates: all tokens except padding and, unless
    ``data.mask_special_tokens``, [CLS] and [SEP]. One [SEP] ends a row, so its length is the position of the
    last candidate + 2 if this is not the [SEP]. A row without candidates gets no predictions. ``word_starts``
    bool[B, S] marks the first piece of every word (used by the mask units whole_word and span). ``keys``
    uint64[B] determines all random values.

    With the mask unit token, a row gets the number of predictions from ``prediction_counts``, or all candidates if
    there are fewer. With whole_word, words are tried in random order, and a word that would exceed this number is
    skipped, so a row may get fewer predictions, as in google-research/bert. :func:`_choose_spans` describes span.
    The replacement of each chosen token is sampled separately.
    """
    size = input_ids.shape[1]
    if size >= 1 << _POSITION_BITS:
        raise ValueError(f"sequences of {size} tokens cannot be masked; allowed: fewer than {1 << _POSITION_BITS}")
    ends = 0 if data.mask_special_tokens else 1
    lengths = np.where(maskable.any(1), size - np.argmax(maskable[:, ::-1], axis=1) + ends, 0)
    counts = np.where(lengths, prediction_counts(lengths, data.mask_fraction, data.max_predictions), 0)
    if data.mask_unit == "token":
        positions = _choose_tokens(maskable, keys, counts, data.max_predictions)
    else:
        words = _Words(word_starts, maskable)
        chosen = (_choose_words if data.mask_unit == "whole_word" else _choose_spans)(words, keys, counts, data)
        positions = _first_positions(chosen, data.max_predictions)
    used = positions < size
    positions = np.where(used, positions, 0)
    labels = np.where(used, np.take_along_axis(input_ids, positions, 1), 0)
    # [MASK], a random id of the vocabulary, or the token itself.
    share = uniform(hash_key(keys[:, None], _REPLACEMENT, positions))
    random_ids = below(hash_key(keys[:, None], _RANDOM_TOKEN, positions), vocab_size)
    replaced = np.where(share < data.mask_token_share + data.random_token_share, random_ids, labels)
    replaced = np.where(share < data.mask_token_share, mask_id, replaced)
    masked = input_ids.astype(np.int32)
    row, column = np.nonzero(used)
    masked[row, positions[row, column]] = replaced[row, column]
    return masked, positions.astype(np.int32), labels.astype(np.int32), used.astype(np.float32)


def _in_random_order(candidates: np.ndarray, keys: np.ndarray, limit: int) -> np.ndarray:
    """Put the candidates of each row into a random order and return the positions of the first ``limit`` of them.

    The result is int64[B, limit], padded with S.
    """
    size = candidates.shape[1]
    # The position in the low bits makes all values distinct, so the order does not depend on the sort algorithm.
    bits = draw_bits(keys, _CHOICE, size)
    bits = bits >> np.uint64(_POSITION_BITS) << np.uint64(_POSITION_BITS) | np.arange(size, dtype=np.uint64)
    bits = np.where(candidates, bits, _NEVER)
    if limit < size:
        bits = np.partition(bits, limit - 1, axis=1)[:, :limit]
    bits.sort(axis=1)
    positions = (bits & np.uint64((1 << _POSITION_BITS) - 1)).astype(np.int64)
    return np.where(bits == _NEVER, size, positions)


def _choose_tokens(maskable: np.ndarray, keys: np.ndarray, counts: np.ndarray, limit: int) -> np.ndarray:
    """Choose ``counts`` int[B] random candidates per row.

    Returns ascending positions, int64[B, M], padded with S.
    """
    size = maskable.shape[1]
    order = _in_random_order(maskable, keys, min(limit, size))
    positions = np.full((len(maskable), limit), size)
    positions[:, : order.shape[1]] = order
    positions[np.arange(limit) >= counts[:, None]] = size
    positions.sort(axis=1)
    return positions


def _first_positions(chosen: np.ndarray, limit: int) -> np.ndarray:
    """Return the ascending positions [B, limit] of the true elements of ``chosen`` [B, S], padded with S."""
    row, column = np.nonzero(chosen)
    positions = np.full((len(chosen), limit), chosen.shape[1])
    rank = np.arange(len(row)) - np.searchsorted(row, np.arange(len(chosen)))[row]
    positions[row, rank] = column
    return positions


class _Words:
    """Words of a batch: runs of candidates that begin at a word start or after a gap."""

    def __init__(self, word_starts: np.ndarray, maskable: np.ndarray) -> None:
        rows, size = maskable.shape
        after_gap = maskable.copy()
        after_gap[:, 1:] &= ~maskable[:, :-1]  # the first piece of a segment always begins a word
        self.starts = maskable & (word_starts.astype(bool) | after_gap)
        self.maskable = maskable
        self.number = np.cumsum(self.starts, axis=1) - 1  # index of the word of each token
        flat = (np.arange(rows)[:, None] * size + self.number)[maskable]
        self.sizes = np.bincount(flat, minlength=rows * size).reshape(rows, size)  # [B, W]
        segment = np.cumsum(after_gap, axis=1)
        self.segments = np.zeros((rows, size), np.int64)  # [B, W]
        row, column = np.nonzero(self.starts)
        self.segments[row, self.number[row, column]] = segment[row, column]

    def in_random_order(self, keys: np.ndarray) -> np.ndarray:
        """Return the position of the first token of every word, in a random order per row, padded with S.

        The result is int64[B, n], where n is the largest number of words of a row.
        """
        return _in_random_order(self.starts, keys, int(self.starts.sum(1).max(initial=1)) or 1)

    def tokens(self, chosen: np.ndarray) -> np.ndarray:
        """Return a mask bool[B, S] of the tokens of the words that ``chosen`` bool[B, W] marks."""
        return np.take_along_axis(chosen, np.maximum(self.number, 0), 1) & self.maskable


def _turns(words: _Words, order: np.ndarray, left: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Visit the words of every row in ``order``. Each turn visits one word of each row that still needs tokens.

    ``left`` int64[B] is the number of tokens still to choose in each row; the caller decreases it. Yields (index of
    the turn, indices of the rows that still need tokens, index of the visited word of each of these rows).
    """
    rows, size = words.starts.shape
    active = np.arange(rows)
    for turn in range(order.shape[1]):
        active = active[(left[active] > 0) & (order[active, turn] < size)]
        if not len(active):
            return
        yield turn, active, words.number[active, order[active, turn]]


def _choose_words(words: _Words, keys: np.ndarray, counts: np.ndarray, data: DataConfig) -> np.ndarray:
    """Choose random whole words, with at most ``counts`` tokens in total per row.

    Returns a mask of the tokens, bool[B, S].
    """
    chosen = np.zeros(words.starts.shape, bool)
    left = counts.copy()
    for _, active, word in _turns(words, words.in_random_order(keys), left):
        fits = words.sizes[active, word] <= left[active]
        chosen[active, word] = fits
        left[active] -= np.where(fits, words.sizes[active, word], 0)
    return words.tokens(chosen)


def _choose_spans(words: _Words, keys: np.ndarray, counts: np.ndarray, data: DataConfig) -> np.ndarray:
    """Choose random spans of whole words, with at most ``counts`` tokens in total per row.

    The method follows SpanBERT (Joshi et al. 2019).

    A span begins at a random word; its length in words has a truncated geometric distribution. The span ends early
    at the end of its segment, before a word that is already chosen, and before a word that would exceed ``counts``.
    Returns a mask of the tokens, bool[B, S].
    """
    size = words.starts.shape[1]
    order = words.in_random_order(keys)
    cumulative = np.cumsum(span_probabilities(data.span_lengths[0], int(data.span_lengths[1])))
    draws = uniform(draw_bits(keys, _SPAN_LENGTH, order.shape[1]))
    lengths = 1 + np.searchsorted(cumulative[:-1], draws, side="right")
    chosen = np.zeros(words.starts.shape, bool)
    left = counts.copy()
    for turn, active, first in _turns(words, order, left):
        growing = np.arange(len(active))
        for step in range(int(lengths[active, turn].max())):
            row = active[growing]
            word = np.minimum(first[growing] + step, size - 1)
            grows = (
                (step < lengths[row, turn])
                & (first[growing] + step < size)
                & (words.segments[row, word] == words.segments[row, first[growing]])
                & ~chosen[row, word]
                & (words.sizes[row, word] <= left[row])
            )
            growing, row, word = growing[grows], row[grows], word[grows]
            if not len(growing):
                break
            chosen[row, word] = True
            left[row] -= words.sizes[row, word]
    return words.tokens(chosen)


def span_probabilities(mean: float, longest: int) -> np.ndarray:
    """Return the probabilities of span lengths 1 to ``longest``: a truncated geometric distribution whose
    mean is ``mean``.

    Mean 3.8 and longest length 10 correspond to p = 0.2, as in SpanBERT. If ``mean`` is larger than the mean of any
    truncated geometric distribution, all probabilities are equal.
    """
    lengths = np.arange(1, longest + 1)
    low, high = 1e-9, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        weights = (1 - middle) ** (lengths - 1)
        low, high = (middle, high) if (weights * lengths).sum() / weights.sum() > mean else (low, middle)
    weights = (1 - high) ** (lengths - 1)
    return weights / weights.sum()


# ------------------------------------------------------------------ rows that are read


def make_masker(data: DataConfig, layout: Layout, tokenizer: Tokenizer | None) -> Masker | None:
    """Return the function that masks rows when they are read; None with static masking."""
    if data.masking != "dynamic":
        return None
    if tokenizer is None:
        raise ValueError("data.masking: dynamic needs the vocabulary; name it in data.vocab")
    cls_id, sep_id, mask_id, size = tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.vocab_size

    def mask(
        ids: np.ndarray, word_starts: np.ndarray | None, sequence_ids: np.ndarray, keys: np.ndarray, batch: int
    ) -> Sequence[np.ndarray]:
        if word_starts is None:
            word_starts = ~tokenizer.continuation[ids]
        maskable = sequence_ids > 0
        if not data.mask_special_tokens:
            maskable &= (ids != cls_id) & (ids != sep_id)
        row_keys, own = keys.view(np.uint64), data
        if data.final_masking:
            own = dataclasses.replace(data, mask_fraction=data.mask_fraction_at(batch))
        if layout.is_packed:
            return mask_sequences(
                ids, word_starts > 0, maskable, sequence_ids, row_keys, layout.sequences_per_row,
                data=own, mask_id=mask_id, vocab_size=size, predictions=layout.predictions_per_row,
            )  # fmt: skip
        return mask_batch(ids, word_starts > 0, maskable, row_keys, data=own, mask_id=mask_id, vocab_size=size)

    return mask


def mask_sequences(
    ids: np.ndarray, word_starts: np.ndarray, maskable: np.ndarray, sequence_ids: np.ndarray, keys: np.ndarray,
    most: int, *, data: DataConfig, mask_id: int, vocab_size: int, predictions: int,
) -> Sequence[np.ndarray]:  # fmt: skip
    """Mask every sequence of packed rows as :func:`mask_batch` masks a row.

    ``keys`` uint64[B] determines all random values; ``most`` is C. Returns the arrays of :func:`mask_batch`; M is
    ``predictions``.
    """
    starts, lengths = sequence_starts(sequence_ids, most)
    row, slot = np.nonzero(lengths)
    first, tokens = starts[row, slot], lengths[row, slot]
    sequence_keys = hash_key(keys[row], slot)
    masked = ids.astype(np.int32)
    shape = len(row), data.max_predictions
    positions, labels, weights = np.zeros(shape, np.int64), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    # Sequences of similar length share a window, whose width is a power of two.
    widths = np.maximum(2 ** np.ceil(np.log2(np.maximum(tokens, 1))).astype(np.int64), _NARROWEST)
    for width in np.unique(widths).tolist():
        group = np.flatnonzero(widths == width)
        place = np.minimum(first[group, None] + np.arange(width), ids.shape[1] - 1)
        own = np.arange(width) < tokens[group, None]
        at = row[group, None], place
        found, where, answers, used = mask_batch(
            ids[at], word_starts[at], maskable[at] & own, sequence_keys[group],
            data=data, mask_id=mask_id, vocab_size=vocab_size,
        )  # fmt: skip
        masked[row[group].repeat(own.sum(1)), place[own]] = found[own]
        positions[group], labels[group], weights[group] = where + first[group, None], answers, used
    # The sequences are ordered by row and slot, so the predictions of a row are consecutive.
    of, column = np.nonzero(weights)
    counts = np.bincount(row[of], minlength=len(ids))
    rank = np.arange(len(of)) - (np.cumsum(counts) - counts)[row[of]]
    outputs = []
    for values, dtype in ((positions, np.int32), (labels, np.int32), (weights, np.float32)):
        packed = np.zeros((len(ids), predictions), dtype)
        packed[row[of], rank] = values[of, column]
        outputs.append(packed)
    return [masked, *outputs]
