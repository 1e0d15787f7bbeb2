"""Exact match and F1 of answers in English, with and without unanswerable questions (SQuAD 1.1 and 2.0)."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.metrics.score import Score, count_records, mean_score

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class BestThresholds:
    """The null odds above which no answer is best predicted, chosen on the scored set itself."""

    exact: float
    f1: float


def normalize(text: str) -> str:
    """Lower case without ASCII punctuation, articles and surplus white space (SQuAD ``evaluate-v2.0.py``)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def exact_and_f1(prediction: str, references: Sequence[str]) -> tuple[float, float]:
    """Each the maximum over ``references``; one that normalizes to nothing is dropped, none left is no answer."""
    predicted = normalize(prediction)
    golds = [gold for gold in map(normalize, references) if gold] or [""]
    return float(predicted in golds), max(_bag_f1(predicted.split(), gold.split()) for gold in golds)


def squad_scores(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    null_odds: Sequence[float] | np.ndarray | None = None,
    threshold: float = 0.0,
) -> tuple[list[Score], BestThresholds | None]:
    """exact and f1 (from 0 to 1) of ``predictions`` [n]; references of an unanswerable question: none, or only "".

    With ``null_odds`` [n] (score of no answer minus that of the best span) predictions are the best spans, and no
    answer is predicted where the odds are above ``threshold``; then there are also exact/best_threshold and
    f1/best_threshold, and the thresholds. Without, predictions are taken as they are ("" is no answer). If there
    are questions of both kinds: exact and f1, each /has_answer and /no_answer.
    """
    n = count_records(predictions=predictions, references=references)
    has_answer = np.array([any(texts) for texts in references])
    spans = np.array([exact_and_f1(*pair) for pair in zip(predictions, references, strict=True)])
    names = ("exact", "f1")
    columns = dict(zip(names, spans.T, strict=True))
    best: dict[str, float] = {}
    if null_odds is not None:
        odds = np.asarray(null_odds, np.float64)
        if odds.shape != (n,) or not np.isfinite(odds).all():
            raise ValueError(f"null_odds must be {n} finite numbers, one for each prediction")
        best = {name: _best_threshold(columns[name], has_answer, odds) for name in names}
        for name, limit in best.items():
            columns[f"{name}/best_threshold"] = _at_threshold(columns[name], has_answer, odds, limit)
            columns[name] = _at_threshold(columns[name], has_answer, odds, threshold)
    scores = [mean_score(name, values) for name, values in columns.items()]
    if has_answer.any() and not has_answer.all():
        scores += [mean_score(f"{name}/has_answer", columns[name], has_answer) for name in names]
        scores += [mean_score(f"{name}/no_answer", columns[name], ~has_answer) for name in names]
    return scores, BestThresholds(**best) if best else None


def _bag_f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    common = (Counter(predicted) & Counter(gold)).total()
    return 2 * common / (len(predicted) + len(gold))


def _at_threshold(spans: np.ndarray, has_answer: np.ndarray, odds: np.ndarray, threshold: float) -> np.ndarray:
    """Value of each question: that of its span, or of no answer where the odds are above the threshold."""
    return np.where(odds > threshold, ~has_answer, spans)


def _best_threshold(spans: np.ndarray, has_answer: np.ndarray, odds: np.ndarray) -> float:
    """The lowest threshold of the largest mean.

    Unlike ``evaluate-v2.0.py``, which takes probabilities: questions of equal odds change together, and if no
    answer is best everywhere, the threshold is below all odds and not 0. So the best value is always the one that
    the threshold gives.
    """
    order = np.argsort(odds, kind="stable")
    ascending = odds[order]
    gains = np.cumsum((spans - ~has_answer)[order])
    last_of_equals = np.append(ascending[1:] != ascending[:-1], True)
    thresholds = np.append(np.nextafter(ascending[0], -np.inf), ascending[last_of_equals])
    return float(thresholds[np.argmax(np.append(0.0, gains[last_of_equals]))])
