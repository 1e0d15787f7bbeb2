"""Losses between the outputs of a student and of a teacher (Hinton et al. 2015; DistilBERT, Sanh et al. 2019).

Shapes: B rows, S tokens, V vocabulary or classes, H width. All values of the teacher are constants: no gradient
reaches them.
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
