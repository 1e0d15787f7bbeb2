"""Text to ids and back: WordPiece (``.txt``), SentencePiece (``.model``), byte-level BPE (``tokenizer.json``)."""

from pathlib import Path
from typing import Protocol

from bert_jax.tokenization.byte_bpe import ROBERTA_PIECES, ByteBPETokenizer, byte_bpe_content
from bert_jax.tokenization.sentence_piece import SentencePieceTokenizer
from bert_jax.tokenization.tokenizer import SPECIAL_PIECES, Offsets, Tokenizer, longest_first
from bert_jax.tokenization.wordpiece import (
    CJK,
    MAX_CHARS_PER_WORD,
    SPACE,
    WordPieceTokenizer,
    chunk_words,
    chunks,
    is_cjk,
    is_dropped,
    is_punctuation,
    read_pieces,
    split_words,
)

# Name of a tokenizer's file by kind, in shards, workdirs and saved models.
FILE_NAMES = {"wordpiece": "vocab.txt", "sentencepiece": "tokenizer.model", "byte_bpe": "tokenizer.json"}

__all__ = [
    "CJK",
    "FILE_NAMES",
    "MAX_CHARS_PER_WORD",
    "ROBERTA_PIECES",
    "SPACE",
    "SPECIAL_PIECES",
    "ByteBPETokenizer",
    "Offsets",
    "SentencePieceTokenizer",
    "Tokenizer",
    "TokenizerSettings",
    "WordPieceTokenizer",
    "build_tokenizer",
    "byte_bpe_content",
    "chunk_words",
    "chunks",
    "is_cjk",
    "is_dropped",
    "is_punctuation",
    "load_tokenizer",
    "longest_first",
    "read_pieces",
    "split_words",
]


class TokenizerSettings(Protocol):
    """Settings of a tokenizer, as ``bert_jax.config.TokenizerConfig`` holds them."""

    @property
    def file(self) -> str: ...
    @property
    def lower_case(self) -> bool: ...
    @property
    def strip_accents(self) -> bool | None: ...
    @property
    def split_cjk(self) -> bool: ...


def build_tokenizer(settings: TokenizerSettings, content: bytes, name: str) -> Tokenizer:
    """Build the tokenizer of a file's ``content``; ``name`` is for messages.

    The suffix of ``settings.file`` selects its kind: ``.txt`` WordPiece, ``.model`` SentencePiece, ``.json``
    byte-level BPE. The settings for case, accents and CJK apply to WordPiece; the other files carry their own
    rules. Raises ``ValueError`` for invalid content.
    """
    suffix = Path(settings.file).suffix
    if suffix not in (".txt", ".model", ".json"):
        raise ValueError(
            f"{name}: a vocabulary is a .txt (WordPiece), .model (SentencePiece) or .json (byte-level BPE) file"
        )
    if other := _with_own_rules(suffix, content, name):
        return other
    return WordPieceTokenizer(
        read_pieces(content, name),
        lower_case=settings.lower_case,
        strip_accents=settings.strip_accents,
        split_cjk=settings.split_cjk,
    )


def _with_own_rules(suffix: str, content: bytes, name: str) -> Tokenizer | None:
    """Return the tokenizer of a file that carries its own rules, or None for a WordPiece vocabulary."""
    if suffix == ".model":
        return SentencePieceTokenizer(content, name=name)
    return ByteBPETokenizer(content, name=name) if suffix == ".json" else None


def load_tokenizer(path: str | Path, *, lower_case: bool = True) -> Tokenizer:
    """Load a tokenizer from a ``.txt`` (WordPiece, one piece per line) or ``.model`` (SentencePiece) file or a
    ``tokenizer.json`` (byte-level BPE).

    ``lower_case`` (lower-case and strip accents) applies to WordPiece; the others carry their own normalization.
    Raises ``ValueError`` if the file is missing or invalid.
    """
    path = Path(path)
    if path.suffix not in (".txt", ".model") and path.name != "tokenizer.json":
        raise ValueError(
            f"{path}: a vocabulary is a .txt (WordPiece) or .model (SentencePiece) file or a tokenizer.json "
            "(byte-level BPE)"
        )
    if not path.is_file():
        raise ValueError(f"{path}: no such vocabulary file")
    content = path.read_bytes()
    if other := _with_own_rules(path.suffix, content, str(path)):
        return other
    return WordPieceTokenizer(read_pieces(content, str(path)), lower_case=lower_case)
