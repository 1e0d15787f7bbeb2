"""Ranked lists: by hand, and NDCG equal to scikit-learn's."""

import math

import numpy as np
import pytest

from bert_jax.metrics import value
from bert_jax.metrics.retrieval import retrieval_scores


def values(scores, n):
    return {score.name: value(score, n) for score in scores}


def test_by_hand():
    ranked = [["a", "b", "c", "d"], ["x", "y"], ["q"]]
    relevant = [{"b", "d", "z"}, ["y"], ("nowhere",)]
    found = values(retrieval_scores(ranked, relevant, (1, 2, 4)), 3)
    log3, log5 = math.log2(3), math.log2(5)
    assert found == pytest.approx(
        {
            "mrr": (1 / 2 + 1 / 2 + 0) / 3,
            "precision@1": 0,
            "recall@1": 0,
            "recall@2": (1 / 3 + 1) / 3,
            "recall@4": (2 / 3 + 1) / 3,
            "ndcg@1": 0,
            "ndcg@2": ((1 / log3) / (1 + 1 / log3) + 1 / log3) / 3,
            "ndcg@4": ((1 / log3 + 1 / log5) / (1 + 1 / log3 + 1 / 2) + 1 / log3) / 3,
        },
        abs=1e-15,
    )


def test_a_perfect_list_is_one_and_an_empty_one_zero():
    assert set(values(retrieval_scores([[3, 1, 2]], [{1, 2, 3}], (3, 10)), 1).values()) == {1}
    assert set(values(retrieval_scores([[]], [{1}]), 1).values()) == {0}
    short = values(retrieval_scores([[1]], [{1, 2}], (2,)), 1)  # the best list holds both
    assert short["ndcg@2"] == pytest.approx(1 / (1 + 1 / math.log2(3)), abs=1e-15)


def test_ndcg_equal_to_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn, the oracle, is not installed")
    for seed in range(200):
        rng = np.random.default_rng(seed)
        documents = int(rng.integers(2, 20))
        ranked = rng.permutation(documents)
        relevant = set(rng.permutation(documents)[: rng.integers(1, documents + 1)].tolist())
        found = values(retrieval_scores([ranked.tolist()], [relevant], (1, 3, 7, 30)), 1)
        is_relevant = [[one in relevant for one in ranked]]
        for cutoff in (1, 3, 7, 30):
            expected = metrics.ndcg_score(is_relevant, [np.arange(documents)[::-1]], k=cutoff)
            assert found[f"ndcg@{cutoff}"] == pytest.approx(expected, abs=1e-12)


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="ranked 1, relevant 2"):
        retrieval_scores([[1]], [{1}, {2}])
    with pytest.raises(ValueError, match="no records"):
        retrieval_scores([], [])
    with pytest.raises(ValueError, match="query 1 has no relevant id"):
        retrieval_scores([[1], [1]], [{1}, set()])
    with pytest.raises(ValueError, match="query 0 has an id twice"):
        retrieval_scores([[1, 2, 1]], [{1}])
    with pytest.raises(ValueError, match=r"cutoffs: \[.*0"):
        retrieval_scores([[1]], [{1}], (0, 5))
