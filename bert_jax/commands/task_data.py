"""Records of a task from Python objects: lists, columns, arrays, frames, datasets and iterables.

Every object becomes rows of named columns, which are read as the objects of a JSON-lines file.
"""

import dataclasses
import itertools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_jax.commands.plain_values import column, column_names, is_column, plain, reader
from bert_jax.config.task import WHOLE, WORDS, TaskDataConfig, TaskKind
from bert_jax.json_values import Json
from bert_jax.records import Record

if TYPE_CHECKING:
    from data_pipeline.tasks.columns import Columns

# What a tuple of columns contains; a record in a list has the same order.
_FORMS: Mapping[TaskKind, str] = {
    "classification": "(texts, labels), or (texts, other_texts, labels)",
    "regression": "(texts, values), or (texts, other_texts, values)",
    "multi_label": "(texts, lists_of_labels)",
    "qa": "(questions, passages, answers)",
    "tagging": "(lists_of_words, lists_of_tags)",
    "joint": "(lists_of_words, lists_of_tags, labels)",
    "choice": "(texts, lists_of_choices, labels)",
    "sentence": "(texts, other_texts), (texts, other_texts, labels) or (texts, similar_texts, negatives)",
    "translation": "(texts, translations)",
}
# Columns of well-known data sets that are read if that of the role is missing, the first that exists.
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "text": (
        "texts", "sentence1", "premise", "question1", "text_a", "text1", "sentence_A", "anchor", "query",
        "question", "sent1", "sentence", "review", "content", "utterance",
    ),
    "text_pair": (
        "sentence2", "hypothesis", "question2", "text_b", "text2", "sentence_B", "positive", "passage", "context",
        "answer", "sentence",
    ),
    "words": ("tokens",), "tags": ("ner_tags", "pos_tags", "slots"), "labels": ("label",), "answers": ("answer",),
    "label": ("labels", "score", "similarity_score", "relatedness_score", "intent", "target", "category"),
    "choice": ("options", "endings"), "choice_prefix": ("sent2",),
}  # fmt: skip
_NEGATIVE, _CHOICE = re.compile(r"negative_?\d+"), re.compile(r"(choice|ending|option)_?[0-9a-hA-H]")
_log = logging.getLogger(__name__)

# The place of a record, and its mapping from names of columns to values.
_Row = tuple[str, dict[str, Json]]


def records(
    data: Any, kind: TaskKind, *, split: str = "train", options: TaskDataConfig | None = None
) -> list[Record]:
    """Return the records of ``data``, equal to those of a JSON-lines file with the same content.

    ``data`` is one of:

    * a file name, a path, or a list of paths, in a format of ``data.format``;
    * a tuple of columns, such as ``(texts, labels)``; two texts are two columns, or one column of pairs;
    * a mapping from names to columns, a frame of pandas or polars, an Arrow table or a ``datasets.Dataset``. The
      names are roles of ``data.columns``, those that this option states, or usual names such as ``sentence1``;
    * a list, an array or another iterable of records: mappings, tuples in the order of the columns, texts, objects
      such as ``InputExample`` or, for tagging, lists of (word, tag).

    A column is a list, an array, a tensor, a series or another iterable. None, NaN and NA are missing values.
    Messages name a record as ``train[17]``. ``split`` is train, dev or test; the records of test may lack labels.
    ``options``: the options of files and columns. Raises ``ValueError``, with one line, for data of another form
    and for content that is invalid in files.
    """
    from data_pipeline.tasks import read_named
    from data_pipeline.tasks.columns import Columns
    from data_pipeline.tasks.json_sets import squad_questions
    from data_pipeline.tasks.reading import with_unique_ids
    from data_pipeline.tasks.tables import records_of_objects

    options = options or TaskDataConfig()
    if isinstance(data, str | PathLike):
        return list(read_named(str(data), options, kind, split))
    features = getattr(data, "features", None) or {}
    if hasattr(data, "batch_size") and hasattr(data, "dataset"):
        raise ValueError(f"{split}: {type(data).__name__} yields batches; pass its attribute .dataset")
    if _is_listed(data):
        if isinstance(data, list) and len(data) in (2, 3) and all(map(_may_be_column, data)):
            forms = f"columns in a tuple, {_FORMS[kind]}, or records as tuples"
            raise ValueError(f"{split}: a list of {len(data)} lists may contain columns or records; give {forms}")
        data = list(data) if isinstance(data, Iterable) else [data[i] for i in range(len(data))]
        if data and all(isinstance(one, PathLike) for one in data):
            return [record for path in data for record in read_named(str(path), options, kind, split)]
        if data and all(isinstance(one, Record) for one in data):
            return data
    columns = Columns.of(options, kind, split)
    if kind == "qa" and isinstance(data, Mapping) and "data" in data:
        found = squad_questions(dict(data), split)
    else:
        rows = _rows(data, features, columns)
        rows = _in_usual_forms(rows if columns.roles else _by_role(rows, columns), columns)
        found = records_of_objects(rows, columns, options, split)
    read = list(with_unique_ids(found, f"{split}: no records; give {_FORMS[kind]}"))
    if kind == "multi_label" and _are_marks(read):
        remedy = "give lists of labels, or a frame or mappings with a name for each column of 0 and 1"
        raise ValueError(f"{split}: the labels are an array of 0 and 1; {remedy}")
    return read


