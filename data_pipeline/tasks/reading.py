"""Selection of the reader of a file by its format, and checks of all records."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bert_jax.config.task import TaskDataConfig, TaskKind
from bert_jax.io.storage import ObjectPath
from bert_jax.records import Record
from data_pipeline.tasks.columns import Columns, Split
from data_pipeline.tasks.json_sets import read_clinc, read_squad
from data_pipeline.tasks.tables import read_csv, read_jsonl, read_tsv
from data_pipeline.tasks.tagged import read_conll, read_slots, read_snips
from data_pipeline.tasks.task_files import find, is_dataset, plain_name, split_address
from data_pipeline.tasks.tfds_records import read_tfds

_READERS: Mapping[str, Callable[[str, Columns, TaskDataConfig], Iterator[Record]]] = {
    "tsv": read_tsv, "csv": read_csv, "jsonl": read_jsonl, "conll": read_conll, "squad": read_squad,
    "slots": read_slots, "snips": read_snips, "clinc": read_clinc, "tfds": read_tfds,
}  # fmt: skip
_SUFFIXES = {
    ".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".conll": "conll", ".conllu": "conll",
    ".bio": "conll", ".iob": "conll", ".iob2": "conll",
}  # fmt: skip


def read_file(
    name: str | Path | ObjectPath, data: TaskDataConfig, kind: TaskKind, *, split: Split = "train"
) -> Iterator[Record]:
    """Yield the records of one file (or folder of slots, part of a JSON file, prepared dataset) in its order.

    ``name`` is not relative to ``data.dir``. An id is that of the column or the number of the record, from 0, and
    is unique in the file. ``ValueError``, with file and line, for invalid content and for a file without records.
    """
    name = str(name)
    columns = Columns.of(data, kind, split)
    seen: dict[str, str] = {}
    for record in _READERS[format_of(name, data, kind)](name, columns, data):
        if record.id in seen:
            raise ValueError(
                f"{record.source}: id {record.id!r} is also the id of {seen[record.id]}; allowed: each id once"
            )
        seen[record.id] = record.source
        yield record
    if not seen:
        raise ValueError(f"{name}: no records in the format {format_of(name, data, kind)}; check data.format")


def format_of(name: str, data: TaskDataConfig, kind: TaskKind) -> str:
    """Return the format of a file: ``data.format``, or with ``auto`` that of its name and the kind of task.

    A .json file is squad for qa, otherwise clinc; .txt is conll for tagging, snips for joint, otherwise tsv; a
    folder is slots; ``tfds:`` begins the name of a prepared dataset.
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
        f"{name}: the suffix has no known format; allowed: {', '.join(_SUFFIXES)}, .json, .txt, folders of slots; "
        "or set data.format"
    )
