"""Building blocks of the encoder: dense, LayerNorm, embeddings, attention, feed-forward, one encoder layer.

Shapes: B rows, S tokens, H width, A heads, D head size, F feed-forward width, V vocabulary (padded).
Parameters are float32 and carry their logical axes; ``dtype`` is the dtype of the computation.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from bert_jax.config import ExecutionConfig, ModelConfig
from bert_jax.model import norm_kernel
from bert_jax.model.attention import (
    attention_probabilities,
    dot_product_attention,
    kernel_attention,
    use_kernel_attention,
    visible_keys,
)
from bert_jax.model.dropout import DropoutKey, Site, dropout, site_key
from bert_jax.model.kernels import on_tpu, shard_mapped, token_key, use_kernel
from bert_jax.model.matmul import add_bias, matmul_f32_grad
from bert_jax.parallel.axes import Axes, constrain, with_logical_axes

ACT = ("act_batch", "act_length", "act_embed")
# Linen collection of hidden states and attention probabilities; filled if it is mutable.
INTERMEDIATES = "intermediates"


def compute_dtype(execution: ExecutionConfig) -> jnp.dtype:
    """Return the dtype of matrix products and activations."""
    return jnp.dtype(execution.dtype)


def weight_init(config: ModelConfig) -> jax.nn.initializers.Initializer:
    """Return a truncated normal initializer, truncated at two standard deviations and not rescaled
    (google-research/bert ``create_initializer``)."""
    return jax.nn.initializers.truncated_normal(config.initializer_range)


def activation(config: ModelConfig, x: jax.Array) -> jax.Array:
    """Apply the activation ``config.activation`` of the feed-forward layers and the MLM head to ``x``."""
    match config.activation:
        case "gelu":
            # With erf instead of the erfc of jax.nn.gelu: the same function, cheaper on CPU.
            return x * (0.5 * jax.lax.erf(x * np.asarray(math.sqrt(0.5), x.dtype)) + 0.5)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "gelu_sigmoid":
            return x * jax.nn.sigmoid(1.702 * x)
        case "relu":
            return jax.nn.relu(x)
    raise AssertionError(config.activation)


class Dense(nn.Module):
    """Dense layer: ``x @ kernel + bias`` over the last axis of ``x``. The kernel has the shape [in, out]."""

    features: int
    axes: Axes
    config: ModelConfig
    dtype: jnp.dtype
    use_bias: bool = True

    @nn.compact
    def parameters(self, inputs: int) -> tuple[jax.Array, jax.Array]:
        """Return the kernel [in, out] and the bias [out] in float32, for a caller that fuses several products."""
        kernel = self.param(
            "kernel", with_logical_axes(weight_init(self.config), self.axes), (inputs, self.features)
        )
        if not self.use_bias:
            return kernel, jnp.zeros((self.features,))
        bias = self.param("bias", with_logical_axes(nn.initializers.zeros_init(), self.axes[-1:]), (self.features,))
        return kernel, bias

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, bias = self.parameters(x.shape[-1])
        return add_bias(matmul_f32_grad(x, kernel), bias)


class LayerNorm(nn.Module):
    """LayerNorm over the last axis with float32 statistics (bf16 loses the variance of wide rows)."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def parameters(self, width: int) -> tuple[jax.Array, jax.Array]:
        """Return the scale and the bias, each [width], in float32, for a caller that fuses LayerNorm with another
        operation."""
        scale = self.param("scale", with_logical_axes(nn.initializers.ones_init(), ("norm",)), (width,))
        return scale, self.param("bias", with_logical_axes(nn.initializers.zeros_init(), ("norm",)), (width,))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale, bias = self.parameters(x.shape[-1])
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32, axis=-1, keepdims=True)
        centered = x32 - mean
        variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
        normal = centered * jax.lax.rsqrt(variance + self.config.norm_epsilon)
        return (normal * scale + bias).astype(self.dtype)


class Block(nn.Module):
    """Base class of the encoder modules. Its fields are the sizes, the execution options and the mesh."""

    config: ModelConfig
    execution: ExecutionConfig
    mesh: Mesh | None = None


class Embedding(nn.Module):
    """An embedding table, float32[rows, H]. Calling the module returns the table."""

    rows: int
    axes: Axes
    config: ModelConfig

    @nn.compact
    def __call__(self) -> jax.Array:
        shape = (self.rows, self.config.hidden_size)
        return self.param("embedding", with_logical_axes(weight_init(self.config), self.axes), shape)


