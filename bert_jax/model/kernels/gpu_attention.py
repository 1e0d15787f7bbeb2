"""Attention as GPU kernels (Pallas, lowered through Triton), forward and backward.

Scores and probabilities never reach the main memory of the device (Dao et al. 2022, with the loops of Dao 2023).
The kernels read query, key and value in the layout of the projections, [batch, tokens, hidden size], skip the
blocks of keys that no query of a block sees, and compute dropout bits where they are used. The backward pass
computes the probabilities and the bits again: in one kernel for short rows, else in one per block of queries and
one per block of keys. A program computes one head.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from bert_jax.config.architecture import ModelConfig
from bert_jax.config.switches import unsupported_fields
from bert_jax.model.kernels import gpu_attention_bodies as bodies
from bert_jax.model.kernels.common import SUPPORTED, Gradients, stated_cost, triton
from bert_jax.model.kernels.operands import Arrays, Operand
from bert_jax.model.kernels.ranges import Ranges
from bert_jax.model.kernels.tiles import Form

# Head sizes for which the kernels have block sizes, and the least block of tokens that a matrix unit multiplies.
_HEAD_SIZES = (16, 32, 64, 128)
_LEAST_BLOCK = 16


def unsupported(model: ModelConfig, length: int, parts: int = 1) -> str:
    """Return the reason why the kernels cannot run rows of ``length`` tokens if the heads of ``model`` are divided
    into ``parts`` equal groups, one per device. Return "" if they can run."""
    if triton() is None:
        return "this version of jax has no Triton kernels"
    for line in unsupported_fields(model, SUPPORTED, "the attention kernel"):
        return line
    if length % _LEAST_BLOCK:
        return f"length {length} is not a multiple of {_LEAST_BLOCK}"
    if model.head_size not in _HEAD_SIZES:
        return f"heads of size {model.head_size} are not supported (supported: {', '.join(map(str, _HEAD_SIZES))})"
    for heads in model.heads_by_layer:
        if heads % parts:
            return f"{heads} heads cannot be divided into {parts} parts"
    return ""


# Heads, biases, tokens, first head, context and logarithms of the sums, for the backward pass.
_Saved = tuple[Arrays, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend(
    heads: Arrays,
    biases_3xH: jax.Array,
    tokens_BxIxS: jax.Array,
    first_head_1: jax.Array,
    form: Form,
    interpret: bool,
) -> jax.Array:
    """Return scaled dot-product attention, [batch, tokens, hidden size], in the dtype of the heads.

    The float32 ``biases`` are added to query, key and value here, because their gradients, which are sums over all
    tokens, would otherwise need further passes through memory. ``interpret`` runs the kernels on any device,
    slowly.

    Args:
        heads: query, key and value, each [batch, tokens, hidden size], or one array [batch, tokens, 3, hidden
        size].
        tokens_BxIxS: int32: the sequence id of each token, which determines the keys that the token sees
            (``bert_jax.model.kernels.ranges.visible_keys``); with dropout, also its two words of
            ``bert_jax.model.dropout.TokenKey`` and its position in its sequence.
        first_head_1: int32: the index of the first head of the query.
    """
    return _forward(heads, biases_3xH, tokens_BxIxS, first_head_1, form, interpret)[0]


def _forward(
    heads: Arrays, biases: jax.Array, tokens: jax.Array, first_head: jax.Array, form: Form, interpret: bool
) -> tuple[jax.Array, _Saved]:
    out, log_sums = _Call(heads, biases, tokens, first_head, form, interpret).forward()
    return out, (heads, biases, tokens, first_head, out, log_sums)


def _backward(form: Form, interpret: bool, saved: _Saved, gradient: jax.Array) -> Gradients:
    heads, biases, tokens, first_head, out, log_sums = saved
    call = _Call(heads, biases, tokens, first_head, form, interpret)
    if bodies.holds_row(tokens.shape[-1], form, heads[0].dtype):
        *for_heads, sums_q, sums_k, sums_v = call.for_rows(out, log_sums, gradient)
    else:
        for_query, deltas, sums_q = call.for_queries(out, log_sums, gradient)
        *for_heads, sums_k, sums_v = call.for_keys(for_query, log_sums, deltas, gradient)
        for_heads = [for_query, *for_heads][-len(heads) :]
    for_biases = jnp.stack([jnp.sum(sums, axis=(0, 1)) for sums in (sums_q, sums_k, sums_v)])
    # Gradients of integers have the dtype float0.
    zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in (tokens, first_head)]
    return tuple(for_heads), for_biases, *zeros


attend.defvjp(_forward, _backward)

# Products of matrices per tile of scores.
_PRODUCTS = {
    "forward_kernel": 2, "for_rows_kernel": 5, "for_queries_kernel": 3, "for_keys_kernel": 4,
    "for_keys_in_one_kernel": 4,
}  # fmt: skip
# An array and its block in a program.
_Operand = tuple[Operand, pl.BlockSpec]


class _Call:
    """The calls of the kernels for operands of one shape."""

    def __init__(
        self, heads: Arrays, biases: jax.Array, tokens: jax.Array, first_head: jax.Array, form: Form,
        interpret: bool,
    ) -> None:  # fmt: skip
        self.batch, self.length, self.width = (*heads[0].shape[:2], heads[0].shape[-1])
        self.heads, self.biases, self.tokens, self.first_head = heads, biases, tokens, first_head
        self.dtype, self.form, self.interpret = heads[0].dtype, form, interpret
        self.kind = jax.typeof(heads[0]).manual_axis_type
        self.ranges = Ranges(tokens[:, 0], form.window, form.causal)

    def _shape(self, *shape: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=self.kind)

    # The blocks of a program for block i of the tokens, head h and row b.

    def _part(self, x: Operand, tokens: int = 0, index: int = 0) -> _Operand:
        """Return ``x`` with its block of one head: block i of ``tokens`` tokens, or all tokens. ``index`` selects
        query, key or value of an array that contains all three."""
        own, place = (tokens or self.length), (lambda i: i if tokens else 0)
        if len(x.shape) == 3:
            return x, pl.BlockSpec((None, own, self.form.head_size), lambda i, h, b: (b, place(i), h))
        spec = pl.BlockSpec((None, own, None, self.form.head_size), lambda i, h, b: (b, place(i), index, h))
        return x, spec

    def _head(self, index: int, tokens: int = 0) -> _Operand:
        """Return query, key or value with its block, as :meth:`_part` does."""
        return self._part(self.heads[index % len(self.heads)], tokens, index)

    def _column(self, x: jax.Array | None = None) -> _Operand:
        """Return float32 values per head and token, those of a head in a block."""
        like = self._shape(self.batch, self.width // self.form.head_size, self.length) if x is None else x
        return like, pl.BlockSpec((None, None, self.length), lambda i, h, b: (b, h, 0))

    def _sums(self, tokens: int) -> _Operand:
        """Return the shape of sums over the tokens of each block."""
        shape = self._shape(self.batch, self.length // tokens, self.width)
        return shape, pl.BlockSpec((None, None, self.form.head_size), lambda i, h, b: (b, i, h))

    def _cost(
        self, kernel: Callable[..., None], blocks: bodies.Blocks, tokens: int, arrays: list[_Operand]
    ) -> dict[str, str]:
        """Return the operations of ``kernel`` and its bytes. What each program reads of its row is counted as often
        as it is read; blocks outside of the window are not."""
        seen = (
            min(self.length, 2 * self.form.window + tokens + 2 * blocks.keys) if self.form.window else self.length
        )
        programs, num_bytes = self.length // tokens, 0.0
        for x, spec in arrays:
            sizes = [size if isinstance(size, int) else 1 for size in spec.block_shape or ()]
            num_bytes_of_block = math.prod(sizes) * jnp.dtype(x.dtype).itemsize
            is_row = self.length in sizes and programs > 1
            num_bytes += num_bytes_of_block * (seen / self.length if is_row else 1)
        heads = self.width // self.form.head_size
        products = _PRODUCTS[kernel.__name__]
        operations = 2 * products * self.batch * self.length * seen * self.width
        return stated_cost(operations, num_bytes * programs * heads * self.batch)

    def _run(
        self, kernel: Callable[..., None], blocks: bodies.Blocks, tokens: int, bounds: jax.Array,
        operands: list[_Operand], outputs: list[_Operand], aliases: dict[int, int],
        moved: list[_Operand] | None = None,
    ) -> list[jax.Array]:  # fmt: skip
        """Run ``kernel`` for each head of each row and each ``tokens`` tokens. ``aliases`` maps operands to the
        outputs that take their memory. ``moved``: the arrays that it reads and writes, if not all."""
        common = [
            (self.first_head, pl.BlockSpec((1,), lambda i, h, b: (0,))),
            (bounds, pl.BlockSpec((None, None, 2), lambda i, h, b: (b, i, 0))),
            (self.biases.astype(jnp.float32), pl.BlockSpec((3, self.form.head_size), lambda i, h, b: (0, h))),
            (self.tokens, pl.BlockSpec((None, *self.tokens.shape[1:]), lambda i, h, b: (b, 0, 0))),
        ]
        return pl.pallas_call(
            functools.partial(kernel, form=self.form, blocks=blocks),
            out_shape=[shape for shape, _ in outputs],
            # Programs of one row and head follow each other, so what they read again is in the cache.
            grid=(self.length // tokens, self.width // self.form.head_size, self.batch),
            in_specs=[spec for _, spec in [*common, *operands]],
            out_specs=[spec for _, spec in outputs],
            metadata=self._cost(kernel, blocks, tokens, moved or [*operands, *outputs]),
            input_output_aliases={len(common) + i: j for i, j in aliases.items()},
            compiler_params=triton().CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
            interpret=self.interpret,
            name="attention_" + kernel.__name__.removesuffix("_kernel"),
        )(*(x for x, _ in [*common, *operands]))

    def forward(self) -> list[jax.Array]:
        """Return the context and, per head and token, the logarithm (base 2) of the sum of the exponentials."""
        blocks = bodies.block_sizes("forward", self.length, self.form, self.dtype)
        step = blocks.queries
        bounds = self.ranges.of_queries(step, blocks.keys)
        out = self._shape(self.batch, self.length, self.width, dtype=self.dtype)
        operands = [self._head(0, step), self._head(1), self._head(2)]
        return self._run(
            bodies.forward_kernel, blocks, step, bounds, operands, [self._part(out, step), self._column()], {}
        )

    def for_rows(self, out: jax.Array, log_sums: jax.Array, gradient: jax.Array) -> list[jax.Array]:
        """Return the gradients of the heads and the sums over the tokens of each row, which are those of their
        biases."""
        blocks = bodies.block_sizes("for_rows", self.length, self.form, self.dtype)
        bounds = self.ranges.of_queries(self.length, blocks.keys)
        operands = [self._head(0), self._head(1), self._head(2), self._part(out), self._part(gradient)]
        operands.append(self._column(log_sums))
        like = self._shape(*self.heads[0].shape, dtype=self.dtype)
        outputs = [self._part(like)] * 3
        if len(self.heads) == 1:
            block = pl.BlockSpec((None, self.length, 3, self.form.head_size), lambda i, h, b: (b, 0, 0, h))
            outputs = [(like, block)]
        outputs += [self._sums(self.length)] * 3
        return self._run(bodies.for_rows_kernel, blocks, self.length, bounds, operands, outputs, {})

    def for_queries(self, out: jax.Array, log_sums: jax.Array, gradient: jax.Array) -> list[jax.Array]:
        """Return the gradient of the query (in one array with room for those of key and value, if they are in one
        array), the sums over the context times its gradient per head and token, and partial sums of the gradient of
        the bias."""
        blocks = bodies.block_sizes("for_queries", self.length, self.form, self.dtype)
        step = blocks.queries
        bounds = self.ranges.of_queries(step, blocks.keys)
        operands = [self._head(0, step), self._head(1), self._head(2), self._part(out, step)]
        operands += [self._part(gradient, step), self._column(log_sums)]
        for_query = self._shape(*self.heads[0].shape, dtype=self.dtype)
        outputs = [self._part(for_query, step), self._column(), self._sums(step)]
        return self._run(bodies.for_queries_kernel, blocks, step, bounds, operands, outputs, {})

    def for_keys(
        self, for_query: jax.Array, log_sums: jax.Array, deltas: jax.Array, gradient: jax.Array
    ) -> list[jax.Array]:
        """Return the gradients of key and value (or of all three in one array, the memory of ``for_query``), and
        partial sums of the gradients of their biases."""
        blocks = bodies.block_sizes("for_keys", self.length, self.form, self.dtype)
        step = blocks.keys
        bounds = self.ranges.of_keys(blocks.queries, step)
        operands = [self._head(0), self._head(1, step), self._head(2, step), self._part(gradient)]
        operands += [self._column(log_sums), self._column(deltas)]
        sums, like = [self._sums(step)] * 2, self._shape(*self.heads[0].shape, dtype=self.dtype)
        if len(self.heads) == 3:
            outputs = [self._part(like, step)] * 2
            return self._run(bodies.for_keys_kernel, blocks, step, bounds, operands, [*outputs, *sums], {})
        block = pl.BlockSpec((None, step, 3, self.form.head_size), lambda i, h, b: (b, i, 0, h))
        moved = [*operands, self._part(like, step), self._part(like, step), *sums]
        operands.append((for_query, block))
        kernel, aliases = bodies.for_keys_in_one_kernel, {len(operands) - 1: 0}
        return self._run(kernel, blocks, step, bounds, operands, [(like, block), *sums], aliases, moved)
