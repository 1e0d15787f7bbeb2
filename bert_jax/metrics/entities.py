"""Metrics of tag sequences: entities (values equal seqeval's), tags, and intents with slots."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from bert_jax.metrics.score import Score, count_records, divide, mean_score, once, precision_recall_f1, repeats

Tags = Sequence[Sequence[str]]
Intents = Sequence[int | str] | np.ndarray


def entities(tags: Sequence[str], strict: bool = False) -> list[tuple[str, int, int]]:
    """Return (type, first, end) of each entity of one sentence.

    ``first`` and ``end`` are indices of words; ``end`` is exclusive. The type of a tag B, I, E or S without -TYPE
    is "_".

    By default, tags are read as in conlleval and seqeval: every tag but O belongs to an entity; I or E continues a
    B or I of the same type, and every other tag begins an entity. This covers IOB2, IOB1 and BIOES. With
    ``strict``, tags are read as in seqeval with mode="strict" and scheme=IOB2: an I without a preceding B belongs
    to no entity. Raises ``ValueError`` for other tags.
    """
    spans: list[tuple[str, int, int]] = []
    previous = outside = ("O", "")
    for position, tag in enumerate(tags):
        prefix, kind = current = _split(tag)
        if strict and prefix in "ES":
            raise ValueError(f"tag {tag!r} is not allowed with strict scores; allowed: IOB2 tags")
        if prefix in "IE" and previous[0] in "BI" and previous[1] == kind:
            spans[-1] = (kind, spans[-1][1], position + 1)
        elif strict and prefix == "I":
            current = outside  # so that the next I continues no entity either
        elif prefix != "O":
            spans.append((kind, position, position + 1))
        previous = current
    return spans


def tagging_scores(gold: Tags, predicted: Tags, strict: bool = False) -> list[Score]:
    """Return f1, precision and recall of all entities, accuracy of tags, and the scores of each entity type.

    A record is a sentence. The scores of entity type TYPE are f1/TYPE, precision/TYPE and recall/TYPE. Raises
    ``ValueError`` if ``gold`` and ``predicted`` differ in the number of sentences or of tags in a sentence.
    """
    _check_sentences(gold, predicted)
    pairs = [(set(entities(g, strict)), set(entities(p, strict))) for g, p in zip(gold, predicted, strict=True)]
    kinds = sorted({kind for pair in pairs for members in pair for kind, *_ in members})
    column = {kind: index for index, kind in enumerate(kinds)}
    counts = np.zeros((len(pairs), 3, len(kinds)))
    for row, (in_gold, in_predicted) in zip(counts, pairs, strict=True):
        for index, members in enumerate((in_gold & in_predicted, in_gold, in_predicted)):
            for kind, *_ in members:
                row[index, column[kind]] += 1
    table = np.concatenate([counts.sum(axis=2, keepdims=True), counts], axis=2).reshape(len(pairs), -1)

    @once
    def rates(indices: np.ndarray) -> np.ndarray:
        return precision_recall_f1((repeats(indices, len(table)) @ table).reshape(3, -1))

    def rate(row: int, index: int, indices: np.ndarray) -> float:
        return float(rates(indices)[row, index])

    scores = [
        Score(name + suffix, partial(rate, row, index))
        for index, suffix in enumerate(["", *(f"/{kind}" for kind in kinds)])
        for row, name in ((2, "f1"), (0, "precision"), (1, "recall"))
    ]
    return [*scores[:3], tag_accuracy(gold, predicted), *scores[3:]]


def tag_accuracy(gold: Tags, predicted: Tags) -> Score:
    """Return the score ``accuracy``, the share of correct tags of any tagging scheme. A record is a sentence."""
    _check_sentences(gold, predicted)
    right = [sum(a == b for a, b in zip(g, p, strict=True)) for g, p in zip(gold, predicted, strict=True)]
    counts = np.array([right, [len(sentence) for sentence in gold]], np.float64).T

    def of(indices: np.ndarray) -> float:
        hits, total = repeats(indices, len(counts)) @ counts
        return float(divide(hits, total))

    return Score("accuracy", of)


def joint_scores(
    gold_intents: Intents, predicted_intents: Intents, gold_slots: Tags, predicted_slots: Tags
) -> list[Score]:
    """Return sentence_accuracy (share of sentences with the intent and every slot correct) and intent_accuracy. For
    scores of only the slots, use :func:`tagging_scores`."""
    count_records(gold_intents=gold_intents, predicted_intents=predicted_intents, gold_slots=gold_slots)
    _check_sentences(gold_slots, predicted_slots)
    intent_right = np.array([g == p for g, p in zip(gold_intents, predicted_intents, strict=True)])
    slots_right = np.array([list(g) == list(p) for g, p in zip(gold_slots, predicted_slots, strict=True)])
    return [
        mean_score("sentence_accuracy", intent_right & slots_right),
        mean_score("intent_accuracy", intent_right),
    ]


def _split(tag: str) -> tuple[str, str]:
    """Return the prefix and the type of a tag."""
    prefix, _, kind = tag.partition("-")
    if tag != "O" and prefix not in ("B", "I", "E", "S"):
        raise ValueError(f"tag {tag!r} is not allowed; allowed: O, and B, I, E or S with or without -TYPE")
    return prefix, kind or "_"


def _check_sentences(gold: Tags, predicted: Tags) -> None:
    count_records(gold=gold, predicted=predicted)
    for number, (g, p) in enumerate(zip(gold, predicted, strict=True)):
        if len(g) != len(p):
            raise ValueError(
                f"sentence {number} has {len(g)} tags in gold, {len(p)} in predicted; the numbers must be equal"
            )
