"""Byte-level BPE of RoBERTa, stored as one canonical ``tokenizer.json``."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

from bert_jax.tokenization import json_parts
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
    level = json_parts.byte_level(add_prefix_space)
    state = json_parts.tokenizer_json(
        added_tokens=json_parts.added_entries(ids, ROBERTA_PIECES),
        normalizer=None,
        pre_tokenizer=level,
        post_processor={
            "type": "RobertaProcessing", "sep": ["</s>", ids["</s>"]], "cls": ["<s>", ids["<s>"]],
            "trim_offsets": True, "add_prefix_space": add_prefix_space,
        },
        decoder=level,
        model=json_parts.bpe_model(ids, merges, continuing_subword_prefix="", end_of_word_suffix=""),
    )  # fmt: skip
    return json_parts.serialized(state)


def _require_special(pieces: Sequence[str], name: str) -> None:
    if missing := sorted(set(ROBERTA_PIECES).difference(pieces), key=ROBERTA_PIECES.index):
        remedy = f"it must contain {', '.join(ROBERTA_PIECES)}"
        raise ValueError(f"{name}: the vocabulary lacks {', '.join(missing)}; {remedy}")


class LibraryTokenizer(Tokenizer):
    """A tokenizer that the ``tokenizers`` library runs. Special pieces in a text are plain text."""

    def _load(self, content: str) -> None:
        """Build the tokenizer of the ``tokenizer.json`` ``content``."""
        self._tokenizer: Any = tokenizers.Tokenizer.from_str(content)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        safe = list(map(without_surrogates, texts))
        return [row.ids for row in self._tokenizer.encode_batch_fast(safe, add_special_tokens=False)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        row = self._tokenizer.encode(without_surrogates(text), add_special_tokens=False)
        return row.ids, row.offsets

    def encode_with_words(self, text: str) -> tuple[list[int], list[int]]:
        row = self._tokenizer.encode(without_surrogates(text), add_special_tokens=False)
        return row.ids, row.word_ids


class ByteBPETokenizer(LibraryTokenizer):
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
    lower_case = False

    def __init__(self, content: bytes, *, name: str = "tokenizer.json") -> None:
        try:
            model = json_parts.part_of(json.loads(content), "model")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}: not JSON ({error})") from None
        if model.get("type") != "BPE":
            raise ValueError(f"{name}: not a byte-level BPE; use a tokenizer.json like that of RoBERTa")
        pieces = json_parts.pieces_by_id(model.get("vocab"), name)
        _require_special(pieces, name)
        super().__init__(pieces)
        try:
            self._load(content.decode())
        except Exception as error:  # the library raises no narrower type
            raise ValueError(f"{name}: not a valid tokenizer ({' '.join(str(error).split())})") from None
        self.continuation[:] = [not piece.startswith("\u0120") for piece in self._pieces]
        self.continuation[[self.piece_id(piece) for piece in ROBERTA_PIECES]] = False
        self.fingerprint = hashlib.sha256(b"byte_bpe\n" + content).hexdigest()

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=False))
