"""Bodies of the TPU kernels of attention, and their tiles.

Operands, in this order: index of the first head [1], bounds of the tiles of keys of each tile of queries [2 *
tiles], biases of query, key and value [3, 128], of each query its sequence id and two words of dropout bits [rows,
3, S], of each key its sequence id and position [rows, S, 2] (words and positions only with dropout), with rotary
positions the cosines and the sines of each lane [rows, S, 128], query, key and value [rows, S, 128] and those that
the kernels name. The last one, with rotary positions in rows of several tiles, is memory for the rotated keys of a
row [S, 128].
"""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.dropout import drop_threshold, probability_words
from bert_jax.model.kernels.common import LANES, iota
from bert_jax.model.kernels.operands import Arrays, Index, Ref, Span
from bert_jax.model.kernels.tiles import MASKED_SCORE, Form, biased, dot, seeing

# Most keys of the only tile of a row; queries and keys of a tile, where they divide the row.
_ROW_KEYS = 512
_TILE = 256
# Queries of a tile in a window: fewer see fewer keys that most of them mask.
_WINDOW_QUERIES = 128
# Keys of a window begin at a multiple of the rows of a bfloat16 register.
_SUBLANES = 16
# Vector operations per rotated value; the backward pass also rotates the gradients back.
_OF_ROTATED, _OF_ROTATED_BACKWARD = 17, 40

C = TypeVar("C")
# Greatest score, sum of exponentials and context of the queries of a head so far.
_Softmax = tuple[jax.Array, jax.Array, jax.Array]


