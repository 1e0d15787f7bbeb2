"""The ``tokenizer.json`` of Hugging Face's tokenizers: this library's rules written in it, and its parts read.

Its own BertNormalizer departs from google-research/bert (the final sigma, characters without an assigned meaning,
which it drops, an older Unicode), so the rules are written out as regular expressions over the character categories
of the Python that writes them, which are those that this library's tokenizer goes by.
"""

import base64
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from bert_jax.interop.tokenizers.sentencepiece_file import BPE, NORMAL, UNIGRAM, Piece, parse_model
from bert_jax.tokenization import (
    CJK,
    MAX_CHARS_PER_WORD,
    SPACE,
    SPECIAL_PIECES,
    is_dropped,
    is_punctuation,
)

Json = dict[str, Any]


def _characters(accepts: Callable[[str], bool]) -> str:
    """Content of [ ] in a regular expression for all characters that ``accepts`` takes."""
    parts: list[str] = []
    start: int | None = None
    for point in range(sys.maxunicode + 2):
        taken = point <= sys.maxunicode and not 0xD800 <= point <= 0xDFFF and accepts(chr(point))
        if taken and start is None:
            start = point
        elif not taken and start is not None:
            first, last = re.escape(chr(start)), re.escape(chr(point - 1))
            parts.append(first if start == point - 1 else f"{first}{'-' if start < point - 2 else ''}{last}")
            start = None
    return "".join(parts)


@lru_cache(maxsize=1)
def _classes() -> Mapping[str, str]:
    """Character classes of the rules; a second of work, so once a process."""
    return {
        "dropped": _characters(is_dropped.__wrapped__),
        "punctuation": _characters(is_punctuation.__wrapped__),
        "accent": _characters(lambda char: unicodedata.category(char) == "Mn"),
        # How Python decides on a final sigma: letters with case, and characters that it looks past.
        "cased": _characters(lambda char: _ends_word(char + "\u03a3")),
        "passed": _characters(lambda char: _ends_word(f"A{char}\u03a3") and not _ends_word(char + "\u03a3")),
    }


def _ends_word(text: str) -> bool:
    """Return True if the capital sigma at the end of ``text`` becomes a final one."""
    return text.lower()[-1] == "\u03c2"


def _replace(pattern: str, content: str) -> Json:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _split(pattern: str, behavior: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def wordpiece_rules(*, lower_case: bool, strip_accents: bool | None, split_cjk: bool) -> Json:
    """``normalizer`` and ``pre_tokenizer`` that cut a text into the words of ``WordPieceTokenizer``."""
    classes = _classes()
    steps = [_replace(f"[{classes['dropped']}]", "")]
    if lower_case:
        past = f"[{classes['passed']}]*"
        final = f"[{classes['cased']}]{past}\\K\u03a3(?!{past}[{classes['cased']}])"
        steps += [_replace(final, "\u03c2"), {"type": "Lowercase"}]
    if lower_case if strip_accents is None else strip_accents:
        steps += [{"type": "NFD"}, _replace(f"[{classes['accent']}]", "")]
    splits = [_split(f"[{SPACE}]+", "Removed")]
    splits += [_split(f"[{CJK}]", "Isolated")] if split_cjk else []
    splits.append(_split(f"[{classes['punctuation']}]", "Isolated"))
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
    }


def _special(piece: str, number: int) -> Json:
    return {
        "id": number, "content": piece, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": True,
    }  # fmt: skip


def _frame(ids: Mapping[str, int]) -> Json:
    """Common part of tokenizers with BERT's special pieces: they are cut out of a text; inputs as BERT's."""

    def token(piece: str, kind: int) -> Json:
        return {"SpecialToken": {"id": piece, "type_id": kind}}

    def text(name: str, kind: int) -> Json:
        return {"Sequence": {"id": name, "type_id": kind}}

    single = [token("[CLS]", 0), text("A", 0), token("[SEP]", 0)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(piece, ids[piece]) for piece in sorted(SPECIAL_PIECES, key=ids.__getitem__)],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, text("B", 1), token("[SEP]", 1)],
            "special_tokens": {
                piece: {"id": piece, "ids": [ids[piece]], "tokens": [piece]} for piece in ("[CLS]", "[SEP]")
            },
        },
    }


