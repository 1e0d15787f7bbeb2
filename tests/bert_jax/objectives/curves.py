"""What the tests of loss curves share: 50 whole training steps of an objective from given weights."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from golden.cases import CURVE_PEAK, CURVE_STEPS, CURVE_WARMUP, learning_rate
from support import relative_difference

from bert_jax.config import MeshConfig
from bert_jax.model import from_canonical, to_canonical
from bert_jax.objectives.objective import Objective
from bert_jax.optim import make_optimizer
from bert_jax.parallel import make_mesh, to_global
from bert_jax.training.state import TrainState, abstract_params, abstract_state, key_words, make_prng_key
from bert_jax.training.step import loss_and_gradients, make_train_step


def metrics_of_steps(
    objective: Objective, given: Mapping[str, np.ndarray], batch_of: Callable[[int], dict[str, np.ndarray]]
) -> Iterator[dict[str, Any]]:
    """Train with AdamW, clipping and the schedule of the recorded curves from the canonical parameters ``given``;
    yield the metrics of every step."""
    config = objective.config
    schedule = {"learning_rate": CURVE_PEAK, "warmup_steps": CURVE_WARMUP, "schedule": "linear", "clip_norm": 1.0}
    optimizer = make_optimizer(dataclasses.replace(config.optimizer, **schedule))
    objective.config = dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, **schedule),
        training=dataclasses.replace(config.training, num_steps=CURVE_STEPS),
    )
    params = from_canonical(given, nn.unbox(abstract_params(objective.model)), config.model.vocab_size)
    step = jax.jit(make_train_step(objective, optimizer), donate_argnums=0)
    words = key_words(make_prng_key(config.execution, config.training.seed))
    state = TrainState(np.zeros((), np.int32), params, jax.jit(optimizer.init)(params))
    for i in range(CURVE_STEPS):
        state, packed = step(state, batch_of(i), objective.fixed, words)
        metrics = packed.unpack()
        assert abs(float(metrics["last"]["learning_rate"]) - learning_rate(i, bert2018=False)) <= 1e-9
        yield metrics


def assert_curve(
    objective: Objective,
    given: Mapping[str, np.ndarray],
    batch_of: Callable[[int], dict[str, np.ndarray]],
    recorded: Mapping[str, np.ndarray],
    *,
    total: str,
    names: Mapping[str, float],
    falls_to: float,
) -> None:
    """Compare 50 steps with ``recorded``: the total loss, recorded as ``total``, and the losses in ``names``,
    recorded times the given weight, to 1e-4 of their values; ``grad_norm`` to 1e-3. The last total is below
    ``falls_to`` times the first."""
    assert len(recorded[total]) == CURVE_STEPS and recorded[total][-1] < falls_to * recorded[total][0]
    worst = dict.fromkeys((total, *names), 0.0)
    for i, metrics in enumerate(metrics_of_steps(objective, given, batch_of)):
        found = {}
        for name, weight in names.items():
            value, count = metrics["sums"][name]
            found[name] = weight * float(value) / float(count)
        for name, value in (found | {total: float(metrics["loss"])}).items():
            assert value == pytest.approx(recorded[name][i], rel=1e-4), f"{name}, step {i}"
            worst[name] = max(worst[name], abs(value / recorded[name][i] - 1))
        assert float(metrics["grad_norm"]) == pytest.approx(recorded["grad_norm"][i], rel=1e-3), f"step {i}"
    print(", ".join(f"{name} {value:.1e}" for name, value in worst.items()))


def assert_as_one(
    make: Callable[[Any], Objective], given: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]
) -> None:
    """Compare the loss and the gradients of 2 microbatches on 4 devices with those of one batch, to 1e-6.
    ``make`` returns the objective on a mesh (None: one device)."""

    def computed(parts: int, devices: int) -> tuple[float, dict[str, Any]]:
        mesh = make_mesh(MeshConfig(data=2, fsdp=2), jax.devices()[:4]) if devices > 1 else None
        objective = make(mesh)
        vocabulary = objective.config.model.vocab_size
        params = from_canonical(given, nn.unbox(abstract_params(objective.model)), vocabulary)
        rows = dict(batch)
        if mesh is not None:
            optimizer = make_optimizer(objective.config.optimizer)
            like = abstract_state(objective.config, objective.model, optimizer, mesh).params
            params = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, like))
            rows = to_global(rows, mesh, len(batch["input_ids"]))
        compute = jax.jit(lambda p, b: loss_and_gradients(objective, p, b, None, parts))
        loss, gradients, *_ = compute(params, rows)
        found = to_canonical(jax.device_get(gradients), vocabulary)
        # The true gradient of the biases of keys is 0.
        return float(loss), {name: array for name, array in found.items() if not name.endswith("key/bias")}

    loss, gradients = computed(1, 1)
    other, others = computed(2, 4)
    assert other == pytest.approx(loss, rel=1e-6)
    assert relative_difference(others, gradients) <= 1e-6
