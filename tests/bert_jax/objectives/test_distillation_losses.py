"""Losses between a student and a teacher: against torch (``tests/golden/record_distillation.py``), no gradient of
the teacher, padding of vocabularies and rows."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.objectives.distillation_losses import (
    cosine_distance_loss,
    relation_loss,
    score_loss,
    soft_target_loss,
    squared_error_loss,
)

with np.load(Path(__file__).parents[2] / "golden" / "fixtures" / "distillation.npz") as stored:
    RECORDED = dict(stored)
GIVEN = {name.removeprefix("input/"): array for name, array in RECORDED.items() if name.startswith("input/")}
IDS = GIVEN["sequence_ids"]
TOKENS = (IDS > 0).astype(np.float32)
HEADS, RELATION_HEADS, TEMPERATURE = 3, 4, 2.0


def heads(x):
    return x.reshape(*x.shape[:2], HEADS, -1)


# Case -> names of the arrays of the student and of the teacher, and the loss of both.
CASES = {
    "soft": (
        "student_logits", "teacher_logits", lambda s, t: soft_target_loss("x", s, t, GIVEN["weights"], TEMPERATURE)
    ),
    "cosine": ("student", "teacher", lambda s, t: cosine_distance_loss("x", s, t, TOKENS)),
    "squared": ("student", "teacher", lambda s, t: squared_error_loss("x", s, t, TOKENS)),
    "scores": (
        "student", "teacher", lambda s, t: score_loss(
            "x", (heads(s), heads(GIVEN["student_keys"])), (heads(t), heads(GIVEN["teacher_keys"])), IDS
        ),
    ),
    "relations": ("student", "wide_teacher", lambda s, t: relation_loss("x", s, t, IDS, RELATION_HEADS)),
}  # fmt: skip


def value(function, student, teacher):
    total, weight = function(student, teacher)["x_loss"]
    return total / weight


@pytest.mark.parametrize("case", CASES)
def test_equals_torch(case):
    student, teacher, function = CASES[case]
    loss, (gradient, of_teacher) = jax.jit(
        jax.value_and_grad(lambda *both: value(function, *both), argnums=(0, 1))
    )(GIVEN[student], GIVEN[teacher])
    expected = RECORDED[f"{case}/gradient"]
    assert float(loss) == pytest.approx(float(RECORDED[f"{case}/loss"]), rel=1e-5)
    assert np.linalg.norm(gradient - expected) <= 1e-5 * np.linalg.norm(expected)
    assert not np.any(of_teacher)  # exactly 0


def test_a_student_that_is_its_teacher_has_no_loss():
    for case in ("soft", "cosine", "squared", "relations"):
        _, teacher, function = CASES[case]
        assert abs(float(value(function, GIVEN[teacher], GIVEN[teacher]))) < 1e-6, case
    both = heads(GIVEN["teacher"]), heads(GIVEN["teacher_keys"])
    assert float(score_loss("x", both, both, IDS)["x_loss"][0]) == 0


def test_pieces_that_pad_the_vocabulary_count_nothing():
    student, teacher = GIVEN["student_logits"], GIVEN["teacher_logits"]
    padded = [np.pad(x, [(0, 0), (0, 0), (0, 5)], constant_values=-np.inf) for x in (student, teacher)]
    function = CASES["soft"][2]
    loss, gradient = jax.value_and_grad(lambda x: value(function, x, padded[1]))(jnp.asarray(padded[0]))
    assert float(loss) == pytest.approx(float(value(function, student, teacher)), rel=1e-6)
    assert not np.any(gradient[..., -5:])
    np.testing.assert_allclose(gradient[..., :-5], RECORDED["soft/gradient"], rtol=0, atol=1e-6)


def test_padding_changes_nothing():
    for case, (student, teacher, function) in CASES.items():
        if case == "soft":
            continue
        x = GIVEN[student]
        changed = np.where(IDS[..., None] > 0, x, 100.0)
        assert float(value(function, changed, GIVEN[teacher])) == float(value(function, x, GIVEN[teacher])), case
