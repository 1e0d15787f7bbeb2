"""Canonical parameters (layers not stacked, no padding, arrays by name), and their conversion from and to the
parameter tree of a run.

The parameter tree of a run depends on ``ExecutionConfig`` (layers stacked under ``encoder/layers`` when scanned,
vocabulary padded). These functions work on any tree whose paths end like parameter paths: parameters,
gradients, moments, moving averages. Files and comparisons of runs use canonical names.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from bert_jax.batch import feature_shapes

# The parameters of a network, by module and name.
Params = Mapping[str, "jax.Array | Params"]
# The shapes of parameters, in the same tree; boxed in ``nn.Partitioned`` before ``nn.unbox``.
Shapes = Mapping[str, "jax.ShapeDtypeStruct | nn.Partitioned[jax.ShapeDtypeStruct] | Shapes"]
# The shardings of parameters, in the same tree.
Shardings = Mapping[str, "jax.sharding.NamedSharding | Shardings"]
Tree = TypeVar("Tree")
STACKED = "encoder/layers/"
VOCABULARY_ROWS = (
    "word_embeddings/embedding", "mlm_head/output_embeddings/embedding", "mlm_head/output_bias",
    "context_embeddings/embedding", "vocabulary_bias", "characters/character_ids",
)  # fmt: skip


def path_name(path: KeyPath) -> str:
    """Return the name of a JAX key path, such as ``encoder/layer_0/attention/query/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def canonical_leaves(tree: object, vocab_size: int) -> Iterator[tuple[str, jax.Array]]:
    """Yield ``(canonical name, array)`` for every leaf of ``tree``. Stacked layers are yielded one by one, and
    padding is removed.

    A name keeps the prefix of the parameter path (``opt_state/1/mu/encoder/layer_0/...``).
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if name.endswith(VOCABULARY_ROWS):
            leaf = leaf[:vocab_size]
        if STACKED in name:
            before, after = name.split(STACKED)
            for i in range(leaf.shape[0]):
                yield f"{before}encoder/layer_{i}/{after}", leaf[i]
        else:
            yield name, leaf


def to_canonical(tree: object, vocab_size: int) -> dict[str, jax.Array]:
    """Return the arrays of :func:`canonical_leaves` by name."""
    return dict(canonical_leaves(tree, vocab_size))


@functools.cache  # traced once per model: planning asks for many meshes
def abstract_params(model: nn.Module) -> Shapes:
    """Return the parameter tree of a ``BertModel``; its leaves are ``jax.ShapeDtypeStruct``, boxed in
    ``nn.Partitioned``."""
    length = min(8, model.config.max_position_embeddings)
    # Not arrays, which would start the devices.
    batch = {n: jax.ShapeDtypeStruct(s, d) for n, (s, d) in feature_shapes(1, length, 1).items()}
    return jax.eval_shape(lambda batch: model.init(jax.random.key(0), batch)["params"], batch)


@functools.cache
def canonical_shapes(model: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every parameter of a ``BertModel`` by canonical name, sorted by name."""
    params, vocab_size = nn.unbox(abstract_params(model)), model.config.vocab_size
    canonical = jax.eval_shape(lambda tree: to_canonical(tree, vocab_size), params)
    return MappingProxyType({name: leaf.shape for name, leaf in canonical.items()})


def clear_padding(tree: Tree, vocab_size: int) -> Tree:
    """Return ``tree`` (arrays on devices, or traced) with the padding rows of the vocabulary set to 0. They are
    already 0 unless the tree is damaged, or belongs to an optimizer whose state starts at another value."""

    def clear(path: KeyPath, leaf: jax.Array) -> jax.Array:
        if not path_name(path).endswith(VOCABULARY_ROWS) or leaf.shape[0] <= vocab_size:
            return leaf
        if isinstance(leaf, jax.core.Tracer):
            return leaf.at[vocab_size:].set(0)
        return _clear_from(vocab_size, leaf.sharding)(leaf)

    return jax.tree_util.tree_map_with_path(clear, tree)


@functools.cache
def _clear_from(row: int, sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x.at[row:].set(0), out_shardings=sharding)


def from_canonical(flat: Mapping[str, np.ndarray | jax.Array], like: Tree, vocab_size: int) -> Tree:
    """Return the canonical arrays ``flat`` as a tree with the structure, shapes and dtypes of ``like`` (arrays or
    ``jax.ShapeDtypeStruct``).

    Raises ``ValueError`` with the names of missing and unexpected parameters and of parameters with a wrong shape.
    """
    used: set[str] = set()
    problems: list[str] = []

    def take(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        used.add(name)
        if name not in flat:
            problems.append(f"missing {name}")
            return jnp.zeros(shape, dtype)
        value = jnp.asarray(flat[name], dtype)
        if name.endswith(VOCABULARY_ROWS) and value.shape[0] == vocab_size:
            value = jnp.pad(value, [(0, shape[0] - vocab_size)] + [(0, 0)] * (value.ndim - 1))
        if value.shape != shape:
            problems.append(f"{name} has shape {value.shape}, expected {shape}")
            return jnp.zeros(shape, dtype)
        return value

    def fill(path: KeyPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        name = path_name(path)
        if STACKED not in name:
            return take(name, tuple(leaf.shape), leaf.dtype)
        before, after = name.split(STACKED)
        names = [f"{before}encoder/layer_{i}/{after}" for i in range(leaf.shape[0])]
        return jnp.stack([take(n, tuple(leaf.shape[1:]), leaf.dtype) for n in names])

    filled: Tree = jax.tree_util.tree_map_with_path(fill, like)
    problems += [f"unexpected {name}" for name in flat if name not in used]
    if problems:
        raise ValueError(f"the parameters do not match the model: {'; '.join(problems)}")
    return filled
