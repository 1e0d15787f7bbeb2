"""Positions: tables of sinusoidal and rotary positions, and scores that depend on the distance of query and key.

Shapes: S query tokens, T key tokens (= S), A heads, D head size, R rows of a table of distances.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from bert_jax.config import ModelConfig


def sinusoidal_positions(length: int, width: int) -> np.ndarray:
    """Return float32[length, width]: sines in the first half, cosines in the second (Vaswani et al. 2017, section
    3.5, in the layout of tensor2tensor)."""
    rates = 10_000.0 ** (-np.arange(width // 2) / max(width // 2 - 1, 1))
    angles = np.arange(length)[:, None] * rates[None]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def rotary_tables(length: int, head_size: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and the sines, each float32[length, head_size / 2], of the angle by which each pair of
    dimensions of a head is rotated at each position (Su et al. 2021, section 3.2.2)."""
    rates = base ** (-np.arange(head_size // 2) / (head_size // 2))
    angles = np.arange(length)[:, None] * rates[None]  # float64: in float32 a large angle is off by 1e-5
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotary_factors(config: ModelConfig, window: int, position_ids_BxS: jax.Array) -> list[jax.Array]:
    """Return the cosines and the sines of :func:`rotary_tables` at each token, each float32[B, S, D / 2], for a
    layer with ``window`` (0: no limit)."""
    base = config.rotary_base_of(window)
    tables = rotary_tables(config.max_position_embeddings, config.head_size, base)
    return [jnp.take(x, position_ids_BxS, axis=0, mode="clip") for x in tables]


def rotate(x_BxSxAxD: jax.Array, cos_BxSx1xE: jax.Array, sin_BxSx1xE: jax.Array) -> jax.Array:
    """Apply rotary position embeddings to the queries or keys ``x`` in float32: in each head of size D, the
    dimensions i and i + D / 2 are rotated by angle i of the position.

    Su et al. 2021 rotate dimensions 2i and 2i + 1 instead, which requires strided access. The two functions differ
    only in the order of the dimensions of a head.
    """
    first, second = jnp.split(x_BxSxAxD.astype(jnp.float32), 2, axis=-1)
    parts = [first * cos_BxSx1xE - second * sin_BxSx1xE, second * cos_BxSx1xE + first * sin_BxSx1xE]
    return jnp.concatenate(parts, axis=-1).astype(x_BxSxAxD.dtype)


def distances(length: int) -> jax.Array:
    """Return key index minus query index, int32[S, T]."""
    places = jnp.arange(length, dtype=jnp.int32)
    return places[None, :] - places[:, None]


def alibi_slopes(heads: int) -> np.ndarray:
    """Return the factor of the distance for each head, float32[A]: a geometric sequence that starts at 2**(-8 / A)
    (Press et al. 2022, section 3). If A is not a power of 2, the other heads have every second factor of the
    sequence for twice the largest power of 2 below A, as in the implementation of the authors."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    others = 2.0 ** (-4 / power * np.arange(1, 2 * power + 1))[::2][: heads - power]
    return np.concatenate([slopes, others]).astype(np.float32)


def bucket_index(distance: np.ndarray, buckets: int, max_distance: int) -> np.ndarray:
    """Return the bucket of each distance (key minus query), int64: half of the buckets for keys after the query; of
    each half, half for one distance each and half for logarithmically growing ranges up to ``max_distance``
    (Raffel et al. 2020, section 2.1; MPNet)."""
    half = buckets // 2
    exact = half // 2
    absolute = np.abs(distance)
    # float32, as the reference: the floor of a float64 logarithm differs at the ends of some ranges.
    ratio = np.log(np.maximum(absolute, 1).astype(np.float32) / np.float32(exact))
    scaled = ratio / np.float32(math.log(max_distance / exact)) * np.float32(half - exact)
    large = np.minimum(exact + scaled.astype(np.int64), half - 1)
    return np.where(distance > 0, half, 0) + np.where(absolute < exact, absolute, large)


def disentangled_index(distance: np.ndarray, buckets: int, max_distance: int) -> np.ndarray:
    """Return the row of the table of distances for each distance (key minus query), int64, from 0 to ``buckets``
    - 1.

    Distances up to a quarter of ``buckets`` have a row each, and larger ones share rows that grow logarithmically
    (He et al. 2021; ``make_log_bucket_position`` of microsoft/DeBERTa). If ``max_distance`` is at most half of
    ``buckets``, distances up to this half have a row each, and larger ones share the outermost row of their
    direction.
    """
    rows = -distance  # the reference counts query minus key
    span = buckets // 2
    if max_distance > span:
        middle = span // 2
        absolute = np.maximum(np.abs(rows), middle).astype(np.float32)
        ratio = np.log(absolute / np.float32(middle)) / np.log(np.float32((max_distance - 1) / middle))
        logarithmic = np.ceil(ratio * np.float32(middle - 1)) + middle
        rows = np.where(np.abs(rows) <= middle, rows, logarithmic * np.sign(rows)).astype(np.int64)
    return np.clip(rows + span, 0, buckets - 1)


def distance_rows(config: ModelConfig, length: int) -> jax.Array:
    """Return the row of the table of distances for each pair of query and key, int32[S, T]."""
    index = bucket_index if config.relative_positions == "buckets" else disentangled_index
    # Larger distances have the same row, or do not occur in a sequence.
    limit = min(max(config.relative_max_distance, config.relative_buckets), config.max_position_embeddings)
    rows = index(np.arange(-limit, limit + 1), config.relative_buckets, config.relative_max_distance)
    places = jnp.clip(distances(length), -limit, limit) + limit
    return jnp.take(jnp.asarray(rows, jnp.int32), places, axis=0)


@struct.dataclass
class RelativeScores:
    """Terms that the distance of query and key adds to the attention scores of a layer."""

    # Added to the scaled scores (alibi, buckets), float32[A, S, T].
    bias_AxSxT: jax.Array | None = None
    # Projections of the embeddings of distances (disentangled), [R, A, D].
    keys_RxAxD: jax.Array | None = None
    queries_RxAxD: jax.Array | None = None
    # Row of each pair of query and key, int32[S, T].
    rows_SxT: jax.Array | None = None

    @property
    def terms(self) -> int:
        """Number of products that are added, by whose square root the scores are divided (He et al. 2021)."""
        return 1 if self.keys_RxAxD is None else 3

    def added(self, query_BxSxAxD: jax.Array, key_BxTxAxD: jax.Array) -> jax.Array:
        """Return the terms that are added to the scores of scaled queries and keys, float32[B, A, S, T], or
        [A, S, T] if they are the same for all rows."""
        if self.bias_AxSxT is not None:
            return self.bias_AxSxT
        return self._products(query_BxSxAxD, key_BxTxAxD)

    def _products(self, query_BxSxAxD: jax.Array, key_BxTxAxD: jax.Array) -> jax.Array:
        """Return the products of queries with embeddings of distances, and of embeddings of distances with keys (He
        et al. 2021, equation 4)."""
        assert self.keys_RxAxD is not None and self.queries_RxAxD is not None and self.rows_SxT is not None
        batch, _, heads, head_size = query_BxSxAxD.shape
        shape = (batch, heads, *self.rows_SxT.shape)

        def product(x_BxSxAxD: jax.Array, table_RxAxD: jax.Array, rows: jax.Array) -> jax.Array:
            all_BxAxSxR = jnp.einsum("BSAD,RAD->BASR", x_BxSxAxD, table_RxAxD, preferred_element_type=jnp.float32)
            return jnp.take_along_axis(all_BxAxSxR, jnp.broadcast_to(rows, shape), axis=-1)

        scaled_RxAxD = self.queries_RxAxD * (self.terms * head_size) ** -0.5
        of_keys = product(key_BxTxAxD, scaled_RxAxD, self.rows_SxT.T)
        return product(query_BxSxAxD, self.keys_RxAxD, self.rows_SxT) + of_keys.swapaxes(-1, -2)


def relative_bias(config: ModelConfig, length: int, table_RxA: jax.Array | None) -> jax.Array:
    """Return the bias of the attention scores, float32[A, S, T], with ``relative_positions`` alibi, or, from the
    ``table`` of buckets, with buckets."""
    if table_RxA is None:
        slopes = alibi_slopes(config.num_attention_heads)
        return jnp.multiply(-slopes[:, None, None], jnp.abs(distances(length)).astype(jnp.float32))
    # A product with one-hot rows, whose gradient is a matrix product instead of a scatter into few rows.
    chosen = jax.nn.one_hot(distance_rows(config, length), config.relative_buckets, dtype=jnp.float32)
    return jnp.einsum("STR,RA->AST", chosen, table_RxA)
