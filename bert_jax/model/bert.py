"""The encoder and its output layers (Devlin et al. 2018; google-research/bert ``modeling.py``).

Shapes: B rows, S tokens, H width, M masked positions, C sequences per row, V vocabulary (padded in memory).
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh

from bert_jax import registry
from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig, SentenceConfig, pretraining_heads
from bert_jax.model.attention import has_blocks, random_features
from bert_jax.model.dense import Dense, activation
from bert_jax.model.dropout import DropoutKey, Site, TokenKey, dropout, site_key
from bert_jax.model.embeddings import Embedding, Embeddings
from bert_jax.model.layers import (
    CACHE,
    CACHE_FEATURES,
    INTERMEDIATES,
    VECTORS,
    Block,
    EncoderLayer,
    FeedForward,
    Norm,
    compute_dtype,
)
from bert_jax.model.local_attention import global_features
from bert_jax.model.pooling import SentenceHead, gather_positions, pooled_tokens
from bert_jax.model.positions import relative_bias
from bert_jax.model.task_layers import (
    BiLstm,
    Crf,
    ExitHead,
    MlmHead,
    PairHead,
    RtdHead,
    ScalarMix,
    beside,
    in_question,
    pair_features,
)

T = TypeVar("T")


def padded_vocab_size(config: ModelConfig, execution: ExecutionConfig) -> int:
    """Return the number of rows of the word embedding in memory: the vocabulary size, rounded up to a multiple of
    ``execution.vocab_multiple``."""
    multiple = execution.vocab_multiple
    return -(-config.vocab_size // multiple) * multiple


class Encoder(Block):
    """The stack of encoder layers: scanned (stacked parameters) or unrolled, optionally rematerialized. Returns the
    output of the last layer and, with ``collect``, the outputs of all layers. ``part`` (unrolled layers only) names
    the layers to run: those after its first number, up to its second."""

    collect: bool = False

    @nn.compact
    def __call__(
        self,
        x_BxSxH: jax.Array,
        tokens: Mapping[str, jax.Array],
        dropout_key: DropoutKey | None,
        part: tuple[int, int] | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        config, execution = self.config, self.execution
        length = x_BxSxH.shape[1]
        tokens = {**tokens, **random_features(config, length, dropout_key)}
        relative = self._relative_positions(length)
        layer_type = EncoderLayer
        if execution.remat == "full":
            layer_type = nn.remat(EncoderLayer, prevent_cse=not execution.scan_layers)
        part = part or (0, config.num_layers)
        if execution.scan_layers and config.has_equal_layers:
            assert part == (0, config.num_layers)
            is_shared = config.shared_layers
            stacked = [INTERMEDIATES, VECTORS, CACHE, *([] if is_shared else ["params"])]
            scanned = nn.scan(
                layer_type,
                variable_axes={collection: 0 for collection in stacked},
                variable_broadcast="params" if is_shared else False,
                split_rngs={"params": not is_shared},
                in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
                length=config.num_layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            name, window = "layer_0" if is_shared else "layers", config.layer_windows[0]
            heads, units = config.heads_by_layer[0], config.units_by_layer[0]
            layers = scanned(
                config, execution, self.mesh, self.collect, window, heads=heads, units=units, name=name
            )
            numbers = 1 + jnp.arange(config.num_layers)
            x_BxSxH, all_LxBxSxH = layers(x_BxSxH, numbers, tokens, relative, dropout_key)
        else:
            collected, made = [], dict[str, EncoderLayer]()
            for i in range(*part):
                window = config.layer_windows[i]
                name = "layer_0" if config.shared_layers else f"layer_{i}"
                if name not in made:
                    skip = i == 0 and config.norm_position == "pre_skip_first"
                    heads, units = config.heads_by_layer[i], config.units_by_layer[i]
                    made[name] = layer_type(
                        config, execution, self.mesh, self.collect, window, skip, heads, units, name=name
                    )
                x_BxSxH, also = made[name](x_BxSxH, 1 + i, tokens, relative, dropout_key)
                if also is not None:
                    collected.append(also)
            all_LxBxSxH = jnp.stack(collected) if self.collect else None
        if config.has_final_norm and part[1] == config.num_layers:
            x_BxSxH = Norm(config, compute_dtype(execution), name="final_layer_norm")(x_BxSxH)
        return x_BxSxH, all_LxBxSxH

    def _relative_positions(self, length: int) -> jax.Array | None:
        """Return the bias of the scores, float32[A, S, T], or the embeddings of distances [R, H], for all layers;
        None if the scores do not depend on distances."""
        config, dtype = self.config, compute_dtype(self.execution)
        if config.relative_positions == "none":
            return None
        if config.relative_positions == "alibi":
            return relative_bias(config, length, None)
        rows = config.relative_buckets
        if config.relative_positions == "buckets":
            table = Embedding(
                rows, config.num_attention_heads, ("position", "heads"), config, name="relative_attention_bias"
            )
            return relative_bias(config, length, table())
        table = Embedding(rows, config.hidden_size, ("position", "embed"), config, name="relative_embeddings")
        return Norm(config, dtype, name="relative_layer_norm")(table())


def of_layers(encoder: Mapping[str, Any], config: ModelConfig, *path: str) -> list[jax.Array]:
    """Return the values that each layer sowed under ``path`` in ``encoder``, the ``INTERMEDIATES`` of the encoder.

    Shared layers (``config.shared_layers``) sow all of them in ``layer_0``, and layers in a loop one stacked array.
    """
    found = []
    if "layers" in encoder:
        sown = encoder["layers"]
        for name in path:
            sown = sown[name]
        return list(sown[0])
    for i in range(config.num_layers):
        sown = encoder["layer_0" if config.shared_layers else f"layer_{i}"]
        for name in path:
            sown = sown[name]
        found.append(sown[i if config.shared_layers else 0])
    return found


class Network(Block):
    """Base class of registered encoders that are whole networks, such as an encoder with a decoder:
    :class:`BertModel` passes the features of the batch and the dropout key to them, and returns their
    :class:`BertOutput`."""

    collect: bool = False


@struct.dataclass
class BertOutput:
    """Outputs of :class:`BertModel`; a field is None if the model lacks its head. Logits are float32."""

    sequence_output: jax.Array  # [B, S, H], compute dtype
    pooled_output: jax.Array | None = None  # [B, C, H], compute dtype
    mlm_logits: jax.Array | None = None  # [B, M, V]
    nsp_logits: jax.Array | None = None  # [B, C, 2]
    rtd_logits: jax.Array | None = None  # [B, S]
    sequence_logits: jax.Array | None = None  # [B, C, labels]
    token_logits: jax.Array | None = None  # [B, S, labels]
    start_logits: jax.Array | None = None  # [B, S]
    end_logits: jax.Array | None = None  # [B, S]
    choice_logits: jax.Array | None = None  # [B, C]
    sentence_embedding: jax.Array | None = None  # float32[B, E]; of unpacked rows
    sentence_embeddings: jax.Array | None = None  # float32[B, C, E], with cls_positions
    pair_logits: jax.Array | None = None  # [B, C / 2, classes]
    exit_logits: jax.Array | None = None  # [exits, B, C, labels]
    crf: tuple[jax.Array, jax.Array, jax.Array] | None = None  # transitions [L, L], start [L], end [L]
    hidden_states: jax.Array | None = None  # [1 + layers, B, S, H], with all_layers
    translations: jax.Array | None = None  # int32[B, C, T], -1 after the end


def bert_output(applied: object) -> BertOutput:
    """Return ``applied``, the result of :meth:`BertModel.apply`, whose type Linen does not declare."""
    assert isinstance(applied, BertOutput)
    return applied


def present(output: T | None) -> T:
    """Return ``output``, a field of :class:`BertOutput` whose head the model has."""
    assert output is not None
    return output


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
    Without ``dropout_key`` there is no dropout. With ``CACHE_FEATURES``, queries see the keys of the collection
    ``CACHE``, to which the tokens of the batch are added; the scores must not depend on relative positions.
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
        if self.execution.quantization != "none" and not config.has_attention:
            raise ValueError(
                f"execution.quantization: {self.execution.quantization} is not allowed with model.encoder "
                f"{config.encoder}; allowed: none"
            )
        collect = self.all_layers or heads.features != "last" or bool(heads.exits)
        if collect:
            config.require_equal_widths()
        self.encoder = registry.load("encoders", config.encoder)(config, self.execution, self.mesh, collect)
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
        if heads.rtd:
            self.rtd_head = RtdHead(config, dtype)
        if heads.pooler and self._pooler_activation != "none":
            has_bias = config.has_bias("pooler_layer")
            self.pooler = Dense(config.hidden_size, ("embed", "pooled"), config, dtype, has_bias)
            if "pooler_norm" in config.head_parts:
                self.pooler_norm = Norm(config, dtype)
        # These layers have few outputs, so their product is cheap in float32, the dtype of the loss.
        if heads.span and "span_transform" in config.head_parts:
            self.span_transform = FeedForward(config, self.execution, self.mesh)
        for name, size in heads.output_sizes().items():
            has_bias = name != "sequence" or config.has_bias("sequence_head")
            head = Dense(size, ("embed", "classes"), config, jnp.dtype("float32"), has_bias)
            setattr(self, f"{name}_head", head)
        for layer in heads.exits:
            setattr(self, f"exit_{layer}_head", ExitHead(config, self.execution, self.mesh, heads))
        if self.sentence is not None:
            self.sentence_head = SentenceHead(config, self.sentence)

    def __call__(self, features: Mapping[str, jax.Array], dropout_key: DropoutKey | None = None) -> BertOutput:
        heads, encoder_key = self.heads, None if self.frozen_encoder else dropout_key
        self._check_rows(features)
        if isinstance(self.encoder, Network):
            return bert_output(self.encoder(features, encoder_key))
        ids_BxS, types_BxS, places_BxS = (features[n] for n in ("input_ids", "token_type_ids", "position_ids"))
        x_BxSxH, table_VxH = self.embeddings(ids_BxS, types_BxS, places_BxS, encoder_key)
        first_BxSxH = jnp.concatenate([x_BxSxH] * self.config.directions, axis=-1)
        if self.is_mutable_collection(INTERMEDIATES):
            self.sow(INTERMEDIATES, "hidden_states", first_BxSxH)
        x_BxSxH, all_LxBxSxH = self.encoder(x_BxSxH, self._tokens(features), encoder_key)
        outputs: dict[str, Any] = {"sequence_output": x_BxSxH}
        if all_LxBxSxH is not None:
            all_LxBxSxH = jnp.concatenate([first_BxSxH[None], all_LxBxSxH])
            outputs["hidden_states"] = all_LxBxSxH
        if self.frozen_encoder:
            x_BxSxH, all_LxBxSxH = jax.lax.stop_gradient((x_BxSxH, all_LxBxSxH))
        if heads.mlm:
            outputs["mlm_logits"] = self.mlm_head(self._mlm_inputs(x_BxSxH, features), table_VxH)
        if heads.rtd:
            outputs["rtd_logits"] = self.rtd_head(x_BxSxH)
        if heads.features != "last":
            x_BxSxH = self.feature_mix(present(all_LxBxSxH))
        if heads.pooler:
            positions = features.get("cls_positions")
            pooled_BxCxH = outputs["pooled_output"] = self._pooled(x_BxSxH, features)
            if heads.nsp:
                outputs["nsp_logits"] = self.nsp_head(pooled_BxCxH.astype(jnp.float32))
            dropped_BxCxH = self._head_dropout(pooled_BxCxH, _at_tokens(dropout_key, positions))
            if heads.sequence_labels:
                outputs["sequence_logits"] = self.sequence_head(dropped_BxCxH)
            if heads.exits:
                lower = [self.exit_logits(n, present(all_LxBxSxH)[n], features, dropout_key) for n in heads.exits]
                outputs["exit_logits"] = jnp.stack(lower)
            if heads.choice:
                outputs["choice_logits"] = self.choice_head(dropped_BxCxH)[..., 0]
        pools_tokens = "token_pooler" in self.config.head_parts and heads.pooler
        read_BxSxH = self._pooler_layers(x_BxSxH) if pools_tokens else x_BxSxH
        if heads.token_labels:
            dropped_BxSxF = self._head_dropout(read_BxSxH, dropout_key)
            if heads.bilstm:
                dropped_BxSxF = self.bilstm(dropped_BxSxF, features["sequence_ids"])
            outputs["token_logits"] = self.token_head(dropped_BxSxF)
        if heads.crf:
            outputs["crf"] = self.crf()
        if heads.span:  # no dropout before this head, as in google-research/bert run_squad.py
            both_BxSx2 = self._spans(read_BxSxH, features, dropout_key)
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
                of_pairs = _at_tokens(dropout_key, features["cls_positions"][:, : u.shape[1] * 2 : 2])
                outputs["pair_logits"] = self.pair_head(pair_features(u, v), of_pairs)
        return BertOutput(**outputs)

    def _mlm_inputs(self, x_BxSxH: jax.Array, features: Mapping[str, jax.Array]) -> jax.Array:
        """Return the states from which the tokens at ``mlm_positions`` (absent: all tokens) are predicted."""
        positions_BxM = features.get("mlm_positions")
        states = beside(x_BxSxH, features["sequence_ids"]) if self.config.directions == 2 else x_BxSxH
        return states if positions_BxM is None else gather_positions(states, positions_BxM)

    def _check_rows(self, features: Mapping[str, jax.Array]) -> None:
        """Raise ``ValueError`` for rows of several sequences that attention would divide into blocks."""
        config, length = self.config, features["input_ids"].shape[1]
        sequences = features["cls_positions"].shape[1] if "cls_positions" in features else 1
        if sequences > 1 and has_blocks(config, length):
            raise ValueError(
                f"model.attention_block: {config.attention_block} does not allow {sequences} sequences in a row of "
                f"{length} tokens; allowed: one, or rows of at most {config.whole_length} tokens"
            )

    def _spans(
        self, x_BxSxH: jax.Array, features: Mapping[str, jax.Array], dropout_key: DropoutKey | None
    ) -> jax.Array:
        """Return the scores of each token as the start and as the end of an answer, float32[B, S, 2]."""
        if "span_transform" not in self.config.head_parts:
            return self.span_head(x_BxSxH.astype(jnp.float32))
        x_BxSxH = self.span_transform(x_BxSxH, site_key(dropout_key, 0, Site.TASK_HEAD))
        asked_BxS = in_question(features["input_ids"], features["sequence_ids"], self.config.separator_id)
        return self.span_head(x_BxSxH.astype(jnp.float32)) - 1e6 * asked_BxS[:, :, None]

    def pooled_logits(
        self, x_BxSxH: jax.Array, features: Mapping[str, jax.Array], dropout_key: DropoutKey | None
    ) -> jax.Array:
        """Return ``sequence_logits`` for the last hidden state ``x``: the pooler, dropout and the output layer."""
        pooled_BxCxH = self._pooled(x_BxSxH, features)
        at_first = _at_tokens(dropout_key, features["cls_positions"])
        return self.sequence_head(self._head_dropout(pooled_BxCxH, at_first))

    def exit_logits(
        self,
        layer: int,
        x_BxSxH: jax.Array,
        features: Mapping[str, jax.Array],
        dropout_key: DropoutKey | None = None,
    ) -> jax.Array:
        """Return the logits of the head of ``layer``, one of ``heads.exits``, for the output ``x`` of the layer."""
        at_first = _at_tokens(dropout_key, features.get("cls_positions"))
        return getattr(self, f"exit_{layer}_head")(x_BxSxH, features, at_first)

    def run_layers(self, features: Mapping[str, jax.Array], first: int, last: int) -> tuple[jax.Array, jax.Array]:
        """Run the layers after layer ``first`` (0: the embeddings too) up to layer ``last``, one of ``heads.exits``
        or the number of layers, without dropout.

        The output of layer ``first``, [B, S, H], is ``features["hidden"]``. Returns that of layer ``last`` and the
        logits of its head, float32[B, C, labels]. Layers in a loop (``execution.scan_layers``) are not allowed.
        """
        if first:
            x_BxSxH = features["hidden"]
        else:
            x_BxSxH, _ = self.embeddings(
                features["input_ids"], features["token_type_ids"], features["position_ids"], None
            )
        x_BxSxH, _ = self.encoder(x_BxSxH, self._tokens(features), None, (first, last))
        if last == self.config.num_layers:
            return x_BxSxH, self.pooled_logits(x_BxSxH, features, None)
        return x_BxSxH, self.exit_logits(last, x_BxSxH, features)

    def _tokens(self, features: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the features that the layers read."""
        tokens = {name: features[name] for name in ("sequence_ids", "position_ids")}
        tokens |= {name: features[name] for name in CACHE_FEATURES if name in features}
        return tokens | global_features(self.config, self.heads, features) if self.config.global_tokens else tokens

    def _pooled(self, x_BxSxH: jax.Array, features: Mapping[str, jax.Array]) -> jax.Array:
        """Return the pooled vector of each sequence, [B, C, H]."""
        of_sequences = features.get("cls_positions"), features["sequence_ids"]
        return self._pooler_layers(pooled_tokens(x_BxSxH, *of_sequences, self.config.pooling))

    def _pooler_layers(self, x: jax.Array) -> jax.Array:
        """Return ``x`` [..., H] after the dense layer, the activation and the normalization of the pooler."""
        if self._pooler_activation == "none":
            return x
        x = activation(self._pooler_activation, self.pooler(x))
        return self.pooler_norm(x) if "pooler_norm" in self.config.head_parts else x

    @property
    def _pooler_activation(self) -> str:
        return self.config.pooler_activation(bool(self.heads.sequence_labels))

    def _head_dropout(self, x: jax.Array, dropout_key: DropoutKey | None) -> jax.Array:
        rate = self.config.hidden_dropout if self.heads.dropout is None else self.heads.dropout
        return dropout(x.astype(jnp.float32), rate, site_key(dropout_key, 0, Site.TASK_HEAD))


def BertForPretraining(
    config: ModelConfig, execution: ExecutionConfig, has_nsp: bool = True, mesh: Mesh | None = None
) -> BertModel:
    """Return the pretraining model with a masked-LM head and, if ``has_nsp``, a pooler and a sentence-pair head."""
    return BertModel(config, execution, pretraining_heads(has_nsp), mesh=mesh)
