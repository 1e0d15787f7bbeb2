"""Bodies of the GPU kernels of attention, and the sizes of their blocks.

A program holds one head of a block of tokens and visits the blocks of the other tokens that matter, a tile of
scores at a time. Operands, in this order: index of the first head [1], the first visited block and the one after
the last [2], biases of query, key and value [3, D], of each token its sequence id, two words of dropout bits and
position [4, S] (the last three only with dropout), then query, key and value [tokens, D] and those that the kernels
name.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from bert_jax.model.dropout import drop_threshold, probability_words
from bert_jax.model.kernels.operands import Arrays, Index, Ref, Span
from bert_jax.model.kernels.tiles import LOG2_E, MASKED_SCORE, Form, biased, dot, seeing


@dataclass(frozen=True)
class Blocks:
    """Queries and keys of a tile of scores, and the warps and pipeline stages of a program."""

    queries: int
    keys: int
    warps: int = 8
    stages: int = 2


def block_sizes(kernel: str, length: int, form: Form, dtype: DTypeLike) -> Blocks:
    """Return the blocks of ``kernel`` (forward, for_queries, for_keys or for_rows) for rows of ``length`` tokens.
    With these no register is spilled on compute capability 8.0, 9.0 and 10.0."""
    queries, keys, stages = {
        "forward": (128, 64, 2), "for_queries": (128, 32, 2), "for_keys": (32, 128, 2), "for_rows": (length, 16, 1)
    }[kernel]  # fmt: skip
    warps = 8
    if jnp.dtype(dtype).itemsize > 2 or form.head_size > 64:
        queries, keys = max(queries // 2, 32), max(keys // 2, 32)
    if jnp.dtype(dtype).itemsize > 2:
        queries, keys, warps = (queries, keys, 4) if kernel == "forward" else (32, 32, 4)
    fit = math.gcd(length, 1 << 20)
    return Blocks(min(queries, fit), min(keys, fit), warps, stages)


def holds_row(length: int, form: Form, dtype: DTypeLike) -> bool:
    """Return True if one kernel computes the gradients of a row: a tile has all queries of a head. On compute
    capability 8 they do not fit into the registers."""
    fits = form.head_size <= 64 and jnp.dtype(dtype).itemsize == 2 and form.capability >= 9
    return length in (16, 32, 64, 128) and fits


class _Tile:
    """Tiles of scores of one program: visibility of keys and dropout bits.

    ``axis`` is the dimension of the queries in a tile.
    """

    def __init__(self, first: Ref, tokens: Ref, form: Form, axis: int, sizes: tuple[int, int]) -> None:
        self.tokens, self.form, self.axis, self.sizes = tokens, form, axis, sizes
        self.head = first[0] + pl.program_id(1)

    def spread(self, row: jax.Array, axis: int) -> jax.Array:
        """Return ``row`` as a dimension ``axis`` of a tile."""
        return row[:, None] if axis == 0 else row[None, :]

    def visible(self, queries: Index, keys: Index) -> jax.Array:
        """Return which keys the queries see; both are the first tokens of their blocks."""
        of_queries = self.tokens[0, pl.ds(queries, self.sizes[self.axis])]
        of_keys = self.tokens[0, pl.ds(keys, self.sizes[1 - self.axis])]
        ids = self.spread(jnp.maximum(of_queries, 1), self.axis), self.spread(of_keys, 1 - self.axis)
        visible = ids[0] == ids[1]
        if self.form.window or self.form.causal:
            ahead = jax.lax.broadcasted_iota(jnp.int32, self.sizes, 1 - self.axis)
            ahead += keys - queries - jax.lax.broadcasted_iota(jnp.int32, self.sizes, self.axis)
            if self.form.window:
                visible &= jnp.abs(ahead) <= self.form.window
            if self.form.causal:
                visible &= ahead <= 0
        return visible

    def _words(self, queries: Index, keys: Index) -> jax.Array:
        of_queries = pl.ds(queries, self.sizes[self.axis])
        first, second = (self.spread(self.tokens[i, of_queries], self.axis) for i in (1, 2))
        positions = self.tokens[3, pl.ds(keys, self.sizes[1 - self.axis])]
        return probability_words(first, second, self.spread(positions, 1 - self.axis), self.head // 2)

    def kept(self, queries: Index, keys: Index) -> jax.Array:
        """Return which probabilities of the tile dropout keeps."""
        words = self._words(queries, keys)
        shift = jnp.full(words.shape, 16 * (self.head % 2), jnp.int32)
        bits = jax.lax.shift_right_logical(words, shift) & 0xFFFF
        return bits >= drop_threshold(self.form.dropout_rate)


def _biased(ref: Ref, tokens: Span, biases: Ref, index: int) -> jax.Array:
    """Return the tokens of query, key or value (``index`` 0 to 2) with the bias."""
    return biased(ref[tokens, :], biases[index, :][None, :])


def _query(ref: Ref, tokens: Span, biases: Ref, form: Form) -> jax.Array:
    query = _biased(ref, tokens, biases, 0)
    return query * jnp.asarray(form.head_size**-0.5, query.dtype)


def forward_kernel(
    first: Ref, bounds: Ref, biases: Ref, tokens: Ref, query: Ref, key: Ref, value: Ref,
    out: Ref, log_sums: Ref, *, form: Form, blocks: Blocks,
) -> None:  # fmt: skip
    tile = _Tile(first, tokens, form, 0, (blocks.queries, blocks.keys))
    begin = pl.program_id(0) * blocks.queries
    queries = _query(query, slice(None), biases, form)

    def step(j: jax.Array, carry: Arrays) -> Arrays:
        most, total, context = carry
        at = j * blocks.keys
        keys, values = (_biased(ref, pl.ds(at, blocks.keys), biases, i) for i, ref in ((1, key), (2, value)))
        scores = jnp.where(tile.visible(begin, at), dot(queries, keys, 1, 1) * LOG2_E, MASKED_SCORE)
        highest = jnp.maximum(most, jnp.max(scores, axis=1))
        shrink = jnp.exp2(most - highest)
        probabilities = jnp.exp2(scores - highest[:, None])
        total = total * shrink + jnp.sum(probabilities, axis=1)
        if form.dropout_rate:
            probabilities = jnp.where(tile.kept(begin, at), probabilities, 0.0)
        context = context * shrink[:, None] + dot(probabilities.astype(values.dtype), values)
        return highest, total, context

    rows = (blocks.queries,)
    start = (jnp.full(rows, MASKED_SCORE), jnp.zeros(rows), jnp.zeros((*rows, form.head_size)))
    most, total, context = jax.lax.fori_loop(bounds[0], bounds[1], step, start)
    inverse, log_sum = seeing(most, total, jnp.log2)
    out[:, :] = (context * (form.scale_of_kept * inverse)[:, None]).astype(out.dtype)
    log_sums[pl.ds(begin, blocks.queries)] = log_sum


def for_rows_kernel(
    first: Ref, bounds: Ref, biases: Ref, tokens: Ref, query: Ref, key: Ref, value: Ref, out: Ref, gradient: Ref,
    log_sums: Ref, *outputs: Ref, form: Form, blocks: Blocks,
) -> None:  # fmt: skip
    *for_heads, sums_q, sums_k, sums_v = outputs

    def write(index: int, part: Span, values: jax.Array) -> None:
        if len(for_heads) == 1:
            for_heads[0][part, index, :] = values.astype(query.dtype)
        else:
            for_heads[index][part, :] = values.astype(query.dtype)

    everything = slice(None)
    tile = _Tile(first, tokens, form, 0, (query.shape[0], blocks.keys))
    queries, incoming, log_sum = _query(query, everything, biases, form), gradient[:, :], log_sums[:]
    delta = jnp.sum(out[:, :].astype(jnp.float32) * incoming.astype(jnp.float32), axis=1)

    def step(j: jax.Array, carry: Arrays) -> Arrays:
        for_queries, total_keys, total_values = carry
        at = j * blocks.keys
        part = pl.ds(at, blocks.keys)
        keys, values = (_biased(ref, part, biases, i) for i, ref in ((1, key), (2, value)))
        for_scores, dropped = _for_scores(tile, (0, at), (queries, incoming, log_sum, delta), keys, values)
        for_keys, for_values = dot(for_scores, queries, 0, 0), dot(dropped, incoming, 0, 0)
        write(1, part, for_keys)
        write(2, part, for_values)
        for_queries += dot(for_scores, keys)
        return for_queries, total_keys + jnp.sum(for_keys, axis=0), total_values + jnp.sum(for_values, axis=0)

    # Every block of keys needs a gradient. The compiler does not know this end, so it does not unroll the loop.
    end = jnp.maximum(bounds[1], query.shape[0] // blocks.keys)
    zeros = jnp.zeros(form.head_size)
    for_queries, sums_k[:], sums_v[:] = jax.lax.fori_loop(0, end, step, (jnp.zeros(query.shape), zeros, zeros))
    for_queries *= form.head_size**-0.5
    write(0, everything, for_queries)
    sums_q[:] = jnp.sum(for_queries, axis=0)


def _for_scores(
    tile: _Tile, place: tuple[Index, Index], of_queries: Arrays, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of a tile of scores and its probabilities after dropout, in the dtype of the keys.

    ``place`` is the first query and the first key. ``of_queries``: the queries, the gradient of their context, the
    logarithms of their sums of exponentials, and the sums over their context times its gradient."""
    queries, incoming, log_sum, delta = of_queries

    def product(of_queries: jax.Array, of_keys: jax.Array) -> jax.Array:
        return dot(of_queries, of_keys, 1, 1) if tile.axis == 0 else dot(of_keys, of_queries, 1, 1)

    scores = jnp.where(tile.visible(*place), product(queries, keys) * LOG2_E, MASKED_SCORE)
    probabilities = jnp.exp2(scores - tile.spread(log_sum, tile.axis))
    for_probabilities, dropped = product(incoming, values), probabilities
    if tile.form.dropout_rate:
        kept, scale = tile.kept(*place), tile.form.scale_of_kept
        for_probabilities = jnp.where(kept, for_probabilities * scale, 0.0)
        dropped = jnp.where(kept, probabilities * scale, 0.0)
    for_scores = probabilities * (for_probabilities - tile.spread(delta, tile.axis))
    return for_scores.astype(keys.dtype), dropped.astype(keys.dtype)


