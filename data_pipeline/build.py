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
    ShardEntry,
    atomic_file,
    read_index,
    read_manifest,
    write_index,
    write_manifest,
)
from data_pipeline.token_store import META_NAME, TokenStore, build_store, content_hash, held_out, store_settings
from data_pipeline.workers import Workers, exclusive, processor_count, remove_scratch

Report = Callable[[str], None]
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


def _vocabulary_settings(data: DataConfig, vocab_size: int) -> dict[str, Any]:
    return {
        "data.tokenizer": data.tokenizer,
        "data.lower_case": data.lower_case,
        "data.seed": data.seed,
        "data.eval_fraction": data.eval_fraction,
        "model.vocab_size": vocab_size,
    }


def _existing_vocabulary(data: DataConfig, vocab_size: int) -> tuple[Path, Tokenizer | None]:
    path = vocabulary_path(data)
    if not data.vocab:
        settings = path.with_name(VOCAB_SETTINGS_NAME)
        if not path.is_file():
            return path, None
        if settings.is_file():
            found = difference(json.loads(settings.read_text()), _vocabulary_settings(data, vocab_size))
            if found:
                raise ValueError(
                    f"{path}: trained with other settings: {describe(found, 'vocabulary')}; "
                    "set them back, or name another folder in data.shards"
                )
    return path, _load(data, path, vocab_size)


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
        file.write(json.dumps(_vocabulary_settings(data, vocab_size), sort_keys=True, indent=1).encode() + b"\n")
    return _write_vocabulary(data, sources, path, vocab_size, report)


def write_vocabulary(data: DataConfig, output: Path, *, vocab_size: int, report: Report) -> Path:
    """Train a vocabulary on the documents of ``data.corpus`` that are not held out, and write it to ``output``."""
    sources = list_sources(data.corpus)
    output.parent.mkdir(parents=True, exist_ok=True)
    return _write_vocabulary(data, sources, output, vocab_size, report)


def _write_vocabulary(
    data: DataConfig, sources: Sequence[Source], output: Path, vocab_size: int, report: Report
) -> Path:
    from data_pipeline.vocab import train_vocabulary

    report(f"training a {data.tokenizer} vocabulary of {vocab_size:,} pieces")
    return train_vocabulary(
        training_texts(data, sources), kind=data.tokenizer, vocab_size=vocab_size, lower_case=data.lower_case,
        output=output,
    )  # fmt: skip


# ------------------------------------------------------------------ shards


def _check_splits(data: DataConfig, tokenizer: Tokenizer) -> None:
    """``ValueError`` when shards that are there were made with other settings; lists every difference."""
    sources = None
    if data.corpus and not missing_splits(data):
        try:
            sources = store_settings(data, tokenizer, list_sources(data.corpus))["data.corpus"]
        except ValueError:
            sources = None  # the text may be gone once the shards are made
    for split in ("train", "eval"):
        folder = split_folder(data, split)
        manifest = read_manifest(folder)
        if manifest is None:
            if folder.is_dir() and split == "eval" and data.eval_shards:
                check_foreign(data, folder, tokenizer)
            continue
        wanted = shard_settings(data, tokenizer, split)
        if sources is not None and "data.corpus" in manifest["settings"]:
            wanted["data.corpus"] = sources
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
    documents = {"train": np.flatnonzero(~held), "eval": np.flatnonzero(held)}
    for split in missing:
        distinct = len(np.unique(contents[documents[split]]))
        if data.next_sentence == "nsp" and distinct < 2:
            raise ValueError(pair_advice(store.meta["documents"], distinct, split))
        if distinct == 0:
            raise ValueError(
                f"data.eval_fraction: {data.eval_fraction} of {store.meta['documents']} document(s) leaves none to "
                f"hold out; separate documents by blank lines, or give --data.eval_fraction 0"
            )
    counts = store.documents[:, 1]
    for split in missing:
        tokens = (counts[documents[split] + 1] - counts[documents[split]]).astype(np.int64)
        _build_split(data, split, store, vocab, tokenizer, documents[split], tokens, contents, workers, report)
    for path in Path(data.shards).glob(".build-*"):
        shutil.rmtree(path)


