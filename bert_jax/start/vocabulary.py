"""The vocabulary of a pretraining run that starts from a model, with or without added words (``--add_words``).

The rows of an added word (word embedding, MLM output bias) are initialized with the mean of the rows of its pieces
in the old vocabulary. All other rows are unchanged.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import DataConfig, RunOptions, TokenizerConfig
from bert_jax.config.schema import SWITCH
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.io.storage import location
from bert_jax.tokenization import FILE_NAMES, Tokenizer, WordPieceTokenizer, build_tokenizer, load_tokenizer
from bert_jax.tokenization.wordpiece import MAX_CHARS_PER_WORD, chunks, split_words

WORD_ROWS = ("embeddings/word_embeddings/embedding", "mlm_head/output_bias")
_SLOT = re.compile(r"\[unused\d+\]")
_SHOWN = 3


@dataclass(frozen=True)
class Extension:
    """A vocabulary with added words.

    ``pieces`` are in id order. ``made_of`` maps the id of each added word to the ids of its pieces in the old
    vocabulary.
    """

    pieces: tuple[str, ...]
    made_of: Mapping[int, tuple[int, ...]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunVocabulary:
    """The vocabulary of a run.

    ``content`` is to be written to ``path``; it is None if the file exists. ``settings`` are the options that the
    vocabulary determines.
    """

    path: str
    content: bytes | None
    settings: Mapping[str, Any]
    extension: Extension
    notes: tuple[str, ...] = ()


def plan_vocabulary(options: RunOptions, weights: ModelBundle, values: Mapping[str, Any]) -> RunVocabulary:
    """Return the vocabulary of a run that starts from ``weights``, including the words of ``--add_words``.

    ``values`` are the options of the command line by key. Raises ``ValueError`` if an option is missing or not
    allowed, if ``data.vocab`` belongs to another model, or if words cannot be added.
    """
    vocab: str = values.get("data.vocab", "")
    config, content = weights.spec.tokenizer, weights.tokenizer_content
    if options.vocab_slots and not options.add_words:
        raise ValueError("--vocab_slots: needs --add_words, the file with the words")
    if config is None or content is None:
        return _named_vocabulary(options, weights, vocab, values)
    tokenizer = _source_tokenizer(config, content, options.init_from)
    settings = _case_settings(tokenizer, values) if isinstance(tokenizer, WordPieceTokenizer) else {}
    if vocab and not options.add_words:
        extension = _compared(vocab, tokenizer, config, options.init_from)
        return RunVocabulary(vocab, None, settings, extension, extension.notes)
    shards: str = values.get("data.shards", "")
    if not shards:
        raise ValueError("data.shards: missing; set the folder of the shards, which need not exist yet")
    path = str(location(shards) / FILE_NAMES[tokenizer.kind])
    if not options.add_words:
        return RunVocabulary(path, content, settings, _unchanged(tokenizer))
    if vocab and location(vocab).resolve() != location(path).resolve():
        raise ValueError(f"data.vocab: --add_words creates the vocabulary of the run, {path}; omit data.vocab")
    wordpiece = require_wordpiece(tokenizer, "--add_words")
    words, notes = read_words(Path(options.add_words), wordpiece)
    extension = with_words(wordpiece, words, in_slots=options.vocab_slots)
    content = ("\n".join(extension.pieces) + "\n").encode()
    return RunVocabulary(path, content, settings, extension, (*notes, *extension.notes))


def _named_vocabulary(
    options: RunOptions, weights: ModelBundle, vocab: str, values: Mapping[str, Any]
) -> RunVocabulary:
    """Return the vocabulary in the file ``vocab`` (the option ``data.vocab``), for a model without a tokenizer."""
    if options.add_words or not vocab:
        what = "--add_words" if options.add_words else "data.vocab"
        raise ValueError(f"{what}: {options.init_from} has no tokenizer; set data.vocab without --add_words")
    names = {
        name: values[f"data.{name}"]
        for name in ("lower_case", "strip_accents", "word_segmenter")
        if f"data.{name}" in values
    }
    tokenizer, rows = load_tokenizer(vocab, **DataConfig(**names).rules), weights.spec.model.vocab_size
    if tokenizer.vocab_size > rows:
        few = f"{options.init_from} has only {rows} embeddings; use the vocabulary of this model"
        raise ValueError(f"data.vocab: {vocab} has {tokenizer.vocab_size} pieces, but {few}")
    note = f"{options.init_from} has no tokenizer: {vocab} is used as its vocabulary"
    return RunVocabulary(vocab, None, {}, _unchanged(tokenizer), (note,))


def _unchanged(tokenizer: Tokenizer) -> Extension:
    return Extension(tuple(tokenizer.pieces(range(tokenizer.vocab_size))), {})


def _source_tokenizer(config: TokenizerConfig, content: bytes, name: str) -> Tokenizer:
    """Return the tokenizer of the initial model. Raises ``ValueError`` if shards cannot be built with its
    settings."""
    tokenizer = build_tokenizer(config, content, name)
    if isinstance(tokenizer, WordPieceTokenizer) and not tokenizer.split_cjk:
        raise ValueError(f"{name}: split_cjk False (tokenize_chinese_chars); shards need True; use another model")
    return tokenizer


def _case_settings(tokenizer: WordPieceTokenizer, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the case and the accents of ``tokenizer``; an option that says the same stays."""
    own, given = tokenizer.rules["strip_accents"], values.get("data.strip_accents", "auto")
    effective = tokenizer.lower_case if SWITCH[given] is None else SWITCH[given]
    strip = given if effective == tokenizer.strip_accents else {None: "auto", True: "true", False: "false"}[own]
    words = {"data.word_segmenter": "jieba"} if tokenizer.rules.get("cjk_words") else {}
    return {"data.lower_case": tokenizer.lower_case, "data.strip_accents": strip, **words}


