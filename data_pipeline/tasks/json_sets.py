"""Records from the JSON files of question answering (SQuAD, XQuAD, CMRC 2018, DRCD) and of CLINC150."""

from collections.abc import Iterator
from typing import Any

from bert_jax.config.task import TaskDataConfig
from bert_jax.records import Record
from data_pipeline.tasks.columns import Columns, answers_of
from data_pipeline.tasks.task_files import characters, did_you_mean, find_file, listed, read_json, split_address


def read_squad(name: str, columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Questions of SQuAD v1.1 or v2.0 JSON, in file order; ``group`` is the article's title, or FILE:NUMBER.

    Passages and offsets are taken as they are: whether an answer stands where it should is for the task.
    """
    path = find_file(name)
    for a, article in enumerate(_list(read_json(path), "data", f"{path}")):
        where = f"{path}: article {a}"
        group = article.get("title") if isinstance(article, dict) else None
        for p, paragraph in enumerate(_list(article, "paragraphs", where)):
            place = f"{where}, paragraph {p}"
            passage = _string(paragraph, "context", place)
            for question in _list(paragraph, "qas", place):
                yield _question(question, passage, str(group) if group else f"{path}:{a}", str(path), place)


def _question(value: Any, passage: str, group: str, path: str, place: str) -> Record:
    if not isinstance(value, dict) or not isinstance(value.get("id"), str | int):
        raise ValueError(f"{place}: a question without an id")
    source = f"{path}: id {value['id']}"
    answers = None if value.get("answers") is None else answers_of(value["answers"], source)
    return Record(
        id=str(value["id"]), source=source, text=_string(value, "question", source), text_pair=passage,
        answers=() if value.get("is_impossible") is True else answers, group=group,
    )  # fmt: skip


def _list(value: Any, key: str, where: str) -> list[Any]:
    entries = value.get(key) if isinstance(value, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{where}: no list {key!r}; allowed: SQuAD's data > paragraphs > qas (data.format squad)")
    return entries


def _string(value: Any, key: str, where: str) -> str:
    text = value.get(key) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{where}: no text {key!r}; allowed: SQuAD's context, and qas with question and id")
    return characters(text)


def read_clinc(name: str, columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Pairs [text, intent] of ``FILE.json:PART`` or ``FILE.json:PART+PART``; the file is an object of parts."""
    place, parts = split_address(name, dataset=False)
    path = find_file(place)
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f'{path}: not an object of parts; allowed: {{"train": [[text, intent], ...]}}')
    if not parts:
        raise ValueError(f"{path}: names no part; write {path.name}:PART; there are: {listed(content)}")
    number = 0
    for part in parts.split("+"):
        if not isinstance(content.get(part), list):
            advice = did_you_mean(part, content)
            raise ValueError(f"{path}: no list {part!r}; there are: {listed(content)}{advice}")
        for i, pair in enumerate(content[part]):
            source = f"{path}: {part} {i}"
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(x, str) for x in pair):
                raise ValueError(f"{source}: not a pair of texts; allowed: [text, intent]")
            yield Record(id=str(number), source=source, text=characters(pair[0]), label=pair[1].strip() or None)
            number += 1
