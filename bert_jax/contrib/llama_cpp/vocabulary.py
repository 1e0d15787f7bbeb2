"""The vocabulary of a GGUF file: its keys ``tokenizer.*``, and the tokenizer that these keys describe."""

import json
from collections.abc import Mapping
from typing import Any

from bert_jax.config import TokenizerConfig
from bert_jax.json_values import Json
from bert_jax.tokenization import build_tokenizer

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# Key of the file -> attribute of our tokenizer.
_IDS = {"bos": "cls", "eos": "sep", "seperator": "sep", "unknown": "unk", "padding": "pad", "mask": "mask"}
_JSON = "tokenizer.huggingface.json"


def written(rules: TokenizerConfig | None, content: bytes | None, rows: int) -> dict[str, Json]:
    """Return the keys of a tokenizer for a word embedding table with so many ``rows``.

    Raises ``ValueError`` for a tokenizer that llama.cpp does not have: all but WordPiece, uncased and with CJK
    characters as words, and byte-level BPE.
    """
    if rules is None or content is None:
        raise ValueError("gguf: the model has no vocabulary, which the format requires")
    tokenizer = build_tokenizer(rules, content, rules.file)
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    types = [_CONTROL if is_special else _NORMAL for is_special in tokenizer.special]
    types[tokenizer.unk_id] = _UNKNOWN
    if rules.file.endswith(".txt"):
        pieces, more = _wordpiece(rules, pieces)
    else:
        more = _byte_bpe(content, types)
    pieces = [*pieces, *(f"[PAD{i}]" for i in range(len(pieces), rows))]
    types += [_CONTROL] * (rows - len(types))
    ids = {f"tokenizer.ggml.{key}_token_id": getattr(tokenizer, f"{name}_id") for key, name in _IDS.items()}
    framed = dict.fromkeys(("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"), True)
    return {"tokenizer.ggml.tokens": pieces, "tokenizer.ggml.token_type": types, **more, **ids, **framed}


def _wordpiece(rules: TokenizerConfig, pieces: list[str]) -> tuple[list[str], dict[str, Json]]:
    """Return the pieces and the other keys of a WordPiece vocabulary."""
    if not (rules.lower_case and rules.strip_accents in (None, True) and rules.split_cjk and not rules.cjk_words):
        raise ValueError("gguf: llama.cpp lower-cases texts and splits CJK characters; the tokenizer does not")
    for piece in pieces:
        if _our_piece(_their_piece(piece)) != piece:
            raise ValueError(
                f"gguf: the piece {piece!r} of the vocabulary has the name of another one in llama.cpp"
            )
    return [_their_piece(piece) for piece in pieces], {"tokenizer.ggml.model": "bert"}


def _is_bracketed(piece: str) -> bool:
    return len(piece) > 2 and piece[0] == "[" and piece[-1] == "]"


def _their_piece(piece: str) -> str:
    """Return ``piece`` as llama.cpp stores it: U+2581 marks the first piece of a word."""
    if _is_bracketed(piece):
        return piece
    return piece[2:] if len(piece) > 2 and piece.startswith("##") else f"\u2581{piece}"


def _our_piece(piece: str) -> str:
    if _is_bracketed(piece):
        return piece
    return piece[1:] if piece[:1] == "\u2581" else f"##{piece}"


def _byte_bpe(content: bytes, types: list[int]) -> dict[str, Json]:
    """Return the keys of a byte-level BPE; set the types of added tokens in ``types``."""
    state: dict[str, Any] = json.loads(content) if content[:1] == b"{" else {}
    model, steps = state.get("model") or {}, state.get("pre_tokenizer") or {}
    is_plain = steps.get("type") == "ByteLevel" and not steps.get("add_prefix_space")
    if model.get("type") != "BPE" or not is_plain or not isinstance(state.get("normalizer"), dict | None):
        raise ValueError(
            "gguf: llama.cpp does not support the tokenizer of this model; supported: uncased WordPiece, "
            "byte-level BPE"
        )
    for token in state["added_tokens"]:
        types[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "modern-bert", "tokenizer.ggml.merges": merges,
        _JSON: content.decode(),
    }  # fmt: skip


def read(values: Mapping[str, Any]) -> tuple[TokenizerConfig, bytes]:
    """Return the tokenizer that the keys of a file describe, as :func:`written` writes them.

    Raises ``LookupError`` for a missing key, and ``ValueError`` for another tokenizer.
    """
    kind = values["tokenizer.ggml.model"]
    if kind == "bert":
        pieces = [_our_piece(piece) for piece in values["tokenizer.ggml.tokens"]]
        return TokenizerConfig(), "".join(f"{piece}\n" for piece in pieces).encode()
    if _JSON in values:
        return TokenizerConfig(file="tokenizer.json"), values[_JSON].encode()
    raise ValueError(f"its tokenizer is {kind!r}, without {_JSON}; supported: bert, and others with that key")
