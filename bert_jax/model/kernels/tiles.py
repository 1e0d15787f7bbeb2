"""Definitions that the attention kernels for TPUs and GPUs share."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bert_jax.model.dropout import drop_threshold

LOG2_E = math.log2(math.e)
# Finite, so that no sum becomes NaN.
MASKED_SCORE = -1e9


@dataclass(frozen=True)
class Form:
    """Static properties of the attention: size of a head, dropout rate, and which keys a query of the same sequence
    sees: those at most ``window`` tokens away (0: no limit), with ``causal`` no later ones. ``rotary``: the kernel
    applies rotary positions to query and key (TPU). ``capability``: compute capability of the GPU."""

    head_size: int
    dropout_rate: float = 0.0
    window: int = 0
    causal: bool = False
    rotary: bool = False
    capability: float = 9.0

    @property
    def scale_of_kept(self) -> float:
        """Factor of the probabilities that dropout keeps."""
        return 65536 / (65536 - drop_threshold(self.dropout_rate)) if self.dropout_rate else 1.0


def seeing(most: jax.Array, total: jax.Array, logarithm: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
    """Return 1 / ``total``, the sum of the exponentials of the scores minus ``most``, and ``most`` plus its
    logarithm. Both are 0 for queries that see no key, whose context and gradients are then 0."""
    sees = most > MASKED_SCORE / 2
    total = jnp.where(sees, total, 1.0)
    return [jnp.where(sees, x, 0.0) for x in (1 / total, most + logarithm(total))]


def dot(left: jax.Array, right: jax.Array, left_dim: int = 1, right_dim: int = 0) -> jax.Array:
    """Return the float32 product of two matrices, summed over one dimension of each."""
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def biased(product: jax.Array, bias: jax.Array) -> jax.Array:
    """Return ``product`` plus the float32 ``bias``, in the dtype of ``product``."""
    return (product.astype(jnp.float32) + bias).astype(product.dtype)
