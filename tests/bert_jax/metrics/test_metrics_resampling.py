"""Bootstrap and McNemar; and every score of a resample is the score of the records it holds."""

import math

import numpy as np
import pytest
from scipy import stats

from bert_jax.metrics import Score, classification, value
from bert_jax.metrics import score as base
from bert_jax.metrics.chinese_qa import chinese_answer_scores
from bert_jax.metrics.classification import classification_scores, multi_label_scores
from bert_jax.metrics.correlation import regression_scores
from bert_jax.metrics.entities import joint_scores, tagging_scores
from bert_jax.metrics.resampling import confidence_intervals, mcnemar, paired_bootstrap
from bert_jax.metrics.retrieval import retrieval_scores
from bert_jax.metrics.score import mean_score
from bert_jax.metrics.squad import squad_scores

RNG = np.random.default_rng(0)
N = 40
INTS, OTHERS = RNG.integers(0, 3, (2, N))
FLOATS, MORE = np.round(RNG.normal(size=(2, N)), 1)
TABLE, TABLES = RNG.integers(0, 2, (2, N, 4))
PROBABILITIES = np.round(RNG.random((N, 4)), 1)
TAGS, GUESSES = ([RNG.choice(["O", "B-A", "I-A", "B-B"], 6).tolist() for _ in range(N)] for _ in range(2))
TEXTS, SPANS = ([" ".join(RNG.choice(["天", "red", "fox"], 3)) for _ in range(N)] for _ in range(2))
RANKED = [RNG.permutation(9).tolist() for _ in range(N)]

FAMILIES = {
    "two classes": (
        lambda g, p, s: classification_scores(g > 0, p > 0, "ab", s[:, :2]),
        INTS,
        OTHERS,
        PROBABILITIES,
    ),
    "classes": (lambda g, p, s: classification_scores(g, p, "abcd", s), INTS, OTHERS, PROBABILITIES),
    "three classes": (lambda g, p, s: classification_scores(g, p, "abc", s[:, :3]), INTS, OTHERS, PROBABILITIES),
    "labels": (lambda g, p, s: multi_label_scores(g, p, "abcd", s), TABLE, TABLES, PROBABILITIES),
    "numbers": (regression_scores, FLOATS, MORE),
    "tags": (tagging_scores, TAGS, GUESSES),
    "joint": (joint_scores, INTS, OTHERS, TAGS, GUESSES),
    "squad": (lambda p, r: squad_scores(p, [[one] * (one[0] != "r") for one in r]), TEXTS, SPANS),
    "chinese": (lambda p, r: chinese_answer_scores(p, [[one] for one in r]), TEXTS, SPANS),
    "retrieval": (lambda r, i: retrieval_scores(r, [{one, 7} for one in i]), RANKED, INTS),
}


def confidence_interval(score, n, **options):
    return confidence_intervals([score], n, **options)[0]


def take(column, indices):
    return column[indices] if isinstance(column, np.ndarray) else [column[index] for index in indices]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resample_is_scored_as_the_records_it_holds(family):
    make, *columns = FAMILIES[family]
    rng, compared = np.random.default_rng(1), set()
    for n in (N, N, N, 25, 3, 1):
        indices = rng.integers(N, size=n)
        anew = {score.name: value(score, n) for score in make(*(take(column, indices) for column in columns))}
        for score in make(*columns):
            if score.name in anew:  # a class, or a kind of question, may be missing from the resample
                assert score.of(indices) == pytest.approx(anew[score.name], abs=1e-12, nan_ok=True), score.name
                compared.add(score.name)
    assert compared == {score.name for score in make(*columns)}


def test_lower_is_better_only_for_errors():
    lower = {s.name for make, *columns in FAMILIES.values() for s in make(*columns) if not s.higher_is_better}
    assert lower == {"mse", "mae", "log_loss"}


def test_interval_of_a_mean_fits_theory():
    values = np.random.default_rng(0).normal(size=2000)
    interval = confidence_interval(mean_score("mean", values), 2000, seed=3, resamples=4000)
    error = values.std() / math.sqrt(2000)
    assert interval.value == pytest.approx(values.mean(), abs=1e-12)
    assert interval.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert interval.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)
    narrow = confidence_interval(mean_score("mean", values), 2000, seed=3, resamples=4000, level=0.5)
    assert narrow.high - narrow.low == pytest.approx(2 * 0.6745 * error, rel=0.1)


