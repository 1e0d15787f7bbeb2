"""Ranges of the blocks of keys that a block of queries sees, and the reverse: kernels skip all other blocks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Ranges:
    """Visibility of the keys of rows, as in ``bert_jax.model.attention.visible_keys``: sequence ids,
    int32[B, S], window and causality."""

    ids_BxS: jax.Array
    window: int = 0
    causal: bool = False

    def _visible(self) -> jax.Array:
        visible_BxSxS = jnp.maximum(self.ids_BxS, 1)[:, :, None] == self.ids_BxS[:, None, :]
        place_S = jnp.arange(self.ids_BxS.shape[1])
        if self.window:
            visible_BxSxS &= jnp.abs(place_S[:, None] - place_S) <= self.window
        if self.causal:
            visible_BxSxS &= place_S[:, None] >= place_S
        return visible_BxSxS

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
