"""Conversion of a tokenizer to ``tokenizer.json``, verification on sample texts, and notes on differences."""

import json
import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import tokenizers
from tokenizers import normalizers

from bert_jax.config import TokenizerConfig
from bert_jax.interop.tokenizers.json_format import bert_rules, exact_rules, sentencepiece_json, wordpiece_json
from bert_jax.json_values import Json
from bert_jax.process import exits
from bert_jax.tokenization import SPECIAL_PIECES, Tokenizer
from bert_jax.tokenization.json_tokenizer import foreign_tokens
from bert_jax.tokenization.wordpiece import MAX_CHARS_PER_WORD, chunks, split_words

_SAMPLES = (
    "", " ", "The quick brown fox, 1,234.50 jumps!", "na\u00efve CAF\u00c9 Stra\u00dfe \u00dcbung",
    "a\u0301\u0327 e\u0323",
    "\u039f\u0394\u039f\u03a3 \u03a3 \u03a3\u039f\u03a6\u039f\u03a3.", "\u0130stanbul \u0401\u0449\u0451 \u0419",
    "\u4e2d\u6587abc\u5b57", "\u304b\u306a \uac00\ub098", "line\u2028break\u3000wide\u00a0no",
    "zero\u200bwidth soft\u00adhyphen tab\tnew\nline", "\ufb01ne \u00bd \U0001f600", "\ue000 \u0378 x\ufffdy",
    *("a" * length + " b" for length in (99, 100, 101, 199, 200, 201)),
)  # fmt: skip
_PIECES_PER_SAMPLE = 40
# All letters with two cases or with accents have smaller code points.
_LAST_LETTER = 0x20000
# A character that is a word of its own under all rules.
_BETWEEN = "|"
# Large blocks that all rules treat alike: ideographs (the extensions from C on are not) and Hangul.
_ALIKE = re.compile("[\u3400-\u4db5\u4e00-\u9fcc\uac00-\ud7a3\U00020000-\U0002a6d6]")


def state_of(
    tokenizer: Tokenizer, config: TokenizerConfig, content: bytes, *, exact: bool = False
) -> tuple[dict[str, Json], list[str]]:
    """Return the content of ``tokenizer.json`` for ``tokenizer``, and notes on how a Hugging Face tokenizer with
    this content differs from ``tokenizer``. WordPiece has the rules of transformers' BertTokenizer, which every
    reader supports; with ``exact``, it has those of :func:`exact_rules`."""
    if tokenizer.kind in ("byte_bpe", "json"):
        return json.loads(content), [
            f'"{tokenizer.special_pieces[4]}" and the other special tokens in a text are plain text here, but '
            "special tokens in Hugging Face"
        ]
    notes = [
        '"[MASK]" and the other special tokens in a text are plain text here (except in fill-mask), but special '
        "tokens in Hugging Face"
    ]
    if tokenizer.kind == "sentencepiece":
        notes.append(
            "words with two equally likely segmentations, or with several accents as separate characters on a "
            "letter, may be split differently"
        )
        notes.append("offsets may differ at characters that normalization removes or expands")
        return sentencepiece_json(content, lower_case=tokenizer.lower_case), notes
    if tokenizer.rules.get("cjk_words"):
        rule = "which BERT's rules of a tokenizer.json do not find in a text; export word2vec or npz"
        raise ValueError(f"the vocabulary has Chinese words of several characters, {rule}")
    rules = (exact_rules if exact else bert_rules)(**rules_of(config))
    notes.append(
        "load the tokenizer with AutoTokenizer; BertTokenizer replaces words of 101 to "
        f"{MAX_CHARS_PER_WORD} characters with [UNK]"
    )
    if config.lower_case if config.strip_accents is None else config.strip_accents:
        notes.append("offsets include a separate accent at the end of a piece here, but not in Hugging Face")
    state = wordpiece_json(_listed(content, tokenizer), rules)
    if exact:
        young = newer_letters(config)
        kept = f"{len(young)} letters newer than the Unicode version of this Python ({_points(young)})"
        return state, [*notes, *([f"{kept} keep case and accents here, but not in Hugging Face"] if young else [])]
    own = {*"".join(tokenizer.pieces(range(tokenizer.vocab_size)))}
    other = otherwise_treated(**rules_of(config))
    notes.append(
        f"tokenizer.json has the rules of transformers' BertTokenizer, which treat private-use characters and "
        f"{len(other)} others ({_points(other)}), {len(own.intersection(other))} of them in the vocabulary, "
        "differently from google-research/bert; --exact_tokenizer writes exact rules, which only the tokenizers "
        "library reads"
    )
    return state, notes


def rules_of(config: TokenizerConfig) -> dict[str, Any]:
    """Return the arguments of :func:`exact_rules` and :func:`bert_rules`."""
    return {name: getattr(config, name) for name in ("lower_case", "strip_accents", "split_cjk")}


def _points(chars: Sequence[str]) -> str:
    return ", ".join(f"U+{ord(char):04X}" for char in chars[:4]) + (", ..." if len(chars) > 4 else "")


