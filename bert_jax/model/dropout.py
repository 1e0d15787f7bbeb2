"""Dropout with explicit keys.

Linen derives a module's key from its place in the tree, which differs between scanned and unrolled layers
(logits 8e-3 apart). Here every site folds its layer and its own number into one key per microbatch, so
scanned, unrolled and rematerialised layers draw the same bits.
"""

from enum import IntEnum

import jax
import jax.numpy as jnp


class Site(IntEnum):
    """Places of one layer that drop values."""

    EMBEDDINGS = 0
    ATTENTION_PROBABILITIES = 1
    ATTENTION_OUTPUT = 2
    FEED_FORWARD_OUTPUT = 3
    TASK_HEAD = 4


def site_key(key: jax.Array | None, layer: int | jax.Array, site: Site) -> jax.Array | None:
    """Key of one dropout site; ``None`` (no dropout) stays ``None``. Layer 0 is the embeddings, then 1..L."""
    if key is None:
        return None
    return jax.random.fold_in(jax.random.fold_in(key, layer), int(site))


def random_uint16(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform uint16 of ``shape``. Two draws share each 32-bit word, halving the cost of the generator."""
    *leading, last = shape
    words = jax.random.bits(key, (*leading, -(-last // 2)), jnp.uint32)
    low, high = words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)
    return jnp.concatenate([low, high], axis=-1)[..., :last]


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero each element with probability ``rate`` (exact to 2**-17) and scale the rest by 1 / (1 - rate).

    ``key`` None or ``rate`` 0 returns ``x`` unchanged.
    """
    if key is None or rate == 0.0:
        return x
    threshold = min(max(round(rate * 65536), 1), 65535)
    keep = random_uint16(key, x.shape) >= jnp.uint16(threshold)
    return jnp.where(keep, x * jnp.asarray(65536 / (65536 - threshold), x.dtype), jnp.zeros((), x.dtype))
