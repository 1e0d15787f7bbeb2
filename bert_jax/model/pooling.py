"""The head that computes one vector per text: pooling, then dense layers and division by the norm.

The modules follow sentence-transformers folders (Sentence-BERT; Reimers and Gurevych 2019).
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.config import ModelConfig, SentenceConfig
from bert_jax.model.dense import Dense

ACTIVATIONS = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "sigmoid": jax.nn.sigmoid,
}


def pool(x_BxSxH: jax.Array, mask_BxS: jax.Array, kind: str) -> jax.Array:
    """Return one vector per row, float32[B, H]: the vector of the first (``kind`` cls) or the last visible token
    (last), or the mean or the maximum of the vectors of the visible tokens."""
    x_BxSxH = x_BxSxH.astype(jnp.float32)
    if kind == "last":
        last_B = mask_BxS.shape[1] - 1 - jnp.argmax(mask_BxS[:, ::-1], axis=1)
        return jnp.take_along_axis(x_BxSxH, last_B[:, None, None], axis=1)[:, 0]
    if kind == "cls":
        return jnp.take_along_axis(x_BxSxH, jnp.argmax(mask_BxS, axis=1)[:, None, None], axis=1)[:, 0]
    if kind == "max":
        # Select the maximum by its index: the gradient of jnp.max flows to the values that equal the maximum, and
        # if the compiler recomputes x_BxSxH with other rounding, no value may equal it.
        x_BxSxH = jnp.where(mask_BxS[..., None], x_BxSxH, -1e9)
        places_Bx1xH = jnp.argmax(jax.lax.stop_gradient(x_BxSxH), axis=1, keepdims=True)
        is_largest_BxSxH = jnp.arange(x_BxSxH.shape[1])[:, None] == places_Bx1xH
        return jnp.sum(jnp.where(is_largest_BxSxH, x_BxSxH, 0), axis=1)
    weights_BxS = mask_BxS.astype(jnp.float32)
    return jnp.einsum("BSH,BS->BH", x_BxSxH, weights_BxS) / jnp.maximum(weights_BxS.sum(1, keepdims=True), 1e-9)


def pooled_tokens(
    x_BxSxH: jax.Array, positions_BxC: jax.Array | None, sequence_ids_BxS: jax.Array, kind: str
) -> jax.Array:
    """Return one vector per sequence of each row, [B, C, H]: the vector of its first token (``kind`` first), or a
    :func:`pool` of its tokens. ``positions`` are the first tokens; None: each row is one sequence."""
    if kind == "first":
        return x_BxSxH[:, :1] if positions_BxC is None else gather_positions(x_BxSxH, positions_BxC)
    sequences = 1 if positions_BxC is None else positions_BxC.shape[1]
    own_BxCxS = sequence_ids_BxS[:, None] == 1 + jnp.arange(sequences)[:, None]
    vectors = [pool(x_BxSxH, own_BxCxS[:, i], kind) for i in range(sequences)]
    return jnp.stack(vectors, axis=1).astype(x_BxSxH.dtype)


def gather_positions(x_BxSxH: jax.Array, positions_BxM: jax.Array) -> jax.Array:
    """Return the vectors of ``x`` [B, S, H] at ``positions`` [B, M], as an array [B, M, H]."""
    return jnp.take_along_axis(x_BxSxH, positions_BxM[:, :, None], axis=1)


def normalize(x: jax.Array) -> jax.Array:
    """Divide each row by its Euclidean norm (at least 1e-12)."""
    # Avoid the square root of 0, where its gradient is infinite: the vector of an empty sequence is 0.
    return x / jnp.sqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))


class SentenceHead(nn.Module):
    """Pooling, followed by the modules of ``sentence``, in float32. The parameters of dense layer i (from 0) are
    named ``dense_i``."""

    config: ModelConfig
    sentence: SentenceConfig

    @nn.compact
    def __call__(self, x_BxSxH: jax.Array, mask_BxS: jax.Array) -> jax.Array:
        """Return one sentence vector of width E per row, float32[B, E]."""
        x = jnp.concatenate([pool(x_BxSxH, mask_BxS, kind) for kind in self.sentence.pooling], axis=-1)
        dense = 0
        for module in self.sentence.modules:
            if module.kind == "normalize":
                x = normalize(x)
                continue
            layer = Dense(
                module.features, ("embed", "pooled"), self.config, jnp.dtype("float32"), module.bias,
                name=f"dense_{dense}",
            )  # fmt: skip
            x = ACTIVATIONS[module.activation](layer(x))
            dense += 1
        return x