def _compared(vocab: str, tokenizer: Tokenizer, config: TokenizerConfig, name: str) -> Extension:
    """Return the vocabulary in the file ``vocab`` (the option ``data.vocab``) as an extension of the vocabulary
    of the initial model.

    Raises ``ValueError`` if ``vocab`` contains neither the vocabulary of the initial model nor an extension of it.
    """
    other = load_tokenizer(
        vocab, lower_case=config.lower_case, strip_accents=config.strip_accents, cjk_words=config.cjk_words
    )
    if other.fingerprint == tokenizer.fingerprint:
        return _unchanged(tokenizer)
    if not isinstance(other, WordPieceTokenizer) or not isinstance(tokenizer, WordPieceTokenizer):
        raise ValueError(f"data.vocab: {vocab} is not the vocabulary of {name}; omit data.vocab to use the latter")
    return compare(tokenizer, other.pieces(range(other.vocab_size)), f"data.vocab: {vocab}")


def require_wordpiece(tokenizer: Tokenizer, what: str) -> WordPieceTokenizer:
    """Return ``tokenizer`` if it is WordPiece. Raise ``ValueError`` for other kinds, to which words cannot be
    added.

    The message begins with ``what``, the name of an option.
    """
    if isinstance(tokenizer, WordPieceTokenizer):
        return tokenizer
    reasons = {
        "sentencepiece": "a SentencePiece model splits text by scores of pieces, and an added word has no score",
        "byte_bpe": "byte-level BPE creates pieces by learned merges, and no merge creates an added word",
        "json": "the rules of a tokenizer.json apply as they are, and no rule creates an added word",
    }
    raise ValueError(f"{what}: {reasons[tokenizer.kind]}; words can be added to WordPiece vocabularies only")


