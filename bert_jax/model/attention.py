"""Scaled dot-product attention: the implementation with XLA operations, and the interface to the kernels.

Shapes: B rows, S query tokens, T key tokens (= S), A heads, D head size, H = A * D, M blocks of a row between the
first and the last, R random blocks.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.config import ModelConfig
from bert_jax.model.dropout import DropoutKey, dropout_of_probabilities
from bert_jax.model.kernels.common import (
    capability_of,
    fast_memory_of,
    kernel_module,
    kernels_for,
    platform_of,
    shard_mapped,
    token_key,
    use_kernel,
)
from bert_jax.model.kernels.ranges import visible_keys
from bert_jax.model.kernels.tiles import Form
from bert_jax.model.positions import RelativeScores
from bert_jax.parallel.axes import Axes

# Lengths of rows whose random blocks follow the authors' pretraining, and the tokens from which they come.
PUBLISHED_LENGTHS, PUBLISHED_REACH = (1024, 3072, 4096), 1024
# Finite, so a row without any visible key (a blank row) gives a uniform softmax instead of NaN.
MASKED_SCORE = -1e9


def cached_keys(
    sequence_ids_BxS: jax.Array, cache_ids_BxC: jax.Array, start: jax.Array, window: int = 0
) -> jax.Array:
    """Return a bool mask [batch, 1, queries, columns] that is True where a query sees a column of the cache.

    Query i is the token of column ``start`` + i. It sees no later column and none whose ``cache_ids`` is 0. With
    ``window``, it sees no column more than ``window`` columns before itself; 0: no limit.
    """
    back_SxC = start + jnp.arange(sequence_ids_BxS.shape[1])[:, None] - jnp.arange(cache_ids_BxC.shape[1])
    near_SxC = (back_SxC >= 0) & (back_SxC <= window) if window else back_SxC >= 0
    return ((cache_ids_BxC > 0)[:, None] & near_SxC)[:, None]


def has_blocks(config: ModelConfig, length: int) -> bool:
    """Return True if rows of ``length`` tokens are divided into blocks of ``config.attention_block`` tokens (Zaheer
    et al. 2020). A length that is unknown when the program is traced is the greatest one."""
    most = length if isinstance(length, int) else config.max_length
    return config.attention_block > 0 and most > config.whole_length


def random_features(config: ModelConfig, length: int, dropout_key: DropoutKey | None) -> dict[str, jax.Array]:
    """Return the random blocks of all layers in training, that is with ``dropout_key``, as ``random_blocks``,
    int32[layers, A, M, R]; {} if there are none."""
    if dropout_key is None or not has_blocks(config, length):
        return {}
    sizes = (config.num_attention_heads, length, config.attention_block, config.random_blocks)
    plans = [random_blocks(i, *sizes, config.max_position_embeddings) for i in range(config.num_layers)]
    return {"random_blocks": jnp.asarray(np.stack(plans))}


@functools.cache
def random_blocks(layer: int, heads: int, length: int, block: int, number: int, longest: int) -> np.ndarray:
    """Return the ``number`` random blocks that each block between the first and the last one sees, int32[A, M, R],
    in a row of ``length`` tokens of a model for ``longest`` tokens.

    They equal those of transformers' ``BigBirdBlockSparseAttention``, sampled with numpy's legacy generator, whose
    seed is the index of the layer, from 0. In rows of PUBLISHED_LENGTHS they come from the first 1,024 tokens, and
    may be blocks that the query sees anyway, which then count twice; in others they come from the first
    5 + 2 * ``number`` blocks and are other ones.
    """
    draw, blocks = np.random.RandomState(layer).permutation, -(-length // block)
    plan = np.zeros((heads, blocks, number), np.int32)
    if blocks * block in PUBLISHED_LENGTHS:
        total = max(longest // block, blocks)
        for head in range(heads):
            rows = [_published_choice(i, total, block, draw)[:number] for i in range(1, total - 1)]
            if not all(len(row) in (1, number) for row in rows):
                raise ValueError(
                    f"model.attention_block: {block} leaves fewer than {number} random blocks in {length} tokens; "
                    "use smaller or fewer random blocks"
                )
            for i in range(1, blocks - 1):
                plan[head, i] = rows[i - 1]
        return plan[:, 1:-1]
    reach = 5 + 2 * number
    for i in range(1, blocks - 1):
        seen = {i - 1, i, i + 1, 0, reach - 1} | ({reach - 2} if i == 1 else {1} if i == reach - 2 else set())
        for head in range(heads):
            plan[head, i] = [other for other in draw(np.arange(reach)) if other not in seen][:number]
    return plan[:, 1:-1]


def _published_choice(i: int, blocks: int, block: int, draw: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the permuted blocks from which block ``i`` of ``blocks`` has its random ones, with the limits of the
    reference, which reach up to a block of the window in some rows."""
    middle = np.arange(1, blocks - 1)
    last = PUBLISHED_REACH // block - 1 if 2 * block < PUBLISHED_REACH else blocks - 1
    if i <= 2:
        return draw(middle[i + 1 : last])
    if i >= blocks - 3 or i - 2 > last:
        return draw(middle[:last])
    if i + 1 == last:
        return draw(middle[: i - 2])
    return draw(np.concatenate([middle[: i - 2], middle[i + 1 : last]]))


