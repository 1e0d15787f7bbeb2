"""Exact match and F1 of answers in English, with and without unanswerable questions (SQuAD 1.1 and 2.0)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bert_jax.metrics.score import Score, count_records, mean_score

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Return lower-case text without ASCII punctuation, articles and extra spaces (SQuAD ``evaluate-v2.0.py``)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def exact_and_f1(prediction: str, references: Sequence[str]) -> tuple[float, float]:
    """Return (exact, f1), each the maximum over ``references``.

    A reference that is empty after :func:`normalize` is ignored; if none remains, "no answer" is correct.
    """
    predicted = normalize(prediction)
    golds = [gold for gold in map(normalize, references) if gold] or [""]
    return float(predicted in golds), max(_bag_f1(predicted.split(), gold.split()) for gold in golds)


def squad_scores(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    null_odds: Sequence[float] | np.ndarray | None = None,
    threshold: float = 0.0,
) -> list[Score]:
    """Return the scores exact and f1 (0 to 1) of ``predictions``, one prediction per question.

    An unanswerable question has no references, or only "". With ``null_odds`` (for each question, the score of no
    answer minus the score of the best span), the predictions must be the best spans, and odds above ``threshold``
    predict no answer. For exact and for f1, this adds two scores: with the suffix /best_threshold, the metric at
    the threshold that is best on these questions; with the suffix /best_threshold_value, this threshold. Without
    ``null_odds``, the prediction "" means no answer. If only some questions are answerable, exact and f1 are also
    computed on the answerable questions (suffix /has_answer) and on the unanswerable ones (suffix /no_answer).
    Raises ``ValueError`` if the numbers of predictions, references and odds differ, or if odds are not finite.
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
            raise ValueError(
                f"null_odds: the shape {list(odds.shape)} is wrong or a value is not finite; give {n} finite "
                "numbers"
            )
        best = {name: _best_threshold(columns[name], has_answer, odds) for name in names}
        for name, limit in best.items():
            columns[f"{name}/best_threshold"] = _at_threshold(columns[name], has_answer, odds, limit)
            columns[name] = _at_threshold(columns[name], has_answer, odds, threshold)
    scores = [mean_score(name, values) for name, values in columns.items()]
    if has_answer.any() and not has_answer.all():
        scores += [mean_score(f"{name}/has_answer", columns[name], has_answer) for name in names]
        scores += [mean_score(f"{name}/no_answer", columns[name], ~has_answer) for name in names]
    return scores + [_constant(f"{name}/best_threshold_value", limit) for name, limit in best.items()]


def _constant(name: str, value: float) -> Score:
    return Score(name, lambda indices: value)


def _bag_f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    common = (Counter(predicted) & Counter(gold)).total()
    return 2 * common / (len(predicted) + len(gold))


def _at_threshold(spans: np.ndarray, has_answer: np.ndarray, odds: np.ndarray, threshold: float) -> np.ndarray:
    """Return the metric of each question.

    If the odds exceed the threshold, it is 1 for an unanswerable and 0 for an answerable question; otherwise it is
    the value in ``spans``.
    """
    return np.where(odds > threshold, ~has_answer, spans)


def _best_threshold(spans: np.ndarray, has_answer: np.ndarray, odds: np.ndarray) -> float:
    """Return the lowest of the thresholds with the largest mean of the metric over the questions.

    Unlike in ``evaluate-v2.0.py``, questions with equal odds switch to "no answer" together. If "no answer" is best
    for every question, the threshold is below all odds (in ``evaluate-v2.0.py``: 0). The returned threshold
    therefore always attains the best mean.
    """
    order = np.argsort(odds, kind="stable")
    ascending = odds[order]
    gains = np.cumsum((spans - ~has_answer)[order])
    last_of_equals = np.append(ascending[1:] != ascending[:-1], True)
    thresholds = np.append(np.nextafter(ascending[0], -np.inf), ascending[last_of_equals])
    return float(thresholds[np.argmax(np.append(0.0, gains[last_of_equals]))])