def split_off(
    records: Sequence[Record], fraction: float, seed: int, kind: TaskKind
) -> tuple[list[Record], list[Record]]:
    """Split ``records`` into (train, dev), where dev has about the share ``fraction`` of the records.

    For ``classification`` and ``joint``, it has this share of every class, and train keeps every class. Records of
    one group or, without groups, with equal texts stay together, unless all records are one group. ``seed``
    determines the split. Raises ``ValueError`` for a fraction outside (0, 1), and for too few records.
    """
    from data_pipeline.tasks.record_splits import chosen_records, seeded_hash

    if not 0 < fraction < 1:
        raise ValueError(f"dev={fraction} is not allowed; allowed: a share above 0 and below 1, or records")
    groups: dict[object, list[int]] = {}
    for i, one in enumerate(records):
        groups.setdefault(one.group or (one.text, one.text_pair, one.words, one.choices), []).append(i)
    units = list(groups.values()) if len(groups) > 1 else [[i] for i in range(len(records))]
    units.sort(key=lambda unit: seeded_hash(seed, "dev", f"record {unit[0]}"))
    classes: dict[str | None, list[list[int]]] = {}
    for unit in units:
        name = records[unit[0]].label if kind in ("classification", "joint") else None
        classes.setdefault(name, []).append(unit)
    dev: list[int] = []
    for name, wanted in _quotas(classes, fraction).items():
        *units, _ = classes[name]  # one remains for training
        for unit in units:
            if len(unit) <= wanted:
                dev += unit
                wanted -= len(unit)
    if not dev:  # every group is too large
        spare = [unit for units in classes.values() for unit in units[:-1]]
        if not spare:
            raise ValueError(
                f"dev={fraction}: {len(records):,} training records are too few, because every class must stay in "
                "train; give more records, or give records as dev"
            )
        dev = min(spare, key=len)
    train = sorted({*range(len(records))} - {*dev})
    return chosen_records(records, train), chosen_records(records, sorted(dev))


def _quotas(classes: Mapping[str | None, Sequence[Sequence[int]]], fraction: float) -> dict[str | None, int]:
    """Return the number of dev records of each class: ``fraction`` of its records, rounded so that the sum is
    ``fraction`` of all records."""
    shares = {name: fraction * sum(map(len, units)) for name, units in classes.items()}
    quotas = {name: math.floor(share) for name, share in shares.items()}
    most_cut = sorted(
        (name for name in shares if len(classes[name]) > 1), key=lambda name: quotas[name] - shares[name]
    )
    for name in most_cut[: max(1, round(sum(shares.values()))) - sum(quotas.values())]:
        quotas[name] += 1
    return quotas


