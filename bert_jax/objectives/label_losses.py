"""Losses on one vector of logits per example: single-label and multi-label classification, regression.

Shapes: B rows, U examples per row, L labels. Logits, targets and weights are float32. Examples of weight 0 affect
neither values nor gradients, even if they are NaN.
"""

import jax
import jax.numpy as jnp

from bert_jax.objectives.objective import Sums, denominator

# Lower bound of 1 - p: if p rounds to 1, (1 - p)^gamma with gamma below 1 has no finite gradient.
SMALLEST_COMPLEMENT = 1e-12


def softmax_denominator(
    labels: jax.Array, weights: jax.Array, class_weights_L: jax.Array | None = None
) -> jax.Array:
    """Return the denominator of :func:`softmax_loss` over the global batch; 1 if all weights are 0."""
    return denominator(label_weights(labels, weights, class_weights_L))


def label_weights(labels: jax.Array, weights: jax.Array, class_weights_L: jax.Array | None) -> jax.Array:
    """Return ``weights`` times the class weight of the label of each example."""
    if class_weights_L is None:
        return weights
    is_label = labels[..., None] == jnp.arange(len(class_weights_L))
    return weights * jnp.sum(jnp.where(is_label, class_weights_L, 0.0), axis=-1)


def softmax_loss(
    logits_BxUxL: jax.Array,
    labels_BxU: jax.Array,
    weights_BxU: jax.Array,
    *,
    label_smoothing: float = 0.0,
    focal_gamma: float = 0.0,
    class_weights_L: jax.Array | None = None,
) -> Sums:
    """Return ``loss`` and ``accuracy`` of predicting one of L classes or choices; labels are int[B, U] in [0, L).

    The cost of class c is -w_c (1 - p_c)^gamma log p_c (w: class weight; focal loss, Lin et al. 2017), and the loss
    is (1 - s) cost_label + s mean(cost) with label smoothing s. With gamma 0, loss / :func:`softmax_denominator` is
    ``torch.nn.CrossEntropyLoss(weight, label_smoothing)``, in which the smoothed part uses the weight w_c of each
    class, and the denominator uses the weight of the label.
    """
    logits_BxUxL = jnp.where(weights_BxU[..., None] > 0, logits_BxUxL, 0.0)
    log_p_BxUxL = jax.nn.log_softmax(logits_BxUxL)
    costs_BxUxL = -log_p_BxUxL
    if focal_gamma:
        costs_BxUxL *= jnp.maximum(-jnp.expm1(log_p_BxUxL), SMALLEST_COMPLEMENT) ** focal_gamma
    if class_weights_L is not None:
        costs_BxUxL *= class_weights_L
    is_label = labels_BxU[..., None] == jnp.arange(logits_BxUxL.shape[-1])
    loss_BxU = jnp.sum(jnp.where(is_label, costs_BxUxL, 0.0), axis=-1)
    if label_smoothing:
        loss_BxU = (1 - label_smoothing) * loss_BxU + label_smoothing * jnp.mean(costs_BxUxL, axis=-1)
    correct_BxU = (jnp.argmax(logits_BxUxL, axis=-1) == labels_BxU).astype(jnp.float32)
    weight = jnp.sum(label_weights(labels_BxU, weights_BxU, class_weights_L))
    return {
        "loss": (jnp.sum(loss_BxU * weights_BxU), weight),
        "accuracy": (jnp.sum(correct_BxU * weights_BxU), jnp.sum(weights_BxU)),
    }


def multilabel_loss(
    logits_BxUxL: jax.Array, targets_BxUxL: jax.Array, weights_BxU: jax.Array, *, focal_gamma: float = 0.0
) -> Sums:
    """Return ``loss`` (sigmoid cross-entropy, mean over labels) and ``accuracy`` (share of correct labels).

    Targets are in [0, 1]. With gamma 0, loss / sum of weights equals the loss of the transformers problem type
    ``multi_label_classification``. Otherwise, the loss of each label is multiplied by (1 - p)^gamma, where p is the
    probability of its target (Lin et al. 2017).
    """
    import optax  # only training needs it

    is_there = weights_BxU[..., None] > 0
    logits_BxUxL = jnp.where(is_there, logits_BxUxL, 0.0)
    targets_BxUxL = jnp.where(is_there, targets_BxUxL, 0.0)
    loss_BxUxL = optax.losses.sigmoid_focal_loss(logits_BxUxL, targets_BxUxL, gamma=focal_gamma)
    correct_BxUxL = ((logits_BxUxL > 0) == (targets_BxUxL > 0.5)).astype(jnp.float32)
    weight = jnp.sum(weights_BxU)
    return {
        "loss": (jnp.sum(jnp.mean(loss_BxUxL, axis=-1) * weights_BxU), weight),
        "accuracy": (jnp.sum(jnp.mean(correct_BxUxL, axis=-1) * weights_BxU), weight),
    }


def regression_loss(predictions_BxUxL: jax.Array, targets_BxUxL: jax.Array, weights_BxU: jax.Array) -> Sums:
    """Return ``loss``, the squared error, averaged over the L values of an example (transformers:
    ``regression``)."""
    is_there = weights_BxU[..., None] > 0
    error_BxUxL = jnp.where(is_there, predictions_BxUxL, 0.0) - jnp.where(is_there, targets_BxUxL, 0.0)
    return {"loss": (jnp.sum(jnp.mean(error_BxUxL**2, axis=-1) * weights_BxU), jnp.sum(weights_BxU))}
