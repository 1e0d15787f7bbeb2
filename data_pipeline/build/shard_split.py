"""Build of one split, from the token store to a folder of shards. Worker processes or Beam execute its jobs."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.files import remove_tree, whole_file, write_whole
from bert_jax.io.storage import Location, ObjectPath, location
from bert_jax.tokenization import Tokenizer
from data_pipeline.build.instances import InstanceSettings
from data_pipeline.build.long_sentences import cluster_flags
from data_pipeline.build.shard_jobs import (
    Part,
    SplitJob,
    choose_packing,
    chosen_packing,
    cut_parts,
    merge_shard,
    part_counts,
    write_part,
)
from data_pipeline.build.text_facts import row_line, warnings_of
from data_pipeline.build.token_store import TokenStore, corpus_settings, held_out
from data_pipeline.build.workers import Workers, remove_scratch
from data_pipeline.shards.compatibility import changed_settings, check_layout, shard_settings
from data_pipeline.shards.shard_files import (
    MANIFEST_NAME,
    ShardEntry,
    read_index,
    read_manifest,
    write_index,
    write_manifest,
)
from data_pipeline.text.documents import Source

_PARTS_VERSION = 4  # version of the format of parts; a build of another version is not continued


def split_folder(data: DataConfig, split: str) -> Location:
    """Return the folder of the shards of ``split`` (train or eval)."""
    if split == "eval" and data.eval_shards:
        return location(data.eval_shards)
    return location(data.shards) / split


def missing_splits(data: DataConfig) -> list[str]:
    """Return the names of the splits whose shards are missing."""
    splits = ["train", "eval"] if data.eval_fraction > 0 and not data.eval_shards else ["train"]
    return [split for split in splits if not (split_folder(data, split) / MANIFEST_NAME).is_file()]


def check_splits(data: DataConfig, tokenizer: Tokenizer, sources: Sequence[Source] | None) -> None:
    """Raise ``ValueError``, which lists every difference, if existing shards were built with other settings.

    ``sources`` is the corpus; if it is None, the corpus is not compared.
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
            wanted |= corpus_settings(data, sources, manifest["settings"])
        if changed := changed_settings(manifest["settings"], wanted):
            raise ValueError(
                f"{folder}: built with other settings: {changed}; set them back, or name another folder in "
                "data.shards"
            )
        read_index(folder)


def plan_splits(data: DataConfig, store: TokenStore, names: Sequence[str]) -> list[tuple[str, np.ndarray, int]]:
    """Return (name, document indices int64[D], number of duplicates) for each split in ``names``.

    Raises ``ValueError`` if a split has too few distinct documents.
    """
    contents, total = store.contents, store.meta["documents"]
    held = held_out(contents, seed=data.seed, fraction=data.eval_fraction)
    splits = []
    for split in names:
        documents = np.flatnonzero(held if split == "eval" else ~held)
        distinct = len(np.unique(contents[documents]))
        if data.next_sentence == "nsp" and distinct < 2:
            raise ValueError(
                f"data.next_sentence: nsp needs two different documents, but {split} has only {distinct} of "
                f"{total} document(s); separate documents by blank lines, or use --data.next_sentence sop or none"
            )
        if distinct == 0:
            raise ValueError(
                f"data.eval_fraction: {data.eval_fraction} of {total} document(s) leaves no document for {split}; "
                "separate documents by blank lines, or use --data.eval_fraction 0"
            )
        splits.append((split, documents, len(documents) - distinct))
    return splits


@dataclass(frozen=True, eq=False)
class Split:
    """The jobs of one split, which can run on any machine: write the parts, then merge them into shards.

    ``parts`` lists all parts, including finished ones. ``facts`` is the manifest without the entries of the shards.
    """

    name: str
    job: SplitJob
    parts: list[Part]
    target: Location
    facts: dict[str, Any]
    tokens: int  # of the store

    def finish(self, entries: Iterable[ShardEntry]) -> None:
        """Write the index and the manifest, and move the folder to ``target``."""
        folder = self.job.build / "shards"
        index = write_index(folder, entries)
        counts, facts = self.facts["counts"] | {"instances": index.records}, self.facts
        counts |= part_counts([part[0] for part in self.parts])
        if packing := chosen_packing(self.job):
            counts |= {"instances": packing.pop("sequences"), "rows": index.records}
            facts = facts | {"packing": packing}
        write_manifest(folder, facts | {"counts": counts, "shards": [entry.facts for entry in index.entries]})
        remove_scratch(folder)
        _move(folder, self.target)

    def check(self) -> None:
        """Raise ``ValueError`` if finished parts of the training split have static masks but no masked token."""
        data, counts = self.job.settings.data, part_counts([part[0] for part in self.parts])
        if self.name == "train" and data.masking == "static" and not counts["predictions"]:
            raise ValueError(
                f"data.mask_unit: with {data.mask_unit}, no token is predicted, because no unit fits "
                f"data.max_predictions ({data.max_predictions}); use token, or a vocabulary with longer pieces"
            )

    def done(self, tokenizer: Tokenizer) -> list[str]:
        """Return the lines of a report about the finished folder: one, and for the training split the facts."""
        manifest = read_manifest(self.target)
        assert manifest is not None
        counts, rows = manifest["counts"], ""
        if self.job.is_packed:
            packing, cells = manifest["packing"], counts["rows"] * self.job.settings.data.seq_length
            rows = (
                f"{counts['rows']:,} rows of at most {packing['sequences_per_row']} (mean "
                f"{counts['instances'] / max(counts['rows'], 1):.2f}, padding "
                f"{1 - packing['tokens'] / max(cells, 1):.1%}), in "
            )
        lines = [f"{self.name}: {counts['instances']:,} instances in {rows}{self.job.num_shards} shard(s)"]
        if self.name == "train":
            facts = counts, manifest["settings"]["data.dupe_factor"], manifest.get("text", {}), self.tokens
            lines.append(f"train: {row_line(*facts)}")
            lines += warnings_of(self.job.settings.data, tokenizer, *facts)
        return lines


