"""Byte-level BPE of RoBERTa, kept as one canonical ``tokenizer.json``."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
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
    """The ``tokenizer.json`` of a byte-level BPE; equal arguments give equal bytes.

    ``pieces`` in id order, special ones included; ``merges`` by rank. ``add_prefix_space``: a text's first word is
    encoded as one after a blank. ``ValueError``, with ``name``, where a special piece is missing.
    """
    ids = {piece: i for i, piece in enumerate(pieces)}
    missing = [piece for piece in ROBERTA_PIECES if piece not in ids]
    if missing:
        raise ValueError(f"{name}: the vocabulary lacks {', '.join(missing)}")
    added = [
        {
            "id": ids[piece], "content": piece, "single_word": False, "lstrip": piece == "<mask>", "rstrip": False,
            "normalized": False, "special": True,
        }
        for piece in sorted(ROBERTA_PIECES, key=ids.__getitem__)
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}
    state = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
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


def _pieces(state: Any, name: str) -> list[str]:
    """Pieces in id order of a parsed ``tokenizer.json``; ``ValueError`` where it is not RoBERTa's."""
    model = state.get("model") if isinstance(state, Mapping) else None
    if not isinstance(model, Mapping) or model.get("type") != "BPE":
        raise ValueError(f"{name}: not a byte-level BPE; of tokenizer.json files only RoBERTa's are applied")
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, Mapping) or not vocabulary:
        raise ValueError(f"{name}: the vocabulary is empty")
    pieces = sorted(vocabulary, key=lambda piece: vocabulary[piece])
    if [vocabulary[piece] for piece in pieces] != list(range(len(pieces))):
        raise ValueError(f"{name}: the ids of the vocabulary are not 0 to {len(pieces) - 1}")
    missing = [piece for piece in ROBERTA_PIECES if piece not in vocabulary]
    if missing:
        raise ValueError(f"{name}: the vocabulary lacks {', '.join(missing)}")
    return pieces


class ByteBPETokenizer(Tokenizer):
    """RoBERTa's tokenizer from :func:`byte_bpe_content`; no text is unknown to it where all 256 bytes are pieces.

    A piece without the mark of a blank before it continues a word, but for the first one of a text. A pair is
    <s> a </s></s> b </s>, all of token type 0.
    """

    kind = "byte_bpe"
    special_pieces = ROBERTA_PIECES
    # The mask swallows the white space before it: it stands for a word with its blank.
    mask_pattern = re.compile(r"\s*<mask>")

    def __init__(self, content: bytes, *, name: str = "tokenizer.json") -> None:
        try:
            state = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}: not JSON ({error})") from None
        super().__init__(_pieces(state, name))
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{name}: not a tokenizer ({' '.join(str(error).split())})") from None
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

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encoded = self.encode_batch(texts)
        return np.array(list(chain.from_iterable(encoded)), np.int32), np.array(list(map(len, encoded)), np.int64)

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        row = self._tokenizer.encode(without_surrogates(text), add_special_tokens=False)
        return row.ids, row.offsets

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)
        return text

    def build_inputs(
        self, a: Sequence[int], b: Sequence[int] | None = None, max_length: int | None = None
    ) -> tuple[list[int], list[int]]:
        """<s> a </s> or <s> a </s></s> b </s>; otherwise as in :class:`Tokenizer`."""
        a, b = self._truncated(a, b, max_length, 2 if b is None else 4)
        ids = [self.cls_id, *a, self.sep_id]
        if b is not None:
            ids += [self.sep_id, *b, self.sep_id]
        return ids, [0] * len(ids)
