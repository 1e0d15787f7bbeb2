"""Labeled examples of a task in JSON lines, as ``bert-data records`` prints them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.inference.text_files import read_texts
from bert_jax.records import Answer, Record
from bert_jax.tasks.task import Task

_LISTS = ("words", "choices", "labels", "tags", "negatives")


def read_examples(files: Sequence[str], *, allow_texts: bool = False) -> list[Record]:
    """Return the examples in ``files``: JSON objects with text, text_pair, words, choices, negatives, label,
    labels, tags and answers. With ``allow_texts``, a file whose name does not end in .jsonl has one text per line.

    Raises ``ValueError`` for a table, and (file and number of the example) for other objects.
    """
    return [
        example(value, f"{name}: example {number}")
        for name in files
        for number, value in enumerate(read_texts((), name, not allow_texts), start=1)
    ]


def example(value: str | Mapping[str, Any], source: str) -> Record:
    """Return a text or an object as a record. Raises ``ValueError``, which begins with ``source``, for an object
    that ``bert-data records`` does not print."""
    entry: Mapping[str, Any] = {"text": value} if isinstance(value, str) else value
    lists = {name: entry.get(name) for name in _LISTS}
    wrong = [name for name in ("text", "text_pair") if not isinstance(entry.get(name, ""), str | None)]
    wrong += [name for name, values in lists.items() if not _are_texts(values)]
    answers = entry.get("answers")
    is_read = isinstance(answers, list | None) and all(_is_answer(answer) for answer in answers or ())
    wrong += [] if is_read else ["answers"]
    text, label = entry.get("text") or "", entry.get("label")
    problem = f"{', '.join(wrong)} of another type" if wrong else ""
    if not wrong and not (text or lists["words"] or lists["choices"]):
        problem = 'neither "text" nor "words"'
    if not wrong and lists["tags"] is not None and len(lists["tags"]) != len(lists["words"] or ()):
        problem = f"{len(lists['tags'])} tags for {len(lists['words'] or ())} words; every word needs one tag"
    if problem:
        raise ValueError(f"{source}: {problem}; write the lines that bert-data records prints")
    found = None
    if answers is not None:
        found = tuple(Answer(text=one["text"], start=one.get("answer_start", -1)) for one in answers)
    tuples = {name: None if values is None else tuple(values) for name, values in lists.items()}
    return Record(
        id="", source=source, text=text, text_pair=entry.get("text_pair"),
        label=None if label is None else str(label), labels=tuples["labels"], words=tuples["words"] or (),
        tags=tuples["tags"], choices=tuples["choices"] or (), negatives=tuples["negatives"] or (), answers=found,
    )  # fmt: skip


def with_classes(records: Sequence[Record], task: Task) -> list[Record]:
    """Return ``records`` with the labels of ``task``; a file may have the names of its classes, or their numbers,
    instead. Raises ``ValueError`` for other labels."""
    known, names = task.settings.labels, task.names
    numbers = {str(i): name for i, name in enumerate(known)} | {name: name for name in known}
    numbers |= dict(zip(names, known, strict=True))
    named = []
    for record in records:
        for label in record.labels or (record.label,):
            if label is not None and label not in numbers:
                allowed = f"allowed: {', '.join(names)}, or their numbers, from 0"
                raise ValueError(f"{record.source}: {label!r} is no class of the model; {allowed}")
        label = None if record.label is None else numbers[record.label]
        labels = None if record.labels is None else tuple(numbers[each] for each in record.labels)
        named.append(dataclasses.replace(record, label=label, labels=labels))
    return named


def _are_texts(values: Any) -> bool:
    return values is None or (isinstance(values, list) and all(isinstance(text, str) for text in values))


def _is_answer(value: Any) -> bool:
    start = value.get("answer_start", -1) if isinstance(value, dict) else None
    return type(start) is int and isinstance(value.get("text"), str)
