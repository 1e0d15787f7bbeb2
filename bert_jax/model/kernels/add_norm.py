"""Bias, dropout, residual and LayerNorm after a matrix product, with the kernels for TPUs or those for GPUs; and
LayerNorm before a block, with the kernel for TPUs."""

import functools
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.config.architecture import ModelConfig
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.kernels import common
from bert_jax.model.kernels.operands import Arrays
from bert_jax.parallel.axes import Axes

# Product, residual, vectors and tokens, for the backward pass.
_Saved = tuple[jax.Array, jax.Array, Arrays, Arrays]


class Kernels(Protocol):
    """Functions of ``tpu_norm`` and ``gpu_norm``. ``vectors``, ``tokens`` and the rest: see :func:`add_norm`."""

    def forward(
        self, arrays: Arrays, vectors: Arrays, tokens: Arrays, epsilon: float, rate: float, interpret: bool
    ) -> jax.Array:
        """Return the normalized sums of ``arrays``, the product and the residual."""
        ...

    def backward(
        self, arrays: Arrays, vectors: Arrays, tokens: Arrays, epsilon: float, rate: float, interpret: bool
    ) -> Sequence[jax.Array]:
        """Return the gradients of the product and the residual, and of each vector some sums, float32[3, n, H];
        ``arrays`` are the product, the residual and the gradient of the result."""
        ...


def norm_kernels_of(choice: str, mesh: Mesh | None, model: ModelConfig, length: int) -> Kernels | None:
    """Return the kernels that ``choice``, the value of ``execution.residual_norm``, selects; None for none. Raises
    ``ValueError`` for ``pallas`` if they cannot run."""
    name = common.kernels_for(mesh)

    def unsupported() -> str:
        return str(common.kernel_module(name, "norm").unsupported(model, length))

    return (
        common.kernel_module(name, "norm")
        if common.use_kernel(choice, "residual_norm", mesh, unsupported)
        else None
    )


def kernel_add_norm(
    product_BxSxH: jax.Array,
    residual_BxSxH: jax.Array,
    vectors: Arrays,
    *,
    epsilon: float,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
    kernels: Kernels,
    mesh: Mesh | None,
) -> jax.Array:
    """Compute :func:`add_norm` of the tokens that each device of ``mesh`` holds. Returns [B, S, H]."""
    rate = 0.0 if dropout_key is None else dropout_rate
    tokens = []  # the words of the dropout bits of each token
    if dropout_key is not None and rate:
        tokens.append(jnp.stack(common.token_key(dropout_key, *product_BxSxH.shape[:2]).words(), axis=-1))

    def run(_: jax.Array, product: jax.Array, residual: jax.Array, *others: jax.Array) -> jax.Array:
        words = tuple(y.reshape(-1, y.shape[-1]) for y in others[3:])
        interpret = common.platform_of(mesh) != common.kernels_for(mesh)
        return add_norm(product, residual, others[:3], words, epsilon, rate, kernels, interpret)

    cut: Axes = ("act_batch", "act_length", "act_embed")
    axes = (cut, cut, (None,), (None,), (None,), *[(*cut[:2], None)] * len(tokens))
    return common.shard_mapped(run, mesh, axes, cut)(product_BxSxH, residual_BxSxH, *vectors, *tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def add_norm(
    product_BxSxH: jax.Array,
    residual_BxSxH: jax.Array,
    vectors: Arrays,
    tokens: Arrays,
    epsilon: float,
    dropout_rate: float,
    kernels: Kernels,
    interpret: bool,
) -> jax.Array:
    """Compute ``LayerNorm(residual + dropout(product + bias))`` over the N tokens of all rows in float32.
    Returns [B, S, H] (or [N, H], as the inputs) in the dtype of the residual.

    ``vectors`` contains the bias, and the scale and the bias of LayerNorm, each [H]. ``tokens`` contains the words
    of ``bert_jax.model.dropout.TokenKey`` for each token, int32[N, 2]; it is empty if ``dropout_rate`` is 0.
    ``interpret`` runs the kernels on any device.
    """
    arrays = _flat(product_BxSxH), _flat(residual_BxSxH)
    out = kernels.forward(arrays, vectors, tokens, epsilon, dropout_rate, interpret)
    return out.reshape(residual_BxSxH.shape)


def _flat(x: jax.Array) -> jax.Array:
    """Return the tokens of all rows, [N, H]."""
    return x.reshape(-1, x.shape[-1])


def _forward(
    product: jax.Array, residual: jax.Array, vectors: Arrays, tokens: Arrays,
    epsilon: float, dropout_rate: float, kernels: Kernels, interpret: bool,
) -> tuple[jax.Array, _Saved]:  # fmt: skip
    out = add_norm(product, residual, vectors, tokens, epsilon, dropout_rate, kernels, interpret)
    # In a loop over layers both are kept in stacked arrays: the product in the shape in which it is written there,
    # the residual in the shape in which it is kept for the products that read it, so that it is kept once.
    return out, (_flat(product), residual, vectors, tokens)


def _backward(
    epsilon: float, dropout_rate: float, kernels: Kernels, interpret: bool, saved: _Saved, gradient: jax.Array
) -> common.Gradients:
    product, residual, vectors, tokens = saved
    arrays = (product, _flat(residual), _flat(gradient))
    *gradients, sums = kernels.backward(arrays, vectors, tokens, epsilon, dropout_rate, interpret)
    for_vectors = tuple(jnp.sum(x, axis=0).astype(v.dtype) for x, v in zip(sums, vectors, strict=True))
    # Gradients of integers have the dtype float0.
    gradients = [x.reshape(residual.shape) for x in gradients]
    return *gradients, for_vectors, tuple(np.zeros(x.shape, jax.dtypes.float0) for x in tokens)


add_norm.defvjp(_forward, _backward)


def kernel_norm(
    x_BxSxH: jax.Array, vectors: Arrays, *, epsilon: float, mesh: Mesh | None
) -> tuple[jax.Array, jax.Array]:
    """Return ``tpu_norm.norm_beside`` of the tokens that each device of ``mesh`` holds, twice [B, S, H]."""

    def run(_: jax.Array, x: jax.Array, *vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
        interpret = common.platform_of(mesh) != "tpu"
        first, second = common.kernel_module("tpu", "norm").norm_beside(
            x.reshape(-1, x.shape[-1]), vectors, epsilon, interpret
        )
        return first.reshape(x.shape), second.reshape(x.shape)

    cut: Axes = ("act_batch", "act_length", "act_embed")
    return common.shard_mapped(run, mesh, (cut, (None,), (None,)), cut)(x_BxSxH, *vectors)
