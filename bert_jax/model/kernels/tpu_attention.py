"""Attention as TPU kernels (Pallas), forward and backward, including dropout of the probabilities.

Scores and probabilities never reach the main memory of the device. The kernels read query, key and value in the
layout of the projections, [batch, tokens, hidden size], and write the context in the same layout, so that heads
are never transposed. The backward pass recomputes the probabilities and the dropout bits.

A block contains one or more rows with all their tokens and, of each token, the 128 lanes of 128 / head size heads.
A head is selected by setting the lanes of the other heads to zero, not by slicing: the matrix unit is 128 wide
anyway, and no lanes have to be moved. A tile of scores is transposed, [keys, queries]: sums over the keys add whole
registers, and the values of a query are a row, which registers repeat for free.

In rows of up to 512 tokens, and within windows, a query sees the keys of one tile. In longer rows tiles follow each
other (online softmax, Dao et al. 2022); those that no query of a block sees are skipped.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from bert_jax.config.architecture import ModelConfig
from bert_jax.config.switches import unsupported_fields
from bert_jax.model.kernels.common import LANES, SUPPORTED, Gradients, stated_cost
from bert_jax.model.kernels.operands import Arrays
from bert_jax.model.kernels.ranges import Ranges
from bert_jax.model.kernels.tiles import Form
from bert_jax.model.kernels.tpu_attention_bodies import Tiles, Work, backward_kernel, forward_kernel

# Most tokens of a row, and what the backward pass keeps of a token (float32) and of a tile in the fast memory.
MAX_LENGTH = 8192
_TOKEN_BYTES = 2 * (8 * 4 * LANES + 4 * LANES) + 2 * 4 * LANES
# Memory of rotary positions: two factors, read while the previous block's are used, and the rotated key.
_ROTARY_BYTES = 2 * (2 * 4 * LANES) + 4 * LANES
_TILE_BYTES = 4 * 2**20
_HEAD_SIZES = (16, 32, 64, 128)
# Tokens of one block.
_BLOCK_TOKENS = 1024


def unsupported(model: ModelConfig, length: int, parts: int = 1, fast_memory: int = 2**27) -> str:
    """Return the reason why the kernel cannot run rows of ``length`` tokens if the heads of ``model`` are divided
    into ``parts`` equal groups, one per device, which has ``fast_memory`` bytes of vector memory. Return "" if the
    kernel can run."""
    head_size = model.head_size
    for line in unsupported_fields(model, SUPPORTED, "the attention kernel"):
        return line
    if length % LANES or length > MAX_LENGTH:
        return f"length {length} is not a multiple of {LANES} up to {MAX_LENGTH}"
    if length > _BLOCK_TOKENS and _memory_of(length, model.position_embeddings == "rotary") > fast_memory:
        return f"length {length} does not fit into {fast_memory // 2**20} MiB of vector memory"
    for heads in model.heads_by_layer:
        width = heads * head_size // parts
        if head_size not in _HEAD_SIZES or width % LANES:
            return f"width {width} with heads of size {head_size} does not fill blocks of {LANES}"
    return ""


def _memory_of(length: int, is_rotary: bool) -> int:
    """Return the bytes of fast memory that rows of ``length`` tokens need."""
    return length * (_TOKEN_BYTES + is_rotary * _ROTARY_BYTES) + _TILE_BYTES


# Query, key and value [N, H], biases, tokens of queries and of keys, turns, first head, context and logarithms of
# the sums, for the backward pass.
_Saved = tuple[
    jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, Arrays, jax.Array, jax.Array,
    jax.Array,
]  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(8, 9))
def attend(
    query_BxSxH: jax.Array,
    key_BxSxH: jax.Array,
    value_BxSxH: jax.Array,
    biases_3xH: jax.Array,
    query_tokens_BxIxS: jax.Array,
    key_tokens_BxSxJ: jax.Array,
    turns: Arrays,
    first_head_1: jax.Array,
    form: Form,
    interpret: bool,
) -> jax.Array:
    """Return scaled dot-product attention, with the shape and dtype of the query, [batch, tokens, hidden size].

    The float32 ``biases`` are added to query, key and value here, because their gradients, which are sums over all
    tokens, would otherwise need further passes through memory. ``interpret`` runs the kernel on any device, slowly.

    Args:
        query_tokens_BxIxS: int32: the sequence id of each token, which determines the keys that the token sees
            (``bert_jax.model.kernels.ranges.visible_keys``); with dropout, also its two words of
            ``bert_jax.model.dropout.TokenKey``.
        key_tokens_BxSxJ: int32: the sequence id of each token; with dropout, also its position in its sequence.
        turns: with ``form.rotary``, what :func:`rotary_turns` returns for the tokens; else empty.
        first_head_1: int32: the index of the first head of ``query``; even if a block has several heads.
    """
    heads, tokens = (query_BxSxH, key_BxSxH, value_BxSxH), (query_tokens_BxIxS, key_tokens_BxSxJ)
    return _forward(*heads, biases_3xH, *tokens, turns, first_head_1, form, interpret)[0]


def rotary_turns(cos_BxSxE: jax.Array, sin_BxSxE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the factors of each lane and of its pair, each float32[B, S, 128], for those of
    ``bert_jax.model.positions.rotary_factors``."""
    heads = LANES // (2 * cos_BxSxE.shape[-1])
    pair = jnp.concatenate([-sin_BxSxE, sin_BxSxE], axis=-1)
    return jnp.tile(cos_BxSxE, 2 * heads), jnp.tile(pair, heads)


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, biases: jax.Array, query_tokens: jax.Array,
    key_tokens: jax.Array, turns: Arrays, first_head: jax.Array, form: Form, interpret: bool,
) -> tuple[jax.Array, _Saved]:  # fmt: skip
    common = (biases, query_tokens, key_tokens, turns, first_head)
    out, log_sums = _Call(query, *common, form, interpret).run(forward_kernel, (query, key, value), (query,))
    # A loop over layers keeps them in stacked arrays, where products of matrices write in their own shape, [N, H].
    query, key, value = (x.reshape(-1, x.shape[-1]) for x in (query, key, value))
    return out, (query, key, value, *common, out, log_sums)


