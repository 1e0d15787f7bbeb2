"""Texts through a model: sequences packed into rows of a few fixed shapes, results back in the order of the input.

Shapes: B rows, S tokens per row, C sequences per row.
"""

import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np

# With the small batch of the first length at most eight compiled shapes per program.
ROW_LENGTHS = (64, 96, 128, 192, 256, 384, 512)
LONG_ROW_LENGTHS = (64, 128, 256, 512, 1024, 2048)
SEQUENCES_PER_ROW = 8
# Tokens of one batch: on a CPU as many as its caches like, elsewhere enough to fill the device.
BATCH_TOKENS = {"cpu": 1024}
ACCELERATOR_BATCH_TOKENS = 16384
# Texts that are read before the first result is given; they are sorted by length among themselves.
WINDOW = 4096
_IN_FLIGHT = 4
_SMALL = 8  # a few short texts run in a batch of this fraction

Input = TypeVar("Input")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Encoded:
    """One sequence of tokens, special tokens included."""

    ids: Sequence[int]
    types: Sequence[int]
    # What the reader of the result needs beside it.
    extra: Any = None


@dataclass
class Row:
    """Sequences that share a row: (number of the sequence, its first token)."""

    length: int
    items: list[tuple[int, int]] = field(default_factory=list)
    used: int = 0


@dataclass(frozen=True)
class Place:
    """Where in a batch a sequence stands."""

    row: int
    slot: int  # it is the slot-th sequence of its row, from 0
    start: int
    length: int

    @property
    def tokens(self) -> slice:
        """Its positions in the row."""
        return slice(self.start, self.start + self.length)


Program = Callable[[dict[str, np.ndarray]], Any]
Take = Callable[[Any, Place, Encoded], Result]
Progress = Callable[[int], None]


def row_lengths(limit: int) -> tuple[int, ...]:
    """Lengths of rows for a model that takes ``limit`` tokens: at most seven, ``limit`` the last."""
    ladder = ROW_LENGTHS if limit <= ROW_LENGTHS[-1] else LONG_ROW_LENGTHS
    return (*(length for length in ladder if length < limit), limit)


def pack(lengths: Sequence[int], ladder: Sequence[int]) -> list[Row]:
    """Rows that hold every sequence once, the longest first; each goes where the least space is left over."""
    rows: list[Row] = []
    free: dict[int, list[Row]] = {}
    spaces: list[int] = []  # the keys of ``free``, sorted
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[number]
        at = bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            row = free[space].pop()
            if not free[space]:
                del free[space], spaces[at]
        else:
            row = Row(next(rung for rung in ladder if rung >= length))
            rows.append(row)
        row.items.append((number, row.used))
        row.used += length
        space = row.length - row.used
        if space and len(row.items) < SEQUENCES_PER_ROW:
            if space not in free:
                free[space] = []
                insort(spaces, space)
            free[space].append(row)
    return rows


def batches(rows: Sequence[Row], ladder: Sequence[int], tokens: int) -> Iterator[tuple[list[Row], int]]:
    """Rows of one length in groups, with the number of rows that the batch has; the last one is filled up."""
    for length, group in itertools.groupby(sorted(rows, key=lambda row: -row.length), lambda row: row.length):
        size = max(1, tokens // length)
        small = max(1, size // _SMALL)
        waiting = list(group)
        for start in range(0, len(waiting), size):
            part = waiting[start : start + size]
            yield part, small if length == ladder[0] and len(part) <= small else size


def features(rows: Sequence[Row], size: int, sequences: Sequence[Encoded], pad_id: int) -> dict[str, np.ndarray]:
    """The batch of ``rows`` (``bert_jax.batch``): int32[size, S], ``cls_positions`` int32[size, C]."""
    length = rows[0].length
    names = ("input_ids", "token_type_ids", "sequence_ids", "position_ids")
    batch = {name: np.zeros((size, length), np.int32) for name in names}
    batch["input_ids"][:] = pad_id
    batch["cls_positions"] = np.zeros((size, SEQUENCES_PER_ROW), np.int32)
    counting = np.arange(length, dtype=np.int32)
    for i, row in enumerate(rows):
        for slot, (number, start) in enumerate(row.items):
            sequence = sequences[number]
            end = start + len(sequence.ids)
            batch["input_ids"][i, start:end] = sequence.ids
            batch["token_type_ids"][i, start:end] = sequence.types
            batch["sequence_ids"][i, start:end] = slot + 1
            batch["position_ids"][i, start:end] = counting[: end - start]
            batch["cls_positions"][i, slot] = start
    return batch


def run_packed(
    program: Program, take: Take, sequences: Sequence[Encoded], ladder: Sequence[int], pad_id: int, tokens: int
) -> Iterator[list[tuple[int, Any]]]:
    """(number, result) of the sequences of one batch after another, in no order; ``program`` runs ahead."""
    waiting: deque[tuple[list[Row], Any]] = deque()

    def collect() -> list[tuple[int, Any]]:
        rows, output = waiting.popleft()
        arrays = jax.tree.map(np.asarray, output)
        return [
            (number, take(arrays, Place(i, slot, start, len(sequences[number].ids)), sequences[number]))
            for i, row in enumerate(rows)
            for slot, (number, start) in enumerate(row.items)
        ]

    rows = pack([len(sequence.ids) for sequence in sequences], ladder)
    for part, size in batches(rows, ladder, tokens):
        waiting.append((part, program(features(part, size, sequences, pad_id))))
        if len(waiting) > _IN_FLIGHT:
            yield collect()
    while waiting:
        yield collect()


def stream(
    inputs: Iterable[Input],
    encode: Callable[[list[Input]], list[list[Encoded]]],
    program: Program,
    take: Take,
    *,
    limit: int,
    pad_id: int,
    window: int = WINDOW,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> Iterator[list[Any]]:
    """For every input, in order, the results of its sequences. ``inputs`` may be endless: ``window`` of them are
    read at a time.

    Args:
        encode: sequences of every input of a window, each of at most ``limit`` tokens.
        program: arrays of a batch, on the device.
        take: the result of one sequence from the arrays of its batch (numpy).
        progress: called with the number of sequences done since the last call.
    """
    ladder = row_lengths(limit)
    tokens = batch_tokens or BATCH_TOKENS.get(jax.default_backend(), ACCELERATOR_BATCH_TOKENS)
    reading = iter(inputs)
    while part := list(itertools.islice(reading, window)):
        encoded = encode(part)
        sequences = [sequence for several in encoded for sequence in several]
        results: list[Any] = [None] * len(sequences)
        for done in run_packed(program, take, sequences, ladder, pad_id, tokens):
            for number, result in done:
                results[number] = result
            if progress is not None:
                progress(len(done))
        ends = np.cumsum([len(several) for several in encoded]).tolist()
        for several, end in zip(encoded, ends, strict=True):
            yield results[end - len(several) : end]
