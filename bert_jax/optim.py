"""Learning-rate schedules, the weight-decay mask, and the update rules of ``optimizer.name``.

The optimizer returns the direction of the step, and the training step multiplies it by the learning rate. The
learning rate depends only on ``TrainState.step``, because the counter of an optimizer does not count skipped steps.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from optax import EmptyState, ScaleByAdamState, TraceState

from bert_jax.config import OptimizerConfig
from bert_jax.config.finetune import FinetuneOptimizerConfig
from bert_jax.model.canonical import STACKED, VOCABULARY_ROWS, Params, path_name

# The parameters of an update; None for a rule that does not read them.
Current = Params | None

# Ratio of the peak to the lowest learning rate of slanted_triangular.
SLANTED_RATIO = 32
# Shares of triangle: the first learning rate as a share of the peak, and the part of the run that falls
# (budget-triangle2 of github.com/JonasGeiping/cramming).
TRIANGLE_BASE, TRIANGLE_FALL = 0.25, 0.25

Schedule = Callable[[jax.Array | int], jax.Array]

# Parameters without weight decay, as in google-research/bert; embeddings have weight decay.
NO_DECAY = re.compile(r"layer_norm|bias|character_ids")

# Number of names that an error lists.
_SHOWN = 8

# Muon (Jordan 2024, github.com/KellerJordan/Muon): momentum, and the coefficients of the quintic, steep at 0.
MUON_MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
# Root mean square of the updates of Muon, chosen to match AdamW (Liu et al. 2025, arXiv:2502.16982, section 2.2).
MUON_RMS = 0.2


def make_schedule(config: OptimizerConfig, num_steps: int, first_step: int = 0) -> Schedule:
    """Return the learning rate as a function of the step (0 for the first update): linear warmup, then a decay.

    With ``restart_schedule``, steps are counted from ``first_step``, the first step of the phase, and steps before
    it have the learning rate of the first one.
    ``bert2018`` follows ``optimization.py`` of google-research/bert: linear decay counted from step 0, replaced by
    ``lr * step / warmup`` while ``step < warmup``, so the learning rate drops at the end of warmup.
    ``inverse_sqrt`` has no last step and does not fall below ``final_fraction`` of the peak; ``constant`` does not
    decay. ``slanted_triangular`` rises from 1/32 of the peak during warmup and falls back to 1/32 at the last step
    (Howard and Ruder 2018, eq. 3). ``triangle`` has no warmup: it rises from 1/4 of the peak during the first 3/4
    of the steps and then falls (Geiping and Goldstein 2022). The decay of ``wsd`` is linear or ``1 - sqrt``
    (Haegele et al. 2024, section 3).
    """
    peak, warmup, floor = config.learning_rate, config.warmup_steps, config.final_fraction
    start = first_step if config.restart_schedule else 0
    end = config.decay_steps or num_steps - start

    def after_warmup(step: jax.Array) -> jax.Array:
        if config.schedule == "bert2018":
            return floor + (1 - floor) * (1 - jnp.minimum(step, end) / end)
        if config.schedule == "constant":
            return jnp.ones_like(step)
        if config.schedule == "inverse_sqrt":
            return jnp.maximum(floor, jnp.sqrt(max(warmup, 1) / jnp.maximum(step, max(warmup, 1))))
        if config.schedule == "wsd":
            length = max(config.wsd_decay_steps or round(config.wsd_decay_fraction * end), 1)
            left = jnp.clip((end - step) / length, 0, 1)
            return floor + (1 - floor) * (1 - jnp.sqrt(1 - left) if config.wsd_decay == "one_minus_sqrt" else left)
        if config.schedule == "triangle":
            rising = TRIANGLE_BASE + step / end * (1 - TRIANGLE_BASE) / (1 - TRIANGLE_FALL)
            return jnp.minimum(rising, floor + (1 - floor) * jnp.clip((end - step) / (TRIANGLE_FALL * end), 0, 1))
        done = jnp.clip((step - warmup) / max(end - warmup, 1), 0, 1)
        if config.schedule == "cosine":
            return floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        assert config.schedule == "linear", config.schedule
        return floor + (1 - floor) * (1 - done)

    def schedule(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        if start:
            step = jnp.maximum(step - start, 0)
        if config.schedule == "slanted_triangular":
            rising, falling = step / max(warmup, 1), 1 - (step - warmup) / max(end - warmup, 1)
            part = jnp.where(step < warmup, rising, jnp.clip(falling, 0, 1))
            return peak * (1 + part * (SLANTED_RATIO - 1)) / SLANTED_RATIO
        factor = after_warmup(step)
        if warmup and config.schedule != "triangle":
            factor = jnp.where(step < warmup, step / warmup, factor)
        return peak * factor

    return schedule


def warmup_warning(config: OptimizerConfig, num_steps: int, first_step: int = 0) -> str:
    """Return a line for the log if the warmup does not end before the last step, so that the learning rate only
    rises; otherwise an empty string. ``first_step``: see :func:`make_schedule`."""
    steps = num_steps - (first_step if config.restart_schedule else 0)
    if config.schedule == "triangle" or config.warmup_steps < max(steps, 1):
        return ""
    last = float(make_schedule(config, num_steps, first_step)(num_steps - 1))
    return (
        f"WARNING: optimizer.warmup_steps: {config.warmup_steps:,} is not less than the {steps:,} steps of the "
        f"schedule, so the learning rate only rises, to {last:.2g} instead of {config.learning_rate:g}; use a "
        f"tenth of the steps, {steps // 10:,}"
    )


def decay_mask(params: Params, without: Sequence[str] = ()) -> Params:
    """Return a tree of bools, True for parameters with weight decay. The name of a parameter decides, not its
    number of dimensions, because a stacked bias has two. ``without``: ``optimizer.without_decay``.

    Raises ``ValueError`` for a text in ``without`` that is no regular expression, or that no name contains.
    """
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for text in without:
        try:
            is_found = any(re.search(text, name) for name in names)
        except re.error as error:
            raise ValueError(f"optimizer.without_decay: {text!r} is not a regular expression: {error}") from None
        if not is_found:
            matrices = [name for name in names if not NO_DECAY.search(name)]
            raise ValueError(
                f"optimizer.without_decay: no parameter has {text!r} in its name; names with weight decay: "
                f"{', '.join(matrices[:_SHOWN])}" + (", ..." if len(matrices) > _SHOWN else "")
            )
    return jax.tree_util.tree_map_with_path(lambda path, _: _decays(path_name(path), without), params)


def _decays(name: str, without: Sequence[str]) -> bool:
    return not (NO_DECAY.search(name) or any(re.search(text, name) for text in without))


class MomentsState(NamedTuple):
    """First and second moments of BERT's Adam."""

    mu: Params
    nu: Params


