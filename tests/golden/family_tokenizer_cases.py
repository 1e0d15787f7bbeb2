"""Folders with the older tokenizer files of each family, which the recording script and the tests share."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from golden.tokenizer_cases import byte_pieces

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = (
    ("\u2581", -4.0), ("\u2581the", -3.0), ("\u2581quick", -3.5), ("fox", -3.6), ("\u25811,000,", -3.1),
    ("the", -5.0), ("na", -5.0), ("\u00ef", -6.0), ("ve", -5.5), *((letter, -7.0) for letter in _LETTERS),
    (",", -5.2), ("(", -5.3), ('"', -5.3), ("A", -8.0), ("N", -8.0),
)  # fmt: skip
TEXTS = (
    "The quick fox, 1,000, jumps (and) more.",
    "na\u00efve  NA\u00cfVE the the",
    "``quoted'' thequickfox \u4e2d",
    " the ",
    "",
    "the<quick>fox 0123456789 aaaa bbbb",
)
PAIRS = (*TEXTS[2:], *TEXTS[:2])
LENGTHS = (None, 7, 12)
FIXTURE = Path(__file__).parent / "fixtures" / "family_tokenizers.json"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def _varint(value: int) -> bytes:
    head = value & 0x7F
    return bytes([head]) if value < 0x80 else bytes([head | 0x80]) + _varint(value >> 7)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def sentencepiece_model(special: Sequence[tuple[str, int]], kind: int = 1) -> bytes:
    """Return a serialized SentencePiece model (``kind`` 1 unigram, 2 BPE): the pieces ``special`` with their types,
    then ``WORDS``; its normalization keeps all characters."""
    rows = [*((piece, 0.0, kind) for piece, kind in special), *((*word, _NORMAL) for word in WORDS)]
    pieces = b"".join(
        _bytes(1, _bytes(1, piece.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + _number(3, kind))
        for piece, score, kind in rows
    )
    unknown = next(i for i, (_, kind) in enumerate(special) if kind == _UNKNOWN)
    trainer = _number(3, kind) + _number(40, unknown) + _bytes(45, special[unknown][0].encode())
    return pieces + _bytes(2, trainer) + _bytes(3, _bytes(1, b"identity"))


_ALBERT = [("<pad>", _CONTROL), ("<unk>", _UNKNOWN), ("[CLS]", _CONTROL), ("[SEP]", _CONTROL), ("[MASK]", _CONTROL)]
_FAIRSEQ = [("<unk>", _UNKNOWN), ("<s>", _CONTROL), ("</s>", _CONTROL)]
_DEBERTA = [("[PAD]", _CONTROL), ("[CLS]", _CONTROL), ("[SEP]", _CONTROL), ("[UNK]", _UNKNOWN)]
_BIG_BIRD = [
    ("<pad>", _CONTROL), ("</s>", _CONTROL), ("<s>", _CONTROL), ("<unk>", _UNKNOWN), ("[CLS]", _CONTROL),
    ("[SEP]", _CONTROL), ("[MASK]", _CONTROL),
]  # fmt: skip
_USER = [("and", _USER_DEFINED), ("-", _USER_DEFINED)]


def _byte_files() -> dict[str, Any]:
    pieces, merges = byte_pieces()
    letters = [piece for piece in pieces if piece not in ("<s>", "<pad>", "</s>", "<unk>", "<mask>")]
    table = {piece: i for i, piece in enumerate([*letters, "<|endoftext|>"])}
    return {"vocab.json": table, "merges.txt": "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges)}


def _gpt_files() -> dict[str, Any]:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789,."
    merges = [("h", "e</w>"), ("t", "he</w>"), ("q", "u"), ("qu", "i")]
    pieces = ["<unk>", *letters, *(letter + "</w>" for letter in letters), *(a + b for a, b in merges)]
    table = {piece: i for i, piece in enumerate(pieces)}
    return {"vocab.json": table, "merges.txt": "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges)}


def _mpnet_files() -> dict[str, Any]:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    special = ["<s>", "<pad>", "</s>", "<unk>", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [
        *special,
        *letters,
        *("##" + letter for letter in letters),
        *",.()",
        "the",
        "quick",
        "##fox",
        "<mask>",
    ]
    return {"vocab.txt": "".join(piece + "\n" for piece in pieces)}


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> model_type, and the files by name: bytes, text or JSON objects."""
    cased = {"do_lower_case": False, "keep_accents": True}
    return {
        "albert": ("albert", {"spiece.model": sentencepiece_model(_ALBERT + _USER)}),
        "albert_cased": (
            "albert",
            {"spiece.model": sentencepiece_model(_ALBERT), "tokenizer_config.json": cased},
        ),
        "big_bird": ("big_bird", {"spiece.model": sentencepiece_model(_BIG_BIRD)}),
        "camembert": ("camembert", {"sentencepiece.bpe.model": sentencepiece_model(_FAIRSEQ)}),
        "xlm_roberta": ("xlm-roberta", {"sentencepiece.bpe.model": sentencepiece_model(_FAIRSEQ)}),
        "deberta": ("deberta-v2", {"spm.model": sentencepiece_model(_DEBERTA)}),
        "deberta_lower": (
            "deberta-v2",
            {
                "spm.model": sentencepiece_model(_DEBERTA),
                "tokenizer_config.json": {"do_lower_case": True, "split_by_punct": True},
                "added_tokens.json": {"[MASK]": len(_DEBERTA) + len(WORDS)},
            },
        ),
        "gpt2": ("gpt2", _byte_files()),
        "openai_gpt": ("openai-gpt", _gpt_files()),
        "mpnet": ("mpnet", _mpnet_files()),
    }


def make_folder(folder: Path, name: str) -> None:
    """Write the files of a case, and a ``config.json`` that names its family."""
    family, files = cases()[name]
    folder.mkdir(parents=True)
    for file, content in {**files, "config.json": {"model_type": family}}.items():
        if isinstance(content, bytes):
            (folder / file).write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / file).write_text(text, encoding="utf-8")
