"""Losses on the vectors of the texts of an example (Sentence-BERT, Reimers and Gurevych 2019, and later work).

Shapes: B rows, U examples per row, K texts per example, E width; n = B x U examples of this replica, N examples of
all replicas. Embeddings and weights are float32. Examples of weight 0 affect neither values nor gradients, even if
they are NaN. Divided by the sum of the weights, the losses equal sentence-transformers'.

Two losses, :func:`cosent_loss` and :func:`in_batch_negatives_loss`, compare examples with each other. Inside
``jax.shard_map`` they require ``axis``, the mesh axis over which the batch is sharded: each replica contributes the
share of its local examples, so that the sums and gradients over all replicas equal those on one device. Each
microbatch is a separate batch: the losses of microbatches are averaged.
"""

import functools

import jax
import jax.numpy as jnp

from bert_jax.objectives.objective import Sums, weighted_cross_entropy

# Finite, so that an empty batch has a finite loss, which its weight 0 cancels.
ABSENT = -1e30


def cosine_loss(embeddings_BxUx2xE: jax.Array, targets_BxU: jax.Array, weights_BxU: jax.Array) -> Sums:
    """Return ``loss``, the squared difference between the cosine similarity of the two texts of an example and its
    target (``CosineSimilarityLoss``)."""
    error_BxU = _cosine(_present(embeddings_BxUx2xE, weights_BxU)) - jnp.where(weights_BxU > 0, targets_BxU, 0.0)
    return {"loss": (jnp.sum(error_BxU**2 * weights_BxU), jnp.sum(weights_BxU))}


def triplet_loss(embeddings_BxUx3xE: jax.Array, weights_BxU: jax.Array, *, margin: float = 5.0) -> Sums:
    """Return ``loss``, max(d(anchor, positive) - d(anchor, negative) + margin, 0), and ``accuracy``, the share of
    examples whose positive is nearer than the negative.

    Texts are (anchor, positive, negative); d is the Euclidean distance (``TripletLoss``).
    """
    x_BxUx3xE = _present(embeddings_BxUx3xE, weights_BxU)
    near, far = x_BxUx3xE[:, :, :2], x_BxUx3xE[:, :, ::2]
    near_BxU, far_BxU = _distance(near), _distance(far)
    loss_BxU = jax.nn.relu(near_BxU - far_BxU + margin)
    correct_BxU = (near_BxU < far_BxU).astype(jnp.float32)
    weight = jnp.sum(weights_BxU)
    return {
        "loss": (jnp.sum(loss_BxU * weights_BxU), weight),
        "accuracy": (jnp.sum(correct_BxU * weights_BxU), weight),
    }


def cosent_loss(
    embeddings_BxUx2xE: jax.Array,
    targets_BxU: jax.Array,
    weights_BxU: jax.Array,
    *,
    scale: float = 20.0,
    axis: str | None = None,
) -> Sums:
    """Return ``loss``: log(1 + sum of exp(scale (cos_i - cos_j)) over all i, j with target_i < target_j).

    This is ``CoSENTLoss`` of sentence-transformers. The batch has one loss value, which each replica multiplies by
    the sum of the weights of its local examples. Inside the logarithm, every example with a weight above 0 counts
    fully. Requires memory for N x N floats.
    """
    scores_N = _gather(scale * _cosine(_present(embeddings_BxUx2xE, weights_BxU)).reshape(-1), axis)
    targets_N = _gather(targets_BxU.reshape(-1), axis)
    is_there_N = _gather(weights_BxU.reshape(-1), axis) > 0
    is_pair_NxN = (targets_N[:, None] < targets_N) & is_there_N[:, None] & is_there_N
    terms_NxN = jnp.where(is_pair_NxN, scores_N[:, None] - scores_N, ABSENT)
    loss = jax.nn.logsumexp(jnp.append(terms_NxN.reshape(-1), 0.0))
    weight = jnp.sum(weights_BxU)
    return {"loss": (loss * weight, weight)}


