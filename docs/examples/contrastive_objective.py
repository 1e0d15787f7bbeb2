"""A contrastive objective of one's own, with a queue: the masked text is to find its whole text among others.

    python run_pretrain.py --config configs/quickstart.yaml --data.next_sentence none \\
        --objective.module docs/examples/contrastive_objective.py

The two views of a text, with masks and without them, have different dropout (Gao et al. 2021); each is averaged
over the tokens. The other texts are those of the batch and those of a queue of earlier batches (He et al. 2020),
whose vectors the same encoder has computed (Wang et al. 2020, section 3.2). The masked tokens are learned too.

An installed package offers it as ``--objective.name contrastive``, with the options of ``Config``, by the entry
points ``contrastive = contrastive_objective:Objective`` of the group ``bert_jax.objectives`` and ``contrastive =
contrastive_objective:Config`` of the group ``bert_jax.objective_options``.

Shapes: B rows, S tokens, Q texts of the queue of a row, H width.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from bert_jax.config import HeadsConfig
from bert_jax.config.objective import ObjectiveConfig
from bert_jax.config.schema import Positive, require
from bert_jax.model import BertForPretraining, BertModel
from bert_jax.model.dropout import Site, site_key
from bert_jax.model.flops import training_flops
from bert_jax.model.pooling import pool
from bert_jax.objectives.display import Column, Display, Panel, Tile
from bert_jax.objectives.masked_lm import MaskedLm
from bert_jax.objectives.objective import (
    TEXT_FEATURES,
    denominator,
    padding_sums,
    weighted_cross_entropy,
    with_predictions,
    z_loss,
)
from bert_jax.objectives.sentence_losses import in_batch_negatives_loss

# Added to the dropout keys of the second view; larger than the number of a layer.
SECOND_VIEW = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Config(ObjectiveConfig):
    """The section ``objective``; the file of ``objective.module`` keeps its defaults."""

    TITLE: ClassVar[str] = "masked tokens, and each masked text found among others, with data.next_sentence none"

    # Earlier batches whose texts are in the queue.
    queue_batches: Positive[int] = 4
    # Cosines are divided by this.
    temperature: Positive[float] = 0.05
    # Weight of the contrastive loss; that of the masked tokens is 1.
    contrastive_weight: Positive[float] = 0.1


class Objective(MaskedLm):
    """Cross-entropy of the masked tokens, and of the own text among all texts of the batch and of the queue."""

    features = TEXT_FEATURES
    display = Display(
        keys=("mlm_loss", "contrastive_loss", "mlm_accuracy", "contrastive_accuracy"),
        columns=(
            Column("mlm {}", "mlm_loss", accuracy="mlm_accuracy"),
            Column("contrastive {}", "contrastive_loss", accuracy="contrastive_accuracy"),
        ),
        panels=(
            Panel("masked-token loss (nats)", "mlm_loss"),
            Panel("contrastive loss (nats)", "contrastive_loss"),
            Panel("texts that are found", "contrastive_accuracy", percent=True),
        ),
        tiles=(
            Tile("held-out masked-token loss", "mlm_loss"),
            Tile("held-out contrastive loss", "contrastive_loss"),
        ),
    )

    @staticmethod
    def make_model(config, mesh):
        for key, value in (
            ("data.next_sentence", config.data.next_sentence),
            ("data.packing", config.data.packing),
        ):
            require(value == "none", key, value, "none with the contrastive objective")
        return BertForPretraining(config.model, config.execution, False, mesh)

    @property
    def options(self):
        return self.config.objective if isinstance(self.config.objective, Config) else Config()

    def carried(self):
        shape = self.batch_rows, self.options.queue_batches, self.config.model.hidden_size
        return {"queue": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def denominators(self, batch):
        texts = denominator(has_text(batch)) / self.options.contrastive_weight
        return super().denominators(batch) | {"contrastive_loss": texts}

    def sums(self, params, aux, batch, key, *, axis):
        weights_B, mask_BxS = has_text(batch), batch["sequence_ids"] > 0
        masked = self.model.apply({"params": params}, batch, key)
        sums = weighted_cross_entropy("mlm", masked.mlm_logits, batch["mlm_labels"], batch["mlm_weights"])
        sums |= z_loss("mlm", self.config.objective.z_loss, masked.mlm_logits, batch["mlm_weights"])
        whole = batch | {"input_ids": with_predictions(batch["input_ids"], batch, batch["mlm_labels"])}
        encoder = BertModel(self.config.model, self.config.execution, HeadsConfig(), mesh=self.mesh)
        own = {name: params[name] for name in ("embeddings", "encoder")}
        with jax.named_scope("second_view"):
            output = encoder.apply({"params": own}, whole, site_key(key, SECOND_VIEW, Site.EMBEDDINGS))
        first_BxH, second_BxH = (pool(each.sequence_output, mask_BxS, "mean") for each in (masked, output))
        texts_Bx2xH, counts_Bx1, carried = jnp.stack([first_BxH, second_BxH], axis=1), None, aux.carried
        if carried is not None:
            queue_BxQxH = carried["queue"]  # newest first, 0 before its first texts
            texts_Bx2xH = jnp.concatenate([texts_Bx2xH, queue_BxQxH], axis=1)
            counts_Bx1 = 2 + jnp.sum(jnp.any(queue_BxQxH != 0, axis=-1), axis=-1, keepdims=True)
            new_BxQxH = jnp.concatenate([second_BxH[:, None], queue_BxQxH[:, :-1]], axis=1)
            new_BxQxH = jnp.where(weights_B[:, None, None] > 0, new_BxQxH, queue_BxQxH)
            carried = {"queue": jax.lax.stop_gradient(new_BxQxH)}
        found = in_batch_negatives_loss(
            texts_Bx2xH[:, None], weights_B[:, None], texts_BxU=counts_Bx1, scale=1 / self.options.temperature,
            axis=axis,
        )  # fmt: skip
        sums |= {f"contrastive_{name}": pair for name, pair in found.items()}
        return sums | padding_sums(batch["sequence_ids"]), carried

    def flops_per_sequence(self):
        shape = self.row_shape
        sizes = {"seq_length": shape.seq_length, "max_predictions": shape.max_predictions, "has_nsp": False}
        counts = training_flops(self.config.model, **sizes)
        return counts.total() + sum(number for scope, number in counts.items() if "mlm_head" not in scope)

    def evaluation(self, totals):
        values = super().evaluation(totals)
        return values | {"loss": values["mlm_loss"] + self.options.contrastive_weight * values["contrastive_loss"]}


def has_text(batch):
    """Return float32[B], 1 for rows with tokens and 0 for those of damaged records."""
    return jnp.any(batch["sequence_ids"] > 0, axis=-1).astype(jnp.float32)
