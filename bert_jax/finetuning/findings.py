"""Findings about the predictions of a split for the report: the worst mistakes with their texts, and charts."""

import bisect
import collections
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.metrics import Score
from bert_jax.metrics.classification import calibration_error
from bert_jax.metrics.entities import entities
from bert_jax.objectives.display import Confidence, Confusion, Counts, Findings, Mistake, Slices, Support
from bert_jax.records import Record
from bert_jax.tasks.task import Prediction, Task

# Number of mistakes and of points of a split, and of characters of a text, that the report shows.
_MISTAKES, _POINTS, _CHARACTERS = 12, 400, 400
# Number of characters that an excerpt shows on each side of an answer.
_AROUND = 100
# Number of parts of the range of values.
_PARTS = 5
# Type, first word and end of an entity.
_Entity = tuple[str, int, int]
# The type in place of an entity that is missing.
_NONE = "none"
# Groups of the lengths of answers and contexts and of ranks: the smallest value of each, and its name.
_LENGTHS = {0: "none", 1: "1", 2: "2", 3: "3", 4: "4-5", 6: "6-9", 10: "10+"}
_CONTEXTS = {0: "up to 100", 101: "101-200", 201: "201-400", 401: "401-800", 801: "801+"}
_HALVES = {0: "lower half", 1: "upper half"}
# Questions by their first question word: a pattern in lower-case text, and the name of the group. Of words that
# begin at the same place, the first one counts.
_QUESTION_WORDS = {
    r"\b(?:who|whom|whose)\b|谁": "who",
    r"\bwhen\b|何时|什么时": "when",
    r"\bwhere\b|哪里|哪儿|何处|在哪|什么地方": "where",
    r"\bwhich\b|哪": "which",
    r"\bwhat\b|什么|何": "what",
    r"\bwhy\b|为什么|为何": "why",
    r"\bhow (?:many|much)\b|多少|几": "how many or much",
    r"\bhow\b|怎|如何": "how",
}
_QUESTION_GROUPS = (*_QUESTION_WORDS.values(), "other")
_RANKS = {1: "1", 2: "2-3", 4: "4-10", 11: "11-100", 101: "101+"}


def findings_of(task: Task, records: Sequence[Record], predictions: Sequence[Prediction]) -> Findings:
    """Return what the predictions of the records that ``Task.scored`` selects show; empty for a task of the user
    whose records or predictions have other fields than those of this package."""
    numbers = task.scored(records)
    records, predictions = [records[i] for i in numbers], [predictions[i] for i in numbers]
    fields: Mapping[str, Any] = predictions[0] if predictions else {}
    kind = next((name for name in _KINDS if name in fields), None)
    try:
        return {} if kind is None else _KINDS[kind](task, records, predictions)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return {}


def _worst(
    records: Sequence[Record],
    errors: np.ndarray,
    mistake: Callable[[int], Mistake],
    *,
    wrong: np.ndarray | None = None,
) -> Findings:
    """Return the records with the largest ``errors`` float64[n], of those that are ``wrong`` bool[n] if this is
    known, and 0 errors not at all."""
    order = np.argsort(-np.nan_to_num(errors, nan=0.0), kind="stable")
    chosen = [int(i) for i in order if (errors[i] > 0 if wrong is None else wrong[i])][:_MISTAKES]
    texts = [_texts(records[i]) | mistake(i) for i in chosen]
    found: Findings = {"scored": len(records), "mistakes": texts}
    return found if wrong is None else found | {"wrong": int(wrong.sum())}


def _texts(record: Record) -> Mistake:
    found: Mistake = {"text": _cut(record.text)} if record.text else {}
    return found | {"text_pair": _cut(record.text_pair)} if record.text_pair else found


def _cut(text: str) -> str:
    """Return the first characters of ``text``."""
    return text if len(text) <= _CHARACTERS else text[:_CHARACTERS] + " …"


