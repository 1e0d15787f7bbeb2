"""One split of the documents: from the token store to a folder of shards, under any runner of jobs."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.files import remove_tree, whole_file, write_whole
from bert_jax.io.storage import Location, ObjectPath, location
from bert_jax.tokenization import Tokenizer
from data_pipeline.build.instances import InstanceSettings
from data_pipeline.build.shard_jobs import Part, SplitJob, cut_parts, merge_shard, write_part
from data_pipeline.build.token_store import TokenStore, held_out, names_and_sizes
from data_pipeline.build.workers import Workers, remove_scratch
from data_pipeline.shards.compatibility import check_layout, differences, shard_settings
from data_pipeline.shards.shard_files import (
    MANIFEST_NAME,
    ShardEntry,
    read_index,
    read_manifest,
    write_index,
    write_manifest,
)
from data_pipeline.text.documents import Source

_PARTS_VERSION = 2  # of the format of parts: a build of another version is not continued


def split_folder(data: DataConfig, split: str) -> Location:
    """Return the folder of the shards of ``split`` (train or eval)."""
    if split == "eval" and data.eval_shards:
        return location(data.eval_shards)
    return location(data.shards) / split


def missing_splits(data: DataConfig) -> list[str]:
    """Return the splits that must be built."""
    splits = ["train", "eval"] if data.eval_fraction > 0 and not data.eval_shards else ["train"]
    return [split for split in splits if not (split_folder(data, split) / MANIFEST_NAME).is_file()]


def check_splits(data: DataConfig, tokenizer: Tokenizer, sources: Sequence[Source] | None) -> None:
    """Raise ``ValueError`` with every difference if existing shards were built with other settings.

    ``sources`` is the corpus; None: it is not compared.
    """
    for split in ("train", "eval"):
        folder = split_folder(data, split)
        manifest = read_manifest(folder)
        if manifest is None:
            if folder.is_dir() and split == "eval" and data.eval_shards:
                check_layout(read_index(folder), data, tokenizer)
            continue
        wanted = shard_settings(data, tokenizer, split)
        if sources is not None and "data.corpus" in manifest["settings"]:
            wanted["data.corpus"] = names_and_sizes(sources)
        if changed := differences(manifest["settings"], wanted, "shards"):
            raise ValueError(
                f"{folder}: built with other settings: {changed}; set them back, or name another folder in "
                "data.shards"
            )
        read_index(folder)


def plan_splits(data: DataConfig, tokenizer: Tokenizer, store: TokenStore, names: Sequence[str]) -> "list[Split]":
    """Return the splits ``names``; ``ValueError`` if one of them has too few documents."""
    contents, total = store.contents, store.meta["documents"]
    held = held_out(contents, seed=data.seed, fraction=data.eval_fraction)
    splits = []
    for split in names:
        documents = np.flatnonzero(held if split == "eval" else ~held)
        distinct = len(np.unique(contents[documents]))
        if data.next_sentence == "nsp" and distinct < 2:
            raise ValueError(
                f"data.next_sentence: nsp needs two different documents, but of {total} document(s) {split} "
                f"has {distinct}; separate documents by blank lines, or use --data.next_sentence sop or none"
            )
        if distinct == 0:
            raise ValueError(
                f"data.eval_fraction: {data.eval_fraction} of {total} document(s) is no document; "
                "separate documents by blank lines, or use --data.eval_fraction 0"
            )
        splits.append(Split(data, split, tokenizer, store, documents, len(documents) - distinct))
    return splits


@dataclass(frozen=True, eq=False)
class Split:
    """One split before its build: its documents in the token store, and settings."""

    data: DataConfig
    name: str
    tokenizer: Tokenizer
    store: TokenStore
    documents: np.ndarray
    duplicates: int

    @property
    def summary(self) -> str:
        """Number of documents, tokens and passes, as a line of a report."""
        tokens, passes = int(self._tokens().sum()), self._settings["data.dupe_factor"]
        return f"{self.name}: {len(self.documents):,} documents, {tokens:,} tokens, {passes} pass(es)"

    @property
    def _settings(self) -> dict[str, Any]:
        return shard_settings(self.data, self.tokenizer, self.name)

    def _tokens(self) -> np.ndarray:
        """Return the number of tokens of every document of the split, int64[D]."""
        first = self.store.documents[:, 1]
        return (first[self.documents + 1] - first[self.documents]).astype(np.int64)

    def prepare(self) -> "PreparedSplit":
        """Create the folder of the build, and remove other builds and unfinished files; return the jobs."""
        shards = location(self.data.shards)
        content = json.dumps([_PARTS_VERSION, self._settings, self.store.meta], sort_keys=True)
        build = shards / f".build-{self.name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        for stale in shards.glob(f".build-{self.name}-*"):
            if stale != build:
                remove_tree(stale)
        for folder in (build / "parts", build / "shards"):
            folder.mkdir(parents=True, exist_ok=True)
            remove_scratch(folder)
        write_whole(build / "documents.bin", self.documents.astype("<u8").tobytes())
        with whole_file(build / "continuation.npy") as part, part.open("wb") as file:
            np.save(file, self.tokenizer.continuation)
        names = ("cls_id", "sep_id", "pad_id", "mask_id", "vocab_size")
        ids = {name: getattr(self.tokenizer, name) for name in names}
        job = SplitJob(
            store=self.store.folder,
            build=build,
            num_shards=int(self._settings["data.num_shards"]),
            settings=InstanceSettings(data=self.data, **ids),
        )
        passes = int(self._settings["data.dupe_factor"])
        tokens = self._tokens()
        parts = [
            (build / "parts" / f"{number:03d}-{first:08d}", number, first, last)
            for number in range(passes)
            for first, last in cut_parts(tokens, passes)
        ]
        counts = {"documents": len(tokens), "duplicate_documents": self.duplicates, "tokens": int(tokens.sum())}
        facts = {
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "settings": self._settings | {"data.corpus": self.store.meta["settings"]["data.corpus"]},
            "counts": counts,
        }
        return PreparedSplit(self.name, job, parts, split_folder(self.data, self.name), facts)


@dataclass(frozen=True, eq=False)
class PreparedSplit:
    """The jobs of one split, for any machine: all ``parts``, finished or not, and the shards to merge from them.

    ``facts`` is the manifest without the figures of the finished shards.
    """

    name: str
    job: SplitJob
    parts: list[Part]
    target: Location
    facts: dict[str, Any]

    def finish(self, entries: Iterable[ShardEntry]) -> None:
        """Write the index and the manifest and move the folder in place."""
        folder = self.job.build / "shards"
        index = write_index(folder, entries)
        counts = self.facts["counts"] | {"instances": index.records}
        write_manifest(folder, self.facts | {"counts": counts, "shards": [entry.facts for entry in index.entries]})
        remove_scratch(folder)
        _move(folder, self.target)

    def done(self) -> str:
        """Return a line of a report about the finished folder."""
        return f"{self.name}: {read_index(self.target).records:,} instances in {self.job.num_shards} shard(s)"


def build_split(split: Split, workers: Workers, report: Callable[[str], None]) -> None:
    """Build the parts and shards that no earlier build has finished, and move the folder in place."""
    report(split.summary)
    prepared = split.prepare()
    job, parts = prepared.job, prepared.parts
    finished = {path.name for path in (job.build / "parts").glob("*.table")}
    jobs = [(job, *part) for part in parts if f"{part[0].name}.table" not in finished]
    for done, _ in enumerate(workers.run(write_part, jobs), start=len(parts) - len(jobs) + 1):
        if done * 10 // len(parts) > (done - 1) * 10 // len(parts):
            report(f"{split.name}: {done} of {len(parts)} parts")
    paths = [part[0] for part in parts]
    prepared.finish(workers.run(merge_shard, [(job, paths, shard) for shard in range(job.num_shards)]))
    report(prepared.done())


def _move(folder: Location, target: Location) -> None:
    if isinstance(folder, ObjectPath):
        # An object store renames one file at a time. The manifest, which marks a complete folder, comes last.
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST_NAME):
            path.replace(target / path.name)
        return
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    folder.rename(target)
