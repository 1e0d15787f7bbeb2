"""Building blocks of the encoder: LayerNorm, attention, feed-forward, one encoder layer.

Shapes: B rows, S tokens, H width, A heads of the layer, D head size, F feed-forward width of the layer.
Parameters are float32 and carry their logical axes; ``dtype`` is the dtype of the computation.
"""

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from bert_jax.config import ExecutionConfig, ModelConfig
from bert_jax.model import local_attention as local
from bert_jax.model.attention import (
    attention_kernel_of,
    attention_probabilities,
    cached_keys,
    dot_product_attention,
    kernel_attention,
    without_padding,
)
from bert_jax.model.dense import Dense, activation, add_bias, matmul_f32_grad
from bert_jax.model.dropout import DropoutKey, Site, dropout, site_key, whole_key
from bert_jax.model.kernels.add_norm import kernel_add_norm, kernel_norm, norm_kernels_of
from bert_jax.model.kernels.common import kernel_module
from bert_jax.model.kernels.ranges import visible_keys
from bert_jax.model.kernels.tiles import Form
from bert_jax.model.positions import RelativeScores, distance_rows, rotary_factors, rotate
from bert_jax.parallel.axes import Axes, constrain, with_logical_axes

ACT = ("act_batch", "act_length", "act_embed")
# Linen collection of hidden states and attention probabilities; filled if it is mutable.
INTERMEDIATES = "intermediates"
# Linen collection of the queries, keys and values of all heads, [3, B, S, A, D] per layer; filled if it is mutable.
VECTORS = "vectors"
# Linen collection of the keys and values of earlier tokens, which the features in CACHE_FEATURES describe.
CACHE = "cache"
# sequence_ids int32[B, C] of the columns of the cache (0: padding), and the column of the first token, int32.
CACHE_FEATURES = ("cache_ids", "cache_start")


def compute_dtype(execution: ExecutionConfig) -> jnp.dtype:
    """Return the dtype of matrix products and activations."""
    return jnp.dtype(execution.dtype)


class Norm(nn.Module):
    """LayerNorm, or the RMSNorm that ``config.norm`` chooses, over the last axis with float32 statistics (bf16
    loses the variance of wide rows)."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def parameters(self, width: int) -> tuple[jax.Array, jax.Array]:
        """Return the scale and the bias, each [width], in float32, for a caller that fuses the normalization with
        another operation."""
        scale = self.param("scale", with_logical_axes(nn.initializers.ones_init(), ("norm",)), (width,))
        if not self.config.has_bias("norm"):
            return scale, jnp.zeros((width,))
        return scale, self.param("bias", with_logical_axes(nn.initializers.zeros_init(), ("norm",)), (width,))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale, bias = self.parameters(x.shape[-1])
        centered = x.astype(jnp.float32)
        if self.config.norm == "layer_norm":
            centered -= jnp.mean(centered, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
        normal = centered * jax.lax.rsqrt(variance + self.config.norm_epsilon)
        return (normal * scale + bias if self.config.has_bias("norm") else normal * scale).astype(self.dtype)


# An operand of the function that computes the attention of a layer.
_Operand = jax.Array | tuple[jax.Array, ...] | RelativeScores | None


class Block(nn.Module):
    """Base class of the encoder modules. Its fields are the sizes, the execution options and the mesh."""

    config: ModelConfig
    execution: ExecutionConfig
    mesh: Mesh | None = None

    def dense(self, features: int, axes: Axes, use_bias: bool, ends_block: bool = False, *, name: str) -> Dense:
        """Return a dense layer with the dtype and the rounding of ``execution``."""
        options = self.config, compute_dtype(self.execution), use_bias, ends_block
        return Dense(features, axes, *options, self.execution.quantization == "int8", name=name)


def norm_before(block: Block, x_BxSxH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the input of a block, normalized if ``norm_position`` is not post, and the residual that bypasses the
    block, both [B, S, H]."""
    config, mesh = block.config, block.mesh
    if config.norm_position == "post":
        return x_BxSxH, x_BxSxH
    norm, kernels = Norm(config, compute_dtype(block.execution), name="layer_norm"), None
    if not block.is_initializing():
        kernels = norm_kernels_of(block.execution.residual_norm, mesh, config, x_BxSxH.shape[1])
    if kernels is None:
        return norm(x_BxSxH), x_BxSxH
    x_BxSxH = constrain(x_BxSxH, ACT, mesh)
    with jax.named_scope("add_norm"):
        return kernel_norm(x_BxSxH, norm.parameters(x_BxSxH.shape[-1]), epsilon=config.norm_epsilon, mesh=mesh)


