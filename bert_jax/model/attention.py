"""Scaled dot-product attention: the implementation with XLA operations, and the interface to the TPU kernel.

Shapes: B rows, S query tokens, T key tokens (= S), A heads, D head size, H = A * D.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bert_jax.config import ModelConfig
from bert_jax.model.dropout import DropoutKey, dropout_of_probabilities
from bert_jax.model.kernels import attention_kernel
from bert_jax.model.kernels.common import on_tpu, shard_mapped, token_key, use_kernel
from bert_jax.model.positions import RelativeScores
from bert_jax.parallel.axes import Axes

# Finite, so a row without any visible key (a blank row) gives a uniform softmax instead of NaN.
MASKED_SCORE = -1e9


def visible_keys(
    sequence_ids_BxS: jax.Array, causal: bool = False, window: int = 0, is_global_BxS: jax.Array | None = None
) -> jax.Array:
    """Return a bool mask [batch, 1, queries, keys] that is True where a query sees a key.

    A query sees the keys with the same sequence id. A padding query, which has the id 0, sees the keys with the id
    1 instead, as in google-research/bert, where padding queries attend like all others (no loss uses their output).
    No query sees a padding key. With ``causal``, no query sees a later key (Radford et al. 2018). With ``window``,
    no query sees a key that is more than ``window`` tokens away (Beltagy et al. 2020, section 3.1); 0: no limit.
    All queries see the keys where ``is_global`` is True.
    """
    query_BxS = jnp.maximum(sequence_ids_BxS, 1)
    visible_BxSxT = query_BxS[:, :, None] == sequence_ids_BxS[:, None, :]
    place_S = jnp.arange(sequence_ids_BxS.shape[1])
    if causal:
        visible_BxSxT &= place_S[:, None] >= place_S
    if window:
        near = jnp.abs(place_S[:, None] - place_S) <= window
        visible_BxSxT &= near if is_global_BxS is None else near | is_global_BxS[:, None]
    return visible_BxSxT[:, None]


def cached_keys(
    sequence_ids_BxS: jax.Array, cache_ids_BxC: jax.Array, start: jax.Array, window: int = 0
) -> jax.Array:
    """Return a bool mask [batch, 1, queries, columns] that is True where a query sees a column of the cache.

    Query i is the token of column ``start`` + i. It sees no later column and none whose ``cache_ids`` is 0. With
    ``window``, it sees no column that is more than ``window`` columns before its own; 0: no limit.
    """
    back_SxC = start + jnp.arange(sequence_ids_BxS.shape[1])[:, None] - jnp.arange(cache_ids_BxC.shape[1])
    near_SxC = (back_SxC >= 0) & (back_SxC <= window) if window else back_SxC >= 0
    return ((cache_ids_BxC > 0)[:, None] & near_SxC)[:, None]


def attention_probabilities(
    query_BxSxAxD: jax.Array,
    key_BxTxAxD: jax.Array,
    visible_Bx1xSxT: jax.Array,
    relative: RelativeScores | None = None,
) -> jax.Array:
    """Return the softmax of the scaled scores, float32[batch, heads, queries, keys]. ``relative`` adds terms that
    depend on the distance of query and key.

    It is computed in float32, because a bf16 softmax loses small probabilities.
    """
    terms = 1 if relative is None else relative.terms
    query_BxSxAxD = query_BxSxAxD * (terms * query_BxSxAxD.shape[-1]) ** -0.5
    scores_BxAxSxT = jnp.einsum("BSAD,BTAD->BAST", query_BxSxAxD, key_BxTxAxD, preferred_element_type=jnp.float32)
    if relative is not None:
        scores_BxAxSxT += relative.added(query_BxSxAxD, key_BxTxAxD)
    return jax.nn.softmax(jnp.where(visible_Bx1xSxT, scores_BxAxSxT, MASKED_SCORE), axis=-1)


def dot_product_attention(
    query_BxSxAxD: jax.Array,
    key_BxTxAxD: jax.Array,
    value_BxTxAxD: jax.Array,
    sequence_ids_BxS: jax.Array,
    relative: RelativeScores | None = None,
    *,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
    visible: Callable[[jax.Array], jax.Array] = visible_keys,
) -> jax.Array:
    """Compute scaled dot-product attention with dropout on the probabilities (Vaswani et al. 2017; Devlin et al.
    2018).

    ``visible`` returns the mask of the keys that a query sees, as :func:`visible_keys` does. Scores and softmax are
    float32; the products have the dtype of the inputs. Returns [batch, queries, heads, head
    size] in that dtype.
    """
    probabilities_BxAxSxT = attention_probabilities(query_BxSxAxD, key_BxTxAxD, visible(sequence_ids_BxS), relative)
    probabilities_BxAxSxT = probabilities_BxAxSxT.astype(value_BxTxAxD.dtype)
    probabilities_BxAxSxT = dropout_of_probabilities(probabilities_BxAxSxT, dropout_rate, dropout_key)
    # With the operands in this order, XLA's CPU product has smaller rounding errors over many keys and is not
    # slower (docs/experiments.md).
    return jnp.einsum("BTAD,BAST->BSAD", value_BxTxAxD, probabilities_BxAxSxT)


def kernel_attention(
    query_BxSxH: jax.Array,
    key_BxTxH: jax.Array,
    value_BxTxH: jax.Array,
    biases_3xH: jax.Array,
    sequence_ids_BxS: jax.Array,
    *,
    head_size: int,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
    mesh: Mesh | None,
) -> jax.Array:
    """Compute :func:`dot_product_attention` with the TPU kernel of ``bert_jax.model.kernels.attention_kernel``.

    The kernel also adds the biases to query, key and value. Its dropout bits are those of
    :func:`dot_product_attention` if ``dropout_key`` is a ``TokenKey``. Without a TPU, the kernel is interpreted.
    Returns [batch, queries, hidden size].
    """
    rate = 0.0 if dropout_key is None else dropout_rate
    query_tokens, key_tokens = [sequence_ids_BxS], [sequence_ids_BxS]
    if dropout_key is not None and rate:
        key = token_key(dropout_key, *sequence_ids_BxS.shape)
        query_tokens += key.words()
        key_tokens.append(key.positions)

    def attend(device_index: Callable[[str], jax.Array], query: jax.Array, *others: jax.Array) -> jax.Array:
        first_head = jnp.asarray(device_index("act_heads") * (query.shape[2] // head_size), jnp.int32)
        return attention_kernel.attend(query, *others, first_head[None], head_size, rate, not on_tpu(mesh))

    cut: Axes = ("act_batch", "act_length", "act_heads")
    of_tokens: tuple[Axes, ...] = ((*cut[:2], None), ("act_batch", None, "act_length"))
    run = shard_mapped(attend, mesh, (cut, cut, cut, (None, "act_heads"), *of_tokens), cut)
    return run(
        query_BxSxH, key_BxTxH, value_BxTxH, biases_3xH, jnp.stack(query_tokens, -1), jnp.stack(key_tokens, 1)
    )


def use_kernel_attention(choice: str, mesh: Mesh | None, model: ModelConfig, length: int) -> bool:
    """Return True if ``choice``, the value of ``execution.attention``, selects :func:`kernel_attention`. Raises
    ``ValueError`` for ``pallas`` if the kernel cannot run."""
    parts = mesh.shape["tensor"] if mesh is not None else 1
    return use_kernel(choice, "attention", mesh, attention_kernel.unsupported(model, length, parts))
