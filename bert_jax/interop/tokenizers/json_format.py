"""Functions that write and read the parts of ``tokenizer.json``, the format of Hugging Face's tokenizers library.

The BertNormalizer of that library differs from google-research/bert: it handles the final sigma differently, drops
unassigned characters and uses an older Unicode version. The exact rules are therefore regular expressions over the
character categories of the running Python, which the tokenizers of bert_jax also use.
"""

import base64
import json
import re
import struct
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from tokenizers.processors import TemplateProcessing

from bert_jax.io.protobuf import read_fields, read_varint
from bert_jax.json_values import Json
from bert_jax.tokenization import SPECIAL_PIECES
from bert_jax.tokenization.json_parts import added_entries, bpe_model, part_of, tokenizer_json
from bert_jax.tokenization.wordpiece import CJK, MAX_CHARS_PER_WORD, SPACE, is_dropped, is_punctuation

Rules = dict[str, dict[str, Json]]
_NORMAL = 1  # type of a piece that is neither control, unknown nor user-defined


@lru_cache(maxsize=1)
def _assigned() -> list[int]:
    """Return the assigned code points, about a seventh of all code points. The character classes contain only
    these."""
    return [n for n in range(sys.maxunicode + 1) if unicodedata.category(chr(n)) not in ("Cn", "Co", "Cs")]


def _characters(accepts: Callable[[str], bool]) -> str:
    """Return the content of a bracket expression [...] for all characters for which ``accepts`` is true."""
    points = (point for point in _assigned() if accepts(chr(point)))
    parts: list[str] = []
    # The difference between code point and index is constant in a run of consecutive code points.
    for _, numbered in groupby(enumerate(points), lambda pair: pair[1] - pair[0]):
        run = [re.escape(chr(point)) for _, point in numbered]
        parts.append(f"{run[0]}-{run[-1]}" if len(run) > 2 else "".join(run))
    return "".join(parts)


@lru_cache(maxsize=1)
def _classes() -> Mapping[str, str]:
    """Return the character classes for :func:`exact_rules`, cached because their computation takes 0.3 s."""
    return {
        "dropped": _characters(is_dropped.__wrapped__),
        "punctuation": _characters(is_punctuation.__wrapped__),
        "accent": _characters(lambda char: unicodedata.category(char) == "Mn"),
        # Python's rule for a final sigma: letters with case, and characters that the rule ignores.
        "cased": _characters(lambda char: _ends_word(char + "\u03a3")),
        "passed": _characters(lambda char: _ends_word(f"A{char}\u03a3") and not _ends_word(char + "\u03a3")),
    }


def _ends_word(text: str) -> bool:
    """Return True if lower-casing turns the capital sigma at the end of ``text`` into a final sigma."""
    return text.lower()[-1] == "\u03c2"


def replace(pattern: str, content: str, kind: str = "Regex") -> dict[str, Json]:
    """Return the normalizer that replaces ``pattern``, of the kind Regex or String, with ``content``."""
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _split(pattern: str, behavior: str) -> dict[str, Json]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def exact_rules(*, lower_case: bool, strip_accents: bool | None, split_cjk: bool) -> Rules:
    """Return the ``normalizer`` and ``pre_tokenizer`` that split a text into exactly the words of
    ``WordPieceTokenizer``, by expressions that only the tokenizers library reads."""
    classes = _classes()
    steps: list[Json] = [replace(f"[{classes['dropped']}]", "")]
    if lower_case:
        past = f"[{classes['passed']}]*"
        final = f"[{classes['cased']}]{past}\\K\u03a3(?!{past}[{classes['cased']}])"
        steps += [replace(final, "\u03c2"), {"type": "Lowercase"}]
    if lower_case if strip_accents is None else strip_accents:
        steps += [{"type": "NFD"}, replace(f"[{classes['accent']}]", "")]
    splits = [_split(f"[{SPACE}]+", "Removed")]
    splits += [_split(f"[{CJK}]", "Isolated")] if split_cjk else []
    splits.append(_split(f"[{classes['punctuation']}]", "Isolated"))
    return sequences(steps, splits)


def sequences(steps: Sequence[Json], splits: Sequence[Json]) -> Rules:
    """Return the ``normalizer`` of the ``steps`` and the ``pre_tokenizer`` of the ``splits``."""
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
    }


