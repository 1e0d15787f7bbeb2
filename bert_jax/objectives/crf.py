"""Linear-chain conditional random field over the tags of packed rows (Lafferty et al. 2001).

Shapes: B rows, S tokens, L labels. A chain consists of the scored tokens (first pieces of words) of one sequence
of a row; its score is start[first tag] + sum of transitions[tag, next tag] + emissions + end[last tag], in float32.
Sequence ids ascend along a row. Tokens that are not scored affect neither values nor gradients.
"""

import jax
import jax.numpy as jnp

from bert_jax.objectives.objective import Sums, denominator

# Scores of the paths of the current chain [B, L], its last label [B], and whether a chain has begun [B].
_Chain = tuple[jax.Array, jax.Array, jax.Array]


def chain_starts(sequence_ids_BxS: jax.Array, is_scored_BxS: jax.Array) -> jax.Array:
    """Return bool[B, S], True at the first scored token of each sequence."""
    ids_BxS = jnp.where(is_scored_BxS, sequence_ids_BxS, 0)
    before_BxS = jnp.pad(jax.lax.cummax(ids_BxS, axis=1)[:, :-1], ((0, 0), (1, 0)))
    return ids_BxS > before_BxS


def crf_denominator(sequence_ids_BxS: jax.Array, is_scored_BxS: jax.Array) -> jax.Array:
    """Return the number of chains in the global batch, at least 1."""
    return denominator(chain_starts(sequence_ids_BxS, is_scored_BxS).astype(jnp.float32))


def crf_loss(
    emissions_BxSxL: jax.Array,
    labels_BxS: jax.Array,
    sequence_ids_BxS: jax.Array,
    is_scored_BxS: jax.Array,
    transitions_LxL: jax.Array,
    start_L: jax.Array,
    end_L: jax.Array,
) -> Sums:
    """Return ``loss``: -log p(labels of a chain), summed over chains; the weight is the number of chains.

    The forward recursion carries log-sums relative to the score of the labels, so that the loss is not a small
    difference of two numbers that grow with the row length.
    """
    starts_BxS = chain_starts(sequence_ids_BxS, is_scored_BxS)
    labels_BxS = jnp.where(is_scored_BxS, labels_BxS, 0)

    def close(alpha_BxL: jax.Array, label_B: jax.Array, is_open_B: jax.Array) -> jax.Array:
        """Return, for each row, the loss of its current chain, whose last label is ``label``; 0 if no chain has
        started."""
        return jnp.where(is_open_B, jax.nn.logsumexp(alpha_BxL + end_L - end_L[label_B][:, None], axis=-1), 0.0)

    def advance(carry: _Chain, token: tuple[jax.Array, ...]) -> tuple[_Chain, None]:
        alpha_BxL, last_B, is_open_B = carry
        emission_BxL, label_B, is_scored_B, starts_B = token
        first_BxL = close(*carry)[:, None] + start_L - start_L[label_B][:, None]
        moves_BxLxL = transitions_LxL - transitions_LxL[last_B, label_B][:, None, None]
        next_BxL = jax.nn.logsumexp(alpha_BxL[:, :, None] + moves_BxLxL, axis=1)
        is_label = label_B[:, None] == jnp.arange(len(start_L))
        emission_BxL -= jnp.sum(jnp.where(is_label, emission_BxL, 0.0), axis=-1, keepdims=True)
        new_BxL = jnp.where(starts_B[:, None], first_BxL, next_BxL) + emission_BxL
        alpha_BxL = jnp.where(is_scored_B[:, None], new_BxL, alpha_BxL)
        return (alpha_BxL, jnp.where(is_scored_B, label_B, last_B), is_open_B | is_scored_B), None

    first = (jnp.zeros_like(emissions_BxSxL[:, 0]), labels_BxS[:, 0], jnp.zeros_like(is_scored_BxS[:, 0]))
    tokens = (emissions_BxSxL, labels_BxS, is_scored_BxS, starts_BxS)
    last, _ = jax.lax.scan(advance, first, tuple(x.swapaxes(0, 1) for x in tokens))
    return {"loss": (jnp.sum(close(*last)), jnp.sum(starts_BxS.astype(jnp.float32)))}


def crf_decode(
    emissions_BxSxL: jax.Array,
    sequence_ids_BxS: jax.Array,
    is_scored_BxS: jax.Array,
    transitions_LxL: jax.Array,
    start_L: jax.Array,
    end_L: jax.Array,
) -> jax.Array:
    """Return int32[B, S], the tags of the best path of each chain (Viterbi); 0 for tokens that are not scored."""
    starts_BxS = chain_starts(sequence_ids_BxS, is_scored_BxS)

    def advance(best_BxL: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        emission_BxL, is_scored_B, starts_B = token
        starts_Bx1 = starts_B[:, None]
        # The first token of a chain follows the best end of the preceding chain, for every tag.
        onward_LxL = jnp.broadcast_to(end_L[:, None], transitions_LxL.shape)
        scores_BxLxL = best_BxL[:, :, None] + jnp.where(starts_Bx1[..., None], onward_LxL, transitions_LxL)
        new_BxL = jnp.where(starts_Bx1, start_L, jnp.max(scores_BxLxL, axis=1)) + emission_BxL
        stays_L = jnp.arange(len(start_L))
        from_BxL = jnp.where(is_scored_B[:, None], jnp.argmax(scores_BxLxL, axis=1), stays_L)
        return jnp.where(is_scored_B[:, None], new_BxL, best_BxL), from_BxL

    def retreat(tag_B: jax.Array, from_BxL: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.take_along_axis(from_BxL, tag_B[:, None], axis=1)[:, 0], tag_B

    tokens = (emissions_BxSxL, is_scored_BxS, starts_BxS)
    nothing = jnp.zeros_like(emissions_BxSxL[:, 0])
    best_BxL, from_SxBxL = jax.lax.scan(advance, nothing, tuple(x.swapaxes(0, 1) for x in tokens))
    _, tags_SxB = jax.lax.scan(retreat, jnp.argmax(best_BxL + end_L, axis=-1), from_SxBxL, reverse=True)
    return jnp.where(is_scored_BxS, tags_SxB.swapaxes(0, 1), 0).astype(jnp.int32)
