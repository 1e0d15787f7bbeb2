"""The interface of every tokenizer: ids, offsets, model inputs."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Code points that UTF-8 cannot hold, left in a text by broken decoding.
_SURROGATE = re.compile("[\ud800-\udfff]")

Offsets = list[tuple[int, int]]


def longest_first(a: int, b: int, budget: int) -> tuple[int, int]:
    """Return the numbers of tokens that are kept of a pair of ``a`` and ``b`` tokens when ``budget`` fit.

    The shorter side stays whole where at least as much is left for the other; else each gets half, the odd one goes
    to the longer side, to ``b`` when they are equal: ``longest_first`` of Hugging Face's tokenizers.
    """
    if a + b <= budget:
        return a, b
    short = min(a, b)
    if 2 * short > budget:
        short = budget // 2
    return (short, budget - short) if a <= b else (budget - short, short)


def without_surrogates(text: str) -> str:
    """``text`` with U+FFFD for every lone surrogate; as long as before."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


class Tokenizer(ABC):
    """A vocabulary and the rules that turn text into its ids.

    ``continuation`` (bool[vocab_size]) marks pieces that continue the word before them; ``special``
    (bool[vocab_size]) marks control pieces, which no text yields ([UNK] is none). ``fingerprint`` (hex sha256)
    covers kind, settings and all pieces in order.
    """

    kind: Literal["wordpiece", "sentencepiece", "byte_bpe"]
    # Padding, unknown, first token, separator, mask.
    special_pieces: tuple[str, ...] = SPECIAL_PIECES
    # What stands where a mask is meant: text that ``encode_with_masks`` takes for the mask piece.
    mask_pattern: re.Pattern[str] = re.compile(re.escape("[MASK]"))
    lower_case: bool
    fingerprint: str

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = list(pieces)
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        self.vocab_size = len(self._pieces)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = map(self.piece_id, self.special_pieces)
        self.special = np.zeros(self.vocab_size, bool)
        self.special[[self.pad_id, self.cls_id, self.sep_id, self.mask_id]] = True
        self.continuation = np.zeros(self.vocab_size, bool)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` without special tokens; "[MASK]" in the text is plain text."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode every text as :meth:`encode` does."""

    @abstractmethod
    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the joined ids of all texts (int32[N]) and their number per text (int64[len(texts)]); fastest."""

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Return ids and, for each, the range (start, end) of its characters in ``text``.

        Starts and ends never decrease. Pieces share a character if normalization expands it into several.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return readable text, special tokens included."""

    def encode_with_masks(self, text: str) -> list[int]:
        """Encode ``text`` as :meth:`encode` does, but a written mask piece becomes the mask id."""
        first, *others = self.mask_pattern.split(text)
        ids = self.encode(first)
        for part in others:
            ids += [self.mask_id, *self.encode(part)]
        return ids

    def build_inputs(
        self, a: Sequence[int], b: Sequence[int] | None = None, max_length: int | None = None
    ) -> tuple[list[int], list[int]]:
        """One model input of at most ``max_length`` tokens and its token types: [CLS] a [SEP] or [CLS] a [SEP] b
        [SEP] with type 1 from b on. What is too long is cut at the end, of a pair the longer side first
        (:func:`longest_first`). ``ValueError`` when not even the special tokens fit."""
        extra = 2 if b is None else 3
        a, b = self._truncated(a, b, max_length, extra)
        ids = [self.cls_id, *a, self.sep_id]
        if b is None:
            return ids, [0] * len(ids)
        return [*ids, *b, self.sep_id], [0] * len(ids) + [1] * (len(b) + 1)

    @staticmethod
    def _truncated(
        a: Sequence[int], b: Sequence[int] | None, max_length: int | None, extra: int
    ) -> tuple[Sequence[int], Sequence[int] | None]:
        if max_length is None:
            return a, b
        if max_length < extra:
            raise ValueError(f"length {max_length}: the special tokens alone are {extra}; give a larger length")
        if b is None:
            return a[: max_length - extra], None
        kept_a, kept_b = longest_first(len(a), len(b), max_length - extra)
        return a[:kept_a], b[:kept_b]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The vocabulary's piece of every id."""
        return [self._pieces[i] for i in ids]

    def piece_id(self, piece: str) -> int:
        """Id of a piece; ``ValueError`` when the vocabulary lacks it."""
        if piece not in self._ids:
            raise ValueError(f"the vocabulary has no piece {piece!r}")
        return self._ids[piece]