def read_words(path: Path, tokenizer: WordPieceTokenizer) -> tuple[list[str], list[str]]:
    """Read words from ``path`` (one per line); return the new words, normalized by the tokenizer, and notes to log.

    Words that are already pieces are dropped. Raises ``ValueError`` if the file has no words or if a line is not
    exactly one word.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"--add_words: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--add_words: {path}: not UTF-8 text") from None
    pieces = set(tokenizer.pieces(range(tokenizer.vocab_size)))
    words: dict[str, None] = {}
    known: dict[str, None] = {}
    changed: list[str] = []
    for number, line in enumerate(lines, start=1):
        given = line.strip()
        if not given:
            continue
        word = _one_word(given, tokenizer, f"{path}:{number}")
        if word != given:
            changed.append(f"{given} -> {word}")
        (known if word in pieces else words)[word] = None
    if not words and not known:
        raise ValueError(f"--add_words: {path} has no words; write one word per line")
    notes = [f"{len(changed)} word(s) were normalized by the tokenizer: {_some(changed)}"] if changed else []
    notes += [f"{len(known)} word(s) are already pieces: {_some(list(known))}"] if known else []
    return list(words), notes


def _one_word(given: str, tokenizer: WordPieceTokenizer, where: str) -> str:
    found = [
        word
        for chunk in chunks(given, tokenizer.split_cjk)
        for word in split_words(chunk, tokenizer.lower_case, tokenizer.strip_accents)
    ]
    if len(found) != 1:
        parts = f"the tokenizer splits it into {' | '.join(found)}" if found else "the tokenizer removes all of it"
        raise ValueError(f"{where}: {given!r} is not one word: {parts}; write one word per line")
    if len(found[0]) > MAX_CHARS_PER_WORD:
        raise ValueError(f"{where}: the word has {len(found[0])} characters; the maximum is {MAX_CHARS_PER_WORD}")
    return found[0]


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (", ..." if len(items) > _SHOWN else "")


def with_words(tokenizer: WordPieceTokenizer, words: Sequence[str], *, in_slots: bool) -> Extension:
    """Return the vocabulary of ``tokenizer`` with ``words`` appended. No word may already be a piece.

    If ``in_slots`` is True, the words replace the first ``[unusedN]`` pieces instead. Raises ``ValueError`` if the
    vocabulary has fewer ``[unusedN]`` pieces than there are words.
    """
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    slots = [i for i, piece in enumerate(pieces) if _SLOT.fullmatch(piece)]
    if in_slots and len(slots) < len(words):
        few = f"the vocabulary has {len(slots)} [unusedN] pieces"
        raise ValueError(f"--vocab_slots: {len(words)} words to add, but {few}; omit the flag to append the words")
    ids = slots if in_slots else range(len(pieces), len(pieces) + len(words))
    pieces += [""] * (0 if in_slots else len(words))
    for i, word in zip(ids, words, strict=False):
        pieces[i] = word
    return compare(tokenizer, pieces, "--add_words")


def compare(tokenizer: WordPieceTokenizer, pieces: Sequence[str], name: str) -> Extension:
    """Return ``pieces`` as an extension of the vocabulary of ``tokenizer``.

    An extension may replace ``[unusedN]`` pieces with words and append words. Raises ``ValueError``, with a message
    that begins with ``name``, for any other difference.
    """
    old = tokenizer.pieces(range(tokenizer.vocab_size))
    if len(pieces) < len(old):
        raise ValueError(
            f"{name}: {len(pieces)} pieces, but the vocabulary of the model has {len(old)}; keep all of them"
        )
    made_of: dict[int, tuple[int, ...]] = {}
    for i, piece in enumerate(pieces):
        if i < len(old) and piece == old[i]:
            continue
        if i < len(old) and not _SLOT.fullmatch(old[i]):
            remedy = "replace only [unusedN] pieces, or append words"
            raise ValueError(f"{name}: piece {i} is {piece!r}, but {old[i]!r} in the model; {remedy}")
        if _SLOT.fullmatch(piece):
            continue  # reserved for words that are added later
        if _one_word(piece, tokenizer, f"{name}: piece {i}") != piece:
            raise ValueError(
                f"{name}: piece {i} is {piece!r}, which the tokenizer never produces; use the normalized word"
            )
        made_of[i] = tuple(tokenizer.encode(piece))
    unknown = [pieces[i] for i, made in made_of.items() if tokenizer.unk_id in made]
    notes = [f"{len(made_of)} word(s) added, each initialized with the mean of its pieces"] if made_of else []
    notes += [f"{len(unknown)} of them are initialized from [UNK]: {_some(unknown)}"] if unknown else []
    return Extension(tuple(pieces), made_of, tuple(notes))


def extend_rows(
    params: Mapping[str, np.ndarray], made_of: Mapping[int, tuple[int, ...]], vocab_size: int
) -> dict[str, np.ndarray]:
    """Return ``params`` with the word embeddings and the MLM output bias extended to ``vocab_size`` rows.

    The row of each id in ``made_of`` is the mean of the old rows of its pieces. Other new rows are zero, and all
    other old rows are unchanged.
    """
    grown = dict(params)
    for name in WORD_ROWS:
        if name not in params:
            continue
        old = params[name]
        rows = np.zeros((vocab_size, *old.shape[1:]), np.float32)
        rows[: len(old)] = old
        for i, pieces in made_of.items():
            rows[i] = old[list(pieces)].mean(axis=0, dtype=np.float64)
        grown[name] = rows
    return grown
