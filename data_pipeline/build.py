"""From a DataConfig to a vocabulary and shards: what is there is checked, what is missing is built.

Stages, each finished by one rename: vocabulary, token store, and for each split parts, shards, folder. A build
works in ``SHARDS/.build-*``; ``train/`` and ``eval/`` appear whole, with index and manifest. Run again after a
kill, it keeps every finished chunk, part and shard and gives the bytes of an unkilled build.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config.schema import DataConfig
from bert_jax.tokenization import Tokenizer, load_tokenizer
from data_pipeline.checks import (
    check_foreign,
    describe,
    difference,
    pair_advice,
    shard_settings,
)
from data_pipeline.corpus import Source, list_sources, read_documents
from data_pipeline.instances import InstanceSettings
from data_pipeline.masking import MaskingSettings
from data_pipeline.parts import SplitJob, cut_parts, merge_shard, write_part
from data_pipeline.shards import (
    INDEX_NAME,
    MANIFEST_NAME,
    ShardIndex,
    atomic_file,
    read_index,
    read_manifest,
    write_index,
    write_manifest,
)
from data_pipeline.token_store import (
    META_NAME,
    TokenStore,
    build_store,
    content_hash,
    held_out,
    names_and_sizes,
    remove_chunks,
    store_settings,
)
from data_pipeline.workers import OneApart, Workers, exclusive, processor_count, remove_scratch

Report = Callable[[str], None]
# What to say of a build that a signal ends.
STOPPED = "stopped while preparing data; what is finished is kept: run the same command to continue"
VOCAB_SETTINGS_NAME = "vocabulary.json"


def ensure_data(data: DataConfig, *, vocab_size: int, report: Report) -> Path:
    """Make sure that vocabulary and shards of ``data`` are there; returns the vocabulary's path.

    Builds what is missing: the vocabulary (of ``vocab_size`` pieces, on training documents only) when
    ``data.vocab`` is empty, the token store, and the shards. Checks what is there. ``ValueError`` (one line: what
    differs, what to do) when it was made with other settings; nothing is ever rebuilt or used silently.
    """
    if not data.shards:
        raise ValueError("data.shards: not given; name the folder of the shards, to be built there if missing")
    shards = Path(data.shards)
    if is_foreign(shards):
        return _use_foreign(data, shards, vocab_size)
    vocab, tokenizer = _existing_vocabulary(data, vocab_size)
    missing = missing_splits(data)
    if tokenizer is None or missing:
        with ExitStack() as stack:
            stack.enter_context(exclusive(shards))
            sources = list_sources(data.corpus)
            if tokenizer is None:
                vocab = _train_vocabulary(data, sources, vocab_size, report)
                tokenizer = _load(data, vocab, vocab_size)
            if missing:
                _check_splits(data, tokenizer)
                workers = stack.enter_context(Workers(data.workers or processor_count()))
                _build_splits(data, vocab, tokenizer, sources, workers, missing, report, stack)
    _check_splits(data, tokenizer)
    if leftovers := list(shards.glob(".build-*")):
        with exclusive(shards):
            for path in leftovers:
                shutil.rmtree(path)
    return vocab


def split_folder(data: DataConfig, split: str) -> Path:
    """Where the shards of ``split`` (train or eval) lie."""
    return Path(data.eval_shards) if split == "eval" and data.eval_shards else Path(data.shards) / split


def missing_splits(data: DataConfig) -> list[str]:
    """Splits that ``ensure_data`` would build."""
    splits = ["train", "eval"] if data.eval_fraction > 0 and not data.eval_shards else ["train"]
    return [split for split in splits if not (split_folder(data, split) / MANIFEST_NAME).is_file()]


# ------------------------------------------------------------------ shards of somebody else's


def is_foreign(shards: Path) -> bool:
    """Whether ``shards`` holds TFRecords that ``bert-data shards`` did not make."""
    folder = shards / "train" if (shards / "train").is_dir() else shards
    if (folder / MANIFEST_NAME).is_file() or not folder.is_dir():
        return False
    return (folder / INDEX_NAME).is_file() or any(folder.glob("[!.]*.tfrecord*"))


def _use_foreign(data: DataConfig, shards: Path, vocab_size: int) -> Path:
    vocab, tokenizer = _existing_vocabulary(data, vocab_size)
    if tokenizer is None:
        raise ValueError(f"data.vocab: not given; the shards in {shards} need the vocabulary they were made with")
    check_foreign(data, shards / "train" if (shards / "train").is_dir() else shards, tokenizer)
    evaluation = split_folder(data, "eval")
    if evaluation.is_dir():
        check_foreign(data, evaluation, tokenizer)
    return vocab


# ------------------------------------------------------------------ vocabulary


def vocabulary_path(data: DataConfig) -> Path:
    """``data.vocab``, or where the trained vocabulary lies."""
    name = "vocab.txt" if data.tokenizer == "wordpiece" else "tokenizer.model"
    return Path(data.vocab) if data.vocab else Path(data.shards) / name


def _load(data: DataConfig, path: Path, vocab_size: int) -> Tokenizer:
    tokenizer = load_tokenizer(path, lower_case=data.lower_case)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"model.vocab_size: {vocab_size} is less than the {tokenizer.vocab_size} pieces of {path}; "
            f"give --model.vocab_size {tokenizer.vocab_size}"
        )
    return tokenizer


def _vocabulary_settings(data: DataConfig, vocab_size: int, sources: Sequence[Source] | None) -> dict[str, Any]:
    """What a trained vocabulary follows from; without ``sources``, but for the text."""
    settings = {
        "data.tokenizer": data.tokenizer,
        "data.lower_case": data.lower_case,
        "data.line": data.line,
        "data.json_field": data.json_field,
        "data.seed": data.seed,
        "data.eval_fraction": data.eval_fraction,
        "model.vocab_size": vocab_size,
    }
    return settings if sources is None else settings | {"data.corpus": names_and_sizes(sources)}


def _sources_if_there(data: DataConfig) -> list[Source] | None:
    """The corpus, or None: the text may be gone once vocabulary and shards are made."""
    try:
        return list_sources(data.corpus)
    except ValueError:
        return None


def _existing_vocabulary(data: DataConfig, vocab_size: int) -> tuple[Path, Tokenizer | None]:
    path = vocabulary_path(data)
    if not data.vocab:
        settings = path.with_name(VOCAB_SETTINGS_NAME)
        if not path.is_file():
            return path, None
        if settings.is_file():
            recorded = json.loads(settings.read_text())
            wanted = _vocabulary_settings(data, vocab_size, _sources_if_there(data))
            # Older records say nothing of the text.
            wanted = {name: value for name, value in wanted.items() if name in recorded}
            found = difference(recorded, wanted)
            if found:
                raise ValueError(
                    f"{path}: trained with other settings: {describe(found, 'vocabulary')}; "
                    "set them back, name the file in data.vocab to use it all the same, or name another folder in "
                    "data.shards"
                )
    return path, _load(data, path, vocab_size)


def place_vocabulary(path: Path, content: bytes) -> None:
    """Put a vocabulary that the run was given where ``data.vocab`` expects it. ``ValueError`` when another one is
    there: shards may have been made with it."""
    with exclusive(path.parent):
        if not path.is_file():
            with atomic_file(path) as file:
                file.write(content)
        elif path.read_bytes() != content:
            raise ValueError(
                f"{path}: another vocabulary than the run's lies there; name another folder in data.shards"
            )


def training_texts(data: DataConfig, sources: Sequence[Source]) -> Iterator[str]:
    """Sentences of the documents that are not held out."""

    def documents() -> Iterator[list[str]]:
        for source in sources:
            yield from read_documents(source, line=data.line, json_field=data.json_field)

    contents = np.fromiter((content_hash(document) for document in documents()), np.uint64)
    held = held_out(contents, seed=data.seed, fraction=data.eval_fraction)
    for document, is_held in zip(documents(), held.tolist(), strict=True):
        if not is_held:
            yield from document


def ensure_vocabulary(data: DataConfig, *, vocab_size: int, report: Report) -> Path:
    """Train the vocabulary that ``ensure_data`` would train, in its place, unless it is there; returns its path."""
    if not data.shards and not data.vocab:
        raise ValueError("give --output FILE, or the folder of the shards (data.shards) to put the vocabulary in")
    path, tokenizer = _existing_vocabulary(data, vocab_size)
    if tokenizer is None:
        with exclusive(Path(data.shards)):
            _train_vocabulary(data, list_sources(data.corpus), vocab_size, report)
    return path


def _train_vocabulary(data: DataConfig, sources: Sequence[Source], vocab_size: int, report: Report) -> Path:
    path = vocabulary_path(data)
    with atomic_file(path.with_name(VOCAB_SETTINGS_NAME)) as file:
        settings = _vocabulary_settings(data, vocab_size, sources)
        file.write(json.dumps(settings, sort_keys=True, indent=1).encode() + b"\n")
    return _write_vocabulary(data, sources, path, vocab_size, report)


def write_vocabulary(data: DataConfig, output: Path, *, vocab_size: int, report: Report) -> Path:
    """Train a vocabulary on the documents of ``data.corpus`` that are not held out, and write it to ``output``."""
    sources = list_sources(data.corpus)
    output.parent.mkdir(parents=True, exist_ok=True)
    return _write_vocabulary(data, sources, output, vocab_size, report)


def _write_vocabulary(
    data: DataConfig, sources: Sequence[Source], output: Path, vocab_size: int, report: Report
) -> Path:
    for leftover in output.parent.glob(f".{output.name}.*.tmp"):
        leftover.unlink()  # of a killed training
    report(f"training a {data.tokenizer} vocabulary of {vocab_size:,} pieces")
    with OneApart() as process:
        return next(process.run(_train_on_corpus, [(data, sources, output, vocab_size)]))


def _train_on_corpus(data: DataConfig, sources: Sequence[Source], output: Path, vocab_size: int) -> Path:
    """Job: the vocabulary in the file ``output``."""
    from data_pipeline.vocab import train_vocabulary

    return train_vocabulary(
        training_texts(data, sources), kind=data.tokenizer, vocab_size=vocab_size, lower_case=data.lower_case,
        output=output,
    )  # fmt: skip


# ------------------------------------------------------------------ shards


def _check_splits(data: DataConfig, tokenizer: Tokenizer) -> None:
    """``ValueError`` when shards that are there were made with other settings; lists every difference."""
    sources = None if missing_splits(data) else _sources_if_there(data)
    for split in ("train", "eval"):
        folder = split_folder(data, split)
        manifest = read_manifest(folder)
        if manifest is None:
            if folder.is_dir() and split == "eval" and data.eval_shards:
                check_foreign(data, folder, tokenizer)
            continue
        wanted = shard_settings(data, tokenizer, split)
        if sources is not None and "data.corpus" in manifest["settings"]:
            wanted["data.corpus"] = names_and_sizes(sources)
        found = difference(manifest["settings"], wanted)
        if found:
            raise ValueError(
                f"{folder}: made with other settings: {describe(found, 'shards')}; "
                "set them back, or name another folder in data.shards"
            )
        read_index(folder)


def _open_store(
    data: DataConfig, vocab: Path, tokenizer: Tokenizer, sources: Sequence[Source], workers: Workers,
    report: Report, stack: ExitStack,
) -> TokenStore:  # fmt: skip
    folder = Path(data.token_store) if data.token_store else Path(data.shards) / "store"
    stack.enter_context(exclusive(folder))
    if not (folder / META_NAME).is_file():
        report(
            f"tokenizing {sum(s.path.stat().st_size for s in sources) / 1e6:,.1f} MB in {workers.count} processes"
        )
        return build_store(folder, data, vocab, tokenizer, sources, workers, report)
    remove_chunks(folder)
    store = TokenStore(folder)
    found = difference(store.meta["settings"], store_settings(data, tokenizer, sources))
    if found:
        raise ValueError(
            f"{folder}: tokens stored with other settings: {describe(found, 'store')}; "
            "name another folder in data.token_store, or delete this one"
        )
    return store


def _build_splits(
    data: DataConfig, vocab: Path, tokenizer: Tokenizer, sources: Sequence[Source], workers: Workers,
    missing: Sequence[str], report: Report, stack: ExitStack,
) -> None:  # fmt: skip
    store = _open_store(data, vocab, tokenizer, sources, workers, report, stack)
    contents = store.contents
    held = held_out(contents, seed=data.seed, fraction=data.eval_fraction)
    splits = []
    for split in missing:
        documents = np.flatnonzero(held if split == "eval" else ~held)
        distinct = len(np.unique(contents[documents]))
        if data.next_sentence == "nsp" and distinct < 2:
            raise ValueError(pair_advice(store.meta["documents"], distinct, split))
        if distinct == 0:
            raise ValueError(
                f"data.eval_fraction: {data.eval_fraction} of {store.meta['documents']} document(s) leaves none to "
                f"hold out; separate documents by blank lines, or give --data.eval_fraction 0"
            )
        splits.append(_Split(data, split, tokenizer, store, documents, len(documents) - distinct))
    for one in splits:
        one.build(workers, report)


def _instance_settings(data: DataConfig, tokenizer: Tokenizer) -> InstanceSettings:
    masking = MaskingSettings.from_config(data, mask_id=tokenizer.mask_id, vocab_size=tokenizer.vocab_size)
    return InstanceSettings(
        seq_length=data.seq_length, next_sentence=data.next_sentence, seed=data.seed,
        short_sequence_fraction=data.short_sequence_fraction, max_predictions=data.max_predictions,
        masking=masking if data.masking == "static" else None,
        cls_id=tokenizer.cls_id, sep_id=tokenizer.sep_id, pad_id=tokenizer.pad_id,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Split:
    """One split on its way from the token store to its folder of shards."""

    data: DataConfig
    name: str
    tokenizer: Tokenizer
    store: TokenStore
    documents: np.ndarray
    duplicates: int

    def build(self, workers: Workers, report: Report) -> None:
        """Make parts, shards, index and manifest, keeping what a killed build finished; then move them in place."""
        job = self._prepare()
        tokens = self._tokens()
        passes = int(self._settings["data.dupe_factor"])
        report(f"{self.name}: {len(tokens):,} documents, {int(tokens.sum()):,} tokens, {passes} pass(es)")
        folder = job.folder.parent / "parts"
        work = [
            (folder / f"{number:03d}-{first:08d}", number, first, last)
            for number in range(passes)
            for first, last in cut_parts(tokens, passes)
        ]
        todo = [(job, *part) for part in work if not part[0].with_suffix(".table").exists()]
        for done, _ in enumerate(workers.run(write_part, todo), start=len(work) - len(todo) + 1):
            if done * 10 // len(work) > (done - 1) * 10 // len(work):
                report(f"{self.name}: {done} of {len(work)} parts")
        paths = [part[0] for part in work]
        entries = workers.run(merge_shard, [(job, paths, shard) for shard in range(job.num_shards)])
        index = write_index(job.folder, entries)
        write_manifest(job.folder, self._manifest(index, int(tokens.sum())))
        self._move(job.folder)
        report(f"{self.name}: {index.records:,} instances in {job.num_shards} shard(s)")

    @property
    def _settings(self) -> dict[str, Any]:
        return shard_settings(self.data, self.tokenizer, self.name)

    def _tokens(self) -> np.ndarray:
        """Tokens of every document of the split."""
        first = self.store.documents[:, 1]
        return (first[self.documents + 1] - first[self.documents]).astype(np.int64)

    def _prepare(self) -> SplitJob:
        """The folder of the build, cleared of other builds and half-written files, and what its jobs share."""
        shards = Path(self.data.shards)
        build = shards / f".build-{self.name}-{_fingerprint([self._settings, self.store.meta])}"
        for stale in shards.glob(f".build-{self.name}-*"):
            if stale != build:
                shutil.rmtree(stale)
        for folder in (build / "parts", build / "shards"):
            folder.mkdir(parents=True, exist_ok=True)
            remove_scratch(folder)
        with atomic_file(build / "documents.bin") as file:
            file.write(self.documents.astype("<u8").tobytes())
        with atomic_file(build / "continuation.npy") as file:
            np.save(file, self.tokenizer.continuation)
        return SplitJob(
            store=self.store.folder,
            documents=build / "documents.bin",
            continuation=build / "continuation.npy",
            folder=build / "shards",
            num_shards=int(self._settings["data.num_shards"]),
            settings=_instance_settings(self.data, self.tokenizer),
        )

    def _manifest(self, index: ShardIndex, tokens: int) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "settings": self._settings | {"data.corpus": self.store.meta["settings"]["data.corpus"]},
            "counts": {
                "documents": len(self.documents),
                "duplicate_documents": self.duplicates,
                "tokens": tokens,
                "instances": index.records,
            },
            "shards": [
                {"name": e.name, "records": e.records, "bytes": e.bytes, "crc32c": e.crc32c} for e in index.entries
            ],
        }

    def _move(self, folder: Path) -> None:
        remove_scratch(folder)
        target = split_folder(self.data, self.name)
        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        folder.rename(target)


def _fingerprint(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
