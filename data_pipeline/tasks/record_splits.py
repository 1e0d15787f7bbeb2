"""Read the records of a run from train, dev and test files, or take the dev split from the training records."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from bert_jax.config.task import TaskDataConfig, TaskKind
from bert_jax.io.storage import is_url
from bert_jax.records import Record
from data_pipeline.tasks.reading import read_file
from data_pipeline.tasks.task_files import find, is_dataset, locate, plain_name, split_address


def read_splits(data: TaskDataConfig, kind: TaskKind) -> dict[str, list[Record]]:
    """Return the records of "train" (all training files) and of each dev and test split (:func:`split_names`).

    With ``data.dev_fraction``, this fraction of the training records becomes "dev", and ``train_limit`` samples
    from the remaining training records. ``dev_limit`` keeps the first records of each dev split. Raises
    ``ValueError`` if no file is set or a file is invalid.
    """
    if not any(getattr(data, split) for split in data.SPLITS):
        raise ValueError("data.train: not set; name files in data.train, data.dev or data.test")
    dev_names, test_names = split_names(data)
    splits = {"train": [record for name in data.train for record in read_named(name, data, kind, "train")]}
    if data.dev_fraction:
        if not data.train:
            raise ValueError("data.dev_fraction: the dev split needs training records; name files in data.train")
        splits["train"], splits["dev"] = cut_dev(
            splits["train"], fraction=data.dev_fraction, group_by=data.group_by, seed=data.split_seed
        )
    if data.train_limit:
        splits["train"] = draw(splits["train"], data.train_limit, seed=data.split_seed)
    for name, file in zip(dev_names, data.dev, strict=False):  # a dev split taken from training records has no file
        splits[name] = list(islice(read_named(file, data, kind, "dev"), data.dev_limit or None))
    if data.dev_fraction and data.dev_limit:
        splits["dev"] = splits["dev"][: data.dev_limit]
    for name, file in zip(test_names, data.test, strict=True):
        splits[name] = list(read_named(file, data, kind, "test"))
    return splits


def read_named(name: str, data: TaskDataConfig, kind: TaskKind, split: str) -> Iterable[Record]:
    """Yield the records of a file, relative to ``data.dir``, or of a dataset (see ``reading.read_file``)."""
    path = name if is_dataset(name, data.format) else locate(data.dir, name)
    if not (data.dir or is_dataset(name, data.format) or is_url(name) or Path(name).is_absolute()):
        try:
            find(split_address(name, dataset=False)[0])
        except ValueError as error:
            raise ValueError(f"{error}; data.dir, the folder of the files, is not set") from None
    return read_file(path, data, kind, split=split)


# ------------------------------------------------------------------ names


def split_names(data: TaskDataConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the dev splits and the names of the test splits.

    A single file is named "dev" or "test"; several files are named by their file names without suffixes. If a name
    occurs twice, the folder becomes a prefix of all names. Raises ``ValueError`` if a name still occurs twice.
    """
    for long in (False, True):
        names = [
            (split,) if len(files) == 1 else tuple(_stem(name, data, long) for name in files)
            for split, files in (("dev", data.dev), ("test", data.test))
        ]
        dev = ("dev",) if data.dev_fraction else names[0]
        name, count = Counter(["train", *dev, *names[1]]).most_common(1)[0]
        if count == 1:
            return dev, names[1]
    raise ValueError(f"data.dev, data.test: {count} splits have the name {name!r}; rename a file or its folder")


def _stem(name: str, data: TaskDataConfig, long: bool) -> str:
    dataset = is_dataset(name, data.format)
    place, part = split_address(name, dataset=dataset)
    path = plain_name(place)
    stem = path.name.partition(":")[0] if dataset else path.stem
    words = [part or stem]
    if long:
        words = [stem if part else path.parent.name, *words]
    return re.sub(r"[^\w.+-]+", "_", "_".join(word for word in words if word))


# ------------------------------------------------------------------ splitting and sampling


def cut_dev(
    records: Sequence[Record], *, fraction: float, group_by: str, seed: int
) -> tuple[list[Record], list[Record]]:
    """Split records into (train, dev).

    Groups are never divided. They are added to dev in an order determined by ``seed``; a group that would raise dev
    above ``fraction`` of the records is skipped. If every group is too large, dev is the smallest group. Raises
    ``ValueError`` if there are fewer than two groups.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for i, key in enumerate(_group_keys(records, group_by)):
        groups[key].append(i)
    if len(groups) < 2:
        raise ValueError(
            f"data.dev_fraction: all {len(records)} training records are one group (data.group_by {group_by}); set "
            "data.dev, or another data.group_by"
        )
    wanted = max(1, round(len(records) * fraction))
    chosen: list[int] = []
    order = sorted(groups, key=lambda key: seeded_hash(seed, "dev", key))
    for key in order:
        # At least one group remains for training.
        if len(chosen) + len(groups[key]) <= min(wanted, len(records) - 1):
            chosen += groups[key]
    dev = set(chosen or groups[min(order, key=lambda key: len(groups[key]))])
    return chosen_records(records, [i for i in range(len(records)) if i not in dev]), chosen_records(
        records, sorted(dev)
    )


def draw(records: Sequence[Record], count: int, *, seed: int) -> list[Record]:
    """Sample ``count`` records and keep their order; the sample of a larger ``count`` contains them too."""
    drawn = sorted(range(len(records)), key=lambda i: seeded_hash(seed, "limit", str(i)))[:count]
    return chosen_records(records, sorted(drawn))


def chosen_records(records: Sequence[Record], numbers: Sequence[int]) -> list[Record]:
    """Return the records with the indices ``numbers``.

    Consecutive tagged sentences of a document serve each other as context. A gap in ``numbers`` therefore starts a
    new document: the records after the gap get another ``group``.
    """
    kept, part = [], 0
    for before, number in zip([-1, *numbers], numbers, strict=False):
        record = records[number]
        part += number != before + 1
        kept.append(replace(record, group=f"{record.group}:{part}") if record.group and record.words else record)
    return kept


def seeded_hash(seed: int, purpose: str, key: str) -> bytes:
    """Return a hash whose order over the keys of one ``purpose`` is random and the same on every machine."""
    return hashlib.sha256(f"{seed} {purpose} {key}".encode("utf-8", "replace")).digest()


def _group_keys(records: Sequence[Record], group_by: str) -> list[str]:
    """Return the group key of each record; the key contains the index of the first record of the group."""
    if group_by == "none":
        return [f"record {i}" for i in range(len(records))]
    if group_by == "sentence":
        return _components(records)
    if not any(record.group for record in records):
        raise ValueError(
            f"data.group_by: {group_by!r} needs records with a group; set data.columns group=COLUMN, or use "
            "data.group_by none or sentence"
        )
    # The name of a group may contain a path, but the split must not depend on paths.
    first: dict[str, int] = {}
    return [f"record {first.setdefault(r.group, i) if r.group else i}" for i, r in enumerate(records)]


def _components(records: Sequence[Record]) -> list[str]:
    """Return a key per record; records that share a text, directly or through other records, have equal keys."""
    parent = list(range(len(records)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[str, int] = {}
    for i, record in enumerate(records):
        texts = (record.text, record.text_pair, *record.choices, *record.negatives, " ".join(record.words))
        for text in filter(None, texts):
            a, b = root(first.setdefault(text, i)), root(i)
            parent[max(a, b)] = min(a, b)
    return [f"record {root(i)}" for i in range(len(records))]
