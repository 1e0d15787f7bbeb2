"""Beam search with cached keys, for any decoder that returns the logits of the next token.

Shapes: G texts, K hypotheses of a text, V vocabulary, T most tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bert_jax.model.canonical import Params

# Score of what does not exist: finite, so that sums and quotients of it stay comparable.
NONE = -1e9

# step(cache, ids int32[G * K], place int32): logits float32[G * K, V] of the tokens after ``ids``, the tokens at
# ``place`` from 0, and the cache with their keys. Rows of the arrays of the cache are hypotheses.
Step = Callable[[Params, jax.Array, jax.Array], tuple[jax.Array, Params]]


class Search(NamedTuple):
    """The start and the end of the search for each text, arrays [G]."""

    # Token before the first one, and token after the last one.
    start_ids: jax.Array
    end_ids: jax.Array
    # Most tokens of a hypothesis, the end included; 0: the text is not translated.
    most_tokens: jax.Array
    # The score of a hypothesis is the sum of its log-probabilities, divided by this power of its number of tokens.
    length_penalty: jax.Array


class Found(NamedTuple):
    """The K best hypotheses of each text: ids int32[G, K, T], -1 from the end token on, and scores
    float32[G, K], the best first."""

    ids: jax.Array
    scores: jax.Array


class _State(NamedTuple):
    made: jax.Array  # int32: tokens of the running hypotheses
    is_open: jax.Array  # bool[G]: the text is still searched
    ids: jax.Array  # int32[G, K, T] of the running hypotheses
    scores: jax.Array  # float32[G, K]: their sums of log-probabilities
    found_ids: jax.Array  # int32[G, K, T] of the best hypotheses that have ended
    found: jax.Array  # float32[G, K]: their scores, divided by the power of the length
    is_found: jax.Array  # bool[G, K]
    cache: Params


def search(step: Step, cache: Params, beams: int, most: int, wanted: Search) -> Found:
    """Return the best hypotheses by beam search; with one beam, by greedy search.

    A step takes the 2 K best continuations of the K running hypotheses. Those that end, if they are among the first
    K, join the K best ended ones; the best K others run on. A text is done when the best running hypothesis, its
    score divided by the power of its present length, is not better than the worst ended one, or at ``most_tokens``,
    where every hypothesis ends. These are the rules of ``generate`` of transformers (``early_stopping`` False).
    """
    groups = len(wanted.start_ids)
    first_K = jnp.where(jnp.arange(beams) == 0, 0.0, NONE)
    nothing = jnp.full((groups, beams, most), -1, jnp.int32)
    state = _State(
        made=jnp.int32(0),
        is_open=wanted.most_tokens > 0,
        ids=nothing,
        scores=jnp.broadcast_to(first_K, (groups, beams)),
        found_ids=nothing,
        found=jnp.full((groups, beams), NONE),
        is_found=jnp.zeros((groups, beams), bool),
        cache=cache,
    )
    state = jax.lax.while_loop(
        lambda state: (state.made < most) & jnp.any(state.is_open), lambda state: _next(step, state, wanted), state
    )
    ended_GxKxT = jnp.cumsum(state.found_ids == wanted.end_ids[:, None, None], axis=-1) > 0
    return Found(jnp.where(ended_GxKxT, -1, state.found_ids), state.found)


def _next(step: Step, state: _State, wanted: Search) -> _State:
    """Return the state with one more token."""
    (groups, beams, _), made = state.ids.shape, state.made
    previous_GxK = jax.lax.dynamic_index_in_dim(state.ids, jnp.maximum(made - 1, 0), axis=2, keepdims=False)
    last_GxK = jnp.where(made == 0, wanted.start_ids[:, None], previous_GxK)
    logits_RxV, cache = step(state.cache, last_GxK.reshape(-1), made)
    log_p_GxKxV = jax.nn.log_softmax(logits_RxV.astype(jnp.float32)).reshape(groups, beams, -1)
    vocabulary = log_p_GxKxV.shape[-1]
    sums_GxN = (log_p_GxKxV + state.scores[:, :, None]).reshape(groups, -1)
    sums_GxC, chosen_GxC = jax.lax.top_k(sums_GxN, min(2 * beams, beams * vocabulary))
    parents_GxC, tokens_GxC = chosen_GxC // vocabulary, chosen_GxC % vocabulary
    ids_GxCxT = jnp.take_along_axis(state.ids, parents_GxC[:, :, None], axis=1)
    ids_GxCxT = jax.lax.dynamic_update_index_in_dim(ids_GxCxT, tokens_GxC, made, axis=2)
    length = made + 1
    at_most_G = length >= wanted.most_tokens
    ends_GxC = (tokens_GxC == wanted.end_ids[:, None]) | at_most_G[:, None]
    # Ended hypotheses.
    divisor_G = length.astype(jnp.float32) ** wanted.length_penalty
    joins_GxC = ends_GxC & (jnp.arange(ends_GxC.shape[1]) < beams) & state.is_open[:, None]
    scores_GxC = sums_GxC / divisor_G[:, None] + jnp.where(joins_GxC, 0.0, NONE)
    found, best_GxK = jax.lax.top_k(jnp.concatenate([state.found, scores_GxC], axis=1), beams)
    found_ids = jnp.take_along_axis(
        jnp.concatenate([state.found_ids, ids_GxCxT], axis=1), best_GxK[:, :, None], axis=1
    )
    is_found = jnp.take_along_axis(jnp.concatenate([state.is_found, joins_GxC], axis=1), best_GxK, axis=1)
    # Running hypotheses.
    scores, kept_GxK = jax.lax.top_k(sums_GxC + jnp.where(ends_GxC, NONE, 0.0), beams)
    ids = jnp.take_along_axis(ids_GxCxT, kept_GxK[:, :, None], axis=1)
    parents_GxK = jnp.take_along_axis(parents_GxC, kept_GxK, axis=1)
    rows_R = (jnp.arange(groups)[:, None] * beams + parents_GxK).reshape(-1)
    cache = cache if beams == 1 else jax.tree.map(lambda leaf: leaf[rows_R], cache)
    # A better one may still end, unless the search is greedy.
    worst_GxK = jnp.where(is_found, found.min(axis=1, keepdims=True), NONE)
    is_open = state.is_open & ~at_most_G & jnp.any(scores[:, :1] / divisor_G[:, None] > worst_GxK, axis=1)
    is_open &= ~is_found[:, 0] if beams == 1 else True
    return _State(length, is_open, ids, scores, found_ids, found, is_found, cache)
