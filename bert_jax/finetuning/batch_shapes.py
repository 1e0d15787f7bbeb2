"""Shapes of the batches of a fine-tuning run. To reduce padding, short examples share rows, and a run uses a few
batch shapes."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bert_jax.inference.batching import ROW_LENGTHS, Shape, fill_rows

_SAMPLED_BATCHES = 1000
# An additional shape must save the work of this number of steps in the whole run, about its compilation time.
_COMPILED_STEPS = 25
_MOST_UNITS = 32


def row_length(longest: int) -> int:
    """Return the smallest of ``ROW_LENGTHS`` that fits ``longest`` tokens, or ``longest`` if none does."""
    return next((length for length in ROW_LENGTHS if length >= longest), longest)


def _cost(shape: Shape, width: int) -> float:
    """Return the cost of a step, in units of the cost of a token in a short row; the cost of attention grows with
    the row length."""
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
    """Return shapes for batches of ``batch_size`` model inputs, the cheapest first. ``lengths`` int[n] are
    the lengths of the inputs.

    Sampled batches determine the shapes; the last shape fits every possible batch.

    Args:
        steps: number of steps of the run; a shape that saves less than its compilation costs is omitted.
        width: hidden size of the encoder.
        parts: required divisor of the number of rows: number of shards of a batch on the mesh times number of
            microbatches.
        most: maximum number of shapes.
        packing: if False, return one shape, with a row of ``limit`` tokens for each model input.
        limit: length of the longest possible model input.
    """
    whole = Shape(math.ceil(batch_size / parts) * parts, row_length(limit) if packing else limit, 1)
    if not packing or most == 1:
        return [whole]
    rng, longest = np.random.default_rng(0), int(lengths.max(initial=1))
    samples = [lengths[rng.integers(0, len(lengths), batch_size)] for _ in range(_SAMPLED_BATCHES)]
    needed = [_needs(sample, float(np.median(lengths)), row_length(longest), parts) for sample in samples]
    candidates = sorted({shape for shapes in needed for shape in shapes})
    costs = {shape: _costs(shape, needed, width) for shape in candidates}
    # First the cheapest shape that fits every sampled batch and the longest unit.
    alone = [shape for shape in candidates if shape.length >= longest and np.isfinite(costs[shape]).all()]
    if not alone:
        return [whole]
    chosen = [min(alone, key=lambda shape: (_cost(shape, width), shape))]
    spent = costs[chosen[0]]
    # Then shapes that save more than their compilation costs.
    worth = _COMPILED_STEPS / max(steps, 1) * float(spent.sum())
    while len(chosen) < most - 1:
        saved = {shape: float((spent - np.minimum(spent, costs[shape])).sum()) for shape in candidates}
        best = max(saved, key=saved.__getitem__)
        if saved[best] <= worth:
            break
        spent = np.minimum(spent, costs[best])
        chosen.append(best)
    # If there are several shapes, few batches need the first one; with more rows, it fits almost all of them.
    if len(chosen) > 1:
        chosen[0] = dataclasses.replace(chosen[0], rows=chosen[0].rows + parts)
    return [*sorted(chosen, key=lambda shape: (_cost(shape, width), shape)), whole]


def _needs(sample: np.ndarray, usual: float, longest: int, parts: int) -> list[Shape]:
    """Return, for each row length, the smallest shape that fits a batch of model inputs with the lengths
    ``sample``."""
    shapes = []
    for length in ROW_LENGTHS:
        if sample.max() <= length <= longest:
            units = min(_MOST_UNITS, len(sample), 2 + math.ceil(length / usual))
            rows = fill_rows(sample.tolist(), (length,), units)
            assert rows is not None
            shapes.append(Shape(math.ceil(len(rows) / parts) * parts, length, units))
    return shapes


def _costs(shape: Shape, needed: Sequence[Sequence[Shape]], width: int) -> np.ndarray:
    """Return float64[samples], the cost of a step of ``shape`` for each sampled batch; infinity if the batch does
    not fit into the shape."""
    fits = [any(other.length == shape.length and other.rows <= shape.rows for other in shapes) for shapes in needed]
    return np.where(fits, _cost(shape, width), np.inf)


def choose_shape(lengths: Sequence[int], shapes: Sequence[Shape]) -> tuple[Shape, list[list[int]]]:
    """Return the first of ``shapes`` (cheapest first) that fits model inputs with these ``lengths``, and the
    indices of the inputs in each of its rows."""
    for shape in shapes:
        if shape.rows * shape.length < sum(lengths):
            continue
        rows = fill_rows(lengths, (shape.length,), shape.units, shape.rows)
        if rows is not None:
            return shape, rows
    raise AssertionError(f"no shape fits {len(lengths)} units of at most {max(lengths)} tokens")
