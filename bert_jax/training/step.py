"""One optimizer step and one evaluation step: pure functions of state and batch."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from bert_jax.config import OptimizerConfig
from bert_jax.model import BertModel
from bert_jax.model.dropout import DropoutKey, replica_key
from bert_jax.objectives.pretraining import PretrainingObjective, pretraining_loss
from bert_jax.objectives.sums import Objective, Sums
from bert_jax.optim import Schedule
from bert_jax.parallel import axis_names, constrain_tree
from bert_jax.training.state import TrainState, compute_shardings

Batch = Mapping[str, jax.Array]


def split_microbatches(batch: Batch, count: int) -> dict[str, jax.Array]:
    """[B, ...] to [count, B / count, ...]; microbatch a is rows a, a + count, ...: this split needs no
    communication on any mesh, because every device keeps its own rows."""
    return {
        name: jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1) for name, x in batch.items()
    }


def loss_and_gradients(
    model: BertModel,
    params: Any,
    batch: Batch,
    key: jax.Array | None,
    accumulation_steps: int,
    *,
    objective: Objective | None = None,
    start: Any = None,
    reduction_dtype: str = "float32",
    shardings: Any = None,
) -> tuple[jax.Array, Any, Sums]:
    """Loss of the global batch, its gradients (float32), and the summed metrics; ``objective`` is pretraining's
    where none is given.

    Denominators are taken over the whole batch before the first backward pass, so accumulation gives the same
    gradient as one pass however unequal the microbatches' mask counts are. Each replica (part of the mesh axis
    ``data``) adds up the gradients of its own rows without a word to the others; then they are summed once, in
    ``reduction_dtype``, and laid out as ``shardings`` say (a tree like ``params``).
    """
    objective = objective or PretrainingObjective(model.heads.nsp)
    denominators = objective.denominators(batch)
    mesh = model.mesh
    replicas = 1 if mesh is None else mesh.shape["data"]
    axis = "data" if replicas > 1 else None
    if mesh is not None and shardings is None:
        shardings = compute_shardings(model, mesh)

    def accumulate(
        params: Any,
        start: Any,
        rows: Batch,
        key: jax.Array | None,
        denominators: dict[str, jax.Array],
        replica: jax.Array,
    ) -> tuple[jax.Array, Any, Sums]:
        """What the rows of one replica add to loss, gradients and metrics."""

        def microbatch_loss(params: Any, rows: Batch, key: DropoutKey | None) -> tuple[jax.Array, Sums]:
            sums = objective.sums(model, params, rows, key, start=start, axis=axis)
            return sum(sums[name][0] / denominator for name, denominator in denominators.items()), sums

        def gradients(rows: Batch, index: jax.Array | int) -> tuple[jax.Array, Any, Sums]:
            rows_key: DropoutKey | None = None if key is None else jax.random.fold_in(key, index)
            if key is not None and replicas > 1:
                rows_key = replica_key(rows_key, replica[0], replicas, rows["input_ids"].shape[0])
            (loss, sums), grads = jax.value_and_grad(microbatch_loss, has_aux=True)(params, rows, rows_key)
            return loss, constrain_tree(grads, shardings, mesh), sums

        if accumulation_steps == 1:
            return gradients(rows, 0)
        split = split_microbatches(rows, accumulation_steps)
        shapes = jax.eval_shape(gradients, {name: x[0] for name, x in split.items()}, 0)

        def add(total: Any, inputs: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradients(*inputs)), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, (split, jnp.arange(accumulation_steps)))[0]

    numbers = jnp.arange(replicas)
    if mesh is None or replicas == 1:
        return accumulate(params, start, batch, key, denominators, numbers)
    whole, by_rows = PartitionSpec(), PartitionSpec("data")
    # The compiler cuts what a replica computes over fsdp and tensor; over data nothing is left to it.
    apart = jax.shard_map(
        lambda *inputs: jax.tree.map(lambda x: x[None], accumulate(*inputs)),
        mesh=mesh,
        in_specs=(whole, whole, by_rows, whole, whole, by_rows),
        out_specs=by_rows,
        axis_names={axis for axis, size in mesh.shape.items() if axis == "data" or size == 1},
        check_vma=False,
    )
    loss, grads, sums = apart(params, start, batch, key, denominators, numbers)
    with jax.named_scope("gradient_reduction"):
        grads = sum_replicas(grads, shardings, jnp.dtype(reduction_dtype))
    return jnp.sum(loss), grads, jax.tree.map(jnp.sum, sums)


def sum_replicas(stacked: Any, shardings: Any, dtype: jnp.dtype) -> Any:
    """Sum over the first axis, of which each replica holds one entry, laid out as ``shardings`` say.

    Summed in ``dtype``, returned in float32. Each device sends once what others need: an all-reduce where every
    replica needs the whole, a reduce-scatter where each needs a part.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    replicas = mesh.shape["data"]
    # gloo's reduce-scatter, by which several processes on CPU sum, leaves wrong ends of arrays (jaxlib 0.10.2).
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
    model: BertModel,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    config: OptimizerConfig,
    accumulation_steps: int,
    base_key: jax.Array,
    *,
    objective: Objective | None = None,
    rates: Callable[[jax.Array], Any] | None = None,
    decay_to_start: bool = False,
    reduction_dtype: str = "float32",
    shardings: Any = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """``(state, batch) -> (state, metrics)``; metrics hold (sum, weight) pairs and scalars of this step.

    On a non-finite loss or gradient norm parameters, moments and average stay bitwise unchanged and only
    ``step`` advances, so the data and the dropout key move on. ``shardings`` (a tree like the parameters') are
    those of parameters between steps, summed gradients, moments and average: the update runs on such parts, and
    what the replicas share of the parameters is gathered in float32 at the start of a step. ``rates`` gives each
    parameter's factor on the learning rate at a step, a tree like the parameters'; one of 0 stays as it is. With
    ``decay_to_start`` weight decay pulls towards ``state.start``, so what was drawn towards 0.
    """

    layouts = None if model.mesh is None else compute_shardings(model, model.mesh)
    platform = jax.default_backend() if model.mesh is None else model.mesh.devices.flat[0].platform

    def apply_if(finite: jax.Array, update: Callable[..., Any], state: TrainState, grads: Any) -> Any:
        old = state.params, state.opt_state, state.ema
        if platform == "cpu":
            # A choice of each element would first copy the moments: the update reads what it overwrites.
            return jax.lax.cond(finite, update, lambda state, grads: old, state, grads)
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), update(state, grads), old)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        key = jax.random.fold_in(base_key, state.step)
        # Gathered where a layer first needs them, beside the products of those before.
        whole, start = (
            tree if tree is None or model.mesh is None else constrain_tree(tree, layouts, model.mesh)
            for tree in (state.params, state.start)
        )
        loss, grads, sums = loss_and_gradients(
            model,
            whole,
            batch,
            key,
            accumulation_steps,
            objective=objective,
            start=start,
            reduction_dtype=reduction_dtype,
            shardings=shardings,
        )
        learning_rate = schedule(state.step)
        with jax.named_scope("optimizer"):
            factors = None if rates is None else rates(state.step)
            # What stands still takes no part in norm and clipping: what always does, the compiler leaves out of the
            # backward pass.
            if factors is not None:
                grads = jax.tree.map(lambda g, factor: jnp.where(factor == 0, 0.0, g), grads, factors)
            grad_norm = optax.tree.norm(grads)
            finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

            def update(state: TrainState, grads: Any) -> tuple[Any, Any, Any]:
                """Parameters, optimizer state and average after the step."""
                decayed = state.params
                if decay_to_start:
                    decayed = jax.tree.map(jnp.subtract, state.params, state.start)
                direction, opt_state = optimizer.update(grads, state.opt_state, decayed)
                if factors is not None:
                    direction = jax.tree.map(jnp.multiply, direction, factors)
                params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
                ema = state.ema
                if ema is not None:
                    ema = jax.tree.map(lambda e, p: e + (1 - config.ema_decay) * (p - e), ema, params)
                return params, opt_state, ema

            params, opt_state, ema = apply_if(finite, update, state, grads)
            new_state = state.replace(step=state.step + 1, params=params, opt_state=opt_state, ema=ema)
        tokens = sums["padding_fraction"][1] - sums["padding_fraction"][0]
        blank_rows = (objective or PretrainingObjective(model.heads.nsp)).damaged_rows(batch)
        scalars = {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate, "tokens": tokens}
        return new_state, {"sums": sums, "finite": finite, "blank_rows": blank_rows, **scalars}

    return train_step


def make_eval_step(model: BertModel) -> Callable[[Any, Batch], Sums]:
    """``(params, batch) -> sums`` without dropout."""

    def eval_step(params: Any, batch: Batch) -> Sums:
        output = model.apply({"params": params}, batch, None)
        return pretraining_loss(output.mlm_logits, output.nsp_logits, batch)

    return eval_step
