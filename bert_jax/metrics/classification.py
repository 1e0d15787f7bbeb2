"""Metrics of single-label and multi-label classification; values equal scikit-learn's."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from bert_jax.metrics.score import Score, count_records, mean_score, once, precision_recall_f1, repeats

# Function from indices [n] to counts of the resample: float64[3, C] (hits, gold, predicted) of each class, or
# float64[2, R] (negatives, positives) at each rank.
Counts = Callable[[np.ndarray], np.ndarray]
KINDS = ("precision", "recall", "f1")


def confusion_matrix(gold: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Return the confusion matrix, int64[classes, classes], of two arrays of int labels.

    Rows are gold labels, columns are predicted labels. Raises ``ValueError`` for labels outside 0 to
    ``classes`` - 1.
    """
    gold, predicted, _ = _labels(gold, predicted, classes)
    return np.bincount(gold * classes + predicted, minlength=classes**2).reshape(classes, classes)


def classification_scores(
    gold: np.ndarray, predicted: np.ndarray, names: Sequence[str], probabilities: np.ndarray | None = None
) -> list[Score]:
    """Return the scores of int labels ``predicted`` against ``gold``, for the classes with the names ``names``.

    auroc and log_loss require ``probabilities`` [records, classes]. The names of the scores are accuracy;
    precision, recall and f1, each with the suffixes _micro, _macro, _weighted and, for each class, /NAME; matthews;
    auroc; log_loss, the mean of -ln(probability of the correct class), in which probabilities below the resolution
    of float64 are raised to it, as in scikit-learn. For two classes, precision, recall and f1 without a suffix
    belong to class 1. _macro averages over the classes that occur in gold or predicted, as in scikit-learn. With
    two classes, auroc is that of class 1; otherwise, it is the mean of the one-vs-rest values of all classes. It is
    NaN if a class does not occur in gold. Raises ``ValueError`` for wrong shapes or labels.
    """
    classes = len(names)
    gold, predicted, n = _labels(gold, predicted, classes)
    hit = np.where(gold == predicted, gold, classes)  # the last bin counts the misses

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
        if classes == 2:
            scores.append(_mean_over_classes("auroc", _auroc, [_by_rank(gold == 1, columns[:, 1], times)]))
        else:
            scores.append(Score("auroc", _one_vs_rest(gold, columns, times)))
        of_gold = np.maximum(columns[np.arange(n), gold], np.finfo(np.float64).eps)
        scores.append(mean_score("log_loss", -np.log(of_gold), higher_is_better=False))
    return scores


