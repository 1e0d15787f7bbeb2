"""Byte-level BPE of RoBERTa, stored as one canonical ``tokenizer.json``."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from bert_jax.tokenization.tokenizer import Offsets, Tokenizer, without_surrogates

ROBERTA_PIECES = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")


def byte_bpe_content(
    pieces: Sequence[str],
    merges: Iterable[Sequence[str]],
    *,
    add_prefix_space: bool = False,
    name: str = "tokenizer.json",
) -> bytes:
    """Return the ``tokenizer.json`` of a byte-level BPE; equal arguments yield equal bytes.

    ``pieces`` are sorted by id and include the special pieces; ``merges`` are sorted by rank. With
    ``add_prefix_space``, the first word of a text is encoded as if it followed a space. Raises ``ValueError`` with
    a message that begins with ``name`` if a special piece is missing.
    """
    _require_special(pieces, name)
    ids = {piece: i for i, piece in enumerate(pieces)}
    level = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}
    state = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special_entries(ROBERTA_PIECES, ids),
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": ["</s>", ids["</s>"]],
            "cls": ["<s>", ids["<s>"]],
            "trim_offsets": True,
            "add_prefix_space": add_prefix_space,
        },
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": ids, "merges": [list(merge) for merge in merges],
        },
    }  # fmt: skip
    return json.dumps(state, ensure_ascii=False, separators=(",", ":")).encode()


def special_entries(special: Sequence[str], ids: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the ``added_tokens`` of a ``tokenizer.json`` for the ``special`` pieces, sorted by id."""
    return [
        {
            "id": ids[piece], "content": piece, "single_word": False, "lstrip": piece == "<mask>", "rstrip": False,
            "normalized": False, "special": True,
        }
        for piece in sorted(special, key=ids.__getitem__)
    ]  # fmt: skip


def pieces_by_id(table: Any, name: str) -> list[str]:
    """Return the pieces of ``table``, a JSON object that maps pieces to ids, sorted by id.

    Raises ``ValueError`` unless the ids are 0 to N - 1.
    """
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{name}: the vocabulary is empty")
    pieces = {number: piece for piece, number in table.items() if type(number) is int}
    if sorted(pieces) != list(range(len(table))):
        raise ValueError(f"{name}: the ids of the vocabulary must be 0 to {len(table) - 1}, each exactly once")
    return [pieces[number] for number in range(len(table))]


def _require_special(pieces: Sequence[str], name: str) -> None:
    if missing := sorted(set(ROBERTA_PIECES).difference(pieces), key=ROBERTA_PIECES.index):
        raise ValueError(
            f"{name}: the vocabulary lacks {', '.join(missing)}; it must contain {', '.join(ROBERTA_PIECES)}"
        )


class ByteBPETokenizer(Tokenizer):
    """RoBERTa's tokenizer, built from the content that :func:`byte_bpe_content` returns.

    The tokenizer can encode any text if the vocabulary contains all 256 bytes. A piece without the leading-space
    marker continues a word, unless it is the first piece of a text. A pair is encoded as ``<s> a </s></s> b </s>``,
    all with token type 0.
    """

    kind = "byte_bpe"
    special_pieces = ROBERTA_PIECES
    # The mask piece includes the white space before it, because it replaces a word and the blank before the word.
    mask_pattern = re.compile(r"\s*<mask>")
    separators, second_type = 2, 0
    space_before_word = True

    def __init__(self, content: bytes, *, name: str = "tokenizer.json") -> None:
        try:
            state = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}: not JSON ({error})") from None
        model = state.get("model") if isinstance(state, dict) else None
        if not isinstance(model, dict) or model.get("type") != "BPE":
            raise ValueError(f"{name}: not a byte-level BPE; allowed: a tokenizer.json like that of RoBERTa")
        pieces = pieces_by_id(model.get("vocab"), name)
        _require_special(pieces, name)
        super().__init__(pieces)
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises no narrower type
            raise ValueError(f"{name}: not a valid tokenizer ({' '.join(str(error).split())})") from None
        self._tokenizer.encode_special_tokens = True  # "<mask>" in a text is plain text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.lower_case = False
        self.continuation[:] = [not piece.startswith("\u0120") for piece in self._pieces]
        self.continuation[[self.piece_id(piece) for piece in ROBERTA_PIECES]] = False
        self.fingerprint = hashlib.sha256(b"byte_bpe\n" + content).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        safe = list(map(without_surrogates, texts))
        return [row.ids for row in self._tokenizer.encode_batch_fast(safe, add_special_tokens=False)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        row = self._tokenizer.encode(without_surrogates(text), add_special_tokens=False)
        return row.ids, row.offsets

    def encode_with_words(self, text: str) -> tuple[list[int], list[int]]:
        row = self._tokenizer.encode(without_surrogates(text), add_special_tokens=False)
        return row.ids, row.word_ids

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)
        return text
