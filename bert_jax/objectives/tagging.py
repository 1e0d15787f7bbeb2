"""One label per token."""

import jax

from bert_jax.objectives.classification import softmax_loss
from bert_jax.objectives.sums import Sums


def token_loss(logits_BxSxL: jax.Array, labels_BxS: jax.Array, weights_BxS: jax.Array) -> Sums:
    """``loss`` (cross-entropy) and ``accuracy`` over the tokens; weight 0 where there is no label (special tokens,
    later pieces of a word, padding), whatever stands in ``labels`` there."""
    return softmax_loss(logits_BxSxL, labels_BxS, weights_BxS)
