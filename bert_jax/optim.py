"""Learning-rate schedules, weight-decay mask by name, and the update rules AdamW, BERT's Adam and LAMB.

The optimizer returns the direction of the step; the training step multiplies it by the learning rate, which is
a function of ``TrainState.step`` alone (an optimizer's own counter stands still on a skipped step).
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax.config import OptimizerConfig
from bert_jax.config.finetune import FinetuneOptimizerConfig
from bert_jax.model.canonical import STACKED, path_name

# How much smaller the lowest rate of slanted_triangular is than its peak.
SLANTED_RATIO = 32

Schedule = Callable[[jax.Array | int], jax.Array]

# google-research/bert excludes what matches LayerNorm, layer_norm or bias; embeddings are decayed.
NO_DECAY = re.compile(r"layer_norm|bias")


def make_schedule(config: OptimizerConfig, num_steps: int) -> Schedule:
    """Learning rate of step ``step`` (0 for the first update): linear warmup, then the named decay.

    ``bert2018`` is google-research/bert's ``optimization.py``: linear decay counted from step 0, overwritten by
    ``lr * step / warmup`` while ``step < warmup``, so that it drops where warmup ends. ``inverse_sqrt``, which has
    no end, never falls below ``final_fraction`` of the peak; ``constant`` does not decay. ``slanted_triangular``
    rises over the warmup and falls to the end, from 1/32 of the peak and back (Howard and Ruder 2018, eq. 3).
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    end = config.decay_steps or num_steps
    floor = config.final_fraction

    def after_warmup(step: jax.Array) -> jax.Array:
        if config.schedule == "bert2018":
            return floor + (1 - floor) * (1 - jnp.minimum(step, end) / end)
        if config.schedule == "constant":
            return jnp.ones_like(step)
        if config.schedule == "inverse_sqrt":
            return jnp.maximum(floor, jnp.sqrt(max(warmup, 1) / jnp.maximum(step, max(warmup, 1))))
        if config.schedule == "wsd":
            length = max(round(config.wsd_decay_fraction * end), 1)
            return floor + (1 - floor) * jnp.clip((end - step) / length, 0, 1)
        done = jnp.clip((step - warmup) / max(end - warmup, 1), 0, 1)
        if config.schedule == "cosine":
            return floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        assert config.schedule == "linear", config.schedule
        return floor + (1 - floor) * (1 - done)

    def schedule(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        if config.schedule == "slanted_triangular":
            rising, falling = step / max(warmup, 1), 1 - (step - warmup) / max(end - warmup, 1)
            part = jnp.where(step < warmup, rising, jnp.clip(falling, 0, 1))
            return peak * (1 + part * (SLANTED_RATIO - 1)) / SLANTED_RATIO
        factor = after_warmup(step)
        if warmup:
            factor = jnp.where(step < warmup, step / warmup, factor)
        return peak * factor

    return schedule


def decay_mask(params: Any) -> Any:
    """Tree of bools: does weight decay apply? By name, never by rank (a stacked bias has two dimensions)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not NO_DECAY.search(path_name(path)), params)


class MomentsState(NamedTuple):
    """First and second moment of BERT's Adam."""

    mu: Any
    nu: Any


def scale_by_bert_adam(beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam without bias correction: m / (sqrt(v) + epsilon) (google-research/bert ``optimization.py``)."""

    def init(params: Any) -> MomentsState:
        return MomentsState(optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(grads: Any, state: MomentsState, params: Any = None) -> tuple[Any, MomentsState]:
        mu = optax.tree.update_moment(grads, state.mu, beta1, 1)
        nu = optax.tree.update_moment_per_elem_norm(grads, state.nu, beta2, 2)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mu, nu), MomentsState(mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_adam_with_start_step(
    beta1: float, beta2: float, epsilon: float, unfreeze_at: Any
) -> optax.GradientTransformation:
    """Adam whose bias correction counts from the update at which a parameter is unfrozen; ``unfreeze_at`` is a tree
    of these numbers that broadcasts to the parameters.

    Moments are 0 until then, whatever an L2 decay adds to the gradients: corrected by the count of all updates, the
    first steps would be up to six times too large. The state is that of ``optax.scale_by_adam``.
    """
    adam = optax.scale_by_adam(beta1, beta2, epsilon)

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        own = jax.tree.map(lambda first: state.count + 1 - first, unfreeze_at)
        grads = jax.tree.map(lambda g, count: jnp.where(count > 0, g, 0.0), grads, own)
        _, state = adam.update(grads, state, params)

        def one(m: jax.Array, v: jax.Array, count: jax.Array) -> jax.Array:
            count = jnp.maximum(count, 1)
            return m / (1 - beta1**count) / (jnp.sqrt(v / (1 - beta2**count)) + epsilon)

        return jax.tree.map(one, state.mu, state.nu, own), state

    return optax.GradientTransformation(adam.init, update)


def scale_by_layer_trust_ratio() -> optax.GradientTransformation:
    """LAMB's trust ratio |w| / |update| per canonical parameter (You et al. 2019, algorithm 2).

    Stacked layers get one ratio each, not one for the stack; what is not decayed keeps ratio 1, as in the
    authors' implementation.
    """

    def one(path: tuple[Any, ...], update: jax.Array, param: jax.Array) -> jax.Array:
        name = path_name(path)
        if NO_DECAY.search(name):
            return update
        axes = tuple(range(1 if STACKED in f"{name}/" else 0, update.ndim))
        weight_norm = jnp.sqrt(jnp.sum(jnp.square(param), axes, keepdims=True))
        update_norm = jnp.sqrt(jnp.sum(jnp.square(update), axes, keepdims=True))
        safe = (weight_norm > 0) & (update_norm > 0)
        return update * jnp.where(safe, weight_norm / jnp.where(safe, update_norm, 1.0), 1.0)

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        return jax.tree_util.tree_map_with_path(one, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def clip_to_norm(max_norm: float) -> optax.GradientTransformation:
    """Gradients scaled down to a global norm of ``max_norm``, by one factor. ``optax.clip_by_global_norm`` divides
    and selects each element instead: the whole update takes a CPU three times as long.
    """

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        norm = optax.tree.norm(updates)
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return jax.tree.map(lambda x: x * factor, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_optimizer(config: OptimizerConfig, unfreeze_at: Any = None) -> optax.GradientTransformation:
    """Gradients to step direction d, to be applied as ``params - learning_rate * d``.

    Order: clip by global norm, coupled L2 (if chosen), moments, decoupled decay, trust ratio (LAMB).
    ``unfreeze_at``: see :func:`unfreeze_updates`; the state is the same with it. BERT's Adam, which corrects
    nothing, ignores it.
    """
    parts: list[optax.GradientTransformation] = []
    if config.clip_norm:
        parts.append(clip_to_norm(config.clip_norm))
    decay = optax.add_decayed_weights(config.weight_decay, mask=decay_mask)
    if config.weight_decay and config.weight_decay_type == "l2":
        parts.append(decay)
    if config.name == "bert_adam":
        parts.append(scale_by_bert_adam(config.beta1, config.beta2, config.epsilon))
    elif unfreeze_at is None:
        parts.append(optax.scale_by_adam(config.beta1, config.beta2, config.epsilon))
    else:
        parts.append(scale_by_adam_with_start_step(config.beta1, config.beta2, config.epsilon, unfreeze_at))
    if config.weight_decay and config.weight_decay_type == "decoupled":
        parts.append(decay)
    if config.name == "lamb":
        parts.append(scale_by_layer_trust_ratio())
    return optax.chain(*parts)


def by_part(value: Callable[[str, int], Any], num_layers: int, like: Any) -> Any:
    """``value`` of each parameter's part (``embeddings``, ``layer_N``, or a head) and its depth, the levels below
    the heads, as a tree that broadcasts to ``like``. A final LayerNorm belongs to the top layer."""
    layers = [(f"layer_{i}", num_layers - i) for i in range(num_layers)]

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        name = path_name(path)
        if STACKED in f"{name}/":
            each = [value(*layer) for layer in layers]
            return jnp.stack(each).reshape(-1, *(1,) * (leaf.ndim - 1))
        part = name.split("/")[1 if name.startswith("encoder/") else 0]
        if part == "final_layer_norm":
            return value(*layers[-1])
        return value(part, {**dict(layers), "embeddings": num_layers + 1}.get(part, 0))

    return jax.tree_util.tree_map_with_path(one, like)


def _unfreeze_steps(config: FinetuneOptimizerConfig, steps_per_epoch: int) -> int:
    """Steps between the unfreezing of two layers, at least 1; 0: all train from the first step."""
    return max(1, round(config.unfreeze_every * steps_per_epoch)) if config.unfreeze_every else 0


def unfreeze_updates(config: FinetuneOptimizerConfig, num_layers: int, like: Any, steps_per_epoch: int) -> Any:
    """Return the first update of each parameter, a tree that broadcasts to ``like``; None: the first for all."""
    unfreeze_steps = _unfreeze_steps(config, steps_per_epoch)
    if not unfreeze_steps:
        return None
    return jax.tree.map(np.asarray, by_part(lambda _, depth: jnp.int32(depth * unfreeze_steps), num_layers, like))


def lr_multipliers(
    config: FinetuneOptimizerConfig, num_layers: int, like: Any, steps_per_epoch: int
) -> Callable[[jax.Array], Any] | None:
    """Return each parameter's factor on the learning rate at a step, a tree that broadcasts to ``like``; None: 1.

    Layer-wise decay (Howard and Ruder 2018; Clark et al. 2020): heads 1, the top layer ``layer_decay``, each one
    below that times as much, embeddings least. 0 for ``frozen`` parts and, with ``unfreeze_every``, for layers
    that are still frozen: the top one is unfrozen after so many epochs, the next one after twice as many.
    """
    known = ("embeddings", "encoder", "pooler", *(f"layer_{i}" for i in range(num_layers)))
    for part in config.frozen:
        if part not in known:
            raise ValueError(f"optimizer.frozen: {part!r} is not allowed; allowed: {', '.join(known)}")
    if config.layer_decay == 1 and not config.frozen and not config.unfreeze_every:
        return None
    unfreeze_steps = _unfreeze_steps(config, steps_per_epoch)

    def factor(part: str, depth: int, step: jax.Array) -> jax.Array:
        layer_frozen = part.startswith("layer_") and "encoder" in config.frozen
        if part in config.frozen or layer_frozen:
            return jnp.zeros(())
        value = jnp.full((), config.layer_decay**depth)
        return jnp.where(step >= depth * unfreeze_steps, value, 0.0) if unfreeze_steps else value

    return lambda step: by_part(lambda part, depth: factor(part, depth, step), num_layers, like)