def block_scores(length: int, block: int, number: int, random_AxMxR: jax.Array | None) -> RelativeScores:
    """Return the values added to the scores of whole rows of ``length`` tokens, [A, S, S] or [1, S, S], for the
    attention of ``local_attention.block_attention``: the logarithm of how often a query sees a key. ``length`` may
    be unknown when the program is traced."""
    own_S = jnp.arange(length) // block
    last, own_Sx1 = jnp.max(own_S), own_S[:, None]
    is_inner_Sx1 = (own_Sx1 > 0) & (own_Sx1 < last)
    seen_SxS = (jnp.abs(own_Sx1 - own_S) <= 1) | (own_S == 0) | (own_S == last) | ~is_inner_Sx1
    if random_AxMxR is None:
        more_AxSxS = (number * (is_inner_Sx1 & (own_S == 0)))[None]
    else:
        times_AxMxN = jax.nn.one_hot(random_AxMxR, -(-length // block), dtype=jnp.int32).sum(axis=2)
        more_AxSxS = jnp.pad(times_AxMxN, [(0, 0), (1, 1), (0, 0)])[:, own_Sx1, own_S]
    times_AxSxS = seen_SxS + more_AxSxS
    bias_AxSxS = jnp.where(times_AxSxS > 0, jnp.log(jnp.maximum(times_AxSxS, 1)), MASKED_SCORE)
    if not isinstance(length, int):
        bias_AxSxS = jnp.where(last < 5 + 2 * number, 0, bias_AxSxS)
    return RelativeScores(bias_AxSxT=bias_AxSxS.astype(jnp.float32))


def without_padding(context_BxSxAxD: jax.Array, ids_BxS: jax.Array, config: ModelConfig) -> jax.Array:
    """Return ``context`` with zeros at padding if the row is divided into blocks, as in transformers."""
    length = ids_BxS.shape[1]
    if not has_blocks(config, length):
        return context_BxSxAxD
    kept_BxS = ids_BxS > 0
    if not isinstance(length, int):
        kept_BxS |= jnp.max(jnp.arange(length)) < config.whole_length
    return jnp.where(kept_BxS[:, :, None, None], context_BxSxAxD, 0)


def attention_probabilities(
    query_BxSxAxD: jax.Array,
    key_BxTxAxD: jax.Array,
    visible_Bx1xSxT: jax.Array,
    relative: RelativeScores | None = None,
) -> jax.Array:
    """Return the softmax of the scaled scores, [batch, heads, queries, keys]. ``relative`` adds terms that depend
    on the distance of query and key.

    It is computed and returned in float32 (float64 for float64 queries), because a bf16 softmax loses small
    probabilities.
    """
    terms = 1 if relative is None else relative.terms
    query_BxSxAxD = query_BxSxAxD * (terms * query_BxSxAxD.shape[-1]) ** -0.5
    dtype = jnp.promote_types(query_BxSxAxD.dtype, jnp.float32)
    scores_BxAxSxT = jnp.einsum("BSAD,BTAD->BAST", query_BxSxAxD, key_BxTxAxD, preferred_element_type=dtype)
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
    at least float32; the products have the dtype of the inputs. Returns [batch, queries, heads, head size] in that
    dtype.
    """
    probabilities_BxAxSxT = attention_probabilities(query_BxSxAxD, key_BxTxAxD, visible(sequence_ids_BxS), relative)
    probabilities_BxAxSxT = probabilities_BxAxSxT.astype(value_BxTxAxD.dtype)
    probabilities_BxAxSxT = dropout_of_probabilities(probabilities_BxAxSxT, dropout_rate, dropout_key)
    # With the operands in this order, XLA's CPU product has smaller rounding errors over many keys and is not
    # slower (studies/cpu).
    return jnp.einsum("BTAD,BAST->BSAD", value_BxTxAxD, probabilities_BxAxSxT)


def kernel_attention(
    heads: tuple[jax.Array, ...],
    biases_3xH: jax.Array,
    sequence_ids_BxS: jax.Array,
    *,
    kernel: str,
    form: Form,
    dropout_key: DropoutKey | None,
    mesh: Mesh | None,
    turns: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """Compute :func:`dot_product_attention` with ``kernel``: tpu (``bert_jax.model.kernels.tpu_attention``) or
    gpu (``bert_jax.model.kernels.gpu_attention``).

    ``heads`` are query, key and value, each [B, S, H], or, for the kernel gpu, one array [B, S, 3, H]. The kernel
    also adds the biases to them and, with ``turns`` (``tpu_attention.rotary_turns``), rotates queries and keys. Its
    dropout bits are those of :func:`dot_product_attention` if ``dropout_key`` is a ``TokenKey``. On a device for
    which it was not written, the kernel is interpreted. Returns [batch, queries, hidden size].
    """
    rate = 0.0 if dropout_key is None else form.dropout_rate
    form = dataclasses.replace(form, dropout_rate=rate, rotary=bool(turns), capability=capability_of(mesh))
    module, interpret = kernel_module(kernel, "attention"), platform_of(mesh) != kernel
    # Of each token: its sequence id and, with dropout, its two words and its position.
    tokens = [sequence_ids_BxS]
    if dropout_key is not None and form.dropout_rate:
        key = token_key(dropout_key, *sequence_ids_BxS.shape)
        tokens += [*key.words(), key.positions]

    def attend(device_index: Callable[[str], jax.Array], *operands: jax.Array) -> jax.Array:
        width = operands[0].shape[-1]
        first_head = jnp.asarray(device_index("act_heads") * (width // form.head_size), jnp.int32)[None]
        if kernel == "gpu":
            own, others = operands[: len(heads)], operands[len(heads) :]
            return module.attend(own, *others, first_head, form, interpret)
        of_heads, tokens, turns = operands[:4], operands[4:6], operands[6:]
        return module.attend(*of_heads, *tokens, turns, first_head, form, interpret)

    cut: Axes = ("act_batch", "act_length", "act_heads")
    by_row: Axes = ("act_batch", None, "act_length")
    of_tokens = [(jnp.stack(tokens, 1), by_row)]
    if kernel == "tpu":
        whole = (*cut[:2], None)
        of_tokens = [
            (jnp.stack(tokens[:3], 1), by_row),
            *((x, whole) for x in (jnp.stack(tokens[::3], -1), *turns)),
        ]
    operands, axes = zip(*of_tokens, strict=True)
    axes_of_heads: list[Axes] = [(*cut[:2], *(None,) * (x.ndim - 3), cut[2]) for x in heads]
    run = shard_mapped(attend, mesh, (*axes_of_heads, (None, "act_heads"), *axes), cut)
    return run(*heads, biases_3xH, *operands)


def attention_kernel_of(choice: str, mesh: Mesh | None, model: ModelConfig, length: int) -> str:
    """Return the kernel, tpu or gpu, that ``choice``, the value of ``execution.attention``, selects; "" for none.
    Raises ``ValueError`` for ``pallas`` if it cannot run."""
    parts = mesh.shape["tensor"] if mesh is not None else 1
    name = kernels_for(mesh)
    memory = () if name == "gpu" else (fast_memory_of(mesh),)

    def unsupported() -> str:
        return str(kernel_module(name, "attention").unsupported(model, length, parts, *memory))

    return name if use_kernel(choice, "attention", mesh, unsupported) else ""
