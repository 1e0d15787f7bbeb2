"""Tokenizers stored as a ``tokenizer.json`` of any kind, run by the ``tokenizers`` library."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tokenizers

from bert_jax.json_values import Json
from bert_jax.tokenization.byte_bpe import ROBERTA_PIECES, LibraryTokenizer
from bert_jax.tokenization.json_parts import part_of
from bert_jax.tokenization.tokenizer import SPECIAL_PIECES, Offsets, without_surrogates

_MODELS = ("BPE", "Unigram", "WordPiece")
# The only special piece of GPT-2; GPT has only "<unk>".
GPT2_PIECE = "<|endoftext|>"
# Pieces that frame the inputs of a fine-tuned GPT: start, delimiter, extract, and padding, which comes last, as in
# the folders of GPT-2.
INPUT_PIECES = ("_start_", "_delimiter_", "_classify_", "<pad>")
# Names that are plain text in a text, as the special pieces of a tokenizer are.
_PLAIN = {*SPECIAL_PIECES, *ROBERTA_PIECES, *INPUT_PIECES, GPT2_PIECE}


def is_general(state: Mapping[str, Json]) -> bool:
    """Return True if ``state``, a parsed ``tokenizer.json``, is neither BERT's WordPiece nor RoBERTa's byte-level
    BPE, which have separate classes, or if it has added tokens other than their special pieces."""
    return has_own_rules(state) or (part_of(state, "model").get("type") in _MODELS and bool(foreign_tokens(state)))


def foreign_tokens(state: Mapping[str, Json]) -> list[str]:
    """Return the added tokens of ``state``, a parsed ``tokenizer.json``, other than the special pieces; they are
    matched in a text before any rule applies."""
    return [name for name in _added_names(state) if name not in _PLAIN]


def _added_names(state: Mapping[str, Json]) -> list[str]:
    added = state.get("added_tokens")
    names = [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return [name for name in names if isinstance(name, str)]


def has_own_rules(state: Mapping[str, Json]) -> bool:
    """Return True if the rules of ``state`` are neither those of BERT's WordPiece nor those of RoBERTa's byte-level
    BPE; see :func:`is_general`."""
    model = part_of(state, "model")
    if model.get("type") not in _MODELS:
        return False
    if model["type"] == "BPE":
        processor = _types(state.get("post_processor"))
        is_gpt = bool(model.get("end_of_word_suffix")) or _is_gpt2(state) or bool(state.get("normalizer"))
        return is_gpt or processor.isdisjoint({"RobertaProcessing", "ByteLevel", None})
    return (
        model["type"] == "Unigram"
        or model.get("unk_token", "[UNK]") != "[UNK]"
        or "<s>" in _framing(state.get("post_processor"))
    )


def _is_gpt2(state: Mapping[str, Json]) -> bool:
    """Return True if <|endoftext|> is a special token and no piece marks the end of a text."""
    names, vocab = _added_names(state), part_of(state, "model").get("vocab")
    return GPT2_PIECE in names and isinstance(vocab, dict) and not {"</s>", "[SEP]"} & {*names, *vocab}


def _types(step: Json) -> set[Json]:
    """Return the types of a step of ``tokenizer.json`` and of the steps in it."""
    if not isinstance(step, dict):
        return {None}
    inner = [part for key in ("processors", "pretokenizers") for part in step.get(key) or []]
    return {step.get("type")}.union(*map(_types, inner)) if inner else {step.get("type")}


def _framing(processor: Json) -> set[str]:
    """Return which of [CLS] and <s> a post-processor adds to a text."""
    text = json.dumps(processor, ensure_ascii=False)
    return {piece for piece in ("[CLS]", "<s>") if json.dumps(piece) in text}


def _names(state: Mapping[str, Any], table: Mapping[str, int]) -> tuple[str, ...]:
    """Return the pieces for padding, unknown, first token, separator and mask.

    The post-processor states the first token and the separator, and the model states the unknown piece. Of [PAD]
    and <pad>, and of [MASK] and <mask>, the one of the same style is chosen if ``table`` contains it. The only
    special piece of GPT and of GPT-2 has all five roles.
    """
    model = state["model"]
    framing = _framing(state.get("post_processor"))
    only = GPT2_PIECE if GPT2_PIECE in table else model.get("unk_token")
    if not framing and only and not {"[SEP]", "</s>"} & set(table):
        if set(INPUT_PIECES) <= set(table):
            return INPUT_PIECES[3], only, *INPUT_PIECES[:2], only
        return next((pad for pad in ("<pad>", "[PAD]") if pad in table), only), *(only,) * 4
    own, other = (ROBERTA_PIECES, SPECIAL_PIECES) if "<s>" in framing else (SPECIAL_PIECES, ROBERTA_PIECES)
    pad, unk, first, separator, mask = (
        a if a in table or b not in table else b for a, b in zip(own, other, strict=True)
    )
    if model["type"] == "Unigram" and isinstance(model.get("unk_id"), int):
        unk = model["vocab"][model["unk_id"]][0]
    return pad, model.get("unk_token") or unk, first, separator, mask


def with_input_pieces(content: bytes) -> bytes:
    """Return the ``tokenizer.json`` of a GPT with :data:`INPUT_PIECES` after its last piece, and a post-processor
    that frames a text as _start_ A _classify_ and a pair as _start_ A _delimiter_ B _classify_."""
    tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    start, delimiter, extract, _ = INPUT_PIECES
    tokenizer.add_special_tokens([tokenizers.AddedToken(piece, special=True) for piece in INPUT_PIECES])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{start} $A {extract}", pair=f"{start} $A {delimiter} $B:0 {extract}:0",
        special_tokens=[(piece, tokenizer.token_to_id(piece)) for piece in INPUT_PIECES[:3]],
    )  # fmt: skip
    return tokenizer.to_str(pretty=True).encode()


class JsonTokenizer(LibraryTokenizer):
    """The tokenizer of a ``tokenizer.json``, whose normalizer, pre-tokenizer, model and added tokens apply exactly.

    The special pieces are those of BERT ([PAD], [UNK], [CLS], [SEP], [MASK]), of RoBERTa (<pad>, <unk>, <s>,
    </s>, <mask>) or of both, and the post-processor frames texts with the first token and the separator. It
    states the number of separators and the token type of the second text. GPT-2 and GPT have one special piece,
    <|endoftext|> or <unk>, and no frame except :func:`with_input_pieces`. Other added tokens are found in the
    text before any rule applies. Raises ``ValueError`` for any other file; the message begins with ``name``.
    """

    kind = "json"

    def __init__(self, content: bytes, *, name: str = "tokenizer.json") -> None:
        try:
            state = json.loads(content)
            self._load_state(state, content.decode())
        except Exception as error:  # the library raises no narrower type
            raise ValueError(f"{name}: not a valid tokenizer ({' '.join(str(error).split())})") from None
        table = self._tokenizer.get_vocab(with_added_tokens=True)
        pieces: list[Any] = [self._tokenizer.id_to_token(i) for i in range(max(table.values(), default=-1) + 1)]
        if None in pieces:
            raise ValueError(f"{name}: no piece has the id {pieces.index(None)}; the ids must be 0 to N - 1")
        self.special_pieces = _names(state, table)
        self.framed = self.special_pieces[2] in ("[CLS]", "<s>", INPUT_PIECES[0])
        if missing := [piece for piece in self.special_pieces if piece not in table]:
            remedy = f"it must contain {', '.join(SPECIAL_PIECES)} or {', '.join(ROBERTA_PIECES)}"
            raise ValueError(f"{name}: the vocabulary lacks {', '.join(missing)}; {remedy}")
        super().__init__(pieces)
        if self.special_pieces[2] == INPUT_PIECES[0]:
            self.end_id = self.piece_id(INPUT_PIECES[2])
        self._read_frame(name)
        added = self._tokenizer.get_added_tokens_decoder()
        special = [token["content"] for token in state.get("added_tokens") or () if token.get("special")]
        self.special[[self.piece_id(piece) for piece in special]] = True
        self.special[self.unk_id] = self.special_pieces[1] == GPT2_PIECE
        mask = added.get(self.mask_id)
        left, right = (r"\s*" if getattr(mask, side, False) else "" for side in ("lstrip", "rstrip"))
        self.mask_pattern = re.compile(left + re.escape(self.special_pieces[4]) + right)
        normalizer = self._tokenizer.normalizer
        self.lower_case = normalizer is not None and "a" in normalizer.normalize_str("A")
        types = _types(state.get("pre_tokenizer"))
        mark = "\u0120" if "ByteLevel" in types else "\u2581" if "Metaspace" in types else ""
        self.space_before_word = "ByteLevel" in types
        starts = [piece.startswith(mark) if mark else not piece.startswith("##") for piece in pieces]
        self.continuation[:] = np.logical_not(starts)
        if state["model"].get("end_of_word_suffix"):
            self.continuation[:] = False  # the suffix marks the ends of words, and any piece may begin one
        self.continuation[[*added, self.unk_id]] = False
        self.fingerprint = hashlib.sha256(b"json\n" + content).hexdigest()
        if state["model"]["type"] == "Unigram":
            self._hide_special(state)

    def _load_state(self, state: Mapping[str, Any], text: str = "") -> None:
        """Build the tokenizer of ``state``; ``text`` is the same content as JSON. Special pieces are plain text in
        a text; other special tokens are found there, like all added tokens."""
        found = {*foreign_tokens(state)}
        if any(token.get("special") and token["content"] in found for token in state.get("added_tokens") or ()):
            plain = [
                {**token, "special": token["content"] not in found and token.get("special", False)}
                for token in state["added_tokens"]
            ]
            state, text = {**state, "added_tokens": plain}, ""
        self._load(text or json.dumps(state))

    def _read_frame(self, name: str) -> None:
        """Set ``separators`` and ``second_type`` to those of the post-processor, which must frame a text unless
        ``framed`` is False."""
        # One ordinary piece as the second text shows the token types.
        probe = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": self.vocab_size}, unk_token="x"))
        x = probe.encode("x")
        single, joined = (self._tokenizer.post_process(x, other) for other in (None, probe.encode("x")))
        if not self.framed:
            if single.ids != [self.vocab_size] or joined.ids != [self.vocab_size] * 2:
                raise ValueError(f"{name}: the post-processor must not add pieces to the texts of GPT and GPT-2")
            self.second_type = 0
            return
        self.separators = len(joined.ids) - 4
        frame = [self.cls_id, self.vocab_size, *[self.sep_id] * self.separators, self.vocab_size, self.end_id]
        self.second_type = joined.type_ids[-1]
        types = [0] * (2 + self.separators) + [self.second_type] * 2
        right = single.ids == [self.cls_id, self.vocab_size, self.end_id] and not any(single.type_ids)
        if not right or joined.ids != frame or joined.type_ids != types:
            first, separator = self.special_pieces[2:4]
            raise ValueError(
                f"{name}: the post-processor must make {first} A {separator} of one text and {first} A {separator} "
                f"B {separator} of two, with one or more {separator} between them"
            )

    def _hide_special(self, state: Mapping[str, Any]) -> None:
        """Give the special pieces names that no text contains.

        A Unigram model would find the original names in a text, because they are pieces of the model.
        """
        found = {*foreign_tokens(state)}
        special = [i for i in np.flatnonzero(self.special).tolist() if self._pieces[i] not in found]
        names = {self._pieces[i]: f"\ufdd0{i}\ufdd1" for i in special}
        names[self._pieces[self.unk_id]] = "\ufdd0\ufdd1"
        vocab = [(names.get(piece, piece), score) for piece, score in state["model"]["vocab"]]
        added = [
            {**token, "content": names.get(token["content"], token["content"])} for token in state["added_tokens"]
        ]
        model = {**state["model"], "vocab": vocab}
        self._load_state({**state, "model": model, "added_tokens": added, "post_processor": None})

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        row = self._tokenizer.encode(without_surrogates(text), add_special_tokens=False)
        offsets: Offsets = []
        for start, end in row.offsets:
            # The range of a piece that begins with a space mark may include the white space before the word.
            first = start
            while first < end and text[first].isspace():
                first += 1
            offsets.append((first if first < end else start, end))
        return row.ids, offsets

    def decode(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        for is_special, group in itertools.groupby(
            map(int, ids), lambda i: i == self.unk_id or bool(self.special[i])
        ):
            run = list(group)
            parts += self.pieces(run) if is_special else [self._tokenizer.decode(run, skip_special_tokens=False)]
        return ("" if self.space_before_word else " ").join(part for part in parts if part)
