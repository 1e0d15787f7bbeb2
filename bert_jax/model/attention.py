"""One attention interface, several implementations.

Shapes: B rows, S query tokens, T key tokens (= S), A heads, D head size, H = A * D.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bert_jax.model import attention_kernel
from bert_jax.model.dropout import DropoutKey, dropout
from bert_jax.model.kernels import on_each_device, on_tpu, seed_words, use_kernel
from bert_jax.parallel.axes import Axes

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
    sequence_ids_BxS: jax.Array,
    *,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
) -> jax.Array:
    """Scaled dot-product attention with dropout on the probabilities (Vaswani et al. 2017; Devlin et al. 2018).

    Scores and softmax are float32; the products run in the inputs' dtype. Returns [B, S, A, D] in that dtype.
    """
    probabilities_BxAxSxT = attention_probabilities(query_BxSxAxD, key_BxTxAxD, visible_keys(sequence_ids_BxS))
    probabilities_BxAxSxT = dropout(probabilities_BxAxSxT.astype(value_BxTxAxD.dtype), dropout_rate, dropout_key)
    # In this order XLA's CPU product rounds less over many keys, and is no slower (docs/experiments.md).
    return jnp.einsum("BTAD,BAST->BSAD", value_BxTxAxD, probabilities_BxAxSxT)


def kernel_attention(
    query_BxSxAxD: jax.Array,
    key_BxTxAxD: jax.Array,
    value_BxTxAxD: jax.Array,
    sequence_ids_BxS: jax.Array,
    *,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
    mesh: Mesh | None,
) -> jax.Array:
    """The same by ``bert_jax.model.attention_kernel``, whose dropout draws other bits; interpreted off a TPU."""
    batch, length, heads, head_size = query_BxSxAxD.shape
    rate = 0.0 if dropout_key is None else dropout_rate

    def attend(part: Callable[[str], jax.Array], *operands: jax.Array) -> jax.Array:
        query, key, value, ids, words = operands
        rows, width = query.shape[0], query.shape[2]
        first_row, first_head = words[2] + part("act_batch") * rows, part("act_heads") * (width // head_size)
        seeds = jnp.stack([words[0], words[1], first_row, jnp.int32(first_head)])
        return attention_kernel.attend(query, key, value, ids, seeds, head_size, rate, not on_tpu(mesh))

    cut: Axes = ("act_batch", "act_length", "act_heads")
    context_BxSxH = on_each_device(attend, mesh, (cut, cut, cut, cut[:2], (None,)), cut)(
        *(x.reshape(batch, length, heads * head_size) for x in (query_BxSxAxD, key_BxTxAxD, value_BxTxAxD)),
        sequence_ids_BxS,
        seed_words(dropout_key),
    )
    return context_BxSxH.reshape(batch, length, heads, head_size)


def choose(name: str, mesh: Mesh | None, length: int, width: int, head_size: int) -> Callable[..., jax.Array]:
    """The implementation that ``execution.attention`` names; ``auto`` takes the kernel on TPU meshes, for shapes
    that it can do. Raises ``ValueError`` where ``pallas`` cannot do them."""
    cut = mesh.shape["tensor"] if mesh is not None else 1
    reason = attention_kernel.unsupported(length, width // cut, head_size)
    if use_kernel(name, "attention", mesh, reason):
        return functools.partial(kernel_attention, mesh=mesh)
    return dot_product_attention
