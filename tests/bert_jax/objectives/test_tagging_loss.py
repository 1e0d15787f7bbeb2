"""Token classification, against torch."""

import jax
import numpy as np
from recorded import Slots, assert_recorded, given

from bert_jax.objectives.denominator import denominator
from bert_jax.objectives.tagging import token_loss


def test_equals_torch_over_labelled_tokens():
    tokens = Slots(7, (2, 9))
    logits, labels = tokens.fill(given("logits"), np.nan), tokens.fill(given("labels"), -100)

    def loss(logits):
        sums = token_loss(logits, labels, tokens.weights)
        return sums["loss"][0] / denominator(tokens.weights), sums

    (value, sums), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits)
    assert_recorded("cross_entropy", value, tokens.take(gradient), 1e-6, 1e-6)
    assert float(sums["loss"][1]) == 7
    right = np.sum(given("logits").argmax(1) == given("labels"))
    np.testing.assert_array_equal(sums["accuracy"], (right, 7))
