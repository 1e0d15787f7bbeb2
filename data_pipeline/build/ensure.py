"""From a DataConfig to a vocabulary and shards: what is there is checked, what is missing is built.

Stages, each finished by one rename: vocabulary, token store, and for each split parts, shards, folder. A build
works in ``SHARDS/.build-*``; ``train/`` and ``eval/`` appear whole, with index and manifest. Run again after a
kill, it keeps every finished chunk, part and shard and gives the bytes of an unkilled build. The jobs run in a pool
of processes, or under Apache Beam (``data_pipeline.build.beam``).
"""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bert_jax.config.loader import load_config, to_dict
from bert_jax.config.pretrain import DataConfig, PretrainConfig
from bert_jax.io.files import local_copy, remove_tree
from bert_jax.io.storage import Location, location
from bert_jax.tokenization import Tokenizer
from data_pipeline.build.parts import merge_shard, write_part
from data_pipeline.build.shard_split import Split, missing_splits, plan_splits, split_folder, unfinished
from data_pipeline.build.token_store import (
    META_NAME,
    TokenStore,
    build_store,
    names_and_sizes,
    remove_chunks,
    store_folder,
    store_settings,
)
from data_pipeline.build.vocabulary import (
    Report,
    ensure_vocabulary,
    existing_vocabulary,
    load_vocabulary,
    place_vocabulary,
    sources_if_there,
    train_in_place,
    training_texts,
    write_vocabulary,
)
from data_pipeline.build.workers import Workers, exclusive, processor_count
from data_pipeline.shards.checks import check_foreign, describe, difference, shard_settings
from data_pipeline.shards.shard_files import INDEX_NAME, MANIFEST_NAME, read_index, read_manifest
from data_pipeline.text.corpus import corpus_of
from data_pipeline.text.documents import Source

__all__ = [
    "STOPPED", "ensure_data", "ensure_vocabulary", "is_foreign", "missing_splits", "place_vocabulary",
    "require_shards", "split_folder", "training_texts", "write_vocabulary",
]  # fmt: skip

# What to say of a build that a signal ends.
STOPPED = "stopped while preparing data; what is finished is kept: run the same command to continue"


def ensure_data(
    data: DataConfig, *, vocab_size: int, report: Report, beam_options: Sequence[str] | None = None
) -> Path:
    """Make sure that vocabulary and shards of ``data`` are there; returns the vocabulary's (local) path.

    Builds what is missing: the vocabulary (of ``vocab_size`` pieces, on training documents only) when
    ``data.vocab`` is empty, the token store, and the shards; with ``beam_options``, the latter two under Apache
    Beam. Checks what is there. ``ValueError`` (one line: what differs, what to do) when it was made with other
    settings; nothing is ever rebuilt or used silently.
    """
    vocab = _ensure(data, vocab_size, report, beam_options)
    shards = _shards_folder(data)
    if any(shards.glob(".build-*")):
        with exclusive(shards):
            for path in shards.glob(".build-*"):
                remove_tree(path)
    return local_copy(vocab)


def _ensure(data: DataConfig, vocab_size: int, report: Report, beam_options: Sequence[str] | None) -> Location:
    """:func:`ensure_data` without tidying up; returns where the vocabulary lies."""
    shards = _shards_folder(data)
    if is_foreign(shards):
        return _use_foreign(data, shards, vocab_size)
    if beam_options is not None:
        from data_pipeline.build.beam import check_options

        check_options(data, beam_options)  # before hours of training a vocabulary
    vocab, tokenizer = existing_vocabulary(data, vocab_size)
    missing = missing_splits(data)
    if tokenizer is None or missing:
        with ExitStack() as stack:
            stack.enter_context(exclusive(shards))
            sources = corpus_of(data)
            if tokenizer is None:
                vocab = train_in_place(data, sources, vocab_size, report)
                tokenizer = load_vocabulary(data, vocab, vocab_size)
            if missing:
                _check_splits(data, tokenizer)
                stack.enter_context(exclusive(store_folder(data)))
                store = _existing_store(data, tokenizer, sources)
                if beam_options is None:
                    workers = stack.enter_context(Workers(data.workers or processor_count()))
                    _build_splits(data, vocab, tokenizer, sources, store, workers, missing, report)
                else:
                    from data_pipeline.build.beam import build_with_beam

                    build_with_beam(data, vocab, tokenizer, sources, missing, beam_options, report)
    _check_splits(data, tokenizer)
    return vocab


