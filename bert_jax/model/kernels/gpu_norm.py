"""Bias, dropout, residual and LayerNorm after a matrix product as GPU kernels (Pallas, lowered through Triton).

Every array is read and written once in each direction; the backward pass recomputes the sum and its statistics from
the product and the residual. A program holds some tokens as pieces of columns, each a power of two wide, as Triton
demands, and no piece extends over both halves of a token, because a word of dropout bits belongs to one value of
each half (``bert_jax.model.dropout.value_words``).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from bert_jax.config.architecture import ModelConfig
from bert_jax.model.dropout import mix
from bert_jax.model.kernels import tpu_norm
from bert_jax.model.kernels.common import scale_or_drop, stated_cost, triton
from bert_jax.model.kernels.operands import Arrays, Kernel, Operand, Ref, Span

# Tokens that a program holds at a time, and most tokens of which a program of the backward pass sums the gradients.
_TOKENS = 4
_SUMMED_TOKENS = 128
# Widest piece of columns.
_PIECE = 512
_WARPS = 8

# Sums over tokens of the gradients of the three vectors, for some columns.
_Sums = Arrays


def unsupported(model: ModelConfig, length: int) -> str:
    """Return the reason why the kernels cannot be used with ``model`` and rows of ``length`` tokens; empty if they
    can."""
    if triton() is None:
        return "this version of jax has no Triton kernels"
    if model.norm_position != "post":
        return f"model.norm_position: {model.norm_position} is not supported by the residual_norm kernel for GPUs"
    return tpu_norm.unsupported(model, length)


def forward(
    arrays: Arrays, vectors: Arrays, tokens: Arrays, epsilon: float, rate: float, interpret: bool
) -> jax.Array:
    """Compute ``forward`` of :class:`bert_jax.model.kernels.add_norm.Kernels`."""
    kernel = functools.partial(_forward_kernel, epsilon=epsilon, dropout_rate=rate)
    (out,) = _call(kernel, vectors, tokens, arrays, _TOKENS, 1, interpret)
    return out


def backward(
    arrays: Arrays, vectors: Arrays, tokens: Arrays, epsilon: float, rate: float, interpret: bool
) -> Arrays:
    """Compute ``backward`` of :class:`bert_jax.model.kernels.add_norm.Kernels`."""
    kernel = functools.partial(_backward_kernel, epsilon=epsilon, dropout_rate=rate)
    summed = math.gcd(len(arrays[0]), _SUMMED_TOKENS)
    for_product, for_residual, sums = _call(kernel, vectors, tokens, arrays, summed, 2, interpret)
    return for_product, for_residual, sums.swapaxes(0, 1)


def _call(
    kernel: Kernel, vectors: Arrays, words: Arrays, arrays: Arrays, tokens: int, outputs: int, interpret: bool
) -> list[jax.Array]:
    """Run ``kernel`` on blocks of ``tokens`` tokens. Return ``outputs`` arrays with the shape and dtype of
    ``arrays[0]``; with two, also the sums over the tokens of each block, float32[blocks, 3, H]."""
    total, width = arrays[0].shape
    block = pl.BlockSpec((tokens, width), lambda i: (i, 0))
    kind = jax.typeof(arrays[0]).manual_axis_type
    out_shape: list[jax.ShapeDtypeStruct] = [
        jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype, manual_axis_type=kind)
    ] * outputs
    out_specs = [block] * outputs
    if outputs > 1:
        out_shape.append(jax.ShapeDtypeStruct((total // tokens, 3, width), jnp.float32, manual_axis_type=kind))
        out_specs.append(pl.BlockSpec((None, 3, width), lambda i: (i, 0, 0)))
    all_arrays: list[Operand] = [*arrays, *words, *out_shape]
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(total // tokens,),
        in_specs=[
            pl.BlockSpec((3, width), lambda i: (0, 0)),
            *[block] * len(arrays),
            *[pl.BlockSpec((tokens, 2), lambda i: (i, 0))] * len(words),
        ],
        out_specs=out_specs,
        metadata=stated_cost(0, sum(x.size * jnp.dtype(x.dtype).itemsize for x in all_arrays)),
        compiler_params=triton().CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="add_norm" + kernel.func.__name__.removesuffix("_kernel"),
    )(jnp.stack(vectors).astype(jnp.float32), *arrays, *words)


def _pieces(width: int) -> list[pl.Slice]:
    """Return the column slices of a token, first half before second half."""
    size = min(math.gcd(width // 2, 1 << 20), _PIECE)
    return [pl.Slice(begin, size) for begin in range(0, width, size)]


def _forward_kernel(
    vectors: Ref, product: Ref, residual: Ref, *others: Ref, epsilon: float, dropout_rate: float
) -> None:
    *words, out = others
    rows = slice(None)
    pieces = _pieces(product.shape[1])
    normal, _, _ = _normal(vectors, product, residual, words, rows, epsilon, dropout_rate)
    for piece, values in zip(pieces, normal, strict=True):
        out[rows, piece] = (values * vectors[1, piece][None, :] + vectors[2, piece][None, :]).astype(out.dtype)


def _backward_kernel(
    vectors: Ref, product: Ref, residual: Ref, gradient: Ref, *others: Ref, epsilon: float, dropout_rate: float
) -> None:
    *words, for_product, for_residual, sums = others
    tokens, width = product.shape
    pieces = _pieces(width)

    def step(i: jax.Array, totals: tuple[_Sums, ...]) -> tuple[_Sums, ...]:
        rows = pl.ds(i * _TOKENS, _TOKENS)
        normal, inverse, factors = _normal(vectors, product, residual, words, rows, epsilon, dropout_rate)
        incoming = [gradient[rows, piece].astype(jnp.float32) for piece in pieces]
        scaled = [x * vectors[1, piece][None, :] for x, piece in zip(incoming, pieces, strict=True)]
        mean = _mean(scaled, width)
        along = _mean([x * y for x, y in zip(scaled, normal, strict=True)], width)
        after = []
        for j, piece in enumerate(pieces):
            for_sum = inverse * (scaled[j] - mean - normal[j] * along)
            for_residual[rows, piece] = for_sum.astype(for_residual.dtype)
            dropped = for_sum * factors[j] if factors else for_sum
            for_product[rows, piece] = dropped.astype(for_product.dtype)
            more = (dropped, incoming[j] * normal[j], incoming[j])
            after.append(tuple(x + y for x, y in zip(totals[j], more, strict=True)))
        return tuple(after)

    zeros = tuple((jnp.zeros((_TOKENS, piece.size)),) * 3 for piece in pieces)
    totals = jax.lax.fori_loop(0, tokens // _TOKENS, step, zeros)
    for piece, of_piece in zip(pieces, totals, strict=True):
        for i, total in enumerate(of_piece):
            sums[i, piece] = jnp.sum(total, axis=0)


def _mean(pieces: list[jax.Array], width: int) -> jax.Array:
    return functools.reduce(jnp.add, [jnp.sum(x, axis=1) for x in pieces])[:, None] / width


def _normal(
    vectors: Ref, product: Ref, residual: Ref, words: list[Ref], rows: Span, epsilon: float, dropout_rate: float
) -> tuple[list[jax.Array], jax.Array, list[jax.Array]]:
    """Return the normalized sum of the tokens in ``rows``, its inverse standard deviation, and the dropout factor
    of each value (0 or the scale; [] without dropout)."""
    width = product.shape[1]
    pieces = _pieces(width)
    dropped = [product[rows, p].astype(jnp.float32) + vectors[0, p][None, :] for p in pieces]
    factors: list[jax.Array] = []
    if dropout_rate:
        first, second = (words[0][rows, i][:, None] for i in (0, 1))
        hashed = []
        for piece in pieces[: len(pieces) // 2]:
            shape = (dropped[0].shape[0], piece.size)
            hashed.append(mix(jax.lax.broadcasted_iota(jnp.int32, shape, 1) + (piece.start + first), second))
        bits = [x & 0xFFFF for x in hashed] + [jax.lax.shift_right_logical(x, 16) & 0xFFFF for x in hashed]
        factors = [scale_or_drop(x, dropout_rate) for x in bits]
        dropped = [x * factor for x, factor in zip(dropped, factors, strict=True)]
    total = [residual[rows, piece].astype(jnp.float32) + x for piece, x in zip(pieces, dropped, strict=True)]
    mean = _mean(total, width)
    centered = [x - mean for x in total]
    inverse = jax.lax.rsqrt(_mean([jnp.square(x) for x in centered], width) + epsilon)
    return [x * inverse for x in centered], inverse, factors
