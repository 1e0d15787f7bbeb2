"""The objective of XLNet: a permutation language model with partial prediction (Yang et al. 2019, sections 2.2 to
2.4).

The tokens that the data pipeline masks are the last ones of the order in which a text is predicted: the share
1 / K of the paper is ``data.mask_fraction``, and ``data.mask_unit`` span predicts whole spans. The text is read
without masks. The order of these tokens is random, and follows from ``training.seed``, the sequence and its masks:
it depends neither on the devices nor on where a run was resumed.

Shapes: B rows, S tokens, M targets, V vocabulary (padded in memory).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.config import HeadsConfig, PretrainConfig
from bert_jax.config.schema import require
from bert_jax.model import BertModel, BertOutput
from bert_jax.model.canonical import Params, Shapes
from bert_jax.model.dropout import DropoutKey, TokenKey, mix
from bert_jax.objectives.causal_lm import original_ids
from bert_jax.objectives.display import Column, Display, Panel, Tile
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


class TwoStreamModel(BertModel):
    """The encoder with the head of a language model, which reads the second stream if there is one.

    Features in addition to those of :class:`BertModel`: ``perm_mask`` and ``target_positions`` of
    :class:`bert_jax_xlnet.network.Encoder`. With both, ``mlm_logits`` float32[B, M, V] are those of the targets.
    """

    def __call__(self, features: Mapping[str, jax.Array], dropout_key: DropoutKey | None = None) -> BertOutput:
        if "target_positions" not in features:
            return super().__call__(features, dropout_key)
        ids_BxS, types_BxS, positions_BxS = (
            features[name] for name in ("input_ids", "token_type_ids", "position_ids")
        )
        x_BxSxH, table_VxH = self.embeddings(ids_BxS, types_BxS, positions_BxS, dropout_key)
        streams = {name: features[name] for name in ("token_type_ids", "perm_mask", "target_positions")}
        x_BxQxH, _ = self.encoder(x_BxSxH, self._tokens(features) | streams, dropout_key)
        tokens = ids_BxS.shape[1]
        return BertOutput(
            sequence_output=x_BxQxH[:, :tokens], mlm_logits=self.mlm_head(x_BxQxH[:, tokens:], table_VxH)
        )


def permutation_mask(ranks_BxS: jax.Array, is_target_BxS: jax.Array) -> jax.Array:
    """Return bool[B, S, S], True where token i does not see token j: j is a target, and i is none or comes before j
    in the order of ``ranks`` int32[B, S]. A target is not visible to its own query either."""
    later_BxSxS = ranks_BxS[:, :, None] <= ranks_BxS[:, None, :]
    return is_target_BxS[:, None, :] & (later_BxSxS | ~is_target_BxS[:, :, None])


def targets_of(batch: Batch) -> jax.Array:
    """Return bool[B, S], True at the tokens that ``batch`` masks."""
    rows_Bx1 = jnp.arange(len(batch["input_ids"]))[:, None]
    chosen_BxS = jnp.zeros(batch["input_ids"].shape, jnp.float32)
    return chosen_BxS.at[rows_Bx1, batch["mlm_positions"]].max(batch["mlm_weights"]) > 0


def random_ranks(batch: Batch, is_target_BxS: jax.Array, seed: int) -> jax.Array:
    """Return random ranks int32[B, S] of the tokens of ``batch``, other ones for other sets of targets."""
    features = (batch[name] for name in ("sequence_keys", "sequence_ids", "position_ids"))
    first_BxS, second_BxS = TokenKey.of(jax.random.key(seed), *features).words()
    places = mix(jnp.arange(is_target_BxS.shape[1], dtype=jnp.int32), jnp.int32(0))
    salts_Bx1 = jnp.sum(jnp.where(is_target_BxS, places, 0), axis=1, keepdims=True)
    return mix(first_BxS ^ salts_Bx1, second_BxS)


class PermutationLm(PretrainObjective):
    """Cross-entropy of each target, given the tokens that are no targets and the targets before it in the order."""

    display = Display(
        keys=("plm_loss", "plm_accuracy"),
        columns=(Column("plm {}", "plm_loss", accuracy="plm_accuracy"),),
        panels=(Panel("permuted-token loss (nats)", "plm_loss"), Panel("accuracy", "plm_accuracy", percent=True)),
        tiles=(Tile("held-out permuted-token loss", "plm_loss"),),
    )
    features = TEXT_FEATURES
    model: TwoStreamModel

    @staticmethod
    def make_model(config: PretrainConfig, mesh: Mesh | None) -> TwoStreamModel:
        encoder, order = config.model.encoder, config.data.row_order
        require(encoder == "xlnet", "model.encoder", encoder, "xlnet with objective.name permutation_lm")
        memory = getattr(config.model, "memory_length", 0)
        allowed = "above 0 with data.row_order carried"
        require(memory > 0 or order != "carried", "model.memory_length", memory, allowed)
        return TwoStreamModel(config.model, config.execution, HeadsConfig(mlm=True), mesh=mesh)

    def carried(self) -> Shapes | None:
        is_carried = self.config.data.row_order == "carried"
        return cache_shapes(self.model, self.batch_rows) if is_carried else None

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        return {"plm_loss": denominator(batch["mlm_weights"])}

    def sums(self, params: Params, aux: Aux, batch: Batch, key: DropoutKey | None, *, axis: str | None) -> Summed:
        is_target_BxS = targets_of(batch)
        ranks_BxS = random_ranks(batch, is_target_BxS, self.config.training.seed)
        features = {
            **batch,
            "input_ids": original_ids(batch),
            "perm_mask": permutation_mask(ranks_BxS, is_target_BxS),
            "target_positions": batch["mlm_positions"],
        }
        output, carried = apply_carried(self.model, params, features, key, aux.carried)
        sums = weighted_cross_entropy("plm", output.mlm_logits, batch["mlm_labels"], batch["mlm_weights"])
        return sums | padding_sums(batch["sequence_ids"]), carried

    def evaluation(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        values = super().evaluation(totals)
        targets = int(totals["plm_loss"][1]) if "plm_loss" in totals else 0
        return values | {"loss": values.get("plm_loss", float("nan")), "targets": targets}