def prepare_split(
    data: DataConfig, tokenizer: Tokenizer, store: TokenStore, name: str, documents: np.ndarray, duplicates: int
) -> Split:
    """Create the build folder of a split; remove the folders of other builds of the split, and unfinished files.

    ``documents`` int64[D] contains the indices of the documents of the split, including ``duplicates`` documents
    that repeat the text of another document.
    """
    shards, settings = location(data.shards), shard_settings(data, tokenizer, name)
    content = json.dumps([_PARTS_VERSION, settings, store.meta], sort_keys=True)
    build = shards / f".build-{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    for stale in shards.glob(f".build-{name}-*"):
        if stale != build:
            remove_tree(stale)
    for folder in (build / "parts", build / "shards"):
        folder.mkdir(parents=True, exist_ok=True)
        remove_scratch(folder)
    write_whole(build / "documents.bin", documents.astype("<u8").tobytes())
    for array, values in (("continuation", tokenizer.continuation), ("clusters", cluster_flags(tokenizer))):
        with whole_file(build / f"{array}.npy") as part, part.open("wb") as file:
            np.save(file, values)
    names = ("cls_id", "sep_id", "pad_id", "mask_id", "vocab_size")
    ids = {name: getattr(tokenizer, name) for name in names}
    job = SplitJob(
        store=store.folder,
        build=build,
        num_shards=settings["data.num_shards"],
        settings=InstanceSettings(data=data, **ids),
    )
    first = store.documents[:, 1]
    tokens = (first[documents + 1] - first[documents]).astype(np.int64)
    passes = settings["data.dupe_factor"]
    ranges = cut_parts(tokens, passes)
    parts = [
        (build / "parts" / f"{number:03d}-{first:08d}", number, first, last)
        for number in range(passes)
        for first, last in ranges
    ]
    counts = {"documents": len(tokens), "duplicate_documents": duplicates, "tokens": int(tokens.sum())}
    facts = {
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "settings": settings | {k: v for k, v in store.meta["settings"].items() if k.startswith("data.corpus")},
        "counts": counts,
    }
    if "text" in store.meta:
        facts["text"] = store.meta["text"] | {"tokens": store.meta["tokens"]}
    return Split(name, job, parts, split_folder(data, name), facts, store.meta["tokens"])


def build_split(split: Split, tokenizer: Tokenizer, workers: Workers, report: Callable[[str], None]) -> None:
    """Build the parts and shards that no earlier build has finished, and move the folder to its final path."""
    job, parts, counts = split.job, split.parts, split.facts["counts"]
    passes = split.facts["settings"]["data.dupe_factor"]
    report(f"{split.name}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {passes} pass(es)")
    finished = {path.name for path in (job.build / "parts").glob("*.table")}
    jobs = [(job, *part) for part in parts if f"{part[0].name}.table" not in finished]
    for done, _ in enumerate(workers.run(write_part, jobs), start=len(parts) - len(jobs) + 1):
        if done * 10 // len(parts) > (done - 1) * 10 // len(parts):
            report(f"{split.name}: {done} of {len(parts)} parts are built")
    paths = [part[0] for part in parts]
    split.check()
    if job.is_packed:
        choose_packing(job, paths)
    split.finish(workers.run(merge_shard, [(job, paths, shard) for shard in range(job.num_shards)]))
    for line in split.done(tokenizer):
        report(line)


def _move(folder: Location, target: Location) -> None:
    if isinstance(folder, ObjectPath) and isinstance(target, ObjectPath):
        # An object store renames one file at a time. The manifest, which marks a complete folder, comes last.
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST_NAME):
            path.replace(target / path.name)
        return
    assert isinstance(folder, Path) and isinstance(target, Path)
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    folder.rename(target)
