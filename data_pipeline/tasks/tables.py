"""Readers of TSV, CSV and JSON lines."""

import csv
import dataclasses
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from bert_jax.config.task import TaskDataConfig
from bert_jax.io.storage import Location
from bert_jax.records import Record
from data_pipeline.tasks.columns import Columns, Place, make_record
from data_pipeline.tasks.task_files import find_file, listed, read_lines, read_raw_lines, without_blank_end

Row = tuple[int, list[str]]  # (number of the first line of the row, fields)

_LONGEST_FIELD = 1 << 30  # characters; the default limit of the csv module is 131,072


def read_tsv(name: str, columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Yield the records of a TSV file; quotes are ordinary characters, and only \\n or \\r\\n ends a line."""
    path = find_file(name)
    rows = ((number, line.split("\t")) for number, line in without_blank_end(read_lines(path)))
    return _records(path, rows, columns, data)


def read_csv(name: str, columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Yield the records of a CSV file (RFC 4180): quoted fields may contain commas, "" and line ends."""
    path = find_file(name)
    return _records(path, _csv_rows(path), columns, data)


def _csv_rows(path: Location) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(read_raw_lines(path), strict=True)
    blank: list[Row] = []
    while True:
        start = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            what = str(error).partition(" - ")[0]
            raise ValueError(f"{path}:{start}: not valid CSV: {what}; enclose the field in quotes") from None
        if not any(field.strip(" ") for field in fields) and len(fields) < 2:
            blank.append((start, [""]))
            continue
        yield from blank
        blank.clear()
        yield start, fields


def _records(path: Location, rows: Iterator[Row], columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Yield a record per row. Raises ``ValueError`` if a row has too few fields, or more fields than the header."""
    columns.require_inputs()
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{path}: the file is empty; it needs at least one record")
    header = _header(first, columns, data, path)
    if header is None:
        rows = chain([first], rows)
        places = [(role, int(column) - 1) for role, column in columns.roles]
        width = 1 + max(column for _, column in places)
    else:
        places, width = columns.find(header, f"{path}:{first[0]}", numbers=True), len(header)
    for number, (line, fields) in enumerate(rows):
        if len(fields) < width or (header and any(fields[width:])):
            raise ValueError(_misfit(path, line, fields, rows, width, header))
        values = ((role, fields[column]) for role, column in places)
        yield make_record(values, source=f"{path}:{line}", number=number, separator=data.label_separator)


def _header(first: Row, columns: Columns, data: TaskDataConfig, path: Location) -> list[str] | None:
    """Return the names of the columns, or None for a file without a header."""
    if columns.by_number and any(int(column) == 0 for _, column in columns.roles):
        raise ValueError("data.columns: column 0 is not allowed; allowed: numbers from 1")
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
    allowed = f"{width}, the number of columns in the header" if exact else f"{width} or more (data.columns)"
    others = f", and {more} more such lines" if more else ""
    return f"{path}:{line}: {len(fields)} field(s){others}; allowed: {allowed}; fix or remove them"


def read_jsonl(name: str, columns: Columns, data: TaskDataConfig) -> Iterator[Record]:
    """Yield a record for the JSON object on each line; numbers are kept as they are written."""
    path = find_file(name)
    places: dict[tuple[str, ...], list[Place]] = {}
    lines = ((line, text) for line, text in read_lines(path) if text.strip())
    for number, (line, text) in enumerate(lines):
        source = f"{path}:{line}"
        try:
            entry = json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
        except json.JSONDecodeError as error:
            raise ValueError(f"{source}: not valid JSON: {error.msg} (column {error.colno})") from None
        except RecursionError as error:
            raise ValueError(f"{source}: not valid JSON: {error}") from None
        if not isinstance(entry, dict):
            raise ValueError(
                f'{source}: not a JSON object; expected: lines such as {{"text": "...", "label": "..."}}'
            )
        keys = tuple(entry)
        if keys not in places:
            places[keys] = columns.find(keys, source)
        values = list(entry.values())
        fields = [(role, values[column]) for role, column in places[keys]]
        for role, value in fields:
            if value is None and role in columns.inputs:
                raise ValueError(f"{source}: {role} is null; every record needs a value")
        yield make_record(fields, source=source, number=number, separator=data.label_separator)


def with_label_names(record: Record, data: TaskDataConfig) -> Record:
    """Return ``record`` with the names in ``data.label_names``, if there are any, instead of the labels in the
    files."""
    if not data.label_names:
        return record
    names = dict(zip(data.labels, data.label_names, strict=True))
    label = None if record.label is None else names.get(record.label, record.label)
    labels = None if record.labels is None else tuple(names.get(one, one) for one in record.labels)
    return dataclasses.replace(record, label=label, labels=labels)


def as_json(record: Record) -> dict[str, Any]:
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