def output_residual_norm(
    block: Block,
    inner: tuple[jax.Array, ...],
    x_BxSxH: jax.Array,
    dense: Dense,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
    activate: Callable[..., jax.Array] = lambda x: x,
) -> jax.Array:
    """Apply the last operations of an attention or feed-forward block to ``inner``, arrays [B, S, ...] or [N, ...].

    The operations are ``activate``, the output projection ``dense``, dropout, the addition of the residual ``x``
    and, if ``norm_position`` is post, LayerNorm.
    """
    config, dtype, mesh = block.config, compute_dtype(block.execution), block.mesh
    length, width = x_BxSxH.shape[1:]
    kernel, bias = dense.parameters(inner[0].shape[-1])

    def project(inner: tuple[jax.Array, ...], kernel: jax.Array) -> jax.Array:
        return matmul_f32_grad(dense.inputs(activate(*inner)), kernel)

    if block.execution.scan_layers:
        # A loop copies the values for its backward pass into stacked arrays; recomputing the activation is cheaper.
        project = jax.checkpoint(project, prevent_cse=False)
    product_BxSxH = project(inner, kernel).reshape(x_BxSxH.shape)
    kernels, is_post = None, config.norm_position == "post"
    if is_post and not block.is_initializing():
        kernels = norm_kernels_of(block.execution.residual_norm, mesh, config, length)
    if kernels is None:
        output_BxSxH = add_bias(product_BxSxH, bias) if dense.use_bias else product_BxSxH
        sum_BxSxH = x_BxSxH + dropout(output_BxSxH, dropout_rate, dropout_key)
        return Norm(config, dtype, name="layer_norm")(sum_BxSxH) if is_post else sum_BxSxH
    vectors = (bias, *Norm(config, dtype, name="layer_norm").parameters(width))
    product_BxSxH = constrain(product_BxSxH, ACT, mesh)
    with jax.named_scope("add_norm"):
        return kernel_add_norm(
            product_BxSxH, x_BxSxH, vectors, epsilon=config.norm_epsilon, dropout_rate=dropout_rate,
            dropout_key=dropout_key, kernels=kernels, mesh=mesh,
        )  # fmt: skip


