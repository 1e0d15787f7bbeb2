"""Bias, dropout, residual and LayerNorm after a matrix product as one TPU kernel (Pallas), forward and backward.

XLA computes these operations in about six passes through memory in each direction; the kernel reads and writes
every array once. The backward pass recomputes the sum and its statistics from the product and the residual.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.config.architecture import ModelConfig
from bert_jax.config.switches import ANY, SIZES, Supported, unsupported_fields
from bert_jax.model.dropout import value_words
from bert_jax.model.kernels.common import LANES, scale_or_drop, stated_cost

# Tokens of one block that fit into the fast memory.
_BLOCK_TOKENS = 256


_SUPPORTED: Supported = SIZES | {
    "position_offset": ANY,
    "activation": ANY,
    "norm_position": ("post",),
    "norm_epsilon": ANY,
    "position_embeddings": ANY,
    "rotary_base": ANY,
    "attention": ANY,
}


def unsupported(model: ModelConfig, length: int) -> str:
    """Return the reason why the kernel cannot be used with ``model`` and rows of ``length`` tokens; empty if it
    can."""
    width = model.hidden_size
    for line in unsupported_fields(model, _SUPPORTED, "the residual_norm kernel"):
        return line
    if width % (2 * LANES) or width > 2048:
        return f"width {width} is not a multiple of {2 * LANES} up to 2048"
    return f"length {length} is not a multiple of 8" if length % 8 else ""


def forward(
    arrays: tuple[jax.Array, ...], vectors: tuple[jax.Array, ...], tokens: tuple[jax.Array, ...], epsilon: float,
    rate: float, interpret: bool,
) -> jax.Array:  # fmt: skip
    """Compute ``forward`` of :class:`bert_jax.model.kernels.add_norm.Kernels`."""
    kernel = functools.partial(_forward_kernel, epsilon=epsilon, dropout_rate=rate)
    (out,) = _call(kernel, vectors, tokens, arrays, 1, 0, interpret)
    return out


def backward(
    arrays: tuple[jax.Array, ...], vectors: tuple[jax.Array, ...], tokens: tuple[jax.Array, ...], epsilon: float,
    rate: float, interpret: bool,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Compute ``backward`` of :class:`bert_jax.model.kernels.add_norm.Kernels`."""
    kernel = functools.partial(_backward_kernel, epsilon=epsilon, dropout_rate=rate)
    for_product, for_residual, sums = _call(kernel, vectors, tokens, arrays, 2, 1, interpret)
    return for_product, for_residual, sums.reshape(3, 8, -1)


def _call(
    kernel: Any, vectors: tuple[jax.Array, ...], words: tuple[jax.Array, ...], arrays: tuple[jax.Array, ...],
    outputs: int, sums: int, interpret: bool,
) -> Any:  # fmt: skip
    """Run ``kernel`` on blocks of tokens. Return ``outputs`` arrays with the shape and dtype of ``arrays[0]``,
    followed by ``sums`` arrays float32[24, H]."""
    tokens, width = arrays[0].shape
    rows = next(n for n in range(min(_BLOCK_TOKENS, tokens), 0, -8) if tokens % n == 0)
    block = pl.BlockSpec((rows, width), lambda i: (i, 0))
    moved = (len(arrays) + outputs) * arrays[0].size * arrays[0].dtype.itemsize
    # Vector operations per value, counted in the programs that libtpu 0.0.42 compiles for v5e. The backward pass
    # has 24, but waits for the fast memory as long as for 34.
    vector = (34 if sums else 13) + 10 * len(words)
    kind = jax.typeof(arrays[0]).manual_axis_type
    like = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype, manual_axis_type=kind)
    total = jax.ShapeDtypeStruct((24, width), jnp.float32, manual_axis_type=kind)
    return pl.pallas_call(
        kernel,
        out_shape=[like] * outputs + [total] * sums,
        grid=(tokens // rows,),
        in_specs=[
            pl.BlockSpec((3, width), lambda i: (0, 0)),
            *[block] * len(arrays),
            *[pl.BlockSpec((rows, 2), lambda i: (i, 0))] * len(words),
        ],
        out_specs=[block] * outputs + [pl.BlockSpec((24, width), lambda i: (0, 0))] * sums,
        # Sequential blocks, because they add to the same sums.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=tokens, bytes_accessed=moved),
        metadata=stated_cost(0, moved, vector * arrays[0].size, tokens // rows),
        interpret=interpret,
        name="add_norm" + kernel.func.__name__.removesuffix("_kernel"),
    )(jnp.stack(vectors).astype(jnp.float32), *arrays, *words)


def _forward_kernel(
    vectors: Any, product: Any, residual: Any, *others: Any, epsilon: float, dropout_rate: float
) -> None:
    *words, out = others
    normal, _, _ = _normal(vectors, product, residual, words, epsilon, dropout_rate)
    out[...] = (normal * vectors[1:2] + vectors[2:3]).astype(out.dtype)


def _backward_kernel(
    vectors: Any, product: Any, residual: Any, gradient: Any, *others: Any, epsilon: float, dropout_rate: float
) -> None:
    *words, for_product, for_residual, sums = others
    normal, inverse, factor = _normal(vectors, product, residual, words, epsilon, dropout_rate)
    incoming = gradient[...].astype(jnp.float32)
    scaled = incoming * vectors[1:2]
    mean = jnp.mean(scaled, axis=-1, keepdims=True)
    along = jnp.mean(scaled * normal, axis=-1, keepdims=True)
    for_sum = inverse * (scaled - mean - normal * along)
    for_residual[...] = for_sum.astype(for_residual.dtype)
    dropped = for_sum if factor is None else for_sum * factor
    for_product[...] = dropped.astype(for_product.dtype)

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    for i, values in enumerate((dropped, incoming * normal, incoming)):
        # Eight partial sums of each, so that whole registers are added without sums over their rows.
        sums[8 * i : 8 * i + 8] += jnp.sum(values.reshape(-1, 8, values.shape[-1]), axis=0)


def _normal(
    vectors: Any, product: Any, residual: Any, words: Sequence[Any], epsilon: float, dropout_rate: float
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the normalized sum, its inverse standard deviation, and the dropout factor of each value (0 or the
    scale)."""
    dropped = product[...].astype(jnp.float32) + vectors[0:1]
    factor = None
    if dropout_rate:
        (of_tokens,) = words
        hashed = value_words(of_tokens[:, 0:1], of_tokens[:, 1:2], product.shape[1])
        halves = [hashed & 0xFFFF, jax.lax.shift_right_logical(hashed, 16)]
        factor = scale_or_drop(jnp.concatenate(halves, axis=1), dropout_rate)
        dropped = dropped * factor
    total = residual[...].astype(jnp.float32) + dropped
    centered = total - jnp.mean(total, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + epsilon)
    return centered * inverse, inverse, factor
