"""Check the vocabulary of a DataConfig if it exists, and train it if it is missing."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.config.schema import SWITCH
from bert_jax.io.files import local_copy, write_whole
from bert_jax.io.storage import Location, ObjectPath, location
from bert_jax.json_values import Json
from bert_jax.tokenization import FILE_NAMES, Tokenizer, load_tokenizer
from bert_jax.tokenization.wordpiece import CJK_RUN
from data_pipeline.build.text_facts import MOST_UNKNOWN, MOST_UNKNOWN_WORDS
from data_pipeline.build.token_store import content_hash, corpus_settings, held_out, load_jieba
from data_pipeline.build.workers import Workers, exclusive
from data_pipeline.shards.compatibility import differences, encoding_settings
from data_pipeline.text.corpus import corpus_of
from data_pipeline.text.documents import Source, read_documents, undecodable_together

Report = Callable[[str], None]
# Characters of the training text whose tokens are counted.
_SAMPLE = 4_000_000
# Share of the documents above which held-out documents are worth a warning. Few documents have such shares, because
# at least one or two are held out.
_MOST_HELD_OUT = 0.25
VOCAB_SETTINGS_NAME = "vocabulary.json"


def vocabulary_path(data: DataConfig) -> Location:
    """Return ``data.vocab`` or, if it is empty, the path of the trained vocabulary."""
    name = FILE_NAMES["wordpiece" if data.tokenizer in ("wordpiece", "words") else "sentencepiece"]
    return location(data.vocab) if data.vocab else location(data.shards) / name


def load_vocabulary(data: DataConfig, path: Location, vocab_size: int) -> Tokenizer:
    """Load the tokenizer from ``path``. Raises ``ValueError`` if it has more than ``vocab_size`` pieces."""
    if isinstance(path, ObjectPath) and not path.is_file():
        raise ValueError(f"{path}: no such vocabulary file; set data.vocab to an existing file")
    if data.strip_accents != "auto" and path.suffix != ".txt":
        raise ValueError(
            f"data.strip_accents: {data.strip_accents} is not allowed with {path.name}, which has its own rules; "
            "use auto, or set data.vocab to a vocab.txt"
        )
    tokenizer = load_tokenizer(local_copy(path), **data.rules)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"model.vocab_size: {vocab_size} is less than the {tokenizer.vocab_size} pieces of {path}; "
            f"set --model.vocab_size {tokenizer.vocab_size}"
        )
    return tokenizer


def _vocabulary_settings(
    data: DataConfig, vocab_size: int, sources: Sequence[Source] | None, recorded: dict[str, Json] | None = None
) -> dict[str, Json]:
    """Return the settings that determine a trained vocabulary, including the corpus unless ``sources`` is None.

    With ``recorded``, the settings of a vocabulary, only those that it lists: older files do not list the corpus.
    """
    settings = {
        "data.tokenizer": data.tokenizer,
        "data.lower_case": data.lower_case,
        "data.strip_accents": SWITCH[data.strip_accents] if data.strip_accents != "auto" else data.lower_case,
        "data.line": data.line,
        "data.json_field": data.json_field,
        **({"data.word_segmenter": data.word_segmenter} if data.tokenizer == "words" else {}),
        **encoding_settings(data),
        "data.seed": data.seed,
        "data.eval_fraction": data.eval_fraction,
        "model.vocab_size": vocab_size,
    }
    if sources is not None and (recorded is None or "data.corpus" in recorded):
        settings |= corpus_settings(data, sources, recorded)
    return {name: value for name, value in settings.items() if recorded is None or name in recorded}


def sources_if_there(data: DataConfig) -> list[Source] | None:
    """Return the corpus, or None if it is missing: existing vocabularies and shards do not need it."""
    try:
        return corpus_of(data)
    except ValueError:
        return None


def existing_vocabulary(data: DataConfig, vocab_size: int) -> tuple[Location, Tokenizer | None]:
    """Return the path of the vocabulary, and its tokenizer (None if the file is missing).

    Raises ``ValueError`` if the vocabulary was trained with other settings.
    """
    path = vocabulary_path(data)
    if not data.vocab:
        settings = path.with_name(VOCAB_SETTINGS_NAME)
        if not path.is_file():
            return path, None
        if settings.is_file():
            recorded = json.loads(settings.read_text())
            # Accents were stripped as the case says.
            recorded.setdefault("data.strip_accents", recorded.get("data.lower_case"))
            wanted = _vocabulary_settings(data, vocab_size, sources_if_there(data), recorded)
            if changed := differences(recorded, wanted, "vocabulary"):
                raise ValueError(
                    f"{path}: trained with other settings: {changed}; set them back, set data.vocab to this file "
                    "to use it anyway, or set data.shards to another folder"
                )
    return path, load_vocabulary(data, path, vocab_size)


def place_vocabulary(path: Location, content: bytes) -> None:
    """Write the vocabulary of the model from which training starts to ``path``, the value of ``data.vocab``.

    Raises ``ValueError`` if the file exists with other content: shards may have been built with it.
    """
    with exclusive(path.parent):
        if not path.is_file():
            write_whole(path, content)
        elif path.read_bytes() != content:
            raise ValueError(
                f"{path}: the file is not the vocabulary of this run; set data.shards to another folder"
            )


def held_documents(data: DataConfig, sources: Sequence[Source]) -> np.ndarray:
    """Return a mask bool[D] of the documents that are held out."""
    contents = np.fromiter((content_hash(document) for document in _documents(data, sources)), np.uint64)
    return held_out(contents, seed=data.seed, fraction=data.eval_fraction)


def _documents(data: DataConfig, sources: Sequence[Source]) -> Iterator[list[str]]:
    with undecodable_together(sources):
        for source in sources:
            yield from read_documents(source, line=data.line, json_field=data.json_field)


def training_texts(data: DataConfig, sources: Sequence[Source], held: np.ndarray) -> Iterator[str]:
    """Yield the sentences of the documents that are not held out. ``held``: the result of ``held_documents``."""
    for document, is_held in zip(_documents(data, sources), held.tolist(), strict=True):
        if not is_held:
            yield from document


def ensure_vocabulary(
    data: DataConfig, *, vocab_size: int, report: Report, output: Location | None = None
) -> Location:
    """Train a vocabulary and write it to ``output``; return its path.

    If ``output`` is None, write it to ``vocabulary_path(data)``, as ``ensure_data`` does, unless the file exists.
    """
    if output is not None:
        sources = corpus_of(data)
        output.parent.mkdir(parents=True, exist_ok=True)  # reports an unusable folder before hours of training
        path, use = _write_vocabulary(data, sources, output, vocab_size, report)
        for line in use.lines(data):
            report(line)
        return path
    if not data.shards and not data.vocab:
        raise ValueError("data.shards: not set; set it to the folder for the vocabulary, or use --output FILE")
    path, tokenizer = existing_vocabulary(data, vocab_size)
    if tokenizer is None:
        with exclusive(location(data.shards)):
            _, use = train_in_place(data, corpus_of(data), vocab_size, report)
        for line in use.lines(data):
            report(line)
    return path


class TextUse(NamedTuple):
    """Facts about the text of a trained vocabulary."""

    # Share of [UNK] in the tokens of the training text, or of a sample of it.
    unknown: float
    of_sample: bool
    # Numbers of held-out documents and of all documents.
    held_out: int
    documents: int

    def lines(self, data: DataConfig) -> list[str]:
        """Return the lines of a report: the share of [UNK], as a warning if it is large, and a warning if a large
        share of the documents is held out."""
        text = f"of the tokens of {'a sample of ' if self.of_sample else ''}the training text are [UNK]"
        if self.unknown > (MOST_UNKNOWN_WORDS if data.tokenizer == "words" else MOST_UNKNOWN):
            found = [f"WARNING: {self.unknown:.1%} {text}; use a larger --vocab_size"]
        else:
            found = [f"{self.unknown:.2%} {text}"]
        if self.held_out > _MOST_HELD_OUT * self.documents:
            found.append(
                f"WARNING: {self.held_out} of {self.documents} documents are held out, and the vocabulary does not "
                "contain their words; set --data.eval_fraction 0 to use them, or put blank lines between documents"
            )
        return found


def train_in_place(
    data: DataConfig, sources: Sequence[Source], vocab_size: int, report: Report
) -> tuple[Location, TextUse]:
    """Train the vocabulary and write it to ``vocabulary_path(data)``; return this path, and facts about the
    text. The caller must hold the lock of its folder."""
    path = vocabulary_path(data)
    settings = _vocabulary_settings(data, vocab_size, sources)
    write_whole(path.with_name(VOCAB_SETTINGS_NAME), json.dumps(settings, sort_keys=True, indent=1) + "\n")
    return _write_vocabulary(data, sources, path, vocab_size, report)


def _write_vocabulary(
    data: DataConfig, sources: Sequence[Source], output: Location, vocab_size: int, report: Report
) -> tuple[Location, TextUse]:
    """Train a vocabulary on the documents of ``sources`` that are not held out, and write it to ``output``; return
    the path, and facts about the text."""
    report(f"training a {data.tokenizer} vocabulary of {vocab_size:,} pieces")
    with Workers(1, apart=True) as process:
        return next(process.run(_train_on_corpus, [(data, sources, output, vocab_size)]))


def _train_on_corpus(
    data: DataConfig, sources: Sequence[Source], output: Location, vocab_size: int
) -> tuple[Location, TextUse]:
    """Train the vocabulary and write it to ``output``. Runs as a worker job."""
    from data_pipeline.text.vocabulary_training import TextSample, train_vocabulary

    sample, in_words = TextSample(_SAMPLE), data.tokenizer == "words" and data.word_segmenter == "jieba"
    held = held_documents(data, sources)
    texts = sample.passing(training_texts(data, sources, held))
    if in_words:
        cut = load_jieba().lcut
        texts = (CJK_RUN.sub(lambda run: f" {' '.join(cut(run[0]))} ", text) for text in texts)
    path = train_vocabulary(
        texts, kind=data.tokenizer, vocab_size=vocab_size, output=output, lower_case=data.lower_case,
        strip_accents=SWITCH[data.strip_accents], split_cjk=not in_words,
    )  # fmt: skip
    tokenizer = load_tokenizer(local_copy(path), **data.rules)
    ids, _ = tokenizer.encode_flat(sample.texts)
    share = np.count_nonzero(ids == tokenizer.unk_id) / max(len(ids), 1)
    return path, TextUse(float(share), not sample.is_whole, int(held.sum()), len(held))