def sinusoidal_positions(length: int, width: int) -> np.ndarray:
    """Return float32[length, width]: sines in the first half, cosines in the second (Vaswani et al. 2017, section
    3.5, in the layout of tensor2tensor)."""
    rates = 10_000.0 ** (-np.arange(width // 2) / max(width // 2 - 1, 1))
    angles = np.arange(length)[:, None] * rates[None]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def rotary_tables(length: int, head_size: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and the sines, each float32[length, head_size / 2], of the angle by which each pair of
    dimensions of a head is rotated at each position (Su et al. 2021, section 3.2.2)."""
    rates = base ** (-np.arange(head_size // 2) / (head_size // 2))
    angles = np.arange(length)[:, None] * rates[None]  # float64: in float32 a large angle is off by 1e-5
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x_BxSxAxD: jax.Array, cos_BxSx1xE: jax.Array, sin_BxSx1xE: jax.Array) -> jax.Array:
    """Apply rotary position embeddings to the queries or keys ``x`` in float32: in each head of size D, the
    dimensions i and i + D / 2 are rotated by angle i of the position.

    Su et al. 2021 rotate dimensions 2i and 2i + 1 instead, which requires strided access. The two functions differ
    only in the order of the dimensions of a head.
    """
    first, second = jnp.split(x_BxSxAxD.astype(jnp.float32), 2, axis=-1)
    parts = [first * cos_BxSx1xE - second * sin_BxSx1xE, second * cos_BxSx1xE + first * sin_BxSx1xE]
    return jnp.concatenate(parts, axis=-1).astype(x_BxSxAxD.dtype)


class Embeddings(nn.Module):
    """Sum of token, segment and position embeddings, then LayerNorm and dropout (Devlin et al. 2018, section 3.2).
    Returns the embeddings [B, S, H] and the table of the word embeddings [V, H]."""

    config: ModelConfig
    execution: ExecutionConfig
    padded_vocab_size: int
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self,
        input_ids_BxS: jax.Array,
        token_type_ids_BxS: jax.Array,
        position_ids_BxS: jax.Array,
        dropout_key: DropoutKey | None,
    ) -> tuple[jax.Array, jax.Array]:
        config, dtype = self.config, compute_dtype(self.execution)
        words_VxH = Embedding(self.padded_vocab_size, ("vocab", "embed"), config, name="word_embeddings")()
        types_TxH = Embedding(config.type_vocab_size, ("segment", "embed"), config, name="token_type_embeddings")()
        # Lookups need whole rows, and whole tables if a second mesh axis partitions the tokens: otherwise the
        # compiler aborts (design/sharding.md).
        is_cut_twice = self.mesh is not None and min(self.mesh.shape["fsdp"], self.mesh.shape["tensor"]) > 1
        rows_VxH = constrain(words_VxH, (None if is_cut_twice else "vocab", None), self.mesh)
        x_BxSxH = jnp.take(rows_VxH, input_ids_BxS, axis=0)
        # A product with a one-hot row, whose gradient is a matrix product instead of a scatter into few rows.
        x_BxSxH += jax.nn.one_hot(token_type_ids_BxS, config.type_vocab_size, dtype=jnp.float32) @ types_TxH
        if config.position_embeddings == "learned":
            rows = config.max_position_embeddings
            table = Embedding(rows, ("position", "embed"), config, name="position_embeddings")()
            table = constrain(table, ("position", None), self.mesh)
            x_BxSxH += jnp.take(table, position_ids_BxS + config.position_offset, axis=0)
        elif config.position_embeddings == "sinusoidal":
            length = max(config.max_position_embeddings, input_ids_BxS.shape[1])
            x_BxSxH += jnp.take(sinusoidal_positions(length, config.hidden_size), position_ids_BxS, axis=0)
        if config.norm_position == "post":
            x_BxSxH = LayerNorm(config, dtype, name="layer_norm")(x_BxSxH)
        x_BxSxH = dropout(x_BxSxH.astype(dtype), config.hidden_dropout, site_key(dropout_key, 0, Site.EMBEDDINGS))
        return constrain(x_BxSxH, ACT, self.mesh), words_VxH


def output_residual_norm(
    block: Block,
    inner: jax.Array,
    x_BxSxH: jax.Array,
    axes: Axes,
    dropout_key: DropoutKey | None,
    activate: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """Apply the last operations of an attention or feed-forward block to ``inner`` [B, S, ...]: ``activate``, the
    output projection, dropout, the addition of the residual ``x`` and, if ``norm_position`` is post, LayerNorm.
    ``axes`` are the logical axes of the projection weights."""
    config, dtype, mesh = block.config, compute_dtype(block.execution), block.mesh
    length, width = x_BxSxH.shape[1:]
    kernel, bias = Dense(width, axes, config, dtype, name="output").parameters(inner.shape[-1])

    def project(inner: jax.Array, kernel: jax.Array) -> jax.Array:
        return matmul_f32_grad(activate(inner), kernel)

    if block.execution.scan_layers:
        # A loop copies the values for its backward pass into stacked arrays; recomputing the activation is cheaper.
        project = jax.checkpoint(project, prevent_cse=False)
    product_BxSxH = project(inner, kernel)
    reason = norm_kernel.unsupported(config, length)
    if block.is_initializing() or not use_kernel(block.execution.residual_norm, "residual_norm", mesh, reason):
        sum_BxSxH = x_BxSxH + dropout(add_bias(product_BxSxH, bias), config.hidden_dropout, dropout_key)
        return (
            sum_BxSxH if config.norm_position == "pre" else LayerNorm(config, dtype, name="layer_norm")(sum_BxSxH)
        )
    vectors = (bias, *LayerNorm(config, dtype, name="layer_norm").parameters(width))
    rate = 0.0 if dropout_key is None else config.hidden_dropout

    tokens = []  # the words of the dropout bits of each token
    if dropout_key is not None and rate:
        tokens.append(jnp.stack(token_key(dropout_key, *x_BxSxH.shape[:2]).words(), axis=-1))

    def add_norm(_: Any, dense: jax.Array, residual: jax.Array, *others: jax.Array) -> Any:
        flat = [y.reshape(-1, y.shape[-1]) for y in (dense, residual, *others[3:])]
        out = norm_kernel.add_norm(
            flat[0], flat[1], others[:3], tuple(flat[2:]), config.norm_epsilon, rate, not on_tpu(mesh)
        )
        return out.reshape(dense.shape)

    run = shard_mapped(
        add_norm, mesh, (ACT, ACT, (None,), (None,), (None,), *[(*ACT[:2], None)] * len(tokens)), ACT
    )
    with jax.named_scope("add_norm"):
        return run(constrain(product_BxSxH, ACT, mesh), x_BxSxH, *vectors, *tokens)


class SelfAttention(Block):
    """Multi-head self-attention with output projection, dropout, residual connection and LayerNorm."""

    @nn.compact
    def __call__(
        self,
        x_BxSxH: jax.Array,
        sequence_ids_BxS: jax.Array,
        position_ids_BxS: jax.Array,
        probabilities_key: DropoutKey | None,
        output_key: DropoutKey | None,
    ) -> jax.Array:
        config, dtype = self.config, compute_dtype(self.execution)
        batch, length, width = x_BxSxH.shape
        heads_shape = (batch, length, config.num_attention_heads, config.head_size)
        axes = ("act_batch", "act_length", "act_heads", None)
        inner_BxSxH = x_BxSxH
        if config.norm_position == "pre":
            inner_BxSxH = LayerNorm(config, dtype, name="layer_norm")(x_BxSxH)
        products, biases = self._project(inner_BxSxH, dtype)
        rate, mesh, head_size = config.attention_dropout, self.mesh, config.head_size
        causal = config.attention == "causal"
        look_inside = self.is_mutable_collection(INTERMEDIATES)
        attend: Callable[..., jax.Array]
        # Parameters are initialized with short rows, which kernels may not support.
        plain = look_inside or self.is_initializing()
        if not plain and use_kernel_attention(self.execution.attention, mesh, config, length):
            products = [constrain(y, ("act_batch", "act_length", "act_heads"), mesh) for y in products]
            attend = functools.partial(kernel_attention, head_size=head_size, dropout_rate=rate, mesh=mesh)
            operands = [*products, jnp.stack(biases), sequence_ids_BxS]
        else:
            heads = [add_bias(y, bias).reshape(heads_shape) for y, bias in zip(products, biases, strict=True)]
            if config.position_embeddings == "rotary":
                tables = rotary_tables(config.max_position_embeddings, head_size, config.rotary_base)
                turns = [jnp.take(table, position_ids_BxS, axis=0, mode="clip")[:, :, None] for table in tables]
                heads[:2] = [rotate(y, *turns) for y in heads[:2]]
            attend = functools.partial(dot_product_attention, dropout_rate=rate, causal=causal)
            operands = [*(constrain(y, axes, mesh) for y in heads), sequence_ids_BxS]
        if self.execution.remat == "attention":
            attend = jax.checkpoint(attend)
        if look_inside:
            query, key, *_ = operands
            probabilities = attention_probabilities(query, key, visible_keys(sequence_ids_BxS, causal))
            self.sow(INTERMEDIATES, "attentions", probabilities)
        with jax.named_scope("dot_product_attention"):
            context = attend(*operands, dropout_key=probabilities_key)
        context_BxSxH = constrain(context.reshape(heads_shape), axes, mesh).reshape(batch, length, width)
        return output_residual_norm(self, context_BxSxH, x_BxSxH, ("heads", "embed"), output_key)

    def _project(self, x_BxSxH: jax.Array, dtype: jnp.dtype) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the queries, keys and values without their biases, each [B, S, H], and the three biases, each
        [H]."""
        width = self.config.hidden_size
        pairs = [
            Dense(width, ("embed", "heads"), self.config, dtype, name=name).parameters(width)
            for name in ("query", "key", "value")
        ]
        biases = [bias for _, bias in pairs]
        if not self.execution.fused_qkv:
            return [matmul_f32_grad(x_BxSxH, kernel) for kernel, _ in pairs], biases
        # Stacked on a new axis, which no mesh axis partitions, so that heads stay on their devices.
        fused_BxSx3xH = matmul_f32_grad(x_BxSxH, jnp.stack([kernel for kernel, _ in pairs], axis=1))
        return [fused_BxSx3xH[:, :, i] for i in range(3)], biases


class FeedForward(Block):
    """Feed-forward block of an encoder layer: two dense layers with the activation between them, dropout, residual
    connection and LayerNorm."""

    @nn.compact
    def __call__(self, x_BxSxH: jax.Array, output_key: DropoutKey | None) -> jax.Array:
        config, dtype = self.config, compute_dtype(self.execution)
        inner_BxSxH = x_BxSxH
        if config.norm_position == "pre":
            inner_BxSxH = LayerNorm(config, dtype, name="layer_norm")(x_BxSxH)
        hidden_BxSxF = Dense(config.intermediate_size, ("embed", "mlp"), config, dtype, name="intermediate")(
            inner_BxSxH
        )
        hidden_BxSxF = constrain(hidden_BxSxF, ("act_batch", "act_length", "act_mlp"), self.mesh)
        activate = functools.partial(activation, config)
        return output_residual_norm(self, hidden_BxSxF, x_BxSxH, ("mlp", "embed"), output_key, activate)


class EncoderLayer(Block):
    """One encoder layer. ``layer`` (1 to L) determines the dropout keys. Returns ``(x, None)``, which ``nn.scan``
    expects, or ``(x, x)`` with ``collect``."""

    collect: bool = False

    @nn.compact
    def __call__(
        self,
        x_BxSxH: jax.Array,
        layer: jax.Array | int,
        sequence_ids_BxS: jax.Array,
        position_ids_BxS: jax.Array,
        dropout_key: DropoutKey | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        x_BxSxH = SelfAttention(self.config, self.execution, self.mesh, name="attention")(
            x_BxSxH,
            sequence_ids_BxS,
            position_ids_BxS,
            site_key(dropout_key, layer, Site.ATTENTION_PROBABILITIES),
            site_key(dropout_key, layer, Site.ATTENTION_OUTPUT),
        )
        x_BxSxH = FeedForward(self.config, self.execution, self.mesh, name="feed_forward")(
            x_BxSxH, site_key(dropout_key, layer, Site.FEED_FORWARD_OUTPUT)
        )
        if self.is_mutable_collection(INTERMEDIATES):
            self.sow(INTERMEDIATES, "hidden_states", x_BxSxH)
        x_BxSxH = constrain(x_BxSxH, ACT, self.mesh)
        return x_BxSxH, x_BxSxH if self.collect else None
