"""Roles of columns (``data.columns``), and creation of records from columns."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from bert_jax.config.task import COLUMN_ROLES, TaskDataConfig, TaskKind
from bert_jax.io.errors import did_you_mean
from bert_jax.json_values import Json
from bert_jax.records import Answer, Record
from data_pipeline.tasks.task_files import characters, listed

_TEXTS = ("id", "text", "text_pair", "label", "group", "choice_prefix")
_SEVERAL = ("negative", "choice")
_LABELS = ("label", "labels", "tags", "answers")
# Names of record fields that are accepted as column names instead of the names of roles.
_ALIASES = {"negatives": "negative", "choices": "choice"}
# Roles that every record must have, and roles that a labeled record must have too.
_INPUTS: Mapping[TaskKind, tuple[str, ...]] = {
    "classification": ("text",), "regression": ("text",), "multi_label": ("text",), "sentence": ("text",),
    "qa": ("text", "text_pair"), "tagging": ("words",), "joint": ("words",), "choice": ("choice",),
    "translation": ("text",),
}  # fmt: skip
_TARGETS: Mapping[TaskKind, tuple[str, ...]] = {
    "classification": ("label",), "regression": ("label",), "multi_label": ("labels",), "sentence": (),
    "qa": ("answers",), "tagging": ("tags",), "joint": ("tags", "label"), "choice": ("label",),
    "translation": ("label",),
}  # fmt: skip
Place = tuple[str, int]  # a role and the number of its column, from 0


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The roles of the columns in the files of one split."""

    # (role, column) in the order of the config; (): the columns have the names of the roles.
    roles: tuple[tuple[str, str], ...]
    kind: TaskKind
    # train, dev, test, or another one of TaskDataConfig.SPLITS.
    split: str

    @classmethod
    def of(cls, data: TaskDataConfig, kind: TaskKind, split: str) -> Self:
        """Return the columns that ``data`` sets for ``split``.

        Raises ``ValueError`` if a role is set more than once.
        """
        parts = [column.partition(":") for column in data.columns]
        own = [(name, rest) for name, colon, rest in parts if colon and name in data.SPLITS]
        common = [column for column in data.columns if column.partition(":")[0] not in data.SPLITS]
        chosen = [rest for name, rest in own if name == split] or common
        roles = [(role, column.strip()) for role, _, column in (one.partition("=") for one in chosen)]
        counts = Counter(role for role, _ in roles if role not in _SEVERAL)
        for role, count in counts.items():
            if count > 1:
                raise ValueError(f"data.columns: {role} is set {count} times; set it only once")
        return cls(roles=tuple(roles), kind=kind, split=split)

    @property
    def needs_labels(self) -> bool:
        """False for files whose records may have no labels."""
        return self.split in ("train", "dev")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Roles that every record must have."""
        return _INPUTS[self.kind]

    @property
    def targets(self) -> tuple[str, ...]:
        """Roles that every labeled record must have."""
        return _TARGETS[self.kind]

    @property
    def by_number(self) -> bool:
        """True if every column is specified by a number, not by a name."""
        return bool(self.roles) and all(column.isdecimal() for _, column in self.roles)

    def find(self, names: Sequence[str], where: str, *, numbers: bool = False) -> list[Place]:
        """Return (role, index of its column) for each role, given the names of all columns.

        If ``numbers`` is true, a column may also be a number from 1. A role that the records must have and the
        config does not set has the column of its name. A missing label column is ignored in a test file. Messages
        begin with ``where``. Raises ``ValueError``, which lists the existing columns, if another column is missing.
        """
        if not self.roles:
            return self._find_by_role(names, where)
        places = []
        for role, column in (*self.roles, *self._unset(names)):
            matches = [i for i, name in enumerate(names) if name == column]
            if not matches and numbers and column.isdecimal() and 0 < int(column[:19]) <= len(names):
                matches = [int(column) - 1]
            if len(matches) > 1:
                advice = "; use numbers for all columns, and data.header true" if numbers else ""
                raise ValueError(f"{where}: {len(matches)} columns are named {column!r} ({role}){advice}")
            if not matches and role in _LABELS and not self.needs_labels:
                continue
            if not matches:
                raise ValueError(
                    f"{where}: no column {column!r} ({role}={column} in data.columns); existing columns: "
                    f"{listed(names)}"
                    f"{did_you_mean(column, names)}{self._advice()}"
                )
            places.append((role, matches[0]))
        self.require_inputs(role for role, _ in places)
        return places

    def _unset(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return (role, name) of the roles that the records must have and no option sets, if a column of this name
        has no other role."""
        roles, columns = zip(*self.roles, strict=True)
        needed = self.inputs + (self.targets if self.needs_labels else ())
        return [(role, role) for role in needed if role in names and role not in (*roles, *columns)]

    def _find_by_role(self, names: Sequence[str], where: str) -> list[Place]:
        places = [(_ALIASES.get(name, name), i) for i, name in enumerate(names)]
        places = [(role, i) for role, i in places if role in COLUMN_ROLES]
        counts = Counter(role for role, _ in places)
        needed = self.inputs + (self.targets if self.needs_labels else ())
        for role in needed:
            if role not in counts:
                raise ValueError(
                    f"{where}: no column {role!r}, which {self.kind} needs; existing columns: {listed(names)}"
                    f"{did_you_mean(role, names)}; name it in data.columns: {role}=COLUMN{self._advice()}"
                )
        for role, count in counts.items():
            if count > 1 and role not in _SEVERAL:
                raise ValueError(
                    f"{where}: {count} columns are named {role!r}; select one by number in data.columns"
                )
        return places

    def _advice(self) -> str:
        split = self.split
        return "" if self.needs_labels else f"; if {split} files have other columns, set {split}:ROLE=COLUMN"

    def require_inputs(self, roles: Iterable[str]) -> None:
        """Raise ``ValueError`` if ``roles``, those that have columns, lack one that every record must have."""
        present = {*roles}
        for role in self.inputs:
            if role not in present:
                raise ValueError(
                    f"data.columns: no {role}=COLUMN for {self.split} files, which {self.kind} needs; add it to: "
                    f"{', '.join(f'{role}={column}' for role, column in self.roles)}"
                )


