"""Embeddings of tokens from their characters (Peters et al. 2018; Kim et al. 2016; github.com/allenai/bilm-tf).

Shapes: V tokens of the vocabulary, N bytes of a token, D width of a character, F filters, E embedding width.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from bert_jax.contrib.ancestors.config import LayersConfig
from bert_jax.model.dense import matmul_f32_grad
from bert_jax.parallel.axes import with_logical_axes
from bert_jax.tokenization import Tokenizer

# Ids of the marks, after the 256 bytes: begin and end of a sentence, begin and end of a token, padding.
SENTENCE_BEGIN, SENTENCE_END, TOKEN_BEGIN, TOKEN_END, PADDING = range(256, 261)
CHARACTERS = 261
# Canonical name of the ids of a model.
CHARACTER_IDS = "embeddings/characters/character_ids"
# Ids are stored less this number, so that they are exact in bfloat16.
STORED_OFFSET = 128


def character_ids(tokens: list[str], length: int, begin: str = "[CLS]", end: str = "[SEP]") -> np.ndarray:
    """Return int32[tokens, length], the bytes (UTF-8) of each token between the marks of its begin and its end,
    then padding. Longer tokens are cut. ``begin`` and ``end`` are the marks of a sentence, one id each."""
    ids = np.full((len(tokens), length), PADDING, np.int32)
    marks = {begin: [SENTENCE_BEGIN], end: [SENTENCE_END]}
    for row, token in zip(ids, tokens, strict=True):
        inner = marks.get(token) or list(token.encode("utf-8"))[: length - 2]
        row[: len(inner) + 2] = [TOKEN_BEGIN, *inner, TOKEN_END]
    return ids


def stored_ids(tokens: list[str], rows: int, length: int, begin: str = "[CLS]", end: str = "[SEP]") -> np.ndarray:
    """Return the parameter ``character_ids`` for a vocabulary of ``rows`` tokens, float32[rows, length]; the rows
    after ``tokens`` are padding."""
    ids = np.full((rows, length), PADDING, np.int32)
    ids[: len(tokens)] = character_ids(tokens, length, begin, end)
    return (ids - STORED_OFFSET).astype(np.float32)


def of_vocabulary(model: LayersConfig, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Return the characters of the vocabulary as canonical parameters, for a run at step 0."""
    pieces = tokenizer.pieces(range(min(tokenizer.vocab_size, model.vocab_size)))
    marks = tokenizer.pieces([tokenizer.cls_id, tokenizer.sep_id])
    return {CHARACTER_IDS: stored_ids(pieces, model.vocab_size, model.max_characters, *marks)}


class CharacterEmbeddings(nn.Module):
    """Convolutions over the characters of every token of the vocabulary, the largest value of each filter, the
    activation, highway layers and a projection. Returns float32[V, E].

    The ids of the characters are the parameter ``character_ids`` [V, N], which has no gradient: the files of a
    model contain them, so that no reader needs the vocabulary to compute the embeddings.
    """

    config: LayersConfig
    rows: int

    @nn.compact
    def __call__(self) -> jax.Array:
        config = self.config
        pairs = list(zip(config.character_filters[::2], config.character_filters[1::2], strict=True))
        padding = nn.initializers.constant(PADDING - STORED_OFFSET)
        stored_VxN = self.param(
            "character_ids", with_logical_axes(padding, ("vocab", None)), (self.rows, config.max_characters)
        )
        ids_VxN = jax.lax.stop_gradient(stored_VxN).astype(jnp.int32) + STORED_OFFSET
        table = self._param("character_embeddings", (CHARACTERS, config.character_size), -1.0, 1.0)
        x_VxNxD = jnp.take(table, ids_VxN, axis=0)
        parts = []
        for i, (width, filters) in enumerate(pairs):
            bound = float(np.sqrt(3 / (width * config.character_size)))
            kernel = self._param(f"filter_{i}_kernel", (width, config.character_size, filters), -bound, bound)
            bias = self._zeros(f"filter_{i}_bias", filters)
            found_VxMxF = jax.lax.conv_general_dilated(
                x_VxNxD, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
            )
            parts.append(jnp.max(found_VxMxF, axis=1) + bias)
        joined_VxF = jnp.concatenate(parts, axis=-1)
        x_VxF = jax.nn.relu(joined_VxF) if config.character_activation == "relu" else jnp.tanh(joined_VxF)
        size = x_VxF.shape[-1]
        bound = float(np.sqrt(3 / size))
        for i in range(config.highway_layers):
            transform, carry = (
                matmul_f32_grad(x_VxF, self._param(f"highway_{i}_{name}_kernel", (size, size), -bound, bound))
                for name in ("transform", "carry")
            )
            new_VxF = jax.nn.relu(transform + self._zeros(f"highway_{i}_transform_bias", size))
            # The bias lets a layer start by carrying most of its input on (Srivastava et al. 2015, section 2.2).
            gate_VxF = jax.nn.sigmoid(carry + self._zeros(f"highway_{i}_carry_bias", size, -2.0))
            x_VxF = gate_VxF * new_VxF + (1 - gate_VxF) * x_VxF
        width = config.embedding_width
        projected_VxE = matmul_f32_grad(x_VxF, self._param("projection_kernel", (size, width), -bound, bound))
        return projected_VxE + self._zeros("projection_bias", width)

    def _param(self, name: str, shape: tuple[int, ...], low: float, high: float) -> jax.Array:
        def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
            return jax.random.uniform(key, shape, dtype, low, high)

        return self.param(name, with_logical_axes(init, (None,) * len(shape)), shape)

    def _zeros(self, name: str, size: int, value: float = 0.0) -> jax.Array:
        return self.param(name, with_logical_axes(nn.initializers.constant(value), (None,)), (size,))
