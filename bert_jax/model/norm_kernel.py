"""Bias, dropout, residual and LayerNorm after a matrix product as one TPU kernel (Pallas), forward and backward.

XLA computes these operations in about six passes through memory in each direction; the kernel reads and writes
every array once. The backward pass recomputes the sum and its statistics from the product and the residual.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.config.schema import ModelConfig
from bert_jax.config.switches import ANY, SIZES, Supported, unsupported_fields
from bert_jax.model.kernels import LANES, iota, keep, mix

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def add_norm(
    product_NxH: jax.Array,
    bias_H: jax.Array,
    residual_NxH: jax.Array,
    norm_scale_H: jax.Array,
    norm_bias_H: jax.Array,
    words_3: jax.Array,
    first_token: jax.Array,
    epsilon: float,
    dropout_rate: float,
    interpret: bool,
) -> jax.Array:
    """Compute ``LayerNorm(residual + dropout(product + bias))`` over N tokens in float32. Returns [N, H] in the
    dtype of the residual.

    ``words_3`` (int32, from ``seed_words``) begins with two words of the dropout key; ``first_token`` (int32) is
    the index of token 0 in the global batch. The dropout bits depend on nothing else. With ``dropout_rate`` 0 no
    random bits are generated. ``interpret`` runs the kernel on any device.
    """
    return _forward(
        product_NxH, bias_H, residual_NxH, norm_scale_H, norm_bias_H, words_3, first_token, epsilon, dropout_rate,
        interpret,
    )[0]  # fmt: skip


def _forward(
    product: jax.Array, bias: jax.Array, residual: jax.Array, scale: jax.Array, shift: jax.Array, words: jax.Array,
    first_token: jax.Array, epsilon: float, dropout_rate: float, interpret: bool,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:  # fmt: skip
    kernel = functools.partial(_forward_kernel, epsilon=epsilon, dropout_rate=dropout_rate)
    seeds = jnp.stack([words[0], words[1], first_token])
    vectors = jnp.stack([bias, scale, shift]).astype(jnp.float32)
    out = _call(kernel, seeds, vectors, (product, residual), 1, 0, interpret)
    return out[0], (product, bias, residual, scale, shift, words, first_token)


def _backward(
    epsilon: float, dropout_rate: float, interpret: bool, saved: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[Any, ...]:
    product, bias, residual, scale, shift, words, first_token = saved
    kernel = functools.partial(_backward_kernel, epsilon=epsilon, dropout_rate=dropout_rate)
    seeds = jnp.stack([words[0], words[1], first_token])
    vectors = jnp.stack([bias, scale, shift]).astype(jnp.float32)
    for_product, for_residual, sums = _call(kernel, seeds, vectors, (product, residual, gradient), 2, 1, interpret)
    zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in (words, first_token)]
    for_bias, for_scale, for_shift = (
        jnp.sum(sums[8 * i : 8 * i + 8], axis=0).astype(x.dtype) for i, x in enumerate((bias, scale, shift))
    )
    return (for_product, for_bias, for_residual, for_scale, for_shift, *zeros)


add_norm.defvjp(_forward, _backward)


def _call(
    kernel: Any, seeds: jax.Array, vectors: jax.Array, arrays: tuple[jax.Array, ...], outputs: int, sums: int,
    interpret: bool,
) -> Any:  # fmt: skip
    """Run ``kernel`` on blocks of tokens. Return ``outputs`` arrays with the shape and dtype of ``arrays[0]``,
    followed by ``sums`` arrays float32[24, H]."""
    tokens, width = arrays[0].shape
    rows = next(n for n in range(min(_BLOCK_TOKENS, tokens), 0, -8) if tokens % n == 0)
    block = pl.BlockSpec((rows, width), lambda i, *_: (i, 0))
    kind = jax.typeof(arrays[0]).manual_axis_type
    like = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype, manual_axis_type=kind)
    total = jax.ShapeDtypeStruct((24, width), jnp.float32, manual_axis_type=kind)
    return pl.pallas_call(
        kernel,
        out_shape=[like] * outputs + [total] * sums,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tokens // rows,),
            in_specs=[pl.BlockSpec((3, width), lambda i, *_: (0, 0)), *[block] * len(arrays)],
            out_specs=[block] * outputs + [pl.BlockSpec((24, width), lambda i, *_: (0, 0))] * sums,
        ),
        # Sequential blocks, because they add to the same sums.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=tokens,
            bytes_accessed=(len(arrays) + outputs) * arrays[0].size * arrays[0].dtype.itemsize,
        ),
        interpret=interpret,
        name="add_norm" + kernel.func.__name__.removesuffix("_kernel"),
    )(seeds, vectors, *arrays)


def _forward_kernel(
    seeds: Any, vectors: Any, product: Any, residual: Any, out: Any, *, epsilon: float, dropout_rate: float
) -> None:
    normal, _, _ = _normal(seeds, vectors, product, residual, epsilon, dropout_rate)
    out[...] = (normal * vectors[1:2] + vectors[2:3]).astype(out.dtype)


def _backward_kernel(
    seeds: Any, vectors: Any, product: Any, residual: Any, gradient: Any,
    for_product: Any, for_residual: Any, sums: Any, *, epsilon: float, dropout_rate: float,
) -> None:  # fmt: skip
    normal, inverse, factor = _normal(seeds, vectors, product, residual, epsilon, dropout_rate)
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
    seeds: Any, vectors: Any, product: Any, residual: Any, epsilon: float, dropout_rate: float
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the normalized sum, its inverse standard deviation, and the dropout factor of each value (0 or the
    scale)."""
    dropped = product[...].astype(jnp.float32) + vectors[0:1]
    factor = None
    if dropout_rate:
        factor = _factor(seeds, product.shape, dropout_rate)
        dropped = dropped * factor
    total = residual[...].astype(jnp.float32) + dropped
    centered = total - jnp.mean(total, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + epsilon)
    return centered * inverse, inverse, factor


def _factor(seeds: Any, shape: tuple[int, int], rate: float) -> jax.Array:
    tokens, width = shape
    half = (tokens, width // 2)
    token = seeds[2] + pl.program_id(0) * tokens + iota(half, 0)
    words = mix(token * half[1] + iota(half, 1) + seeds[0], seeds[1])
    stay, scale = keep(words, rate, axis=1)
    return jnp.where(stay, scale, 0.0)
