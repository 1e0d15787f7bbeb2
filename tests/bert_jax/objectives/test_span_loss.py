"""Start and end of an answer, against transformers on one sequence at a time."""

import jax
import numpy as np
import pytest
from recorded import assert_recorded, given

from bert_jax.objectives.objective import denominator
from bert_jax.objectives.span import span_loss

LENGTHS = given("span_lengths")


def rows_of(assignment, width):
    """Features of the recorded sequences, packed as ``assignment`` says (sequences of each row), and for each
    sequence its row and first position; logits are nan in the padding, targets anything in empty slots."""
    slots = max(map(len, assignment)) + 1
    logits = np.full((2, len(assignment), width), np.nan, np.float32)
    sequence_ids = np.zeros((len(assignment), width), np.int32)
    targets = np.full((2, len(assignment), slots), 1, np.int32)
    weights = np.zeros((len(assignment), slots), np.float32)
    places = {}
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    for row, sequences in enumerate(assignment):
        used = 0
        for slot, i in enumerate(sequences):
            end = used + LENGTHS[i]
            logits[:, row, used:end] = given("span_logits")[:, starts[i] : starts[i + 1]]
            sequence_ids[row, used:end] = slot + 1
            targets[:, row, slot] = given("span_targets")[:, i] + used
            weights[row, slot] = 1
            places[i] = (row, used)
            used = end
    return logits, (sequence_ids, *targets, weights), places


@pytest.mark.parametrize("assignment", [[[0], [1], [2]], [[0, 1, 2]], [[2, 0], [], [1]]])
def test_equals_transformers_however_packed(assignment):
    logits, others, places = rows_of(assignment, 19)

    def loss(logits):
        value, weight = span_loss(*logits, *others)["loss"]
        return value / denominator(others[-1]), weight

    (value, weight), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits)
    own = [gradient[:, row, first : first + LENGTHS[i]] for i, (row, first) in sorted(places.items())]
    assert_recorded("span", value, np.concatenate(own, axis=1), 1e-6, 1e-6)
    assert not np.any(np.asarray(gradient)[:, others[0] == 0])
    assert float(weight) == 3


@pytest.mark.slow
def test_weights_and_accuracy():
    logits, (sequence_ids, starts, ends, weights), _ = rows_of([[0, 1], [2]], 19)
    given_starts, given_ends = given("span_logits")
    cuts = np.cumsum(LENGTHS)[:-1]
    best = np.array([[part.argmax() for part in np.split(x, cuts)] for x in (given_starts, given_ends)])
    offsets = np.array([0, LENGTHS[0], 0])
    starts[[0, 0, 1], [0, 1, 0]], ends[[0, 0, 1], [0, 1, 0]] = best + offsets
    ends[0, 1] = offsets[1] + (best[1, 1] + 1) % LENGTHS[1]  # one side wrong
    weights[weights > 0] = [0.5, 4, 2]
    sums = span_loss(*logits, sequence_ids, starts, ends, weights)
    np.testing.assert_allclose(sums["accuracy"], (2.5, 6.5))

    def cost(x, i, target):
        x = np.split(x.astype(np.float64), cuts)[i]
        return np.log(np.exp(x).sum()) - x[target]

    targets = [(best[0, 0], best[1, 0]), (best[0, 1], ends[0, 1] - offsets[1]), (best[0, 2], best[1, 2])]
    costs = [(cost(given_starts, i, s) + cost(given_ends, i, e)) / 2 for i, (s, e) in enumerate(targets)]
    np.testing.assert_allclose(sums["loss"], (np.dot([0.5, 4, 2], costs), 6.5), rtol=1e-6)


def test_sequences_without_weight_are_nothing():
    logits, (sequence_ids, starts, ends, weights), _ = rows_of([[0, 1, 2]], 19)
    weights[0, 1] = 0
    logits[:, sequence_ids == 2] = np.nan

    def loss(logits, weights):
        return span_loss(*logits, sequence_ids, starts, ends, weights)["loss"][0]

    value_and_gradient = jax.jit(jax.value_and_grad(loss))
    value, gradient = value_and_gradient(logits, weights)
    assert float(value) > 0
    assert np.isfinite(gradient).all()
    assert not np.any(np.asarray(gradient)[:, (sequence_ids == 2) | (sequence_ids == 0)])
    value, gradient = value_and_gradient(np.full_like(logits, np.nan), np.zeros_like(weights))
    assert float(value) == 0
    assert not np.any(gradient)
