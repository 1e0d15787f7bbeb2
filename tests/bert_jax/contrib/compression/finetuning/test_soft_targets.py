"""Parts of soft targets: marginal probabilities of a CRF, vectors in the width of the student."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.contrib.compression.finetuning.kinds import fitted_vectors, tag_logits
from bert_jax.model import BertOutput


@pytest.mark.slow
def test_marginal_probabilities_of_a_chain_are_those_of_all_paths():
    rng = np.random.default_rng(0)
    emissions, (transitions, start, end) = rng.normal(size=(5, 3)), (rng.normal(size=s) for s in ((3, 3), 3, 3))
    expected = np.zeros((5, 3))
    for path in itertools.product(range(3), repeat=5):
        score = start[path[0]] + end[path[-1]] + sum(emissions[i, tag] for i, tag in enumerate(path))
        score += sum(transitions[pair] for pair in itertools.pairwise(path))
        expected[np.arange(5), path] += math.exp(score)
    expected /= expected[0].sum()
    padded = np.pad(emissions, [(1, 2), (0, 0)])[None].astype(np.float32)
    ids = np.array([[1, 1, 1, 1, 1, 1, 1, 0]], np.int32)
    scored = np.array([[0, 1, 1, 1, 1, 1, 0, 0]], np.float32)
    padded, *crf = (jnp.asarray(x, jnp.float32) for x in (padded, transitions, start, end))
    output = BertOutput(sequence_output=padded, token_logits=padded, crf=tuple(crf))
    found = np.exp(tag_logits(output, {"sequence_ids": jnp.asarray(ids), "tag_scored": jnp.asarray(scored)}))
    np.testing.assert_allclose(found[0, 1:6], expected, atol=1e-5)


def test_vectors_of_other_widths_keep_their_cosines():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(40, 4)) @ rng.normal(size=(4, 9))  # four directions in nine
    vectors = vectors.astype(np.float32)

    def cosines(x):
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        return x @ x.T

    for width in (4, 6, 12):
        fitted = fitted_vectors(vectors, width)
        assert fitted.shape == (40, width)
        np.testing.assert_allclose(cosines(fitted), cosines(vectors), atol=1e-5)
    assert np.abs(cosines(fitted_vectors(vectors, 3)) - cosines(vectors)).max() > 1e-3
