"""Dynamic masks of rows, and the positions of the sequences of packed rows.

Legend: B rows, S tokens per row, at most C sequences and M predictions per row.
"""

from collections.abc import Callable, Sequence

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.hashing import hash_key
from bert_jax.tokenization import Tokenizer
from data_pipeline.build.masking import mask_batch
from data_pipeline.shards.compatibility import Layout

# (ids, word starts, sequence ids, keys of the rows) -> (masked ids, positions, labels, weights)
Masker = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Sequence[np.ndarray]]

_NARROWEST = 32  # smallest width, in tokens, of the windows in which sequences are masked


def make_masker(data: DataConfig, layout: Layout, tokenizer: Tokenizer | None) -> Masker | None:
    """Return the function that masks rows when they are read; None with static masking."""
    if data.masking != "dynamic":
        return None
    if tokenizer is None:
        raise ValueError("data.masking: dynamic needs the vocabulary; name it in data.vocab")
    cls_id, sep_id, mask_id, size = tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.vocab_size

    def mask(
        ids: np.ndarray, word_starts: np.ndarray, sequence_ids: np.ndarray, keys: np.ndarray
    ) -> Sequence[np.ndarray]:
        maskable = (sequence_ids > 0) & (ids != cls_id) & (ids != sep_id)
        row_keys = keys.view(np.uint64)
        if layout.is_packed:
            return mask_sequences(
                ids, word_starts > 0, maskable, sequence_ids, row_keys, layout.sequences_per_row,
                data=data, mask_id=mask_id, vocab_size=size,
            )  # fmt: skip
        return mask_batch(ids, word_starts > 0, maskable, row_keys, data=data, mask_id=mask_id, vocab_size=size)

    return mask


def sequence_starts(sequence_ids: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first position and the number of tokens of each sequence, int64[B, C] each; 0 if there is none.

    ``sequence_ids`` int[B, S] is 0 at padding and k at the tokens of sequence k, which are consecutive.
    """
    starts, lengths = np.zeros((2, len(sequence_ids), most), np.int64)
    before = np.pad(sequence_ids[:, :-1], ((0, 0), (1, 0)))
    row, column = np.nonzero((sequence_ids != before) & (sequence_ids > 0))
    starts[row, sequence_ids[row, column] - 1] = column
    row, column = np.nonzero(sequence_ids)
    np.add.at(lengths, (row, sequence_ids[row, column] - 1), 1)
    return starts, lengths


def position_ids(sequence_ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the position of each token in its sequence, int32[B, S]; 0 at padding."""
    slots = np.maximum(sequence_ids - 1, 0)
    positions = np.arange(sequence_ids.shape[1]) - np.take_along_axis(starts, slots, 1)
    return np.where(sequence_ids > 0, positions, 0).astype(np.int32)


def mask_sequences(
    ids: np.ndarray, word_starts: np.ndarray, maskable: np.ndarray, sequence_ids: np.ndarray, keys: np.ndarray,
    most: int, *, data: DataConfig, mask_id: int, vocab_size: int,
) -> Sequence[np.ndarray]:  # fmt: skip
    """Mask every sequence of packed rows as ``masking.mask_batch`` masks a row.

    ``keys`` uint64[B] determines all random values; ``most`` is C. Returns the arrays of ``mask_batch``, with M =
    ``data.most_predictions(most)``.
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
        packed = np.zeros((len(ids), data.most_predictions(most)), dtype)
        packed[row[of], rank] = values[of, column]
        outputs.append(packed)
    return [masked, *outputs]
