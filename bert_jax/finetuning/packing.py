"""The few shapes that the batches of a fine-tuning run have: short examples share rows, so little is padding."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bert_jax.inference.batching import ROW_LENGTHS, Shape, fill_rows

_SAMPLED_BATCHES = 1000
# A further shape must save the work of as many steps in the whole run: about what its compilation takes.
_COMPILED_STEPS = 25
_MOST_UNITS = 32


def row_length(longest: int) -> int:
    """Smallest length of rows that takes ``longest`` tokens."""
    return next((length for length in ROW_LENGTHS if length >= longest), longest)


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
            rows = fill_rows(sample.tolist(), (length,), units)
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
        rows = fill_rows(lengths, (shape.length,), shape.units, shape.rows)
        if rows is not None:
            return shape, rows
    raise AssertionError(f"no shape takes {len(lengths)} units of at most {max(lengths)} tokens")