def bert_rules(*, lower_case: Json, strip_accents: Json, split_cjk: Json) -> Rules:
    """Return the ``normalizer`` and ``pre_tokenizer`` of transformers' BertTokenizer, which every reader of
    ``tokenizer.json`` knows."""
    return {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": split_cjk,
            "strip_accents": strip_accents, "lowercase": lower_case,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
    }  # fmt: skip


def template(special: Sequence[str], ids: Mapping[str, int], separators: int) -> Json:
    """Return the ``post_processor`` that adds the first token and the separator, ``special[2:4]``, to a text, and
    ``separators`` separators between two texts, whose token types then differ only with one separator."""
    first, separator = special[2:4]
    b = 1 if separators == 1 else 0
    made = TemplateProcessing(
        single=f"{first} $A {separator}",
        pair=f"{first} $A {f'{separator} ' * separators}$B:{b} {separator}:{b}",
        special_tokens=[(piece, ids[piece]) for piece in (first, separator)],
    )
    parts: Json = json.loads(made.__getstate__())
    return parts


def _framed(ids: dict[str, int], **parts: Json) -> dict[str, Json]:
    """Return the ``tokenizer.json`` of a tokenizer with BERT's special pieces."""
    added, frame = added_entries(ids, SPECIAL_PIECES), template(SPECIAL_PIECES, ids, 1)
    return tokenizer_json(added_tokens=added, post_processor=frame, **parts)


def wordpiece_parts(ids: Mapping[str, int], limit: Json) -> dict[str, dict[str, Json]]:
    """Return the ``decoder`` and the ``model`` of a WordPiece, in which words of more than ``limit`` characters are
    [UNK]."""
    return {
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": limit, "vocab": ids,
        },
    }  # fmt: skip


