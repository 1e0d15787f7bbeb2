"""Units in batches of a few fixed shapes: short ones share rows, so little of what is computed is padding.

A batch keeps its examples, whatever shape it takes: packing changes nothing that is learned. Shapes: R rows of S
tokens, U units per row, K sequences per unit.
"""

import dataclasses
import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.tasks.task import ModelInput, Target

ROW_LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_SAMPLED_BATCHES = 1000
# A further shape must save the work of as many steps in the whole run: about what its compilation takes.
_COMPILED_STEPS = 25
_MOST_UNITS = 32


@dataclass(frozen=True, order=True)
class Shape:
    """Rows, tokens per row and units per row of a batch."""

    rows: int
    length: int
    units: int


def row_length(longest: int) -> int:
    """Smallest length of rows that takes ``longest`` tokens."""
    return next((length for length in ROW_LENGTHS if length >= longest), longest)


def fill_rows(lengths: Sequence[int], length: int, units: int, rows: int | None = None) -> list[list[int]] | None:
    """Numbers of the units of each row, the longest placed first and where least space is left; ``None`` when they
    do not fit ``rows`` rows."""
    filled: list[list[int]] = []
    # Rows that take more, a heap of numbers for each space that is left; of ``spaces`` the bits of those there are.
    # So a unit's row is found at once: a test set has hundreds of thousands of units.
    waiting: dict[int, list[int]] = defaultdict(list)
    spaces = 0
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        need = lengths[number]
        enough = spaces >> need
        if enough:
            space = need + (enough & -enough).bit_length() - 1
            row = heapq.heappop(waiting[space])
            spaces ^= 0 if waiting[space] else 1 << space
        elif need > length or len(filled) == rows:
            return None
        else:
            row, space = len(filled), length
            filled.append([])
        filled[row].append(number)
        if len(filled[row]) < units:
            heapq.heappush(waiting[space - need], row)
            spaces |= 1 << (space - need)
    return filled


def _cost(shape: Shape, width: int) -> float:
    """Work of a step, in tokens: attention grows with the length of rows."""
    return shape.rows * shape.length * (1 + shape.length / (6 * width))


def plan_shapes(
    lengths: np.ndarray,
    batch_size: int,
    *,
    steps: int,
    width: int,
    parts: int,
    most: int,
    packing: bool,
    limit: int,
) -> list[Shape]:
    """Shapes for batches of ``batch_size`` units of such ``lengths`` (int[n]), the cheapest first. The last one
    takes every batch there can be; it is for those that no sampled batch is like.

    Args:
        steps: of the whole run; a shape that saves less than it costs to compile is not made.
        width: of the encoder.
        parts: what rows must divide into: parts of the mesh times microbatches.
        most: shapes at most.
        packing: without it there is one shape, a row of ``limit`` tokens for each unit.
        limit: longest unit that there may be.
    """
    whole = Shape(_round_up(batch_size, parts), row_length(limit) if packing else limit, 1)
    if not packing or most == 1:
        return [whole]
    samples, longest = _sample(lengths, batch_size), int(lengths.max(initial=1))
    needed = [_needs(sample, float(np.median(lengths)), row_length(longest), parts) for sample in samples]
    candidates = sorted({shape for shapes in needed for shape in shapes})
    costs = {shape: _costs(shape, needed, width) for shape in candidates}
    # First the one that is best alone: it takes every sampled batch, and the longest unit.
    alone = [shape for shape in candidates if shape.length >= longest and np.isfinite(costs[shape]).all()]
    if not alone:
        return [whole]
    chosen = [min(alone, key=lambda shape: (_cost(shape, width), shape))]
    spent = costs[chosen[0]]
    # Then whatever saves more than its compilation takes.
    worth = _COMPILED_STEPS / max(steps, 1) * float(spent.sum())
    while len(chosen) < most - 1:
        saved = {shape: float((spent - np.minimum(spent, costs[shape])).sum()) for shape in candidates}
        best = max(saved, key=saved.__getitem__)
        if saved[best] <= worth:
            break
        spent = np.minimum(spent, costs[best])
        chosen.append(best)
    # Few batches need the first one once there are others: a row more, and next to none needs the last resort.
    if len(chosen) > 1:
        chosen[0] = dataclasses.replace(chosen[0], rows=chosen[0].rows + parts)
    return [*sorted(chosen, key=lambda shape: (_cost(shape, width), shape)), whole]


