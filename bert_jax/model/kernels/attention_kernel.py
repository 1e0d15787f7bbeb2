"""Attention as one TPU kernel (Pallas), forward and backward, including dropout of the probabilities.

Scores and probabilities never reach the main memory of the device. The kernel reads query, key and value in the
layout of the projections, [batch, tokens, hidden size], and writes the context in the same layout, so that heads
are never transposed. The backward pass recomputes the probabilities and the dropout bits.

A block contains one or more rows with all their tokens and, of each token, the 128 lanes of 128 / head size heads.
A head is selected by setting the lanes of the other heads to zero, not by slicing: the matrix unit is 128 wide
anyway, and no lanes have to be moved.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.config.architecture import ModelConfig
from bert_jax.config.switches import ANY, SIZES, Supported, unsupported_fields
from bert_jax.model.dropout import probability_words
from bert_jax.model.kernels.common import LANES, iota, scale_or_drop

# Longest rows whose keys, scores of one query block and gradients fit into the fast memory together.
MAX_LENGTH = 2048
# Tokens of one block and queries of one tile of scores that fit into the fast memory.
_BLOCK_TOKENS = 1024
_TILE_QUERIES = 256
_MASKED_SCORE = -1e9


# The kernel uses only the sizes, but a new value of another field may change the meaning of query and key.
_SUPPORTED: Supported = SIZES | {
    "position_offset": ANY,
    "activation": ANY,
    "norm_position": ANY,
    "norm_epsilon": ANY,
    "position_embeddings": ("learned", "sinusoidal"),
}


def unsupported(model: ModelConfig, length: int, parts: int = 1) -> str:
    """Return the reason why the kernel cannot run rows of ``length`` tokens if the heads of ``model`` are divided
    into ``parts`` equal groups, one per device. Return "" if the kernel can run."""
    width, head_size = model.hidden_size // parts, model.head_size
    for line in unsupported_fields(model, _SUPPORTED, "the attention kernel"):
        return line
    if length % LANES or length > MAX_LENGTH:
        return f"length {length} is not a multiple of {LANES} up to {MAX_LENGTH}"
    if LANES % head_size or width % LANES:
        return f"width {width} with heads of size {head_size} does not fill blocks of {LANES}"
    return ""


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def attend(
    query_BxSxH: jax.Array,
    key_BxSxH: jax.Array,
    value_BxSxH: jax.Array,
    biases_3xH: jax.Array,
    query_tokens_BxSxI: jax.Array,
    key_tokens_BxJxS: jax.Array,
    first_head_1: jax.Array,
    head_size: int,
    dropout_rate: float,
    interpret: bool,
) -> jax.Array:
    """Return scaled dot-product attention, with the shape and dtype of the query, [batch, tokens, hidden size].

    The float32 ``biases`` are added to query, key and value here, because their gradients, which are sums over all
    tokens, would otherwise need further passes through memory. ``interpret`` runs the kernel on any device, slowly.

    Args:
        query_tokens_BxSxI: int32: the sequence id of each token, which determines the keys that the token sees
            (``bert_jax.model.kernels.ranges.visible_keys``); with dropout, also its two words of
            ``bert_jax.model.dropout.TokenKey``.
        key_tokens_BxJxS: int32: the sequence id of each token; with dropout, also its position in its sequence.
        first_head_1: int32: the index of the first head of ``query``; even if a block has several heads.
    """
    operands = (query_BxSxH, key_BxSxH, value_BxSxH, biases_3xH, query_tokens_BxSxI, key_tokens_BxJxS, first_head_1)
    return _forward(*operands, head_size, dropout_rate, interpret)[0]


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, biases: jax.Array, query_tokens: jax.Array,
    key_tokens: jax.Array, first_head: jax.Array, head_size: int, dropout_rate: float, interpret: bool,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:  # fmt: skip
    kernel = functools.partial(_forward_kernel, head_size=head_size, dropout_rate=dropout_rate)
    tokens = (query_tokens, key_tokens)
    out = _call(kernel, (query, key, value), biases, tokens, first_head, False, interpret)
    return out[0], (query, key, value, biases, *tokens, first_head)


def _backward(
    head_size: int, dropout_rate: float, interpret: bool, saved: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[Any, ...]:
    query, key, value, biases, *tokens, first_head = saved
    kernel = functools.partial(_backward_kernel, head_size=head_size, dropout_rate=dropout_rate)
    *gradients, sums = _call(kernel, (query, key, value, gradient), biases, tokens, first_head, True, interpret)
    for_biases = jnp.sum(sums.reshape(-1, 3, 8, sums.shape[-1]), axis=(0, 2))
    # Gradients of integers have the dtype float0.
    zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in (*tokens, first_head)]
    return (*gradients, for_biases, *zeros)


attend.defvjp(_forward, _backward)


def _call(
    kernel: Any, arrays: tuple[jax.Array, ...], biases: jax.Array, tokens: Sequence[jax.Array],
    first_head: jax.Array, is_backward: bool, interpret: bool,
) -> Any:  # fmt: skip
    """Run ``kernel`` on blocks of rows and heads; the outputs have the shape and dtype of the first array.

    The backward pass also returns eight float32 partial sums of the gradient of each of the three biases, as an
    array [blocks of rows, 3 * 8, hidden size].
    """
    batch, length, width = arrays[0].shape
    rows = next(r for r in range(max(_BLOCK_TOKENS // length, 1), 0, -1) if batch % r == 0)
    block = pl.BlockSpec((rows, length, LANES), lambda i, j, *_: (i, 0, j))
    in_specs = [
        pl.BlockSpec((3, LANES), lambda i, j, *_: (0, j)),
        *(pl.BlockSpec((rows, *x.shape[1:]), lambda i, j, *_: (i, 0, 0)) for x in tokens),
        *[block] * len(arrays),
    ]
    kind = jax.typeof(arrays[0]).manual_axis_type
    outputs, products = (3, 5) if is_backward else (1, 2)
    out_shape = [jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype, manual_axis_type=kind)] * outputs
    out_specs = [block] * outputs
    if is_backward:
        out_shape.append(jax.ShapeDtypeStruct((batch // rows, 24, width), jnp.float32, manual_axis_type=kind))
        out_specs.append(pl.BlockSpec((1, 24, LANES), lambda i, j, *_: (i, 0, j)))
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch // rows, width // LANES),
            in_specs=in_specs,
            out_specs=out_specs,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * batch * length * length * width,
            transcendentals=batch * length * length * width // LANES,
            bytes_accessed=(len(arrays) + outputs) * arrays[0].size * arrays[0].dtype.itemsize,
        ),
        interpret=interpret,
        name="attention" + kernel.func.__name__.removesuffix("_kernel"),
    )(first_head, biases, *tokens, *arrays)


def _forward_kernel(
    first: Any, biases: Any, query_tokens: Any, key_tokens: Any, query: Any, key: Any, value: Any, out: Any,
    *, head_size: int, dropout_rate: float,
) -> None:  # fmt: skip
    rows, length, _ = query.shape
    first_head = first[0] + pl.program_id(1) * (LANES // head_size)
    tile = min(length, _TILE_QUERIES)

    def row(r: Any, _: Any) -> None:
        keys, values = _biased(key[r], biases[1:2]), _biased(value[r], biases[2:3])
        for begin in range(0, length, tile):
            part = pl.ds(begin, tile)
            visible = jnp.maximum(query_tokens[r, part, 0:1], 1) == key_tokens[r, 0:1]
            bits = _Bits(first_head, query_tokens[r, part], key_tokens[r])
            queries = _biased(query[r, part], biases[0:1])
            context = jnp.zeros((tile, LANES), jnp.float32)
            for head in range(LANES // head_size):
                probabilities = _probabilities(_head(queries, head, head_size), keys, visible, head_size)
                if dropout_rate:
                    probabilities *= scale_or_drop(bits.of_head(head), dropout_rate)
                context += _dot(probabilities.astype(value.dtype), _head(values, head, head_size), 1, 0)
            out[r, part] = context.astype(out.dtype)

    jax.lax.fori_loop(0, rows, row, None)


def _backward_kernel(
    first: Any, biases: Any, query_tokens: Any, key_tokens: Any, query: Any, key: Any, value: Any, gradient: Any,
    query_gradient: Any, key_gradient: Any, value_gradient: Any, sums: Any,
    *, head_size: int, dropout_rate: float,
) -> None:  # fmt: skip
    rows, length, _ = query.shape
    first_head = first[0] + pl.program_id(1) * (LANES // head_size)
    tile, dtype = min(length, _TILE_QUERIES), query.dtype
    sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def add(index: int, values: jax.Array) -> None:
        # Eight partial sums of each, so that whole registers are added without sums over their rows.
        sums[0, 8 * index : 8 * index + 8] += jnp.sum(values.reshape(-1, 8, LANES), axis=0)

    def row(r: Any, _: Any) -> None:
        keys, values = _biased(key[r], biases[1:2]), _biased(value[r], biases[2:3])
        for_keys = jnp.zeros((length, LANES), jnp.float32)
        for_values = jnp.zeros((length, LANES), jnp.float32)
        for begin in range(0, length, tile):
            part = pl.ds(begin, tile)
            visible = jnp.maximum(query_tokens[r, part, 0:1], 1) == key_tokens[r, 0:1]
            bits = _Bits(first_head, query_tokens[r, part], key_tokens[r])
            queries = _biased(query[r, part], biases[0:1])
            for_queries = jnp.zeros((tile, LANES), jnp.float32)
            for head in range(LANES // head_size):
                one_query = _head(queries, head, head_size)
                one_gradient = _head(gradient[r, part], head, head_size)
                probabilities = _probabilities(one_query, keys, visible, head_size)
                for_probabilities = _dot(one_gradient, values, 1, 1)
                dropped = probabilities
                if dropout_rate:
                    factor = scale_or_drop(bits.of_head(head), dropout_rate)
                    dropped = probabilities * factor
                    for_probabilities *= factor
                for_values += _dot(dropped.astype(dtype), one_gradient, 0, 0)
                mean = jnp.sum(for_probabilities * probabilities, axis=-1, keepdims=True)
                for_scores = jnp.where(visible, probabilities * (for_probabilities - mean), 0.0).astype(dtype)
                for_queries += _dot(for_scores, _head(keys, head, head_size), 1, 0)
                for_keys += _dot(for_scores, one_query * _scale(head_size, dtype), 0, 0)
            for_queries *= head_size**-0.5
            add(0, for_queries)
            query_gradient[r, part] = for_queries.astype(dtype)
        add(1, for_keys)
        add(2, for_values)
        key_gradient[r] = for_keys.astype(dtype)
        value_gradient[r] = for_values.astype(dtype)

    jax.lax.fori_loop(0, rows, row, None)


def _biased(product: jax.Array, bias: jax.Array) -> jax.Array:
    return (product.astype(jnp.float32) + bias).astype(product.dtype)


def _scale(head_size: int, dtype: Any) -> jax.Array:
    return jnp.asarray(head_size**-0.5, dtype)


def _head(block: jax.Array, head: int, head_size: int) -> jax.Array:
    """Return ``block`` [tokens, 128 lanes] with zeros in the lanes of all heads except ``head``."""
    lane = iota(block.shape, 1)
    mine = (lane >= head * head_size) & (lane < (head + 1) * head_size)
    return jnp.where(mine, block, jnp.zeros((), block.dtype))


def _dot(left: jax.Array, right: jax.Array, left_dim: int, right_dim: int) -> jax.Array:
    """Return the float32 product of two matrices, summed over one dimension of each."""
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _probabilities(query: jax.Array, key: jax.Array, visible: jax.Array, head_size: int) -> jax.Array:
    """Return the softmax of the scores of one tile, float32[queries, keys]."""
    scores = _dot(query * _scale(head_size, query.dtype), key, 1, 1)
    scores = jnp.where(visible, scores, _MASKED_SCORE)
    exponentials = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)


class _Bits:
    """Dropout bits of the heads of a block, for one row and one tile of queries."""

    def __init__(self, first_head: Any, query_tokens: jax.Array, key_tokens: jax.Array) -> None:
        self._first_head, self._query_tokens, self._key_tokens = first_head, query_tokens, key_tokens
        self._words: jax.Array | None = None

    def of_head(self, head: int) -> jax.Array:
        """Return values from 0 to 65535, int32[queries, keys]. Heads must be requested in ascending order."""
        number = self._first_head + head
        if self._words is None or head % 2 == 0:  # the word of a pair of heads is computed once
            first, second = self._query_tokens[:, 1:2], self._query_tokens[:, 2:3]
            self._words = probability_words(first, second, self._key_tokens[1:2], number // 2)
        shift = jnp.full(self._words.shape, 16 * (number % 2), jnp.int32)
        return jax.lax.shift_right_logical(self._words, shift) & 0xFFFF
