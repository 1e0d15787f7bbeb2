"""The optimizer step and the evaluation step, as pure functions of the state and a batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from bert_jax.model.dropout import TOKEN_FEATURES, DropoutKey, TokenKey, replica_key
from bert_jax.objectives.objective import (
    Batch,
    Objective,
    PooledObjective,
    StatefulObjective,
    Sums,
    TaughtObjective,
)
from bert_jax.optim import make_schedule
from bert_jax.parallel import axis_names, constrain_tree
from bert_jax.training.state import TrainState, compute_shardings, make_prng_key

# Loss, gradients and metric sums of a set of rows, and the state of the network after them (None: not carried).
Gradients = tuple[jax.Array, Any, Sums, Any]


def split_microbatches(batch: Batch, count: int) -> dict[str, jax.Array]:
    """Reshape features [B, ...] to [count, B / count, ...]; microbatch i consists of rows i, i + count, ...

    Every device keeps its own rows, so the split needs no communication on any mesh.
    """
    return {
        name: jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1) for name, x in batch.items()
    }


def loss_and_gradients(
    objective: Objective,
    params: Any,
    batch: Batch,
    key: jax.Array | None,
    accumulation_steps: int,
    *,
    start: Any = None,
    carry: Any = None,
    taught: Any = None,
    reduction_dtype: str = "float32",
    shardings: Any = None,
) -> Gradients:
    """Return the loss of the global batch, the gradients of the loss (float32), the summed metrics, and the state
    of the network that follows ``carry``, its state before the batch (None: neither is used). ``taught`` are the
    parameters of the teacher (None: no teacher).

    The denominators of the loss are sums over the global batch, so the accumulated gradient equals the gradient of
    the global batch even if the microbatches contain different numbers of masked tokens. Each replica (one index of
    the mesh axis ``data``) accumulates the gradients of its own rows without communication. The gradients are then
    summed over the replicas once, in ``reduction_dtype``, and sharded as ``shardings`` (a tree like ``params``)
    specifies.
    """
    denominators = objective.denominators(batch)
    mesh = objective.mesh
    replicas = 1 if mesh is None else mesh.shape["data"]
    if mesh is not None and shardings is None:
        shardings = compute_shardings(objective.model, mesh)

    def replica_gradients(
        params: Any, fixed: Any, own: Any, key: Any, denominators: dict[str, jax.Array], replica: jax.Array
    ) -> Gradients:
        (start, taught), (rows, carry) = fixed, own

        axis = "data" if replicas > 1 else None

        key_of = functools.partial(_rows_key, objective, key, replica[0], replicas)

        def gradients(rows: Batch, index: jax.Array | int) -> Gradients:
            rows_key = key_of(rows, index)

            def loss_of(params: Any) -> tuple[jax.Array, tuple[Sums, Any]]:
                sums, after = _sums(objective, params, rows, rows_key, carry, start=start, taught=taught, axis=axis)
                return total_loss(sums, denominators), (sums, after)

            (loss, (sums, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            return loss, constrain_tree(grads, shardings, mesh), sums, after

        if isinstance(objective, PooledObjective) and objective.is_pooled and accumulation_steps > 1:
            options = {"key_of": key_of, "start": start, "axis": axis, "shardings": shardings}
            return pooled_gradients(objective, params, rows, denominators, accumulation_steps, **options)
        return accumulate(gradients, rows, accumulation_steps)

    inputs = params, (start, taught), (batch, carry), key, denominators, jnp.arange(replicas)
    if mesh is None or replicas == 1:
        return replica_gradients(*inputs)
    loss, grads, sums, carry = over_replicas(replica_gradients, mesh, inputs)
    with jax.named_scope("gradient_reduction"):
        grads = sum_replicas(grads, shardings, jnp.dtype(reduction_dtype))
    return jnp.sum(loss), grads, jax.tree.map(jnp.sum, sums), carry


def _sums(
    objective: Objective, params: Any, rows: Batch, key: Any, carry: Any,
    *, start: Any, taught: Any, axis: str | None,
) -> tuple[Sums, Any]:  # fmt: skip
    """Return the sums of rows and, if a state is carried, the state after them."""
    if taught is not None:
        assert isinstance(objective, TaughtObjective)
        return objective.taught_sums(params, taught, rows, key, axis=axis), None
    if carry is None:
        return objective.sums(params, rows, key, start=start, axis=axis), None
    assert isinstance(objective, StatefulObjective)
    return objective.carried_sums(params, rows, key, carry)


def _rows_key(
    objective: Objective, key: Any, replica: jax.Array, replicas: int, rows: Batch, index: jax.Array | int
) -> DropoutKey | None:
    """Return the dropout key of microbatch ``index`` of a replica."""
    if key is None:
        return None
    if objective.model.execution.prng == "hash":
        # The same bits in every microbatch and replica.
        return TokenKey.of(key, *(rows[name] for name in TOKEN_FEATURES))
    own = jax.random.fold_in(key, index)
    return own if replicas == 1 else replica_key(own, replica, replicas, rows["input_ids"].shape[0])


def total_loss(sums: Sums, denominators: dict[str, jax.Array]) -> jax.Array:
    """Return the sum of (sum / denominator) over the losses that ``denominators`` names."""
    return sum((sums[name][0] / total for name, total in denominators.items()), jnp.zeros(()))


def pooled_gradients(
    objective: PooledObjective,
    params: Any,
    rows: Batch,
    denominators: dict[str, jax.Array],
    count: int,
    *,
    key_of: Callable[[Batch, jax.Array | int], DropoutKey | None],
    start: Any,
    axis: str | None,
    shardings: Any,
) -> Gradients:
    """Return the gradients of losses that compare all ``rows``, with the memory of one of ``count`` microbatches
    (GradCache; Gao et al. 2021, section 3.2).

    The vectors of all rows are computed without a backward pass; the loss gives the slope of each vector; then
    every microbatch is computed again, and its backward pass starts from the slopes of its vectors.
    """

    def part(sums: Sums) -> jax.Array:
        return total_loss(sums, {name: total for name, total in denominators.items() if name in sums})

    def vectors(params: Any, rows: Batch, index: jax.Array | int) -> tuple[jax.Array, Sums]:
        return objective.vectors(params, rows, key_of(rows, index), start=start)

    split = split_microbatches(rows, count)
    found = jax.lax.map(lambda one: vectors(params, *one)[0], (split, jnp.arange(count)))
    whole = jnp.swapaxes(found, 0, 1).reshape(-1, *found.shape[2:])

    def pooled_loss(whole: jax.Array) -> tuple[jax.Array, Sums]:
        sums = objective.pooled_sums(whole, rows, axis=axis)
        return part(sums), sums

    (loss, sums), slopes = jax.value_and_grad(pooled_loss, has_aux=True)(whole)

    def gradients(rows: Batch, index: jax.Array | int) -> Gradients:
        own = {name: x for name, x in rows.items() if name != "slopes"}

        def loss_of(params: Any) -> tuple[jax.Array, tuple[jax.Array, Sums]]:
            here, others = vectors(params, own, index)
            rest = part(others)
            return jnp.vdot(here, rows["slopes"]) + rest, (rest, others)

        (_, (rest, others)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return rest, constrain_tree(grads, shardings, objective.mesh), others, None

    rest, grads, others, _ = accumulate(gradients, {**rows, "slopes": slopes}, count)
    return loss + rest, grads, sums | others, None


def accumulate(gradients: Callable[[Batch, Any], Gradients], rows: Batch, count: int) -> Gradients:
    """Split ``rows`` into ``count`` microbatches, call ``gradients(microbatch, index)`` for each in turn, and
    return the sum of the results."""
    if count == 1:
        return gradients(rows, 0)
    split = split_microbatches(rows, count)
    shapes = jax.eval_shape(gradients, {name: x[0] for name, x in split.items()}, 0)

    def add(total: Any, inputs: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradients(*inputs)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zeros, (split, jnp.arange(count)))[0]


def over_replicas(replica_gradients: Callable[..., Gradients], mesh: Mesh, inputs: tuple[Any, ...]) -> Gradients:
    """Return the :data:`Gradients` of all replicas, stacked along a new first dimension, and the carried states of
    all rows.

    Each replica calls ``replica_gradients`` with ``inputs``, in which the third input (the rows, and their carried
    states) and the last input (the replica indices) are reduced to the shard of this replica.
    """

    def replica(*inputs: Any) -> Gradients:
        loss, grads, sums, carry = replica_gradients(*inputs)
        return (*jax.tree.map(lambda x: x[None], (loss, grads, sums)), carry)

    whole, by_rows = PartitionSpec(), PartitionSpec("data")
    # Manual over data only; the compiler partitions the work of a replica over fsdp and tensor.
    apart = jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(whole, whole, by_rows, whole, whole, by_rows),
        out_specs=by_rows,
        axis_names={axis for axis, size in mesh.shape.items() if axis == "data" or size == 1},
        check_vma=False,
    )
    return apart(*inputs)


def sum_replicas(stacked: Any, shardings: Any, dtype: jnp.dtype) -> Any:
    """Sum the arrays of a tree over the replicas (the first dimension of each array) and shard the sums as
    ``shardings`` specifies.

    The sums are computed in ``dtype`` and returned as float32. Each array needs one collective: an all-reduce if
    every replica needs the complete array, a reduce-scatter if each replica needs only a shard of the array.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    replicas = mesh.shape["data"]
    # With several processes on CPU, gloo's reduce-scatter returns wrong values at array ends (jaxlib 0.10.2).
    scatters = mesh.devices.flat[0].platform != "cpu"
    leaves, tree = jax.tree.flatten(stacked)
    targets = jax.tree.leaves(shardings)
    parts = [[axis_names(part) for part in sharding.spec] for sharding in targets]
    own = [PartitionSpec("data", *(tuple(a for a in part if a != "data") or None for part in p)) for p in parts]

    def add(*leaves: jax.Array) -> list[jax.Array]:
        sums = []
        for leaf, part in zip(leaves, parts, strict=True):
            x = leaf[0].astype(dtype)
            cut = [dim for dim, axes in enumerate(part) if "data" in axes]
            if cut and scatters:
                x = jax.lax.psum_scatter(x, "data", scatter_dimension=cut[0], tiled=True)
            else:
                x = jax.lax.psum(x, "data")
                if cut:
                    size = x.shape[cut[0]] // replicas
                    x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("data") * size, size, cut[0])
            sums.append(x.astype(jnp.float32))
        return sums

    mapped = jax.shard_map(
        add,
        mesh=mesh,
        in_specs=tuple(own),
        out_specs=[sharding.spec for sharding in targets],
        check_vma=False,
    )
    return jax.tree.unflatten(tree, mapped(*leaves))


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    lr_multipliers: Callable[[jax.Array], Any] | None = None,
    decay_toward_start: bool = False,
    shardings: Any = None,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """Return a training step ``(state, batch, taught) -> (state, metrics)``; metrics are (sum, weight) pairs and
    scalars, ``taught`` the parameters of the teacher of a ``TaughtObjective`` or None.

    If the loss or the gradient norm is not finite, only ``state.step`` changes. A step gathers the parameters from
    all replicas in float32; each device updates the part that ``shardings`` (a tree like them) assigns to it.
    ``lr_multipliers`` maps the step to a tree of factors of the rate. With ``decay_toward_start``, weight decay
    pulls toward ``state.start`` (0 for randomly initialized parameters).
    """
    config, mesh, training = objective.config, objective.mesh, objective.config.training
    layouts = None if mesh is None else compute_shardings(objective.model, mesh)
    schedule = make_schedule(config.optimizer, training.num_steps, training.first_step)
    base_key, reduction = make_prng_key(config.execution, training.seed), training.gradient_reduction_dtype

    def train_step(state: TrainState, batch: Batch, taught: Any = None) -> tuple[TrainState, dict[str, Any]]:
        key = jax.random.fold_in(base_key, state.step)
        # The compiler gathers the parameters of a layer during the products of the layers before it.
        whole, start = (
            tree if tree is None or mesh is None else constrain_tree(tree, layouts, mesh)
            for tree in (state.params, state.start)
        )
        loss, grads, sums, after = loss_and_gradients(
            objective, whole, batch, key, training.accumulation_steps,
            start=start, carry=state.carry, taught=taught, shardings=shardings, reduction_dtype=reduction,
        )  # fmt: skip
        learning_rate = schedule(state.step)
        with jax.named_scope("optimizer"):
            factors = None if lr_multipliers is None else lr_multipliers(state.step)
            # The gradient of a frozen parameter (factor 0) counts neither in the norm nor in clipping.
            if factors is not None:
                grads = jax.tree.map(lambda g, factor: jnp.where(factor == 0, 0.0, g), grads, factors)
            grad_norm = optax.tree.norm(grads)
            finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

            def update(state: TrainState, grads: Any) -> tuple[Any, Any, Any, Any]:
                decayed, ema = state.params, state.ema
                if decay_toward_start:
                    decayed = jax.tree.map(jnp.subtract, decayed, state.start)
                direction, opt_state = optimizer.update(grads, state.opt_state, decayed)
                if factors is not None:
                    direction = jax.tree.map(jnp.multiply, direction, factors)
                params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
                if ema is not None:
                    ema = jax.tree.map(lambda e, p: e + (1 - config.optimizer.ema_decay) * (p - e), ema, params)
                return params, opt_state, ema, after

            params, opt_state, ema, carry = _if_finite(finite, update, state, grads, mesh)
            new_state = state.replace(step=state.step + 1, params=params, opt_state=opt_state, ema=ema, carry=carry)
        metrics = {"sums": sums, "finite": finite, "blank_rows": objective.damaged_rows(batch["sequence_ids"])}
        metrics |= {"loss": loss, "grad_norm": grad_norm, "last": {"learning_rate": learning_rate}}
        return new_state, metrics | {"tokens": jnp.subtract(*reversed(sums["padding_fraction"]))}

    return train_step


def _if_finite(
    finite: jax.Array, update: Callable[..., Any], state: TrainState, grads: Any, mesh: Mesh | None
) -> tuple[Any, Any, Any, Any]:
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    old = state.params, state.opt_state, state.ema, state.carry
    if platform == "cpu":
        # jnp.where would copy the moments first, because the update overwrites its inputs.
        return jax.lax.cond(finite, update, lambda state, grads: old, state, grads)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), update(state, grads), old)


def make_eval_step(objective: Objective) -> Callable[..., Sums]:
    """Return an evaluation step ``(params, batch, taught) -> sums``, which runs without dropout; ``taught``: see
    :func:`make_train_step`."""

    def eval_step(params: Any, batch: Batch, taught: Any = None) -> Sums:
        if taught is not None:
            assert isinstance(objective, TaughtObjective)
            return objective.taught_sums(params, taught, batch, None, axis=None)
        return objective.sums(params, batch, None, start=None, axis=None)

    return eval_step