def test_the_same_seed_gives_the_same_interval():
    score = mean_score("mean", FLOATS)
    assert confidence_interval(score, N, seed=5) == confidence_interval(score, N, seed=5)
    assert confidence_interval(score, N, seed=5) != confidence_interval(score, N, seed=6)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_intervals_together_are_those_of_each_score(family):
    make, *columns = FAMILIES[family]
    rng, rows = np.random.default_rng(4), []
    for _ in range(60):
        indices = rng.integers(N, size=N)
        # Of scores made anew, which share nothing with another resample.
        rows.append([score.of(indices) for score in make(*columns)])
    scores = make(*columns)
    found = confidence_intervals(scores, N, seed=4, resamples=60)
    for score, interval, values in zip(scores, found, np.transpose(rows), strict=True):
        np.testing.assert_array_equal(interval, confidence_interval(score, N, seed=4, resamples=60), score.name)
        assert interval.value == pytest.approx(value(score, N), abs=0, nan_ok=True)
        defined = values[~np.isnan(values)]
        bounds = np.quantile(defined, [(1 - 0.95) / 2, (1 + 0.95) / 2]) if defined.size else [math.nan] * 2
        np.testing.assert_array_equal(interval[1:], bounds, score.name)


def test_no_scores_have_no_intervals():
    assert confidence_intervals([], 0, seed=0) == []


@pytest.mark.parametrize(("classes", "labels"), [(2, False), (5, False), (3, True)])
def test_scores_of_classes_count_a_resample_once(monkeypatch, classes, labels):
    calls = []
    monkeypatch.setattr(classification, "repeats", lambda indices, n: calls.append(n) or base.repeats(indices, n))
    if labels:
        scores = multi_label_scores(*RNG.integers(0, 2, (2, N, classes)), "abc", RNG.random((N, classes)))
    else:
        gold, predicted = RNG.integers(0, classes, (2, N))
        scores = classification_scores(gold, predicted, "abcde"[:classes], RNG.random((N, classes)))
    confidence_intervals(scores, N, seed=0, resamples=10)
    means = [score for score in scores if score.name in ("accuracy", "log_loss")]  # need none
    assert len(scores) > 10 and len(calls) == 10 + len(scores) - len(means)


def test_undefined_resamples_are_left_out():
    rare = mean_score("rare", [1.0] + [0.0] * 4, np.array([True] + [False] * 4))
    assert confidence_interval(rare, 5, seed=0) == (1, 1, 1)  # a third of the resamples lack the record
    never = confidence_interval(Score("never", lambda indices: math.nan), 5, seed=0, resamples=10)
    assert all(map(math.isnan, never))
    assert all(map(math.isnan, paired_bootstrap(rare, Score("never", lambda indices: math.nan), 5, 0, 10)))


def test_mcnemar_by_hand():
    a = np.array([True] * 9 + [False] + [True] * 20 + [False] * 5)
    b = np.array([False] * 9 + [True] + [True] * 20 + [False] * 5)
    assert mcnemar(a, b) == (9, 1, pytest.approx(2 * (1 + 10) / 2**10, abs=1e-15))
    assert mcnemar(b, a) == (1, 9, mcnemar(a, b).p_value)
    assert mcnemar(a, a) == (0, 0, 1)
    with pytest.raises(ValueError, match="correct_a 2, correct_b 1"):
        mcnemar([True, False], [True])


def test_paired_bootstrap():
    rng = np.random.default_rng(0)
    hard = rng.random(500)
    a, b = (mean_score("accuracy", hard < limit) for limit in (0.9, 0.8))
    found = paired_bootstrap(a, b, 500, seed=1)
    assert found.difference == pytest.approx(value(a, 500) - value(b, 500), abs=1e-15)
    assert 0 < found.low < found.difference < found.high and found.p_value == 2 / 1001
    back = paired_bootstrap(b, a, 500, seed=1)
    assert back == pytest.approx((-found.difference, -found.high, -found.low, found.p_value), abs=1e-12)
    assert paired_bootstrap(a, a, 500, seed=1) == (0, 0, 0, 1)
    # The same resamples: what both have in common does not widen the interval.
    assert found.high - found.low < 0.6 * sum(np.ptp(confidence_interval(s, 500, seed=1)[1:]) for s in (a, b))


def test_paired_p_value_is_near_that_of_a_paired_t_test():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.05, 1, 800), rng.normal(0, 1, 800)
    found = paired_bootstrap(mean_score("x", x), mean_score("y", y), 800, seed=0, resamples=4000)
    assert 0.05 < found.p_value < 0.95
    assert found.p_value == pytest.approx(stats.ttest_rel(x, y).pvalue, abs=0.03)


def test_wrong_input_is_refused():
    score = mean_score("mean", FLOATS)
    with pytest.raises(ValueError, match="no records"):
        confidence_interval(score, 0, seed=0)
    with pytest.raises(ValueError, match="resamples: 0"):
        confidence_interval(score, N, seed=0, resamples=0)
    with pytest.raises(ValueError, match="level: 95"):
        confidence_interval(score, N, seed=0, level=95)
