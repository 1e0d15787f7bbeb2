"""Metrics of labels: by hand, and equal to scikit-learn's on many random cases, degenerate ones too."""

import math
import warnings

import numpy as np
import pytest

from bert_jax.metrics import value
from bert_jax.metrics.classification import (
    auroc,
    classification_scores,
    confusion_matrix,
    multi_label_scores,
)

SKLEARN = "scikit-learn, the oracle, is not installed"
KINDS = ("precision", "recall", "f1")


def values(scores, n):
    """By name; nothing may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {score.name: value(score, n) for score in scores}
    assert len(found) == len(scores) and all(type(one) is float for one in found.values())
    return found


def random_labels(rng, classes, n):
    """Labels of a random few of the classes."""
    return rng.choice(rng.permutation(classes)[: rng.integers(1, classes + 1)], size=n)


def test_two_classes_by_hand():
    # One class predicted too often: 2 hits of class 1, 2 false alarms, 1 miss, 3 right zeros.
    gold, predicted = [1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0, 0, 0]
    found = values(classification_scores(gold, predicted, ["no", "yes"]), 8)
    assert confusion_matrix(gold, predicted, 2).tolist() == [[3, 2], [1, 2]]
    assert found["accuracy"] == found["f1_micro"] == 5 / 8
    assert found["precision"] == found["precision/yes"] == 0.5
    assert found["recall"] == pytest.approx(2 / 3, abs=1e-15)
    assert found["f1"] == found["f1/yes"] == pytest.approx(4 / 7, abs=1e-15)
    assert found["f1_macro"] == pytest.approx((4 / 7 + 2 / 3) / 2, abs=1e-15)
    assert found["f1_weighted"] == pytest.approx((4 / 7 * 3 + 2 / 3 * 5) / 8, abs=1e-15)
    assert found["matthews"] == pytest.approx((2 * 3 - 2 * 1) / math.sqrt(4 * 3 * 5 * 4), abs=1e-15)
    assert "auroc" not in found


def test_one_class_predicted_is_zero():
    found = values(classification_scores([0, 1, 0, 1], [0, 0, 0, 0], ["no", "yes"], np.full((4, 2), 0.5)), 4)
    assert (found["f1"], found["precision"], found["matthews"], found["auroc"]) == (0, 0, 0, 0.5)


@pytest.mark.parametrize("digits", [6, 1])  # with one digit many scores are equal
def test_auroc_of_many_classes_is_the_mean_of_the_classes(digits):
    rng = np.random.default_rng(0)
    gold, probabilities = rng.integers(0, 7, 90), np.round(rng.random((90, 7)), digits)
    (score,) = (
        score
        for score in classification_scores(gold, probabilities.argmax(1), "abcdefg", probabilities)
        if score.name == "auroc"
    )
    for indices in (np.arange(90), rng.integers(0, 90, 90)):
        own = [auroc(gold[indices] == c, probabilities[indices, c]) for c in range(7)]
        assert score.of(indices) == np.mean(own)
    assert math.isnan(score.of(np.flatnonzero(gold != 3)))
    probabilities[0, 0] = math.nan
    assert math.isnan(values(classification_scores(gold, gold, "abcdefg", probabilities), 90)["auroc"])


def test_auroc_by_hand():
    # Of the 6 pairs, 4 in order, 1 tied.
    gold, scores = [1, 0, 1, 0, 0], [0.9, 0.8, 0.8, 0.1, 0.3]
    assert auroc(gold, scores) == 5.5 / 6
    assert math.isnan(auroc([1, 1], [0.1, 0.2])) and math.isnan(auroc([0, 0], [0.1, 0.2]))
    assert math.isnan(auroc([0, 1], [0.1, math.nan]))


def test_multi_label_by_hand():
    gold, predicted = [[1, 0, 1], [0, 1, 0], [1, 0, 0]], [[1, 0, 0], [0, 1, 0], [1, 1, 0]]
    found = values(multi_label_scores(gold, predicted, "abc"), 3)
    assert found["accuracy"] == 1 / 3 and found["f1_micro"] == 6 / 8 and found["f1/c"] == 0
    assert found["f1_macro"] == pytest.approx((1 + 2 / 3 + 0) / 3, abs=1e-15)
    assert "auroc" not in found
    # Of a both pairs are in order, of b one of two is tied, of c one of two is not.
    chances = [[0.9, 0.5, 0.4], [0.1, 0.5, 0.6], [0.8, 0.1, 0.1]]
    found = values(multi_label_scores(gold, predicted, "abc", chances), 3)
    assert found["auroc"] == pytest.approx((1 + 0.75 + 0.5) / 3, abs=1e-15)
    assert math.isnan(values(multi_label_scores([[1], [1]], [[1], [1]], "a", [[0.9], [0.8]]), 2)["auroc"])


@pytest.mark.parametrize(
    ("gold", "predicted", "message"),
    [
        ([0, 1], [0], "gold 2, predicted 1"),
        ([], [], "no records"),
        ([0, 2], [0, 1], "gold: label 2 .* 0 to 1"),
        ([0, 1], [0, -1], "predicted: label -1"),
        ([0.0, 1.0], [0, 1], "gold: dtype float64"),
    ],
)
def test_wrong_labels_are_refused(gold, predicted, message):
    with pytest.raises(ValueError, match=message):
        classification_scores(gold, predicted, ["no", "yes"])
    with pytest.raises(ValueError, match=message):
        confusion_matrix(gold, predicted, 2)


def test_wrong_columns_are_refused():
    with pytest.raises(ValueError, match=r"probabilities: shape \[2, 3\] .* \[2, 2\]"):
        classification_scores([0, 1], [0, 1], ["no", "yes"], np.zeros((2, 3)))
    with pytest.raises(ValueError, match="predicted: "):
        multi_label_scores([[0, 1]], [[0, 0.5]], "ab")
    with pytest.raises(ValueError, match=r"gold: shape \[1, 2\] .* \[1, 3\]"):
        multi_label_scores([[0, 1]], [[0, 1]], "abc")
    with pytest.raises(ValueError, match="gold 2, scores 1"):
        auroc([0, 1], [0.5])
    with pytest.raises(ValueError, match="no records"):
        value(classification_scores([0], [0], ["one"])[0], 0)


def expected_averages(metrics, gold, predicted, classes):
    """Of scikit-learn: every average of precision, recall and F1, and their values of each class."""
    expected = {}
    for average in ("micro", "macro", "weighted"):
        found = metrics.precision_recall_fscore_support(gold, predicted, average=average, zero_division=0)
        expected |= {f"{kind}_{average}": one for kind, one in zip(KINDS, found[:3], strict=True)}
    labels = range(classes)
    found = metrics.precision_recall_fscore_support(gold, predicted, labels=labels, zero_division=0)
    for kind, column in zip(KINDS, found[:3], strict=True):
        expected |= {f"{kind}/{label}": one for label, one in zip(labels, column, strict=True)}
    return expected


@pytest.mark.filterwarnings("ignore:A single label was found")
def test_equal_to_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics", reason=SKLEARN)
    undefined = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        classes, n = int(rng.integers(2, 6)), int(rng.integers(1, 40))
        gold, predicted = random_labels(rng, classes, n), random_labels(rng, classes, n)
        logits = rng.integers(0, 4, (n, classes)).astype(float)  # few values, so many ties
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        found = values(classification_scores(gold, predicted, range(classes), probabilities), n)
        expected = expected_averages(metrics, gold, predicted, classes)
        expected["accuracy"] = metrics.accuracy_score(gold, predicted)
        expected["matthews"] = metrics.matthews_corrcoef(gold, predicted)
        if classes == 2:
            expected |= {kind: expected[f"{kind}/1"] for kind in KINDS}
        if len(np.unique(gold)) < classes:
            undefined += 1
            expected["auroc"] = math.nan
        elif classes == 2:
            expected["auroc"] = metrics.roc_auc_score(gold, probabilities[:, 1])
        else:
            expected["auroc"] = metrics.roc_auc_score(gold, probabilities, multi_class="ovr")
        expected["log_loss"] = metrics.log_loss(gold, probabilities, labels=range(classes))
        assert found == pytest.approx(expected, abs=1e-12, nan_ok=True), seed
        theirs = metrics.confusion_matrix(gold, predicted, labels=range(classes))
        assert (confusion_matrix(gold, predicted, classes) == theirs).all()
    assert 50 < undefined < 250


def test_multi_label_equal_to_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics", reason=SKLEARN)
    counts = [0, 0]
    for seed in range(200):
        rng = np.random.default_rng(seed)
        n, classes = int(rng.integers(1, 30)), int(rng.integers(2, 6))
        gold, predicted = (rng.random((n, classes)) < rng.random(classes) ** 2 for _ in range(2))
        probabilities = rng.integers(0, 6, (n, classes)) / 5
        found = values(multi_label_scores(gold, predicted, range(classes), probabilities), n)
        expected = expected_averages(metrics, gold.astype(int), predicted.astype(int), classes)
        expected["accuracy"] = metrics.accuracy_score(gold, predicted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of labels without a record
            each = [metrics.average_precision_score(gold[:, c], probabilities[:, c]) for c in range(classes)]
        expected["mean_average_precision"] = np.mean(each)
        defined = all(0 < label.sum() < n for label in gold.T)
        expected["auroc"] = metrics.roc_auc_score(gold, probabilities) if defined else math.nan
        counts[defined] += 1
        assert found == pytest.approx(expected, abs=1e-12, nan_ok=True), seed
    assert min(counts) > 30