# ------------------------------------------------------------------ rows


def _are_marks(read: Sequence[Record]) -> bool:
    """Return True if the labels are no names, but 0 or 1 for each class, the same number of them in each record."""
    rows = [one.labels for one in read if one.labels is not None]
    marks = {"0", "1", "0.0", "1.0", "false", "true"}
    return len({len(row) for row in rows}) == 1 and len(rows[0]) > 1 and marks.issuperset(itertools.chain(*rows))


def _is_listed(data: Any) -> bool:
    """Return True if ``data`` has no columns, but items, which are records."""
    is_map = hasattr(data, "__getitem__") and hasattr(data, "__len__")  # a data set of torch
    return (is_map or isinstance(data, Iterable)) and not (isinstance(data, Mapping | tuple) or column_names(data))


def _may_be_column(row: Any) -> bool:
    return isinstance(row, list | np.ndarray) and not any(isinstance(one, tuple) for one in row)


def _rows(data: Any, features: Mapping[str, Any], columns: "Columns") -> Iterator[_Row]:
    split, kind = columns.split, columns.kind
    if isinstance(data, Mapping) or column_names(data):
        place = f"{split}.iloc" if type(data).__module__.partition(".")[0] == "pandas" else split
        named = _named_columns(data, features, split)
        for i, values in enumerate(_zipped(named, split)):
            yield f"{place}[{i}]", dict(zip(named, values, strict=True))
    elif isinstance(data, tuple) and not hasattr(data, "_fields"):
        cells = _zipped(_numbered_columns(data, kind, split), split)
        yield from (
            (f"{split}[{i}]", _by_position([*row], columns, f"{split}[{i}]")) for i, row in enumerate(cells)
        )
    elif isinstance(data, Iterable):
        for i, one in enumerate(data):
            place = f"{split}[{i}]"
            if (fields := _fields(one)) is None:
                yield place, _by_position(_cells(one, kind), columns, place)
            else:
                yield place, {name: reader(features.get(name))(value) for name, value in fields.items()}
    else:
        share = ", a share such as 0.1" if split == "dev" else ""
        others = f"a frame{share}, or a file"
        raise ValueError(f"{split}: {type(data).__name__} is not allowed; give {_FORMS[kind]}, {others}")


def _by_role(rows: Iterable[_Row], columns: "Columns") -> Iterator[_Row]:
    """Yield ``rows`` with the names of roles instead of the usual names of columns."""
    renamed: dict[tuple[str, ...], dict[str, str]] = {}
    for place, row in rows:
        names = tuple(row)
        if names not in renamed:
            renamed[names] = _usual_names(names, columns)
            if read := [f"{name} is read as {role}" for name, role in renamed[names].items()]:
                _log.warning("%s: %s; data.columns sets the columns", columns.split, ", ".join(read))
            _require_roles({renamed[names].get(name, name) for name in names}, names, columns, place)
        found: dict[str, Json] = {}
        joined: dict[str, list[Json]] = {}
        for name, value in row.items():
            role = renamed[names].get(name, name)
            if role in ("negative", "choice") and value is not None:
                joined.setdefault(role, []).extend(value if isinstance(value, list) else [value])
            else:
                found.setdefault(role, value)
        yield place, {**found, **joined}


def _require_roles(roles: Set[str], names: Sequence[str], columns: "Columns", place: str) -> None:
    """Raise ``ValueError`` if ``roles``, those of the columns ``names``, lack one that the records must have."""
    from data_pipeline.tasks.task_files import listed

    needed = (*columns.inputs, *(columns.targets if columns.needs_labels else ()))
    missing = [role for role in needed if role not in roles and not (role == "choice" and "choices" in roles)]
    if missing:
        ids = "token ids are not read; " if "input_ids" in names else ""
        option = f"options={{'data.columns': ['{missing[0]}=COLUMN', ...]}}"
        raise ValueError(
            f"{place}: no column {missing[0]!r}, which {columns.kind} needs; existing columns: {listed(names)}; "
            f"{ids}give {_FORMS[columns.kind]}, or {option}"
        )


