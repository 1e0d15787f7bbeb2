"""Bidirectional language model of ELMo (Peters et al. 2018, section 3.1): each token is predicted from those before
it by one LSTM, and from those after it by another.

Shapes: B rows, S tokens per row, V vocabulary size.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.config import HeadsConfig, PretrainConfig
from bert_jax.model import BertModel
from bert_jax.model.canonical import Params, Shapes
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.layers import CACHE_FEATURES
from bert_jax.objectives.causal_lm import next_weights, original_ids
from bert_jax.objectives.display import Column, Display, Panel, Sample, Tile
from bert_jax.objectives.objective import (
    TEXT_FEATURES,
    Aux,
    Batch,
    PretrainObjective,
    Summed,
    apply_carried,
    cache_shapes,
    denominator,
    padding_sums,
    weighted_cross_entropy,
)


class BidirectionalModel(BertModel):
    """The encoder with one output layer, which both directions share."""

    def __call__(  # type: ignore[override]
        self, features: Mapping[str, jax.Array], dropout_key: DropoutKey | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return float32[B, S - 1, V] twice: the logits of tokens 1 to S - 1 from those before them, and of tokens
        0 to S - 2 from those after them."""
        x_BxSxE, table_VxE = self.embeddings(
            features["input_ids"], features["token_type_ids"], features["position_ids"], dropout_key
        )
        names = ("sequence_ids", "position_ids", *CACHE_FEATURES)
        tokens = {name: features[name] for name in names if name in features}
        x_BxSxH, _ = self.encoder(x_BxSxE, tokens, dropout_key)
        forward, backward = jnp.split(x_BxSxH, 2, axis=-1)
        return self.mlm_head(forward[:, :-1], table_VxE), self.mlm_head(backward[:, 1:], table_VxE)


class BidirectionalLm(PretrainObjective):
    """The mean of the cross-entropies of the two directions."""

    display = Display(
        keys=("forward_loss", "backward_loss", "forward_accuracy", "backward_accuracy"),
        columns=(
            Column("forward {}", "forward_loss", accuracy="forward_accuracy"),
            Column("backward {}", "backward_loss", accuracy="backward_accuracy"),
        ),
        panels=(
            Panel("next-token loss (nats)", "forward_loss"),
            Panel("previous-token loss (nats)", "backward_loss"),
        ),
        tiles=(
            Tile("held-out next-token loss", "forward_loss"),
            Tile("held-out previous-token loss", "backward_loss"),
        ),
    )
    features = TEXT_FEATURES

    @staticmethod
    def make_model(config: PretrainConfig, mesh: Mesh | None) -> BidirectionalModel:
        for key, value, wanted in (
            ("model.encoder", config.model.encoder, "bidirectional_lstm"),
            ("model.mlm_layer", config.model.mlm_layer, "none"),
            ("data.next_sentence", config.data.next_sentence, "none"),
        ):
            if value != wanted:
                raise ValueError(
                    f"{key}: {value!r} is not allowed with objective.name bidirectional_lm; set {wanted}"
                )
        return BidirectionalModel(config.model, config.execution, HeadsConfig(mlm=True), mesh=mesh)

    def carried(self) -> Shapes | None:
        is_carried = self.config.data.row_order == "carried"
        return cache_shapes(self.model, self.batch_rows) if is_carried else None

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        total = 2 * denominator(next_weights(batch["sequence_ids"]))
        return {"forward_loss": total, "backward_loss": total}

    def sums(self, params: Params, aux: Aux, batch: Batch, key: DropoutKey | None, *, axis: str | None) -> Summed:
        """Return the sums and the states of both directions, as bilm-tf keeps them: before the last column, the
        backward direction has its state at the first column of the previous row, which is earlier text. A row
        that ends in padding starts both at zero, and so does padding before a row for the forward direction."""
        ids_BxS, weights = original_ids(batch), next_weights(batch["sequence_ids"])
        own = {**batch, "input_ids": ids_BxS}
        (forward, backward), carried = apply_carried(self.model, params, own, key, aux.carried)
        sums = weighted_cross_entropy("forward", forward, ids_BxS[:, 1:], weights)
        sums |= weighted_cross_entropy("backward", backward, ids_BxS[:, :-1], weights)
        return sums | padding_sums(batch["sequence_ids"]), carried

    def evaluation(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        values = super().evaluation(totals)
        loss = (values.get("forward_loss", np.nan) + values.get("backward_loss", np.nan)) / 2
        targets = int(totals["forward_loss"][1]) if "forward_loss" in totals else 0
        return values | {"loss": loss, "perplexity": float(np.exp(loss)), "targets": targets}

    def result_lines(self, final: Mapping[str, float], samples: Sequence[Sample]) -> list[str]:
        if not final:
            return []
        return [
            f"held-out: forward loss {final['forward_loss']:.4f} nats, backward loss {final['backward_loss']:.4f} "
            f"nats on {final['targets']:,} targets each, perplexity {final['perplexity']:.1f}"
        ]
