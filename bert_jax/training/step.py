"""The optimizer step and the evaluation step, as pure functions of the state and a batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from bert_jax.model.canonical import Params, Shardings
from bert_jax.model.dropout import TOKEN_FEATURES, DropoutKey, TokenKey, replica_key
from bert_jax.objectives.objective import Aux, Batch, Fixed, Gradients, Objective, Replica, Sums
from bert_jax.optim import make_schedule
from bert_jax.parallel import constrain_tree
from bert_jax.training.replicas import over_replicas, sum_replicas
from bert_jax.training.state import TrainState, compute_shardings, prng_impl

# Parameters, optimizer state, moving average and carried arrays after a step.
Updated = tuple[Params, optax.OptState, Params | None, Params | None]


class StepValues(TypedDict):
    """Metrics of one step on the host."""

    loss: float
    grad_norm: float
    # 1: the loss and the gradients are finite, so the step was not skipped.
    finite: float
    tokens: float
    blank_rows: float
    # (sum, weight) by name.
    sums: dict[str, tuple[float, float]]
    # Values that are not averaged over steps.
    last: dict[str, float]


@struct.dataclass
class StepMetrics:
    """Metrics of one step, packed into one float32 array.

    The host therefore reads them in one transfer instead of about twenty.
    """

    values: jax.Array  # float32[number of metrics]
    tree: jax.tree_util.PyTreeDef = struct.field(pytree_node=False)

    @classmethod
    def pack(cls, metrics: Mapping[str, Any]) -> "StepMetrics":
        """Pack a tree of scalar ``metrics``; called inside the compiled step."""
        leaves, tree = jax.tree.flatten(metrics)
        return cls(jnp.stack([leaf.astype(jnp.float32) for leaf in leaves]), tree)

    def unpack(self) -> StepValues:
        """Wait for the step and return its metrics as floats, in a tree with the original structure."""
        metrics: StepValues = jax.tree.unflatten(self.tree, np.asarray(self.values).tolist())
        return metrics


# State after a step, and the metrics of the step.
Stepped = tuple[TrainState, StepMetrics]


def loss_and_gradients(
    objective: Objective,
    params: Params,
    batch: Batch,
    key: jax.Array | None,
    accumulation_steps: int,
    *,
    aux: Aux = Aux({}),  # noqa: B008 (not changed)
    reduction_dtype: str = "float32",
    shardings: Shardings | None = None,
) -> Gradients:
    """Return the loss of the global batch, the gradients of the loss (float32), the summed metrics, and the arrays
    that replace ``aux.carried``.

    The denominators of the loss are sums over the global batch, so the accumulated gradient equals the gradient of
    the global batch even if the microbatches contain different numbers of masked tokens. Each replica (one index of
    the mesh axis ``data``) accumulates the gradients of its local rows without communication. The gradients are
    then summed over the replicas once, in ``reduction_dtype``, and sharded as ``shardings`` (a tree like
    ``params``) specifies.
    """
    denominators = objective.denominators(batch)
    mesh = objective.mesh
    replicas = 1 if mesh is None else mesh.shape["data"]
    if mesh is not None and shardings is None:
        shardings = compute_shardings(objective.model, mesh)

    def replica_gradients(
        params: Params, fixed: Fixed, own: tuple[Batch, Params | None], key: jax.Array | None,
        denominators: dict[str, jax.Array], number: jax.Array,
    ) -> Gradients:  # fmt: skip
        rows, carried = own
        replica = Replica(
            Aux(fixed, carried), denominators, accumulation_steps,
            key_of=functools.partial(_rows_key, objective, key, number[0], replicas),
            axis="data" if replicas > 1 else None,
            constrain=functools.partial(constrain_tree, shardings=shardings, mesh=mesh),
        )  # fmt: skip
        return objective.gradients(params, rows, replica)

    inputs = params, aux.fixed, (batch, aux.carried), key, denominators, jnp.arange(replicas)
    if mesh is None or replicas == 1:
        return replica_gradients(*inputs)
    loss, grads, sums, carried = over_replicas(replica_gradients, mesh, inputs)
    with jax.named_scope("gradient_reduction"):
        grads = sum_replicas(grads, shardings, jnp.dtype(reduction_dtype))
    return jnp.sum(loss), grads, jax.tree.map(jnp.sum, sums), carried


def _rows_key(
    objective: Objective, key: jax.Array | None, replica: jax.Array, replicas: int,
    rows: Batch, index: jax.Array | int,
) -> DropoutKey | None:  # fmt: skip
    """Return the dropout key of microbatch ``index`` of a replica."""
    if key is None:
        return None
    if objective.model.execution.prng == "hash":
        # The same bits in every microbatch and replica.
        return TokenKey.of(key, *(rows[name] for name in TOKEN_FEATURES))
    own = jax.random.fold_in(key, index)
    return own if replicas == 1 else replica_key(own, replica, replicas, rows["input_ids"].shape[0])


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    lr_multipliers: Callable[[jax.Array], Params] | None = None,
    decay_toward_start: bool = False,
    shardings: Shardings | None = None,
) -> Callable[[TrainState, Batch, Fixed, jax.Array], Stepped]:
    """Return a training step ``(state, batch, fixed, seed_words) -> (state, metrics)``; metrics are (sum, weight)
    pairs and scalars, ``fixed`` is ``objective.fixed``, ``seed_words`` are ``key_words`` of the key for dropout.

    If the loss or the gradient norm is not finite, only ``state.step`` changes. A step gathers the parameters from
    all replicas in float32; each device updates the part that ``shardings`` (a tree like them) assigns to it.
    ``lr_multipliers`` maps the step to a tree of factors of the rate. With ``decay_toward_start``, weight decay
    pulls toward ``state.start`` (0 for randomly initialized parameters).
    """
    config, mesh, training = objective.config, objective.mesh, objective.config.training
    layouts = None if mesh is None else compute_shardings(objective.model, mesh)
    schedule = make_schedule(config.optimizer, training.num_steps, training.first_step)
    impl, reduction = prng_impl(config.execution), training.gradient_reduction_dtype

    def train_step(state: TrainState, batch: Batch, fixed: Fixed, seed_words: jax.Array) -> Stepped:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed_words, impl=impl), state.step)
        # The compiler gathers the parameters of a layer during the products of the layers before it.
        whole, start = constrain_tree(state.params, layouts, mesh), constrain_tree(state.start, layouts, mesh)
        loss, grads, sums, carried = loss_and_gradients(
            objective, whole, batch, key, training.accumulation_steps,
            aux=Aux({"start": start, **fixed}, state.carry), shardings=shardings, reduction_dtype=reduction,
        )  # fmt: skip
        learning_rate = schedule(state.step)
        with jax.named_scope("optimizer"):
            factors = None if lr_multipliers is None else lr_multipliers(state.step)
            # The gradient of a frozen parameter (factor 0) counts neither in the norm nor in clipping.
            if factors is not None:
                grads = jax.tree.map(lambda g, factor: jnp.where(factor == 0, 0.0, g), grads, factors)
            grad_norm = optax.tree.norm(grads)
            finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

            def update(state: TrainState, grads: Params) -> Updated:
                decayed, ema = state.params, state.ema
                if decay_toward_start:
                    decayed = jax.tree.map(jnp.subtract, decayed, state.start)
                direction, opt_state = optimizer.update(grads, state.opt_state, decayed)
                if factors is not None:
                    direction = jax.tree.map(jnp.multiply, direction, factors)
                params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
                if ema is not None:
                    ema = jax.tree.map(lambda e, p: e + (1 - config.optimizer.ema_decay) * (p - e), ema, params)
                return params, opt_state, ema, carried

            params, opt_state, ema, carry = _if_finite(finite, update, state, grads, mesh)
            new_state = dataclasses.replace(
                state, step=state.step + 1, params=params, opt_state=opt_state, ema=ema, carry=carry
            )
        metrics = {"sums": sums, "finite": finite, "blank_rows": objective.damaged_rows(batch["sequence_ids"])}
        metrics |= {"loss": loss, "grad_norm": grad_norm, "last": {"learning_rate": learning_rate}}
        metrics |= {"tokens": jnp.subtract(*reversed(sums["padding_fraction"]))}
        return new_state, StepMetrics.pack(metrics)

    return train_step


def _if_finite(
    finite: jax.Array, update: Callable[[TrainState, Params], Updated], state: TrainState, grads: Params,
    mesh: Mesh | None,
) -> Updated:  # fmt: skip
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    old = state.params, state.opt_state, state.ema, state.carry
    if platform == "cpu":
        # jnp.where would copy the moments first, because the update overwrites its inputs.
        return jax.lax.cond(finite, update, lambda state, grads: old, state, grads)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), update(state, grads), old)


def make_eval_step(objective: Objective) -> Callable[[Params, Batch, Fixed], Sums]:
    """Return an evaluation step ``(params, batch, fixed) -> sums``, which runs without dropout and carries nothing;
    ``fixed`` is ``objective.fixed``."""

    def eval_step(params: Params, batch: Batch, fixed: Fixed) -> Sums:
        return objective.sums(params, Aux(fixed), batch, None, axis=None)[0]

    return eval_step
