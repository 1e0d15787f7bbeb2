"""From a DataConfig to a vocabulary file: an existing one is checked, a missing one is trained in its place."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.files import local_copy, write_whole
from bert_jax.io.storage import Location, ObjectPath, location
from bert_jax.tokenization import FILE_NAMES, Tokenizer, load_tokenizer
from data_pipeline.build.token_store import content_hash, held_out, names_and_sizes
from data_pipeline.build.workers import OneApart, exclusive
from data_pipeline.shards.compatibility import differences
from data_pipeline.text.corpus import corpus_of
from data_pipeline.text.documents import Source, read_documents

Report = Callable[[str], None]
VOCAB_SETTINGS_NAME = "vocabulary.json"


def vocabulary_path(data: DataConfig) -> Location:
    """``data.vocab``, or the path of the trained vocabulary."""
    name = FILE_NAMES["wordpiece" if data.tokenizer == "wordpiece" else "sentencepiece"]
    return location(data.vocab) if data.vocab else location(data.shards) / name


def load_vocabulary(data: DataConfig, path: Location, vocab_size: int) -> Tokenizer:
    """The tokenizer; ``ValueError`` when it has more than ``vocab_size`` pieces."""
    if isinstance(path, ObjectPath) and not path.is_file():
        raise ValueError(f"{path}: no such file")
    tokenizer = load_tokenizer(local_copy(path), lower_case=data.lower_case)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"model.vocab_size: {vocab_size} is less than the {tokenizer.vocab_size} pieces of {path}; "
            f"give --model.vocab_size {tokenizer.vocab_size}"
        )
    return tokenizer


def _vocabulary_settings(data: DataConfig, vocab_size: int, sources: Sequence[Source] | None) -> dict[str, Any]:
    """Return the settings that determine a trained vocabulary; without ``sources``, all but the text."""
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


def sources_if_there(data: DataConfig) -> list[Source] | None:
    """The corpus, or None: the text may be gone once vocabulary and shards are made."""
    try:
        return corpus_of(data)
    except ValueError:
        return None


def existing_vocabulary(data: DataConfig, vocab_size: int) -> tuple[Location, Tokenizer | None]:
    """Path of the vocabulary, and its tokenizer if it exists; ``ValueError`` if it has other settings."""
    path = vocabulary_path(data)
    if not data.vocab:
        settings = path.with_name(VOCAB_SETTINGS_NAME)
        if not path.is_file():
            return path, None
        if settings.is_file():
            recorded = json.loads(settings.read_text())
            wanted = _vocabulary_settings(data, vocab_size, sources_if_there(data))
            # Older records do not name the text.
            wanted = {name: value for name, value in wanted.items() if name in recorded}
            if changed := differences(recorded, wanted, "vocabulary"):
                raise ValueError(
                    f"{path}: trained with other settings: {changed}; set them back, name the file in data.vocab "
                    "to use it anyway, or name another folder in data.shards"
                )
    return path, load_vocabulary(data, path, vocab_size)


def place_vocabulary(path: Location, content: bytes) -> None:
    """Write the vocabulary of an initial model to the path in ``data.vocab``.

    Raises ``ValueError`` if the file exists with other content: shards may have been built with it.
    """
    with exclusive(path.parent):
        if not path.is_file():
            write_whole(path, content)
        elif path.read_bytes() != content:
            raise ValueError(
                f"{path}: the file is not the vocabulary of this run; set data.shards to another folder"
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


def ensure_vocabulary(data: DataConfig, *, vocab_size: int, report: Report) -> Location:
    """Train the vocabulary that ``ensure_data`` would train, unless it exists; return its path."""
    if not data.shards and not data.vocab:
        raise ValueError("give --output FILE, or the folder of the shards (data.shards) to put the vocabulary in")
    path, tokenizer = existing_vocabulary(data, vocab_size)
    if tokenizer is None:
        with exclusive(location(data.shards)):
            train_in_place(data, corpus_of(data), vocab_size, report)
    return path


def train_in_place(data: DataConfig, sources: Sequence[Source], vocab_size: int, report: Report) -> Location:
    """Train the vocabulary at ``vocabulary_path``; the caller holds the folder."""
    path = vocabulary_path(data)
    settings = _vocabulary_settings(data, vocab_size, sources)
    write_whole(path.with_name(VOCAB_SETTINGS_NAME), json.dumps(settings, sort_keys=True, indent=1) + "\n")
    return _write_vocabulary(data, sources, path, vocab_size, report)


def write_vocabulary(data: DataConfig, output: Location, *, vocab_size: int, report: Report) -> Location:
    """Train a vocabulary on the documents of ``data.corpus`` that are not held out, and write it to ``output``."""
    sources = corpus_of(data)
    output.parent.mkdir(parents=True, exist_ok=True)
    return _write_vocabulary(data, sources, output, vocab_size, report)


def _write_vocabulary(
    data: DataConfig, sources: Sequence[Source], output: Location, vocab_size: int, report: Report
) -> Location:
    report(f"training a {data.tokenizer} vocabulary of {vocab_size:,} pieces")
    with OneApart() as process:
        return next(process.run(_train_on_corpus, [(data, sources, output, vocab_size)]))


def _train_on_corpus(data: DataConfig, sources: Sequence[Source], output: Location, vocab_size: int) -> Location:
    """Job: the vocabulary in the file ``output``."""
    from data_pipeline.text.vocabulary_training import train_vocabulary

    return train_vocabulary(
        training_texts(data, sources), kind=data.tokenizer, vocab_size=vocab_size, lower_case=data.lower_case,
        output=output,
    )  # fmt: skip
