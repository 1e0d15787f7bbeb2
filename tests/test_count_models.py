"""``benchmarks/count_models.py`` against counts in plain Python."""

import collections
import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "count_models.py"
PIECES = 7


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("count_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["count_models"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["count_models"]


def smoothed(counts, shorter):
    n, t = sum(counts.values()), len(counts)
    if not n:
        return shorter
    return [(counts[piece] + t * shorter[piece]) / (n + t) for piece in range(PIECES)]


def test_distributions(module):
    text = [1, 3, 4, 3, 4, 5, 1, 3, 5, 3, 4, 3, 1, 2]
    left, right = np.array([3, 3, 6, 4]), np.array([3, 6, 4, 1])  # piece 6 does not occur
    found = module.CountModels(np.array(text), PIECES).probabilities(left, right)
    unigram = [(text.count(piece) + 1) / (len(text) + PIECES) for piece in range(PIECES)]
    for row, (a, b) in enumerate(zip(left, right, strict=True)):
        pairs = list(itertools.pairwise(text))
        after = smoothed(collections.Counter(y for x, y in pairs if x == a), unigram)
        before = smoothed(collections.Counter(x for x, y in pairs if y == b), unigram)
        product = np.array(after) * before / unigram
        product /= product.sum()
        triples = zip(text, text[1:], text[2:], strict=False)
        window = smoothed(collections.Counter(y for x, y, z in triples if (x, z) == (a, b)), product)
        for name, expected in zip(module.NAMES, (unigram, after, product, window), strict=True):
            np.testing.assert_allclose(found[name][row], expected, rtol=1e-12)
            assert found[name][row].sum() == pytest.approx(1)


def test_losses_of_masked_tokens(module):
    models = module.CountModels(np.array([1, 3, 4, 3, 4, 5, 1, 3, 5]), PIECES)
    batch = {
        "input_ids": np.array([[1, 6, 4, 6, 2]]),
        "mlm_positions": np.array([[1, 3, 0]]),
        "mlm_labels": np.array([[3, 5, 0]]),
        "mlm_weights": np.array([[1.0, 1.0, 0.0]]),
    }
    found = models.evaluate([batch])["left_pair"]
    expected = models.probabilities(np.array([1, 4]), np.array([4, 2]))["left_pair"][[0, 1], [3, 5]]
    assert found == {"mlm_loss": pytest.approx(-np.log(expected).mean()), "mlm_accuracy": 0.5}
