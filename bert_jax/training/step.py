"""One optimizer step and one evaluation step: pure functions of state and batch."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bert_jax.config import OptimizerConfig
from bert_jax.model import BertModel
from bert_jax.objectives.pretraining import pretraining_denominators, pretraining_loss
from bert_jax.objectives.sums import Sums
from bert_jax.optim import Schedule
from bert_jax.training.state import TrainState

Batch = Mapping[str, jax.Array]


def split_microbatches(batch: Batch, count: int) -> dict[str, jax.Array]:
    """[B, ...] to [count, B / count, ...]; microbatch a is rows a, a + count, ...: this split needs no
    communication on any mesh, because every device keeps its own rows."""
    return {
        name: jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1) for name, x in batch.items()
    }


def loss_and_gradients(
    model: BertModel, params: Any, batch: Batch, key: jax.Array | None, accumulation_steps: int
) -> tuple[jax.Array, Any, Sums]:
    """Loss of the global batch, its gradients, and the summed metrics.

    Denominators are taken over the whole batch before the first backward pass, so accumulation gives the same
    gradient as one pass however unequal the microbatches' mask counts are.
    """
    denominators = pretraining_denominators(batch, model.heads.nsp)

    def microbatch(params: Any, rows: Batch, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        output = model.apply({"params": params}, rows, key)
        sums = pretraining_loss(output.mlm_logits, output.nsp_logits, rows)
        return sum(sums[name][0] / denominator for name, denominator in denominators.items()), sums

    def gradients(rows: Batch, index: jax.Array | int) -> tuple[jax.Array, Any, Sums]:
        rows_key = None if key is None else jax.random.fold_in(key, index)
        (loss, sums), grads = jax.value_and_grad(microbatch, has_aux=True)(params, rows, rows_key)
        return loss, grads, sums

    if accumulation_steps == 1:
        return gradients(batch, 0)
    rows = split_microbatches(batch, accumulation_steps)
    first = gradients({name: x[0] for name, x in rows.items()}, 0)

    def add(total: Any, inputs: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradients(*inputs)), None

    rest = ({name: x[1:] for name, x in rows.items()}, jnp.arange(1, accumulation_steps))
    return jax.lax.scan(add, first, rest)[0]


def make_train_step(
    model: BertModel,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    config: OptimizerConfig,
    accumulation_steps: int,
    base_key: jax.Array,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """``(state, batch) -> (state, metrics)``; metrics hold (sum, weight) pairs and scalars of this step.

    On a non-finite loss or gradient norm parameters, moments and average stay bitwise unchanged and only
    ``step`` advances, so the data and the dropout key move on.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        key = jax.random.fold_in(base_key, state.step)
        loss, grads, sums = loss_and_gradients(model, state.params, batch, key, accumulation_steps)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        learning_rate = schedule(state.step)
        direction, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
        ema = state.ema
        if ema is not None:
            ema = jax.tree.map(lambda e, p: e + (1 - config.ema_decay) * (p - e), ema, params)

        def keep_if_finite(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old)

        new_state = TrainState(
            step=state.step + 1,
            params=jax.tree.map(keep_if_finite, params, state.params),
            opt_state=jax.tree.map(keep_if_finite, opt_state, state.opt_state),
            ema=None if ema is None else jax.tree.map(keep_if_finite, ema, state.ema),
        )
        tokens = sums["padding_fraction"][1] - sums["padding_fraction"][0]
        scalars = {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate, "tokens": tokens}
        return new_state, {"sums": sums, "finite": finite, **scalars}

    return train_step


def make_eval_step(model: BertModel) -> Callable[[Any, Batch], Sums]:
    """``(params, batch) -> sums`` without dropout."""

    def eval_step(params: Any, batch: Batch) -> Sums:
        output = model.apply({"params": params}, batch, None)
        return pretraining_loss(output.mlm_logits, output.nsp_logits, batch)

    return eval_step
