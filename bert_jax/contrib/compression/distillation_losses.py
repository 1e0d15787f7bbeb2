"""Losses between a student and a teacher (Hinton et al. 2015; DistilBERT, Sanh et al. 2019; TinyBERT, Jiao et al.
2020; MiniLM v2, Wang et al. 2021).

Shapes: B rows, S tokens, V vocabulary or classes, H width, A heads, D width of a head. All values of the teacher
are constants: no gradient reaches them. A row may hold several sequences; a token sees the tokens of its sequence
(``sequence_ids``, 0 at padding).
"""

import jax
import jax.numpy as jnp

from bert_jax.objectives.objective import Sums, log_normalizer


def soft_target_loss(
    name: str, student: jax.Array, teacher: jax.Array, weights: jax.Array, temperature: float
) -> Sums:
    """Return ``{name}_loss``: the square of ``temperature`` times the Kullback-Leibler divergence of the student's
    distribution from the teacher's, both of logits [..., V] divided by ``temperature`` (Hinton et al. 2015, section
    2; the square keeps the size of the gradient). ``weights`` float32[...]."""
    targets, logits = (x.astype(jnp.float32) / temperature for x in (jax.lax.stop_gradient(teacher), student))
    probabilities = jax.nn.softmax(targets, axis=-1)
    # Pieces that pad the vocabulary have the logit -inf in both, and count nothing.
    is_possible = probabilities > 0
    expected = jnp.where(is_possible, probabilities * jnp.where(is_possible, targets - logits, 0), 0)
    divergence = jnp.sum(expected, axis=-1) + log_normalizer(logits)[0] - log_normalizer(targets)[0]
    return {f"{name}_loss": (temperature**2 * jnp.sum(divergence * weights), jnp.sum(weights))}


def cosine_distance_loss(
    name: str, student_BxSxH: jax.Array, teacher_BxSxH: jax.Array, weights_BxS: jax.Array
) -> Sums:
    """Return ``{name}_loss``: 1 minus the cosine of the vectors of a token (DistilBERT, section 3)."""
    student, teacher = (x.astype(jnp.float32) for x in (student_BxSxH, jax.lax.stop_gradient(teacher_BxSxH)))
    squares = jnp.sum(student**2, axis=-1) * jnp.sum(teacher**2, axis=-1)
    cosine_BxS = jnp.sum(student * teacher, axis=-1) * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))
    return {f"{name}_loss": (jnp.sum((1 - cosine_BxS) * weights_BxS), jnp.sum(weights_BxS))}


def squared_error_loss(
    name: str, student_BxSxH: jax.Array, teacher_BxSxH: jax.Array, weights_BxS: jax.Array
) -> Sums:
    """Return ``{name}_loss``, the squared difference between the two vectors of each token, averaged over H.

    TinyBERT, equation 8. The caller projects the student's vectors to the teacher's width first.
    """
    difference = student_BxSxH.astype(jnp.float32) - jax.lax.stop_gradient(teacher_BxSxH).astype(jnp.float32)
    error_BxS = jnp.mean(difference**2, axis=-1)
    return {f"{name}_loss": (jnp.sum(error_BxS * weights_BxS), jnp.sum(weights_BxS))}


def score_loss(
    name: str,
    student: tuple[jax.Array, jax.Array],
    teacher: tuple[jax.Array, jax.Array],
    sequence_ids_BxS: jax.Array,
) -> Sums:
    """Return ``{name}_loss``: the squared difference of the attention scores before the softmax, the mean over
    heads and over the pairs of tokens that see each other (TinyBERT, equation 7).

    ``student`` and ``teacher``: queries and keys, each [B, S, A, D], with the same A.
    """
    scores = [_scores(*pair) for pair in (student, jax.lax.stop_gradient(teacher))]
    sees_BxSxS = _sees(sequence_ids_BxS)
    error_BxSxS = jnp.mean((scores[0] - scores[1]) ** 2, axis=1)
    return {f"{name}_loss": (jnp.sum(jnp.where(sees_BxSxS, error_BxSxS, 0)), visible_pairs(sequence_ids_BxS))}


def relation_loss(
    name: str, student_BxSxH: jax.Array, teacher_BxSxH: jax.Array, sequence_ids_BxS: jax.Array, heads: int
) -> Sums:
    """Return ``{name}_loss``: the Kullback-Leibler divergence of the student's relations from the teacher's, the
    mean over ``heads`` and over tokens (MiniLM v2, equation 3).

    Each vector is split into ``heads`` equal parts. In each part, the relations of a token are a softmax over the
    scaled dot products of its vector with the vectors of all tokens of its sequence. The vectors are the queries,
    keys or values of all heads; student and teacher may have different widths, if ``heads`` divides both.
    """
    sees_Bx1xSxS = _sees(sequence_ids_BxS)[:, None]
    logs = []
    for x_BxSxH in (student_BxSxH, jax.lax.stop_gradient(teacher_BxSxH)):
        parts = x_BxSxH.reshape(*x_BxSxH.shape[:2], heads, -1)
        scores = jnp.where(sees_Bx1xSxS, _scores(parts, parts), jnp.finfo(jnp.float32).min)
        logs.append(jax.nn.log_softmax(scores, axis=-1))
    student, teacher = logs
    terms = jnp.where(sees_Bx1xSxS, jnp.exp(teacher) * (teacher - student), 0)
    tokens_BxS = (sequence_ids_BxS > 0).astype(jnp.float32)
    divergence_BxS = jnp.mean(jnp.sum(terms, axis=-1), axis=1)
    return {f"{name}_loss": (jnp.sum(divergence_BxS * tokens_BxS), jnp.sum(tokens_BxS))}


def visible_pairs(sequence_ids_BxS: jax.Array) -> jax.Array:
    """Return float32[]: the number of pairs of tokens that see each other, the denominator of
    :func:`score_loss`."""
    return jnp.sum(_sees(sequence_ids_BxS).astype(jnp.float32))


def _sees(sequence_ids_BxS: jax.Array) -> jax.Array:
    """Return bool[B, S, S]: True if two tokens belong to one sequence."""
    return (sequence_ids_BxS[:, :, None] == sequence_ids_BxS[:, None]) & (sequence_ids_BxS[:, :, None] > 0)


def _scores(queries_BxSxAxD: jax.Array, keys_BxSxAxD: jax.Array) -> jax.Array:
    """Return the scaled products, float32[B, A, S, S]."""
    queries, keys = (x.astype(jnp.float32) for x in (queries_BxSxAxD, keys_BxSxAxD))
    return jnp.einsum("BSAD,BTAD->BAST", queries, keys, precision="highest") / queries.shape[-1] ** 0.5