def multi_label_scores(
    gold: np.ndarray, predicted: np.ndarray, names: Sequence[str], probabilities: np.ndarray | None = None
) -> list[Score]:
    """Return the scores of 0/1 indicators ``predicted`` against ``gold``, both [records, labels].

    The names of the scores are accuracy (share of records with all labels correct); precision, recall and f1, each
    with the suffixes _micro, _macro, _weighted and, for each label, /NAME; mean_average_precision; auroc, the mean
    over labels. The last two require ``probabilities`` [records, labels]. A label that does not occur counts as 0
    in _macro and in mean_average_precision, as in scikit-learn. auroc is NaN if a label occurs in no record of
    gold, or in every record. Raises ``ValueError`` for wrong shapes or values.
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
        scores.append(_mean_over_classes("mean_average_precision", _average_precision, ranks))
        scores.append(_mean_over_classes("auroc", _auroc, ranks))
    return scores


def matthews(counts: np.ndarray) -> float:
    """Return the Matthews correlation; 0 if the gold labels or the predicted labels are constant.

    ``counts`` [3, classes] contains the numbers of correct, gold and predicted labels of each class. The formula
    follows Gorodkin 2004, "Comparing two K-category assignments by a K-category correlation coefficient".
    """
    hits, gold, predicted = counts
    n = gold.sum()
    spread = (n**2 - gold @ gold) * (n**2 - predicted @ predicted)
    return float((n * hits.sum() - gold @ predicted) / np.sqrt(spread)) if spread else 0.0


def calibration_error(gold: np.ndarray, probabilities: np.ndarray, bins: int = 15) -> float:
    """Return the expected calibration error: the mean over the predictions of the difference between the mean
    probability and the accuracy of their bin, one of ``bins`` of equal width (Guo et al. 2017, section 2).

    ``gold``: int[N] classes; ``probabilities``: float[N, L]. The prediction is the class with the largest
    probability.
    """
    score, hit = probabilities.max(-1), probabilities.argmax(-1) == gold
    bin_of = np.minimum((score * bins).astype(int), bins - 1)
    return float(np.abs(np.bincount(bin_of, score - hit)).sum() / len(gold))


def auroc(gold: np.ndarray, scores: np.ndarray) -> float:
    """Return the area under the ROC curve of bool ``gold`` [n] and ``scores`` [n]: the share of (negative,
    positive) pairs whose scores are in the correct order, where a tie counts as half a pair. The result is NaN if
    gold is constant or a score is NaN."""
    n = count_records(gold=gold, scores=scores)
    return _auroc(*_by_rank(np.asarray(gold, bool), scores, partial(repeats, n=n))(np.arange(n)))


def _labels(gold: np.ndarray, predicted: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return ``gold`` and ``predicted`` as int64[n], and n. Raises ``ValueError`` for invalid labels."""
    for name, labels in (("gold", np.asarray(gold)), ("predicted", np.asarray(predicted))):
        if labels.ndim != 1 or (labels.size and labels.dtype.kind not in "biu"):
            raise ValueError(
                f"{name}: dtype {labels.dtype} with shape {list(labels.shape)} is not allowed; give a "
                "one-dimensional array of integers"
            )
        wrong = labels[(labels < 0) | (labels >= classes)]
        if wrong.size:
            raise ValueError(f"{name}: label {wrong[0]} is not allowed; allowed: 0 to {classes - 1}")
    n = count_records(gold=gold, predicted=predicted)
    return np.asarray(gold, np.int64), np.asarray(predicted, np.int64), n


def _columns(name: str, values: np.ndarray, n: int, classes: int) -> np.ndarray:
    values = np.asarray(values)
    if values.shape != (n, classes):
        raise ValueError(f"{name}: shape {list(values.shape)} is not allowed; it must be [{n}, {classes}]")
    return values


def _indicators(name: str, values: np.ndarray, n: int, classes: int) -> np.ndarray:
    values = _columns(name, values, n, classes)
    if not np.isin(values, (0, 1)).all():
        raise ValueError(f"{name}: values other than 0 and 1 are not allowed")
    return values.astype(bool)


def _averages(counts: Counts, names: Sequence[str], occurring_only: bool) -> list[Score]:
    """Return the scores precision, recall and F1: the micro, macro and weighted averages, and one per class."""
    of_all = once(lambda indices: precision_recall_f1(counts(indices).sum(axis=1)))
    of_each = once(lambda indices: precision_recall_f1(counts(indices)))

    def macro(row: int, indices: np.ndarray) -> float:
        values = of_each(indices)[row]
        return float(values[counts(indices)[1:].any(axis=0)].mean() if occurring_only else values.mean())

    def weighted(row: int, indices: np.ndarray) -> float:
        in_gold = counts(indices)[1]
        total = in_gold.sum()
        return float(of_each(indices)[row] @ in_gold / total) if total else 0.0

    def element(rates: Callable[[np.ndarray], np.ndarray], *place: int) -> Callable[[np.ndarray], float]:
        return lambda indices: float(rates(indices)[place])

    scores = []
    for row, kind in enumerate(KINDS):
        scores.append(Score(f"{kind}_micro", element(of_all, row)))
        scores += [Score(f"{kind}_{of.__name__}", partial(of, row)) for of in (macro, weighted)]
        scores += [Score(f"{kind}/{name}", element(of_each, row, index)) for index, name in enumerate(names)]
    return scores