def for_queries_kernel(
    first: Ref, bounds: Ref, biases: Ref, tokens: Ref, query: Ref, key: Ref, value: Ref,
    out: Ref, gradient: Ref, log_sums: Ref, for_query: Ref, deltas: Ref, sums: Ref, *, form: Form, blocks: Blocks,
) -> None:  # fmt: skip
    tile = _Tile(first, tokens, form, 0, (blocks.queries, blocks.keys))
    begin = pl.program_id(0) * blocks.queries
    mine = pl.ds(begin, blocks.queries)
    queries, incoming, log_sum = _query(query, slice(None), biases, form), gradient[:, :], log_sums[mine]
    delta = jnp.sum(out[:, :].astype(jnp.float32) * incoming.astype(jnp.float32), axis=1)
    deltas[mine] = delta

    def step(j: jax.Array, total: jax.Array) -> jax.Array:
        at = j * blocks.keys
        keys, values = (_biased(ref, pl.ds(at, blocks.keys), biases, i) for i, ref in ((1, key), (2, value)))
        for_scores, _ = _for_scores(tile, (begin, at), (queries, incoming, log_sum, delta), keys, values)
        return total + dot(for_scores, keys)

    start = jnp.zeros((blocks.queries, form.head_size))
    total = jax.lax.fori_loop(bounds[0], bounds[1], step, start) * form.head_size**-0.5
    for_query[:, :] = total.astype(for_query.dtype)
    sums[:] = jnp.sum(total, axis=0)