def _excerpt(text: str, marks: Sequence[tuple[int, int, str]]) -> tuple[str, list[tuple[int, int, str]]]:
    """Return the parts of ``text`` around (first, end, name) of ``marks``, cut between words, and the
    marks in them."""
    windows: list[tuple[int, int]] = []
    for first, end, _ in sorted(marks) or [(0, _CHARACTERS - _AROUND, "")]:
        window = (_between_words(text, first - _AROUND, -1), _between_words(text, end + _AROUND, 1))
        if windows and window[0] - windows[-1][1] < _AROUND:
            window = (windows[-1][0], max(windows.pop()[1], window[1]))
        windows.append(window)
    found, placed = "", list[tuple[int, int, str]]()
    for first, end in windows:
        found += "… " if first else ""
        placed += [
            (a - first + len(found), b - first + len(found), name) for a, b, name in marks if first <= a < end
        ]
        found += text[first:end].rstrip() + (" " if end < len(text) else "")
    return found + ("…" if windows[-1][1] < len(text) else ""), placed


def _between_words(text: str, place: int, step: int) -> int:
    """Return a place from ``place`` on, in direction ``step``, between words; in text without spaces, ``place``
    itself."""
    place = min(max(place, 0), len(text))
    for near in range(place, place + 30 * step, step):
        if near <= 0 or near >= len(text) or text[near - 1].isspace():
            return min(max(near, 0), len(text))
    return place


def _classes(task: Task, records: Sequence[Record], predictions: Sequence[Prediction]) -> Findings:
    names = dict(zip(task.settings.labels, task.names, strict=False))
    pairs = [(record.label or "", one["label"]) for record, one in zip(records, predictions, strict=True)]
    sure = np.array([one.get("score", 0.5) for one in predictions])

    def mistake(i: int) -> Mistake:
        gold, predicted = (names.get(label, label) for label in pairs[i])
        return {"gold": gold, "predicted": predicted, "score": float(sure[i])}

    wrong = np.array([gold != predicted for gold, predicted in pairs])
    found = _worst(records, sure, mistake, wrong=wrong)
    return found | _confidence(sure, wrong) if all("score" in one for one in predictions) else found


def _confidence(sure: np.ndarray, wrong: np.ndarray) -> Findings:
    """Return how the probabilities ``sure`` of the predicted classes fit the share of right ones."""
    error = calibration_error(wrong.astype(int), np.stack([sure, np.zeros_like(sure)], axis=1))
    found: Confidence = {"mean": float(sure.mean()), "accuracy": float(1 - wrong.mean()), "error": error}
    return {"confidence": found}


def _label_sets(task: Task, records: Sequence[Record], predictions: Sequence[Prediction]) -> Findings:
    pairs = [({*(record.labels or ())}, {*one["labels"]}) for record, one in zip(records, predictions, strict=True)]
    errors = np.array([float(len(gold ^ predicted)) for gold, predicted in pairs])

    def mistake(i: int) -> Mistake:
        gold, predicted = (", ".join(sorted(one)) or "none" for one in pairs[i])
        return {"gold": gold, "predicted": predicted}

    return _worst(records, errors, mistake, wrong=errors > 0)


def _values(task: Task, records: Sequence[Record], predictions: Sequence[Prediction]) -> Findings:
    gold = np.array([float(record.label or "nan") for record in records])
    return _numbers(records, gold, np.array([one["value"] for one in predictions]), "predicted", scaled=False)


def _numbers(
    records: Sequence[Record], gold: np.ndarray, predicted: np.ndarray, name: str, *, scaled: bool
) -> Findings:
    """Return the largest differences of values; with ``scaled``, of values with mean 0 and deviation 1."""

    def standard(values: np.ndarray) -> np.ndarray:
        return (values - values.mean()) / (values.std() or 1.0)

    shown = f"{name} " if scaled else ""
    errors = np.abs(standard(gold) - standard(predicted)) if scaled else np.abs(gold - predicted)
    found = _worst(records, errors, lambda i: {"gold": f"{gold[i]:.4g}", "predicted": f"{shown}{predicted[i]:.4g}"})
    points = [(float(gold[i]), float(predicted[i])) for i in _sample(len(gold))]
    found |= {"points": {"title": f"{name} over label", "x": "label", "y": name, "values": points}}
    return found if scaled else found | {"counts": _distribution(gold, predicted)}


