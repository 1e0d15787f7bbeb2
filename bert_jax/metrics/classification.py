"""Metrics of one label out of several, and of several labels at once (values equal to scikit-learn's)."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from bert_jax.metrics.score import Score, count_records, mean_score, once, precision_recall_f1, repeats

# A resample's float64[3, C] (hits, gold, predicted) of each class, from which every F1 and Matthews follows.
Counts = Callable[[np.ndarray], np.ndarray]
KINDS = ("precision", "recall", "f1")


def confusion_matrix(gold: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """int64[classes, classes] of int labels [n]: rows gold, columns predicted."""
    gold, predicted = _labels("gold", gold, classes), _labels("predicted", predicted, classes)
    count_records(gold=gold, predicted=predicted)
    return np.bincount(gold * classes + predicted, minlength=classes**2).reshape(classes, classes)


def classification_scores(
    gold: np.ndarray, predicted: np.ndarray, names: Sequence[str], probabilities: np.ndarray | None = None
) -> list[Score]:
    """Scores of int labels [n], with AUROC if there are ``probabilities`` [n, C] (or any scores that rank).

    accuracy; precision, recall and f1, each _micro, _macro, _weighted and /NAME of a class; matthews; auroc. For
    two classes also precision, recall and f1 of class 1. _macro is over the classes that occur in gold or
    predicted, as in scikit-learn. auroc is of class 1 of two, else the mean over classes of one against the rest;
    nan if a class is not in gold.
    """
    classes = len(names)
    gold, predicted = _labels("gold", gold, classes), _labels("predicted", predicted, classes)
    n = count_records(gold=gold, predicted=predicted)
    hit = np.where(gold == predicted, gold, classes)  # the last bin takes the misses

    times = once(partial(repeats, n=n))

    @once
    def counts(indices: np.ndarray) -> np.ndarray:
        weights = times(indices)
        return np.stack(
            [np.bincount(labels, weights, minlength=classes + 1)[:classes] for labels in (hit, gold, predicted)]
        )

    scores = [mean_score("accuracy", gold == predicted)]
    averages = _averages(counts, names, occurring_only=True)
    if classes == 2:
        named = {score.name: score for score in averages}
        scores += [Score(kind, named[f"{kind}/{names[1]}"].of) for kind in KINDS]
    scores += averages
    scores.append(Score("matthews", lambda indices: matthews(counts(indices))))
    if probabilities is not None:
        columns = _columns("probabilities", probabilities, n, classes)
        ranked = [1] if classes == 2 else range(classes)
        each = [_auroc_of(_by_rank(gold == c, columns[:, c], times)) for c in ranked]
        scores.append(_mean_over_classes("auroc", each))
    return scores


def multi_label_scores(
    gold: np.ndarray, predicted: np.ndarray, names: Sequence[str], probabilities: np.ndarray | None = None
) -> list[Score]:
    """Scores of 0/1 indicators [n, C], with areas under curves if there are ``probabilities`` [n, C].

    accuracy (all labels of a record right); precision, recall and f1, each _micro, _macro, _weighted and /NAME of
    a label; mean_average_precision; auroc, the mean over labels. A label that occurs nowhere counts 0 in _macro and
    in mean_average_precision, as in scikit-learn; auroc is nan if a label is in no record of gold, or in all.
    """
    n, classes = count_records(gold=gold, predicted=predicted), len(names)
    is_gold, is_predicted = _indicators("gold", gold, n, classes), _indicators("predicted", predicted, n, classes)
    rows = np.concatenate([is_gold & is_predicted, is_gold, is_predicted], axis=1).astype(np.float64)

    times = once(partial(repeats, n=n))

    @once
    def counts(indices: np.ndarray) -> np.ndarray:
        return (times(indices) @ rows).reshape(3, classes)

    scores = [mean_score("accuracy", (is_gold == is_predicted).all(axis=1))]
    scores += _averages(counts, names, occurring_only=False)
    if probabilities is not None:
        columns = _columns("probabilities", probabilities, n, classes)
        ranks = [_by_rank(is_gold[:, c], columns[:, c], times) for c in range(classes)]
        scores.append(_mean_over_classes("mean_average_precision", [*map(_average_precision_of, ranks)]))
        scores.append(_mean_over_classes("auroc", [*map(_auroc_of, ranks)]))
    return scores


def matthews(counts: np.ndarray) -> float:
    """Matthews correlation of ``counts`` [3, C] (hits, gold, predicted), 0 if gold or predicted is one class.

    Gorodkin 2004, "Comparing two K-category assignments by a K-category correlation coefficient".
    """
    hits, gold, predicted = counts
    n = gold.sum()
    spread = (n**2 - gold @ gold) * (n**2 - predicted @ predicted)
    return float((n * hits.sum() - gold @ predicted) / np.sqrt(spread)) if spread else 0.0


def auroc(gold: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve of bool ``gold`` [n] and ``scores`` [n]: the share of pairs in the right order,
    ties half. nan if gold is one class or a score is nan."""
    n = count_records(gold=gold, scores=scores)
    return _auroc_of(_by_rank(np.asarray(gold, bool), scores, partial(repeats, n=n)))(np.arange(n))


