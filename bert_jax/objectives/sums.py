"""(sum, weight) pairs: the form in which losses and metrics of microbatches, replicas and steps are added."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

Sums = dict[str, tuple[jax.Array, jax.Array]]


def denominator(weights: jax.Array) -> jax.Array:
    """Sum of ``weights`` over the whole global batch (before it is split), or 1 where all are 0.

    For every loss except softmax_loss (class weights) and crf_loss (chains), which have denominators of their own.
    """
    total = jnp.sum(weights)
    return jnp.where(total > 0, total, 1.0)


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


def padding_sums(batch: Mapping[str, jax.Array]) -> Sums:
    """``padding_fraction``: padding tokens among all tokens of the rows."""
    padding = (batch["sequence_ids"] == 0).astype(jnp.float32)
    return {"padding_fraction": (jnp.sum(padding), jnp.asarray(padding.size, jnp.float32))}
