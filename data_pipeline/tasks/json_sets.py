"""Records from the JSON files of question answering (SQuAD, XQuAD, CMRC 2018, DRCD) and of CLINC150."""

from collections.abc import Iterator
from typing import TypeVar

from bert_jax.config.task import TaskDataConfig
from bert_jax.io.errors import did_you_mean
from bert_jax.json_values import Json
from bert_jax.records import Record
from data_pipeline.tasks.columns import Columns, answers_of
from data_pipeline.tasks.tables import read_jsonl
from data_pipeline.tasks.task_files import characters, find_file, listed, read_json, split_address

T = TypeVar("T")


def read_squad(name: str, columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Yield a record per question of a SQuAD v1.1 or v2.0 file; ``group`` is the article title or FILE:NUMBER. An
    array of records is read as by ``read_jsonl``.

    The task, not this reader, checks the offsets of answers against the passage.
    """
    path = find_file(name)
    content = read_json(path, data.encoding)
    if isinstance(content, list):
        yield from read_jsonl(name, columns, data)
    else:
        yield from squad_questions(content, str(path))


def squad_questions(content: Json, path: str) -> Iterator[Record]:
    """Yield a record per question of ``content``, the object of a SQuAD file; ``path`` is its place in messages."""
    for a, article in enumerate(_get(content, "data", list, path)):
        where = f"{path}: article {a}"
        group = article.get("title") if isinstance(article, dict) else None
        for p, paragraph in enumerate(_get(article, "paragraphs", list, where)):
            place = f"{where}, paragraph {p}"
            passage = characters(_get(paragraph, "context", str, place))
            for question in _get(paragraph, "qas", list, place):
                yield _question(question, passage, str(group) if group else f"{path}:{a}", path, place)


def _question(value: Json, passage: str, group: str, path: str, place: str) -> Record:
    if not isinstance(value, dict) or not isinstance(value.get("id"), str | int):
        raise ValueError(f"{place}: a question has no id; every question must have one")
    source = f"{path}: id {value['id']}"
    if not isinstance(impossible := value.get("is_impossible") or False, bool):
        raise ValueError(f"{source}: is_impossible is {impossible!r}; allowed: true, false")
    answers = None if value.get("answers") is None else answers_of(value["answers"], source)
    text = characters(_get(value, "question", str, source))
    return Record(
        id=str(value["id"]), source=source, text=text, text_pair=passage,
        answers=() if impossible else answers, group=group,
    )  # fmt: skip


def _get(value: Json, key: str, kind: type[T], where: str) -> T:
    part = value.get(key) if isinstance(value, dict) else None
    if not isinstance(part, kind):
        raise ValueError(
            f"{where}: no {'list' if kind is list else 'string'} {key!r}; with data.format squad, a file has data "
            "> paragraphs > context and qas, and each entry of qas has question and id"
        )
    return part


def read_clinc(name: str, columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Yield a record per pair [text, intent] of ``FILE.json:PART`` or ``FILE.json:PART+PART``.

    The file contains an object with a list of pairs for each part; an array of records is read as by
    ``read_jsonl``. Raises ``ValueError`` for other content.
    """
    place, parts = split_address(name, dataset=False)
    path = find_file(place)
    content = read_json(path, data.encoding)
    if isinstance(content, list) and not parts:
        yield from read_jsonl(name, columns, data)
        return
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: not a JSON object with a list for each part, nor an array of records; expected: "
            '{"train": [[text, intent], ...]}'
        )
    if not parts:
        raise ValueError(f"{path}: the part is missing; write {path.name}:PART; existing parts: {listed(content)}")
    number = 0
    for part in parts.split("+"):
        if not isinstance(content.get(part), list):
            advice = did_you_mean(part, content)
            raise ValueError(f"{path}: no list {part!r}; existing parts: {listed(content)}{advice}")
        for i, pair in enumerate(content[part]):
            source = f"{path}: {part} {i}"
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(x, str) for x in pair):
                raise ValueError(f"{source}: not a pair of strings; expected: [text, intent]")
            yield Record(id=str(number), source=source, text=characters(pair[0]), label=pair[1].strip() or None)
            number += 1