def _distribution(gold: np.ndarray, predicted: np.ndarray) -> Counts:
    """Return the numbers of labels and predictions in equal parts of the range of the labels; predictions outside
    of it count in the first or the last part."""
    edges = np.histogram_bin_edges(gold[np.isfinite(gold)], bins=_PARTS)
    middles = [f"{value:.3g}" for value in (edges[1:] + edges[:-1]) / 2]

    def counts(values: np.ndarray) -> list[int]:
        return np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0].tolist()

    series = {"correct": counts(gold), "predicted": counts(predicted)}
    return {"title": "records by value", "groups": middles, "series": series}


def _sample(count: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, min(count, _POINTS)).astype(int)).tolist()


def _choices(task: Task, records: Sequence[Record], predictions: Sequence[Prediction]) -> Findings:
    pairs = [(int(record.label or 0), one["choice"]) for record, one in zip(records, predictions, strict=True)]
    sure = np.array([max([*one.get("probabilities", ()), 0.0]) for one in predictions], float)

    def mistake(i: int) -> Mistake:
        gold, predicted = (_cut(records[i].choices[number]) for number in pairs[i])
        return {"gold": gold, "predicted": predicted, "score": float(sure[i])}

    wrong = np.array([gold != predicted for gold, predicted in pairs])
    return _worst(records, sure, mistake, wrong=wrong) | _confidence(sure, wrong)


def _tags(task: Task, records: Sequence[Record], predictions: Sequence[Prediction]) -> Findings:
    pairs = [
        (record.tags or (), [token["label"] for token in one["tokens"]])
        for record, one in zip(records, predictions, strict=True)
    ]
    errors = np.array([float(sum(a != b for a, b in zip(*pair, strict=False))) for pair in pairs])

    def mistake(i: int) -> Mistake:
        words = zip(records[i].words, *pairs[i], strict=False)
        return {"words": [*words][:80]}

    found = _worst(records, errors, mistake, wrong=errors > 0) | {"support": _support([gold for gold, _ in pairs])}
    if found["support"]["unit"] != "entities":
        return found
    strict = getattr(task.settings, "tag_scoring", "") == "strict"
    return found | _entity_kinds([(entities(gold, strict), entities(own, strict)) for gold, own in pairs])


def _entity_kinds(pairs: Sequence[tuple[list[_Entity], list[_Entity]]]) -> Findings:
    """Return the kinds of mistakes in the entities (correct, predicted) of sentences, and the types of predicted
    entities by the correct type."""
    kinds = dict.fromkeys(
        ("right", "wrong boundary", "wrong type", "wrong boundary and type", "missed", "spurious"), 0
    )
    types = collections.Counter[tuple[str, str]]()
    for gold, predicted in pairs:
        for one in gold:
            over = [other for other in predicted if one[1] < other[2] and other[1] < one[2]]
            over.sort(key=lambda other: (other[1:] != one[1:], other[0] != one[0]))
            best = over[0] if over else None
            kinds[_entity_kind(one, best)] += 1
            types[one[0], best[0] if best else _NONE] += 1
        for one in predicted:
            if not any(one[1] < other[2] and other[1] < one[2] for other in gold):
                kinds["spurious"] += 1
                types[_NONE, one[0]] += 1
    names = [*sorted({kind for pair in types for kind in pair} - {_NONE}), _NONE]
    counts = [[types[row, column] for column in names] for row in names]
    matrix: Confusion = {"labels": names, "counts": counts}
    return {"kinds": {"unit": "entities", "counts": kinds}, "types": matrix}


def _entity_kind(gold: _Entity, predicted: _Entity | None) -> str:
    if predicted is None:
        return "missed"
    wrong = [
        name
        for name, differs in (("boundary", gold[1:] != predicted[1:]), ("type", gold[0] != predicted[0]))
        if differs
    ]
    return f"wrong {' and '.join(wrong)}" if wrong else "right"