# ------------------------------------------------------------------ records


def present(value: Json, role: str, columns: Columns, source: str) -> Any:
    """Return ``value``, or None if it is missing. "NaN", and "nan" as a numeric label, count as missing, because
    pandas writes them for missing values.

    Raises ``ValueError`` if ``role`` needs a value.
    """
    is_number = columns.kind == "regression" and role == "label"
    if value is None or (isinstance(value, str) and value.strip() in ({"NaN", "nan"} if is_number else {"NaN"})):
        if role in columns.inputs:
            raise ValueError(f"{source}: {role} is missing (null or NaN); every record needs a value")
        return None
    return value


def make_record(fields: Iterable[tuple[str, Any]], *, source: str, number: int, separator: str) -> Record:
    """Create a record from (role, value) pairs.

    A value is a string, a number, None or, for some roles, a list of strings or numbers. ``number`` is the id if no
    pair has the role ``id``; ``separator`` separates the labels in a string with the role ``labels``. Labels, tags,
    ids and groups are stripped; empty labels and negatives are dropped. Raises ``ValueError`` if a value has
    another type, or if the numbers of tags and words differ.
    """
    values: dict[str, Any] = {}
    for role, value in fields:
        if role in _SEVERAL and value is not None:
            values.setdefault(role, []).extend(_items(value, role, source))
        elif value is not None:
            values[role] = value

    if isinstance(values.get("label"), list):
        values["label"] = _only(values["label"], source)
    texts = {role: _text(value, role, source) for role, value in values.items() if role in _TEXTS}
    if (own := _list_in(texts.get("label", ""), "label", source)) and "'" in texts["label"]:
        texts["label"] = _only(own, source)
    prefix = texts.get("choice_prefix", "")
    record = Record(
        id=texts.get("id", str(number)).strip(),
        source=source,
        text=texts.get("text", ""),
        text_pair=texts.get("text_pair"),
        negatives=tuple(text for text in values.get("negative", ()) if text),
        label=texts.get("label", "").strip() or None,
        labels=_split(values.get("labels"), "labels", source, separator),
        words=_split(values.get("words"), "words", source, None) or (),
        tags=_split(values.get("tags"), "tags", source, None),
        choices=tuple(f"{prefix} {choice}" if prefix else choice for choice in values.get("choice", ())),
        answers=answers_of(values["answers"], source) if "answers" in values else None,
        group=texts.get("group", "").strip(),
    )
    check_tag_count(record)
    return record


def _only(labels: list[Any], source: str) -> Any:
    if len(labels) != 1:
        raise ValueError(f"{source}: label is a list of {len(labels)}; several labels need task.kind multi_label")
    return labels[0]


