"""Readers of TSV, CSV and JSON lines."""

import contextlib
import csv
import dataclasses
import functools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from bert_jax.config.task import TaskDataConfig
from bert_jax.io.storage import Location
from bert_jax.json_values import Json
from bert_jax.records import Record
from data_pipeline.tasks.columns import Columns, Place, make_record, present
from data_pipeline.tasks.task_files import find_file, listed, read_lines, read_raw_lines, without_blank_end

Row = tuple[int, list[str]]  # (number of the first line of the row, fields)

_LONGEST_FIELD = 1 << 30  # characters; the default limit of the csv module is 131,072
_DELIMITERS = (",", ";", "\t", "|")
_STATED = re.compile(r'"?sep=(.)"?\r?\n')  # Excel's first line
_QUOTED = re.compile('"(?:[^"]|"")*"')
_ESCAPED = re.compile(r'\\(["\\])')
# Part of an error of the csv module -> what to do.
_CURES = {
    "new-line character": "the line contains a carriage return outside quotes: convert the ends of lines to \\n",
    "expected after": "double each quote inside a quoted field, or set data.delimiter",
    "unexpected end": "the quote that opens its last field is not closed",
}
_log = logging.getLogger(__name__)


def read_table(name: str, columns: Columns, data: TaskDataConfig, default: str) -> Iterator[Record]:
    """Yield the records of a table whose delimiter is usually ``default``.

    Tab (TSV): quotes are ordinary characters, unless all of them are CSV quotes and some are doubled, and only \\n
    or \\r\\n ends a line. Comma (CSV, RFC 4180): quoted fields may contain commas, "" and line ends; quotes may
    also be escaped by \\, and the delimiter named by a first line such as sep=;."""
    path = find_file(name)
    lines = read_raw_lines(path, data.encoding)
    stated = _STATED.fullmatch(lines[0]) if lines else None
    first = 2 if stated else 1
    lines = lines[first - 1 :]

    @functools.cache
    def rows(delimiter: str) -> list[Row]:
        is_cut = default == "\t" == delimiter
        return _tsv_rows(path, lines, first) if is_cut else _csv_rows(path, lines, first, delimiter)

    delimiter = {"tab": "\t", "auto": stated[1] if stated else ""}.get(data.delimiter, data.delimiter)
    return _records(path, rows, delimiter, default, columns, data)


def _tsv_rows(path: Location, lines: Sequence[str], first: int) -> list[Row]:
    plain = ((number, line[:-1].removesuffix("\r")) for number, line in enumerate(lines, first))
    rows = [(number, line.split("\t")) for number, line in without_blank_end(plain)]
    if len({len(fields) for _, fields in rows}) > 1 and any('"' in line for line in lines):
        # Tabs or ends of lines in quotes, if all rows then have as many fields.
        with contextlib.suppress(ValueError):
            parsed = list(_parsed(path, lines, first, "\t"))
            if len({len(fields) for _, fields in parsed}) == 1:
                _log.warning("%s: read as CSV separated by tabs, because quoted fields span several lines", path)
                return parsed
    quoted = [field for _, fields in rows for field in fields if '"' in field]
    if any('""' in field[1:-1] for field in quoted) and all(map(_QUOTED.fullmatch, quoted)):
        _log.warning("%s: quotes around fields are removed, because inner quotes are doubled, as in CSV", path)
        return [(number, [_unquoted(field) for field in fields]) for number, fields in rows]
    return rows


def _unquoted(field: str) -> str:
    return field[1:-1].replace('""', '"') if '"' in field else field


def _csv_rows(path: Location, lines: Sequence[str], first: int, delimiter: str) -> list[Row]:
    """Return the rows of CSV. If one is not valid, but all are with a doubled quote for each escaped one, return
    these."""
    try:
        return list(_parsed(path, lines, first, delimiter))
    except ValueError as error:
        doubled = [_ESCAPED.sub(lambda match: '""' if match[1] == '"' else match[1], line) for line in lines]
        try:
            rows = list(_parsed(path, doubled, first, delimiter))
        except ValueError:
            raise error from None
        _log.warning('%s: quotes are escaped (\\"), not doubled, and read as such', path)
        return rows