def average_precision(gold: np.ndarray, scores: np.ndarray) -> float:
    """Sum over thresholds of precision times gain in recall; 0 without a positive, nan if a score is nan."""
    n = count_records(gold=gold, scores=scores)
    return _average_precision_of(_by_rank(np.asarray(gold, bool), scores, partial(repeats, n=n)))(np.arange(n))


def _labels(name: str, labels: np.ndarray, classes: int) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.ndim != 1 or (labels.size and labels.dtype.kind not in "biu"):
        raise ValueError(f"{name} must be integer labels of shape [n], not {labels.dtype} {list(labels.shape)}")
    wrong = labels[(labels < 0) | (labels >= classes)]
    if wrong.size:
        raise ValueError(f"{name} holds the label {wrong[0]}; {classes} classes are 0 to {classes - 1}")
    return labels.astype(np.int64)


def _columns(name: str, values: np.ndarray, n: int, classes: int) -> np.ndarray:
    values = np.asarray(values)
    if values.shape != (n, classes):
        raise ValueError(f"{name} must have shape [{n}, {classes}], not {list(values.shape)}")
    return values


def _indicators(name: str, values: np.ndarray, n: int, classes: int) -> np.ndarray:
    values = _columns(name, values, n, classes)
    if not np.isin(values, (0, 1)).all():
        raise ValueError(f"{name} must hold only 0 and 1")
    return values.astype(bool)


def _averages(counts: Counts, names: Sequence[str], occurring_only: bool) -> list[Score]:
    """Every average of precision, recall and F1, and their values of each class."""
    of_all = once(lambda indices: precision_recall_f1(counts(indices).sum(axis=1)))
    of_each = once(lambda indices: precision_recall_f1(counts(indices)))

    def micro(row: int, indices: np.ndarray) -> float:
        return float(of_all(indices)[row])

    def macro(row: int, indices: np.ndarray) -> float:
        values = of_each(indices)[row]
        return float(values[counts(indices)[1:].any(axis=0)].mean() if occurring_only else values.mean())

    def weighted(row: int, indices: np.ndarray) -> float:
        in_gold = counts(indices)[1]
        total = in_gold.sum()
        return float(of_each(indices)[row] @ in_gold / total) if total else 0.0

    def of_class(row: int, index: int, indices: np.ndarray) -> float:
        return float(of_each(indices)[row, index])

    scores = []
    for row, kind in enumerate(KINDS):
        scores += [Score(f"{kind}_{of.__name__}", partial(of, row)) for of in (micro, macro, weighted)]
        scores += [Score(f"{kind}/{name}", partial(of_class, row, index)) for index, name in enumerate(names)]
    return scores


def _mean_over_classes(name: str, each: Sequence[Callable[[np.ndarray], float]]) -> Score:
    return Score(name, lambda indices: float(np.mean([of(indices) for of in each])))


def _by_rank(gold: np.ndarray, scores: np.ndarray, times: Counts) -> Counts | None:
    """A resample's float64[2, R] negatives and positives at each of the R different scores, ascending: sorting
    once leaves a resample nothing but counting. ``times``: how often it holds each record. None if a score is
    nan."""
    scores = np.asarray(scores, np.float64)
    if np.isnan(scores).any():
        return None
    order = np.argsort(scores, kind="stable")
    ascending = scores[order]
    firsts = np.flatnonzero(np.append(True, ascending[1:] != ascending[:-1]))
    sides = np.stack([~gold[order], gold[order]]).astype(np.float64)

    @once
    def counts(indices: np.ndarray) -> np.ndarray:
        of_records = sides * np.take(times(indices), order)
        return of_records if len(firsts) == len(order) else np.add.reduceat(of_records, firsts, axis=1)

    return counts


def _auroc_of(counts: Counts | None) -> Callable[[np.ndarray], float]:
    def of(indices: np.ndarray) -> float:
        if counts is None:
            return float("nan")
        negatives, positives = counts(indices)
        pairs = negatives.sum() * positives.sum()
        return float(positives @ (np.cumsum(negatives) - negatives / 2) / pairs) if pairs else float("nan")

    return of


def _average_precision_of(counts: Counts | None) -> Callable[[np.ndarray], float]:
    def of(indices: np.ndarray) -> float:
        if counts is None:
            return float("nan")
        negatives, positives = counts(indices)[:, ::-1]
        if not positives.any():
            return 0.0
        found = np.cumsum(positives)
        # A rank that the resample lacks has no positives, so its quotient does not count.
        precision = found / np.maximum(found + np.cumsum(negatives), 1)
        return float(positives @ precision / found[-1])

    return of
