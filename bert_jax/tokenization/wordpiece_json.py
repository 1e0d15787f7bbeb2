"""BERT's WordPiece in a ``tokenizer.json``, as the ``tokenizers`` library and ``AutoTokenizer`` write it."""

from collections.abc import Mapping

from bert_jax.json_values import Json
from bert_jax.tokenization.json_parts import part_of, pieces_by_id
from bert_jax.tokenization.wordpiece import WordPieceTokenizer, read_pieces


def is_wordpiece(state: Json) -> bool:
    """Return True if ``state``, a parsed ``tokenizer.json``, has a WordPiece model (older files name no type)."""
    model = part_of(state, "model")
    return model.get("type") == "WordPiece" or ("type" not in model and "vocab" in model and "merges" not in model)


def wordpiece_of(state: Mapping[str, Json], name: str) -> WordPieceTokenizer:
    """Return the tokenizer of ``state``, whose normalizer sets case, accents and CJK.

    Words of 101 to 200 characters are split into pieces, as for a ``vocab.txt``. Raises ``ValueError``, with a
    message that begins with ``name``, for rules that BERT does not have.
    """
    model, rules, splits = (part_of(state, part) for part in ("model", "normalizer", "pre_tokenizer"))
    added = state.get("added_tokens") or []
    kinds = {"id": int, "content": str}
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and all(isinstance(token.get(key), kind) for key, kind in kinds.items())
        for token in added
    ):
        raise ValueError(f"{name}: added_tokens is damaged: each needs a number, id, and a string, content")
    pieces = pieces_by_id(model.get("vocab"), name)
    known = set(pieces)
    beyond = sorted((token["id"], token["content"]) for token in added if token["content"] not in known)
    faults = {
        "its rules are not BertNormalizer and BertPreTokenizer": (rules.get("type"), splits.get("type"))
        != ("BertNormalizer", "BertPreTokenizer"),
        "clean_text is false": rules.get("clean_text", True) is not True,
        "its pieces inside words do not begin with ##": model.get("continuing_subword_prefix", "##") != "##",
        "the ids of added tokens do not follow those of the vocabulary": [number for number, _ in beyond]
        != list(range(len(pieces), len(pieces) + len(beyond))),
    }
    if found := [fault for fault, is_there in faults.items() if is_there]:
        raise ValueError(f"{name}: a WordPiece that is not BERT's: {found[0]}; use the vocab.txt of a BERT model")
    content = "".join(f"{piece}\n" for piece in [*pieces, *(piece for _, piece in beyond)])
    try:
        listed = read_pieces(content.encode(), name)
    except UnicodeEncodeError:
        raise ValueError(f"{name}: a piece holds half of a surrogate pair; remove it") from None
    if len(listed) != len(pieces) + len(beyond):
        raise ValueError(f"{name}: a piece holds a line break, which no text contains; use another vocabulary")
    lower_case, strip = rules.get("lowercase", True) is True, rules.get("strip_accents")
    return WordPieceTokenizer(
        listed, lower_case=lower_case, strip_accents=strip if isinstance(strip, bool) else None,
        split_cjk=rules.get("handle_chinese_chars", True) is True,
    )  # fmt: skip