def check_tag_count(record: Record) -> None:
    """Raise ``ValueError`` if ``record`` has tags, but not exactly one per word."""
    if record.tags is not None and len(record.tags) != len(record.words):
        raise ValueError(
            f"{record.source}: {len(record.tags)} tags for {len(record.words)} words; every word needs one tag"
        )


def blank_separated(text: str) -> list[str]:
    """Split ``text`` at spaces and tabs; other white space may be part of a word."""
    return [part for part in re.split("[ \t]+", text) if part]


def answers_of(value: Json, source: str) -> tuple[Answer, ...]:
    """Parse answers in either SQuAD format.

    The formats are a list of objects {"text", "answer_start"}, and an object with these two keys and a list under
    each. Raises ``ValueError`` for other values.
    """
    if isinstance(value, Mapping):
        texts, starts = value.get("text"), value.get("answer_start")
        value = None
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(value, list):
        raise ValueError(f'{source}: invalid answers; allowed: a list of {{"text": ..., "answer_start": ...}}')
    return tuple(_answer(one, source) for one in value)


def _answer(value: Any, source: str) -> Answer:
    if not isinstance(value, Mapping) or not isinstance(value.get("text"), str):
        raise ValueError(f'{source}: an answer has no text; expected: {{"text": ..., "answer_start": ...}}')
    start = value.get("answer_start", -1)
    try:
        if isinstance(start, float | bool):
            raise TypeError
        return Answer(text=characters(value["text"]), start=int(start))
    except (TypeError, ValueError):
        raise ValueError(f"{source}: answer_start is {start!r}; allowed: a whole number") from None


def _text(value: Json, role: str, source: str) -> str:
    if isinstance(value, str):
        return value if value.isascii() else characters(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    raise ValueError(f"{source}: {role} has the type {type(value).__name__}; allowed: a string or a number")


def _items(value: Json, role: str, source: str) -> list[str]:
    return [_text(one, role, source) for one in (value if isinstance(value, list | tuple) else [value])]


# A list as Python, NumPy or JSON print it, of strings and numbers, and its items.
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ITEM = rf"{_QUOTED}|[-+]?[0-9][-+0-9.e]*|[Tt]rue|[Ff]alse"
_LIST = re.compile(rf"[\[({{]\s*(?:(?:{_ITEM})(?:\s*,\s*|\s+|(?=[\])}}])))*[\])}}]")


def _list_in(text: str, role: str, source: str) -> list[str] | None:
    """Return the items of a list in a field of a table, or None for other text. Words are a list only if one is in
    quotes. Raises ``ValueError`` for labels that are a list of other items."""
    text = text.strip()
    if f"{text[:1]}{text[-1:]}" not in ("[]", "()", "{}"):
        return None
    # Tokens of a sentence in brackets have blanks between them.
    if role == "words" and (text[0] != "[" or text[1:2].isspace()):
        return None
    if not _LIST.fullmatch(text):
        if role.startswith("label") and re.search(r"['\"]|\b(nan|None|null)\b", text):
            raise ValueError(_not_a_list(text, role, source))
        return None
    items = re.findall(_ITEM, text)
    if (role == "words" or text[0] != "[") and items and not any(one[0] in "'\"" for one in items):
        return None
    try:
        return [characters(ast.literal_eval(one)) if one[0] in "'\"" else one.lower() for one in items]
    except (SyntaxError, ValueError):
        raise ValueError(_not_a_list(text, role, source)) from None


def _not_a_list(text: str, role: str, source: str) -> str:
    return f"{source}: {role} is {' '.join(text[:60].split())}; allowed in a list: strings and numbers"


def _split(value: Json, role: str, source: str, separator: str | None) -> tuple[str, ...] | None:
    """Split a string at ``separator`` (None: at spaces and tabs); a list is already split."""
    if value is None:
        return None
    if isinstance(value, str) and (listed_value := _list_in(value, role, source)) is not None:
        value = listed_value
    if isinstance(value, str):
        if separator is None:
            return tuple(blank_separated(value))
        return tuple(part for part in (part.strip() for part in value.split(separator)) if part)
    if not isinstance(value, list | tuple):
        raise ValueError(f"{source}: {role} has the type {type(value).__name__}; allowed: a list or a string")
    # Words of a list are not stripped, because the list already separates them.
    return tuple(one if role == "words" else one.strip() for one in _items(value, role, source))
