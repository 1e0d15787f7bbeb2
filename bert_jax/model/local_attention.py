"""Attention that computes only parts of the scores, for windows and causal attention, in XLA on any device.

The functions compute ``attention.dot_product_attention`` without the blocks of keys that no query of a block sees.
Outputs of padding tokens that see no token differ.

Shapes: B rows, S tokens, A heads, D head size, N blocks per row, Q queries of a block, K keys of a block.
"""

import jax
import jax.numpy as jnp

from bert_jax.model.attention import attention_probabilities
from bert_jax.model.dropout import DropoutKey, Selection, TokenKey, dropout_of_cut_probabilities

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
    if window:
        return _window_attention(*operands, window, causal, dropout_rate, dropout_key)
    part = query_BxSxAxD.shape[1] // CAUSAL_PARTS
    # Split once: the gradients of a part of the keys are added at its size, not at that of the row.
    query, key, value, ids = (jnp.split(x, CAUSAL_PARTS, axis=1) for x in operands)

    def one(i: int) -> jax.Array:
        begin, end = i * part, (i + 1) * part
        seen = (jnp.concatenate(parts[: i + 1], axis=1) for parts in (key, value, ids))
        ahead_QxK = jnp.arange(end)[None, :] - jnp.arange(begin, end)[:, None]
        cuts = (lambda x: x[:, begin:end], lambda x: x[:, :end])
        return _attend((query[i], ids[i]), (*seen,), ahead_QxK <= 0, cuts, dropout_rate, dropout_key)

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
    seen = (keys(key_BxSxAxD), keys(value_BxSxAxD), keys(sequence_ids_BxS))
    own = (queries(query_BxSxAxD), queries(sequence_ids_BxS))
    context = _attend(own, seen, near_QxK, (queries, keys), dropout_rate, dropout_key)
    return context.reshape(batch, count * block, *context.shape[2:])[:, :length]


def _attend(
    own: tuple[jax.Array, jax.Array],
    seen: tuple[jax.Array, ...],
    near_QxK: jax.Array,
    cuts: tuple[Selection, Selection],
    dropout_rate: float,
    dropout_key: DropoutKey | None,
) -> jax.Array:
    """Return the attention of ``own``, queries and their sequence ids, to ``seen``, keys, values and their sequence
    ids, where ``near`` is True and the sequence is the same. ``cuts`` select the queries and the keys from
    [B, S]."""
    (query, query_ids), (key, value, key_ids) = own, seen
    visible = (jnp.maximum(query_ids, 1)[:, :, None] == key_ids[:, None, :]) & near_QxK
    probabilities = attention_probabilities(query, key, visible[:, None]).astype(value.dtype)
    if isinstance(dropout_key, TokenKey):
        probabilities = dropout_of_cut_probabilities(probabilities, dropout_rate, dropout_key, *cuts)
    return jnp.einsum("BTAD,BAST->BSAD", value, probabilities)