class SelfAttention(Block):
    """Multi-head self-attention with output projection, dropout, residual connection and LayerNorm.

    ``window``: number of keys on each side that a query sees; 0: no limit. ``skip_norm``: True for the first layer
    with ``norm_position`` pre_skip_first. ``heads``: number of heads; 0: the config's. ``relative``, if it
    is an input, is the bias of the scores, float32[A, S, T], or (disentangled) the embeddings of distances, [R, H].
    """

    window: int = 0
    skip_norm: bool = False
    heads: int = 0

    @nn.compact
    def __call__(
        self,
        x_BxSxH: jax.Array,
        tokens: Mapping[str, jax.Array],
        relative: jax.Array | None,
        probabilities_key: DropoutKey | None,
        output_key: DropoutKey | None,
    ) -> jax.Array:
        config, sequence_ids_BxS = self.config, tokens["sequence_ids"]
        mesh, head_size = self.mesh, config.head_size
        (batch, length, width), heads = x_BxSxH.shape, self.heads or config.num_attention_heads
        axes_of_heads = ("act_batch", "act_length", "act_heads", None)
        inner_BxSxH, x_BxSxH = (x_BxSxH, x_BxSxH) if self.skip_norm else norm_before(self, x_BxSxH)
        dense = {
            name: self.dense(heads * head_size, ("embed", "heads"), config.has_bias("qkv"), name=name)
            for name in ("query", "key", "value")
        }
        rate, look_inside = config.attention_dropout, self.is_mutable_collection(INTERMEDIATES)
        causal, slots = config.attention == "causal", None
        sees = functools.partial(
            visible_keys, causal=causal, window=self.window, is_global_BxS=tokens.get("is_global")
        )
        attend: Callable[..., jax.Array]
        # Parameters are initialized with short rows, which kernels may not support.
        plain = look_inside or self.is_initializing() or "cache_start" in tokens
        kernel = "" if plain else attention_kernel_of(self.execution.attention, mesh, config, length)
        is_rotary, keeps = config.position_embeddings == "rotary", self.is_mutable_collection(VECTORS)
        in_one = kernel == "gpu" and not (is_rotary or keeps)
        products, biases = self._project(inner_BxSxH, list(dense.values()), in_one)
        if keeps:
            self.sow(VECTORS, "attention", jnp.stack(self._heads(products, biases, tokens["position_ids"])))
        if kernel:
            of_heads, bias, turns = self._kernel_operands(products, biases, tokens["position_ids"], kernel)
            operands: list[_Operand] = [of_heads, bias, sequence_ids_BxS]
            form = Form(head_size, rate, self.window, causal)
            attend = functools.partial(kernel_attention, kernel=kernel, form=form, mesh=mesh, turns=turns)
        else:
            vectors = self._heads(products, biases, tokens["position_ids"])
            if "cache_start" in tokens:
                vectors[1:], sees = self._cached(vectors[1:], tokens["cache_ids"], tokens["cache_start"])
            scores = self._relative_scores(relative, dense, length)
            attend, scores, slots = local.attention_function(
                config, self.window, tokens, scores, sees, plain, probabilities_key
            )
            query, keys, values = (constrain(y, axes_of_heads, mesh) for y in vectors)
            operands = [query, keys, values, sequence_ids_BxS, scores]
        if self.execution.remat == "attention":
            attend = jax.checkpoint(attend)
        if look_inside:
            probabilities = attention_probabilities(query, keys, sees(sequence_ids_BxS), scores)
            self.sow(INTERMEDIATES, "attentions", probabilities)
        with jax.named_scope("dot_product_attention"):
            context = attend(*operands, dropout_key=probabilities_key)
        context = without_padding(context, sequence_ids_BxS, config)
        if config.global_tokens:
            context = self._replace_global(context, inner_BxSxH, tokens, slots, probabilities_key)
        context = constrain(context.reshape(batch, length, -1, head_size), axes_of_heads, mesh)
        inner = (context.reshape(batch, length, -1),)
        output = self.dense(width, ("heads", "embed"), config.has_bias("attention_output"), True, name="output")
        return output_residual_norm(self, inner, x_BxSxH, output, config.dropout_at("attention_output"), output_key)

    def _kernel_operands(
        self, products: list[jax.Array], biases: list[jax.Array], position_ids_BxS: jax.Array, kernel: str
    ) -> tuple[tuple[jax.Array, ...], jax.Array, tuple[jax.Array, ...]]:
        """Return queries, keys and values for ``kernel``, the biases, [3, H], that it adds to them, and the factors
        with which the kernel for TPUs rotates queries and keys."""
        turns: tuple[jax.Array, ...] = ()
        if self.config.position_embeddings == "rotary" and kernel == "tpu":
            turns = kernel_module("tpu", "attention").rotary_turns(
                *rotary_factors(self.config, self.window, position_ids_BxS)
            )
        elif self.config.position_embeddings == "rotary":
            turned = self._heads(products, biases, position_ids_BxS)
            products = [y.reshape(*y.shape[:2], -1) for y in turned]
            biases = [jnp.zeros_like(bias) for bias in biases]
        axes = [("act_batch", "act_length", *(None,) * (y.ndim - 3), "act_heads") for y in products]
        heads = (constrain(y, of_y, self.mesh) for y, of_y in zip(products, axes, strict=True))
        return tuple(heads), jnp.stack(biases), turns

    def _project(
        self, x_BxSxH: jax.Array, dense: list[Dense], in_one: bool
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the queries, keys and values without their biases, each [B, S, H], and the three biases, each [H];
        with ``in_one``, one array [B, S, 3, H]."""
        x_BxSxH = dense[0].inputs(x_BxSxH)
        pairs = [layer.parameters(x_BxSxH.shape[-1]) for layer in dense]
        biases = [bias for _, bias in pairs]
        if not (self.execution.fused_qkv or in_one):
            return [matmul_f32_grad(x_BxSxH, kernel) for kernel, _ in pairs], biases
        # Stacked on a new axis, which no mesh axis partitions, so that heads stay on their devices.
        fused_BxSx3xH = matmul_f32_grad(x_BxSxH, jnp.stack([kernel for kernel, _ in pairs], axis=1))
        return [fused_BxSx3xH] if in_one else [fused_BxSx3xH[:, :, i] for i in range(3)], biases

    def _cached(
        self, heads: list[jax.Array], cache_ids_BxC: jax.Array, start: jax.Array
    ) -> tuple[list[jax.Array], functools.partial[jax.Array]]:
        """Write keys and values [B, S, A, D] to the columns of the cache from ``start`` on; return those of all
        columns, each [B, C, A, D], and the function of the mask."""
        for i, name in enumerate(("cached_key", "cached_value")):
            shape = (*cache_ids_BxC.shape, *heads[i].shape[2:])
            stored = self.variable(CACHE, name, jnp.zeros, shape, heads[i].dtype)
            stored.value = jax.lax.dynamic_update_slice(stored.value, heads[i], (0, start, 0, 0))
            heads[i] = stored.value
        place = {"cache_ids_BxC": cache_ids_BxC, "start": start}
        return heads, functools.partial(cached_keys, window=self.window, **place)

    def _heads(
        self, heads: list[jax.Array], biases: list[jax.Array], position_ids_BxS: jax.Array
    ) -> list[jax.Array]:
        """Return queries, keys and values with their biases and rotary positions, each [B, S, A, D]."""
        config = self.config
        if config.has_bias("qkv"):
            heads = [add_bias(y, bias) for y, bias in zip(heads, biases, strict=True)]
        heads = [y.reshape(*y.shape[:2], -1, config.head_size) for y in heads]
        if config.position_embeddings == "rotary":
            turns = [x[:, :, None] for x in rotary_factors(config, self.window, position_ids_BxS)]
            heads[:2] = [rotate(y, *turns) for y in heads[:2]]
        return heads

    def _replace_global(
        self,
        context_BxSxAxD: jax.Array,
        x_BxSxH: jax.Array,
        tokens: Mapping[str, jax.Array],
        slots_BxG: jax.Array | None,
        key: DropoutKey | None,
    ) -> jax.Array:
        """Return ``context`` in which global tokens have the result of their attention, with separate projections,
        and padding has 0. ``slots``: compute only these queries."""
        config, shape = self.config, context_BxSxAxD.shape[2:]
        projections = [
            self.dense(math.prod(shape), ("embed", "heads"), config.has_bias("qkv"), name=f"{name}_global")
            for name in ("query", "key", "value")
        ]
        ids_BxS = tokens["sequence_ids"]
        real_BxSxAxD = jnp.where(ids_BxS[:, :, None, None] > 0, context_BxSxAxD, 0)
        if self.is_initializing() or "is_global" not in tokens:
            for dense in projections:
                dense.parameters(x_BxSxH.shape[-1])
            return real_BxSxAxD
        inputs = (x_BxSxH if slots_BxG is None else local.at_slots(x_BxSxH, slots_BxG), x_BxSxH, x_BxSxH)
        axes = ("act_batch", "act_length", "act_heads", None)
        heads = [dense(x) for dense, x in zip(projections, inputs, strict=True)]
        query, keys, values = (y.reshape(*y.shape[:2], *shape) for y in heads)
        rate = config.attention_dropout
        if slots_BxG is not None:
            return local.replace_global(
                real_BxSxAxD, query, keys, values, ids_BxS, slots_BxG, dropout_rate=rate, dropout_key=key
            )
        query, keys, values = (constrain(y, axes, self.mesh) for y in (query, keys, values))
        rows = dot_product_attention(query, keys, values, ids_BxS, dropout_rate=rate, dropout_key=key)
        return jnp.where(tokens["is_global"][:, :, None, None], rows, real_BxSxAxD)

    def _relative_scores(
        self, relative: jax.Array | None, dense: Mapping[str, Dense], length: int
    ) -> RelativeScores | None:
        """Return the terms of the scores that depend on distances; None if there are none."""
        config = self.config
        if config.relative_positions != "disentangled":
            return None if relative is None else RelativeScores(bias_AxSxT=relative)
        assert relative is not None
        shape = (-1, config.num_attention_heads, config.head_size)
        rows = distance_rows(config, length)
        # The projections of queries and keys also project the embeddings of distances (share_att_key of DeBERTa).
        keys, queries = (dense[name](relative).reshape(shape) for name in ("key", "query"))
        return RelativeScores(keys_RxAxD=keys, queries_RxAxD=queries, rows_SxT=rows)


class FeedForward(Block):
    """Feed-forward block of an encoder layer: two dense layers with the activation between them, dropout, residual
    connection and LayerNorm. A gated layer multiplies the output of the first dense layer by the activated output
    of a third one (Shazeer 2020). ``units``: width between the layers; 0: the width in the config."""

    units: int = 0

    @nn.compact
    def __call__(self, x_BxSxH: jax.Array, output_key: DropoutKey | None) -> jax.Array:
        config, bias = self.config, self.config.has_bias("feed_forward")
        inner_BxSxH, x_BxSxH = norm_before(self, x_BxSxH)
        is_gated, units = config.feed_forward == "gated", self.units or config.intermediate_size
        hidden = []
        for name in ("gate", "intermediate") if is_gated else ("intermediate",):
            dense = self.dense(units, ("embed", "mlp"), bias, name=name)
            hidden.append(constrain(dense(inner_BxSxH), ("act_batch", "act_length", "act_mlp"), self.mesh))

        def activate(first: jax.Array, *second: jax.Array) -> jax.Array:
            activated = activation(config.activation, first)
            return activated * second[0] if second else activated

        if self.execution.scan_layers:
            # The shape in which the products write them to the stacked arrays of the loop.
            hidden = [y.reshape(-1, y.shape[-1]) for y in hidden]
        output = self.dense(x_BxSxH.shape[-1], ("mlp", "embed"), bias, True, name="output")
        rate = config.dropout_at("feed_forward")
        return output_residual_norm(self, tuple(hidden), x_BxSxH, output, rate, output_key, activate)


class EncoderLayer(Block):
    """One encoder layer. ``layer`` (1 to L) determines the dropout keys. Returns ``(x, None)``, which ``nn.scan``
    expects, or ``(x, x)`` with ``collect``. ``window``, ``skip_norm``, ``heads``, ``relative``: see
    :class:`SelfAttention`; ``units``: see :class:`FeedForward`."""

    collect: bool = False
    window: int = 0
    skip_norm: bool = False
    heads: int = 0
    units: int = 0

    @nn.compact
    def __call__(
        self,
        x_BxSxH: jax.Array,
        layer: jax.Array | int,
        tokens: Mapping[str, jax.Array],
        relative: jax.Array | None,
        dropout_key: DropoutKey | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        attention = SelfAttention(
            self.config, self.execution, self.mesh, self.window, self.skip_norm, self.heads, name="attention"
        )
        if "random_blocks" in tokens:
            tokens = {**tokens, "random_blocks": tokens["random_blocks"][layer - 1]}
        table_key = site_key(dropout_key, layer, Site.RELATIVE_POSITIONS)
        if self.config.relative_positions == "disentangled" and table_key is not None:
            assert relative is not None
            # The embeddings belong to no token: all rows have the same bits.
            relative = dropout(relative, self.config.hidden_dropout, whole_key(table_key))
        x_BxSxH = attention(
            x_BxSxH,
            tokens,
            relative,
            site_key(dropout_key, layer, Site.ATTENTION_PROBABILITIES),
            site_key(dropout_key, layer, Site.ATTENTION_OUTPUT),
        )
        x_BxSxH = FeedForward(self.config, self.execution, self.mesh, self.units, name="feed_forward")(
            x_BxSxH, site_key(dropout_key, layer, Site.FEED_FORWARD_OUTPUT)
        )
        if self.is_mutable_collection(INTERMEDIATES):
            self.sow(INTERMEDIATES, "hidden_states", x_BxSxH)
        x_BxSxH = constrain(x_BxSxH, ACT, self.mesh)
        return x_BxSxH, x_BxSxH if self.collect else None