def _parsed(path: Location, lines: Iterable[str], first: int, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(lines, strict=True, delimiter=delimiter)
    blank: list[Row] = []
    while True:
        start = reader.line_num + first
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            what = str(error).partition(" - ")[0]
            cure = next((cure for part, cure in _CURES.items() if part in what), "correct the row")
            raise ValueError(f"{path}:{start}: not valid CSV: {what}; {cure}") from None
        if not any(field.strip(" ") for field in fields) and len(fields) < 2:
            blank.append((start, [""]))
            continue
        yield from blank
        blank.clear()
        yield start, fields


def _records(
    path: Location, rows_of: Callable[[str], list[Row]], delimiter: str, default: str, columns: Columns,
    data: TaskDataConfig,
) -> Iterator[Record]:  # fmt: skip
    """Yield a record per row of ``rows_of(delimiter)``; "": it is found. Raises ``ValueError`` if a row has too few
    fields, or more fields than the header."""
    delimiter = delimiter or _delimiter(path, rows_of, default, columns, data)
    rows = iter(rows_of(delimiter))
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{path}: the file is empty; it needs at least one record")
    places, header = _places(first, columns, data, path)
    width = len(header) if header else 1 + max(column for _, column in places)
    if header:
        read = {column for _, column in places}
        _name_unread(str(path), [name for i, name in enumerate(header) if name and i not in read])
    rows = rows if header else chain([first], rows)
    for number, (line, fields) in enumerate(rows):
        if len(fields) < width or (header and any(fields[width:])):
            raise ValueError(_misfit(path, line, fields, rows, width, header))
        source = f"{path}:{line}"
        values = ((role, present(fields[column], role, columns, source)) for role, column in places)
        yield make_record(values, source=source, number=number, separator=data.label_separator)


def _name_unread(place: str, names: Collection[str]) -> None:
    if names:
        _log.warning("%s: columns that are not read: %s", place, listed(names))


def _delimiter(
    path: Location, rows_of: Callable[[str], list[Row]], default: str, columns: Columns, data: TaskDataConfig
) -> str:
    """Return the first delimiter with which the first row has the columns and, in a file without a header that is
    not a TSV, all rows have as many fields; ``default`` is tried first. If there is none, raise ``ValueError``
    about the columns with the delimiter that yields the most fields, unless this is ``default``, with which the
    caller reads the file."""
    firsts = {}
    for delimiter in dict.fromkeys((default, *_DELIMITERS)):
        with contextlib.suppress(ValueError, IndexError):
            firsts[delimiter] = first = rows_of(delimiter)[0]
            places, header = _places(first, columns, data, path)
            # Without a header, a comma of the text must not be taken for the delimiter.
            known = header is not None or delimiter == default == "\t"
            divides = delimiter == default or len(first[1]) > 1
            even = known or (divides and _is_even(rows_of(delimiter)))
            if even and max(column for _, column in places) < len(first[1]):
                if delimiter != default:
                    _log.warning("%s: the fields are separated by %r", path, delimiter)
                return delimiter
    best = max(firsts, key=lambda one: len(firsts[one][1]), default=default)
    if best in firsts and (best != default or len(firsts[best][1]) == 1):
        try:
            _places(firsts[best], columns, data, path)
        except ValueError as error:
            raise ValueError(f"{error}; data.delimiter ({best!r} here) sets what separates fields") from None
    return default


def _is_even(rows: Iterable[Row]) -> bool:
    return len({len(fields) for _, fields in rows}) == 1


def _places(
    first: Row, columns: Columns, data: TaskDataConfig, path: Location
) -> tuple[list[Place], list[str] | None]:
    """Return the columns of the roles, and the names of the columns if ``first`` is a header."""
    header = _header(first, columns, data, path)
    if header is None:
        columns.require_inputs(role for role, _ in columns.roles)
        return [(role, int(column[:19]) - 1) for role, column in columns.roles], None
    return columns.find(header, f"{path}:{first[0]}", numbers=True), header


def _header(first: Row, columns: Columns, data: TaskDataConfig, path: Location) -> list[str] | None:
    """Return the names of the columns, or None for a file without a header."""
    if columns.by_number and any(int(column[:19]) == 0 for _, column in columns.roles):
        raise ValueError("data.columns: column 0 is not allowed; use numbers from 1")
    has_header = not columns.by_number if data.header == "auto" else data.header == "true"
    if has_header:
        return [name.strip() for name in first[1]]
    if not columns.by_number:
        named = listed(f"{role}={column}" for role, column in columns.roles) or "none"
        raise ValueError(
            f"{path}: data.columns: {named} is not allowed with data.header false; allowed: ROLE=NUMBER, from 1"
        )
    return None


def _misfit(
    path: Location, line: int, fields: Sequence[str], rows: Iterator[Row], width: int, header: list[str] | None
) -> str:
    """Return the message about a line with too few or too many fields.

    The message includes the number of later lines with this fault, which are read from ``rows``.
    """
    exact = header is not None
    more = sum(len(fields) < width or (exact and any(fields[width:])) for _, fields in rows)
    needed = f"{width}, as the header has" if exact else f"{width} or more (data.columns)"
    others = f", and {more} more such lines" if more else ""
    return f"{path}:{line}: {len(fields)} field(s){others}; a line needs {needed}; fix or remove them"


def read_jsonl(name: str, columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Yield a record for the JSON object on each line, or for each object of the array that the file contains;
    numbers are kept as they are written."""
    path = find_file(name)
    return records_of_objects(_entries(path, data.encoding), columns, data, str(path))


def records_of_objects(
    entries: Iterable[tuple[str, Any]], columns: Columns, data: TaskDataConfig, name: str
) -> Iterator[Record]:
    """Yield a record for each of ``entries``, which are pairs of a place and an object, whose keys are columns.

    Messages begin with the place; a line about keys that are not read begins with ``name``, the place of all.
    """
    places: dict[tuple[str, ...], list[Place]] = {}
    unread: dict[str, None] = {}
    for number, (source, entry) in enumerate(entries):
        if not isinstance(entry, dict):
            raise ValueError(
                f'{source}: not a JSON object; expected: lines such as {{"text": "...", "label": "..."}}'
            )
        keys = tuple(entry)
        if keys not in places:
            places[keys] = columns.find(keys, source)
            read = {column for _, column in places[keys]}
            unread |= dict.fromkeys(key for i, key in enumerate(keys) if i not in read)
        values = list(entry.values())
        fields = [(role, present(values[column], role, columns, source)) for role, column in places[keys]]
        yield make_record(fields, source=source, number=number, separator=data.label_separator)
    _name_unread(name, unread)


def _entries(path: Location, encoding: str) -> Iterator[tuple[str, Json]]:
    """Yield the place and the value of each line or, if the first line begins an array, of each of its values."""
    lines = ((line, text) for line, text in read_lines(path, encoding) if text.strip())
    for number, (line, text) in enumerate(lines):
        source, is_array = f"{path}:{line}", number == 0 and text.lstrip().startswith("[")
        try:
            value = json.loads(
                "\n".join([text, *(rest for _, rest in lines)]) if is_array else text,
                parse_int=str, parse_float=str, parse_constant=_constant, object_pairs_hook=_unique,
            )  # fmt: skip
        except json.JSONDecodeError as error:
            place = f"{path}:{line + error.lineno - 1}"
            raise ValueError(f"{place}: not valid JSON: {error.msg} (column {error.colno})") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{source}: not valid JSON: {error}") from None
        yield from ((f"{path}: record {i}", one) for i, one in enumerate(value)) if is_array else [(source, value)]


def _unique(pairs: Sequence[tuple[str, Json]]) -> dict[str, Json]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(one for one in names if names.count(one) > 1)!r} is repeated")
    return entry


def _constant(name: str) -> str | None:
    return None if name == "NaN" else name


def with_label_names(record: Record, data: TaskDataConfig) -> Record:
    """Return ``record`` with the names in ``data.label_names``, if there are any, instead of the labels in the
    files."""
    if not data.label_names:
        return record
    names = dict(zip(data.labels, data.label_names, strict=True))
    label = None if record.label is None else names.get(record.label, record.label)
    labels = None if record.labels is None else tuple(names.get(one, one) for one in record.labels)
    return dataclasses.replace(record, label=label, labels=labels)


def as_json(record: Record) -> dict[str, Json]:
    """Return the nonempty fields of ``record`` as the JSON object of a .jsonl file."""
    empty = Record(id="", source=record.source)
    fields = {
        field.name: getattr(record, field.name)
        for field in dataclasses.fields(Record)
        if getattr(record, field.name) != getattr(empty, field.name) or (field.name == "text" and not record.words)
    }
    if record.answers is not None:
        fields["answers"] = [{"text": answer.text, "answer_start": answer.start} for answer in record.answers]
    return fields
