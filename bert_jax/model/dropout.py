"""Dropout with explicit keys.

Linen derives the key of a module from its path in the module tree, which differs between scanned and unrolled
layers (logits differ by 8e-3). Here the index of the layer and the index of the dropout site are folded into the
key of the microbatch, so that scanned, unrolled and rematerialized layers use the same bits.

With threefry, a replica that computes some rows of a microbatch generates the bits that these rows have in the
complete microbatch, so that dropout is the same on every mesh. With rbg each replica has its own key.
"""

import math
from collections.abc import Sequence
from enum import IntEnum

import jax
import jax.numpy as jnp
from flax import struct
from jax.extend.random import threefry2x32_p


@struct.dataclass
class ShardKey:
    """Threefry key of a microbatch of ``rows`` rows, for arrays whose row 0 is row ``first_row`` of the
    microbatch."""

    key: jax.Array
    first_row: jax.Array  # uint32[]
    rows: int = struct.field(pytree_node=False)


# Key for arrays of all rows, or of some rows.
DropoutKey = jax.Array | ShardKey


def replica_key(key: jax.Array, replica: jax.Array, replicas: int, rows: int) -> DropoutKey:
    """Return the key of the replica with index ``replica``. Each of the ``replicas`` replicas computes ``rows``
    rows of a microbatch."""
    if jax.random.key_impl(key) == "threefry2x32":
        return ShardKey(key, replica.astype(jnp.uint32) * jnp.uint32(rows), rows * replicas)
    return jax.random.fold_in(key, replica)


class Site(IntEnum):
    """Sites of the model at which dropout is applied."""

    EMBEDDINGS = 0
    ATTENTION_PROBABILITIES = 1
    ATTENTION_OUTPUT = 2
    FEED_FORWARD_OUTPUT = 3
    TASK_HEAD = 4


def site_key(key: DropoutKey | None, layer: int | jax.Array, site: Site) -> DropoutKey | None:
    """Return the key of one dropout site; None (no dropout) if ``key`` is None. Layer 0 is the embeddings; encoder
    layers are 1 to L."""
    if key is None:
        return None
    folded = jax.random.fold_in(jax.random.fold_in(_whole(key), layer), int(site))
    return ShardKey(folded, key.first_row, key.rows) if isinstance(key, ShardKey) else folded


def _whole(key: DropoutKey) -> jax.Array:
    return key.key if isinstance(key, ShardKey) else key


def random_words(key: DropoutKey, shape: tuple[int, ...]) -> jax.Array:
    """Return an array of ``shape`` [rows, ...] with uniform random uint32 values. With a :class:`ShardKey`, each
    row has the values that it has in the array for the complete microbatch."""
    if not isinstance(key, ShardKey):
        return jax.random.bits(key, shape, jnp.uint32)
    # In JAX (partitionable threefry) a word is a hash of its 64-bit index in the flat array.
    high, low = _places(shape, key.first_row, key.rows)
    first, second = threefry2x32_p.bind(*jax.random.key_data(key.key), high, low)
    return first ^ second


def _places(shape: Sequence[int], first_row: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return the high and the low 32 bits (uint32) of the index that each element of an array of ``shape`` has in
    the flattened array of ``rows`` rows. The first row of ``shape`` is row ``first_row`` of that array."""
    row_size = math.prod(shape[1:])
    # A sum of one iota per dimension, which the compiler can partition over devices.
    within = jnp.zeros(shape, jnp.uint32)
    for dim in range(1, len(shape)):
        stride = jnp.uint32(math.prod(shape[dim + 1 :]))
        within += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * stride
    row = first_row + jax.lax.broadcasted_iota(jnp.uint32, (shape[0], *(1 for _ in shape[1:])), 0)
    start = row * jnp.uint32(row_size)
    low = start + within
    if rows * row_size <= 2**32:
        return jnp.zeros(shape, jnp.uint32), low
    high = jax.lax.mulhi(row, jnp.full_like(row, row_size))
    return high + (low < start).astype(jnp.uint32), low


def random_uint16(key: DropoutKey, shape: tuple[int, ...]) -> jax.Array:
    """Return uniform random uint16 values of ``shape``. Each 32-bit word yields two values, which halves the
    cost."""
    *leading, last = shape
    words = random_words(key, (*leading, -(-last // 2)))
    low, high = words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)
    return jnp.concatenate([low, high], axis=-1)[..., :last]


def dropout(x: jax.Array, rate: float, key: DropoutKey | None) -> jax.Array:
    """Zero each element with probability ``rate`` (exact to 2**-17) and scale all others by 1 / (1 - rate).

    If ``key`` is None or ``rate`` is 0, return ``x`` unchanged.
    """
    if key is None or rate == 0.0:
        return x
    threshold = min(max(round(rate * 65536), 1), 65535)
    keep = random_uint16(key, x.shape) >= jnp.uint16(threshold)
    return jnp.where(keep, x * jnp.asarray(65536 / (65536 - threshold), x.dtype), jnp.zeros((), x.dtype))
