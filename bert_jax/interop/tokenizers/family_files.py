"""Builder of a ``tokenizer.json`` for folders that contain only the older files of their family.

The files are SentencePiece models (ALBERT, BigBird, CamemBERT, DeBERTa, XLM-R), ``vocab.json`` with
``merges.txt`` (GPT, GPT-2) and the ``vocab.txt`` of MPNet. Rules and ids follow ``convert_slow_tokenizer.py``
in transformers 4.57, which ``AutoTokenizer`` applies to such folders. Equal files yield equal bytes.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.processors import TemplateProcessing

from bert_jax.interop.tokenizers.json_format import parse_model, ranked_merges
from bert_jax.tokenization.byte_bpe import ROBERTA_PIECES

Json = dict[str, Any]
ALBERT_PIECES = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
GPT2_PIECE = "<|endoftext|>"
# Families whose tokenizer is in the SentencePiece file of this name.
SENTENCEPIECE_FILES = {
    "spiece.model": ("albert", "big_bird"),
    "sentencepiece.bpe.model": ("camembert", "xlm-roberta"),
    "spm.model": ("deberta-v2",),
}
# Types of a piece in sentencepiece_model.proto.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}


@dataclass(frozen=True)
class _Family:
    """Differences between the families of SentencePiece models."""

    special: tuple[str, ...]  # padding, unknown, first token, separator, mask
    replaced: int = 0  # this many pieces of the model are replaced with ``first``
    first: tuple[tuple[str, float], ...] = ()
    last: tuple[str, ...] = ()
    separators: int = 1


_FAIRSEQ = (("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0))
_CAMEMBERT = (
    ("<s>NOTUSED", 0.0), ("<pad>", 0.0), ("</s>NOTUSED", 0.0), ("<unk>", 0.0), ("<unk>NOTUSED", -100.0)
)  # fmt: skip
_FAMILIES = {
    "albert": _Family(ALBERT_PIECES),
    "big_bird": _Family(ALBERT_PIECES),
    "camembert": _Family(ROBERTA_PIECES, 1, _CAMEMBERT, ("<mask>",), separators=2),
    "deberta-v2": _Family(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")),
    "xlm-roberta": _Family(ROBERTA_PIECES, 3, _FAIRSEQ, ("<mask>",), separators=2),
}


def sentencepiece_family_json(content: bytes, family: str, settings: Mapping[str, Any], name: str) -> Json:
    """Return the ``tokenizer.json`` of a SentencePiece model of ``family``, a key of the table of families.

    ``settings`` (``tokenizer_config.json``) may contain ``do_lower_case``, ``keep_accents`` (ALBERT) and
    ``split_by_punct`` (DeBERTa). Raises ``ValueError`` for a damaged model, and for one with byte fallback or of a
    type other than unigram and BPE; the message begins with ``name``.
    """
    require_sentencepiece(content, name)
    parsed, trainer, normalizer = parse_model(content)
    kind = {1: "Unigram", 2: "BPE"}.get(trainer.get(3, 1))  # model_type
    if kind is None or trainer.get(35, 0):  # byte_fallback
        raise ValueError(
            f"{name}: allowed: SentencePiece models of the types unigram and BPE without byte fallback"
        )
    rules = _FAMILIES[family]
    scored = [*rules.first, *((piece.text, piece.score) for piece in parsed[rules.replaced :])]
    if family == "albert":
        scored = [(piece, score - 100 if _ends_in_digit_comma(piece) else score) for piece, score in scored]
    scored += [(piece, 0.0) for piece in rules.last]
    ids = {piece: i for i, (piece, _) in enumerate(scored)}
    unknown = rules.special[1] if rules.first else next(piece.text for piece in parsed if piece.type == _UNKNOWN)
    if kind == "Unigram":
        model: Json = {"type": "Unigram", "unk_id": ids[unknown], "vocab": scored, "byte_fallback": False}
    else:
        model = _bpe(ids, ranked_merges(parsed, ids), unk_token=unknown, fuse_unk=True)
    user_defined = [piece.text for piece in parsed if piece.type == _USER_DEFINED]
    control = [piece.text for piece in parsed if piece.type == _CONTROL]
    unused = [piece for piece, _ in rules.first if piece.endswith("NOTUSED")]
    special = dict.fromkeys([*rules.special, *control, *unused])
    added = _added(ids, special, (piece for piece in user_defined if piece not in special), rules.special[4])
    charsmap = normalizer.get(2)  # precompiled_charsmap
    splits: list[Json] = [_METASPACE]
    if family == "deberta-v2" and settings.get("split_by_punct"):
        splits.insert(0, {"type": "Punctuation", "behavior": "Isolated"})
    return _state(
        model, added,
        {"type": "Sequence", "normalizers": _normalizers(family, charsmap, settings)},
        {"type": "Sequence", "pretokenizers": splits},
        _METASPACE,
        _template(rules.special, ids, rules.separators),
    )  # fmt: skip


def require_sentencepiece(content: bytes, name: str) -> None:
    """Raise ``ValueError`` with a message that begins with ``name`` if ``content`` is not a SentencePiece model."""
    import sentencepiece

    try:
        sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(content)
    except RuntimeError:
        raise ValueError(f"{name}: not a SentencePiece model") from None


def gpt2_json(ids: dict[str, int], merges: Sequence[tuple[str, str]], *, add_prefix_space: bool = False) -> Json:
    """Return the ``tokenizer.json`` of GPT-2: byte-level BPE without special tokens around a text."""
    level = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}
    added = _added(ids, [GPT2_PIECE], (), "")
    return _state(_bpe(ids, merges), added, None, level, level, {**level, "trim_offsets": False})


def gpt_json(ids: dict[str, int], merges: Sequence[tuple[str, str]]) -> Json:
    """Return the ``tokenizer.json`` of GPT: lower-cased BPE whose pieces mark the end of a word with ``</w>``."""
    return _state(
        {**_bpe(ids, merges, unk_token="<unk>"), "end_of_word_suffix": "</w>"},
        _added(ids, ["<unk>"], (), ""),
        _bert_normalizer({}),
        {"type": "BertPreTokenizer"},
        {"type": "BPEDecoder", "suffix": "</w>"},
        None,
    )


def mpnet_json(pieces: Sequence[str], settings: Mapping[str, Any]) -> Json:
    """Return the ``tokenizer.json`` of MPNet: BERT's WordPiece with RoBERTa's special pieces, except [UNK]."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    special = ("<pad>", "[UNK]", "<s>", "</s>", "<mask>")
    return _state(
        {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": ids,
        },
        _added(ids, special, (), "<mask>"),
        _bert_normalizer(settings),
        {"type": "BertPreTokenizer"},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        _template(special, ids, 2),
    )  # fmt: skip


