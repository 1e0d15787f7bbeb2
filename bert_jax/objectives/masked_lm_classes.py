"""Masked language model, sentence pairs, and the class of labeled documents, trained together."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import PRETRAIN_FEATURES, Batch
from bert_jax.config import PretrainConfig
from bert_jax.model import BertForPretraining, BertModel, BertOutput
from bert_jax.model.bert import present
from bert_jax.objectives.display import Column, Panel, Sample, Tile
from bert_jax.objectives.masked_lm import MLM_EPSILON, MaskedLm
from bert_jax.objectives.objective import Sums, weighted_cross_entropy


class MaskedLmClasses(MaskedLm):
    """The losses of :class:`MaskedLm`, plus ``objective.class_weight`` times the mean cross-entropy of the classes
    of labeled documents, predicted from the pooled output of each sequence.

    A batch without labeled documents has class loss 0. The heads equal a fine-tuned classifier's, so that
    ``bert-jax predict`` reads the run.
    """

    display = dataclasses.replace(
        MaskedLm.display,
        keys=(*MaskedLm.display.keys, "class_loss", "class_accuracy"),
        columns=(*MaskedLm.display.columns, Column("class {}", "class_loss", accuracy="class_accuracy")),
        panels=(
            *MaskedLm.display.panels,
            Panel("class loss (nats)", "class_loss"),
            Panel("class accuracy", "class_accuracy", percent=True),
        ),
        tiles=(*MaskedLm.display.tiles, Tile("held-out class accuracy", "class_accuracy")),
    )
    features = tuple(PRETRAIN_FEATURES)

    @staticmethod
    def make_model(config: PretrainConfig, mesh: Mesh | None) -> BertModel:
        """Return the model with the heads that the losses need. Raises ``ValueError`` without ``data.classes``."""
        if not config.data.classes:
            raise ValueError(
                "data.classes: none are given, but objective.name masked_lm_classes predicts them; name the field "
                "of the JSON lines in data.label_field and its values in data.classes"
            )
        model = BertForPretraining(config.model, config.execution, config.has_nsp, mesh)
        heads = dataclasses.replace(model.heads, pooler=True, sequence_labels=config.data.classes)
        return model.clone(heads=heads)

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        labeled = jnp.sum(batch["document_classes"] > 0).astype(jnp.float32)
        of_classes = jnp.maximum(labeled, MLM_EPSILON) / self.config.objective.class_weight
        return super().denominators(batch) | {"class_loss": of_classes}

    def sequence_sums(self, output: BertOutput, batch: Batch) -> Sums:
        classes = batch["document_classes"]
        weights = (classes > 0).astype(jnp.float32)
        sums = weighted_cross_entropy(
            "class", present(output.sequence_logits), jnp.maximum(classes - 1, 0), weights
        )
        return super().sequence_sums(output, batch) | sums

    def evaluation(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        values = super().evaluation(totals)
        values["loss"] += self.config.objective.class_weight * values.get("class_loss", 0.0)
        return values

    def result_lines(self, final: Mapping[str, float], samples: Sequence[Sample]) -> list[str]:
        lines = super().result_lines(final, samples)
        if "class_accuracy" in final:
            of_classes = f"classes: accuracy {final['class_accuracy']:.4f}, loss {final['class_loss']:.4f}"
            lines.insert(1, of_classes)
        return lines
