"""Check the vocabulary and the shards of a DataConfig if they exist, and build them if they are missing.

A build creates the vocabulary, the token store and, for each split, the parts, the shards and the folder; a
complete file or folder gets its final name by one rename. A build works in ``SHARDS/.build-*``; ``train/`` and
``eval/`` appear only when they are complete, with index and manifest. A build that was killed and is run again
keeps every finished chunk, part and shard, and writes the same bytes as an uninterrupted build. The jobs run in a
pool of processes or under Apache Beam (``data_pipeline/contrib/beam``).
"""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bert_jax.config.loader import Settings, build_config, to_dict
from bert_jax.config.pretrain import DataConfig, PretrainConfig
from bert_jax.io.files import local_copy, remove_tree
from bert_jax.io.storage import Location, location
from bert_jax.registry import load, module_option
from data_pipeline.build.existing import check_external, check_mixture, is_external
from data_pipeline.build.shard_split import build_split, check_splits, missing_splits, plan_splits, prepare_split
from data_pipeline.build.token_store import build_store, existing_store, load_jieba, store_folder
from data_pipeline.build.vocabulary import (
    Report,
    existing_vocabulary,
    load_vocabulary,
    sources_if_there,
    train_in_place,
)
from data_pipeline.build.workers import Workers, exclusive, processor_count
from data_pipeline.text.corpus import listing_of

# Last line of a build that a signal has stopped.
STOPPED = "stopped while preparing data; finished parts are kept: run the same command to continue"


def ensure_data(
    data: DataConfig, *, vocab_size: int, report: Report, beam_options: Sequence[str] | None = None
) -> Path:
    """Build the vocabulary and the shards of ``data`` if they are missing; return the local path of the vocabulary.

    If ``data.vocab`` is empty, a vocabulary of at most ``vocab_size`` pieces is trained on the training documents.
    With ``beam_options``, the token store and the shards are built under Apache Beam. Raises ``ValueError`` (one
    line with the differences and the remedy) if existing files were built with other settings; these files are
    neither rebuilt nor used. The parts of a mixture are only checked.
    """
    if data.mixture:
        return local_copy(check_mixture(data, vocab_size))
    vocab = _ensure(data, vocab_size, report, beam_options)
    shards = _shards_folder(data)
    if any(shards.glob(".build-*")):
        with exclusive(shards):
            for path in shards.glob(".build-*"):
                remove_tree(path)
    return local_copy(vocab)


def _ensure(data: DataConfig, vocab_size: int, report: Report, beam_options: Sequence[str] | None) -> Location:
    """Build the data as :func:`ensure_data` does, but keep the build folders; return the path of the vocabulary."""
    shards = _shards_folder(data)
    if is_external(shards):
        return check_external(data, shards, vocab_size)
    if beam_options is not None:
        beam = load("data_extensions", "--runner beam")
        beam.check_options(data.workers, beam_options)  # checked now, because training a vocabulary may take hours
    vocab, tokenizer = existing_vocabulary(data, vocab_size)
    missing = missing_splits(data)
    if tokenizer is None or missing:
        with ExitStack() as stack:
            stack.enter_context(exclusive(shards))
            listing = listing_of(data)
            sources = list(listing.sources)
            if tokenizer is None:
                if data.word_segmenter == "jieba":
                    load_jieba()  # checked now, too
                vocab, _ = train_in_place(data, sources, vocab_size, report)
                tokenizer = load_vocabulary(data, vocab, vocab_size)
                if unused := vocab_size - tokenizer.vocab_size:
                    report(
                        f"the text yields {tokenizer.vocab_size:,} pieces; the other {unused:,} word embeddings "
                        f"are never used (a smaller --model.vocab_size, with a new data.shards, avoids them)"
                    )
            if missing:
                check_splits(data, tokenizer, None if missing_splits(data) else sources_if_there(data))
                stack.enter_context(exclusive(store_folder(data)))
                store = existing_store(data, tokenizer, sources)
                if beam_options is None:
                    workers = stack.enter_context(Workers(data.workers or processor_count()))
                    if store is None:
                        size = sum(source.path.stat().st_size for source in sources)
                        report(f"tokenizing {size / 1e6:,.1f} MB in {workers.count} processes")
                        store = build_store(store_folder(data), data, vocab, tokenizer, listing, workers, report)
                    for split in plan_splits(data, store, missing):
                        build_split(prepare_split(data, tokenizer, store, *split), tokenizer, workers, report)
                else:
                    beam.build_with_beam(data, vocab, tokenizer, listing, missing, beam_options, report)
    check_splits(data, tokenizer, None if missing_splits(data) else sources_if_there(data))
    return vocab


def require_shards(config: PretrainConfig, settings: Settings) -> Path:
    """Check that the shards of a run on several hosts exist; return the local path of the vocabulary.

    ``settings`` are those of the command. Raises ``ValueError`` if shards are missing, with the command that builds
    them, or if they were built with other settings, with the differences.
    """
    if config.data.mixture:
        return local_copy(check_mixture(config.data, config.model.vocab_size))
    shards = _shards_folder(config.data)
    is_there = is_external(shards)
    if not is_there:
        _, tokenizer = existing_vocabulary(config.data, config.model.vocab_size)
        is_there = tokenizer is not None and not missing_splits(config.data)
    if not is_there:
        words = [*settings.words(), *module_option()]
        raise ValueError(
            f"{shards}: the shards are missing, and a run on several hosts does not build them; run on one host: "
            f"{shlex.join(['bert-data', 'shards', *words, *_changed_since(settings, config)])}"
        )
    return local_copy(_ensure(config.data, config.model.vocab_size, lambda _: None, None))


def _changed_since(settings: Settings, config: PretrainConfig) -> list[str]:
    """Return flags for the data options and ``model.vocab_size`` whose values in ``config`` differ from those in
    ``settings``. A warm start changes such options."""
    original = build_config(PretrainConfig, settings.all)
    flags = []
    for section in ("data", "model"):
        before, now = (to_dict(getattr(one, section)) for one in (original, config))
        for name, value in now.items():
            if (section == "data" or name == "vocab_size") and value != before[name]:
                values = value if isinstance(value, list) else [value]
                texts = (str(one).lower() if isinstance(one, bool) else str(one) for one in values)
                flags += [f"--{section}.{name}", *texts]
    return flags


def _shards_folder(data: DataConfig) -> Location:
    if not data.shards:
        raise ValueError("data.shards: not set; set it to the folder of the shards, where missing shards are built")
    return location(data.shards)