def for_keys_kernel(*refs: Ref, form: Form, blocks: Blocks) -> None:
    *operands, for_key, for_value, sums_k, sums_v = refs
    for ref, sums, total in zip(
        (for_key, for_value), (sums_k, sums_v), _for_keys(operands, form, blocks), strict=True
    ):
        ref[:, :] = total.astype(ref.dtype)
        sums[:] = jnp.sum(total, axis=0)


def for_keys_in_one_kernel(*refs: Ref, form: Form, blocks: Blocks) -> None:
    *operands, _, for_heads, sums_k, sums_v = refs
    for index, sums, total in zip((1, 2), (sums_k, sums_v), _for_keys(operands, form, blocks), strict=True):
        for_heads[:, index, :] = total.astype(for_heads.dtype)
        sums[:] = jnp.sum(total, axis=0)


def _for_keys(operands: Sequence[Ref], form: Form, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of the keys and values of a program."""
    first, bounds, biases, tokens, query, key, value, gradient, log_sums, deltas = operands
    # Tiles of scores are transposed, [keys, queries], so that no probabilities have to be.
    tile = _Tile(first, tokens, form, 1, (blocks.keys, blocks.queries))
    begin = pl.program_id(0) * blocks.keys
    keys, values = (_biased(ref, slice(None), biases, i) for i, ref in ((1, key), (2, value)))

    def step(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        for_keys, for_values = carry
        at = j * blocks.queries
        part = pl.ds(at, blocks.queries)
        queries, incoming = _query(query, part, biases, form), gradient[part, :]
        of_queries = (queries, incoming, log_sums[part], deltas[part])
        for_scores, dropped = _for_scores(tile, (at, begin), of_queries, keys, values)
        for_values += dot(dropped, incoming)
        for_keys += dot(for_scores, queries)
        return for_keys, for_values

    zeros = jnp.zeros((blocks.keys, form.head_size))
    totals: tuple[jax.Array, jax.Array] = jax.lax.fori_loop(bounds[0], bounds[1], step, (zeros, zeros))
    return totals