def _in_usual_forms(rows: Iterable[_Row], columns: "Columns") -> Iterator[_Row]:
    """Yield ``rows`` with answers as SQuAD has them, and with lists of labels."""
    read = dict(columns.roles)
    answers, labels = read.get("answers", "answers"), read.get("labels", "labels")
    for place, row in rows:
        if answers in row:
            row[answers] = _answers(row[answers])
        if isinstance(marks := row.get(labels), dict):
            row[labels] = [name for name, mark in marks.items() if mark]
        yield place, row


def _usual_names(names: Sequence[str], columns: "Columns") -> dict[str, str]:
    """Return the roles of the columns with usual names, where the columns of these roles are missing."""
    kind, has_text = columns.kind, "text" in names
    wanted = [*columns.inputs, *columns.targets]
    if kind == "choice":
        wanted += ["text", *(["choice_prefix"] if "sent1" in names else [])]
    elif kind == "qa" or (kind not in WORDS and not has_text):
        wanted.append("text_pair")
    numbered = [name for name in names if _NEGATIVE.fullmatch(name)] if kind == "sentence" else []
    if kind == "choice" and "choices" not in names:
        numbered = [name for name in names if _CHOICE.fullmatch(name)]
    if kind == "sentence" and not numbered and not {"negative", "negatives"} & {*names}:
        wanted.append("label")
    found = {name: "negative" if kind == "sentence" else "choice" for name in numbered}
    roles = {*names, *found.values(), *(["choice"] if "choices" in names else [])}
    for role in dict.fromkeys(wanted):
        others = [name for name in _OTHERS.get(role, ()) if name in names and name not in found]
        if others and role not in roles:
            found[others[0]] = role
    return found


# ------------------------------------------------------------------ records in a list


def _fields(row: Any) -> dict[str, Any] | None:
    """Return the named values of a record, or None for a text, a tuple, a list or an array."""
    if isinstance(row, Mapping):
        return {str(name): value for name, value in row.items()}
    if isinstance(row, tuple) and hasattr(row, "_asdict"):
        return dict(row._asdict())
    if isinstance(row, np.void) and row.dtype.names:
        return {name: row[name] for name in row.dtype.names}
    if isinstance(texts := getattr(row, "texts", None), list):  # InputExample of sentence-transformers
        if len(texts) > 2:  # its label is 0 where none was given
            return {"text": texts[0], "text_pair": texts[1], "negative": texts[2:]}
        return {**dict(zip(("text", "text_pair"), texts, strict=False)), "label": getattr(row, "label", None)}
    if dataclasses.is_dataclass(row):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    return None


def _cells(row: Any, kind: TaskKind) -> list[Json]:
    """Return the values of a record without names."""
    if kind == "tagging" and isinstance(row, list) and row and all(isinstance(one, tuple) for one in row):
        row = tuple(zip(*row, strict=False))  # (word, tag) for each word
    cells = plain(row)
    return cells if isinstance(cells, list) else [cells]


def _by_position(cells: list[Json], columns: "Columns", place: str) -> dict[str, Json]:
    """Return the values of a record by role; their order determines the roles."""
    kind, is_pair = columns.kind, False
    if cells and kind not in (*WORDS, "choice") and isinstance(cells[0], list) and len(cells[0]) in (1, 2):
        is_pair = len(cells[0]) == 2
        cells[:1] = cells[0]
    if kind == "sentence" and len(cells) > 2 and isinstance(cells[2], str | list):
        cells[2:] = [[text for cell in cells[2:] for text in (cell if isinstance(cell, list) else [cell])]]
    roles = _roles(kind, cells)
    if kind in WHOLE and len(cells) == 2 and not is_pair:
        roles = (roles[0], roles[2])
    if len(cells) > len(roles):
        form = f"columns are given in a tuple, {_FORMS[kind]}, and records in a list"
        raise ValueError(f"{place}: {len(cells)} values, but {kind} has at most {len(roles)}; {form}")
    row = dict(zip(roles, cells, strict=False))
    missing = [role for role in (*columns.inputs, *columns.targets) if role not in row]
    if missing and (columns.needs_labels or missing[0] in columns.inputs):
        form = f"give {_FORMS[kind]}; a file is given by its name, several as pathlib.Path"
        raise ValueError(f"{place}: no {missing[0]}, which {kind} needs; {form}")
    return row


