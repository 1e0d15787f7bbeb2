"""Metrics of tag sequences: whole entities (values equal to seqeval's), tags, and intent with slots."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from bert_jax.metrics.score import Score, count_records, divide, mean_score, once, precision_recall_f1, repeats

Tags = Sequence[Sequence[str]]


def entities(tags: Sequence[str], strict: bool = False) -> list[tuple[str, int, int]]:
    """(type, first, end) of each entity of one sentence, ``end`` exclusive; the type of a bare B, I, E, S is "_".

    Default: as conlleval and seqeval, where every tag but O belongs to an entity: I or E goes on after B or I of
    the same type, everything else begins one. This reads IOB2, IOB1 and BIOES alike. ``strict``: IOB2 as written,
    as seqeval mode="strict", scheme=IOB2: an I that continues nothing is no entity. ValueError for other tags.
    """
    found: list[tuple[str, int, int]] = []
    previous = outside = ("O", "")
    for position, tag in enumerate(tags):
        prefix, kind = current = _split(tag)
        if strict and prefix in "ES":
            raise ValueError(f"strict scores are of IOB2 tags, which {tag!r} is not")
        if prefix in "IE" and previous[0] in "BI" and previous[1] == kind:
            found[-1] = (kind, found[-1][1], position + 1)
        elif strict and prefix == "I":
            current = outside  # so that the next I continues nothing either
        elif prefix != "O":
            found.append((kind, position, position + 1))
        previous = current
    return found


def tagging_scores(gold: Tags, predicted: Tags, strict: bool = False) -> list[Score]:
    """precision, recall and f1 of entities (micro), each also /TYPE; accuracy of tags. A record is a sentence."""
    _check_sentences(gold, predicted)
    pairs = [(set(entities(g, strict)), set(entities(p, strict))) for g, p in zip(gold, predicted, strict=True)]
    kinds = sorted({kind for pair in pairs for found in pair for kind, *_ in found})
    column = {kind: index for index, kind in enumerate(kinds)}
    counts = np.zeros((len(pairs), 3, len(kinds)))
    for row, (in_gold, in_predicted) in zip(counts, pairs, strict=True):
        for index, found in enumerate((in_gold & in_predicted, in_gold, in_predicted)):
            for kind, *_ in found:
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
        for row, name in enumerate(("precision", "recall", "f1"))
    ]
    return [*scores, tag_accuracy(gold, predicted)]


def tag_accuracy(gold: Tags, predicted: Tags) -> Score:
    """``accuracy``: the share of tags that are right, whatever they are called. A record is a sentence."""
    _check_sentences(gold, predicted)
    right = [sum(a == b for a, b in zip(g, p, strict=True)) for g, p in zip(gold, predicted, strict=True)]
    counts = np.array([right, [len(sentence) for sentence in gold]], np.float64).T

    def of(indices: np.ndarray) -> float:
        hits, total = repeats(indices, len(counts)) @ counts
        return float(divide(hits, total))

    return Score("accuracy", of)


def joint_scores(
    gold_intents: Sequence[int | str] | np.ndarray,
    predicted_intents: Sequence[int | str] | np.ndarray,
    gold_slots: Tags,
    predicted_slots: Tags,
) -> list[Score]:
    """sentence_accuracy (the intent and every tag right) and intent_accuracy; of the slots alone there is
    :func:`tagging_scores`."""
    count_records(
        gold_intents=gold_intents,
        predicted_intents=predicted_intents,
        gold_slots=gold_slots,
        predicted_slots=predicted_slots,
    )
    _check_sentences(gold_slots, predicted_slots)
    intent_right = np.array([g == p for g, p in zip(gold_intents, predicted_intents, strict=True)])
    slots_right = np.array([list(g) == list(p) for g, p in zip(gold_slots, predicted_slots, strict=True)])
    return [
        mean_score("sentence_accuracy", intent_right & slots_right),
        mean_score("intent_accuracy", intent_right),
    ]


def _split(tag: str) -> tuple[str, str]:
    """Prefix and type of a tag."""
    prefix, _, kind = tag.partition("-")
    if tag != "O" and prefix not in ("B", "I", "E", "S"):
        raise ValueError(f"{tag!r} is no entity tag; allowed are O and B, I, E or S with or without -TYPE")
    return prefix, kind or "_"


def _check_sentences(gold: Tags, predicted: Tags) -> None:
    count_records(gold=gold, predicted=predicted)
    for number, (g, p) in enumerate(zip(gold, predicted, strict=True)):
        if len(g) != len(p):
            raise ValueError(f"sentence {number} has {len(g)} tags in gold, {len(p)} in predicted")