def _needs(sample: np.ndarray, usual: float, longest: int, parts: int) -> list[Shape]:
    """The least shape of each length that takes a batch of units of ``sample`` lengths."""
    shapes = []
    for length in ROW_LENGTHS:
        if sample.max() <= length <= longest:
            units = min(_MOST_UNITS, len(sample), 2 + math.ceil(length / usual))
            rows = fill_rows(sample.tolist(), length, units)
            assert rows is not None
            shapes.append(Shape(_round_up(len(rows), parts), length, units))
    return shapes


def _costs(shape: Shape, needed: Sequence[Sequence[Shape]], width: int) -> np.ndarray:
    """float64[samples]: the cost of a step of ``shape`` where it takes the batch, else infinite."""
    fits = [any(other.length == shape.length and other.rows <= shape.rows for other in shapes) for shapes in needed]
    return np.where(fits, _cost(shape, width), np.inf)


def _sample(lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [lengths[rng.integers(0, len(lengths), batch_size)] for _ in range(_SAMPLED_BATCHES)]


def _round_up(count: int, parts: int) -> int:
    return -(-count // parts) * parts


def choose_shape(lengths: Sequence[int], shapes: Sequence[Shape]) -> tuple[Shape, list[list[int]]]:
    """The first of ``shapes`` (the cheapest first) that takes units of such ``lengths``, and its rows."""
    for shape in shapes:
        if shape.rows * shape.length < sum(lengths):
            continue
        rows = fill_rows(lengths, shape.length, shape.units, shape.rows)
        if rows is not None:
            return shape, rows
    raise AssertionError(f"no shape takes {len(lengths)} units of at most {max(lengths)} tokens")


@dataclass(frozen=True)
class Packed:
    """A batch on the host: features, and where each unit went."""

    features: dict[str, np.ndarray]
    # (number of the unit, its row, its slot, its first token)
    places: list[tuple[int, int, int, int]]


def pack_batch(
    units: Sequence[ModelInput],
    rows: Sequence[Sequence[int]],
    shape: Shape,
    *,
    sequences: int,
    targets: Mapping[str, Target],
    pad_id: int,
) -> Packed:
    """The batch of ``units`` whose numbers ``rows`` name; see ``bert_jax.tasks.task`` for what it holds."""
    size = (shape.rows, shape.length)
    features = {name: np.zeros(size, np.int32) for name in ("token_type_ids", "sequence_ids", "position_ids")} | {
        "input_ids": np.full(size, pad_id, np.int32)
    }
    features["cls_positions"] = np.zeros((shape.rows, shape.units * sequences), np.int32)
    features["weights"] = np.zeros((shape.rows, shape.units), np.float32)
    for name, target in targets.items():
        dims = size if target.level == "token" else (shape.rows, shape.units)
        features[name] = np.zeros((*dims, *target.shape), target.dtype)
    counting = np.arange(shape.length, dtype=np.int32)
    places = []
    for i, numbers in enumerate(rows):
        start = 0
        for slot, number in enumerate(numbers):
            unit, first = units[number], start
            for k, sequence in enumerate(unit.sequences):
                end = start + len(sequence.ids)
                features["input_ids"][i, start:end] = sequence.ids
                features["token_type_ids"][i, start:end] = sequence.types
                features["sequence_ids"][i, start:end] = slot * sequences + k + 1
                features["position_ids"][i, start:end] = counting[: end - start]
                features["cls_positions"][i, slot * sequences + k] = start
                start = end
            features["weights"][i, slot] = unit.weight
            for name, value in unit.targets.items():
                level = targets[name].level
                if level == "token":
                    features[name][i, first:start] = value
                else:
                    features[name][i, slot] = value + first if level == "position" else value
            places.append((number, i, slot, first))
    return Packed(features, places)
