"""Dropout with explicit keys.

``execution.prng`` chooses the random bits. With ``hash``, the bits of a token are a hash of the step, the layer,
the site, the key of its sequence and its position in the sequence (:class:`TokenKey`). They depend neither on the
device, the mesh or the microbatch of the token, nor on the other sequences of its row, and the TPU kernels compute
the same bits.

With ``threefry``, a replica that computes some rows of a microbatch generates the bits that these rows have in the
complete microbatch (:class:`ShardKey`), so that dropout is the same on every mesh. With ``rbg`` each replica has a
different key.

Linen derives the key of a module from its path in the module tree, which differs between scanned and unrolled
layers (logits differ by 8e-3). Here the index of the layer and the index of the dropout site are folded into the
key, so that scanned, unrolled and rematerialized layers use the same bits.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.extend.random import threefry2x32_p

# Odd constants that separate the bits of pairs of heads (32-bit words of the golden ratio and of xxHash).
_FIRST_OF_PAIR, _SECOND_OF_PAIR = (np.uint32(word).astype(np.int32) for word in (0x9E3779B1, 0x85EBCA77))


# Features of a batch from which the keys of tokens follow.
TOKEN_FEATURES = ("sequence_keys", "sequence_ids", "position_ids")


@struct.dataclass
class ShardKey:
    """Threefry key of a microbatch of ``rows`` rows, for arrays whose row 0 is row ``first_row`` of the
    microbatch."""

    key: jax.Array
    first_row: jax.Array  # uint32[]
    rows: int = struct.field(pytree_node=False)


@struct.dataclass
class TokenKey:
    """Dropout key of tokens [B, S]; the dropout bits of each token are hashes of its parts."""

    key: jax.Array  # threefry key of a step, or of one of its sites
    sequence_keys: jax.Array  # int32[B, S]: key of the sequence that contains the token
    positions: jax.Array  # int32[B, S]: position in this sequence

    @classmethod
    def of(
        cls, key: jax.Array, sequence_keys_BxC: jax.Array, sequence_ids_BxS: jax.Array, position_ids_BxS: jax.Array
    ) -> "TokenKey":
        """Return the key of the tokens of a batch with these features (:data:`TOKEN_FEATURES`); ``key`` is the
        threefry key of the step."""
        keys_BxC = jax.lax.bitcast_convert_type(sequence_keys_BxC, jnp.int32)
        slots_BxS = jnp.maximum(sequence_ids_BxS - 1, 0)
        return cls(key, jnp.take_along_axis(keys_BxC, slots_BxS, axis=1, mode="clip"), position_ids_BxS)

    def at(self, places_BxC: jax.Array) -> "TokenKey":
        """Return the key of the tokens at ``places``, int32[B, C]."""
        of_tokens = (self.sequence_keys, self.positions)
        return TokenKey(self.key, *(jnp.take_along_axis(x, places_BxC, axis=1) for x in of_tokens))

    def words(self) -> tuple[jax.Array, jax.Array]:
        """Return two hash words per token, each int32[B, S]."""
        first, second = jax.lax.bitcast_convert_type(jax.random.key_data(self.key), jnp.int32)
        one = mix(mix(self.sequence_keys ^ first, second) + self.positions, second)
        other = mix(mix(self.sequence_keys ^ second, first) + self.positions, first)
        return one, other


# Key for arrays of all rows, of some rows, or of tokens.
DropoutKey = jax.Array | ShardKey | TokenKey
# Function that selects tokens from an array [B, S].
Selection = Callable[[jax.Array], jax.Array]


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
    RELATIVE_POSITIONS = 5
    RECURRENT_WEIGHTS = 6
    WORDS = 7


def site_key(key: DropoutKey | None, layer: int | jax.Array, site: Site) -> DropoutKey | None:
    """Return the key of one dropout site; None (no dropout) if ``key`` is None. Layer 0 is the embeddings; encoder
    layers are 1 to L."""
    if key is None:
        return None
    folded = jax.random.fold_in(jax.random.fold_in(whole_key(key), layer), int(site))
    return dataclasses.replace(key, key=folded) if isinstance(key, ShardKey | TokenKey) else folded


def whole_key(key: DropoutKey) -> jax.Array:
    """Return the JAX key that ``key`` contains; it is the same for all rows and tokens (with rbg: of a replica)."""
    return key.key if isinstance(key, ShardKey | TokenKey) else key


# ------------------------------------------------------------------ threefry and rbg


def random_words(key: jax.Array | ShardKey, shape: tuple[int, ...]) -> jax.Array:
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


def random_uint16(key: jax.Array | ShardKey, shape: tuple[int, ...]) -> jax.Array:
    """Return uniform random uint16 values of ``shape``. Each 32-bit word yields two values, which halves the
    cost."""
    *leading, last = shape
    words = random_words(key, (*leading, -(-last // 2)))
    low, high = words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)
    return jnp.concatenate([low, high], axis=-1)[..., :last]


# ------------------------------------------------------------------ hash


def mix(x: jax.Array, salt: jax.Array) -> jax.Array:
    """Return a 32-bit hash of ``x`` (int32): "lowbias32" of Wellons, with an XOR with ``salt`` after the first
    multiplication."""
    x ^= jax.lax.shift_right_logical(x, 16)
    x = x * np.int32(0x7FEB352D) ^ salt
    x ^= jax.lax.shift_right_logical(x, 15)
    x = x * np.uint32(0x846CA68B).astype(np.int32)
    return x ^ jax.lax.shift_right_logical(x, 16)


def value_words(first: jax.Array, second: jax.Array, width: int) -> jax.Array:
    """Return the random bits of the values of each token, two values per word: int32[..., ceil(width / 2)].

    The low half of word j belongs to value j, the high half to value j + ceil(width / 2).
    ``first`` and ``second`` [..., 1] are the words of :meth:`TokenKey.words`.
    """
    shape = (*first.shape[:-1], -(-width // 2))
    return mix(jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) + first, second)


def probability_words(
    first: jax.Array, second: jax.Array, key_positions: jax.Array, pair: jax.Array | int
) -> jax.Array:
    """Return the words of the attention probabilities of a pair of heads, int32[..., queries, keys].

    A word contains the bits of the heads 2 * ``pair`` (low half) and 2 * ``pair`` + 1 (high half). ``first`` and
    ``second`` [..., queries, 1] are the words of the query tokens (:meth:`TokenKey.words`); ``key_positions``
    [..., 1, keys] are the positions of the keys in their sequences.
    """
    return mix(key_positions + (first ^ pair * _FIRST_OF_PAIR), second + pair * _SECOND_OF_PAIR)


def _hashed_values(key: TokenKey, shape: tuple[int, ...]) -> jax.Array:
    """Return random values from 0 to 65535, int32[B, S, H]."""
    first, second = (words[..., None] for words in key.words())
    words = value_words(first, second, shape[-1])
    halves = [words & 0xFFFF, jax.lax.shift_right_logical(words, 16)]
    return jnp.concatenate(halves, axis=-1)[..., : shape[-1]]


def _hashed_probabilities(key: TokenKey, heads: int, queries: Selection, keys: Selection) -> jax.Array:
    """Return random values from 0 to 65535, int32[B, A, S, T], for the tokens that ``queries`` and ``keys`` select
    from [B, S]. ``keys`` may select different keys for each head, [B, A, T]."""
    first, second = (queries(words)[:, None, :, None] for words in key.words())
    head = jnp.arange(heads, dtype=jnp.int32)[:, None, None]
    # Each head hashes the word of its pair: a stack of two halves would cut the heads into pairs on tensor meshes.
    positions = keys(key.positions)
    positions = positions[:, None, None, :] if positions.ndim == 2 else positions[:, :, None, :]
    words = probability_words(first, second, positions, head // 2)
    return jax.lax.shift_right_logical(words, jnp.broadcast_to(16 * (head % 2), words.shape)) & 0xFFFF


# ------------------------------------------------------------------ dropout


def drop_threshold(rate: float) -> int:
    """Return for how many of the 65,536 values of 16 random bits a value is dropped (1 to 65,535)."""
    return min(max(round(rate * 65536), 1), 65535)


def dropout(x: jax.Array, rate: float, key: DropoutKey | None) -> jax.Array:
    """Zero each element with probability ``rate`` (exact to 2**-17) and scale all others by 1 / (1 - rate).

    If ``key`` is None or ``rate`` is 0, return ``x`` unchanged. With a :class:`TokenKey`, ``x`` has the shape
    [B, S, H], where [B, S] are the tokens of the key.
    """
    if key is None or rate == 0.0:
        return x
    with jax.named_scope("dropout"):
        bits = _hashed_values(key, x.shape) if isinstance(key, TokenKey) else random_uint16(key, x.shape)
        return _dropped(x, bits, rate)


def locked_dropout(x_BxSxH: jax.Array, rate: float, key: DropoutKey | None) -> jax.Array:
    """Apply dropout, as :func:`dropout` does, to the same columns at all tokens of a sequence (variational dropout;
    Gal and Ghahramani 2016). Without a :class:`TokenKey`, all tokens of a row share columns."""
    if key is None or rate == 0.0:
        return x_BxSxH
    if isinstance(key, TokenKey):
        kept = dropout(
            jnp.ones_like(x_BxSxH), rate, dataclasses.replace(key, positions=jnp.zeros_like(key.positions))
        )
    else:
        kept = dropout(jnp.ones_like(x_BxSxH[:, :1]), rate, key)
    return x_BxSxH * kept


def dropout_of_probabilities(probabilities_BxAxSxT: jax.Array, rate: float, key: DropoutKey | None) -> jax.Array:
    """Apply dropout, as :func:`dropout` does, to attention probabilities [batch, heads, queries, keys]."""
    if rate == 0.0 or not isinstance(key, TokenKey):
        return dropout(probabilities_BxAxSxT, rate, key)
    return dropout_of_cut_probabilities(probabilities_BxAxSxT, rate, key, lambda x: x, lambda x: x)


def dropout_of_cut_probabilities(
    probabilities: jax.Array, rate: float, key: TokenKey, queries: Selection, keys: Selection
) -> jax.Array:
    """Apply the dropout of :func:`dropout_of_probabilities` to the ``probabilities`` [rows, heads, queries, keys]
    of the tokens that ``queries`` and ``keys`` select from [B, S]."""
    if rate == 0.0:
        return probabilities
    with jax.named_scope("dropout"):
        bits = _hashed_probabilities(key, probabilities.shape[1], queries, keys)
        return _dropped(probabilities, bits, rate)


def _dropped(x: jax.Array, bits: jax.Array, rate: float) -> jax.Array:
    threshold = drop_threshold(rate)
    scaled = x * jnp.asarray(65536 / (65536 - threshold), x.dtype)
    return jnp.where(bits >= jnp.asarray(threshold, bits.dtype), scaled, jnp.zeros((), x.dtype))
