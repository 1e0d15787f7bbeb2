"""Gradients of losses that compare the rows of all microbatches (GradCache; Gao et al. 2021, section 3.2)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bert_jax.model.canonical import Params
from bert_jax.model.dropout import DropoutKey
from bert_jax.objectives.objective import (
    Added,
    Batch,
    Gradients,
    Replica,
    Sums,
    accumulate,
    split_microbatches,
    total_loss,
)


def cached_gradients(
    vectors_of: Callable[[Params, Batch, DropoutKey | None], tuple[jax.Array, Sums]],
    compare: Callable[[jax.Array], Sums],
    params: Params,
    rows: Batch,
    replica: Replica,
) -> Gradients:
    """Return the gradients of losses that compare all ``rows`` of a replica, with the memory of one microbatch.

    The vectors of all rows are computed without a backward pass; the loss gives the slope of each vector; then
    every microbatch is computed again, and its backward pass starts from the slopes of its vectors.

    Args:
        vectors_of: returns the vectors [B, ...] of some rows, from the parameters, the rows and their dropout key,
            and the sums of the losses and metrics that need no other rows.
        compare: returns the sums of the losses and metrics that compare the vectors of all rows.
    """

    def part(sums: Sums) -> jax.Array:
        return total_loss(sums, {name: total for name, total in replica.denominators.items() if name in sums})

    def vectors(params: Params, rows: Batch, index: jax.Array | int) -> tuple[jax.Array, Sums]:
        return vectors_of(params, rows, replica.key_of(rows, index))

    split = split_microbatches(rows, replica.count)
    found = jax.lax.map(lambda one: vectors(params, *one)[0], (split, jnp.arange(replica.count)))
    whole = jnp.swapaxes(found, 0, 1).reshape(-1, *found.shape[2:])

    def compared(whole: jax.Array) -> tuple[jax.Array, Sums]:
        sums = compare(whole)
        return part(sums), sums

    (loss, sums), slopes = jax.value_and_grad(compared, has_aux=True)(whole)

    def sloped(params: Params, rows: Batch, index: jax.Array | int) -> tuple[jax.Array, Added]:
        own = {name: x for name, x in rows.items() if name != "slopes"}
        here, others = vectors(params, own, index)
        rest = part(others)
        return jnp.vdot(here, rows["slopes"]) + rest, (rest, others, replica.aux.carried)

    rest, grads, others, carried = accumulate(sloped, params, {**rows, "slopes": slopes}, replica)
    return loss + rest, grads, sums | others, carried
