"""Evaluation on held-out batches."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import DataBudgetError
from bert_jax.parallel import to_global
from bert_jax.process import hosts


def evaluate_held_out(
    batches: Iterable[Mapping[str, np.ndarray]],
    eval_step: Callable[[Any, Mapping[str, jax.Array]], Any],
    params: Any,
    mesh: Mesh,
    batch_size: int,
    before_batch: Callable[[], None] = lambda: None,
    host_timeout: float = 300.0,
) -> dict[str, Any]:
    """Means over held-out ``batches`` (dropout off): the (sum, weight) pairs of all rows, divided once.
    ``before_batch`` may raise to break it off; ``DataBudgetError`` of one process is raised on all of them."""
    totals: dict[str, np.ndarray] = {}
    in_flight: list[Any] = []

    def drain(leave: int) -> None:
        while len(in_flight) > leave:
            for name, pair in jax.device_get(in_flight.pop(0)).items():
                totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair, np.float64)

    problem = ""
    try:
        for batch in batches:
            before_batch()
            in_flight.append(eval_step(params, to_global(batch, mesh, batch_size)))
            drain(2)
    except DataBudgetError as error:
        problem = str(error)
    drain(0)
    problems = [text for text in hosts.all_gather_text("evaluation", problem, host_timeout) if text]
    if problems:
        raise DataBudgetError(problems[0])
    values: dict[str, Any] = {name: total / weight for name, (total, weight) in totals.items() if weight}
    values["loss"] = values.get("mlm_loss", 0.0) + values.get("nsp_loss", 0.0)
    values["targets"] = int(totals["mlm_loss"][1]) if "mlm_loss" in totals else 0
    return values