def _roles(kind: TaskKind, cells: Sequence[Json]) -> tuple[str, ...]:
    if kind in WORDS:
        return ("words", "tags", "label")[: 2 if kind == "tagging" else 3]
    if kind == "translation":
        return ("text", "label")
    if kind == "choice":
        return ("choice", "label") if cells and isinstance(cells[0], list) else ("text", "choice", "label")
    if kind == "sentence" and cells and _is_number(cells[-1]):
        return ("text", "text_pair", "label") if len(cells) > 2 else ("text", "label")
    third = {"multi_label": "labels", "qa": "answers", "sentence": "negative"}.get(kind, "label")
    return ("text", "text_pair", third)


def _is_number(value: Json) -> bool:
    return isinstance(value, bool | int | float)


def _answers(value: Json) -> Json:
    """Return answers in the form of SQuAD; an answer may be a text, or a text and its offset."""
    if isinstance(value, str) or (isinstance(value, list) and len(value) == 2 and isinstance(value[1], int)):
        value = [value] if value else []
    if not isinstance(value, list):
        return value
    parts = [[one] if isinstance(one, str) else one for one in value]
    return [
        {"text": one[0], "answer_start": one[1] if len(one) > 1 else -1} if isinstance(one, list) and one else one
        for one in parts
    ]


# ------------------------------------------------------------------ columns


def _is_table(data: Any) -> bool:
    return hasattr(data, "column_names") or bool(column_names(data))


def _named_columns(data: Any, features: Mapping[str, Any], split: str) -> dict[str, list[Json]]:
    names = list(data) if isinstance(data, Mapping) else column_names(data)
    columns: dict[str, list[Json]] = {}
    for name in names:
        values = data[name]
        if isinstance(values, Mapping) or (isinstance(data, Mapping) and _is_table(values)):
            raise ValueError(f"{split}: {name!r} is a data set; give one of them, such as data[{name!r}]")
        if column_names(values):
            raise ValueError(f"{split}: {names.count(name)} columns are named {name!r}; rename them")
        if not is_column(values):
            raise ValueError(f"{split}: {name!r} is one value; give a column of values, or records in a list")
        columns[str(name)] = column(values, features.get(str(name)))
    return columns


def _numbered_columns(data: tuple[Any, ...], kind: TaskKind, split: str) -> dict[str, list[Json]]:
    columns: dict[str, list[Json]] = {}
    for i, values in enumerate(data):
        if not is_column(values):
            raise ValueError(
                f"{split}: a tuple contains columns, {_FORMS[kind]}; {str(values)[:40]!r} is one value; give "
                "records in a list"
            )
        names = column_names(values) if i and kind == "multi_label" else []
        cells = column(values)
        if names:  # values 0 and 1 for each label
            marks = [row for row in cells if isinstance(row, list)]
            cells = [dict(zip(map(str, names), row, strict=True)) for row in marks]
        columns[f"column {i}"] = cells
    first = data[0] if data else ()
    if kind not in WORDS and isinstance(first, tuple) and len(first) == 2 and all(map(is_column, first)):
        columns["column 0"] = [[*pair] for pair in _zipped(_numbered_columns(first, kind, split), split)]
    return columns


def _zipped(columns: Mapping[str, list[Json]], split: str) -> Iterable[tuple[Json, ...]]:
    """Return the rows of ``columns``. Raises ``ValueError`` if their lengths differ."""
    lengths = {name: len(values) for name, values in columns.items()}
    if len({*lengths.values()}) > 1:
        shown = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise ValueError(f"{split}: the columns differ in length: {shown}; every record needs a value in each")
    return zip(*columns.values(), strict=True)