def _support(sentences: Sequence[Sequence[str]]) -> Support:
    """Return the numbers of entities by type or, if the tags are no entity tags, of tags; and the accuracy of the
    most frequent tag."""
    tags = collections.Counter(tag for sentence in sentences for tag in sentence)
    try:
        unit = "entities"
        counts = collections.Counter(kind for sentence in sentences for kind, *_ in entities(sentence))
    except ValueError:
        unit, counts = "tags", tags
    tag, count = max(tags.items(), key=lambda one: one[1])
    accuracy = count / tags.total()
    return {"unit": unit, "counts": dict(counts), "answer": f"tag {tag} for all", "accuracy": accuracy}


def _spans(task: Task, records: Sequence[Record], predictions: Sequence[Prediction]) -> Findings:
    named = {score.name: score for score in task.scores(records, predictions)}
    score = next(named[name] for name in named if name in ("f1", "exact"))
    others = [other for name, other in named.items() if name in ("f1", "exact") and other is not score]
    right = np.array([score.of(np.array([i])) for i in range(len(records))])
    sure = np.array([one.get("score", 0.0) for one in predictions], float)
    errors = 1 - right / (max(right.max(), 1.0)) + 1e-9 * np.argsort(np.argsort(sure))
    in_characters = getattr(task.settings, "answer_scoring", "") == "chinese"

    def length(answer: str) -> int:
        return len(answer) if in_characters else len(answer.split())

    best, unit = max(right.max(), 1.0), "characters" if in_characters else "words"
    lengths = [min((length(a.text) for a in one.answers or ()), default=0) for one in records]
    counts: Counts = {
        "title": f"lengths of answers in {unit}",
        "groups": [*_LENGTHS.values()],
        "series": {
            "correct": _grouped(lengths, _LENGTHS),
            "predicted": _grouped([length(one["answer"]) for one in predictions], _LENGTHS),
        },
    }
    contexts = [length(record.text_pair or "") for record in records]
    halves = 2 * np.argsort(np.argsort(sure)) // max(len(sure), 1)
    kinds = collections.Counter(
        "right" if value >= best else _span_kind(record, one)
        for value, record, one in zip(right, records, predictions, strict=True)
    )
    asked = [_question_word(record.text) for record in records]
    slices = [
        _sliced(f"length of the correct answer in {unit}", score, lengths, _LENGTHS, others),
        _sliced(f"length of the context in {unit}", score, contexts, _CONTEXTS, others),
        _sliced("score of the predicted answer", score, halves.tolist(), _HALVES, others),
    ]
    if len({*asked}) > 1:
        slices.insert(0, _sliced("question word", score, asked, dict(enumerate(_QUESTION_GROUPS)), others))

    def mistake(i: int) -> Mistake:
        return _span_mistake(records[i], predictions[i])

    found = _worst(records, errors, mistake, wrong=right < best) | {"counts": counts, "slices": slices}
    return found | {"kinds": {"unit": "answers", "counts": dict(kinds.most_common())}}


def _span_mistake(record: Record, prediction: Prediction) -> Mistake:
    """Return the part of the passage with the correct and the predicted answer, and both answers."""
    golds = list(dict.fromkeys(answer.text for answer in record.answers or ()))
    known = [(a.start, a.start + len(a.text), "gold") for a in record.answers or () if a.start >= 0][:1]
    if prediction["answer"] and "start" in prediction and "end" in prediction:
        known.append((prediction["start"], prediction["end"], "predicted"))
    text, marks = _excerpt(record.text_pair or "", known)
    return {
        "text_pair": text,
        "marks": marks,
        "gold": " / ".join(golds[:3]) or "no answer",
        "predicted": prediction["answer"] or "no answer",
    }


def _question_word(question: str) -> int:
    """Return the index in ``_QUESTION_GROUPS`` of the question word that occurs first."""
    found = [
        (match.start(), number)
        for number, pattern in enumerate(_QUESTION_WORDS)
        if (match := re.search(pattern, question.lower()))
    ]
    return min(found)[1] if found else len(_QUESTION_WORDS)