def _instance_settings(data: DataConfig, tokenizer: Tokenizer) -> InstanceSettings:
    masking = MaskingSettings.from_config(data, mask_id=tokenizer.mask_id, vocab_size=tokenizer.vocab_size)
    return InstanceSettings(
        seq_length=data.seq_length, next_sentence=data.next_sentence, seed=data.seed,
        short_sequence_fraction=data.short_sequence_fraction, max_predictions=data.max_predictions,
        masking=masking if data.masking == "static" else None,
        cls_id=tokenizer.cls_id, sep_id=tokenizer.sep_id, pad_id=tokenizer.pad_id,
    )  # fmt: skip


def _build_split(
    data: DataConfig, split: str, store: TokenStore, vocab: Path, tokenizer: Tokenizer, documents: np.ndarray,
    tokens: np.ndarray, contents: np.ndarray, workers: Workers, report: Report,
) -> None:  # fmt: skip
    settings = shard_settings(data, tokenizer, split)
    build = Path(data.shards) / f".build-{split}-{_fingerprint([settings, store.meta])}"
    for stale in Path(data.shards).glob(f".build-{split}-*"):
        if stale != build:
            shutil.rmtree(stale)
    parts_folder, shards_folder = build / "parts", build / "shards"
    for folder in (parts_folder, shards_folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_scratch(folder)
    with atomic_file(build / "documents.bin") as file:
        file.write(documents.astype("<u8").tobytes())
    passes, num_shards = int(settings["data.dupe_factor"]), int(settings["data.num_shards"])
    job = SplitJob(
        store=store.folder, documents=build / "documents.bin", vocab=vocab, lower_case=data.lower_case,
        folder=shards_folder, num_shards=num_shards, settings=_instance_settings(data, tokenizer),
    )  # fmt: skip
    ranges = cut_parts(tokens, passes)
    work = [
        (parts_folder / f"{number:03d}-{first:08d}", number, first, last)
        for number in range(passes)
        for first, last in ranges
    ]
    todo = [(job, *part) for part in work if not part[0].with_suffix(".table").exists()]
    report(f"{split}: {len(documents):,} documents, {int(tokens.sum()):,} tokens, {passes} pass(es)")
    for done, _ in enumerate(workers.run(write_part, todo), start=len(work) - len(todo) + 1):
        if done * 10 // len(work) > (done - 1) * 10 // len(work):
            report(f"{split}: {done} of {len(work)} parts")
    paths = [part[0] for part in work]
    entries = list(workers.run(merge_shard, [(job, paths, shard) for shard in range(num_shards)]))
    index = write_index(shards_folder, entries)
    counts = {
        "documents": len(documents),
        "duplicate_documents": len(documents) - len(np.unique(contents[documents])),
        "tokens": int(tokens.sum()),
        "instances": index.records,
    }
    write_manifest(shards_folder, _manifest(settings, store, tokenizer, counts, index.entries))
    # Leftovers of killed processes would spoil equality.
    remove_scratch(shards_folder)
    target = split_folder(data, split)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    shards_folder.rename(target)
    report(f"{split}: {index.records:,} instances in {num_shards} shard(s)")


def _manifest(
    settings: dict[str, Any], store: TokenStore, tokenizer: Tokenizer, counts: dict[str, int],
    entries: Sequence[ShardEntry],
) -> dict[str, Any]:  # fmt: skip
    return {
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "settings": settings | {"data.corpus": store.meta["settings"]["data.corpus"]},
        "counts": counts,
        "shards": [{"name": e.name, "records": e.records, "bytes": e.bytes, "crc32c": e.crc32c} for e in entries],
    }


def _fingerprint(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
