"""The encoder and its output layers (Devlin et al. 2018; google-research/bert ``modeling.py``).

Shapes: B rows, S tokens, H width, M masked positions, C sequences per row, V vocabulary (padded in memory).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh

from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig, SentenceConfig, pretraining_heads
from bert_jax.model.dropout import DropoutKey, Site, TokenKey, dropout, site_key
from bert_jax.model.kernels import on_tpu
from bert_jax.model.layers import (
    INTERMEDIATES,
    Block,
    Dense,
    Embeddings,
    EncoderLayer,
    LayerNorm,
    activation,
    compute_dtype,
)
from bert_jax.model.matmul import matmul_f32_grad
from bert_jax.model.pooling import SentenceHead
from bert_jax.model.task_layers import BiLstm, Crf, PairHead, ScalarMix, pair_features
from bert_jax.parallel.axes import constrain, with_logical_axes


def padded_vocab_size(config: ModelConfig, execution: ExecutionConfig) -> int:
    """Return the number of rows of the word embedding in memory: the vocabulary size, rounded up to a multiple of
    ``execution.vocab_multiple``."""
    multiple = execution.vocab_multiple
    return -(-config.vocab_size // multiple) * multiple


class Encoder(Block):
    """The stack of encoder layers: scanned (stacked parameters) or unrolled, optionally rematerialized. Returns the
    output of the last layer and, with ``collect``, the outputs of all layers."""

    collect: bool = False

    @nn.compact
    def __call__(
        self,
        x_BxSxH: jax.Array,
        sequence_ids_BxS: jax.Array,
        position_ids_BxS: jax.Array,
        dropout_key: DropoutKey | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        config, execution = self.config, self.execution
        layer_type = EncoderLayer
        if execution.remat == "full":
            layer_type = nn.remat(EncoderLayer, prevent_cse=not execution.scan_layers)
        if execution.scan_layers:
            scanned = nn.scan(
                layer_type,
                variable_axes={"params": 0, INTERMEDIATES: 0},
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
                length=config.num_layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            layers = scanned(config, execution, self.mesh, self.collect, name="layers")
            numbers = 1 + jnp.arange(config.num_layers)
            x_BxSxH, all_LxBxSxH = layers(x_BxSxH, numbers, sequence_ids_BxS, position_ids_BxS, dropout_key)
        else:
            collected = []
            for i in range(config.num_layers):
                layer = layer_type(config, execution, self.mesh, self.collect, name=f"layer_{i}")
                x_BxSxH, also = layer(x_BxSxH, 1 + i, sequence_ids_BxS, position_ids_BxS, dropout_key)
                collected.append(also)
            all_LxBxSxH = jnp.stack(collected) if self.collect else None
        if config.norm_position == "pre":
            x_BxSxH = LayerNorm(config, compute_dtype(execution), name="final_layer_norm")(x_BxSxH)
        return x_BxSxH, all_LxBxSxH


class MlmHead(Block):
    """Masked-LM head: a dense layer, the activation, LayerNorm, the product with the word embeddings, and a bias.
    The input contains only the hidden states of the positions for which logits are needed."""

    @nn.compact
    def __call__(self, x_BxMxH: jax.Array, table_VxH: jax.Array) -> jax.Array:
        """Return the logits, float32[B, M, V]; those of the padding rows of the vocabulary are -inf."""
        config, dtype = self.config, compute_dtype(self.execution)
        x_BxMxH = Dense(config.hidden_size, ("embed", "pooled"), config, dtype, name="transform")(x_BxMxH)
        x_BxMxH = LayerNorm(config, dtype, name="layer_norm")(activation(config, x_BxMxH))
        rows = table_VxH.shape[0]
        bias_V = self.param("output_bias", with_logical_axes(nn.initializers.zeros_init(), ("vocab",)), (rows,))
        swap = on_tpu(self.mesh)
        if swap:
            # Positions first: [M, B] becomes one dimension without a copy, because 8 (the rows of a tile) divides B
            # but not M.
            x_BxMxH = x_BxMxH.swapaxes(0, 1)
        logits_BxMxV = matmul_f32_grad(x_BxMxH, table_VxH, 1, jnp.dtype("float32"))
        logits_BxMxV = logits_BxMxV.swapaxes(0, 1) if swap else logits_BxMxV
        logits_BxMxV = constrain(logits_BxMxV + bias_V, ("act_batch", "act_predictions", "act_vocab"), self.mesh)
        if rows == config.vocab_size:
            return logits_BxMxV
        return jnp.where(jnp.arange(rows) < config.vocab_size, logits_BxMxV, -jnp.inf)


@struct.dataclass
class BertOutput:
    """Outputs of :class:`BertModel`; a field is None if the model lacks its head. Logits are float32."""

    sequence_output: jax.Array  # [B, S, H], compute dtype
    pooled_output: jax.Array | None = None  # [B, C, H], compute dtype
    mlm_logits: jax.Array | None = None  # [B, M, V]
    nsp_logits: jax.Array | None = None  # [B, C, 2]
    sequence_logits: jax.Array | None = None  # [B, C, labels]
    token_logits: jax.Array | None = None  # [B, S, labels]
    start_logits: jax.Array | None = None  # [B, S]
    end_logits: jax.Array | None = None  # [B, S]
    choice_logits: jax.Array | None = None  # [B, C]
    sentence_embedding: jax.Array | None = None  # float32[B, E]; of unpacked rows
    sentence_embeddings: jax.Array | None = None  # float32[B, C, E], with cls_positions
    pair_logits: jax.Array | None = None  # [B, C / 2, classes]
    crf: tuple[jax.Array, jax.Array, jax.Array] | None = None  # transitions [L, L], start [L], end [L]
    hidden_states: jax.Array | None = None  # [1 + layers, B, S, H], with all_layers


def gather_positions(x_BxSxH: jax.Array, positions_BxM: jax.Array) -> jax.Array:
    """Return the vectors of ``x`` [B, S, H] at ``positions`` [B, M], as an array [B, M, H]."""
    return jnp.take_along_axis(x_BxSxH, positions_BxM[:, :, None], axis=1)


def _at_tokens(key: DropoutKey | None, positions_BxC: jax.Array | None) -> DropoutKey | None:
    """Return the dropout key of the vectors at ``positions`` (None: of the first token of each row)."""
    if not isinstance(key, TokenKey):
        return key
    return key.at(jnp.zeros_like(key.positions[:, :1]) if positions_BxC is None else positions_BxC)


class BertModel(nn.Module):
    """The encoder with the output layers in ``heads``. If ``sentence`` is set, the model also computes one vector
    per row.

    ``features`` follows ``bert_jax.batch.PRETRAIN_FEATURES``; labels and weights are not read. Without
    ``mlm_positions`` the MLM head runs on every position; without ``cls_positions`` each row is one sequence.
    Without ``dropout_key`` there is no dropout.
    """

    config: ModelConfig
    execution: ExecutionConfig
    heads: HeadsConfig
    sentence: SentenceConfig | None = None
    mesh: Mesh | None = None
    # Return all hidden states.
    all_layers: bool = False
    # Run the encoder without dropout and without gradients.
    frozen_encoder: bool = False

    def setup(self) -> None:
        config, heads, dtype = self.config, self.heads, compute_dtype(self.execution)
        rows = padded_vocab_size(config, self.execution)
        self.embeddings = Embeddings(config, self.execution, rows, self.mesh)
        collect = self.all_layers or heads.features != "last"
        self.encoder = Encoder(config, self.execution, self.mesh, collect)
        if heads.features != "last":
            self.feature_mix = ScalarMix(heads.features)
        if heads.bilstm:
            self.bilstm = BiLstm(heads.bilstm, config)
        if heads.crf:
            self.crf = Crf(len(heads.token_labels))
        if heads.pair_labels:
            self.pair_head = PairHead(heads, config)
        if heads.mlm:
            self.mlm_head = MlmHead(config, self.execution, self.mesh)
        if heads.pooler:
            self.pooler = Dense(config.hidden_size, ("embed", "pooled"), config, dtype)
        # These layers have few outputs, so their product is cheap in float32, the dtype of the loss.
        for name, size in heads.output_sizes().items():
            setattr(self, f"{name}_head", Dense(size, ("embed", "classes"), config, jnp.dtype("float32")))
        if self.sentence is not None:
            self.sentence_head = SentenceHead(config, self.sentence)

    def __call__(self, features: Mapping[str, jax.Array], dropout_key: DropoutKey | None = None) -> BertOutput:
        heads = self.heads
        encoder_key = None if self.frozen_encoder else dropout_key
        x_BxSxH, table_VxH = self.embeddings(
            features["input_ids"], features["token_type_ids"], features["position_ids"], encoder_key
        )
        first_BxSxH = x_BxSxH
        if self.is_mutable_collection(INTERMEDIATES):
            self.sow(INTERMEDIATES, "hidden_states", x_BxSxH)
        x_BxSxH, all_LxBxSxH = self.encoder(
            x_BxSxH, features["sequence_ids"], features["position_ids"], encoder_key
        )
        outputs: dict[str, Any] = {"sequence_output": x_BxSxH}
        if all_LxBxSxH is not None:
            all_LxBxSxH = jnp.concatenate([first_BxSxH[None], all_LxBxSxH])
            outputs["hidden_states"] = all_LxBxSxH
        if self.frozen_encoder:
            x_BxSxH, all_LxBxSxH = jax.lax.stop_gradient((x_BxSxH, all_LxBxSxH))
        if heads.mlm:
            positions = features.get("mlm_positions")
            inputs = x_BxSxH if positions is None else gather_positions(x_BxSxH, positions)
            outputs["mlm_logits"] = self.mlm_head(inputs, table_VxH)
        if heads.features != "last":
            x_BxSxH = self.feature_mix(all_LxBxSxH)
        if heads.pooler:
            positions = features.get("cls_positions")
            first_BxCxH = x_BxSxH[:, :1] if positions is None else gather_positions(x_BxSxH, positions)
            pooled_BxCxH = outputs["pooled_output"] = jnp.tanh(self.pooler(first_BxCxH))
            if heads.nsp:
                outputs["nsp_logits"] = self.nsp_head(pooled_BxCxH.astype(jnp.float32))
            dropped_BxCxH = self._head_dropout(pooled_BxCxH, _at_tokens(dropout_key, positions))
            if heads.sequence_labels:
                outputs["sequence_logits"] = self.sequence_head(dropped_BxCxH)
            if heads.choice:
                outputs["choice_logits"] = self.choice_head(dropped_BxCxH)[..., 0]
        if heads.token_labels:
            dropped_BxSxF = self._head_dropout(x_BxSxH, dropout_key)
            if heads.bilstm:
                dropped_BxSxF = self.bilstm(dropped_BxSxF, features["sequence_ids"])
            outputs["token_logits"] = self.token_head(dropped_BxSxF)
        if heads.crf:
            outputs["crf"] = self.crf()
        if heads.span:  # no dropout before this head, as in google-research/bert run_squad.py
            both_BxSx2 = self.span_head(x_BxSxH.astype(jnp.float32))
            outputs["start_logits"], outputs["end_logits"] = both_BxSx2[..., 0], both_BxSx2[..., 1]
        if self.sentence is not None and "cls_positions" not in features:
            outputs["sentence_embedding"] = self.sentence_head(x_BxSxH, features["sequence_ids"] > 0)
        elif self.sentence is not None:
            slots_C = 1 + jnp.arange(features["cls_positions"].shape[1])
            own_BxCxS = features["sequence_ids"][:, None] == slots_C[:, None]
            vectors = [self.sentence_head(x_BxSxH, own_BxCxS[:, i]) for i in range(len(slots_C))]
            embeddings_BxCxE = outputs["sentence_embeddings"] = jnp.stack(vectors, axis=1)
            if heads.pair_labels:
                u, v = (embeddings_BxCxE[:, k::2][:, : len(slots_C) // 2] for k in (0, 1))
                outputs["pair_logits"] = self.pair_head(pair_features(u, v))
        return BertOutput(**outputs)

    def pooled_logits(
        self, x_BxSxH: jax.Array, features: Mapping[str, jax.Array], dropout_key: DropoutKey | None
    ) -> jax.Array:
        """Return ``sequence_logits`` for the last hidden state ``x``: the pooler, dropout and the output layer."""
        first_BxCxH = gather_positions(x_BxSxH, features["cls_positions"])
        pooled_BxCxH = jnp.tanh(self.pooler(first_BxCxH))
        at_first = _at_tokens(dropout_key, features["cls_positions"])
        return self.sequence_head(self._head_dropout(pooled_BxCxH, at_first))

    def _head_dropout(self, x: jax.Array, dropout_key: DropoutKey | None) -> jax.Array:
        rate = self.config.hidden_dropout if self.heads.dropout is None else self.heads.dropout
        return dropout(x.astype(jnp.float32), rate, site_key(dropout_key, 0, Site.TASK_HEAD))


def BertForPretraining(
    config: ModelConfig, execution: ExecutionConfig, has_nsp: bool = True, mesh: Mesh | None = None
) -> BertModel:
    """Return the pretraining model with a masked-LM head and, if ``has_nsp``, a pooler and a sentence-pair head."""
    return BertModel(config, execution, pretraining_heads(has_nsp), mesh=mesh)
