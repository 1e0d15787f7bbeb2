"""Masked language model and sentence-pair objective (google-research/bert ``run_pretraining.py``)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.objectives.sums import Sums, weighted_cross_entropy

# The reference adds this to the MLM weight so that a batch without any masked position gives 0.
MLM_EPSILON = 1e-5


def pretraining_denominators(batch: Mapping[str, jax.Array], has_nsp: bool) -> dict[str, jax.Array]:
    """Denominator of each loss over the whole global batch, known before the first backward pass."""
    denominators = {"mlm_loss": jnp.sum(batch["mlm_weights"]) + MLM_EPSILON}
    if has_nsp:
        denominators["nsp_loss"] = jnp.maximum(jnp.sum(batch["nsp_weights"]), MLM_EPSILON)
    return denominators


def pretraining_loss(mlm_logits: jax.Array, nsp_logits: jax.Array | None, batch: Mapping[str, jax.Array]) -> Sums:
    """(sum, weight) of losses, accuracies and padding; logits [B, M, V] and [B, C, 2] (or None)."""
    with jax.named_scope("mlm_loss"):  # a plan counts its time to the head
        sums = weighted_cross_entropy("mlm", mlm_logits, batch["mlm_labels"], batch["mlm_weights"])
    if nsp_logits is not None:
        sums |= weighted_cross_entropy("nsp", nsp_logits, batch["nsp_labels"], batch["nsp_weights"])
    padding = (batch["sequence_ids"] == 0).astype(jnp.float32)
    sums["padding_fraction"] = (jnp.sum(padding), jnp.asarray(padding.size, jnp.float32))
    return sums


class PretrainingObjective:
    """What pretraining minimises (``bert_jax.objectives.sums.Objective``)."""

    def __init__(self, has_nsp: bool) -> None:
        self._has_nsp = has_nsp

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """See :func:`pretraining_denominators`."""
        return pretraining_denominators(batch, self._has_nsp)

    def sums(self, model: Any, params: Any, batch: Mapping[str, jax.Array], key: Any, **_: Any) -> Sums:
        """See :func:`pretraining_loss`."""
        output = model.apply({"params": params}, batch, key)
        return pretraining_loss(output.mlm_logits, output.nsp_logits, batch)

    def damaged_rows(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Blank rows: a batch of shards has no others."""
        return jnp.sum(jnp.all(batch["sequence_ids"] == 0, axis=-1))