def require_shards(config: PretrainConfig, words: Sequence[str]) -> Path:
    """The vocabulary's (local) path of a run of several hosts, none of which builds what is missing.

    ``ValueError`` names the command that does, made from the run's own flags ``words`` (``--config FILE`` and
    ``--section.key value``), or says what differs where shards are there.
    """
    shards = _shards_folder(config.data)
    is_there = is_foreign(shards)
    if not is_there:
        _, tokenizer = existing_vocabulary(config.data, config.model.vocab_size)
        is_there = tokenizer is not None and not missing_splits(config.data)
    if not is_there:
        raise ValueError(
            f"{shards}: the shards are not there, and a run of several hosts does not build them; run on one: "
            f"{shlex.join(['bert-data', 'shards', *words, *_changed_since(words, config)])}"
        )
    return local_copy(_ensure(config.data, config.model.vocab_size, lambda _: None, None))


def _changed_since(given: Sequence[str], config: PretrainConfig) -> list[str]:
    """Flags for what ``config`` has otherwise than ``given`` say (a warm start sets the vocabulary)."""
    said = load_config(PretrainConfig, given)
    flags = []
    for section in ("data", "model"):
        before, now = (to_dict(getattr(one, section)) for one in (said, config))
        for name, value in now.items():
            if value != before[name] and (section == "data" or name == "vocab_size"):
                values = value if isinstance(value, list) else [value]
                words = (str(one).lower() if isinstance(one, bool) else str(one) for one in values)
                flags += [f"--{section}.{name}", *words]
    return flags


def _shards_folder(data: DataConfig) -> Location:
    if not data.shards:
        raise ValueError("data.shards: not given; name the folder of the shards, to be built there if missing")
    return location(data.shards)


# ------------------------------------------------------------------ shards of somebody else's


def is_foreign(shards: Location) -> bool:
    """Whether ``shards`` holds TFRecords that ``bert-data shards`` did not make."""
    folder = shards / "train" if (shards / "train").is_dir() else shards
    if (folder / MANIFEST_NAME).is_file() or not folder.is_dir() or any(shards.glob(".build-*")):
        return False
    return (folder / INDEX_NAME).is_file() or any(folder.glob("[!.]*.tfrecord*"))


def _use_foreign(data: DataConfig, shards: Location, vocab_size: int) -> Location:
    vocab, tokenizer = existing_vocabulary(data, vocab_size)
    if tokenizer is None:
        raise ValueError(f"data.vocab: not given; the shards in {shards} need the vocabulary they were made with")
    check_foreign(data, shards / "train" if (shards / "train").is_dir() else shards, tokenizer)
    evaluation = split_folder(data, "eval")
    if evaluation.is_dir():
        check_foreign(data, evaluation, tokenizer)
    return vocab


# ------------------------------------------------------------------ shards


def _check_splits(data: DataConfig, tokenizer: Tokenizer) -> None:
    """``ValueError`` when shards that are there were made with other settings; lists every difference."""
    sources = None if missing_splits(data) else sources_if_there(data)
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


def _existing_store(data: DataConfig, tokenizer: Tokenizer, sources: Sequence[Source]) -> TokenStore | None:
    """The token store if it is there; ``ValueError`` when it was made with other settings."""
    folder = store_folder(data)
    if not (folder / META_NAME).is_file():
        return None
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
    data: DataConfig, vocab: Location, tokenizer: Tokenizer, sources: Sequence[Source], store: TokenStore | None,
    workers: Workers, missing: Sequence[str], report: Report,
) -> None:  # fmt: skip
    """The missing splits by jobs in a pool of processes."""
    if store is None:
        size = sum(source.path.stat().st_size for source in sources)
        report(f"tokenizing {size / 1e6:,.1f} MB in {workers.count} processes")
        store = build_store(store_folder(data), data, vocab, tokenizer, sources, workers, report)
    for split in plan_splits(data, tokenizer, store, missing):
        _build_split(split, workers, report)


def _build_split(split: Split, workers: Workers, report: Report) -> None:
    """Make parts and shards, keeping what a killed build finished."""
    report(split.summary)
    prepared = split.prepare()
    job, parts = prepared.job, prepared.parts
    todo = unfinished(parts)
    jobs = [(job, *part) for part in todo]
    for done, _ in enumerate(workers.run(write_part, jobs), start=len(parts) - len(todo) + 1):
        if done * 10 // len(parts) > (done - 1) * 10 // len(parts):
            report(f"{split.name}: {done} of {len(parts)} parts")
    paths = [part[0] for part in parts]
    entries = workers.run(merge_shard, [(job, paths, shard) for shard in range(job.num_shards)])
    prepared.finish(entries)
    report(prepared.done())
