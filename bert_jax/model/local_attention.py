"""Attention that computes only parts of the scores, for windows and causal attention, in XLA on any device.

The functions compute ``attention.dot_product_attention`` without the blocks of keys that no query of a block sees.
Outputs of padding tokens that see no token differ.

Shapes: B rows, S tokens, A heads, D head size, N blocks per row, Q queries of a block, K keys of a block.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bert_jax.model.attention import attention_probabilities
from bert_jax.model.dropout import DropoutKey, TokenKey, dropout_of_cut_probabilities

# Least number of queries in a block of window attention: the width of the matrix unit of a TPU.
MIN_BLOCK = 128
# Number of parts into which causal attention divides the queries; the cost is (1 + 1 / parts) / 2 of all scores.
CAUSAL_PARTS = 8
# Least number of tokens with which causal attention is divided.
MIN_CAUSAL = 1024


def is_shorter(length: int, window: int, causal: bool, dropout_rate: float, key: DropoutKey | None) -> bool:
    """Return True if :func:`local_attention` computes fewer scores than attention over whole rows of ``length``
    tokens and has the same dropout bits.

    A ``length`` that is unknown when the program is traced has whole rows. With threefry and rbg, the bits of
    probabilities depend on the shape of the scores.
    """
    if not isinstance(length, int) or (dropout_rate and key is not None and not isinstance(key, TokenKey)):
        return False
    if window:
        return length > max(window, MIN_BLOCK) + 2 * window
    return causal and length >= MIN_CAUSAL and length % CAUSAL_PARTS == 0


def local_attention(
    query_BxSxAxD: jax.Array,
    key_BxSxAxD: jax.Array,
    value_BxSxAxD: jax.Array,
    sequence_ids_BxS: jax.Array,
    relative: None = None,
    *,
    window: int,
    causal: bool,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
) -> jax.Array:
    """Compute attention with ``window`` keys on each side of a query (0: no limit) or causal attention; see
    :func:`is_shorter`. Returns [batch, queries, heads, head size]."""
    assert relative is None
    operands = (query_BxSxAxD, key_BxSxAxD, value_BxSxAxD, sequence_ids_BxS)
    rates = (dropout_rate, dropout_key)
    if window:
        return _window_attention(*operands, window, causal, *rates)
    part = query_BxSxAxD.shape[1] // CAUSAL_PARTS

    def one(i: int) -> jax.Array:
        begin, end = i * part, (i + 1) * part
        ahead_QxK = jnp.arange(end)[None, :] - jnp.arange(begin, end)[:, None]
        return _attend(
            operands, lambda x: x[:, begin:end], lambda x: x[:, :end], ahead_QxK <= 0, dropout_rate, dropout_key
        )

    return jnp.concatenate([one(i) for i in range(CAUSAL_PARTS)], axis=1)


def _window_attention(
    query_BxSxAxD: jax.Array,
    key_BxSxAxD: jax.Array,
    value_BxSxAxD: jax.Array,
    sequence_ids_BxS: jax.Array,
    window: int,
    causal: bool,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
) -> jax.Array:
    batch, length = sequence_ids_BxS.shape
    block = max(window, MIN_BLOCK)
    count = -(-length // block)

    def blocks(x: jax.Array) -> jax.Array:
        """Return ``x`` [B, S, ...] as [B, N, Q, ...]; missing tokens at the end are 0."""
        padded = jnp.pad(x, [(0, 0), (0, count * block - length)] + [(0, 0)] * (x.ndim - 2))
        return padded.reshape(batch, count, block, *x.shape[2:])

    def queries(x: jax.Array) -> jax.Array:
        return blocks(x).reshape(batch * count, block, *x.shape[2:])

    def keys(x: jax.Array) -> jax.Array:
        """Return the tokens of each block and ``window`` tokens before and after it, [B * N, K, ...]."""
        own = blocks(x)
        none = jnp.zeros_like(own[:, :1])
        before = jnp.concatenate([none, own[:, :-1]], axis=1)[:, :, block - window :]
        after = jnp.concatenate([own[:, 1:], none], axis=1)[:, :, :window]
        around = jnp.concatenate([before, own, after], axis=2)
        return around.reshape(batch * count, block + 2 * window, *x.shape[2:])

    ahead_QxK = jnp.arange(-window, block + window)[None, :] - jnp.arange(block)[:, None]
    near_QxK = jnp.abs(ahead_QxK) <= window
    near_QxK = near_QxK & (ahead_QxK <= 0) if causal else near_QxK
    operands = (query_BxSxAxD, key_BxSxAxD, value_BxSxAxD, sequence_ids_BxS)
    context = _attend(operands, queries, keys, near_QxK, dropout_rate, dropout_key)
    return context.reshape(batch, count * block, *context.shape[2:])[:, :length]


def _attend(
    operands: tuple[jax.Array, ...],
    queries: Callable[[jax.Array], jax.Array],
    keys: Callable[[jax.Array], jax.Array],
    near_QxK: jax.Array,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
) -> jax.Array:
    """Return the attention of the tokens that ``queries`` selects from [B, S, ...] to those that ``keys`` selects,
    where ``near`` is True and the sequence is the same."""
    query, key, value, sequence_ids = operands
    query_ids, key_ids = jnp.maximum(queries(sequence_ids), 1), keys(sequence_ids)
    visible = (query_ids[:, :, None] == key_ids[:, None, :]) & near_QxK
    probabilities = attention_probabilities(queries(query), keys(key), visible[:, None]).astype(value.dtype)
    if isinstance(dropout_key, TokenKey):
        probabilities = dropout_of_cut_probabilities(probabilities, dropout_rate, dropout_key, queries, keys)
    return jnp.einsum("BTAD,BAST->BSAD", keys(value), probabilities)
