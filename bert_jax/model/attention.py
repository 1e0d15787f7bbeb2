"""One attention interface, several implementations.

Shapes: B rows, S query tokens, T key tokens (= S), A heads, D head size.
"""

import jax
import jax.numpy as jnp

from bert_jax.model.dropout import dropout

# Finite, so a row without any visible key (a blank row) gives a uniform softmax instead of NaN.
MASKED_SCORE = -1e9


def visible_keys(sequence_ids_BxS: jax.Array) -> jax.Array:
    """bool[B, 1, S, T]: may query s look at key t?

    A key is visible iff its id is not 0 and equals the query's; a query with id 0 sees every key whose id is
    1, as in google-research/bert, where padding queries attend like all others (no loss uses their output).
    """
    query_BxS = jnp.maximum(sequence_ids_BxS, 1)
    return (query_BxS[:, :, None] == sequence_ids_BxS[:, None, :])[:, None]


def attention_probabilities(
    query_BxSxAxD: jax.Array, key_BxTxAxD: jax.Array, visible_Bx1xSxT: jax.Array
) -> jax.Array:
    """Softmax of the scaled products: float32[B, A, S, T] (a bf16 softmax loses small probabilities)."""
    head_size = query_BxSxAxD.shape[-1]
    scores_BxAxSxT = jnp.einsum(
        "BSAD,BTAD->BAST", query_BxSxAxD * head_size**-0.5, key_BxTxAxD, preferred_element_type=jnp.float32
    )
    return jax.nn.softmax(jnp.where(visible_Bx1xSxT, scores_BxAxSxT, MASKED_SCORE), axis=-1)


def dot_product_attention(
    query_BxSxAxD: jax.Array,
    key_BxTxAxD: jax.Array,
    value_BxTxAxD: jax.Array,
    visible_Bx1xSxT: jax.Array,
    *,
    dropout_rate: float,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """Scaled dot-product attention with dropout on the probabilities (Vaswani et al. 2017; Devlin et al. 2018).

    Scores and softmax are float32; the products run in the inputs' dtype. Returns [B, S, A, D] in that dtype.
    """
    probabilities_BxAxSxT = attention_probabilities(query_BxSxAxD, key_BxTxAxD, visible_Bx1xSxT)
    probabilities_BxAxSxT = dropout(probabilities_BxAxSxT.astype(value_BxTxAxD.dtype), dropout_rate, dropout_key)
    # In this order XLA's CPU product rounds less over many keys, and is no slower (docs/experiments.md).
    return jnp.einsum("BTAD,BAST->BSAD", value_BxTxAxD, probabilities_BxAxSxT)


IMPLEMENTATIONS = {"xla": dot_product_attention}
