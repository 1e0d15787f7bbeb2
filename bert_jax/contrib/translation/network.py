"""An encoder and a decoder with cross-attention, made from the layers of the trunk (Vaswani et al. 2017; Rothe et
al. 2020).

A row holds several pairs of texts. The source and the target of a pair share the columns of their unit, the longer
one fills them, so that one array of sequence ids and one of positions describe both. Shapes: B rows, S tokens of a
row, U pairs per row, K hypotheses, R rows of the decoder (B, or B * U * K in the search), H width, A heads, D head
size, V vocabulary, T tokens of a translation.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.config import HeadsConfig
from bert_jax.contrib.translation.config import EncoderDecoderConfig
from bert_jax.contrib.translation.search import Search, search
from bert_jax.model.attention import dot_product_attention
from bert_jax.model.bert import BertModel, BertOutput, Network, bert_output
from bert_jax.model.canonical import Params
from bert_jax.model.dense import Dense
from bert_jax.model.dropout import DropoutKey, ShardKey, Site, TokenKey, site_key, whole_key
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.layers import (
    CACHE,
    Block,
    FeedForward,
    Norm,
    SelfAttention,
    compute_dtype,
    norm_before,
    output_residual_norm,
)
from bert_jax.model.task_layers import MlmHead

# Features of a batch of pairs, int32[B, S]: the decoder's inputs, and 1 at the tokens of the source.
TARGET_IDS, SOURCE_MASK = "target_ids", "source_mask"
# Features of a batch that is translated: see ``search.Search``.
OUTPUT_IDS, END_ID, MOST_TOKENS, LENGTH_PENALTY = "output_ids", "end_id", "most_tokens", "length_penalty"
# Number of the dropout keys of the decoder, whose layers count from 1 like those of the encoder.
_DECODER = 1 << 21

# Keys and values of the source in one layer, each [B, S, A, D].
Memory = tuple[jax.Array, jax.Array]


class CrossAttention(Block):
    """Attention of the decoder to the source, with output projection, dropout, residual connection and
    LayerNorm."""

    @nn.compact
    def __call__(
        self,
        x_RxTxH: jax.Array | None,
        source: jax.Array | Memory,
        visible_Bx1xQxS: jax.Array | None = None,
        probabilities_key: DropoutKey | None = None,
        output_key: DropoutKey | None = None,
    ) -> Any:
        """Return the output [R, T, H]. ``source``: the states of the encoder, float[B, S, H], or their keys and
        values; with x None, these are returned. The R * T queries belong to the B rows in order: Q per row."""
        config = self.config
        width, heads = config.hidden_size, config.num_attention_heads
        names = ("query", "key", "value")
        dense = {name: self.dense(width, ("embed", "heads"), config.has_bias("qkv"), name=name) for name in names}

        def of_heads(name: str, x: jax.Array) -> jax.Array:
            return dense[name](x).reshape(*x.shape[:2], heads, config.head_size)

        memory = source if isinstance(source, tuple) else (of_heads("key", source), of_heads("value", source))
        if x_RxTxH is None or visible_Bx1xQxS is None:
            return memory
        shape, mask_Bx1xQxS = x_RxTxH.shape, visible_Bx1xQxS
        inner_RxTxH, x_RxTxH = norm_before(self, x_RxTxH)
        query_BxQxAxD = of_heads("query", inner_RxTxH.reshape(len(memory[0]), -1, width))
        context = dot_product_attention(
            query_BxQxAxD, *memory, jnp.zeros(()), dropout_rate=config.attention_dropout,
            dropout_key=probabilities_key, visible=lambda _: mask_Bx1xQxS,
        )  # fmt: skip
        output = self.dense(width, ("heads", "embed"), config.has_bias("attention_output"), True, name="output")
        rate = config.dropout_at("attention_output")
        return output_residual_norm(self, (context.reshape(shape),), x_RxTxH, output, rate, output_key)


class DecoderLayer(Block):
    """Causal self-attention, cross-attention and feed-forward block. With ``own_only``, the layer initializes only
    the parameters that it does not share with the encoder."""

    own_only: bool = False

    @nn.compact
    def __call__(
        self,
        x_RxTxH: jax.Array | None,
        source: jax.Array | Memory,
        visible_Bx1xQxS: jax.Array | None = None,
        tokens: Mapping[str, jax.Array] | None = None,
        layer: int = 0,
        dropout_key: DropoutKey | None = None,
    ) -> Any:
        """Return the output, or the keys and values of the source; see :class:`CrossAttention`. ``layer`` (1 to L)
        determines the dropout keys."""
        options = self.config, self.execution, self.mesh
        cross = CrossAttention(*options, name="cross_attention")
        if x_RxTxH is None:
            return cross(None, source)
        assert tokens is not None

        def key(site: Site, of_cross: bool = False) -> DropoutKey | None:
            return site_key(dropout_key, layer + of_cross * self.config.num_layers, site)

        sites = Site.ATTENTION_PROBABILITIES, Site.ATTENTION_OUTPUT
        if not self.own_only:
            attention = SelfAttention(*options, name="attention")
            x_RxTxH = attention(x_RxTxH, tokens, None, *map(key, sites))
        x_RxTxH = cross(x_RxTxH, source, visible_Bx1xQxS, *(key(site, True) for site in sites))
        if not self.own_only:
            x_RxTxH = FeedForward(*options, name="feed_forward")(x_RxTxH, key(Site.FEED_FORWARD_OUTPUT))
        return x_RxTxH


class Decoder(Block):
    """Embeddings, layers and output layer of the decoder. ``own_only``: see :class:`DecoderLayer`."""

    own_only: bool = False

    def setup(self) -> None:
        config, options = self.config, (self.config, self.execution, self.mesh)
        self.embeddings = Embeddings(config, self.execution, config.vocab_size, self.mesh)
        layer_type = nn.remat(DecoderLayer) if self.execution.remat == "full" else DecoderLayer
        self.layer = [layer_type(*options, self.own_only) for _ in range(config.num_layers)]
        if config.has_final_norm:
            self.final_layer_norm = Norm(config, compute_dtype(self.execution))
        self.mlm_head = MlmHead(*options)

    def __call__(
        self,
        ids_RxT: jax.Array,
        sources: tuple[jax.Array | Memory, ...],
        visible_Bx1xQxS: jax.Array,
        tokens: Mapping[str, jax.Array],
        dropout_key: DropoutKey | None = None,
    ) -> jax.Array:
        """Return the logits of the tokens after ``ids``, float32[R, T, V]. ``sources``: the source for each layer;
        ``tokens``: what the self-attention reads (``sequence_ids``, ``position_ids``, the place in a cache)."""
        if self.own_only:
            shape = *ids_RxT.shape, self.config.hidden_size
            x_RxTxH = jnp.zeros(shape, compute_dtype(self.execution))
            table = jnp.zeros((self.config.vocab_size, self.config.embedding_width))
        else:
            types = jnp.zeros_like(ids_RxT)
            x_RxTxH, table = self.embeddings(ids_RxT, types, tokens["position_ids"], dropout_key)
        for i, (layer, source) in enumerate(zip(self.layer, sources, strict=True)):
            x_RxTxH = layer(x_RxTxH, source, visible_Bx1xQxS, tokens, 1 + i, dropout_key)
        if self.config.has_final_norm:
            x_RxTxH = self.final_layer_norm(x_RxTxH)
        return self.mlm_head(x_RxTxH, table)

    def memories(self, states_BxSxH: jax.Array) -> tuple[Memory, ...]:
        """Return the keys and values of the source in each layer."""
        return tuple(layer(None, states_BxSxH) for layer in self.layer)


class EncoderDecoder(Network):
    """The network of ``model.encoder`` encoder_decoder.

    ``sequence_output`` is the output of the encoder. With ``target_ids`` and ``source_mask``, ``mlm_logits`` are
    the logits of the tokens after ``target_ids``, float32[B, S, V]. A batch that is not for training, that is
    without ``sequence_keys``, is also translated if it has ``output_ids``: ``translations``, int32[B, U, T].
    """

    def setup(self) -> None:
        config = self.config
        assert isinstance(config, EncoderDecoderConfig)
        self.joint = config
        self.exact = dataclasses.replace(self.execution, vocab_multiple=1)
        self.source = BertModel(config.source, self.exact, HeadsConfig(), mesh=self.mesh)
        self.target = Decoder(config.target, self.exact, self.mesh, config.shared)
        if self._projects:
            dtype = compute_dtype(self.execution)
            self.projection = Dense(config.target.hidden_size, ("embed", "pooled"), config.target, dtype)

    @property
    def _projects(self) -> bool:
        return self.joint.source.hidden_size != self.joint.target.hidden_size

    def __call__(self, features: Mapping[str, jax.Array], dropout_key: DropoutKey | None = None) -> BertOutput:
        ids_BxS = features["sequence_ids"]
        source_BxS = jnp.where(features[SOURCE_MASK] > 0, ids_BxS, 0) if SOURCE_MASK in features else ids_BxS
        encoded = self.source({**features, "sequence_ids": source_BxS}, dropout_key)
        states_BxSxH = bert_output(encoded).sequence_output
        outputs: dict[str, Any] = {"sequence_output": states_BxSxH}
        if self._projects:
            states_BxSxH = self.projection(states_BxSxH)
        is_seen_BxSxS = jnp.maximum(ids_BxS, 1)[:, :, None] == source_BxS[:, None, :]
        tokens = {name: features[name] for name in ("sequence_ids", "position_ids")}
        sources, visible_Bx1xSxS = (states_BxSxH,) * self.joint.target.num_layers, is_seen_BxSxS[:, None]
        if self.is_initializing():
            self.target(features["input_ids"], sources, visible_Bx1xSxS, tokens)
        elif TARGET_IDS in features:
            decoder, params = Decoder(self.joint.target, self.exact, self.mesh, parent=None), self._decoder_params()
            key = None if dropout_key is None else _folded(dropout_key, _DECODER)
            variables = {"params": params}
            outputs["mlm_logits"] = decoder.apply(
                variables, features[TARGET_IDS], sources, visible_Bx1xSxS, tokens, key
            )
            if OUTPUT_IDS in features and "sequence_keys" not in features:
                outputs["translations"] = translate(decoder, params, states_BxSxH, source_BxS, features)
        return BertOutput(**outputs)

    def _decoder_params(self) -> Params:
        """Return the parameters of the decoder, with those that it shares with the encoder."""
        params: dict[str, Any] = dict(self.variables["params"])
        own = dict(params["target"])
        if not self.joint.shared:
            return own
        source, layers = params["source"], self.joint.target.num_layers
        encoder = source["encoder"]
        for i in range(layers):
            stacked = encoder.get("layers")
            layer = encoder[f"layer_{i}"] if stacked is None else jax.tree.map(lambda x, i=i: x[i], stacked)
            own[f"layer_{i}"] = {**layer, **own[f"layer_{i}"]}
        finals = {"final_layer_norm": encoder["final_layer_norm"]} if "final_layer_norm" in encoder else {}
        return {"embeddings": source["embeddings"], **finals, **own}


def translate(
    decoder: Decoder,
    params: Params,
    states_BxSxH: jax.Array,
    source_BxS: jax.Array,
    features: Mapping[str, jax.Array],
) -> jax.Array:
    """Return the best hypothesis of each pair of a batch, int32[B, U, T], -1 after its end; see
    ``search.search``. ``source``: sequence ids int32[B, S] of the tokens of the sources, 0 elsewhere."""
    output_BxUxKxT = features[OUTPUT_IDS]
    batch, units, beams, most = output_BxUxKxT.shape
    memories = decoder.apply({"params": params}, states_BxSxH, method="memories")
    unit_Q = 1 + jnp.repeat(jnp.arange(units), beams)
    visible_Bx1xQxS = (unit_Q[:, None] == source_BxS[:, None, :])[:, None]
    rows = batch * units * beams

    def step(cache: Params, ids_R: jax.Array, place: jax.Array) -> tuple[jax.Array, Params]:
        ones_Rx1 = jnp.ones((rows, 1), jnp.int32)
        tokens = {
            "sequence_ids": ones_Rx1, "position_ids": place * ones_Rx1, "cache_start": place,
            "cache_ids": jnp.ones((rows, most), jnp.int32),
        }  # fmt: skip
        variables = {"params": params} | ({CACHE: cache} if cache else {})
        logits_Rx1xV, changed = decoder.apply(
            variables, ids_R[:, None], memories, visible_Bx1xQxS, tokens, mutable=[CACHE]
        )
        return logits_Rx1xV[:, 0], changed[CACHE]

    groups = batch * units
    shapes = jax.eval_shape(lambda: step({}, jnp.zeros(rows, jnp.int32), jnp.int32(0))[1])
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    found_GxT = search(
        step, cache, beams, most,
        Search(
            start_ids=output_BxUxKxT[..., 0, 0].reshape(groups),
            end_ids=features[END_ID].reshape(groups),
            most_tokens=jnp.minimum(features[MOST_TOKENS].reshape(groups), most),
            length_penalty=features[LENGTH_PENALTY].reshape(groups),
        ),
    ).ids[:, 0]  # fmt: skip
    return found_GxT.reshape(batch, units, most)


def _folded(key: DropoutKey, number: int) -> DropoutKey:
    """Return a key with other bits."""
    folded = jax.random.fold_in(whole_key(key), number)
    return dataclasses.replace(key, key=folded) if isinstance(key, ShardKey | TokenKey) else folded