def _span_kind(record: Record, prediction: Prediction) -> str:
    """Return the kind of a wrong answer to a question, by its place."""
    golds = [(answer.start, answer.start + len(answer.text)) for answer in record.answers or ()]
    if not golds or not prediction["answer"]:
        return "no answer predicted" if golds else "answer where there is none"
    first, end = prediction.get("start", -1), prediction.get("end", -1)
    over = [gold for gold in golds if first < gold[1] and gold[0] < end]
    if any(first <= gold[0] and gold[1] <= end for gold in over):
        return "too long"
    if any(gold[0] <= first and end <= gold[1] for gold in over):
        return "too short"
    return "partly the correct words" if over else "in another place"


def _grouped(values: Sequence[float], groups: Mapping[int, str]) -> list[int]:
    """Return the number of ``values`` in each of the ``groups``."""
    return np.bincount(_group_numbers(values, groups), minlength=len(groups)).tolist()


def _group_numbers(values: Sequence[float], groups: Mapping[int, str]) -> list[int]:
    """Return the index of the group of each of the ``values``."""
    starts = [*groups]
    return [max(0, bisect.bisect_right(starts, value) - 1) for value in values]


def _sliced(
    title: str, score: Score, values: Sequence[float], groups: Mapping[int, str], others: Sequence[Score] = ()
) -> Slices:
    """Return the score and ``others`` of the records in each group of ``values`` that has records."""
    numbers, found = np.array(_group_numbers(values, groups)), list[tuple[str, int, float]]()
    more: dict[str, list[float]] = {other.name: [] for other in others}
    for number, name in enumerate(groups.values()):
        if len(own := np.flatnonzero(numbers == number)):
            found.append((name, len(own), float(score.of(own))))
            for other in others:
                more[other.name].append(float(other.of(own)))
    slices: Slices = {"title": title, "metric": score.name, "groups": found}
    return slices | {"others": more} if more else slices


def _cosines(task: Task, records: Sequence[Record], predictions: Sequence[Prediction]) -> Findings:
    if "label" in predictions[0]:
        return _classes(task, records, predictions)
    cosines = np.array([one["cosine"] for one in predictions])
    if all("cosine_negative" in one for one in predictions):
        others = np.array([one["cosine_negative"] for one in predictions])

        def nearer(i: int) -> Mistake:
            return {
                "gold": f"{_cut(records[i].text_pair or '')} (cosine {cosines[i]:.3f})",
                "predicted": f"{_cut(records[i].negatives[0])} (cosine {others[i]:.3f})",
                "text_pair": "",
            }

        points = [(float(others[i]), float(cosines[i])) for i in _sample(len(records))]
        names = ("cosine of the dissimilar text", "cosine of the similar text")
        found = _worst(records, others - cosines, nearer, wrong=others >= cosines)
        return found | {"points": {"title": "cosines", "x": names[0], "y": names[1], "values": points}}
    if all("rank" in one for one in predictions):
        ranks = np.array([one["rank"] or np.nan for one in predictions], float)
        found = _worst(records, ranks, lambda i: {"predicted": f"rank {ranks[i]:g}"}, wrong=ranks > 1)
        counts: Counts = {
            "title": "rank of the right text",
            "groups": [*_RANKS.values()],
            "series": {"records": _grouped(ranks[~np.isnan(ranks)].tolist(), _RANKS)},
        }
        return found | {"counts": counts}
    gold = np.array([float(record.label or "nan") for record in records])
    return _numbers(records, gold, cosines, "cosine", scaled=True)


# Field of a prediction -> function.
_KINDS: dict[str, Callable[[Task, Sequence[Record], Sequence[Prediction]], Findings]] = {
    "tokens": _tags,
    "answer": _spans,
    "choice": _choices,
    "cosine": _cosines,
    "labels": _label_sets,
    "label": _classes,
    "value": _values,
}