def wordpiece_json(pieces: Sequence[str], rules: Rules, limit: Json = MAX_CHARS_PER_WORD) -> dict[str, Json]:
    """Return the ``tokenizer.json`` of a WordPiece tokenizer with the ``rules`` of :func:`exact_rules` or
    :func:`bert_rules`, in which words of more than ``limit`` characters are [UNK]."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    return _framed(ids, **rules, **wordpiece_parts(ids, limit))


class _Piece(NamedTuple):
    text: str
    score: float
    type: int


def parse_model(content: bytes) -> tuple[list[_Piece], dict[int, Any], dict[int, Any]]:
    """Return the pieces, the TrainerSpec and the NormalizerSpec of a valid SentencePiece model.

    Each spec is a dict whose keys are the field numbers in sentencepiece_model.proto. The classes that protobuf
    generates for this file are not used, because they need a protobuf release that may conflict with another
    package.
    """

    def fields(start: int, end: int) -> dict[int, Any]:
        return {
            tag >> 3: content[a:b] if tag & 7 else read_varint(content, a)[0]
            for tag, a, b in read_fields(content, start, end)
        }

    pieces: list[_Piece] = []
    specs: dict[int, dict[int, Any]] = {2: {}, 3: {}}
    for tag, start, end in read_fields(content, 0, len(content)):
        if tag >> 3 == 1:
            piece = fields(start, end)
            score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
            pieces.append(_Piece(piece[1].decode(), score, piece.get(3, _NORMAL)))
        elif tag >> 3 in specs:
            specs[tag >> 3] |= fields(start, end)
    return pieces, specs[2], specs[3]


def sentencepiece_json(model: bytes, *, lower_case: bool = False) -> dict[str, Json]:
    """Return the ``tokenizer.json`` equivalent to a SentencePiece model with BERT's special pieces.

    If ``lower_case``, the map of characters of the model folds case. Steps that do the same precede it for
    transformers.js, which does not read the map; they spare the one capital that the map keeps. Raises
    ``ValueError`` for a model with settings that the format cannot express.
    """
    parsed, trainer, normalizer = parse_model(model)
    kind = model_kind(trainer)
    odd = {
        "a type other than unigram and BPE": kind is None,
        "byte fallback": trainer.get(35, 0),  # byte_fallback
        "space marks as suffixes": trainer.get(24, 0),  # treat_whitespace_as_suffix
        # add_dummy_prefix, escape_whitespaces
        "no space mark before the first word": not (normalizer.get(3, 1) and normalizer.get(5, 1)),
        "repeated spaces are kept": not normalizer.get(4, 1),  # remove_extra_whitespaces
    }
    if names := ", ".join(name for name, is_odd in odd.items() if is_odd):
        raise ValueError(f"tokenizer.model has settings that tokenizer.json cannot express: {names}")
    pieces = [(piece.text, piece.score) for piece in parsed]
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    steps = character_map(normalizer)
    if lower_case:
        kept, hidden = "\u0130", "\ufdd0"
        steps = [replace(kept, hidden), {"type": "Lowercase"}, replace(hidden, kept), *steps]
    marks = metaspace(split=False)
    # Words are split at blanks first, so that their ranges in the text do not include the blank before them.
    rules = sequences(steps, [_split(" +", "Removed"), marks])
    if kind == "Unigram":
        cut = unigram_model(pieces, ids["[UNK]"])
    else:
        cut = bpe_model(ids, ranked_merges(parsed, ids), unk_token="[UNK]", fuse_unk=True)
    return _framed(ids, **rules, decoder=marks, model=cut)


def model_kind(trainer: Mapping[int, Any]) -> str | None:
    """Return the type that ``tokenizer.json`` has for the model of a TrainerSpec; None: none."""
    return {1: "Unigram", 2: "BPE"}.get(trainer.get(3, 1))  # model_type


def character_map(normalizer: Mapping[int, Any]) -> list[dict[str, Json]]:
    """Return the normalizer for the map of characters in a NormalizerSpec, [] if it has none."""
    encoded = base64.b64encode(normalizer.get(2, b"")).decode()  # precompiled_charsmap
    return [{"type": "Precompiled", "precompiled_charsmap": encoded}] if encoded else []


def metaspace(*, split: bool) -> dict[str, Json]:
    """Return the pre-tokenizer and decoder that mark the beginning of a word with U+2581."""
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": split}


def unigram_model(scored: Sequence[tuple[str, float]], unknown: int) -> dict[str, Json]:
    """Return the ``model`` of pieces with their scores; ``unknown`` is the id of the unknown piece."""
    return {"type": "Unigram", "unk_id": unknown, "vocab": scored, "byte_fallback": False}


def ranked_merges(pieces: Sequence[_Piece], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a third piece, sorted by the preference of SentencePiece BPE for that
    piece."""
    joined = sorted(
        (number for number, piece in enumerate(pieces) if piece.type == _NORMAL and len(piece.text) > 1),
        key=lambda number: (-pieces[number].score, number),
    )
    merges = []
    for number in joined:
        piece = pieces[number].text
        halves = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        found = [(a, b) for a, b in halves if a in ids and b in ids]
        merges += sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def lower_cased(state: Mapping[str, Json]) -> dict[str, Json]:
    """Return a ``tokenizer.json`` with the rules of ``state`` that lower-cases the text first, as
    sentence-transformers changes a tokenizer for ``do_lower_case``."""
    steps = steps_of(state.get("normalizer"), "normalizers")
    return {**state, "normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *steps]}}


def lowers_first(state: Mapping[str, Json]) -> bool:
    """Return True if the first rule of ``state`` was added by :func:`lower_cased`."""
    steps = part_of(state, "normalizer").get("normalizers")
    return isinstance(steps, list) and steps[:1] == [{"type": "Lowercase"}]


def steps_of(part: Json, key: str) -> list[Mapping[str, Json]]:
    """Return the list of steps of a normalizer or pre-tokenizer ``part``, which is a single step or a sequence with
    its steps under ``key``."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        part = part.get(key)
    return [item for item in (part if isinstance(part, list) else [part]) if isinstance(item, dict)]


def added_tokens(state: Mapping[str, Json], name: str) -> dict[str, Mapping[str, Json]]:
    """Return the id and the flags of the added tokens by their content. Raises ``ValueError`` if ``added_tokens``
    is not a list of tokens."""
    tokens = state.get("added_tokens") or []
    if not isinstance(tokens, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) for token in tokens
    ):
        raise ValueError(f"{name}: added_tokens is not a list of tokens")
    return {token["content"]: {"id": None, **token} for token in tokens}


def merge_pairs(merges: Json, name: str) -> list[tuple[str, str]]:
    """Return ``merges`` as pairs. Raises ``ValueError`` if a merge is neither ``["a", "b"]`` nor ``"a b"``."""
    if not isinstance(merges, list):
        raise ValueError(f"{name}: the merges are missing")
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(half, str) for half in pair):
            raise ValueError(f"{name}: merge {str(pair)[:60]!r} is not a pair of pieces")
    return [(first, second) for first, second in pairs]
