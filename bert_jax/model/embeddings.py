"""Embeddings of tokens, segments and positions.

Shapes: B rows, S tokens, E embedding width, H encoder width, V vocabulary (padded).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from bert_jax import registry
from bert_jax.config import ExecutionConfig, ModelConfig
from bert_jax.model.canonical import Params
from bert_jax.model.dense import Dense, rounded_weight, weight_init
from bert_jax.model.dropout import DropoutKey, Site, dropout, locked_dropout, site_key, whole_key
from bert_jax.model.layers import ACT, Norm, compute_dtype
from bert_jax.model.positions import sinusoidal_positions
from bert_jax.parallel.axes import Axes, constrain, with_logical_axes
from bert_jax.tokenization import Tokenizer

# Largest table whose rows are chosen by comparisons, which fuse with other operations; larger ones by a product.
_CHOSEN_ROWS = 4


class Embedding(nn.Module):
    """An embedding table, float32[rows, width]. Calling the module returns the table."""

    rows: int
    width: int
    axes: Axes
    config: ModelConfig

    @nn.compact
    def __call__(self) -> jax.Array:
        shape = (self.rows, self.width)
        return self.param("embedding", with_logical_axes(weight_init(self.config), self.axes), shape)


def few_rows(ids_BxS: jax.Array, table_TxE: jax.Array) -> jax.Array:
    """Return the rows ``ids`` of a table of few rows, float32[B, S, E]. Its gradient does not use a scatter, in
    which many tokens would wait for each other."""
    if len(table_TxE) > _CHOSEN_ROWS:
        return jax.nn.one_hot(ids_BxS, len(table_TxE), dtype=jnp.float32) @ table_TxE
    rows_BxSxE = jnp.zeros((), table_TxE.dtype)
    for i, row_E in enumerate(table_TxE):
        rows_BxSxE = jnp.where((ids_BxS == i)[..., None], row_E, rows_BxSxE)
    return rows_BxSxE


def vocabulary_params(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Return the canonical parameters that the vocabulary determines: the characters of its tokens, if the model
    reads them."""
    if not config.spells_words:
        return {}
    characters = registry.load("extensions", "model.character_filters")
    found: dict[str, np.ndarray] = characters.of_vocabulary(config, tokenizer)
    return found


def word_table(params: Params) -> np.ndarray | None:
    """Return the word embeddings float32[V, E] of ``params``, the parameter tree of a model; None if it has no such
    table."""
    own = params.get("embeddings", {})
    if "word_embeddings" not in own:
        return None
    table = np.asarray(own["word_embeddings"]["embedding"], np.float32)
    return table @ np.asarray(own["word_factor"]["embedding"]) if "word_factor" in own else table


class Embeddings(nn.Module):
    """Sum of token, segment and position embeddings, then LayerNorm, dropout (Devlin et al. 2018, section 3.2) and,
    if the embeddings are narrower than the Transformer, a dense layer (Lan et al. 2020, section 3.1). With
    ``word_rank`` R, the table of the word embeddings is the product of [V, R] and [R, E]. Returns the
    embeddings [B, S, H] (of other encoders: [B, S, E]) and the table of the word embeddings [V, E]."""

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
        width = config.embedding_width

        in_8_bits = self.execution.quantization == "int8"

        def table(rows: int, axis: str, name: str, width: int = width) -> jax.Array:
            return Embedding(rows, width, (axis, "embed"), config, name=f"{name}_embeddings")()

        def chosen(rows: jax.Array) -> jax.Array:
            """Return rows [B, S, ...] of a table, rounded as in an int8 export: 255 values for each row."""
            return rounded_weight(rows.reshape(-1, rows.shape[-1]).T).T.reshape(rows.shape) if in_8_bits else rows

        if config.spells_words:
            characters = registry.load("extensions", "model.character_filters")
            words_VxE = characters.CharacterEmbeddings(config, self.padded_vocab_size, name="characters")()
        else:
            words_VxE = table(self.padded_vocab_size, "vocab", "word", config.word_rank or width)
        # Lookups need whole rows, and whole tables if a second mesh axis partitions the tokens: otherwise the
        # compiler aborts (design/sharding.md).
        is_cut_twice = self.mesh is not None and min(self.mesh.shape["fsdp"], self.mesh.shape["tensor"]) > 1
        rows_VxE = constrain(words_VxE, (None if is_cut_twice else "vocab", None), self.mesh)
        x_BxSxE = chosen(jnp.take(rows_VxE, input_ids_BxS, axis=0))
        if config.word_rank:
            factor_RxE = Embedding(config.word_rank, width, (None, "embed"), config, name="word_factor")()
            x_BxSxE, words_VxE = x_BxSxE @ factor_RxE, words_VxE @ factor_RxE
        words_key = site_key(dropout_key, 0, Site.WORDS)
        if (rate := config.whole_word_dropout) and words_key is not None:
            kept_Vx1 = dropout(jnp.ones((len(words_VxE), 1)), rate, whole_key(words_key))
            x_BxSxE *= jnp.take(kept_Vx1, input_ids_BxS, axis=0)
        if config.embedding_scale:
            x_BxSxE *= width**0.5
        if types := config.type_vocab_size:
            x_BxSxE += chosen(few_rows(token_type_ids_BxS, table(types, "segment", "token_type")))
        if config.position_embeddings == "learned":
            rows = constrain(
                table(config.max_position_embeddings, "position", "position"), ("position", None), self.mesh
            )
            x_BxSxE += chosen(jnp.take(rows, position_ids_BxS + config.position_offset, axis=0))
        elif config.position_embeddings == "sinusoidal":
            length = max(config.max_position_embeddings, input_ids_BxS.shape[1])
            x_BxSxE += jnp.take(sinusoidal_positions(length, width), position_ids_BxS, axis=0)
        if config.has_embedding_norm:
            x_BxSxE = Norm(config, dtype, name="layer_norm")(x_BxSxE)
        rate, key = config.dropout_at("embedding"), site_key(dropout_key, 0, Site.EMBEDDINGS)
        x_BxSxH = (locked_dropout if config.LOCKS_DROPOUT else dropout)(x_BxSxE.astype(dtype), rate, key)
        if config.embedding_size and config.has_attention:
            projection = Dense(
                config.hidden_size, ("embed", "pooled"), config, dtype, in_8_bits=in_8_bits, name="projection"
            )
            x_BxSxH = projection(x_BxSxH)
        return constrain(x_BxSxH, ACT, self.mesh), words_VxE
