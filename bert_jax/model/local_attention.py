"""Attention that computes only parts of the scores, for windows, with or without global tokens, causal attention,
and blocks (some of them random), in XLA on any device.

The functions compute ``attention.dot_product_attention`` without the blocks of keys that no query of a block sees.
Outputs of padding tokens that see no token differ.

Shapes: B rows, S tokens, A heads, D head size, N blocks per row, M = N - 2 blocks between the first and the last, R
random blocks, Q queries of a block, K keys of a block, G slots of global tokens in a row.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from bert_jax.config import HeadsConfig, ModelConfig
from bert_jax.model.attention import attention_probabilities, block_scores, dot_product_attention, has_blocks
from bert_jax.model.dropout import DropoutKey, Selection, TokenKey, dropout_of_cut_probabilities
from bert_jax.model.positions import RelativeScores

# Least number of queries in a block of window attention: the width of the matrix unit of a TPU.
MIN_BLOCK = 128
# Number of parts into which causal attention divides the queries; the cost is (1 + 1 / parts) / 2 of all scores.
CAUSAL_PARTS = 8
# Least number of tokens with which causal attention is divided.
MIN_CAUSAL = 1024


def is_shorter(length: int, window: int, causal: bool, dropout_rate: float, key: DropoutKey | None) -> bool:
    """Return True if :func:`local_attention` computes fewer scores than attention over whole rows of ``length``
    tokens and has the same dropout bits.

    Returns False if ``length`` is unknown when the program is traced. With threefry and rbg, the bits of
    probabilities depend on the shape of the scores.
    """
    if not isinstance(length, int) or not has_cut_bits(dropout_rate, key):
        return False
    if window:
        return length > max(window, MIN_BLOCK) + 2 * window
    return causal and length >= MIN_CAUSAL and length % CAUSAL_PARTS == 0


def has_cut_bits(dropout_rate: float, key: DropoutKey | None) -> bool:
    """Return True if the dropout bits of a part of the probabilities can be computed without the others."""
    return not dropout_rate or key is None or isinstance(key, TokenKey)


def attention_function(
    config: ModelConfig,
    window: int,
    tokens: Mapping[str, jax.Array],
    scores: RelativeScores | None,
    sees: Callable[..., jax.Array],
    plain: bool,
    key: DropoutKey | None,
) -> tuple[Callable[..., jax.Array], RelativeScores | None, jax.Array | None]:
    """Return the attention function of a layer with ``window``, the values added to its scores, and, if the
    function computes only parts of the scores, the slots of global tokens.

    It computes whole rows if ``plain`` is True, if the parts cost more, or if they have other dropout bits.
    ``tokens``: ``sequence_ids`` and the global tokens and random blocks, if there are any. ``scores``: terms of the
    scores that depend on distances. ``sees`` returns the mask of whole rows.
    """
    rate, slots, causal = config.attention_dropout, tokens.get("global_slots"), config.attention == "causal"
    length = tokens["sequence_ids"].shape[1]
    if has_blocks(config, length):
        sizes, random = (config.attention_block, config.random_blocks), tokens.get("random_blocks")
        if not plain and isinstance(length, int) and has_cut_bits(rate, key):
            in_blocks = functools.partial(
                block_attention, dropout_rate=rate, block=sizes[0], number=sizes[1], random_AxMxR=random
            )
            return in_blocks, None, None
        scores = block_scores(length, *sizes, random)
    else:
        other = length - slots.shape[1] if slots is not None else length
        if not plain and scores is None and is_shorter(other, window, causal, rate, key):
            in_window = functools.partial(
                local_attention, dropout_rate=rate, window=window, causal=causal, slots_BxG=slots
            )
            return in_window, None, slots
    return functools.partial(dot_product_attention, dropout_rate=rate, visible=sees), scores, None


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
    slots_BxG: jax.Array | None = None,
) -> jax.Array:
    """Compute attention with ``window`` keys on each side of a query (0: no limit) or causal attention; see
    :func:`is_shorter`. Queries also see the tokens at ``slots`` (:func:`global_features`). Returns [batch, queries,
    heads, head size]."""
    assert relative is None
    operands = (query_BxSxAxD, key_BxSxAxD, value_BxSxAxD, sequence_ids_BxS)
    if window:
        return _window_attention(*operands, window, causal, dropout_rate, dropout_key, slots_BxG)
    part = query_BxSxAxD.shape[1] // CAUSAL_PARTS
    # Split once: the gradients of a part of the keys are added at its size, not at the row size.
    query, key, value, ids = (jnp.split(x, CAUSAL_PARTS, axis=1) for x in operands)

    def one(i: int) -> jax.Array:
        begin, end = i * part, (i + 1) * part
        seen = (jnp.concatenate(parts[: i + 1], axis=1) for parts in (key, value, ids))
        ahead_QxK = jnp.arange(end)[None, :] - jnp.arange(begin, end)[:, None]
        cuts = (lambda x: x[:, begin:end], lambda x: x[:, :end])
        return _attend((query[i], ids[i]), (*seen,), ahead_QxK <= 0, cuts, dropout_rate, dropout_key)

    return jnp.concatenate([one(i) for i in range(CAUSAL_PARTS)], axis=1)


def _blocks(x: jax.Array, block: int) -> jax.Array:
    """Return ``x`` [B, S, ...] as [B, N, Q, ...] with Q = ``block``; missing tokens at the end are 0."""
    batch, length = x.shape[:2]
    count = -(-length // block)
    padded = jnp.pad(x, [(0, 0), (0, count * block - length)] + [(0, 0)] * (x.ndim - 2))
    return padded.reshape(batch, count, block, *x.shape[2:])


def _window_attention(
    query_BxSxAxD: jax.Array,
    key_BxSxAxD: jax.Array,
    value_BxSxAxD: jax.Array,
    sequence_ids_BxS: jax.Array,
    window: int,
    causal: bool,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
    slots_BxG: jax.Array | None,
) -> jax.Array:
    batch, length = sequence_ids_BxS.shape
    block = max(window, MIN_BLOCK)
    count = -(-length // block)

    blocks = functools.partial(_blocks, block=block)

    def queries(x: jax.Array) -> jax.Array:
        return blocks(x).reshape(batch * count, block, *x.shape[2:])

    def keys(x: jax.Array, of_slots: jax.Array | None = None) -> jax.Array:
        """Return the tokens of each block, ``window`` tokens before and after it, and ``of_slots``, by default the
        global tokens, [B * N, K, ...]."""
        own = blocks(x)
        none = jnp.zeros_like(own[:, :1])
        before = jnp.concatenate([none, own[:, :-1]], axis=1)[:, :, block - window :]
        after = jnp.concatenate([own[:, 1:], none], axis=1)[:, :, :window]
        around = jnp.concatenate([before, own, after], axis=2)
        if slots_BxG is not None:
            more = at_slots(x, slots_BxG) if of_slots is None else of_slots
            more = jnp.broadcast_to(more[:, None], (batch, count, *more.shape[1:]))
            around = jnp.concatenate([around, more], axis=2)
        return around.reshape(batch * count, -1, *x.shape[2:])

    ahead_QxK = jnp.arange(-window, block + window)[None, :] - jnp.arange(block)[:, None]
    near_QxK = jnp.abs(ahead_QxK) <= window
    near_QxK = near_QxK & (ahead_QxK <= 0) if causal else near_QxK
    key_ids = keys(sequence_ids_BxS)
    if slots_BxG is not None:
        near_QxK = jnp.pad(near_QxK, [(0, 0), (0, slots_BxG.shape[1])], constant_values=True)
        # A global token is seen in its slot alone.
        in_windows = jnp.where(_is_at(slots_BxG, length), -1, sequence_ids_BxS)
        key_ids = keys(in_windows, jnp.where(slots_BxG < length, at_slots(sequence_ids_BxS, slots_BxG), -1))
    seen = (keys(key_BxSxAxD), keys(value_BxSxAxD), key_ids)
    own = (queries(query_BxSxAxD), queries(sequence_ids_BxS))
    context = _attend(own, seen, near_QxK, (queries, keys), dropout_rate, dropout_key)
    return context.reshape(batch, count * block, *context.shape[2:])[:, :length]


def _attend(
    own: tuple[jax.Array, jax.Array],
    seen: tuple[jax.Array, ...],
    near_QxK: jax.Array | bool,
    cuts: tuple[Selection, Selection],
    dropout_rate: float,
    dropout_key: DropoutKey | None,
    relative: RelativeScores | None = None,
) -> jax.Array:
    """Return the attention of ``own``, queries and their sequence ids, to ``seen``, keys, values and their sequence
    ids, where ``near`` is True and the sequence is the same. ``cuts`` select the queries and the keys from
    [B, S]. If the heads have different keys, the ids of the keys are [B, A, K]. ``relative`` is added to the
    scores."""
    (query, query_ids), (key, value, key_ids) = own, seen
    if key_ids.ndim == 2:
        visible = ((jnp.maximum(query_ids, 1)[:, :, None] == key_ids[:, None, :]) & near_QxK)[:, None]
    else:
        visible = (jnp.maximum(query_ids, 1)[:, None, :, None] == key_ids[:, :, None]) & near_QxK
    probabilities = attention_probabilities(query, key, visible, relative).astype(value.dtype)
    if isinstance(dropout_key, TokenKey):
        probabilities = dropout_of_cut_probabilities(probabilities, dropout_rate, dropout_key, *cuts)
    return jnp.einsum("BTAD,BAST->BSAD", value, probabilities)


def global_features(
    config: ModelConfig, heads: HeadsConfig, features: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Return the features that mark the global tokens of a batch for attention, or {} if the batch has none.
    ``config`` must have global tokens.

    The feature ``global_tokens``, bool or int[B, S], selects them; without it, the heads determine them, as the
    classes of transformers do. ``is_global``, bool[B, S], is True for global tokens; ``global_slots``, int32[B, G],
    contains their positions, and S in empty slots. Of each row, at most the first ``config.global_tokens`` of them
    are kept; a choice head has no limit, and a sequence head keeps one token of each sequence.
    """
    ids = features["sequence_ids"]
    stated, rows = features.get("global_tokens"), ids.shape[1]
    if stated is None and not (heads.sequence_labels or heads.span or heads.choice):
        return {}
    before = jnp.pad(ids, [(0, 0), (1, 0)])[:, :-1]
    begins = (ids > 0) & (ids != before) & ((before > 0) | (jnp.arange(rows) == 0))
    is_global = jnp.zeros_like(begins)
    most: int = config.global_tokens
    if stated is not None:
        is_global = stated != 0
    else:
        separates = (features["input_ids"] == config.separator_id).astype(jnp.int32)
        total = jnp.cumsum(separates, axis=1)
        # The separators of the sequence up to each token.
        changed = ids != before
        own = total - jax.lax.cummax(jnp.where(changed, total - separates, 0), axis=1)
        if heads.choice:
            is_global |= jnp.pad(own * (ids > 0), [(0, 0), (2, 0)])[:, :-2] * _same_as_earlier(ids, 2) > 0
        if heads.span:
            is_global |= own == 0
        if heads.sequence_labels:
            is_global |= begins
        if heads.choice:
            most = rows
        elif heads.sequence_labels and not heads.span:
            most = min(rows, features["cls_positions"].shape[1]) if "cls_positions" in features else 1
    is_global &= ids > 0
    is_global &= jnp.cumsum(is_global, axis=1) <= most
    found = {"is_global": is_global}
    if isinstance(rows, int):
        found["global_slots"] = jax.vmap(lambda row: jnp.flatnonzero(row, size=most, fill_value=rows))(is_global)
    return found


