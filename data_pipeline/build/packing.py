"""Pack instances into rows, and locate the sequences of packed rows that are read.

A build keeps the instances as encoded sequences until the rows of a shard are known.

The instances of a shard are packed by best fit, longest first: each goes into the row with the least free space
that is enough, otherwise into a new row (Krell et al. 2021, "Efficient Sequence Packing without
Cross-contamination", section 3.1, packs the histogram of lengths in the same order). No instance is left over or
cut. Rows depend only on the instances of their shard and on their sort keys.

Legend: N sequences, R rows, S tokens per row, at most C sequences and M predictions per row.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_HEADER = 4  # words before the tokens of a sequence: key, label, number of tokens, number of predictions
_SAMPLE = 1 << 16  # sequences that represent the histogram of lengths
_LOSS = 1.01  # accepted number of rows relative to the number without a limit of sequences per row


@dataclass(frozen=True)
class PackedShape:
    """S, C and M of packed rows; M is 0 without static masks."""

    seq_length: int
    sequences_per_row: int
    predictions_per_row: int


# ------------------------------------------------------------------ rows


def best_fit(lengths: np.ndarray, size: int, most: int) -> np.ndarray:
    """Assign sequences to rows of ``size`` tokens and at most ``most`` sequences; return the row of each, int64[N].

    ``lengths`` int[N] are numbers of tokens from 1 to ``size``. Sequences of equal length are taken in their order.
    """
    order = np.argsort(-lengths, kind="stable")
    values, first = np.unique(-lengths[order], return_index=True)
    borders = pairwise([*first.tolist(), len(order)])
    row_of, rows = np.empty(len(lengths), np.int64), 0
    spaces: list[int] = []  # free space of the open rows, ascending
    open_rows: dict[int, list[tuple[np.ndarray, int]]] = {}  # by free space: rows, and the sequences that each has

    def close(numbers: np.ndarray, held: int, free: int) -> None:
        """Keep ``numbers`` open if another sequence may fit."""
        if len(numbers) and held < most and free:
            if free not in open_rows:
                insort(spaces, free)
            open_rows.setdefault(free, []).append((numbers, held))

    for length, (start, stop) in zip((-values).tolist(), borders, strict=True):
        left = order[start:stop]
        while len(left):
            at = bisect_left(spaces, length)
            if at < len(spaces):
                free = spaces[at]
                numbers, held = open_rows[free].pop()
                if not open_rows[free]:
                    del open_rows[free], spaces[at]
            else:
                free, held = size, 0
                numbers = np.arange(rows, rows - len(left) // -min(size // length, most))
                rows += len(numbers)
            # A row with the least space that is enough is filled before another row is considered.
            each = min(free // length, most - held)
            whole, rest = divmod(min(len(numbers) * each, len(left)), each)
            used, taken = whole + (rest > 0), whole * each + rest
            row_of[left[:taken]] = numbers[np.arange(taken) // each]
            close(numbers[used:], held, free)
            close(numbers[:whole], held + each, free - each * length)
            close(numbers[whole:used], held + rest, free - rest * length)
            left = left[taken:]
    return row_of


def pack(lengths: np.ndarray, shape: PackedShape) -> tuple[np.ndarray, np.ndarray]:
    """Pack sequences of ``lengths`` int[N] tokens, which are in random order.

    Returns the sequences in the order of the rows, int64[N], and the number of sequences of each row, int64[R]. The
    longest sequence of a row comes first, and the rows have the order of their first sequences.
    """
    row_of = best_fit(lengths, shape.seq_length, shape.sequences_per_row)
    by_row = np.lexsort((-lengths, row_of))  # lexsort is stable
    counts = np.bincount(row_of)
    first = by_row[np.cumsum(counts) - counts]
    return np.lexsort((-lengths, first[row_of])), counts[np.argsort(first)]


def sequences_per_row(histogram: np.ndarray, size: int) -> int:
    """Return C: the smallest limit with which a corpus needs at most 1% more rows than without a limit.

    ``histogram`` int[S + 1] contains the number of sequences of each length.
    """
    scale = max(int(histogram.sum()) / _SAMPLE, 1.0)
    lengths = np.repeat(np.arange(len(histogram)), np.ceil(histogram / scale).astype(np.int64))
    if not len(lengths):
        return 1
    fewest = best_fit(lengths, size, size).max() + 1
    limit = 1
    while best_fit(lengths, size, limit).max() + 1 > _LOSS * fewest:
        limit += 1
    return limit


# ------------------------------------------------------------------ records of sequences


def encode_sequences(features: Mapping[str, np.ndarray]) -> list[bytes]:
    """Serialize the sequences of unpacked rows [N, ...] (``instances.make_features``); return N records.

    A record consists of int32 words: the header, whose label has the sentence-pair label (bit 0) and
    the class of the document (the other bits), the token ids, for each token its segment (bit 0) and whether a word
    starts (bit 1), the positions of the predictions, and their labels.
    """
    tokens = features["input_mask"].astype(bool)
    flags = features["segment_ids"].astype(np.int32)
    if "word_starts" in features:
        flags |= features["word_starts"].astype(np.int32) << 1
    predicted = features.get("masked_lm_weights", np.zeros((len(tokens), 0))) > 0
    none = np.zeros(predicted.shape, np.int32)
    header = np.concatenate(
        [
            features["sequence_keys"].astype(np.uint32).view(np.int32),
            features["next_sentence_labels"] | features.get("document_classes", 0) << 1,
            tokens.sum(1, keepdims=True),
            predicted.sum(1, keepdims=True),
        ],
        axis=1,
    )
    columns = [
        (header, np.ones(header.shape, bool)),
        (features["input_ids"], tokens),
        (flags, tokens),
        (features.get("masked_lm_positions", none), predicted),
        (features.get("masked_lm_ids", none), predicted),
    ]
    kept = np.concatenate([used for _, used in columns], axis=1)
    words = np.concatenate([values.astype("<i4") for values, _ in columns], axis=1)[kept]
    ends = np.cumsum(kept.sum(1)).tolist()
    return [words[start:end].tobytes() for start, end in zip([0, *ends], ends, strict=False)]


def row_features(
    records: Sequence[bytes], counts: np.ndarray, shape: PackedShape, pad_id: int, *, has_classes: bool = False
) -> dict[str, np.ndarray]:
    """Return the features of packed rows under their names in the shards, for ``tfexample.encode_examples``.

    ``records`` are sequences in the order of the rows; ``counts`` int[R] is the number of sequences of each row.
    The features are ``input_ids``, ``segment_ids`` and ``sequence_ids`` (0: padding, k: sequence k of the row)
    [R, S], ``sequence_keys``, ``next_sentence_labels`` and, with ``has_classes``, ``document_classes`` [R, C], and
    either the masks [R, M] or ``word_starts`` [R, S].
    """
    words = np.frombuffer(b"".join(records), "<i4")
    sizes = np.array(list(map(len, records))) // 4
    starts = np.cumsum(sizes) - sizes
    keys, labels, tokens, predictions = (words[starts + place] for place in range(_HEADER))
    row = np.repeat(np.arange(len(counts)), counts)
    slot = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset, first_mask = (_before_in_row(sizes, row, slot) for sizes in (tokens, predictions))
    features = {
        name: np.zeros((len(counts), shape.seq_length), np.int32) for name in ("segment_ids", "sequence_ids")
    }
    features["input_ids"] = np.full((len(counts), shape.seq_length), pad_id, np.int32)
    of, within = _expand(tokens)
    places = row[of], offset[of] + within
    at = starts[of] + _HEADER + within
    flags = words[at + tokens[of]]
    features["input_ids"][places] = words[at]
    features["segment_ids"][places] = flags & 1
    features["sequence_ids"][places] = slot[of] + 1
    of_sequences = {"sequence_keys": keys.view(np.uint32), "next_sentence_labels": labels & 1}
    if has_classes:
        of_sequences["document_classes"] = labels >> 1
    for name, values in of_sequences.items():
        features[name] = np.zeros((len(counts), shape.sequences_per_row), values.dtype)
        features[name][row, slot] = values
    if not shape.predictions_per_row:
        features["word_starts"] = np.zeros_like(features["segment_ids"])
        features["word_starts"][places] = flags >> 1
        return features
    of, within = _expand(predictions)
    at = starts[of] + _HEADER + 2 * tokens[of] + within
    columns = (words[at] + offset[of], words[at + predictions[of]], np.ones(len(of), np.float32))
    for name, values in zip(("positions", "ids", "weights"), columns, strict=True):
        masks = np.zeros((len(counts), shape.predictions_per_row), values.dtype)
        masks[row[of], first_mask[of] + within] = values
        features[f"masked_lm_{name}"] = masks
    return features


def _before_in_row(sizes: np.ndarray, row: np.ndarray, slot: np.ndarray) -> np.ndarray:
    """Return the sum of the sizes of the sequences that precede each sequence in its row, int64[N]."""
    before = np.cumsum(sizes, dtype=np.int64) - sizes
    return before - before[np.flatnonzero(slot == 0)][row]


def _expand(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for all elements of N sequences of ``sizes``, the sequence and the index of the element in it."""
    of = np.repeat(np.arange(len(sizes)), sizes)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(sizes) - sizes, sizes)


# ------------------------------------------------------------------ rows that are read


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