class Tiles:
    """Tiles of scores of a row of ``length`` tokens: ``queries`` and ``keys`` of a tile. A query sees the keys of
    one tile, which has a part of the row (``is_window``) or all keys (``is_row``), or of tiles that follow each
    other (``is_loop``)."""

    def __init__(self, length: int, form: Form) -> None:
        self.length, self.reach = length, -(-form.window // _SUBLANES) * _SUBLANES
        self.is_window = form.window > 0 and _WINDOW_QUERIES + 2 * self.reach < length
        self.is_loop = not self.is_window and length > _ROW_KEYS
        self.is_row = not (self.is_window or self.is_loop)
        self.queries = _WINDOW_QUERIES if self.is_window else math.gcd(length, _TILE)
        self.keys = length
        if self.is_window:
            self.keys = self.queries + 2 * self.reach
        elif self.is_loop:
            self.keys = self.queries

    def first_key(self, query: Index) -> Index:
        """Return the first key of the tile of the queries from ``query`` on, if it is the only one."""
        if not self.is_window:
            return 0
        return pl.multiple_of(jnp.clip(query - self.reach, 0, self.length - self.keys), _SUBLANES)

    def for_queries(self, body: Callable[[Index], None]) -> None:
        """Call ``body`` with the first query of each tile."""
        tiles = self.length // self.queries
        if tiles == 1:
            body(0)
        else:

            def step(i: jax.Array, _: None) -> None:
                body(pl.multiple_of(i * self.queries, self.queries))

            jax.lax.fori_loop(0, tiles, step, None)


class Work:
    """Operations on 128 lanes of a row, in the forward or the backward pass.

    The numbers of vector operations per score, dropout word, pair of tokens and value were counted in the programs
    that libtpu 0.0.42 compiles for v5e. A score costs them for its head; a word is for two heads, and a pair of
    tokens for all.
    """

    def __init__(self, tiles: Tiles, form: Form, *, is_backward: bool) -> None:
        heads, length = LANES // form.head_size, tiles.length
        # Tiles of scores of a row, and tokens of the tiles of keys; with windows and in loops keys are read again.
        self.steps = length // tiles.queries * (length // tiles.keys if tiles.is_loop else 1)
        tokens = length if tiles.is_row else self.steps * tiles.keys
        pairs = self.steps * tiles.queries * tiles.keys
        # Products over the 128 lanes, in which the other heads are zero, and one with the lanes of the head.
        self.matrix = 2.0 * pairs * heads * (form.head_size + (4 if is_backward else 1) * LANES)
        of_score, of_kept, of_value, arrays = (12, 9, 3, 4) if is_backward else (9, 3, 4, 2)
        of_pair = 4 * (form.window > 0 or form.causal)
        if form.dropout_rate:
            of_score += of_kept
            of_pair += 9 * -(-heads // 2)
        self.vector = float(pairs * (heads * of_score + of_pair) + LANES * of_value * arrays * (length + tokens))
        if form.rotary:
            self.vector += LANES * 2 * length * (_OF_ROTATED_BACKWARD if is_backward else _OF_ROTATED)
        # The forward pass waits for the greatest score. In tiles of few queries nothing fills such waits.
        self.overlap = 0.65 if is_backward and tiles.queries > _WINDOW_QUERIES else 0.0


class _Row:
    """Operands of row ``r`` of a block, and the tiles of its scores, [keys, queries]. ``place``: the index of the
    first head of the block, and of the first tile of its first row. ``memory``: that of the rotated keys; None if
    there is none."""

    def __init__(
        self, r: Index, place: tuple[Index, Index], bounds: Ref, biases: Ref, query_tokens: Ref, key_tokens: Ref,
        turns: tuple[Ref, ...], memory: Ref | None, form: Form,
    ) -> None:  # fmt: skip
        self.r, self.form, self.query_tokens, self.key_tokens = r, form, query_tokens, key_tokens
        self.biases, self.turns, self.memory = biases, turns, memory
        self.tiles, self.bounds = Tiles(query_tokens.shape[2], form), bounds
        self.heads, self.first_head = LANES // form.head_size, place[0]
        self.first_tile = place[1] + r * (self.tiles.length // self.tiles.queries)

    def part(self, query: Index) -> Span:
        return pl.ds(query, self.tiles.queries)

    def queries_of(self, query: Ref, part: Span) -> jax.Array:
        """Return the scaled queries of ``part`` with their biases and rotary positions."""
        queries = biased(query[self.r, part], self.biases[0:1])
        if self.form.rotary:
            queries = self.rotated(queries, part).astype(queries.dtype)
        return queries * jnp.asarray(self.form.head_size**-0.5, queries.dtype)

    def keys_of(self, key: Ref, part: Span) -> jax.Array:
        """Return the keys of ``part`` with their biases and rotary positions."""
        if self.memory is not None:
            return self.memory[part]
        keys = biased(key[self.r, part], self.biases[1:2])
        return self.rotated(keys, part).astype(keys.dtype) if self.form.rotary else keys

    def values_of(self, value: Ref, part: Span) -> jax.Array:
        """Return the values of ``part`` with their biases."""
        return biased(value[self.r, part], self.biases[2:3])

    def rotate_keys(self, key: Ref) -> None:
        """Write the keys of a row of several tiles with their rotary positions to the memory for them."""
        memory = self.memory
        if memory is None:
            return

        def rotate(begin: Index) -> None:
            part = self.part(begin)
            keys = biased(key[self.r, part], self.biases[1:2])
            memory[part] = self.rotated(keys, part).astype(keys.dtype)

        self.tiles.for_queries(rotate)

    def rotated(self, values: jax.Array, part: Span, direction: int = 1) -> jax.Array:
        """Return ``values`` [tokens, 128], rotated as in ``bert_jax.model.positions.rotate``, in float32;
        ``direction`` -1: rotated back."""
        cosines, sines = (turns[self.r, part] for turns in self.turns)
        values, half = values.astype(jnp.float32), self.form.head_size // 2
        # The other value of each pair is ``half`` lanes away.
        others = pltpu.roll(values, half, 1)
        if self.form.head_size < LANES:
            is_second = iota(values.shape, 1) % self.form.head_size >= half
            others = jnp.where(is_second, others, pltpu.roll(values, LANES - half, 1))
        return values * cosines + others * (sines * direction)

    def visit(self, query: Index, step: Callable[[Index, tuple[C, ...]], tuple[C, ...]], start: C) -> tuple[C, ...]:
        """Call ``step(first key, carry)`` for each tile of keys that the queries from ``query`` on see, and return
        the last carry, which has a value per head and begins as ``start``."""
        tiles, carry = self.tiles, (start,) * self.heads
        if not tiles.is_loop:
            return step(tiles.first_key(query), carry)
        tile = 2 * (self.first_tile + query // tiles.queries)
        span = self.bounds[tile], self.bounds[tile + 1]
        return jax.lax.fori_loop(*span, lambda j, c: step(pl.multiple_of(j * tiles.keys, tiles.keys), c), carry)

    def visible(self, query: Index, key: Index) -> jax.Array:
        """Return which keys the queries see; both are the first tokens of their tile."""
        tiles, form = self.tiles, self.form
        of_keys = self.key_tokens[self.r, pl.ds(key, tiles.keys), 0:1]
        visible = of_keys == jnp.maximum(self.query_tokens[self.r, 0:1, self.part(query)], 1)
        if form.window or form.causal:
            sizes = (tiles.keys, tiles.queries)
            ahead = iota(sizes, 0) - iota(sizes, 1) + (key - query)
            if form.window:
                visible &= jnp.abs(ahead) <= form.window
            if form.causal:
                visible &= ahead <= 0
        return visible

    def kept(self, query: Index, key: Index) -> list[jax.Array]:
        """Return which probabilities of each head dropout keeps."""
        part, words, found = self.part(query), jnp.zeros(()), []
        for head in range(self.heads):
            number = self.first_head + head
            if head % 2 == 0:  # the word of a pair of heads is computed once
                first, second = (self.query_tokens[self.r, i : i + 1, part] for i in (1, 2))
                positions = self.key_tokens[self.r, pl.ds(key, self.tiles.keys), 1:2]
                words = probability_words(first, second, positions, number // 2)
            shift = jnp.full(words.shape, 16 * (number % 2 if self.heads == 1 else head % 2), jnp.int32)
            bits = jax.lax.shift_right_logical(words, shift) & 0xFFFF
            found.append(bits >= drop_threshold(self.form.dropout_rate))
        return found


def _place(first: Ref, query: Ref, form: Form) -> tuple[Index, Index]:
    """Return the index of the first head of the program, and of the first tile of its first row."""
    rows, length, _ = query.shape
    first_row = pl.program_id(0) * rows
    first_head = first[0] + pl.program_id(1) * (LANES // form.head_size)
    return first_head, first_row * (length // Tiles(length, form).queries)


def _head(block: jax.Array, head: int, form: Form) -> jax.Array:
    """Return ``block`` [tokens, 128 lanes] with zeros in the lanes of all heads except ``head``."""
    lane = iota(block.shape, 1) // form.head_size
    return jnp.where(lane == head, block, jnp.zeros((), block.dtype)) if form.head_size < LANES else block


def _rows_of(head: int, form: Form) -> slice:
    """Return the rows of ``head`` in a transposed block."""
    return slice(head * form.head_size, (head + 1) * form.head_size)


def forward_kernel(
    first: Ref, bounds: Ref, biases: Ref, query_tokens: Ref, key_tokens: Ref, *others: Ref, form: Form
) -> None:
    turns, (query, key, value, out, log_sums, *memory) = others[: 2 * form.rotary], others[2 * form.rotary :]
    place = _place(first, query, form)

    def row(r: jax.Array, _: None) -> None:
        operands = _Row(
            r, place, bounds, biases, query_tokens, key_tokens, turns, memory[0] if memory else None, form
        )
        _forward_row(operands, (query, key, value), out, log_sums)

    jax.lax.fori_loop(0, query.shape[0], row, None)


def _forward_row(operands: _Row, heads: tuple[Ref, Ref, Ref], out: Ref, log_sums: Ref) -> None:
    query, key, value = heads
    r, form, tiles = operands.r, operands.form, operands.tiles
    operands.rotate_keys(key)

    def of_keys(span: Span) -> tuple[jax.Array, jax.Array]:
        return operands.keys_of(key, span), operands.values_of(value, span).T

    once = of_keys(slice(None)) if tiles.is_row else None

    def tile(begin: Index) -> None:
        part = operands.part(begin)
        queries = operands.queries_of(query, part)

        def step(at: Index, carry: tuple[_Softmax, ...]) -> tuple[_Softmax, ...]:
            keys, values = once or of_keys(pl.ds(at, tiles.keys))
            visible = operands.visible(begin, at)
            kept = operands.kept(begin, at) if form.dropout_rate else []
            after = []
            for head, (most, total, context) in enumerate(carry):
                scores = dot(keys, _head(queries, head, form), 1, 1)
                scores = jnp.where(visible, scores, MASKED_SCORE)
                highest = jnp.max(scores, axis=0, keepdims=True)
                if tiles.is_loop:
                    highest = jnp.maximum(most, highest)
                probabilities = jnp.exp(scores - highest)
                sums = jnp.sum(probabilities, axis=0, keepdims=True)
                if form.dropout_rate:
                    probabilities = jnp.where(kept[head], probabilities, 0.0)
                product = dot(values[_rows_of(head, form)], probabilities.astype(values.dtype))
                if tiles.is_loop:
                    shrink = jnp.exp(most - highest)
                    sums, product = total * shrink + sums, context * shrink + product
                after.append((highest, sums, product))
            return tuple(after)

        line = jnp.full((1, tiles.queries), MASKED_SCORE)
        start = (line, jnp.zeros_like(line), jnp.zeros((form.head_size, tiles.queries)))
        found = operands.visit(begin, step, start)
        contexts = []
        for head, (most, total, context) in enumerate(found):
            inverse, log_sums[r, head : head + 1, part] = seeing(most, total, jnp.log)
            contexts.append(context * (form.scale_of_kept * inverse))
        out[r, part] = jnp.concatenate(contexts, 0).T.astype(out.dtype)

    tiles.for_queries(tile)


def backward_kernel(
    first: Ref, bounds: Ref, biases: Ref, query_tokens: Ref, key_tokens: Ref, *others: Ref, form: Form
) -> None:
    turns, others = others[: 2 * form.rotary], others[2 * form.rotary :]
    # Query, key, value, context, its gradient, logarithms of the sums; gradients of query, key and value, sums of
    # the gradients of the biases, and memory for the gradients of keys and values.
    inputs, outputs, memory = others[:6], others[6:12], others[12:]
    place = _place(first, inputs[0], form)
    sums = outputs[3]
    sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def row(r: jax.Array, _: None) -> None:
        of_row = _Row(
            r, place, bounds, biases, query_tokens, key_tokens, turns, memory[0] if memory else None, form
        )
        _backward_row(of_row, inputs, outputs)

    jax.lax.fori_loop(0, inputs[0].shape[0], row, None)


def _backward_row(operands: _Row, inputs: tuple[Ref, ...], outputs: tuple[Ref, ...]) -> None:
    query, key, value, out, gradient, log_sums = inputs
    query_gradient, key_gradient, value_gradient, sums, total_keys, total_values = outputs
    r, form, tiles, dtype = operands.r, operands.form, operands.tiles, query.dtype

    is_whole = tiles.keys == tiles.queries == tiles.length
    operands.rotate_keys(key)

    def of_keys(span: Span) -> Arrays:
        keys = operands.keys_of(key, span)
        return keys, operands.values_of(value, span), keys.T

    once = of_keys(slice(None)) if tiles.is_row else None
    if not is_whole:
        total_keys[...] = total_values[...] = jnp.zeros(total_keys.shape, jnp.float32)

    def tile(begin: Index) -> None:
        part = operands.part(begin)
        queries, incoming = operands.queries_of(query, part), gradient[r, part]
        products = (out[r, part].astype(jnp.float32) * incoming.astype(jnp.float32)).T
        deltas = [jnp.sum(products[_rows_of(i, form)], 0, keepdims=True) for i in range(operands.heads)]

        def step(at: Index, carry: Arrays) -> Arrays:
            span = pl.ds(at, tiles.keys)
            keys, values, turned = once or of_keys(span)
            visible = operands.visible(begin, at)
            kept = operands.kept(begin, at) if form.dropout_rate else []
            for_keys: jax.Array | float = 0.0
            for_values: jax.Array | float = 0.0
            after = []
            for head, for_queries in enumerate(carry):
                one_query, one_gradient = _head(queries, head, form), _head(incoming, head, form)
                scores = jnp.where(visible, dot(keys, one_query, 1, 1), MASKED_SCORE)
                probabilities = jnp.exp(scores - log_sums[r, head : head + 1, part])
                for_probabilities, dropped = dot(values, one_gradient, 1, 1), probabilities
                if kept:
                    for_probabilities, dropped = (
                        jnp.where(kept[head], x * form.scale_of_kept, 0.0) for x in (for_probabilities, dropped)
                    )
                for_values += dot(dropped.astype(dtype), one_gradient)
                for_scores = (probabilities * (for_probabilities - deltas[head])).astype(dtype)
                for_keys += dot(for_scores, one_query)
                after.append(for_queries + dot(turned[_rows_of(head, form)], for_scores))
            for total, more in ((total_keys, for_keys), (total_values, for_values)):
                total[span] = more if is_whole else total[span] + more
            return tuple(after)

        found = operands.visit(begin, step, jnp.zeros((form.head_size, tiles.queries)))
        for_queries = jnp.concatenate(found, 0).T * form.head_size**-0.5
        if form.rotary:
            for_queries = operands.rotated(for_queries, part, -1)
        _add(sums, 0, for_queries)
        query_gradient[r, part] = for_queries.astype(dtype)

    tiles.for_queries(tile)
    _write_keys(operands, sums, (total_keys, total_values), (key_gradient, value_gradient))


def _write_keys(operands: _Row, sums: Ref, totals: tuple[Ref, Ref], results: tuple[Ref, Ref]) -> None:
    """Write the gradients of the keys and values of a row, from their float32 sums."""

    def write(begin: Index) -> None:
        part = operands.part(begin)
        for_keys, for_values = (total[part] for total in totals)
        if operands.form.rotary:
            for_keys = operands.rotated(for_keys, part, -1)
        for index, values, result in ((1, for_keys, results[0]), (2, for_values, results[1])):
            _add(sums, index, values)
            result[operands.r, part] = values.astype(result.dtype)

    operands.tiles.for_queries(write)


def _add(sums: Ref, index: int, values: jax.Array) -> None:
    """Add eight partial sums of the gradient of a bias, so that whole registers are added without sums over their
    rows."""
    sums[0, 8 * index : 8 * index + 8] += jnp.sum(values.reshape(-1, 8, LANES), axis=0)
