"""TrainState: the device arrays of a run, their initial values and their shardings."""

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from bert_jax.batch import feature_shapes
from bert_jax.config import ExecutionConfig, RunConfig
from bert_jax.model import from_canonical, to_canonical
from bert_jax.model.canonical import Params, Shapes, Shardings, abstract_params, clear_padding, path_name
from bert_jax.parallel import batch_sharding, shardings

# Name of the position table.
POSITIONS = "embeddings/position_embeddings/embedding"


@struct.dataclass
class TrainState:
    """Step, parameters and optimizer state; floating-point values are float32.

    ``ema`` is the moving average of the parameters, or None if ``optimizer.ema_decay`` is 0. ``start`` contains the
    initial parameters, with 0 for those that were randomly initialized; it is None if the config does not need it.
    ``carry`` is the state that the rows of the last batch carry to the next batch, or None (``Aux.carried``).
    """

    step: jax.Array  # int32[]: number of optimizer steps, including skipped steps
    params: Params
    opt_state: optax.OptState
    ema: Params | None = None
    start: Params | None = None
    carry: Params | None = None


def make_prng_key(execution: ExecutionConfig, seed: int) -> jax.Array:
    """Return the base PRNG key for dropout. With ``execution.prng`` hash it is the threefry key that is hashed."""
    return jax.random.key(seed, impl=prng_impl(execution))


def prng_impl(execution: ExecutionConfig) -> str:
    """Return the name of JAX's implementation of the base PRNG key for dropout."""
    return "rbg" if execution.prng == "rbg" else "threefry2x32"


def key_words(key: jax.Array) -> np.ndarray:
    """Return the words of a PRNG key, uint32[2] or uint32[4], which are the input of a program for all seeds."""
    return np.asarray(jax.random.key_data(key))


def initial_params(
    model: nn.Module, seed: int | jax.Array, loaded: Mapping[str, jax.Array] | None = None
) -> Params:
    """Return initial parameters in the layout of ``model``. ``seed``: a seed, or the PRNG key of a seed.

    The values depend only on the seed and the canonical names: the parameters are randomly initialized in the
    unstacked, unpadded layout and then stacked and padded. Canonical arrays in ``loaded`` replace the randomly
    initialized values. Raises ``ValueError`` if the model has no parameter with the name and shape of an
    array in ``loaded``.
    """
    plain = dataclasses.replace(model.execution, scan_layers=False, vocab_multiple=1)
    source = model.clone(execution=plain, mesh=None)
    batch = {n: jax.ShapeDtypeStruct(s, d) for n, (s, d) in feature_shapes(1, 8, 1).items()}
    # Computes what the parameters depend on, not the output of the network.
    key = jax.random.key(seed) if isinstance(seed, int) else seed
    drawn = nn.unbox(source.lazy_init(key, batch, mutable=["params"])["params"])
    vocab_size = model.config.vocab_size
    flat = to_canonical(drawn, vocab_size) | dict(loaded or {})
    return from_canonical(flat, nn.unbox(abstract_params(model)), vocab_size)


def compute_shardings(model: nn.Module, mesh: Mesh) -> Shardings:
    """Return a tree of the shardings of the parameters during computation, when each replica has all parameters."""
    return shardings(abstract_params(model), mesh)


def parameter_of(path: KeyPath, names: Container[str]) -> str:
    """Return the name of the parameter to which the leaf of the state at ``path`` belongs.

    This is the longest suffix of ``path`` that is in ``names``, or "" if ``names`` contains no suffix.
    """
    parts = path_name(path).split("/")
    return next((name for i in range(len(parts)) if (name := "/".join(parts[i:])) in names), "")


def flat(tree: object) -> dict[str, Any]:
    """Return a dict that maps the path of each leaf of a tree to the leaf."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def abstract_state(
    config: RunConfig,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    carried: Shapes | None = None,
) -> TrainState:
    """Return the shapes, dtypes and shardings of the training state for ``config``, without allocating arrays.
    ``carried``: the shapes and dtypes of ``Objective.carried``.

    Between steps, the parameters, the optimizer moments and the moving average have the same sharding. With
    ``mesh.shard_optimizer``, each replica stores and updates a shard of each parameter; otherwise, each replica
    stores and updates all parameters.
    """
    params = nn.unbox(abstract_params(model))
    by_name = flat(shardings(abstract_params(model), mesh, replicas=config.mesh.shard_optimizer))
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = by_name.get(parameter_of(path, by_name), replicated)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    step: Any = jax.ShapeDtypeStruct((), jnp.int32)  # a state of shapes
    state = TrainState(
        step=step,
        params=params,
        opt_state=jax.eval_shape(optimizer.init, params),
        ema=params if config.optimizer.ema_decay > 0 else None,
        start=params if config.stores_start_params else None,
    )
    state = jax.tree_util.tree_map_with_path(place, state)
    sharding = batch_sharding(mesh)
    return state.replace(
        carry=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), carried)
    )


def zero_carry(like: Params | None) -> Params | None:
    """Return zeros with the shapes, dtypes and shardings of the leaves of ``like``, a carried state."""
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), like)


def initial_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    seed: int,
    loaded: Mapping[str, jax.Array] | None = None,
) -> TrainState:
    """Return the state at step 0, created with the shardings of ``abstract``.

    Canonical arrays in ``loaded`` replace randomly initialized parameters. The moving average starts as a copy of
    the parameters.
    """
    vocab_size, key = model.config.vocab_size, jax.random.key(seed)

    def make(loaded: dict[str, jax.Array], words: jax.Array) -> TrainState:
        params = initial_params(model, jax.random.wrap_key_data(words, impl=jax.random.key_impl(key)), loaded)
        ema = None if abstract.ema is None else jax.tree.map(jnp.copy, params)
        start = None
        if abstract.start is not None:
            zeros = to_canonical(jax.tree.map(jnp.zeros_like, params), vocab_size)
            start = from_canonical(zeros | loaded, params, vocab_size)
        carry = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract.carry)
        # Adagrad's sums of squares start at 1, in padding rows too.
        opt_state = clear_padding(optimizer.init(params), vocab_size)
        return TrainState(jnp.zeros((), jnp.int32), params, opt_state, ema, start, carry)

    compiled = jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))
    return compiled(dict(loaded or {}), key_words(key))


def parameter_count(params: Params, vocab_size: int) -> int:
    """Return the number of canonical (unpadded) parameters."""
    return sum(leaf.size for leaf in jax.eval_shape(lambda tree: to_canonical(tree, vocab_size), params).values())
