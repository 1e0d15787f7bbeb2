"""Builder of a ``tokenizer.json`` for folders that contain only the older files of their family.

The files are SentencePiece models (ALBERT, BigBird, CamemBERT, DeBERTa, XLM-R), ``vocab.json`` with
``merges.txt`` (GPT, GPT-2) and the ``vocab.txt`` of MPNet. Rules and ids follow ``convert_slow_tokenizer.py``
in transformers 4.57, which ``AutoTokenizer`` applies to such folders. Equal files yield equal bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bert_jax.interop.tokenizers import json_format
from bert_jax.json_values import Json
from bert_jax.tokenization.byte_bpe import ROBERTA_PIECES
from bert_jax.tokenization.json_parts import added_entries, bpe_model, byte_level, part_of, tokenizer_json
from bert_jax.tokenization.json_tokenizer import GPT2_PIECE

ALBERT_PIECES = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
# Families whose tokenizer is in the SentencePiece file of this name.
SENTENCEPIECE_FILES = {
    "spiece.model": ("albert", "big_bird"),
    "sentencepiece.bpe.model": ("camembert", "xlm-roberta"),
    "spm.model": ("deberta-v2",),
}
# Types of a piece in sentencepiece_model.proto.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


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


def sentencepiece_family_json(
    content: bytes, family: str, settings: Mapping[str, Json], name: str
) -> dict[str, Json]:
    """Return the ``tokenizer.json`` of a SentencePiece model of ``family``, a key of the table of families.

    ``settings`` (``tokenizer_config.json``) may contain ``do_lower_case``, ``keep_accents`` (ALBERT) and
    ``split_by_punct`` (DeBERTa). Raises ``ValueError`` for a damaged model, and for one with byte fallback or of a
    type other than unigram and BPE; the message begins with ``name``.
    """
    require_sentencepiece(content, name)
    parsed, trainer, normalizer = json_format.parse_model(content)
    kind = json_format.model_kind(trainer)
    if kind is None or trainer.get(35, 0):  # byte_fallback
        rule = "use a SentencePiece model of the type unigram or BPE without byte fallback"
        raise ValueError(f"{name}: the type of the model, or its byte fallback, is not supported; {rule}")
    rules = _FAMILIES[family]
    scored = [*rules.first, *((piece.text, piece.score) for piece in parsed[rules.replaced :])]
    if family == "albert":
        digit_comma = {piece for piece, _ in scored if piece.endswith(",") and piece[-2:-1].isdigit()}
        scored = [(piece, score - 100 if piece in digit_comma else score) for piece, score in scored]
    scored += [(piece, 0.0) for piece in rules.last]
    ids = {piece: i for i, (piece, _) in enumerate(scored)}
    unknown = rules.special[1] if rules.first else next(piece.text for piece in parsed if piece.type == _UNKNOWN)
    if kind == "Unigram":
        model = json_format.unigram_model(scored, ids[unknown])
    else:
        model = bpe_model(ids, json_format.ranked_merges(parsed, ids), unk_token=unknown, fuse_unk=True)
    user_defined = [piece.text for piece in parsed if piece.type == _USER_DEFINED]
    control = [piece.text for piece in parsed if piece.type == _CONTROL]
    unused = [piece for piece, _ in rules.first if piece.endswith("NOTUSED")]
    special = dict.fromkeys([*rules.special, *control, *unused])
    added = added_entries(ids, special, (piece for piece in user_defined if piece not in special), rules.special[4])
    marks = json_format.metaspace(split=True)
    splits: list[Json] = [marks]
    if family == "deberta-v2" and settings.get("split_by_punct"):
        splits.insert(0, {"type": "Punctuation", "behavior": "Isolated"})
    return tokenizer_json(
        added_tokens=added,
        **json_format.sequences(_normalizers(family, json_format.character_map(normalizer), settings), splits),
        post_processor=json_format.template(rules.special, ids, rules.separators),
        decoder=marks,
        model=model,
    )


def require_sentencepiece(content: bytes, name: str) -> None:
    """Raise ``ValueError`` with a message that begins with ``name`` if ``content`` is not a SentencePiece model."""
    import sentencepiece

    try:
        sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(content)
    except RuntimeError:
        raise ValueError(f"{name}: not a SentencePiece model") from None


def gpt2_json(ids: dict[str, int], merges: Sequence[tuple[str, str]], add_prefix_space: bool) -> dict[str, Json]:
    """Return the ``tokenizer.json`` of GPT-2: byte-level BPE without special tokens around a text."""
    level = byte_level(add_prefix_space)
    return tokenizer_json(
        added_tokens=added_entries(ids, [GPT2_PIECE]),
        normalizer=None,
        pre_tokenizer=level,
        post_processor={**level, "trim_offsets": False},
        decoder=level,
        model=bpe_model(ids, merges),
    )


def gpt_json(ids: dict[str, int], merges: Sequence[tuple[str, str]]) -> dict[str, Json]:
    """Return the ``tokenizer.json`` of GPT: lower-cased BPE whose pieces mark the end of a word with ``</w>``."""
    return tokenizer_json(
        added_tokens=added_entries(ids, ["<unk>"]),
        **_bert_rules({}),
        post_processor=None,
        decoder={"type": "BPEDecoder", "suffix": "</w>"},
        model=bpe_model(ids, merges, unk_token="<unk>", end_of_word_suffix="</w>"),
    )


def mpnet_json(pieces: Sequence[str], settings: Mapping[str, Json]) -> dict[str, Json]:
    """Return the ``tokenizer.json`` of MPNet: BERT's WordPiece with RoBERTa's special pieces, except [UNK]."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    special = ("<pad>", "[UNK]", "<s>", "</s>", "<mask>")
    return tokenizer_json(
        added_tokens=added_entries(ids, special),
        **_bert_rules(settings),
        post_processor=json_format.template(special, ids, 2),
        **json_format.wordpiece_parts(ids, 100),
    )


