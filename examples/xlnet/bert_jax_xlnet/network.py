"""The encoder of XLNet (Yang et al. 2019, sections 2.3 to 2.5), one or two streams.

A row of this library begins with the token [CLS], whereas XLNet's inputs end with it. The encoder moves the token
behind the last token of its sequence and moves its output back, so that heads find it at the first place.

Shapes: B rows, S tokens, M targets, Q = S + M queries (Q = S with one stream), N states of the memory, T = N + S
keys, R = T + S distances, A heads, D size of a head, H = A * D.
"""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from bert_jax.model.dense import weight_init
from bert_jax.model.dropout import (
    DropoutKey,
    Site,
    TokenKey,
    dropout,
    dropout_of_cut_probabilities,
    site_key,
    whole_key,
)
from bert_jax.model.layers import (
    ACT,
    CACHE,
    INTERMEDIATES,
    Block,
    FeedForward,
    compute_dtype,
    output_residual_norm,
)
from bert_jax.parallel.axes import constrain, with_logical_axes
from bert_jax_xlnet.config import XlnetConfig

# Segment of the token that stands for a sequence (cls); the segments of its texts are 0 and 1.
CLS_SEGMENT = 2
# Added to the positions of the queries in dropout keys, so that a query drops other values than the token at its
# place.
_QUERY_POSITIONS = 1 << 20


def distance_encodings(queries: int, keys: int, width: int, largest: int) -> jax.Array:
    """Return the sinusoids of the distances ``keys`` to 1 - ``queries``, float32[R, H]: the sines, then the cosines
    (Dai et al. 2019). Distances above ``largest`` (0: no limit) are encoded as ``largest``."""
    distances = jnp.arange(keys, -queries, -1.0)
    distances = jnp.clip(distances, -largest, largest) if largest else distances
    angles = distances[:, None] / 10_000 ** (jnp.arange(0, width, 2.0) / width)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def shifted(scores_BxAxSxR: jax.Array, keys: int) -> jax.Array:
    """Return [B, A, S, T], in which row i holds the scores of its distances to the T = ``keys`` keys: score r of
    row i becomes that of key r - (S - i) (Dai et al. 2019, appendix B)."""
    *leading, queries, distances = scores_BxAxSxR.shape
    turned = scores_BxAxSxR.reshape(*leading, distances, queries)[..., 1:, :]
    return turned.reshape(*leading, queries, distances - 1)[..., :keys]


def at_places(scores_BxAxMxR: jax.Array, places_BxM: jax.Array, queries: int, keys: int) -> jax.Array:
    """Return [B, A, M, T], the rows of :func:`shifted` for queries at ``places`` among ``queries`` tokens."""
    columns_BxMxT = queries - places_BxM[:, :, None] + jnp.arange(keys)
    return jnp.take_along_axis(scores_BxAxMxR, columns_BxMxT[:, None], axis=-1)


