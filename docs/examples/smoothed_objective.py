"""A pretraining objective of one's own: masked tokens with label smoothing (Szegedy et al. 2016, section 7).

    python run_pretrain.py --config configs/quickstart.yaml --data.next_sentence none \\
        --objective.module docs/examples/smoothed_objective.py

Training gives every other piece of the vocabulary a small share of the target, so that predictions stay less sure;
held-out data are measured without that.
"""

import jax
import jax.numpy as jnp

from bert_jax.model import BertForPretraining
from bert_jax.objectives.display import Column, Display, Panel, Tile
from bert_jax.objectives.objective import PretrainObjective, denominator, padding_sums, weighted_cross_entropy

SMOOTHING = 0.1


class Objective(PretrainObjective):
    """Cross-entropy against 1 - SMOOTHING on the masked token and SMOOTHING spread over the vocabulary."""

    features = ("input_ids", "token_type_ids", "sequence_ids", "position_ids", "mlm_positions", "mlm_labels",
                "mlm_weights")  # fmt: skip
    display = Display(
        keys=("smoothed_loss", "token_loss", "token_accuracy"),
        columns=(Column("token {}", "token_loss", accuracy="token_accuracy"),),
        panels=(Panel("token loss (nats)", "token_loss"), Panel("token accuracy", "token_accuracy", percent=True)),
        tiles=(Tile("held-out token loss", "token_loss"),),
    )

    @staticmethod
    def make_model(config, mesh):
        return BertForPretraining(config.model, config.execution, False, mesh)

    def denominators(self, batch):
        return {"smoothed_loss": denominator(batch["mlm_weights"])}

    def sums(self, params, aux, batch, key, *, axis):
        logits = self.model.apply({"params": params}, batch, key).mlm_logits
        sums = weighted_cross_entropy("token", logits, batch["mlm_labels"], batch["mlm_weights"])
        # Padded rows of the vocabulary have a logit of -inf.
        log_p = jnp.where(jnp.isfinite(logits), jax.nn.log_softmax(logits), 0.0)
        spread = -jnp.sum(log_p, axis=-1) / self.config.model.vocab_size
        total, weight = sums["token_loss"]
        smoothed = (1 - SMOOTHING) * total + SMOOTHING * jnp.sum(spread * batch["mlm_weights"])
        sums |= {"smoothed_loss": (smoothed, weight)} | padding_sums(batch["sequence_ids"])
        return sums, aux.carried

    def evaluation(self, totals):
        values = super().evaluation(totals)
        return values | {"loss": values["token_loss"]}
