"""The table of the classes of a task: their order, the line that shows them, and warnings about suspicious ones."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from bert_jax.config.task import COLUMN_ROLES
from bert_jax.records import Record

# The records of each split.
Splits = Mapping[str, Sequence[Record]]
# Maximum number of classes that a line names.
_SHOWN = 12
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+(\.0*)?", re.ASCII)
# Column names that, as the text or the label of the first line of a file, are those of a header.
_HEADER = {*COLUMN_ROLES, "category", "class", "intent", "review", "sentence", "sentiment", "stars", "target"}


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the different ``names`` in the order of class ids: by value if all are whole numbers, else as text."""
    found = sorted({*names})
    if all(map(_WHOLE_NUMBER.fullmatch, found)):
        found.sort(key=float)
    return tuple(found)


def field_values(records: Sequence[Record], name: str) -> list[str]:
    """Return all labels or tags in the field ``name``."""
    fields = [getattr(record, name) for record in records]
    return [one for field in fields for one in ((field,) if isinstance(field, str) else field or ())]


def without_marks(text: str) -> str:
    """Return ``text`` as a reader sees it: normalized to NFKC, without format characters, and stripped of white
    space at both ends."""
    seen = unicodedata.normalize("NFKC", text)
    return "".join(one for one in seen if unicodedata.category(one) != "Cf").strip()


def class_lines(names: Sequence[str], counts: Mapping[str, int], what: str = "classes") -> list[str]:
    """Return the line that shows the classes ``names`` with their numbers of training records, and a warning if
    some of them look the same. ``what``: the plural noun for the classes."""
    shown = [f"{printable(name)} {counts.get(name, 0):,}" for name in names]
    if len(shown) > _SHOWN:
        shown[4:-2] = ["..."]
    lines = [f"{len(names):,} {what}: {', '.join(shown)}"]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(without_marks(name), []).append(name)
    alike = [" and ".join(map(ascii, group)) for group in groups.values() if len(group) > 1]
    if alike:
        lines.append(f"WARNING: {what} look the same but are different: {_some(alike)}; make their names equal")
    if "nan" in names:
        lines.append(f"WARNING: 'nan' is one of the {what}; if it stands for a missing value, leave it empty")
    return lines


def record_lines(names: Sequence[str], records: Sequence[Record]) -> list[str]:
    """Return warnings about the classes ``names`` of ``records`` (``label``): a header that was read as a record,
    about as many classes as records, classes of one record."""
    counts = Counter(record.label for record in records)
    single = [name for name in names if counts[name] == 1]
    lines = [
        f"WARNING: {one.source}: a record of class {one.label!a}; if it names the columns, set data.header true"
        for one in records
        if one.label in single and one.source.endswith(":1") and _is_header(one, names)
    ]
    if len(records) > 2 and len(counts) >= 0.9 * len(records):
        advice = "check data.columns: label may have the column of texts or ids"
        lines.append(f"WARNING: {len(counts):,} classes in {len(records):,} training records; {advice}")
    elif single and not lines:
        places = {record.label: record.source.rpartition("/")[2] for record in records}
        shown = [f"{printable(name)} ({places[name]})" for name in single]
        lines.append(f"WARNING: classes of one training record: {_some(shown)}")
    return lines


def _is_header(record: Record, names: Sequence[str]) -> bool:
    words = {without_marks(text).lower() for text in (record.label or "", record.text)}
    is_word = not _WHOLE_NUMBER.fullmatch(record.label or "")
    others = [name for name in names if name != record.label]
    return bool(words & _HEADER) or (is_word and bool(others) and all(map(_WHOLE_NUMBER.fullmatch, others)))


def blank_lines(records: Sequence[Record]) -> list[str]:
    """Return a warning that counts the training ``records`` without a text, a second text or words to be seen."""
    has_pairs = any(record.text_pair is not None for record in records)
    blank = [
        record
        for record in records
        if _is_blank(f"{record.text}{''.join(record.words)}{''.join(record.choices)}")
        or (has_pairs and _is_blank(record.text_pair or ""))
    ]
    first = blank[0].source if blank else ""
    line = f"WARNING: {len(blank):,} of {len(records):,} training texts are blank, such as {first}"
    return [line] if blank else []


def _is_blank(text: str) -> bool:
    return all(one.isspace() or unicodedata.category(one) == "Cf" for one in text)


def printable(name: str) -> str:
    """Return ``name`` for a message: at most 30 characters, with escapes instead of invisible characters."""
    name = name if name.isprintable() else ascii(name)[1:-1]
    return name if len(name) <= 30 else f"{name[:27]}..."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
