"""Selection of the reader for the format of a file, and checks that apply to all formats."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from bert_jax.config.task import TaskDataConfig, TaskKind
from bert_jax.io.storage import ObjectPath
from bert_jax.records import Record
from data_pipeline.tasks.columns import Columns
from data_pipeline.tasks.json_sets import read_clinc, read_squad
from data_pipeline.tasks.tables import read_jsonl, read_table
from data_pipeline.tasks.tagged import read_conll, read_slots, read_snips
from data_pipeline.tasks.task_files import find, is_dataset, plain_name, split_address
from data_pipeline.tasks.tfds_records import read_tfds

_READERS: Mapping[str, Callable[[str, Columns, TaskDataConfig], Iterator[Record]]] = {
    "tsv": partial(read_table, default="\t"), "csv": partial(read_table, default=","), "jsonl": read_jsonl,
    "conll": read_conll, "squad": read_squad, "slots": read_slots, "snips": read_snips, "clinc": read_clinc,
    "tfds": read_tfds,
}  # fmt: skip
_SUFFIXES = {
    ".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".conll": "conll", ".conllu": "conll",
    ".bio": "conll", ".iob": "conll", ".iob2": "conll",
}  # fmt: skip


def read_file(
    name: str | Path | ObjectPath, data: TaskDataConfig, kind: TaskKind, *, split: str = "train"
) -> Iterator[Record]:
    """Yield the records of a file, a slots folder, a part of a JSON file or a prepared dataset, in stored order.

    ``data.dir`` is not prepended to ``name``. The id of a record is its value in the id column or, without such a
    column, its index in the file, from 0; ids are unique in a file. Raises ``ValueError``, with the file and the
    line, for invalid content, and for a file without records.
    """
    name = str(name)
    columns = Columns.of(data, kind, split)
    file_format = format_of(name, data, kind)
    empty = f"{name}: no records in the format {file_format}; check data.format"
    return with_unique_ids(_READERS[file_format](name, columns, data), empty)


def with_unique_ids(records: Iterable[Record], empty: str) -> Iterator[Record]:
    """Yield ``records``. Raises ``ValueError`` if an id occurs twice and, with the message ``empty``, if there are
    none."""
    seen: dict[str, str] = {}
    for record in records:
        if record.id in seen:
            raise ValueError(
                f"{record.source}: id {record.id!r} is also the id of {seen[record.id]}; ids must be unique"
            )
        seen[record.id] = record.source
        yield record
    if not seen:
        raise ValueError(empty)


def format_of(name: str, data: TaskDataConfig, kind: TaskKind) -> str:
    """Return ``data.format``, or if it is ``auto``, the format that follows from ``name`` and the kind of task.

    A .json file is squad for qa, and clinc for other kinds. A .txt file is conll for tagging, snips for joint, and
    tsv for other kinds. A folder is slots. A name that begins with ``tfds:`` is a prepared dataset. Raises
    ``ValueError`` for a file with another suffix that is not in the table of suffixes.
    """
    if data.format != "auto":
        return data.format
    if is_dataset(name, data.format):
        return "tfds"
    suffix = plain_name(split_address(name, dataset=False)[0]).suffix.lower()
    if suffix == ".json":
        return "squad" if kind == "qa" else "clinc"
    if suffix == ".txt":
        return {"tagging": "conll", "joint": "snips"}.get(kind, "tsv")
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if find(name).is_dir():
        return "slots"
    raise ValueError(
        f"{name}: cannot infer the format from the suffix; allowed: {', '.join(_SUFFIXES)}, .json, .txt, or a "
        "folder in the slots format; otherwise set data.format"
    )