def _mean_over_classes(
    name: str, area: Callable[[np.ndarray, np.ndarray], float], ranks: Sequence[Counts]
) -> Score:
    return Score(name, lambda indices: float(np.mean([area(*counts(indices)) for counts in ranks])))


def _one_vs_rest(gold: np.ndarray, scores: np.ndarray, times: Counts) -> Callable[[np.ndarray], float]:
    """Return a function from the indices of a resample to the mean of the ``_auroc`` of all classes.

    ``gold`` [n] is the class of each record, ``scores`` float[n, C]. The pairs in the correct order, a tie counted
    as half a pair, are those of a positive with any record, less those of two positives, which are half of all such
    pairs. So a resample requires one cumulative sum for all classes.
    """
    n, classes = scores.shape
    if np.isnan(scores).any():
        return lambda indices: float("nan")
    order = np.argsort(scores, axis=0, kind="stable")
    ascending = np.take_along_axis(scores, order, axis=0)
    # The ranks of the records of a class in its column: the first and the one after the last with the same score.
    first, last = np.empty(n, np.int64), np.empty(n, np.int64)
    for c in range(classes):
        own = np.flatnonzero(gold == c)
        first[own], last[own] = (
            np.searchsorted(ascending[:, c], scores[own, c], side) for side in ("left", "right")
        )
    # One row of all columns. Its sums are needed between the starts of the columns and these ranks only.
    order_of_all = np.append(order.T.ravel(), 0)
    starts = np.arange(classes + 1) * n
    cuts, places = np.unique(
        np.concatenate([starts, starts[gold] + first, starts[gold] + last]), return_inverse=True
    )
    start, first, last = places[: classes + 1][gold], *np.split(places[classes + 1 :], 2)

    def of(indices: np.ndarray) -> float:
        counts = times(indices)
        below = np.cumsum(np.append(0.0, np.add.reduceat(np.take(counts, order_of_all), cuts)))
        ahead = (below[first] + below[last]) / 2 - below[start]
        positives = np.bincount(gold, counts, classes)
        pairs = positives * (counts.sum() - positives)
        right = np.bincount(gold, counts * ahead, classes) - positives**2 / 2
        return float(np.mean(right / pairs)) if pairs.all() else float("nan")

    return of


def _by_rank(gold: np.ndarray, scores: np.ndarray, times: Counts) -> Counts:
    """Return a function from the indices of a resample to the numbers of negatives and positives at each score.

    Its result is float64[2, R] for the R different scores in ascending order, or NaN if a score is NaN. The records
    are sorted only once; each resample only requires counting. ``times`` is a function from the indices of a
    resample to the number of occurrences of each record.
    """
    scores = np.asarray(scores, np.float64)
    if np.isnan(scores).any():
        return lambda indices: np.full((2, 1), np.nan)
    order = np.argsort(scores, kind="stable")
    ascending = scores[order]
    firsts = np.flatnonzero(np.append(True, ascending[1:] != ascending[:-1]))
    sides = np.stack([~gold[order], gold[order]]).astype(np.float64)

    @once
    def counts(indices: np.ndarray) -> np.ndarray:
        of_records = sides * np.take(times(indices), order)
        return of_records if len(firsts) == len(order) else np.add.reduceat(of_records, firsts, axis=1)

    return counts


def _auroc(negatives: np.ndarray, positives: np.ndarray) -> float:
    pairs = negatives.sum() * positives.sum()
    return float(positives @ (np.cumsum(negatives) - negatives / 2) / pairs) if pairs else float("nan")


def _average_precision(negatives: np.ndarray, positives: np.ndarray) -> float:
    if not positives.any():
        return 0.0
    hits = np.cumsum(positives[::-1])
    # A rank that the resample lacks has no positives, so the value of its quotient does not matter.
    precision = hits / np.maximum(hits + np.cumsum(negatives[::-1]), 1)
    return float(positives[::-1] @ precision / hits[-1])