def with_added_tokens(state: Json, added: Sequence[Mapping[str, Any]], name: str) -> Json:
    """Return ``state`` with the further ``added`` tokens (``content``, ``id`` and, if known, the flags of
    ``tokenizer.json``). A token whose ``id`` is None has its vocabulary id, else the next free one. Raises
    ``ValueError`` if an id contradicts the vocabulary or leaves a gap."""
    vocab = state["model"]["vocab"]
    ids = {piece: i for i, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    entries = {entry["content"]: entry for entry in state["added_tokens"]}
    ids |= {piece: entry["id"] for piece, entry in entries.items()}
    for token in sorted(added, key=lambda token: (token["id"] is None, str(token["id"]).zfill(20))):
        piece = token["content"]
        if ids.setdefault(piece, len(ids)) != token["id"] and token["id"] is not None:
            raise ValueError(
                f"{name}: the added token {piece[:40]!r} has the id {str(token['id'])[:20]}, but the vocabulary "
                f"{ids[piece]}"
            )
        if piece not in entries:
            flags = {key: bool(token.get(key)) for key in ("single_word", "lstrip", "rstrip", "special")}
            stated = token.get("normalized")
            normalized = not flags["special"] if stated is None else bool(stated)
            entries[piece] = {"id": ids[piece], "content": piece, **flags, "normalized": normalized}
    return {**state, "added_tokens": sorted(entries.values(), key=lambda entry: int(entry["id"]))}


def serialized(state: Json) -> bytes:
    """Return ``state`` as the content of a file."""
    return json.dumps(state, ensure_ascii=False, separators=(",", ":")).encode()


def _ends_in_digit_comma(piece: str) -> bool:
    return len(piece) > 1 and piece.endswith(",") and piece[-2].isdigit()


def _normalizers(family: str, charsmap: bytes | None, settings: Mapping[str, Any]) -> list[Json]:
    def replace(pattern: Json, content: str) -> Json:
        return {"type": "Replace", "pattern": pattern, "content": content}

    spaces = {"Regex": " {2,}"}
    mapped = [] if not charsmap else [
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    ]  # fmt: skip
    lower = [{"type": "Lowercase"}]
    if family == "albert":
        steps = [replace({"String": quotes}, '"') for quotes in ("``", "''")]
        steps += [] if settings.get("keep_accents") else [{"type": "NFKD"}, {"type": "StripAccents"}]
        steps += lower if settings.get("do_lower_case", True) else []
        return [*steps, *mapped, replace(spaces, " ")]
    if family == "deberta-v2":
        steps = lower if settings.get("do_lower_case") else []
        strip = {"type": "Strip", "strip_left": True, "strip_right": True}
        return [*steps, strip, *mapped, replace(spaces, " ")]
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    return [*mapped, strip, replace(spaces, "\u2581")]


def _bert_normalizer(settings: Mapping[str, Any]) -> Json:
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
        "strip_accents": settings.get("strip_accents"),
        "lowercase": settings.get("do_lower_case", True),
    }


def _bpe(ids: Mapping[str, int], merges: Sequence[tuple[str, str]], **more: Any) -> Json:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": dict(ids), "merges": [list(merge) for merge in merges], **more,
    }  # fmt: skip


def _added(ids: dict[str, int], special: Any, plain: Any, mask: str) -> list[Json]:
    """Return the ``added_tokens``, and add the special pieces that ``ids`` lacks to ``ids``, after all others."""
    entries = [
        {
            "id": ids.setdefault(piece, len(ids)), "content": piece, "single_word": False, "lstrip": piece == mask,
            "rstrip": False, "normalized": False, "special": is_special,
        }
        for pieces, is_special in ((special, True), (plain, False))
        for piece in pieces
    ]  # fmt: skip
    return sorted(entries, key=lambda entry: entry["id"])


def _template(special: Sequence[str], ids: Mapping[str, int], separators: int) -> Json:
    first, separator = special[2:4]
    b = 1 if separators == 1 else 0
    made = TemplateProcessing(
        single=f"{first} $A {separator}",
        pair=f"{first} $A {f'{separator} ' * separators}$B:{b} {separator}:{b}",
        special_tokens=[(piece, ids[piece]) for piece in (first, separator)],
    )
    template: Json = json.loads(made.__getstate__())
    return template


def _state(
    model: Json, added: list[Json], normalizer: Any, pre_tokenizer: Json, decoder: Json, post_processor: Any
) -> Json:
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": post_processor, "decoder": decoder, "model": model,
    }  # fmt: skip