def _backward(form: Form, interpret: bool, saved: _Saved, gradient: jax.Array) -> Gradients:
    query, key, value, biases, query_tokens, key_tokens, turns, first_head, out, log_sums = saved
    call = _Call(out, biases, query_tokens, key_tokens, turns, first_head, form, interpret)
    arrays = (*(x.reshape(out.shape) for x in (query, key, value)), out, gradient)
    *gradients, sums = call.run(backward_kernel, arrays, arrays[:3], log_sums)
    for_biases = jnp.sum(sums.reshape(-1, 3, 8, sums.shape[-1]), axis=(0, 2))
    # Gradients of integers have the dtype float0.
    zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in (query_tokens, key_tokens, first_head)]
    return (*gradients, for_biases, *zeros[:2], tuple(jnp.zeros_like(x) for x in turns), zeros[2])


attend.defvjp(_forward, _backward)


class _Call:
    """The calls of the kernels for operands of one shape."""

    def __init__(
        self, like: jax.Array, biases: jax.Array, query_tokens: jax.Array, key_tokens: jax.Array,
        turns: Arrays, first_head: jax.Array, form: Form, interpret: bool,
    ) -> None:  # fmt: skip
        self.batch, self.length, self.width = like.shape
        self.biases, self.tokens, self.first_head = biases, (query_tokens, key_tokens, *turns), first_head
        self.form, self.interpret, self.kind = form, interpret, jax.typeof(like).manual_axis_type
        self.rows = next(r for r in range(max(_BLOCK_TOKENS // self.length, 1), 0, -1) if self.batch % r == 0)

    def run(
        self, kernel: Callable[..., None], arrays: Arrays, results: Arrays, log_sums: jax.Array | None = None
    ) -> list[jax.Array]:
        """Run ``kernel`` on blocks of rows and heads. The forward pass returns the context and, per head and token,
        the logarithms of the sums of the exponentials, [batch, 8 or more rows per block, tokens]. The
        backward pass returns the gradients and eight float32 partial sums of the gradient of each of the three
        biases, [blocks of rows, 3 * 8, hidden size].
        """
        rows, length, blocks = self.rows, self.length, self.width // LANES
        tiles = Tiles(length, self.form)
        block = pl.BlockSpec((rows, length, LANES), lambda i, j, *_: (i, 0, j))
        heads = max(8, LANES // self.form.head_size)
        of_sums = pl.BlockSpec((rows, heads, length), lambda i, j, *_: (i, j, 0))
        in_specs = [
            pl.BlockSpec((3, LANES), lambda i, j, *_: (0, j)),
            *(pl.BlockSpec((rows, *x.shape[1:]), lambda i, j, *_: (i, 0, 0)) for x in self.tokens),
            *[block] * len(arrays),
        ]
        operands = [self.biases, *self.tokens, *arrays]
        out_shape = [self._shape(x.shape, x.dtype) for x in results]
        out_specs, scratch = [block] * len(results), []
        if log_sums is None:
            out_shape.append(self._shape((self.batch, heads * blocks, length)))
            out_specs.append(of_sums)
        else:
            operands.append(log_sums)
            in_specs.append(of_sums)
            out_shape.append(self._shape((self.batch // rows, 24, self.width)))
            out_specs.append(pl.BlockSpec((1, 24, LANES), lambda i, j, *_: (i, 0, j)))
            scratch = [pltpu.VMEM((length, LANES), jnp.float32)] * 2
        if self.form.rotary and not tiles.is_row:
            scratch.append(pltpu.VMEM((length, LANES), arrays[0].dtype))
        bounds = jnp.zeros((1, 1, 2), jnp.int32)
        if tiles.is_loop:
            bounds = Ranges(self.tokens[0][:, 0], 0, self.form.causal).of_queries(tiles.queries, tiles.keys)
        return pl.pallas_call(
            functools.partial(kernel, form=self.form),
            out_shape=out_shape,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(self.batch // rows, blocks),
                in_specs=in_specs,
                out_specs=out_specs,
                scratch_shapes=scratch,
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel"),
                vmem_limit_bytes=_memory_of(length, self.form.rotary) if length > _BLOCK_TOKENS else None,
            ),
            cost_estimate=self._estimate(tiles, arrays, len(results)),
            metadata=self._cost(tiles, arrays, len(results)),
            interpret=self.interpret,
            name="attention_" + kernel.__name__.removesuffix("_kernel"),
        )(self.first_head, bounds.reshape(-1), *operands)

    def _cost(self, tiles: Tiles, arrays: Arrays, results: int) -> dict[str, str]:
        """Return the cost of a kernel with ``results`` outputs, by the units of the chip."""
        blocks = self.batch * self.width // LANES
        work = Work(tiles, self.form, is_backward=results > 1)
        num_bytes = self._estimate(tiles, arrays, results).bytes_accessed
        steps = blocks * work.steps + blocks / self.rows
        return stated_cost(blocks * work.matrix, num_bytes, blocks * work.vector, steps, work.overlap)

    def _estimate(self, tiles: Tiles, arrays: Arrays, results: int) -> pl.CostEstimate:
        """Return the operations and bytes of a kernel with ``results`` outputs of the shape of the first array."""
        seen = tiles.keys if tiles.is_window else self.length
        scores = self.batch * self.length * seen * self.width
        return pl.CostEstimate(
            flops=2 * (2 if results == 1 else 5) * scores,
            transcendentals=scores // self.form.head_size,
            bytes_accessed=(len(arrays) + results) * arrays[0].size * arrays[0].dtype.itemsize
            + sum(x.size * x.dtype.itemsize for x in self.tokens),
        )

    def _shape(self, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=self.kind)
