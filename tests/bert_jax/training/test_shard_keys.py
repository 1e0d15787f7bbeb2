"""Dropout bits of some rows are those that the rows have in the whole array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from bert_jax.model.dropout import ShardKey, Site, dropout, random_words, replica_key, site_key


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(12, 7), (12, 3, 5), (12, 2, 3, 4)])
@pytest.mark.parametrize("replicas", [1, 2, 3, 12])
def test_replicas_draw_their_rows_of_the_whole(shape, replicas):
    key = jax.random.key(7)
    rows = shape[0] // replicas
    whole = np.asarray(random_words(key, shape))
    parts = [
        random_words(replica_key(key, jnp.int32(replica), replicas, rows), (rows, *shape[1:]))
        for replica in range(replicas)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.slow
@pytest.mark.parametrize("first_row", [0, 3, 2**16 - 1, 2**21 + 5, 2**32 - 5])
@pytest.mark.parametrize("row_size", [2**21, 1923, 65_537])
def test_places_beyond_32_bits(first_row, row_size):
    """Against counters in 64 bits; only the ends of wide rows are drawn."""
    shape = (4, row_size)
    key = jax.random.key(3)
    drawn = np.asarray(random_words(ShardKey(key, jnp.uint32(first_row), 2**32), shape))[:, -1000:]
    rows = np.arange(first_row, first_row + 4, dtype=np.uint64)[:, None]
    place = rows * np.uint64(row_size) + np.arange(row_size, dtype=np.uint64)[-1000:]
    halves = [jnp.asarray((place >> np.uint64(shift)).astype(np.uint32)) for shift in (32, 0)]
    first, second = threefry2x32_p.bind(*jax.random.key_data(key), *halves)
    np.testing.assert_array_equal(drawn, first ^ second)


def test_sites_and_values_agree_with_one_device():
    key, x = jax.random.key(1), jnp.ones((8, 6, 10))
    for site in Site:
        whole = dropout(x, 0.3, site_key(key, 2, site))
        part = dropout(x[4:], 0.3, site_key(replica_key(key, jnp.int32(1), 2, 4), 2, site))
        np.testing.assert_array_equal(part, whole[4:])


def test_replicas_draw_apart_with_rbg():
    key = jax.random.key(1, impl="rbg")
    draws = [random_words(replica_key(key, jnp.int32(replica), 4, 2), (2, 64)) for replica in range(4)]
    assert len({np.asarray(draw).tobytes() for draw in draws}) == 4
