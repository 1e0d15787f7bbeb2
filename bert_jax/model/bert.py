"""The encoder and its pretraining heads (Devlin et al. 2018; google-research/bert ``modeling.py``).

Shapes: B rows, S tokens, H width, M masked positions, C sequences per row, V vocabulary (padded in memory).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh

from bert_jax.config import ExecutionConfig, ModelConfig
from bert_jax.model.attention import visible_keys
from bert_jax.model.layers import Dense, Embeddings, EncoderLayer, LayerNorm, activation, compute_dtype
from bert_jax.parallel.axes import constrain, declared


def padded_vocab_size(config: ModelConfig, execution: ExecutionConfig) -> int:
    """Rows of the word embedding in memory: the vocabulary, rounded up to execution.vocab_multiple."""
    multiple = execution.vocab_multiple
    return -(-config.vocab_size // multiple) * multiple


class Encoder(nn.Module):
    """The stack of encoder layers: scanned (stacked parameters) or unrolled, optionally rematerialised."""

    config: ModelConfig
    execution: ExecutionConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x_BxSxH: jax.Array, visible_Bx1xSxT: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        config, execution = self.config, self.execution
        layer_type = EncoderLayer
        if execution.remat == "full":
            layer_type = nn.remat(EncoderLayer, prevent_cse=not execution.scan_layers)
        if execution.scan_layers:
            scanned = nn.scan(
                layer_type,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast, nn.broadcast),
                length=config.num_layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            layers = scanned(config, execution, self.mesh, name="layers")
            x_BxSxH, _ = layers(x_BxSxH, 1 + jnp.arange(config.num_layers), visible_Bx1xSxT, dropout_key)
        else:
            for i in range(config.num_layers):
                layer = layer_type(config, execution, self.mesh, name=f"layer_{i}")
                x_BxSxH, _ = layer(x_BxSxH, 1 + i, visible_Bx1xSxT, dropout_key)
        if config.norm_position == "pre":
            x_BxSxH = LayerNorm(config, compute_dtype(execution), name="final_layer_norm")(x_BxSxH)
        return x_BxSxH


class MlmHead(nn.Module):
    """Dense, activation, LayerNorm, product with the word embeddings, bias; on gathered positions only."""

    config: ModelConfig
    execution: ExecutionConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x_BxMxH: jax.Array, table_VxH: jax.Array) -> jax.Array:
        """float32[B, M, V]; entries of padded vocabulary rows are -inf."""
        config, dtype = self.config, compute_dtype(self.execution)
        x_BxMxH = Dense(config.hidden_size, ("embed", "pooled"), config, dtype, name="transform")(x_BxMxH)
        x_BxMxH = LayerNorm(config, dtype, name="layer_norm")(activation(config, x_BxMxH))
        rows = table_VxH.shape[0]
        bias_V = self.param("output_bias", declared(nn.initializers.zeros_init(), ("vocab",)), (rows,))
        logits_BxMxV = jnp.einsum(
            "BMH,VH->BMV", x_BxMxH, table_VxH.astype(dtype), preferred_element_type=jnp.float32
        )
        logits_BxMxV = constrain(logits_BxMxV + bias_V, ("act_batch", "act_predictions", "act_vocab"), self.mesh)
        if rows == config.vocab_size:
            return logits_BxMxV
        return jnp.where(jnp.arange(rows) < config.vocab_size, logits_BxMxV, -jnp.inf)


@struct.dataclass
class PretrainingOutput:
    """Outputs of :class:`BertForPretraining`."""

    sequence_output: jax.Array  # [B, S, H], compute dtype
    pooled_output: jax.Array | None  # [B, C, H], compute dtype; None without a sentence-pair head
    mlm_logits: jax.Array  # float32[B, M, V]
    nsp_logits: jax.Array | None  # float32[B, C, 2]


def gather_positions(x_BxSxH: jax.Array, positions_BxM: jax.Array) -> jax.Array:
    """Rows of ``x`` at ``positions``: [B, M, H]."""
    return jnp.take_along_axis(x_BxSxH, positions_BxM[:, :, None], axis=1)


class BertForPretraining(nn.Module):
    """BERT with its tied masked-LM head and, with ``has_nsp``, pooler and sentence-pair head.

    ``features`` follows ``bert_jax.batch.PRETRAIN_FEATURES``. ``dropout_key`` None turns dropout off.
    """

    config: ModelConfig
    execution: ExecutionConfig
    has_nsp: bool = True
    mesh: Mesh | None = None

    def setup(self) -> None:
        config, dtype = self.config, compute_dtype(self.execution)
        rows = padded_vocab_size(config, self.execution)
        self.embeddings = Embeddings(config, self.execution, rows, self.mesh)
        self.encoder = Encoder(config, self.execution, self.mesh)
        self.mlm_head = MlmHead(config, self.execution, self.mesh)
        if self.has_nsp:
            self.pooler = Dense(config.hidden_size, ("embed", "pooled"), config, dtype)
            # The two logits feed a float32 loss; the product is tiny.
            self.nsp_head = Dense(2, ("embed", "classes"), config, jnp.dtype("float32"))

    def __call__(
        self, features: Mapping[str, jax.Array], dropout_key: jax.Array | None = None
    ) -> PretrainingOutput:
        x_BxSxH, table_VxH = self.embeddings(
            features["input_ids"], features["token_type_ids"], features["position_ids"], dropout_key
        )
        x_BxSxH = self.encoder(x_BxSxH, visible_keys(features["sequence_ids"]), dropout_key)
        mlm_logits = self.mlm_head(gather_positions(x_BxSxH, features["mlm_positions"]), table_VxH)
        pooled = nsp_logits = None
        if self.has_nsp:
            pooled = jnp.tanh(self.pooler(gather_positions(x_BxSxH, features["cls_positions"])))
            nsp_logits = self.nsp_head(pooled.astype(jnp.float32))
        return PretrainingOutput(x_BxSxH, pooled, mlm_logits, nsp_logits)