@lru_cache(maxsize=8)
def otherwise_treated(*, lower_case: bool, strip_accents: bool | None, split_cjk: bool) -> tuple[str, ...]:
    """Return the characters that :func:`bert_rules` and ``WordPieceTokenizer`` treat differently inside a word and,
    with ``lower_case``, the Greek capital sigma, which they treat differently at the end of a word. Unassigned and
    private-use characters, which :func:`bert_rules` drops, are not listed."""
    rules = bert_rules(lower_case=lower_case, strip_accents=strip_accents, split_cjk=split_cjk)
    state = wordpiece_json(SPECIAL_PIECES, rules)
    plain = tokenizers.Tokenizer.from_str(json.dumps(state))
    chars = [
        char
        for char in map(chr, range(sys.maxunicode + 1))
        if not (is_unlisted(char) or _ALIKE.match(char) or char == _BETWEEN)
    ]
    text = _BETWEEN.join(f"a{char}b" for char in chars)
    words = [word for chunk in chunks(text, split_cjk) for word in split_words(chunk, lower_case, strip_accents)]
    others = [word for word, _ in plain.pre_tokenizer.pre_tokenize_str(plain.normalizer.normalize_str(text))]
    pairs = zip(chars, _parts(words), _parts(others), strict=True)
    return tuple(char for char, own, other in pairs if own != other or (lower_case and char == "\u03a3"))


def is_unlisted(char: str) -> bool:
    """Return True for a character that is unassigned or of private use; :func:`bert_rules` drops it."""
    return unicodedata.category(char) in ("Cn", "Co", "Cs")


def _parts(words: list[str]) -> list[str]:
    """Return the words between the words :data:`_BETWEEN`, joined by line breaks, which no word contains."""
    return "\n".join(words).split(f"\n{_BETWEEN}\n")


def newer_letters(config: TokenizerConfig) -> list[str]:
    """Return the letters that the tokenizers library and this Python lower-case or decompose differently."""
    chars = [chr(point) for point in range(_LAST_LETTER) if chr(point) != "\n" and not 0xD800 <= point <= 0xDFFF]
    text = "\n".join(chars)
    found: set[str] = set()
    if config.lower_case:
        found |= _changed(chars, normalizers.Lowercase().normalize_str(text), str.lower)
    if config.lower_case if config.strip_accents is None else config.strip_accents:
        found |= _changed(chars, normalizers.NFD().normalize_str(text), partial(unicodedata.normalize, "NFD"))
    return sorted(found)


def _changed(chars: list[str], text: str, change: Callable[[str], str]) -> set[str]:
    return {char for char, other in zip(chars, text.split("\n"), strict=True) if other != change(char)}


def _listed(content: bytes, tokenizer: Tokenizer) -> list[str]:
    """Return the pieces of ``tokenizer``, which are stripped of white space. Pieces that contain only white space
    are returned as they are in ``content``, so that all pieces are distinct."""
    lines = content.decode("utf-8-sig").split("\n")
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    return [
        piece if piece.removeprefix("##") else line.strip("\r")
        for piece, line in zip(pieces, lines, strict=False)
    ]  # fmt: skip


def check_state(tokenizer: Tokenizer, written: bytes, otherwise: Collection[str] = ()) -> list[str]:
    """Encode sample texts and all pieces with ``tokenizer`` and with ``written``, a ``tokenizer.json``. Return
    notes on differences.

    Padding and truncation that the file states do not apply. Texts with characters in ``otherwise``, unassigned
    or private-use ones may differ if ``otherwise`` is not empty. Raises ``exits.Stop`` if there are other
    differences and the tokenizer is not SentencePiece.
    """
    other = tokenizers.Tokenizer.from_str(written.decode())
    other.encode_special_tokens = True
    other.no_padding()
    other.no_truncation()
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    if tokenizer.kind == "json":  # added tokens, and in a Unigram the names of special pieces, are found in a text
        special = tokenizer.pieces(np.flatnonzero(tokenizer.special).tolist())
        names = {*tokenizer.special_pieces, *special, *foreign_tokens(json.loads(written))}
        pieces = [piece for piece in pieces if not any(name in piece for name in names)]
    starts = range(0, len(pieces), _PIECES_PER_SAMPLE)
    words = [" ".join(pieces[start : start + _PIECES_PER_SAMPLE]).replace(" ##", " ") for start in starts]
    texts = [*_SAMPLES, *words]
    rows = zip(tokenizer.encode_batch(texts), other.encode_batch_fast(texts, add_special_tokens=False), strict=True)
    wrong = [text for text, (ids, row) in zip(texts, rows, strict=True) if ids != row.ids]
    if otherwise:
        excused = {*otherwise}
        wrong = [text for text in wrong if excused.isdisjoint(text) and not any(map(is_unlisted, text))]
    if wrong and tokenizer.kind != "sentencepiece":
        raise exits.Stop(
            exits.VERIFICATION_FAILED,
            f"tokenizer.json encodes {len(wrong)} of {len(texts)} sample texts differently; the first is "
            f"{wrong[0][:60]!r}; install the version of the tokenizers library that requirements.lock names",
        )
    return [f"tokenizer.json encodes {len(wrong)} of {len(texts)} sample texts differently"] if wrong else []
