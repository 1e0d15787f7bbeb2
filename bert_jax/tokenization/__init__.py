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
    """What ``bert_jax.config.TokenizerConfig`` says of a tokenizer."""

    @property
    def file(self) -> str: ...
    @property
    def lower_case(self) -> bool: ...
    @property
    def strip_accents(self) -> bool | None: ...
    @property
    def split_cjk(self) -> bool: ...


def build_tokenizer(settings: TokenizerSettings, content: bytes, name: str) -> Tokenizer:
    """Tokenizer of a file's ``content``, of the kind that the suffix of ``settings.file`` says: ``.txt`` WordPiece,
    ``.model`` SentencePiece, ``.json`` byte-level BPE. ``name`` is for messages.

    Case, accents and CJK apply to WordPiece; the other files carry their own rules. ``ValueError`` says what is
    wrong with the content.
    """
    suffix = Path(settings.file).suffix
    if suffix == ".model":
        return SentencePieceTokenizer(content, name=name)
    if suffix == ".json":
        return ByteBPETokenizer(content, name=name)
    if suffix != ".txt":
        raise ValueError(
            f"{name}: a vocabulary is a .txt (WordPiece), .model (SentencePiece) or .json (byte-level BPE) file"
        )
    return WordPieceTokenizer(
        read_pieces(content, name),
        lower_case=settings.lower_case,
        strip_accents=settings.strip_accents,
        split_cjk=settings.split_cjk,
    )


def load_tokenizer(path: str | Path, *, lower_case: bool = True) -> Tokenizer:
    """Tokenizer of a ``.txt`` (WordPiece, a piece a line), ``.model`` (SentencePiece) file or a
    ``tokenizer.json`` (byte-level BPE).

    ``lower_case`` (lower-case and strip accents) applies to WordPiece; the others carry their own normalisation.
    ``ValueError`` says what is wrong with the file.
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
    if path.suffix == ".model":
        return SentencePieceTokenizer(content, name=str(path))
    if path.suffix == ".json":
        return ByteBPETokenizer(content, name=str(path))
    return WordPieceTokenizer(read_pieces(content, str(path)), lower_case=lower_case)
