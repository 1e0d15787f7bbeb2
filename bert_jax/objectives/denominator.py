"""What a sum of losses is divided by."""

import jax
import jax.numpy as jnp


def denominator(weights: jax.Array) -> jax.Array:
    """Sum of ``weights`` over the whole global batch (before it is split), or 1 where all are 0.

    For every loss but softmax_loss (class weights) and crf_loss (chains), which bring their own.
    """
    total = jnp.sum(weights)
    return jnp.where(total > 0, total, 1.0)
