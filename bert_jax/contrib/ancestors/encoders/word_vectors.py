"""Encoders that read the embeddings of a fixed number of tokens: word vectors and the NNLM of Bengio et al. 2003.

Shapes: B rows, S tokens, E width of the embeddings, H width of the encoder, N tokens of the context.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.contrib.ancestors.config import NnlmConfig
from bert_jax.model.dense import Dense
from bert_jax.model.dropout import DropoutKey, Site, dropout, site_key
from bert_jax.model.layers import CACHE, INTERMEDIATES, Block


class WordVectors(Block):
    """No encoder: the output of a token is its embedding. With ``collect``, the outputs of its 0 layers follow."""

    collect: bool = False

    @nn.compact
    def __call__(
        self, x_BxSxH: jax.Array, tokens: Mapping[str, jax.Array], dropout_key: DropoutKey | None
    ) -> tuple[jax.Array, jax.Array | None]:
        return x_BxSxH, x_BxSxH[None][:0] if self.collect else None


class NnlmLayer(Block):
    """The hidden layer of the neural language model (Bengio et al. 2003, section 2): tanh(d + H x), where x are the
    embeddings of a token and of the ``context_size`` - 1 tokens before it, the nearest first. Tokens before the
    sequence are zeros. The direct connections from x to the output layer, which are optional in the paper, do not
    exist."""

    config: NnlmConfig

    @nn.compact
    def __call__(
        self, x_BxSxE: jax.Array, tokens: Mapping[str, jax.Array], dropout_key: DropoutKey | None
    ) -> jax.Array:
        config = self.config
        ids_BxS, before = tokens["sequence_ids"], config.context_size - 1
        if "cache_start" in tokens:
            x_BxSxE, ids_BxS = self._with_cache(x_BxSxE, ids_BxS, before)
        else:
            x_BxSxE = jnp.pad(x_BxSxE, ((0, 0), (before, 0), (0, 0)))
            ids_BxS = jnp.pad(ids_BxS, ((0, 0), (before, 0)))
        length = x_BxSxE.shape[1] - before
        parts = []
        for distance in range(config.context_size):
            columns = slice(before - distance, before - distance + length)
            same_BxS = (ids_BxS[:, columns] == ids_BxS[:, before:]) & (ids_BxS[:, before:] > 0)
            parts.append(jnp.where(same_BxS[..., None], x_BxSxE[:, columns], 0))
        dense = Dense(config.hidden_size, ("embed", "pooled"), config, x_BxSxE.dtype, name="hidden")
        output_BxSxH = jnp.tanh(dense(jnp.concatenate(parts, axis=-1)))
        if self.is_mutable_collection(INTERMEDIATES):
            self.sow(INTERMEDIATES, "hidden_states", output_BxSxH)
        rate = config.dropout_at("feed_forward")
        return dropout(output_BxSxH, rate, site_key(dropout_key, 1, Site.FEED_FORWARD_OUTPUT))

    def _with_cache(self, x_BxSxE: jax.Array, ids_BxS: jax.Array, before: int) -> tuple[jax.Array, jax.Array]:
        """Return embeddings and sequence ids after the last ``before`` tokens of the cache, and put the
        last ones into the cache."""
        batch, _, width = x_BxSxE.shape
        old_x = self.variable(CACHE, "embeddings", jnp.zeros, (batch, before, width), x_BxSxE.dtype)
        old_ids = self.variable(CACHE, "sequence_ids", jnp.zeros, (batch, before), ids_BxS.dtype)
        x_BxSxE = jnp.concatenate([old_x.value, x_BxSxE], axis=1)
        ids_BxS = jnp.concatenate([old_ids.value, ids_BxS], axis=1)
        if before:
            old_x.value, old_ids.value = x_BxSxE[:, -before:], ids_BxS[:, -before:]
        return x_BxSxE, ids_BxS


class Nnlm(Block):
    """The hidden layer of the neural language model, as an encoder of one layer."""

    config: NnlmConfig
    collect: bool = False

    @nn.compact
    def __call__(
        self, x_BxSxE: jax.Array, tokens: Mapping[str, jax.Array], dropout_key: DropoutKey | None
    ) -> tuple[jax.Array, jax.Array | None]:
        x_BxSxH = NnlmLayer(self.config, self.execution, self.mesh, name="layer_0")(x_BxSxE, tokens, dropout_key)
        return x_BxSxH, x_BxSxH[None] if self.collect else None
