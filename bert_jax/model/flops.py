"""Counts of the floating-point operations of a traced program.

Only matrix products and convolutions are counted; a multiplication and an addition are two operations. The body of
a loop is counted once per iteration (compilers count it once). The count of a kernel is its cost estimate.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend.core import Jaxpr

from bert_jax.batch import feature_shapes
from bert_jax.config.architecture import ModelConfig
from bert_jax.config.schema import ExecutionConfig
from bert_jax.model.bert import BertForPretraining, bert_output, present
from bert_jax.model.canonical import Params, abstract_params


def traced_flops(function: Callable[..., object], *arguments: object) -> Counter[str]:
    """Return the number of operations of ``function`` on ``arguments`` (arrays or ``jax.ShapeDtypeStruct``), by
    named scope.

    Operations that the trace contains twice (``jax.checkpoint``) are counted twice. Raises ``ValueError`` for a
    matrix product in a loop whose number of iterations is unknown.
    """
    counts: Counter[str] = Counter()
    _add(jax.make_jaxpr(function)(*arguments).jaxpr, 1, "", counts)
    return counts


def _add(jaxpr: Jaxpr, times: int, scope: str, counts: Counter[str]) -> None:
    for equation in jaxpr.eqns:
        kind, params = equation.primitive.name, equation.params
        here = f"{scope}/{equation.source_info.name_stack}"
        if kind == "pallas_call":
            estimate = params["cost_estimate"]
            counts[here] += times * estimate.flops if estimate is not None else 0
        elif kind in ("dot_general", "conv_general_dilated"):
            counts[here] += times * 2 * _multiplications(equation)
        elif kind == "cond":
            branches = [Counter[str]() for _ in params["branches"]]
            for branch, found in zip(params["branches"], branches, strict=True):
                _add(branch.jaxpr, times, here, found)
            largest = max(branches, key=Counter.total)
            counts += largest
        else:
            rounds = params["length"] if kind == "scan" else 1
            if kind == "shard_map":  # its body is the program of one device
                rounds = math.prod(params["mesh"].shape[axis] for axis in params["manual_axes"])
            before = counts.total()
            for inner in _inner(params):
                _add(inner, times * rounds, here, counts)
            if kind == "while" and counts.total() > before:
                raise ValueError(
                    f"{here}: cannot count the matrix products in a loop whose number of iterations is unknown; "
                    "use jax.lax.scan"
                )


def _multiplications(equation: Any) -> int:
    left, right = (variable.aval.shape for variable in equation.invars)
    size = math.prod(equation.outvars[0].aval.shape)
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = numbers
        return size * math.prod(left[dim] for dim in contracted)
    return size * math.prod(right) // right[numbers.rhs_spec[0]]


def _inner(params: Mapping[str, object]) -> Iterator[Jaxpr]:
    """Yield the jaxprs among the parameters of an equation, such as the body of a loop."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            item = getattr(item, "jaxpr", item)
            if isinstance(item, Jaxpr):
                yield item


@functools.cache
def training_flops(model: ModelConfig, *, seq_length: int, max_predictions: int, has_nsp: bool) -> Counter[str]:
    """Return the number of operations for one pretraining sequence, forward and backward, by named scope.

    The model is traced without padding of the vocabulary, without kernels and without recomputation.
    Recomputation therefore lowers the model FLOP utilization.

    Args:
        model: sizes of the network.
        seq_length: tokens per sequence, padding included.
        max_predictions: positions per sequence for which vocabulary logits are computed, including filler
            positions.
        has_nsp: True for a model with a pooler and a sentence-pair head.
    """
    execution = ExecutionConfig(scan_layers=True, vocab_multiple=1, attention="xla", residual_norm="xla")
    network = BertForPretraining(model, execution, has_nsp)
    shapes = feature_shapes(1, seq_length, max_predictions).items()
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes}

    def loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        output = bert_output(network.apply({"params": params}, batch))
        mlm_sum = jnp.sum(present(output.mlm_logits))
        return mlm_sum + (jnp.sum(present(output.nsp_logits)) if has_nsp else 0)

    return traced_flops(jax.grad(loss), nn.unbox(abstract_params(network)), batch)


def training_flops_per_sequence(
    model: ModelConfig, *, seq_length: int, max_predictions: int, has_nsp: bool = True
) -> int:
    """Return the sum of :func:`training_flops` over all scopes."""
    return training_flops(model, seq_length=seq_length, max_predictions=max_predictions, has_nsp=has_nsp).total()
