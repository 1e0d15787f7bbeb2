"""Base class of all tokenizers: ids, offsets, model inputs."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, NoReturn, TypedDict, TypeVar

import numpy as np

SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Code points that UTF-8 cannot encode, left in a text by wrong decoding.
_SURROGATE = re.compile("[\ud800-\udfff]")

Offsets = list[tuple[int, int]]
_Item = TypeVar("_Item")


def longest_first(a: int, b: int, budget: int) -> tuple[int, int]:
    """Return how many tokens two texts with ``a`` and ``b`` tokens keep, at most ``budget`` in total.

    The shorter text is kept completely if the longer one can keep at least as many tokens. Otherwise each text
    keeps half of ``budget``, and an odd token goes to the longer text (to ``b`` if both are equally long), as in
    ``longest_first`` of the Hugging Face tokenizers.
    """
    if a + b <= budget:
        return a, b
    short = min(a, b)
    if 2 * short > budget:
        short = budget // 2
    return (short, budget - short) if a <= b else (budget - short, short)


def without_surrogates(text: str) -> str:
    """Replace every lone surrogate with U+FFFD; the length of the text does not change."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


class Rules(TypedDict, total=False):
    """Rules that the vocabulary file does not contain, named as in ``TokenizerConfig``."""

    lower_case: bool
    strip_accents: bool | None
    split_cjk: bool
    cjk_words: bool


class Tokenizer(ABC):
    """A vocabulary and the rules that convert text to ids.

    ``continuation`` (bool[vocab_size]) marks pieces that continue the word before them; ``special``
    (bool[vocab_size]) marks control pieces, which the encoding of a text never contains ([UNK] is not a control
    piece), and other special tokens of a ``tokenizer.json``. ``fingerprint`` (hex sha256) is a hash of the kind,
    the settings and all pieces in id order.
    """

    kind: Literal["wordpiece", "sentencepiece", "byte_bpe", "json"]
    # Padding, unknown, first token, separator, mask.
    special_pieces: tuple[str, ...] = SPECIAL_PIECES
    # Text that ``encode_with_masks`` replaces with the mask piece.
    mask_pattern: re.Pattern[str] = re.compile(re.escape("[MASK]"))
    # Number of separators between the texts of a pair, and token type of the second text.
    separators, second_type = 1, 1
    # Side at which ``cut`` and ``build_inputs`` truncate.
    truncation_side: Literal["right", "left"] = "right"
    # Model inputs begin with the first token and end with the separator.
    framed = True
    # The space before a word belongs to the first piece of the word.
    space_before_word = False
    lower_case: bool
    fingerprint: str

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = list(pieces)
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        self.vocab_size = len(self._pieces)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = map(self.piece_id, self.special_pieces)
        self.end_id = self.sep_id
        self.special = np.zeros(self.vocab_size, bool)
        self.special[[self.pad_id, self.cls_id, self.sep_id, self.mask_id]] = True
        self.continuation = np.zeros(self.vocab_size, bool)

    @property
    def rules(self) -> Rules:
        """Rules that the vocabulary file does not contain."""
        return {"lower_case": self.lower_case}

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` without special tokens; "[MASK]" in ``text`` is treated as plain text."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode every text as :meth:`encode` does."""

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of all texts, int32[N], and the number of ids per text, int64[len(texts)]."""
        encoded = self.encode_batch(texts)
        return np.array(list(chain.from_iterable(encoded)), np.int32), np.array(list(map(len, encoded)), np.int64)

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Return the ids of ``text`` and, for each id, its character range (start, end).

        Starts and ends never decrease. Several pieces share a character if normalization expands the character to
        several characters.
        """

    def encode_with_words(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of ``text`` and, for each id, the number of its word, from 0.

        Words are those into which the rules split a text before they look for pieces: at white space and
        punctuation (WordPiece, byte-level BPE), or at white space only (SentencePiece).
        """
        ids = self.encode(text)
        starts = ~self.continuation[ids]
        starts[:1] = True
        return ids, (np.cumsum(starts) - 1).tolist()

    def __call__(self, *texts: object, **options: object) -> NoReturn:
        """Raise ``TypeError`` with the methods to use."""
        methods = "encode(text) for ids, decode(ids) for text, LoadedModel.tokenize(texts) for arrays of a model"
        raise TypeError(f"a {type(self).__name__} is not a function; use {methods}")

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids`` in readable form, including special tokens."""

    def encode_with_masks(self, text: str) -> list[int]:
        """Encode ``text`` as :meth:`encode` does, except that the name of the mask piece becomes the mask id."""
        first, *others = self.mask_pattern.split(text)
        ids = self.encode(first)
        for part in others:
            ids += [self.mask_id, *self.encode(part)]
        return ids

    def build_inputs(
        self, a: Sequence[int], b: Sequence[int] | None = None, max_length: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return one model input and its token types.

        The input is [CLS] a [SEP] or [CLS] a [SEP] b [SEP], with [SEP] repeated ``separators`` times between a and
        b. The token type is ``second_type`` for b and the final [SEP], and 0 for all tokens before them. The final
        token is ``end_id``, by default [SEP].

        If ``framed`` is False (GPT), the input is a or a b, and all token types are 0.

        Texts that exceed ``max_length`` tokens are truncated (:meth:`cut`); the longer text of a pair is truncated
        first (:func:`longest_first`). Raises ``ValueError`` if the special tokens already exceed ``max_length``.
        """
        extra = 0 if not self.framed else 2 if b is None else 2 + self.separators
        if max_length is not None:
            if max_length < extra:
                remedy = f"allowed: {extra} (the number of special tokens) or more"
                raise ValueError(f"length {max_length} is not allowed; {remedy}")
            kept_a, kept_b = longest_first(len(a), 0 if b is None else len(b), max_length - extra)
            a, b = self.cut(a, kept_a), None if b is None else self.cut(b, kept_b)
        if not self.framed:
            ids = [*a, *(b or ())]
            return ids, [0] * len(ids)
        if b is None:
            return [self.cls_id, *a, self.end_id], [0] * (len(a) + 2)
        ids = [self.cls_id, *a, *[self.sep_id] * self.separators]
        return [*ids, *b, self.end_id], [0] * len(ids) + [self.second_type] * (len(b) + 1)

    def cut(self, ids: Sequence[_Item], count: int) -> Sequence[_Item]:
        """Return ``ids`` (or their offsets), truncated to at most ``count`` at the end or, if ``truncation_side``
        is left, at the beginning."""
        return ids[:count] if self.truncation_side == "right" else ids[max(len(ids) - count, 0) :]

    def require_mask(self, name: str) -> None:
        """Raise ``ValueError`` with a message that begins with ``name`` if the vocabulary has no mask piece."""
        if self.mask_id in (self.pad_id, self.unk_id):
            raise ValueError(f"{name}: the tokenizer has no mask piece; use a tokenizer that has one")

    def tokenize(self, text: str) -> list[str]:
        """Return the pieces of ``text``, without special tokens."""
        return self.pieces(self.encode(text))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the piece of every id."""
        return [self._pieces[i] for i in ids]

    def piece_id(self, piece: str) -> int:
        """Return the id of ``piece``. Raises ``ValueError`` if the vocabulary lacks it."""
        if piece not in self._ids:
            raise ValueError(f"the vocabulary has no piece {piece!r}")
        return self._ids[piece]
