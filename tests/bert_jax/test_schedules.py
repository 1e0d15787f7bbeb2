"""Learning rates of the schedules that recipes of several phases use, against statements of their sources."""

import dataclasses
import math

import numpy as np
import pytest

from bert_jax.config import OptimizerConfig
from bert_jax.optim import make_schedule, warmup_warning


def rates(steps, *, num_steps, first_step=0, **options):
    schedule = make_schedule(OptimizerConfig(learning_rate=2.0, **options), num_steps, first_step)
    return np.asarray([float(schedule(step)) for step in steps])


def one_minus_sqrt(step, total, length, floor):
    """``OneMinusSqrtScheduler`` of AnswerDotAI/ModernBERT, ``src/scheduler.py``."""
    return floor + (1 - floor) * (1 - math.sqrt((step - (total - length)) / length))


@pytest.mark.parametrize("floor", [0.0, 0.001])
def test_one_minus_sqrt_decay(floor):
    options = {"schedule": "wsd", "wsd_decay": "one_minus_sqrt", "final_fraction": floor, "warmup_steps": 20}
    found = rates(range(201), num_steps=200, wsd_decay_steps=50, **options)
    np.testing.assert_allclose(found[:20], 2.0 * np.arange(20) / 20, rtol=1e-6)
    assert (found[20:151] == 2.0).all()
    expected = [2.0 * one_minus_sqrt(step, 200, 50, floor) for step in range(150, 201)]
    np.testing.assert_allclose(found[150:], expected, rtol=1e-5, atol=1e-7)
    # The whole of the run, and a share of it.
    steps = (0, 50, 199)
    found_all = rates(steps, num_steps=200, **options | {"warmup_steps": 0}, wsd_decay_steps=200)
    expected = [2.0 * one_minus_sqrt(step, 200, 200, floor) for step in steps]
    np.testing.assert_allclose(found_all, expected, rtol=1e-5)
    np.testing.assert_array_equal(rates(range(201), num_steps=200, wsd_decay_fraction=0.25, **options), found)


def test_a_warmup_that_does_not_end_is_named():
    config = OptimizerConfig(learning_rate=1e-3, warmup_steps=500)
    assert warmup_warning(config, 501) == ""
    assert warmup_warning(config, 100) == (
        "WARNING: optimizer.warmup_steps: 500 is not less than the 100 steps of the schedule, so the learning rate "
        "only rises, to 0.0002 instead of 0.001; use a tenth of the steps, 10"
    )
    # A later phase whose schedule begins again, and one whose schedule goes on.
    assert warmup_warning(dataclasses.replace(config, restart_schedule=True), 900, 600)
    assert not warmup_warning(config, 900, 600)
    assert not warmup_warning(dataclasses.replace(config, schedule="triangle"), 100)
    assert not warmup_warning(dataclasses.replace(config, warmup_steps=0), 1)


def test_linear_decay_of_a_number_of_steps():
    options = {"schedule": "wsd", "warmup_steps": 0, "wsd_decay_fraction": 0.1}
    found = rates(range(101), num_steps=100, wsd_decay_steps=40, **options)
    np.testing.assert_allclose(found, 2.0 * np.minimum(1, (100 - np.arange(101)) / 40), rtol=1e-6)


def test_triangle_is_that_of_its_source_at_the_same_share_of_the_run():
    """``get_budget_triangle`` of JonasGeiping/cramming with base_percentage and falloff 0.25 (budget-triangle2)."""

    def source(step, total, base=0.25, fall=0.25):
        return min(base + step * (1 - base) / (1 - fall) / total, 1 / fall - step / (total * fall))

    found = rates(range(401), num_steps=400, schedule="triangle")  # the default warmup has no effect
    np.testing.assert_allclose(found, [2.0 * source(step, 400) for step in range(401)], rtol=1e-5, atol=1e-6)
    assert found[0] == 0.5 and found[300] == 2.0 and found[400] == 0.0


@pytest.mark.parametrize(
    "schedule", ["linear", "cosine", "constant", "inverse_sqrt", "wsd", "bert2018", "triangle"]
)
def test_a_restarted_schedule_is_the_old_one_shifted(schedule):
    options = {"schedule": schedule, "warmup_steps": 10}
    plain = rates(range(60), num_steps=60, **options)
    again = rates(range(100, 160), num_steps=160, first_step=100, restart_schedule=True, **options)
    np.testing.assert_array_equal(again, plain)
    # A run that starts before the planned step, because the newest checkpoint is damaged.
    early = rates([90], num_steps=160, first_step=100, restart_schedule=True, **options)
    np.testing.assert_array_equal(early, plain[:1])
    whole = rates(range(160), num_steps=160, **options)
    np.testing.assert_array_equal(rates(range(160), num_steps=160, first_step=100, **options), whole)
