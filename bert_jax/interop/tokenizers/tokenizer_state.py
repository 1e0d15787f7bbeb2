"""A tokenizer as ``tokenizer.json``: its state, proved on sample texts, and where Hugging Face's differs."""

import json
import unicodedata
from typing import Any

import tokenizers
from tokenizers import normalizers

from bert_jax.config import TokenizerConfig
from bert_jax.interop.tokenizers.json_format import sentencepiece_json, wordpiece_json, wordpiece_rules
from bert_jax.process import exits
from bert_jax.tokenization import MAX_CHARS_PER_WORD, Tokenizer

_SAMPLES = (
    "", " ", "The quick brown fox, 1,234.50 jumps!", "na\u00efve CAF\u00c9 Stra\u00dfe \u00dcbung",
    "a\u0301\u0327 e\u0323",
    "\u039f\u0394\u039f\u03a3 \u03a3 \u03a3\u039f\u03a6\u039f\u03a3.", "\u0130stanbul \u0401\u0449\u0451 \u0419",
    "\u4e2d\u6587abc\u5b57", "\u304b\u306a \uac00\ub098", "line\u2028break\u3000wide\u00a0no",
    "zero\u200bwidth soft\u00adhyphen tab\tnew\nline", "\ufb01ne \u00bd \U0001f600", "\ue000 \u0378 x\ufffdy",
    *("a" * length + " b" for length in (99, 100, 101, 199, 200, 201)),
)  # fmt: skip
_PIECES_PER_SAMPLE = 40
# Letters with two cases and letters with accents lie below.
_LAST_LETTER = 0x20000


def state_of(tokenizer: Tokenizer, config: TokenizerConfig, content: bytes) -> tuple[dict[str, Any], list[str]]:
    """The parsed ``tokenizer.json`` of a tokenizer, and what Hugging Face's does otherwise with it."""
    if tokenizer.kind == "byte_bpe":
        return json.loads(content), [
            '"<mask>" and the other special tokens in a text are plain text here, there tokens'
        ]
    notes = ['"[MASK]" and the other special tokens in a text are plain text here (but in fill-mask), there tokens']
    if tokenizer.kind == "sentencepiece":
        notes.append(
            "where two ways to cut a word are equally likely, or a letter carries several accents as characters of "
            "their own, the two libraries may cut differently"
        )
        notes.append("the place in the text may differ at characters that normalization drops or makes several of")
        return sentencepiece_json(content), notes
    rules = wordpiece_rules(
        lower_case=config.lower_case, strip_accents=config.strip_accents, split_cjk=config.split_cjk
    )
    notes.append(
        f"for AutoTokenizer; the class BertTokenizer makes words of 101 to {MAX_CHARS_PER_WORD} characters [UNK]"
    )
    if config.lower_case if config.strip_accents is None else config.strip_accents:
        notes.append("an accent written as a character of its own at a piece's end is in its place here, not there")
    young = newer_letters(config)
    if young:
        points = ", ".join(f"U+{ord(char):04X}" for char in young[:4])
        notes.append(
            f"{len(young)} letters newer than the Unicode of this Python ({points}{', ...' if young[4:] else ''}) "
            "keep case and accents here, not there"
        )
    return wordpiece_json(_listed(content, tokenizer), rules), notes


def newer_letters(config: TokenizerConfig) -> list[str]:
    """Letters whose case or accents the tokenizers library knows otherwise than the Unicode of this Python."""
    chars = [chr(point) for point in range(_LAST_LETTER) if chr(point) != "\n" and not 0xD800 <= point <= 0xDFFF]
    text = "\n".join(chars)
    found: set[str] = set()
    if config.lower_case:
        found |= _changed(chars, normalizers.Lowercase().normalize_str(text), str.lower)
    if config.lower_case if config.strip_accents is None else config.strip_accents:
        found |= _changed(chars, normalizers.NFD().normalize_str(text), _decomposed)
    return sorted(found)


def _decomposed(char: str) -> str:

    return unicodedata.normalize("NFD", char)


def _changed(chars: list[str], text: str, change: Any) -> set[str]:
    return {char for char, other in zip(chars, text.split("\n"), strict=True) if other != change(char)}


def _listed(content: bytes, tokenizer: Tokenizer) -> list[str]:
    """The pieces, those that are nothing but white space as they stand in the file: ids need distinct names."""
    lines = content.decode("utf-8-sig").split("\n")
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    return [
        piece if piece.removeprefix("##") else line.strip("\r")
        for piece, line in zip(pieces, lines, strict=False)
    ]  # fmt: skip


def check_state(tokenizer: Tokenizer, written: bytes) -> list[str]:
    """Cut sample texts and all pieces by both. A difference is an ``exits.Stop``, for SentencePiece a note."""
    other = tokenizers.Tokenizer.from_str(written.decode())
    other.encode_special_tokens = True
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    starts = range(0, len(pieces), _PIECES_PER_SAMPLE)
    words = [" ".join(pieces[start : start + _PIECES_PER_SAMPLE]).replace(" ##", " ") for start in starts]
    texts = [*_SAMPLES, *words]
    wrong = [
        text
        for text, ids, row in zip(
            texts,
            tokenizer.encode_batch(texts),
            other.encode_batch_fast(texts, add_special_tokens=False),
            strict=True,
        )
        if ids != row.ids
    ]
    if wrong and tokenizer.kind != "sentencepiece":
        raise exits.Stop(
            exits.VERIFICATION_FAILED,
            f"tokenizer.json cuts {len(wrong)} of {len(texts)} sample texts otherwise, first {wrong[0][:60]!r}; "
            "install the version of the tokenizers library that requirements.lock names",
        )
    return [f"{len(wrong)} of {len(texts)} sample texts are cut otherwise by tokenizer.json"] if wrong else []
