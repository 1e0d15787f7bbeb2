"""Bias, dropout, residual and LayerNorm after a matrix product as one TPU kernel (Pallas), forward and backward;
and LayerNorm before a block.

XLA computes these operations in about six passes through memory in each direction; the kernel reads and writes
every array once. The backward pass recomputes the sum and its statistics from the product and the residual. The
backward pass of LayerNorm before a block also adds the gradient of the residual, which bypasses the block.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.config.architecture import ModelConfig
from bert_jax.config.switches import unsupported_fields
from bert_jax.model.dropout import value_words
from bert_jax.model.kernels.common import LANES, SUPPORTED, Gradients, scale_or_drop, stated_cost
from bert_jax.model.kernels.operands import Arrays, Kernel, Ref

# Tokens of one block that fit into the fast memory.
_BLOCK_TOKENS = 256


# The normalized values and the vectors, for the backward pass.
_Saved = tuple[jax.Array, Arrays]


def unsupported(model: ModelConfig, length: int) -> str:
    """Return the reason why the kernel cannot be used with ``model`` and rows of ``length`` tokens; empty if it
    can."""
    width = model.hidden_size
    for line in unsupported_fields(model, SUPPORTED | {"norm": ("layer_norm",)}, "the residual_norm kernel"):
        return line
    if width % (2 * LANES) or width > 2048:
        return f"width {width} is not a multiple of {2 * LANES} up to 2048"
    return f"length {length} is not a multiple of 8" if length % 8 else ""


def forward(
    arrays: Arrays, vectors: Arrays, tokens: Arrays, epsilon: float, rate: float, interpret: bool
) -> jax.Array:
    """Compute ``forward`` of :class:`bert_jax.model.kernels.add_norm.Kernels`."""
    kernel = functools.partial(_add_norm_forward_kernel, epsilon=epsilon, dropout_rate=rate)
    (out,) = _call(kernel, vectors, tokens, arrays, 1, 0, interpret, 13 + 10 * len(tokens))
    return out


def backward(
    arrays: Arrays, vectors: Arrays, tokens: Arrays, epsilon: float, rate: float, interpret: bool
) -> Arrays:
    """Compute ``backward`` of :class:`bert_jax.model.kernels.add_norm.Kernels`."""
    kernel = functools.partial(_add_norm_backward_kernel, epsilon=epsilon, dropout_rate=rate)
    # 24 operations, but the pass waits for the fast memory as long as for 34.
    operations = 34 + 10 * len(tokens)
    for_product, for_residual, sums = _call(kernel, vectors, tokens, arrays, 2, 1, interpret, operations)
    return for_product, for_residual, sums.reshape(3, 8, -1)


def _call(
    kernel: Kernel, vectors: Arrays, words: Arrays, arrays: Arrays,
    outputs: int, sums: int, interpret: bool, operations: int,
) -> list[jax.Array]:  # fmt: skip
    """Run ``kernel`` on blocks of tokens. Return ``outputs`` arrays with the shape and dtype of ``arrays[0]``,
    followed by ``sums`` arrays float32[8 * vectors, H]. ``operations``: of the vector units per value, counted in
    the programs that libtpu 0.0.42 compiles for v5e."""
    tokens, width = arrays[0].shape
    rows = next(n for n in range(min(_BLOCK_TOKENS, tokens), 0, -8) if tokens % n == 0)
    block = pl.BlockSpec((rows, width), lambda i: (i, 0))
    moved = (len(arrays) + outputs) * arrays[0].size * arrays[0].dtype.itemsize
    count = len(vectors)
    kind = jax.typeof(arrays[0]).manual_axis_type
    like = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype, manual_axis_type=kind)
    total = jax.ShapeDtypeStruct((8 * count, width), jnp.float32, manual_axis_type=kind)
    return pl.pallas_call(
        kernel,
        out_shape=[like] * outputs + [total] * sums,
        grid=(tokens // rows,),
        in_specs=[
            pl.BlockSpec((count, width), lambda i: (0, 0)),
            *[block] * len(arrays),
            *[pl.BlockSpec((rows, 2), lambda i: (i, 0))] * len(words),
        ],
        out_specs=[block] * outputs + [pl.BlockSpec((8 * count, width), lambda i: (0, 0))] * sums,
        # Sequential blocks, because they add to the same sums.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=tokens, bytes_accessed=moved),
        metadata=stated_cost(0, moved, operations * arrays[0].size, tokens // rows),
        interpret=interpret,
        name=kernel.func.__name__.removeprefix("_").removesuffix("_kernel"),
    )(jnp.stack(vectors).astype(jnp.float32), *arrays, *words)


def _add_norm_forward_kernel(
    vectors: Ref, product: Ref, residual: Ref, *others: Ref, epsilon: float, dropout_rate: float
) -> None:
    *words, out = others
    total, _ = _total(vectors, product, residual, words, dropout_rate)
    normal, _ = _normal(total, epsilon)
    out[...] = (normal * vectors[1:2] + vectors[2:3]).astype(out.dtype)


def _add_norm_backward_kernel(
    vectors: Ref, product: Ref, residual: Ref, gradient: Ref, *others: Ref, epsilon: float, dropout_rate: float
) -> None:
    *words, for_product, for_residual, sums = others
    total, factor = _total(vectors, product, residual, words, dropout_rate)
    normal, inverse = _normal(total, epsilon)
    incoming = gradient[...].astype(jnp.float32)
    for_sum = _for_total(incoming * vectors[1:2], normal, inverse)
    for_residual[...] = for_sum.astype(for_residual.dtype)
    dropped = for_sum if factor is None else for_sum * factor
    for_product[...] = dropped.astype(for_product.dtype)
    _add(sums, dropped, incoming * normal, incoming)


def _norm_forward_kernel(vectors: Ref, x: Ref, out: Ref, *, epsilon: float) -> None:
    normal, _ = _normal(x[...].astype(jnp.float32), epsilon)
    out[...] = (normal * vectors[0:1] + vectors[1:2]).astype(out.dtype)


def _norm_backward_kernel(
    vectors: Ref, x: Ref, gradient: Ref, beside: Ref, for_x: Ref, sums: Ref, *, epsilon: float
) -> None:
    normal, inverse = _normal(x[...].astype(jnp.float32), epsilon)
    incoming = gradient[...].astype(jnp.float32)
    for_sum = _for_total(incoming * vectors[0:1], normal, inverse)
    for_x[...] = (for_sum + beside[...].astype(jnp.float32)).astype(for_x.dtype)
    _add(sums, incoming * normal, incoming)


def _for_total(scaled: jax.Array, normal: jax.Array, inverse: jax.Array) -> jax.Array:
    """Return the gradient of the values that were normalized, for the gradient ``scaled`` of ``normal``."""
    mean = jnp.mean(scaled, axis=-1, keepdims=True)
    along = jnp.mean(scaled * normal, axis=-1, keepdims=True)
    return inverse * (scaled - mean - normal * along)


def _add(sums: Ref, *arrays: jax.Array) -> None:
    """Add eight partial sums of each array, so that whole registers are added without sums over their rows."""

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    for i, values in enumerate(arrays):
        sums[8 * i : 8 * i + 8] += jnp.sum(values.reshape(-1, 8, values.shape[-1]), axis=0)


def _total(
    vectors: Ref, product: Ref, residual: Ref, words: Sequence[Ref], dropout_rate: float
) -> tuple[jax.Array, jax.Array | None]:
    """Return the sum of the residual and the dropped product, and the dropout factor of each value (0 or the
    scale)."""
    dropped = product[...].astype(jnp.float32) + vectors[0:1]
    factor = None
    if dropout_rate:
        (of_tokens,) = words
        hashed = value_words(of_tokens[:, 0:1], of_tokens[:, 1:2], product.shape[1])
        halves = [hashed & 0xFFFF, jax.lax.shift_right_logical(hashed, 16)]
        factor = scale_or_drop(jnp.concatenate(halves, axis=1), dropout_rate)
        dropped = dropped * factor
    return residual[...].astype(jnp.float32) + dropped, factor


def _normal(total: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Return the normalized values and their inverse standard deviation."""
    centered = total - jnp.mean(total, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + epsilon)
    return centered * inverse, inverse


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def norm_beside(x_NxH: jax.Array, vectors: Arrays, epsilon: float, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Return LayerNorm of ``x`` over N tokens, computed in float32, and ``x``, the residual that bypasses the
    block. The backward pass then adds the gradients of both in the kernel. ``vectors``: scale and bias, each
    [H]."""
    kernel = functools.partial(_norm_forward_kernel, epsilon=epsilon)
    (out,) = _call(kernel, vectors, (), (x_NxH,), 1, 0, interpret, 10)
    return out, x_NxH


def _norm_forward(
    x: jax.Array, vectors: Arrays, epsilon: float, interpret: bool
) -> tuple[tuple[jax.Array, jax.Array], _Saved]:
    return norm_beside(x, vectors, epsilon, interpret), (x, vectors)


def _norm_backward(
    epsilon: float, interpret: bool, saved: _Saved, gradients: tuple[jax.Array, jax.Array]
) -> Gradients:
    x, vectors = saved
    kernel = functools.partial(_norm_backward_kernel, epsilon=epsilon)
    for_x, sums = _call(kernel, vectors, (), (x, *gradients), 1, 1, interpret, 31)
    by_vector = zip(sums.reshape(2, 8, -1), vectors, strict=True)
    return for_x, tuple(jnp.sum(s, axis=0).astype(v.dtype) for s, v in by_vector)


norm_beside.defvjp(_norm_forward, _norm_backward)