@struct.dataclass
class Order:
    """The order in which the encoder reads a row: [CLS] behind the last token of its sequence."""

    sources_BxS: jax.Array  # the token at each place
    places_BxS: jax.Array  # the place of each token

    @classmethod
    def of(cls, sequence_ids_BxS: jax.Array, position_ids_BxS: jax.Array) -> "Order":
        """Return the order of rows with these features of a batch."""
        ids, length = sequence_ids_BxS, sequence_ids_BxS.shape[1]
        sizes_BxS = jnp.sum(ids[:, :, None] == ids[:, None, :], axis=-1)
        is_last_BxS = ids != jnp.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        own = jnp.arange(length)
        sources_BxS = jnp.where(ids == 0, own, jnp.where(is_last_BxS, own + 1 - sizes_BxS, own + 1))
        places_BxS = jnp.where(ids == 0, own, jnp.where(position_ids_BxS == 0, own - 1 + sizes_BxS, own - 1))
        return cls(sources_BxS, places_BxS)

    def arranged(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Return ``x``, whose axis ``axis`` has the tokens of the rows, in this order."""
        return _taken(x, self.sources_BxS, axis)

    def restored(self, x: jax.Array) -> jax.Array:
        """Return ``x`` [B, S, ...], which is in this order, in the order of the rows."""
        return _taken(x, self.places_BxS, 1)


def _taken(x: jax.Array, indices_BxS: jax.Array, axis: int) -> jax.Array:
    shape = [1] * x.ndim
    shape[0], shape[axis] = indices_BxS.shape
    return jnp.take_along_axis(x, indices_BxS.reshape(shape), axis=axis)


@struct.dataclass
class View:
    """What the queries of a batch see."""

    visible_BxQxT: jax.Array  # True: the query sees the key
    differs_BxQxT: jax.Array  # True: query and key are in different segments
    places_BxM: jax.Array | None  # places of the targets; None: one stream
    relative_RxH: jax.Array  # encodings of the distances
    tokens: int = struct.field(pytree_node=False)  # S


class RelativeAttention(Block):
    """Attention with relative positions and segments, dropout, residual connection and LayerNorm. A query is
    compared with a key, with the distance between both, and with the fact whether both are in one segment."""

    @nn.compact
    def __call__(
        self,
        x_BxQxH: jax.Array,
        memory_BxNxH: jax.Array | None,
        view: View,
        probabilities_key: DropoutKey | None,
        output_key: DropoutKey | None,
    ) -> jax.Array:
        config, dtype, tokens = self.config, compute_dtype(self.execution), view.tokens
        heads, size = config.num_attention_heads, config.head_size
        states_BxTxH = x_BxQxH[:, :tokens]
        if memory_BxNxH is not None:
            states_BxTxH = jnp.concatenate([memory_BxNxH.astype(dtype), states_BxTxH], axis=1)

        def projected(x: jax.Array, name: str) -> jax.Array:
            y = self.dense(heads * size, ("embed", "heads"), False, name=name)(x)
            return y.reshape(*y.shape[:-1], heads, size)

        def vectors(name: str, count: int) -> jax.Array:
            shape, axes = (count, heads * size), (None, "heads")
            values = self.param(name, with_logical_axes(weight_init(config), axes), shape)
            return values.reshape(count, heads, size).astype(dtype)

        query = projected(x_BxQxH, "query")
        keys, values = (projected(states_BxTxH, name) for name in ("key", "value"))
        of_content, of_distance, of_segment = (query + vectors(f"{name}_bias", 1)[0] for name in _BIASES)
        scores = jnp.einsum("bqad,btad->baqt", of_content, keys)
        relative_RxAxD = projected(view.relative_RxH.astype(dtype), "distance")
        distances = jnp.einsum("bqad,rad->baqr", of_distance, relative_RxAxD)
        count = states_BxTxH.shape[1]
        near = shifted(distances[:, :, :tokens], count)
        if view.places_BxM is not None:
            targets = at_places(distances[:, :, tokens:], view.places_BxM, tokens, count)
            near = jnp.concatenate([near, targets], axis=2)
        segments = jnp.einsum("bqad,sad->sbaq", of_segment, vectors("segment_embeddings", 2))
        own, other = segments[0, ..., None], segments[1, ..., None]
        scores = scores + near + jnp.where(view.differs_BxQxT[:, None], other, own)
        scores = scores.astype(jnp.float32) / size**0.5
        probabilities = jax.nn.softmax(jnp.where(view.visible_BxQxT[:, None], scores, -1e30)).astype(dtype)
        probabilities = _dropped(probabilities, config.attention_dropout, probabilities_key, tokens)
        context = jnp.einsum("baqt,btad->bqad", probabilities, values).reshape(*x_BxQxH.shape[:2], -1)
        output = self.dense(config.hidden_size, ("heads", "embed"), False, True, name="output")
        rate = config.dropout_at("attention_output")
        return output_residual_norm(self, (context,), x_BxQxH, output, rate, output_key)


# Names of the vectors that are added to the queries: u and v of Dai et al. 2019, and b of Yang et al. 2019.
_BIASES = ("content", "distance", "segment")


def _dropped(x_BxAxQxT: jax.Array, rate: float, key: DropoutKey | None, tokens: int) -> jax.Array:
    """Apply dropout to attention probabilities; the keys are ``tokens`` tokens after the states of a memory."""
    if not isinstance(key, TokenKey):
        return dropout(x_BxAxQxT, rate, key)
    older = jnp.arange(tokens - x_BxAxQxT.shape[-1], 0)

    def keys(positions_BxQ: jax.Array) -> jax.Array:
        own = positions_BxQ[:, :tokens]
        return jnp.concatenate([jnp.broadcast_to(older, (len(own), len(older))).astype(own.dtype), own], axis=1)

    return dropout_of_cut_probabilities(x_BxAxQxT, rate, key, lambda words: words, keys)


class Layer(Block):
    """One layer: attention, then the feed-forward block of BERT. ``layer`` counts from 1."""

    layer: int = 1

    @nn.compact
    def __call__(
        self, x_BxQxH: jax.Array, memory_BxNxH: jax.Array | None, view: View, key: DropoutKey | None
    ) -> jax.Array:
        parts = self.config, self.execution, self.mesh
        sites = (Site.ATTENTION_PROBABILITIES, Site.ATTENTION_OUTPUT, Site.FEED_FORWARD_OUTPUT)
        *of_attention, of_feed_forward = (site_key(key, self.layer, site) for site in sites)
        x_BxQxH = RelativeAttention(*parts, name="attention")(x_BxQxH, memory_BxNxH, view, *of_attention)
        return constrain(FeedForward(*parts, name="feed_forward")(x_BxQxH, of_feed_forward), ACT, self.mesh)


class Encoder(Block):
    """The stack of layers, with the interface of ``bert_jax.model.bert.Encoder``.

    ``tokens`` may have, besides the features that every encoder gets:

    * ``token_type_ids`` int[B, S]: segments of the tokens; absent: one segment. [CLS] is a segment of its own.
    * ``perm_mask`` bool[B, S, S]: True where token i does not see token j (section 2.1). A token sees itself.
    * ``target_positions`` int[B, M]: the tokens that the second stream predicts. A target is a query without
      content, which sees what ``perm_mask`` allows the token at its place, except for this token. The result then
      has S + M columns: the states of the tokens, and those of the targets.

    With ``cache_start`` among the ``tokens`` and ``model.memory_length`` above 0, keys and values are also computed
    from the states in the collection ``CACHE`` (section 2.5), to which those of the row are added. No gradient
    passes through them. A row that ends in padding empties the memory.
    """

    config: XlnetConfig
    collect: bool = False

    @nn.compact
    def __call__(
        self, x_BxSxH: jax.Array, tokens: Mapping[str, jax.Array], dropout_key: DropoutKey | None
    ) -> tuple[jax.Array, jax.Array | None]:
        config, dtype = self.config, compute_dtype(self.execution)
        length = x_BxSxH.shape[1]
        order = Order.of(tokens["sequence_ids"], tokens["position_ids"])
        init = with_logical_axes(weight_init(config), ("embed",))
        mask_H = self.param("mask_embedding", init, (config.hidden_size,))
        x_BxQxH, key = order.arranged(x_BxSxH), dropout_key
        key = key.at(order.sources_BxS) if isinstance(key, TokenKey) else key
        places_BxM = None
        if "target_positions" in tokens:
            places_BxM = jnp.take_along_axis(order.places_BxS, tokens["target_positions"], axis=1)
            of_queries, key = _with_queries(key, places_BxM)
            queries_BxMxH = jnp.broadcast_to(mask_H.astype(dtype), (*places_BxM.shape, config.hidden_size))
            words_key = site_key(of_queries, 0, Site.WORDS)
            queries_BxMxH = dropout(queries_BxMxH, config.dropout_at("embedding"), words_key)
            x_BxQxH = jnp.concatenate([x_BxQxH, queries_BxMxH], axis=1)
        memory, held_BxN = self._memory(x_BxSxH, tokens)
        view = self._view(tokens, order, places_BxM, held_BxN, dropout_key)
        inputs, collected = [], []
        layer_type = Layer if self.execution.remat == "none" else nn.remat(Layer)
        for i in range(config.num_layers):
            inputs.append(x_BxQxH[:, :length])
            own = None if memory is None else memory.value[:, i]
            layer = layer_type(config, self.execution, self.mesh, i + 1, name=f"layer_{i}")
            x_BxQxH = layer(x_BxQxH, own, view, key)
            if self.collect or self.is_mutable_collection(INTERMEDIATES):
                collected.append(order.restored(x_BxQxH[:, :length]))
                self.sow(INTERMEDIATES, "hidden_states", collected[-1])
        if memory is not None:
            self._remember(memory, inputs, tokens["sequence_ids"])
        output = jnp.concatenate([order.restored(x_BxQxH[:, :length]), x_BxQxH[:, length:]], axis=1)
        return output, jnp.stack(collected) if self.collect else None

    def _memory(
        self, x_BxSxH: jax.Array, tokens: Mapping[str, jax.Array]
    ) -> tuple[nn.Variable | None, jax.Array | None]:
        """Return the memory [B, L, N, H] and which of its states exist, bool[B, N]; None: there is no memory."""
        config = self.config
        if "cache_start" not in tokens or not config.memory_length:
            return None, None
        rows, count = len(x_BxSxH), config.memory_length
        shape = (rows, config.num_layers, count, config.hidden_size)
        memory = self.variable(CACHE, "memory", lambda: jnp.zeros(shape, compute_dtype(self.execution)))
        held_BxN = self.variable(CACHE, "held", lambda: jnp.zeros((rows, count), bool)).value
        return memory, held_BxN

    def _remember(self, memory: nn.Variable, inputs: list[jax.Array], sequence_ids_BxS: jax.Array) -> None:
        """Add the inputs of the layers to the memory, and drop the oldest states."""
        if self.is_initializing():
            return
        count = self.config.memory_length
        new_BxLxSxH = jax.lax.stop_gradient(jnp.stack(inputs, axis=1)).astype(memory.value.dtype)
        is_full_Bx1 = sequence_ids_BxS[:, -1:] > 0
        held_BxN: jax.Array = self.get_variable(CACHE, "held")
        new_BxS = jnp.broadcast_to(is_full_Bx1, sequence_ids_BxS.shape)
        held_BxN = jnp.concatenate([held_BxN & is_full_Bx1, new_BxS], axis=1)[:, -count:]
        memory.value = jnp.concatenate([memory.value, new_BxLxSxH], axis=2)[:, :, -count:]
        self.put_variable(CACHE, "held", held_BxN)

    def _view(
        self,
        tokens: Mapping[str, jax.Array],
        order: Order,
        places_BxM: jax.Array | None,
        held_BxN: jax.Array | None,
        dropout_key: DropoutKey | None,
    ) -> View:
        config = self.config
        ids_BxS, positions_BxS = (order.arranged(tokens[name]) for name in ("sequence_ids", "position_ids"))
        rows, length = ids_BxS.shape
        allowed_BxSxS = ids_BxS[:, :, None] == ids_BxS[:, None, :]  # no token sees padding
        if "perm_mask" in tokens:
            allowed_BxSxS &= ~order.arranged(order.arranged(tokens["perm_mask"]), axis=2)
        types_BxS = tokens.get("token_type_ids", jnp.zeros_like(tokens["sequence_ids"]))
        types_BxS = jnp.where(positions_BxS == 0, CLS_SEGMENT, order.arranged(types_BxS))
        visible = allowed_BxSxS | jnp.eye(length, dtype=bool)
        if places_BxM is not None:
            visible = jnp.concatenate([visible, _rows(allowed_BxSxS, places_BxM)], axis=1)
        differs = types_BxS[:, :, None] != types_BxS[:, None, :]
        differs = differs if places_BxM is None else jnp.concatenate([differs, _rows(differs, places_BxM)], axis=1)
        memory_length = 0 if held_BxN is None else held_BxN.shape[1]
        if held_BxN is not None:
            # All states of the memory are in segment 0, as in transformers.
            shape = (rows, visible.shape[1], memory_length)
            visible = jnp.concatenate([jnp.broadcast_to(held_BxN[:, None], shape), visible], axis=2)
            is_other = types_BxS if places_BxM is None else jnp.concatenate(
                [types_BxS, jnp.take_along_axis(types_BxS, places_BxM, axis=1)], axis=1
            )  # fmt: skip
            differs = jnp.concatenate([jnp.broadcast_to(is_other[:, :, None] != 0, shape), differs], axis=2)
        keys = memory_length + length
        relative_RxH = distance_encodings(length, keys, config.hidden_size, config.largest_distance)
        relative_key = site_key(dropout_key, 0, Site.RELATIVE_POSITIONS)
        if relative_key is not None:  # the encodings belong to no token: all rows drop the same values
            relative_RxH = dropout(relative_RxH, config.hidden_dropout, whole_key(relative_key))
        return View(visible, differs, places_BxM, relative_RxH, length)


def _rows(x_BxSxT: jax.Array, places_BxM: jax.Array) -> jax.Array:
    """Return the rows of ``x`` at ``places``, [B, M, T]."""
    return jnp.take_along_axis(x_BxSxT, places_BxM[:, :, None], axis=1)


def _with_queries(key: DropoutKey | None, places_BxM: jax.Array) -> tuple[DropoutKey | None, DropoutKey | None]:
    """Return the dropout keys of the queries at ``places``, and of the tokens and these queries."""
    if not isinstance(key, TokenKey):
        return key, key
    queries = key.at(places_BxM)
    queries = replace(queries, positions=queries.positions + _QUERY_POSITIONS)
    parts = (key.sequence_keys, queries.sequence_keys), (key.positions, queries.positions)
    both = (jnp.concatenate(part, axis=1) for part in parts)
    return queries, TokenKey(key.key, *both)
