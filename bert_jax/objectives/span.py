"""Loss of the start and the end of an answer in packed rows (google-research/bert ``run_squad.py``)."""

import jax
import jax.numpy as jnp

from bert_jax.objectives.objective import Sums

# Finite, so that a slot without tokens has a finite loss, which its weight 0 cancels.
ABSENT = -1e30


def span_loss(
    start_logits_BxS: jax.Array,
    end_logits_BxS: jax.Array,
    sequence_ids_BxS: jax.Array,
    starts_BxC: jax.Array,
    ends_BxC: jax.Array,
    weights_BxC: jax.Array,
) -> Sums:
    """Return ``loss``, the mean of the cross-entropies of start and end, and ``accuracy``, the share of answers
    with both correct.

    Logits are float32. ``starts`` and ``ends`` are the positions in the row of the first and the last token of the
    answer; the answer in slot k - 1 is among the tokens with sequence id k. The softmax is over these tokens,
    including special ones, as in the reference and in transformers for an input without padding (their softmax also
    includes any padding).
    """
    slots_C = jnp.arange(weights_BxC.shape[1])
    own_BxCxS = (sequence_ids_BxS[:, None] == slots_C[:, None] + 1) & (weights_BxC[..., None] > 0)

    def side(logits_BxS: jax.Array, targets_BxC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return two arrays [B, C] with one entry per answer: the cross-entropy of the target, and True where the
        target has the largest logit."""
        logits_BxCxS = jnp.where(own_BxCxS, logits_BxS[:, None], ABSENT)
        is_target = jnp.arange(logits_BxS.shape[1]) == targets_BxC[..., None]
        target_BxC = jnp.sum(jnp.where(is_target, logits_BxCxS, 0.0), axis=-1)
        return jax.nn.logsumexp(logits_BxCxS, axis=-1) - target_BxC, target_BxC >= jnp.max(logits_BxCxS, axis=-1)

    start_loss_BxC, start_right_BxC = side(start_logits_BxS, starts_BxC)
    end_loss_BxC, end_right_BxC = side(end_logits_BxS, ends_BxC)
    right_BxC = (start_right_BxC & end_right_BxC).astype(jnp.float32)
    weight = jnp.sum(weights_BxC)
    return {
        "loss": (jnp.sum((start_loss_BxC + end_loss_BxC) / 2 * weights_BxC), weight),
        "accuracy": (jnp.sum(right_BxC * weights_BxC), weight),
    }