def in_batch_negatives_loss(
    embeddings_BxUxKxE: jax.Array,
    weights_BxU: jax.Array,
    classes_BxU: jax.Array | None = None,
    texts_BxU: jax.Array | None = None,
    *,
    scale: float = 20.0,
    axis: str | None = None,
) -> Sums:
    """Return ``loss`` and ``accuracy`` of retrieving the positive of each anchor among the texts of the batch.

    Texts are (anchor, positive, hard negatives ...). The candidates of every anchor are all positives and all hard
    negatives of the batch, including equal texts (``MultipleNegativesRankingLoss``). With one text as anchor and
    positive, encoded under two dropout masks, this is SimCSE (Gao et al. 2021).

    Args:
        classes_BxU: int, class of each example; the positives of other examples of the same class as the anchor are
            not candidates. Not allowed with hard negatives.
        texts_BxU: int, number of texts of each example, 2 to K; the vectors after them are not read. None: K.
    """
    texts, width = embeddings_BxUxKxE.shape[2:]
    counts_BxU = jnp.where(weights_BxU > 0, texts if texts_BxU is None else texts_BxU, 0)
    has_text_BxUxK = jnp.arange(texts) < counts_BxU[..., None]
    x_nxKxE = _unit(jnp.where(has_text_BxUxK[..., None], embeddings_BxUxKxE, 0.0).reshape(-1, texts, width))
    weights_n = weights_BxU.reshape(-1)
    all_NxKxE = _gather(x_nxKxE, axis)
    has_text_KxN = _gather(has_text_BxUxK.reshape(-1, texts), axis).T
    own_n = jnp.arange(len(weights_n))
    if axis is not None:
        own_n += jax.lax.axis_index(axis) * len(weights_n)

    is_alike_nxN = None
    if classes_BxU is not None:
        assert texts == 2, texts
        classes_n = classes_BxU.reshape(-1)
        classes_N = _gather(classes_n, axis)
        is_alike_nxN = (classes_n[:, None] == classes_N) & (own_n[:, None] != jnp.arange(len(classes_N)))

    anchors_nxE, candidates_KxNxE = x_nxKxE[:, 0], all_NxKxE[:, 1:].swapaxes(0, 1)
    is_candidate = has_text_KxN[1:]
    # The default precision on TPUs is bfloat16, whose error the scale would multiply.
    logits_nxKxN = scale * jnp.einsum("nE,KNE->nKN", anchors_nxE, candidates_KxNxE, precision="highest")
    if is_alike_nxN is not None:
        is_candidate = is_candidate & ~is_alike_nxN[:, None]
    logits = jnp.where(is_candidate, logits_nxKxN, ABSENT).reshape(len(weights_n), -1)
    sums = weighted_cross_entropy("own", logits, own_n, weights_n)
    return {"loss": sums["own_loss"], "accuracy": sums["own_accuracy"]}


def _present(embeddings_BxUxKxE: jax.Array, weights_BxU: jax.Array) -> jax.Array:
    return jnp.where(weights_BxU[..., None, None] > 0, embeddings_BxUxKxE, 0.0)


def _unit(x: jax.Array) -> jax.Array:
    """Divide each row by its norm (at least 1e-12); the gradient of a zero row is finite."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x**2, axis=-1, keepdims=True), 1e-24))


def _cosine(pairs_BxUx2xE: jax.Array) -> jax.Array:
    return jnp.sum(jnp.prod(_unit(pairs_BxUx2xE), axis=2), axis=-1)


def _distance(pairs_BxUx2xE: jax.Array) -> jax.Array:
    """Return the Euclidean distance of each pair; the gradient for equal vectors is 0."""
    squared_BxU = jnp.sum((pairs_BxUx2xE[:, :, 0] - pairs_BxUx2xE[:, :, 1]) ** 2, axis=-1)
    differ_BxU = squared_BxU > 0
    return jnp.where(differ_BxU, jnp.sqrt(jnp.where(differ_BxU, squared_BxU, 1.0)), 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x_n: jax.Array, axis: str | None) -> jax.Array:
    """Return [N, ...], the arrays ``x`` [n, ...] of all replicas along ``axis``, concatenated in replica order.
    Gradients are summed over the replicas."""
    return x_n if axis is None else jax.lax.all_gather(x_n, axis, tiled=True)


def _gather_backward(axis: str | None, _: None, gradient_N: jax.Array) -> tuple[jax.Array]:
    if axis is None:
        return (gradient_N,)
    # By default JAX emits a reduce-scatter, which is wrong across several processes on CPU (design/sharding.md).
    size = len(gradient_N) // jax.lax.axis_size(axis)
    summed_N = jax.lax.psum(gradient_N, axis)
    return (jax.lax.dynamic_slice_in_dim(summed_N, jax.lax.axis_index(axis) * size, size),)


_gather.defvjp(lambda x_n, axis: (_gather(x_n, axis), None), _gather_backward)