def _bert_rules(settings: Mapping[str, Json]) -> json_format.Rules:
    return json_format.bert_rules(
        lower_case=settings.get("do_lower_case", True), strip_accents=settings.get("strip_accents"),
        split_cjk=settings.get("tokenize_chinese_chars", True),
    )  # fmt: skip


def with_added_tokens(
    state: Mapping[str, Json], added: Mapping[str, Mapping[str, Json]], name: str
) -> dict[str, Json]:
    """Return ``state`` with the further ``added`` tokens: content -> ``id`` and, if known, the flags of
    ``tokenizer.json``. A token whose ``id`` is None has its vocabulary id, else the next free one. Raises
    ``ValueError`` if an id contradicts the vocabulary or leaves a gap."""
    vocab, entries = part_of(state, "model").get("vocab"), json_format.added_tokens(state, name)
    ids: dict[Json, Json] = dict(vocab) if isinstance(vocab, dict) else {}
    if isinstance(vocab, list):
        ids = {item[0]: number for number, item in enumerate(vocab)}
    ids |= {piece: entry["id"] for piece, entry in entries.items()}
    for piece, token in sorted(
        added.items(), key=lambda item: (item[1]["id"] is None, str(item[1]["id"]).zfill(20))
    ):
        if ids.setdefault(piece, len(ids)) != token["id"] and token["id"] is not None:
            problem = f"has the id {str(token['id'])[:20]}, but the vocabulary {ids[piece]}"
            raise ValueError(f"{name}: the added token {piece[:40]!r} {problem}")
        if piece not in entries:
            flags = {key: bool(token.get(key)) for key in ("single_word", "lstrip", "rstrip", "special")}
            normalized = token.get("normalized")
            normalized = not flags["special"] if normalized is None else bool(normalized)
            entries[piece] = {"id": ids[piece], "content": piece, **flags, "normalized": normalized}
    tokens = sorted(entries.values(), key=lambda entry: int(str(entry["id"])))
    return {**state, "added_tokens": tokens}


def _normalizers(family: str, mapped: Sequence[Json], settings: Mapping[str, Json]) -> list[Json]:
    """Return the normalizers of ``family``; ``mapped`` is that of its map of characters."""
    lower: list[Json] = [{"type": "Lowercase"}]
    strip: dict[str, Json] = {"type": "Strip", "strip_left": family == "deberta-v2", "strip_right": True}
    if family == "albert":
        steps: list[Json] = [json_format.replace(quotes, '"', "String") for quotes in ("``", "''")]
        steps += [] if settings.get("keep_accents") else [{"type": "NFKD"}, {"type": "StripAccents"}]
        steps += lower if settings.get("do_lower_case", True) else []
        return [*steps, *mapped, json_format.replace(" {2,}", " ")]
    if family == "deberta-v2":
        steps = lower if settings.get("do_lower_case") else []
        return [*steps, strip, *mapped, json_format.replace(" {2,}", " ")]
    return [*mapped, strip, json_format.replace(" {2,}", "\u2581")]
