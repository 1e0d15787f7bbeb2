"""Dense layers, and matrix products that compute the gradients of weights in float32.

By default the gradient of a weight that is used in bfloat16 is rounded to bfloat16 before it is summed over
microbatches and devices. Here gradients have the dtype of the weight: float32 parameters have float32 gradients.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from bert_jax.config import ModelConfig
from bert_jax.parallel.axes import Axes, with_logical_axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def matmul_f32_grad(x: jax.Array, kernel: jax.Array, axis: int = 0, dtype: jnp.dtype | None = None) -> jax.Array:
    """Return the product of ``x`` and ``kernel``, [*rows, *out], summed over the last axis of ``x`` and the axis
    ``axis`` of ``kernel``.

    The kernel is converted to the dtype of ``x``. The result has ``dtype``, by default the dtype of ``x``.
    """
    # Flatten the rows to one dimension, because with more dimensions the CPU compiler writes a transposed copy of
    # every incoming gradient.
    rows = x.reshape(-1, x.shape[-1])
    dimensions = (((1,), (axis,)), ((), ()))
    result = jax.lax.dot_general(rows, kernel.astype(x.dtype), dimensions, preferred_element_type=dtype or x.dtype)
    return result.reshape(*x.shape[:-1], *result.shape[1:])


def _forward(
    x: jax.Array, kernel: jax.Array, axis: int, dtype: jnp.dtype | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul_f32_grad(x, kernel, axis, dtype), (x, kernel)


def _backward(
    axis: int, dtype: jnp.dtype | None, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    rows = x.reshape(-1, x.shape[-1])
    out = [dim for dim in range(kernel.ndim) if dim != axis]
    # Float32 logits of bfloat16 states have a float32 gradient, whose products would be float32 products on a GPU.
    incoming = gradient.astype(x.dtype).reshape(len(rows), *(kernel.shape[dim] for dim in out))
    places = tuple(range(1, incoming.ndim))
    x_gradient = jax.lax.dot_general(
        incoming, kernel.astype(x.dtype), ((places, tuple(out)), ((), ())), preferred_element_type=x.dtype
    )
    kernel_gradient = jax.lax.dot_general(
        incoming, rows, (((0,), (0,)), ((), ())), preferred_element_type=kernel.dtype
    )
    return x_gradient.astype(x.dtype).reshape(x.shape), jnp.moveaxis(kernel_gradient, -1, axis)


matmul_f32_grad.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def add_bias_of_logits(logits: jax.Array, bias: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return ``logits + bias``, float32[..., classes].

    In the backward pass the gradient is rounded to ``dtype``, the dtype of the states from which the logits are
    computed, and kept: the sum for the bias and the products for states and weights read the rounded copy, instead
    of computing it from the float32 logits three times.
    """
    return logits + bias


def _logits_forward(logits: jax.Array, bias: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, None]:
    return logits + bias, None


def _logits_backward(dtype: jnp.dtype, saved: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    rounded = gradient
    if gradient.dtype != dtype:
        rounded = jax.lax.optimization_barrier(gradient.astype(dtype)).astype(gradient.dtype)
    return rounded, jnp.sum(rounded, axis=tuple(range(rounded.ndim - 1)))


add_bias_of_logits.defvjp(_logits_forward, _logits_backward)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Return ``x + bias`` in the dtype of ``x``; the gradient of the bias is summed in the dtype of the bias."""
    return (x.astype(bias.dtype) + bias).astype(x.dtype)


def rounded_weight(kernel: jax.Array) -> jax.Array:
    """Return the kernel [in, out], rounded as in an int8 export: 255 values for each output. The gradient is that
    of the kernel itself (straight-through estimator; Bengio et al. 2013)."""
    scale = jnp.maximum(jnp.abs(kernel).max(axis=0, keepdims=True) / 127, jnp.finfo(jnp.float32).tiny)
    return kernel + jax.lax.stop_gradient(jnp.round(kernel / scale) * scale - kernel)


def rounded_inputs(x: jax.Array) -> jax.Array:
    """Return the input of a product, each token of which is rounded to 255 values up to its greatest absolute
    value, as exports without calibration round it. The gradient is that of ``x`` itself."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = jnp.maximum(largest / 127, jnp.finfo(jnp.float32).tiny)
    rounded = jnp.round(wide / scale) * scale
    return x + jax.lax.stop_gradient(rounded - wide).astype(x.dtype)


def weight_init(config: ModelConfig, ends_block: bool = False) -> jax.nn.initializers.Initializer:
    """Return a truncated normal initializer, truncated at two standard deviations and not rescaled
    (google-research/bert ``create_initializer``).

    ``ends_block``: for the output projection of a block, whose standard deviation is smaller with
    ``initialization`` megatron (Shoeybi et al. 2019, section 4.1).
    """
    is_smaller = ends_block and config.initialization == "megatron"
    scale = math.sqrt(2 * config.num_layers) if is_smaller else 1.0
    return jax.nn.initializers.truncated_normal(config.initializer_range / scale)


def activation(kind: str, x: jax.Array) -> jax.Array:
    """Apply the activation function ``kind``, a name that ``ModelConfig`` allows, to ``x``."""
    match kind:
        case "gelu":
            # With erf instead of the erfc of jax.nn.gelu: the same function, cheaper on CPU.
            return x * (0.5 * jax.lax.erf(x * np.asarray(math.sqrt(0.5), x.dtype)) + 0.5)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "gelu_sigmoid":
            return x * jax.nn.sigmoid(1.702 * x)
        case "relu":
            return jax.nn.relu(x)
        case "silu":
            return jax.nn.silu(x)
        case "tanh":
            return jnp.tanh(x)
    raise AssertionError(kind)


class Dense(nn.Module):
    """Dense layer: ``x @ kernel + bias`` over the last axis of ``x``. The kernel has the shape [in, out]."""

    features: int
    axes: Axes
    config: ModelConfig
    dtype: jnp.dtype
    use_bias: bool = True
    # True for the last layer of an attention or feed-forward block.
    ends_block: bool = False
    # Round the kernel and the inputs to 8 bits.
    in_8_bits: bool = False

    @nn.compact
    def parameters(self, inputs: int) -> tuple[jax.Array, jax.Array]:
        """Return the kernel [in, out] and the bias [out] in float32, for a caller that fuses several products of
        :meth:`inputs`."""
        init = weight_init(self.config, self.ends_block)
        kernel = self.param("kernel", with_logical_axes(init, self.axes), (inputs, self.features))
        kernel = rounded_weight(kernel) if self.in_8_bits else kernel
        if not self.use_bias:
            return kernel, jnp.zeros((self.features,))
        bias = self.param("bias", with_logical_axes(nn.initializers.zeros_init(), self.axes[-1:]), (self.features,))
        return kernel, bias

    def inputs(self, x: jax.Array) -> jax.Array:
        """Return ``x`` as the product reads it."""
        return rounded_inputs(x) if self.in_8_bits else x

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, bias = self.parameters(x.shape[-1])
        # In the shape of the product, [tokens, out], because of the stacked arrays of loops over layers.
        flat = matmul_f32_grad(self.inputs(x), kernel).reshape(-1, self.features)
        return add_bias(flat, bias).reshape(*x.shape[:-1], self.features)
