"""Content of a SentencePiece model file: pieces and normalization, of which the library gives only the former.

The generated classes that come with the library demand the protobuf release that they were made with, which another
package may forbid; the few fields needed are read by themselves (sentencepiece_model.proto).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

UNIGRAM, BPE = 1, 2
NORMAL = 1  # neither control nor unknown nor user-defined


class Piece(NamedTuple):
    """An entry of the vocabulary."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceModel:
    """Pieces of a SentencePiece model in id order, and its settings for normalizing and splitting text."""

    pieces: tuple[Piece, ...]
    # UNIGRAM, BPE or another type.
    kind: int
    byte_fallback: bool
    blanks_as_suffixes: bool
    # Compiled normalization rules; empty: none.
    charsmap: bytes
    dummy_prefix: bool
    squeezes_blanks: bool
    escapes_blanks: bool


def parse_model(content: bytes) -> SentencePieceModel:
    """``content`` of a model file that the library has loaded, so that it is whole."""
    pieces = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(content):
        if number == 1:
            fields = dict(_fields(value))
            score = struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0
            pieces.append(Piece(fields[1].decode(), score, fields.get(3, NORMAL)))
        elif number == 2:
            trainer |= dict(_fields(value))
        elif number == 3:
            normalizer |= dict(_fields(value))
    return SentencePieceModel(
        pieces=tuple(pieces),
        kind=trainer.get(3, UNIGRAM),
        byte_fallback=bool(trainer.get(35, False)),
        blanks_as_suffixes=bool(trainer.get(24, False)),
        charsmap=normalizer.get(2, b""),
        dummy_prefix=bool(normalizer.get(3, True)),
        squeezes_blanks=bool(normalizer.get(4, True)),
        escapes_blanks=bool(normalizer.get(5, True)),
    )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protobuf message: int for a varint, else the bytes as they are."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        value: int | bytes
        match tag & 7:
            case 0:
                value, place = _varint(message, place)
            case 1 | 5 as kind:
                size = 8 if kind == 1 else 4
                value, place = message[place : place + size], place + size
            case 2:
                size, place = _varint(message, place)
                value, place = message[place : place + size], place + size
            case kind:
                raise ValueError(f"tokenizer.model: a field of the unknown kind {kind}")
        yield tag >> 3, value


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """The number at ``place`` and the place behind it: 7 bits a byte, the lowest first."""
    value = shift = 0
    while message[place] & 0x80:
        value |= (message[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
    return value | message[place] << shift, place + 1