def _same_as_earlier(ids_BxS: jax.Array, distance: int) -> jax.Array:
    """Return 1 for the tokens that have the id of the token ``distance`` places before them."""
    earlier = jnp.pad(ids_BxS, [(0, 0), (distance, 0)])[:, :-distance]
    return (ids_BxS == earlier).astype(jnp.int32)


def _is_at(slots_BxG: jax.Array, length: int) -> jax.Array:
    """Return bool[B, S], True at the positions in ``slots`` that are below ``length``."""
    return jax.vmap(lambda slots: jnp.zeros(length, bool).at[slots].set(True, mode="drop"))(slots_BxG)


def at_slots(x_BxSx_: jax.Array, slots_BxG: jax.Array) -> jax.Array:
    """Return the entries of ``x`` at the positions ``slots``; an empty slot yields the last entry."""
    return jax.vmap(lambda x, slots: jnp.take(x, slots, axis=0, mode="clip"))(x_BxSx_, slots_BxG)


def replace_global(
    context_BxSxAxD: jax.Array,
    query_BxGxAxD: jax.Array,
    key_BxSxAxD: jax.Array,
    value_BxSxAxD: jax.Array,
    sequence_ids_BxS: jax.Array,
    slots_BxG: jax.Array,
    *,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
) -> jax.Array:
    """Return ``context`` in which the entries at the positions ``slots`` are replaced by the attention of these
    tokens to their whole sequences (Beltagy et al. 2020, section 3.1)."""

    def queries(x: jax.Array) -> jax.Array:
        return at_slots(x, slots_BxG)

    own = (query_BxGxAxD, queries(sequence_ids_BxS))
    seen = (key_BxSxAxD, value_BxSxAxD, sequence_ids_BxS)
    rows = _attend(own, seen, True, (queries, lambda x: x), dropout_rate, dropout_key)
    return jax.vmap(lambda x, slots, new: x.at[slots].set(new, mode="drop"))(context_BxSxAxD, slots_BxG, rows)


