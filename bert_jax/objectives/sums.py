"""The (sum, weight) pair and what makes it."""

import jax
import jax.numpy as jnp

Sums = dict[str, tuple[jax.Array, jax.Array]]


def weighted_cross_entropy(name: str, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Sums:
    """``{name}_loss`` and ``{name}_accuracy`` of float32 ``logits`` [..., V] against int ``labels`` [...]."""
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - label_logits
    correct = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    weight = jnp.sum(weights)
    return {
        f"{name}_loss": (jnp.sum(nll * weights), weight),
        f"{name}_accuracy": (jnp.sum(correct * weights), weight),
    }