def scale_by_bert_adam(beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """Return Adam without bias correction: m / (sqrt(v) + epsilon) (google-research/bert ``optimization.py``)."""

    def init(params: Params) -> MomentsState:
        return MomentsState(optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(grads: Params, state: MomentsState, params: Current = None) -> tuple[Params, MomentsState]:
        mu = optax.tree.update_moment(grads, state.mu, beta1, 1)
        nu = optax.tree.update_moment_per_elem_norm(grads, state.nu, beta2, 2)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mu, nu), MomentsState(mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_adam_with_start_step(
    beta1: float, beta2: float, epsilon: float, unfreeze_at: Params | None
) -> optax.GradientTransformation:
    """Return Adam with a bias correction that counts the updates of each parameter since it was unfrozen.

    ``unfreeze_at`` is a tree that broadcasts to the parameters and contains the index of the update that unfreezes
    each parameter. The moments of a parameter are 0 before this update, even with L2 decay. A bias correction that
    counts all updates would make the first steps up to six times too large. The state is that of
    ``optax.scale_by_adam``.
    """
    adam = optax.scale_by_adam(beta1, beta2, epsilon)

    def update(grads: Params, state: ScaleByAdamState, params: Current = None) -> tuple[Params, ScaleByAdamState]:
        own = jax.tree.map(lambda first: state.count + 1 - first, unfreeze_at)
        grads = jax.tree.map(lambda g, count: jnp.where(count > 0, g, 0.0), grads, own)
        _, state = adam.update(grads, state, params)

        def one(m: jax.Array, v: jax.Array, count: jax.Array) -> jax.Array:
            count = jnp.maximum(count, 1)
            return m / (1 - beta1**count) / (jnp.sqrt(v / (1 - beta2**count)) + epsilon)

        return jax.tree.map(one, state.mu, state.nu, own), state

    return optax.GradientTransformation(adam.init, update)


def scale_by_stable_adamw(
    config: OptimizerConfig, weight_decay: float, vocab_size: int | None = None, unfreeze_at: Params | None = None
) -> optax.GradientTransformation:
    """Return StableAdamW: AdamW whose step is divided by the root mean square of the gradient relative to its
    second moment, if this is above 1 (Wortsman et al. 2023, algorithm 2; optimi.StableAdamW of
    github.com/warner-benjamin/optimi).

    The moments have debiased decay rates, so they need no later correction. The root mean square is that of a
    canonical parameter: each of the stacked layers has its own, and rows that pad the vocabulary to more than
    ``vocab_size`` do not count. It also divides the weight decay. ``unfreeze_at``: see
    :func:`scale_by_adam_with_start_step`. The state has the type of ``optax.scale_by_adam``.
    """
    epsilon = config.epsilon

    def gain(beta: float, count: jax.Array) -> jax.Array:
        # (1 - beta) / (1 - beta**count), without the cancellation of 1 - beta**count in float32.
        rate = math.log(beta) if beta else -math.inf
        return jnp.minimum((1 - beta) / -jnp.expm1(rate * count), 1.0)

    def update(grads: Params, state: ScaleByAdamState, params: Current = None) -> tuple[Params, ScaleByAdamState]:
        count = optax.safe_increment(state.count)
        first = jax.tree.map(lambda _: 0, grads) if unfreeze_at is None else unfreeze_at
        own = jax.tree.map(lambda first: (count - first).astype(jnp.float32), first)
        grads = jax.tree.map(lambda g, count: jnp.where(count > 0, g, 0.0), grads, own)

        def moment(beta: float, order: int, old: Params) -> Params:
            def one(x: jax.Array, g: jax.Array, count: jax.Array) -> jax.Array:
                share = gain(beta, jnp.maximum(count, 1))
                return (1 - share) * x + share * g**order

            return jax.tree.map(one, old, grads, own)

        def direction(
            path: KeyPath, g: jax.Array, m: jax.Array, v: jax.Array, p: jax.Array, decays: bool
        ) -> jax.Array:
            name, root = path_name(path), jnp.sqrt(v)
            axes = tuple(range(1 if STACKED in f"{name}/" else 0, g.ndim))
            sizes = [g.shape[axis] for axis in axes]
            if vocab_size and name.endswith(VOCABULARY_ROWS):
                sizes[0] = vocab_size
            relative = jnp.where(g == 0, 0.0, g / jnp.maximum(root, epsilon))
            mean = jnp.sum(jnp.square(relative), axes, keepdims=True) / math.prod(sizes)
            step = m / (root + epsilon) + (weight_decay * p if decays and weight_decay else 0.0)
            return step / jnp.maximum(1.0, jnp.sqrt(mean))

        mu, nu = moment(config.beta1, 1, state.mu), moment(config.beta2, 2, state.nu)
        decays = decay_mask(grads, config.without_decay)
        updates = jax.tree_util.tree_map_with_path(direction, grads, mu, nu, params, decays)
        return updates, ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(optax.scale_by_adam().init, update)


def scale_by_layer_trust_ratio(without_decay: Sequence[str] = ()) -> optax.GradientTransformation:
    """Return LAMB's scaling of the update of each canonical parameter by the trust ratio |w| / |update| (You et al.
    2019, algorithm 2).

    Each of the stacked layers has its own ratio. Parameters without weight decay have ratio 1, as in the
    implementation of the authors.
    """

    def one(path: KeyPath, update: jax.Array, param: jax.Array) -> jax.Array:
        name = path_name(path)
        if not _decays(name, without_decay):
            return update
        axes = tuple(range(1 if STACKED in f"{name}/" else 0, update.ndim))
        weight_norm = jnp.sqrt(jnp.sum(jnp.square(param), axes, keepdims=True))
        update_norm = jnp.sqrt(jnp.sum(jnp.square(update), axes, keepdims=True))
        safe = (weight_norm > 0) & (update_norm > 0)
        return update * jnp.where(safe, weight_norm / jnp.where(safe, update_norm, 1.0), 1.0)

    def update(updates: Params, state: EmptyState, params: Current = None) -> tuple[Params, EmptyState]:
        return jax.tree_util.tree_map_with_path(one, updates, params), state

    return optax.GradientTransformation(lambda params: EmptyState(), update)


def is_muon_matrix(path: KeyPath) -> bool:
    """Return True for the kernels of the encoder, whose updates Muon orthogonalizes."""
    name = path_name(path)
    return name.startswith("encoder/") and name.endswith("/kernel")


def orthogonalize(matrices: jax.Array) -> jax.Array:
    """Return an approximation of U V^T for each matrix with the singular value decomposition U S V^T. The singular
    values of the result are between 0.7 and 1.2, or 0 where S is 0.

    ``matrices``: float32[..., in, out]. The heads of an attention kernel are parts of one matrix; leading
    dimensions are stacked layers.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices  # the products below cost the square of the shorter side
    # 1e-15 is far below any gradient, and its square does not underflow to 0.
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x), (-2, -1), keepdims=True)) + 1e-15)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def scale_by_orthogonal_momentum() -> optax.GradientTransformation:
    """Return Muon's direction: the orthogonalized Nesterov momentum of each matrix times 0.2 * sqrt(longer side).

    The state has the type of ``optax.trace``.
    """
    momentum = optax.trace(MUON_MOMENTUM, nesterov=True)

    def direction(x: jax.Array) -> jax.Array:
        return MUON_RMS * max(x.shape[-2:]) ** 0.5 * orthogonalize(x)

    def update(grads: Params, state: TraceState, params: Current = None) -> tuple[Params, TraceState]:
        updates, state = momentum.update(grads, state, params)
        return jax.tree.map(direction, updates), state

    return optax.GradientTransformation(momentum.init, update)


def scale_by_muon(others: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transformation that applies Muon to the matrices of the encoder, and ``others`` to embeddings,
    LayerNorms, biases and heads."""

    def rule(path: KeyPath, _: Any) -> str:
        return "muon" if is_muon_matrix(path) else "others"

    rules = {"muon": scale_by_orthogonal_momentum(), "others": others}
    return optax.partition(rules, lambda params: jax.tree_util.tree_map_with_path(rule, params))


def clip_to_norm(max_norm: float) -> optax.GradientTransformation:
    """Return a transformation that multiplies all gradients by one factor, so that their global norm is at most
    ``max_norm``.

    ``optax.clip_by_global_norm`` divides each element and then selects the old or the new value, which makes the
    complete update three times as slow on a CPU.
    """

    def update(updates: Params, state: EmptyState, params: Current = None) -> tuple[Params, EmptyState]:
        norm = optax.tree.norm(updates)
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return jax.tree.map(lambda x: x * factor, updates), state

    return optax.GradientTransformation(lambda params: EmptyState(), update)


def make_optimizer(
    config: OptimizerConfig, unfreeze_at: Params | None = None, vocab_size: int | None = None
) -> optax.GradientTransformation:
    """Return the transformation of gradients to the step direction d; the update is ``params - learning_rate * d``.

    Order of the operations: clipping by global norm, L2 decay in the gradients (if chosen), moments, decoupled
    decay, trust ratio (LAMB). ``unfreeze_at``: see :func:`unfreeze_updates`; it does not change the optimizer
    state. BERT's Adam ignores ``unfreeze_at``, because it has no bias correction. ``vocab_size`` is the number of
    rows of the word embeddings without padding (None: there is no padding); only StableAdamW uses it.
    """
    parts: list[optax.GradientTransformation] = []
    if config.clip_norm:
        parts.append(clip_to_norm(config.clip_norm))
    is_apart, weight_decay = config.weight_decay_type != "l2", config.weight_decay
    if config.weight_decay_type == "independent":  # the training step multiplies the direction by the rate
        weight_decay = weight_decay / config.learning_rate if config.learning_rate else 0.0
    mask = functools.partial(decay_mask, without=config.without_decay)
    decay = optax.add_decayed_weights(weight_decay, mask=mask)
    if weight_decay and not is_apart:
        parts.append(decay)
    if config.name == "stable_adamw":
        own_decay = weight_decay if is_apart else 0.0
        return optax.chain(*parts, scale_by_stable_adamw(config, own_decay, vocab_size, unfreeze_at))
    if config.name == "muon":
        # Matrices need no count of updates: their momentum is 0 until they are unfrozen, and the scale of
        # the momentum has no effect.
        unfreeze_at = jax.tree_util.tree_map_with_path(
            lambda path, step: optax.MaskedNode() if is_muon_matrix(path) else step, unfreeze_at
        )
    if config.name in ("sgd", "adagrad"):  # the sums of squares start at 1, as in the programs of GloVe and ELMo
        moments = optax.identity() if config.name == "sgd" else optax.scale_by_rss(1.0, config.epsilon)
    elif config.name == "bert_adam":
        moments = scale_by_bert_adam(config.beta1, config.beta2, config.epsilon)
    elif unfreeze_at is None:
        moments = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    else:
        moments = scale_by_adam_with_start_step(config.beta1, config.beta2, config.epsilon, unfreeze_at)
    parts.append(scale_by_muon(moments) if config.name == "muon" else moments)
    if weight_decay and is_apart:
        parts.append(decay)
    if config.name == "lamb":
        parts.append(scale_by_layer_trust_ratio(config.without_decay))
    return optax.chain(*parts)


def by_part(value: Callable[[str, int], jax.Array | float], num_layers: int, like: Params) -> Params:
    """Return ``value(part, depth)`` of each parameter as a tree that broadcasts to ``like``.

    The part of a parameter is ``embeddings``, ``layer_N``, ``relative`` (the tables of distances, which all layers
    read) or a head. The depth is 0 for heads, 1 for the top layer, one more for each lower layer, and one more for
    embeddings and tables. A final LayerNorm belongs to the top layer. ``num_layers`` counts shared layers once.
    """
    layers = [(f"layer_{i}", num_layers - i) for i in range(num_layers)]

    def one(path: KeyPath, leaf: jax.Array) -> jax.Array | float:
        name = path_name(path)
        if STACKED in f"{name}/":
            each = [value(*layer) for layer in layers]
            return jnp.stack(each).reshape(-1, *(1,) * (leaf.ndim - 1))
        first, *others = name.split("/")
        part = others[0] if first == "encoder" else first
        if part == "final_layer_norm":
            return value(*layers[-1])
        if part in dict(layers):
            return value(part, dict(layers)[part])
        if first == "encoder":
            return value("relative", num_layers + 1)
        return value(part, num_layers + 1 if part == "embeddings" else 0)

    return jax.tree_util.tree_map_with_path(one, like)


def _unfreeze_steps(config: FinetuneOptimizerConfig, steps_per_epoch: int) -> int:
    """Return the number of steps (at least 1) between the unfreezing of two consecutive layers; 0 if all layers are
    trained from the first step."""
    return max(1, round(config.unfreeze_every * steps_per_epoch)) if config.unfreeze_every else 0


def unfreeze_updates(
    config: FinetuneOptimizerConfig, num_layers: int, like: Params, steps_per_epoch: int
) -> Params | None:
    """Return the index of the first update of each parameter, as a tree that broadcasts to ``like``; None if all
    parameters are updated from the first step."""
    unfreeze_steps = _unfreeze_steps(config, steps_per_epoch)
    if not unfreeze_steps:
        return None
    return jax.tree.map(np.asarray, by_part(lambda _, depth: jnp.int32(depth * unfreeze_steps), num_layers, like))


def lr_multipliers(
    config: FinetuneOptimizerConfig, num_layers: int, like: Params, steps_per_epoch: int
) -> Callable[[jax.Array], Params] | None:
    """Return a function that maps the step to the learning-rate factor of each parameter, as a tree that broadcasts
    to ``like``; None if all factors are 1.

    With layer-wise decay (Howard and Ruder 2018; Clark et al. 2020), the factor is 1 for heads and ``layer_decay``
    for the top layer; each lower layer, and finally the embeddings, multiplies it by ``layer_decay`` again. The
    factor is 0 for ``frozen`` parts and, with ``unfreeze_every``, for layers that are still frozen: the top layer
    is unfrozen after ``unfreeze_every`` epochs, and each lower layer ``unfreeze_every`` epochs after the one above.
    """
    known = ("embeddings", "encoder", "pooler", *(f"layer_{i}" for i in range(num_layers)))
    for part in config.frozen:
        if part not in known:
            raise ValueError(f"optimizer.frozen: {part!r} is not allowed; allowed: {', '.join(known)}")
    if config.layer_decay == 1 and not config.frozen and not config.unfreeze_every:
        return None
    unfreeze_steps = _unfreeze_steps(config, steps_per_epoch)

    def factor(part: str, depth: int, step: jax.Array) -> jax.Array:
        layer_frozen = part.startswith(("layer_", "relative")) and "encoder" in config.frozen
        if part in config.frozen or layer_frozen:
            return jnp.zeros(())
        value = jnp.full((), config.layer_decay**depth)
        return jnp.where(step >= depth * unfreeze_steps, value, 0.0) if unfreeze_steps else value

    return lambda step: by_part(lambda part, depth: factor(part, depth, step), num_layers, like)
