"""The records of a run: train, dev and test files, and a dev split cut from train where there is none."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from bert_jax.config.task import TaskDataConfig, TaskKind
from bert_jax.records import Record
from data_pipeline.tasks.columns import Split
from data_pipeline.tasks.reading import read_file
from data_pipeline.tasks.task_files import is_dataset, locate, plain_name, split_address


def read_splits(data: TaskDataConfig, kind: TaskKind) -> dict[str, list[Record]]:
    """Records of "train" (all its files, maybe none) and of every dev and test split (:func:`split_names`).

    Where there is no dev file, ``data.dev_fraction`` of the training records becomes "dev"; ``train_limit`` draws
    from what is left. ``dev_limit`` takes the first records of each dev split. ``ValueError`` for what cannot be
    read.
    """
    if not (data.train or data.dev or data.test):
        raise ValueError("data.train: no file is given; name files in data.train, data.dev or data.test")
    dev_names, test_names = split_names(data)
    splits = {"train": [record for name in data.train for record in read_named(name, data, kind, "train")]}
    if data.dev_fraction:
        if not data.train:
            raise ValueError("data.dev_fraction: there is nothing to cut from; name files in data.train")
        splits["train"], splits["dev"] = cut_dev(
            splits["train"], fraction=data.dev_fraction, group_by=data.group_by, seed=data.split_seed
        )
    if data.train_limit:
        splits["train"] = draw(splits["train"], data.train_limit, seed=data.split_seed)
    for name, file in zip(dev_names, data.dev, strict=False):  # a split that was cut has no file
        splits[name] = list(islice(read_named(file, data, kind, "dev"), data.dev_limit or None))
    if data.dev_fraction and data.dev_limit:
        splits["dev"] = splits["dev"][: data.dev_limit]
    for name, file in zip(test_names, data.test, strict=True):
        splits[name] = list(read_named(file, data, kind, "test"))
    return splits


def read_named(name: str, data: TaskDataConfig, kind: TaskKind, split: Split) -> Iterable[Record]:
    """Records of a file or dataset as a config names it, relative to ``data.dir``; see ``reading.read_file``."""
    path = name if is_dataset(name, data.format) else locate(data.dir, name)
    return read_file(path, data, kind, split=split)


# ------------------------------------------------------------------ names


def split_names(data: TaskDataConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the dev and of the test splits: "dev" and "test" for one file, else the files' names (no suffix).

    Where that gives a name twice, the folder's name stands before it; ``ValueError`` when it is still there twice.
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
    raise ValueError(f"data.dev, data.test: {count} splits would be called {name!r}; rename a file or its folder")


def _stem(name: str, data: TaskDataConfig, long: bool) -> str:
    dataset = is_dataset(name, data.format)
    place, part = split_address(name, dataset=dataset)
    path = plain_name(place)
    stem = path.name.partition(":")[0] if dataset else path.stem
    words = [part or stem]
    if long:
        words = [stem if part else path.parent.name, *words]
    return re.sub(r"[^\w.+-]+", "_", "_".join(word for word in words if word))


# ------------------------------------------------------------------ cutting and drawing


def cut_dev(
    records: Sequence[Record], *, fraction: float, group_by: str, seed: int
) -> tuple[list[Record], list[Record]]:
    """(train, dev): whole groups, in an order that follows from ``seed`` alone, as long as they fit into
    ``fraction`` of the records; the smallest one if none does. ``ValueError`` when there are not two groups."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, key in enumerate(_group_keys(records, group_by)):
        groups[key].append(i)
    if len(groups) < 2:
        raise ValueError(
            f"data.dev_fraction: all {len(records)} training records belong together (data.group_by {group_by}); "
            "give data.dev, or another data.group_by"
        )
    wanted = max(1, round(len(records) * fraction))
    chosen: list[int] = []
    order = sorted(groups, key=lambda key: _hash(seed, "dev", key))
    for key in order:
        # Never all of the groups, however small they are.
        if len(chosen) + len(groups[key]) <= min(wanted, len(records) - 1):
            chosen += groups[key]
    dev = set(chosen or groups[min(order, key=lambda key: len(groups[key]))])
    return _chosen(records, [i for i in range(len(records)) if i not in dev]), _chosen(records, sorted(dev))


def draw(records: Sequence[Record], count: int, *, seed: int) -> list[Record]:
    """``count`` of the records in their order; those of a smaller count are among those of a larger one."""
    drawn = sorted(range(len(records)), key=lambda i: _hash(seed, "limit", str(i)))[:count]
    return _chosen(records, sorted(drawn))


def _chosen(records: Sequence[Record], numbers: Sequence[int]) -> list[Record]:
    """Those records. Sentences of words with a dropped one between them belong to different documents now:
    the context of a sentence is its neighbors."""
    kept, part = [], 0
    for before, number in zip([-1, *numbers], numbers, strict=False):
        record = records[number]
        part += number != before + 1
        kept.append(replace(record, group=f"{record.group}:{part}") if record.group and record.words else record)
    return kept


def _hash(seed: int, purpose: str, key: str) -> bytes:
    return hashlib.sha256(f"{seed} {purpose} {key}".encode("utf-8", "replace")).digest()


def _group_keys(records: Sequence[Record], group_by: str) -> list[str]:
    """The first record of the group of each one; a record without a group is one of its own."""
    if group_by == "none":
        return [f"record {i}" for i in range(len(records))]
    if group_by == "sentence":
        return _components(records)
    if not any(record.group for record in records):
        raise ValueError(
            f"data.group_by: {group_by!r} is not allowed, no record has a group; allowed: none, sentence, or name "
            "the column in data.columns: group=COLUMN"
        )
    # Not the group's name: it may hold the place of a file, and the split is the same wherever the files lie.
    first: dict[str, int] = {}
    return [f"record {first.setdefault(r.group, i) if r.group else i}" for i, r in enumerate(records)]


def _components(records: Sequence[Record]) -> list[str]:
    """Records that share a text, also by way of others, have the same key: the number of the first of them."""
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
