"""Ranked lists: by hand, and NDCG equal to scikit-learn's."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from bert_jax.metrics import value
from bert_jax.metrics.retrieval import first_rank_scores, have_collapsed, mean_ranks, retrieval_scores


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


def mean_over_orders(scores, right):
    """Mean ranks of the right entries over every order of equal scores."""
    orders = [
        order for order in itertools.permutations(range(len(scores)))
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]  # fmt: skip
    places = [[place for place, one in enumerate(order, 1) if right[one]] for order in orders]
    return np.mean(places, axis=0)


@pytest.mark.parametrize(
    "scores", [[0.5] * 5, [0.9, 0.5, 0.5, 0.5, 0.1], [0.2, 0.2, 0.7, 0.7, 0.2], [3, 1, 2, 5, 4]]
)
def test_equal_scores_have_the_mean_of_their_ranks(scores):
    for right in itertools.product([False, True], repeat=5):
        if any(right):
            scores_N, right_N = np.array(scores, float), np.array(right)
            assert mean_ranks(scores_N, right_N) == pytest.approx(mean_over_orders(scores, right))
    # As SciPy ranks them, and in whatever order they come.
    alone = [mean_ranks(np.array(scores, float), np.arange(5) == i)[0] for i in range(5)]
    assert alone == stats.rankdata(-np.array(scores), "average").tolist()


def test_rounding_of_float32_is_no_difference():
    rng = np.random.default_rng(0)
    for scale in (1.0, 1e-6, 300.0):
        scores = scale * (1 - 1e-8 * rng.random(99))
        assert mean_ranks(scores, np.arange(99) == 7).tolist() == [50]
        assert mean_ranks(scores - scale * 1e-6 * np.arange(99), np.arange(99) == 7).tolist() == [8]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_ranks_among_numbers_that_are_not_finite_are_undefined(wrong):
    ranks = mean_ranks(np.array([0.5, wrong, 0.1]), np.array([True, False, True]))
    assert np.isnan(ranks).all() and len(ranks) == 2
    assert all(math.isnan(found) for found in values(first_rank_scores(ranks), 2).values())


def test_a_list_whose_end_equals_entries_beyond_it():
    """Of a hundred equal entries ten are listed: the rank is that among all."""
    scores = retrieval_scores([list(range(10))], [{3}], (1, 10, 60), [np.ones(10)], [90])
    assert values(scores, 1)["mrr"] == pytest.approx(1 / 50.5)
    assert (values(scores, 1)["recall@10"], values(scores, 1)["recall@60"]) == (0, 1)
    assert values(retrieval_scores([["a", "b"]], [{"b"}], (1,), [np.array([0.5, 0.5])]), 1)["mrr"] == 1 / 1.5


def test_vectors_that_have_collapsed():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(5000, 8))
    assert not have_collapsed(vectors) and not have_collapsed(vectors[:2] * 0 + 1)
    for equal in (np.full((3, 8), 2.0), np.full((5000, 8), 2.0) * (1 + 1e-8 * vectors)):
        assert have_collapsed(equal.astype(np.float32))
    assert not have_collapsed(np.zeros((9, 4))) and not have_collapsed(np.full((9, 4), np.nan))


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
