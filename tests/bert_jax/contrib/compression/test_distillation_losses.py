"""Losses between a student and a teacher: against torch (``tests/golden/record_distillation.py``), no gradient of
the teacher, padding of vocabularies and rows."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.contrib.compression.distillation_losses import (
    cosine_distance_loss,
    relation_loss,
    score_loss,
    soft_target_loss,
    squared_error_loss,
)
from bert_jax.contrib.compression.finetuning.kinds import Labels, Places, Values
from bert_jax.contrib.compression.finetuning.soft_targets import first_tokens, layers_loss

with np.load(Path(__file__).parents[3] / "golden" / "fixtures" / "distillation.npz") as stored:
    RECORDED = dict(stored)
GIVEN = {name.removeprefix("input/"): array for name, array in RECORDED.items() if name.startswith("input/")}
IDS = GIVEN["sequence_ids"]
TOKENS = (IDS > 0).astype(np.float32)
HEADS, RELATION_HEADS, TEMPERATURE = 3, 4, 2.0


def heads(x):
    return x.reshape(*x.shape[:2], HEADS, -1)


def of_kind(kind, output, batch):
    """The loss of a kind of task between the output of a student and the stored targets in ``batch``."""
    soft, batch = object.__new__(kind), jax.lax.stop_gradient(batch)
    soft.temperature, soft.task = TEMPERATURE, SimpleNamespace(logits=lambda output, batch: output)
    return {"x_loss": soft.loss(output, batch)["teacher_loss"]}


# Rows of up to two sequences: the first tokens, and which sequences there are.
SEQUENCES = {
    "sequence_ids": IDS, "cls_positions": np.array([[0, 0], [0, 3], [0, 0]]), "weights": np.ones((3, 2)),
    "soft_weights": np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]]),
}  # fmt: skip


def of_logits(kind, classes):
    return lambda s, t: of_kind(
        kind, s[..., :classes], {"soft_logits": t[..., :classes], "soft_weights": GIVEN["weights"]}
    )


def of_places(s, t):
    student = SimpleNamespace(start_logits=s[..., 0], end_logits=s[..., 1])
    return of_kind(Places, student, {**SEQUENCES, "soft_start": t[..., 0], "soft_end": t[..., 1]})


def of_layers(s, t):
    student, teacher = (
        SimpleNamespace(hidden_states=(x, GIVEN[keys])) for x, keys in ((s, "student_keys"), (t, "teacher_keys"))
    )
    targets = jax.lax.stop_gradient(first_tokens(teacher, SEQUENCES, [0, 1]))
    return {"x_loss": layers_loss(student, {**SEQUENCES, "soft_layers": targets}, [0, 1])["teacher_layers_loss"]}


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
    "labels": ("student_logits", "teacher_logits", of_logits(Labels, 11)),
    "values": ("student_logits", "teacher_logits", of_logits(Values, 1)),
    "places": ("student", "teacher", of_places),
    "layers": ("student", "teacher", of_layers),
}  # fmt: skip


def value(function, student, teacher):
    total, weight = function(student, teacher)["x_loss"]
    return total / weight


@pytest.mark.cases(1)
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


@pytest.mark.slow
def test_a_student_that_is_its_teacher_has_no_loss():
    for case in ("soft", "cosine", "squared", "relations"):
        _, teacher, function = CASES[case]
        assert abs(float(value(function, GIVEN[teacher], GIVEN[teacher]))) < 1e-6, case
    both = heads(GIVEN["teacher"]), heads(GIVEN["teacher_keys"])
    assert float(score_loss("x", both, both, IDS)["x_loss"][0]) == 0


@pytest.mark.slow
def test_pieces_that_pad_the_vocabulary_count_nothing():
    student, teacher = GIVEN["student_logits"], GIVEN["teacher_logits"]
    padded = [np.pad(x, [(0, 0), (0, 0), (0, 5)], constant_values=-np.inf) for x in (student, teacher)]
    function = CASES["soft"][2]
    loss, gradient = jax.value_and_grad(lambda x: value(function, x, padded[1]))(jnp.asarray(padded[0]))
    assert float(loss) == pytest.approx(float(value(function, student, teacher)), rel=1e-6)
    assert not np.any(gradient[..., -5:])
    np.testing.assert_allclose(gradient[..., :-5], RECORDED["soft/gradient"], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_padding_changes_nothing():
    for case, (student, teacher, function) in CASES.items():
        if student == "student_logits":
            continue
        x = GIVEN[student]
        changed = np.where(IDS[..., None] > 0, x, 100.0)
        assert float(value(function, changed, GIVEN[teacher])) == float(value(function, x, GIVEN[teacher])), case