def _usual_keys(x: jax.Array, block: int) -> jax.Array:
    """Return ``x`` [B, S, ...] of the first block, of each block but the first and the last with its neighbors, and
    of the last block, [B, M, 5 * block, ...]."""
    own = _blocks(x, block)
    near = [own[:, :-2], own[:, 1:-1], own[:, 2:]]
    first, last = (jnp.broadcast_to(end[:, None], near[0].shape) for end in (own[:, 0], own[:, -1]))
    return jnp.concatenate([first, *near, last], axis=2)


def _with_random(usual_BxMxK_: jax.Array, x: jax.Array, block: int, random_AxMxR: jax.Array | None) -> jax.Array:
    """Return ``usual`` and ``x`` [B, S, A, D] of the random blocks of each head, [B * M, K, A, D]; for ``x``
    [B, S], [B * M, A, K]."""
    axis = 2
    if x.ndim == 2:
        batch, inner, width = usual_BxMxK_.shape
        heads, axis = 1 if random_AxMxR is None else len(random_AxMxR), 3
        usual_BxMxK_ = jnp.broadcast_to(usual_BxMxK_[:, :, None], (batch, inner, heads, width))
    if random_AxMxR is not None:
        own = _blocks(x, block)
        if x.ndim == 2:
            chosen = own[:, random_AxMxR].swapaxes(1, 2).reshape(*usual_BxMxK_.shape[:3], -1)
        else:
            pick = jax.vmap(lambda one, plan: one[:, plan], in_axes=(3, 0), out_axes=4)
            chosen = pick(own, random_AxMxR).reshape(*usual_BxMxK_.shape[:2], -1, *x.shape[2:])
        usual_BxMxK_ = jnp.concatenate([usual_BxMxK_, chosen], axis=axis)
    return usual_BxMxK_.reshape(-1, *usual_BxMxK_.shape[2:])


