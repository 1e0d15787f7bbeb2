"""The (sum, weight) pair, what makes it, and what a training step minimises."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

Sums = dict[str, tuple[jax.Array, jax.Array]]


class Objective(Protocol):
    """The loss is the sum over :meth:`denominators` of sum / denominator, over the global batch."""

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Denominator of each loss, of the whole global batch: known before its first forward pass."""
        ...

    def sums(
        self, model: Any, params: Any, batch: Mapping[str, jax.Array], key: Any, *, start: Any, axis: str | None
    ) -> Sums:
        """Losses and what is logged beside them, of some rows of the batch; ``padding_fraction`` among them.

        ``key``: of dropout, None for none. ``start``: the parameters that training started from (0 where
        they were drawn), where the state keeps them.
        ``axis``: the mesh axis over which other replicas compute the batch's other rows.
        """
        ...

    def damaged_rows(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """How many rows of the batch stand for records that could not be read."""
        ...


def weighted_cross_entropy(name: str, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Sums:
    """``{name}_loss`` and ``{name}_accuracy`` of float32 ``logits`` [..., V] against int ``labels`` [...]."""
    # One value and zeros: a gather from logits that two mesh axes cut crashes the compiler (design/sharding.md).
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    label_logits = jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    nll = jax.nn.logsumexp(logits, axis=-1) - label_logits
    # The largest is known from the loss; argmax would be one more pass over the logits.
    correct = (label_logits >= jnp.max(logits, axis=-1)).astype(jnp.float32)
    weight = jnp.sum(weights)
    return {
        f"{name}_loss": (jnp.sum(nll * weights), weight),
        f"{name}_accuracy": (jnp.sum(correct * weights), weight),
    }