def wordpiece_json(pieces: Sequence[str], rules: Json) -> Json:
    """The state of a WordPiece tokenizer; ``rules`` from :func:`wordpiece_rules`."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    return {
        **_frame(ids),
        **rules,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": MAX_CHARS_PER_WORD,
            "vocab": ids,
        },
    }


def sentencepiece_json(model: bytes) -> Json:
    """Return the state of a tokenizer equivalent to a SentencePiece model with BERT's special pieces.

    Raises ``ValueError`` for a model with settings that the format cannot express.
    """
    parsed = parse_model(model)
    kind = {UNIGRAM: "Unigram", BPE: "BPE"}.get(parsed.kind)
    odd = [] if kind else ["a type other than unigram and BPE"]
    odd += ["byte fallback"] if parsed.byte_fallback else []
    odd += ["space marks as suffixes"] if parsed.blanks_as_suffixes else []
    odd += [] if parsed.dummy_prefix and parsed.escapes_blanks else ["no space mark before the first word"]
    odd += [] if parsed.squeezes_blanks else ["repeated spaces are kept"]
    if odd:
        raise ValueError(f"tokenizer.model: {', '.join(odd)}; tokenizer.json cannot express this")
    pieces = [(piece.text, piece.score) for piece in parsed.pieces]
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    steps: list[Json] = []
    if parsed.charsmap:
        charsmap = base64.b64encode(parsed.charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    marks = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": False}
    # Cut at blanks first, so that a word's place in the text is without the blank before it.
    splits = [_split(" +", "Removed"), marks]
    if kind == "Unigram":
        cut: Json = {"type": "Unigram", "unk_id": ids["[UNK]"], "vocab": pieces, "byte_fallback": False}
    else:
        cut = {
            "type": "BPE", "dropout": None, "unk_token": "[UNK]", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": False, "ignore_merges": False,
            "vocab": ids, "merges": _ranked_merges(parsed.pieces, ids),
        }  # fmt: skip
    return {
        **_frame(ids),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "decoder": marks,
        "model": cut,
    }


def _ranked_merges(pieces: Sequence[Piece], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges that join two pieces to a third, in the order in which a SentencePiece BPE prefers the results."""
    joined = sorted(
        (number for number, piece in enumerate(pieces) if piece.type == NORMAL and len(piece.text) > 1),
        key=lambda number: (-pieces[number].score, number),
    )
    merges = []
    for number in joined:
        piece = pieces[number].text
        halves = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        found = [(a, b) for a, b in halves if a in ids and b in ids]
        merges += sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def part_of(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object of a parsed file; empty where it is absent or something else."""
    part = state.get(name)
    return part if isinstance(part, dict) else {}


def steps_of(part: Any) -> list[Mapping[str, Any]]:
    """The steps of a pre-tokenizer, whether it is one or a sequence."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        part = part.get("pretokenizers")
    parts = part if isinstance(part, list) else [part]
    return [item for item in parts if isinstance(item, dict)]


def pieces_by_id(table: Any, name: str) -> list[str]:
    """Pieces in id order of a table piece -> id that is 0 to its size."""
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{name}: the vocabulary is empty")
    pieces: list[str | None] = [None] * len(table)
    for piece, number in table.items():
        if type(number) is not int or not 0 <= number < len(pieces) or pieces[number] is not None:
            raise ValueError(f"{name}: the ids of the vocabulary are not 0 to {len(pieces) - 1}")
        pieces[number] = piece
    return [piece for piece in pieces if piece is not None]


def added_tokens(state: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """Content and id of the added tokens."""
    tokens = state.get("added_tokens") or []
    if not isinstance(tokens, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) for token in tokens
    ):
        raise ValueError(f"{name}: added_tokens is not a list of tokens")
    return [(token["content"], token.get("id")) for token in tokens]


def merge_pairs(merges: Any, name: str) -> list[tuple[str, str]]:
    """Parse merges ``["a", "b"]`` or ``"a b"`` into pairs; raise ``ValueError`` for anything else."""
    if not isinstance(merges, list):
        raise ValueError(f"{name}: the merges are missing")
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(half, str) for half in pair):
            raise ValueError(f"{name}: merge {str(pair)[:60]!r} is not a pair of pieces")
    return [(first, second) for first, second in pairs]