def block_attention(
    query_BxSxAxD: jax.Array,
    key_BxSxAxD: jax.Array,
    value_BxSxAxD: jax.Array,
    sequence_ids_BxS: jax.Array,
    relative: None = None,
    *,
    block: int,
    number: int,
    random_AxMxR: jax.Array | None,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
) -> jax.Array:
    """Compute attention in blocks of ``block`` tokens (Zaheer et al. 2020, section 2; see :func:`has_blocks`).

    The first and the last block see the whole row. Every other block sees itself, its neighbors, the first and the
    last block, each once, and ``random`` blocks; without random blocks, it counts the first block ``number`` more
    times, as transformers does outside training. Returns [batch, queries, heads, head size].
    """
    assert relative is None
    batch, length = sequence_ids_BxS.shape

    def ends(x: jax.Array) -> jax.Array:
        own = _blocks(x, block)
        return jnp.concatenate([own[:, 0], own[:, -1]], axis=1)

    def queries(x: jax.Array) -> jax.Array:
        own = _blocks(x, block)[:, 1:-1]
        return own.reshape(-1, *own.shape[2:])

    def keys(x: jax.Array) -> jax.Array:
        return _with_random(_usual_keys(x, block), x, block, random_AxMxR)

    ids_BxMxK = _usual_keys(sequence_ids_BxS, block)
    # The neighbors that are the first or the last block are seen once.
    ids_BxMxK = ids_BxMxK.at[:, 0, block : 2 * block].set(-1).at[:, -1, 3 * block : 4 * block].set(-1)
    key_ids = _with_random(ids_BxMxK, sequence_ids_BxS, block, random_AxMxR)
    more = None
    if random_AxMxR is None:
        more = RelativeScores(bias_AxSxT=jnp.log(1.0 + number * (jnp.arange(5 * block) < block))[None, None])
    own, row = ((cut(query_BxSxAxD), cut(sequence_ids_BxS)) for cut in (queries, ends))
    seen = (keys(key_BxSxAxD), keys(value_BxSxAxD), key_ids)
    middle = _attend(own, seen, True, (queries, keys), dropout_rate, dropout_key, more)
    middle = middle.reshape(batch, -1, *middle.shape[2:])
    whole = (key_BxSxAxD, value_BxSxAxD, sequence_ids_BxS)
    both = _attend(row, whole, True, (ends, lambda x: x), dropout_rate, dropout_key)
    return jnp.concatenate([both[:, :block], middle, both[:, block:]], axis=1)[:, :length]
