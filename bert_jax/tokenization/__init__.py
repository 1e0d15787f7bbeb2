"""Tokenizers, which convert text to ids and back: WordPiece (``.txt``), SentencePiece (``.model``), byte-level BPE
of RoBERTa and any other rules (``tokenizer.json``)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from bert_jax.json_values import Json
from bert_jax.tokenization.tokenizer import SPECIAL_PIECES, Tokenizer
from bert_jax.tokenization.wordpiece import WordPieceTokenizer, read_pieces

# File name of a tokenizer by its kind, in shards, workdirs and saved models.
FILE_NAMES = {
    "wordpiece": "vocab.txt",
    "sentencepiece": "tokenizer.model",
    "byte_bpe": "tokenizer.json",
    "json": "tokenizer.json",
}


class TokenizerSettings(Protocol):
    """Settings of a tokenizer; ``bert_jax.config.TokenizerConfig`` implements this protocol."""

    @property
    def file(self) -> str: ...
    @property
    def lower_case(self) -> bool: ...
    @property
    def strip_accents(self) -> bool | None: ...
    @property
    def split_cjk(self) -> bool: ...
    @property
    def cjk_words(self) -> bool: ...
    @property
    def truncation_side(self) -> Literal["right", "left"]: ...
    @property
    def pair_types(self) -> bool: ...


class _Settings(NamedTuple):
    """Settings of a vocabulary file that is loaded without a config."""

    file: str
    lower_case: bool
    strip_accents: bool | None = None
    split_cjk: bool = True
    cjk_words: bool = False
    truncation_side: Literal["right", "left"] = "right"
    pair_types: bool = True


def build_tokenizer(settings: TokenizerSettings, content: bytes, name: str) -> Tokenizer:
    """Build a tokenizer from the ``content`` of its file; ``name`` appears in error messages.

    The suffix of ``settings.file`` selects the kind: ``.txt`` WordPiece, ``.model`` SentencePiece, ``.json``
    BERT's WordPiece, byte-level BPE of RoBERTa or, if the content states other rules, ``JsonTokenizer``. The
    settings for case, accents and CJK apply to ``.txt``; the other files contain their own rules. Raises
    ``ValueError`` for invalid content.
    """
    tokenizer = _of_kind(settings, content, name)
    tokenizer.truncation_side = settings.truncation_side
    tokenizer.second_type = tokenizer.second_type if settings.pair_types else 0
    return tokenizer


def _of_kind(settings: TokenizerSettings, content: bytes, name: str) -> Tokenizer:
    suffix = Path(settings.file).suffix
    if suffix == ".model":
        from bert_jax.tokenization.sentence_piece import SentencePieceTokenizer

        return SentencePieceTokenizer(content, name=name)
    if suffix == ".json":
        from bert_jax.tokenization.byte_bpe import ByteBPETokenizer
        from bert_jax.tokenization.json_tokenizer import JsonTokenizer, is_general
        from bert_jax.tokenization.wordpiece_json import is_wordpiece, wordpiece_of

        state = _parsed(content)
        if is_general(state):
            return JsonTokenizer(content, name=name)
        if is_wordpiece(state):
            return wordpiece_of(state, name)
        return ByteBPETokenizer(content, name=name)
    if suffix != ".txt":
        remedy = "allowed: .txt (WordPiece), .model (SentencePiece) and .json (tokenizer.json)"
        raise ValueError(f"{name}: the suffix {suffix!r} is not allowed for a vocabulary; {remedy}")
    return WordPieceTokenizer(
        read_pieces(content, name),
        lower_case=settings.lower_case,
        strip_accents=settings.strip_accents,
        split_cjk=settings.split_cjk,
        cjk_words=settings.cjk_words,
    )


def _parsed(content: bytes) -> Mapping[str, Json]:
    """Return the JSON object ``content``; {} if it is none, a fault that ByteBPETokenizer names."""
    try:
        state = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def load_tokenizer(
    path: str | Path, *, lower_case: bool = True, strip_accents: bool | None = None, cjk_words: bool = False
) -> Tokenizer:
    """Load the tokenizer of a vocabulary file as :func:`build_tokenizer` does.

    ``lower_case``, ``strip_accents`` (None: as ``lower_case``) and ``cjk_words`` apply to ``.txt`` only. Raises
    ``ValueError`` if the file is missing or invalid.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such vocabulary file")
    settings = _Settings(path.name, lower_case, strip_accents, cjk_words=cjk_words)
    return build_tokenizer(settings, path.read_bytes(), str(path))
