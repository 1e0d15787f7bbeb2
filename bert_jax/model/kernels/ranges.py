"""Compute the keys that a query sees, and the range of key blocks that a query block sees.

Kernels skip all other blocks.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


def visible_keys(
    sequence_ids_BxS: jax.Array, causal: bool = False, window: int = 0, is_global_BxS: jax.Array | None = None
) -> jax.Array:
    """Return a bool mask [batch, 1, queries, keys] that is True where a query sees a key.

    A query sees the keys with the same sequence id. A padding query, which has the id 0, sees the keys with the id
    1 instead, as in google-research/bert, where padding queries attend like all others (no loss uses their output).
    No query sees a padding key. With ``causal``, no query sees a later key (Radford et al. 2018). With ``window``,
    no query sees a key that is more than ``window`` tokens away (Beltagy et al. 2020, section 3.1); 0: no limit.
    All queries see the keys where ``is_global`` is True.
    """
    query_BxS = jnp.maximum(sequence_ids_BxS, 1)
    visible_BxSxT = query_BxS[:, :, None] == sequence_ids_BxS[:, None, :]
    place_S = jnp.arange(sequence_ids_BxS.shape[1])
    if causal:
        visible_BxSxT &= place_S[:, None] >= place_S
    if window:
        near = jnp.abs(place_S[:, None] - place_S) <= window
        visible_BxSxT &= near if is_global_BxS is None else near | is_global_BxS[:, None]
    return visible_BxSxT[:, None]


@dataclass(frozen=True)
class Ranges:
    """Visibility of the keys of rows, as in :func:`visible_keys`: sequence ids, int32[B, S], window and
    causality."""

    ids_BxS: jax.Array
    window: int = 0
    causal: bool = False

    def _visible(self) -> jax.Array:
        return visible_keys(self.ids_BxS, self.causal, self.window)[:, 0]

    def of_queries(self, queries: int, keys: int) -> jax.Array:
        """Return the first block of ``keys`` keys that a block of ``queries`` queries sees, and the one after the
        last, int32[B, blocks of queries, 2]; 0 and 0 if they see none."""
        return _bounds(self._visible(), queries, keys)

    def of_keys(self, queries: int, keys: int) -> jax.Array:
        """Return the first block of ``queries`` queries that see a block of ``keys`` keys, and the one after the
        last, int32[B, blocks of keys, 2]."""
        return _bounds(self._visible().swapaxes(1, 2), keys, queries)


def _bounds(visible_BxSxT: jax.Array, own: int, others: int) -> jax.Array:
    """Return the first block of ``others`` columns in which a block of ``own`` rows has True, and the end."""
    batch, rows, columns = visible_BxSxT.shape
    place_T = jnp.arange(columns, dtype=jnp.int32)
    of_rows = visible_BxSxT.reshape(batch, rows // own, own, columns)
    first = jnp.min(jnp.where(of_rows, place_T, columns), axis=(2, 3))
    end = jnp.max(jnp.where(of_rows, place_T + 1, 0), axis=(2, 3))
    return jnp.stack([jnp.where(end > 0, first // others, 0), -(-end // others)], axis=-1)
