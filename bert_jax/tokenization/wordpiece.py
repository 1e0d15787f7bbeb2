"""WordPiece (``vocab.txt``) with the rules and the ids of ``tokenization.py`` of google-research/bert.

A text is first split into chunks, at white space and around CJK characters. The ids of a chunk depend only on the
chunk, so they are cached. Normalization uses Python's ``unicodedata``, as the reference does; the greedy longest
match is the WordPiece model of the ``tokenizers`` library.
"""

import hashlib
import re
import struct
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from tokenizers import models

from bert_jax.tokenization.tokenizer import SPECIAL_PIECES, Offsets, Rules, Tokenizer

MAX_CHARS_PER_WORD = 200  # a longer word is [UNK], as in the reference

# Characters that are words of their own: the eight CJK blocks of the reference (neither kana nor Hangul).
CJK = "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
CJK += "\U0002b820-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f"
# White space without the control characters at which str.split also splits, because the reference drops them.
SPACE = "\t\n\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_CHUNK = re.compile(f"[{CJK}]|[^{SPACE}{CJK}]+")
_SPACED = re.compile(f"[^{SPACE}]+")
CJK_RUN = re.compile(f"[{CJK}]+")
_ASCII_WORD = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")
# Spaces that printed English does not have, in the order in which ``decode`` removes them: in dashes, before
# closing signs, after opening signs, in contractions, before an apostrophe after s, in hyphens, in numbers.
_PRINTED = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\S)- -(?!\S)", "--"),
        (r" (?=[.,;:!?%)\]}](?:\s|[.,;:!?%)\]}]|$))", ""),
        (r"(?<=[$#(\[{]) ", ""),
        (r"(?<=[\w\]]) ' (?=(?:s|t|d|m|re|ve|ll)\b)", "'"),
        (r"(?<=s) '(?=\s)", "'"),
        (r"(?<=[\w\]]) - (?=[\w\[])", "-"),
        (r"(?<=\d), (?=\d{3}\b)", ","),
        (r"(?<=\d)\. (?=\d)", "."),
    )
)
# Bounds of the memory of a cache, to about 40 MB: entries, entries with offsets, characters of a key.
_CACHE_ENTRIES, _OFFSET_ENTRIES, _LONGEST_KEY = 1 << 17, 1 << 14, 32

_ID = struct.Struct("=i")

_Value = TypeVar("_Value")


def read_pieces(content: bytes, name: str) -> list[str]:
    """Return the pieces of a vocab.txt, stripped as in google-research/bert; the id of a piece is the index of its
    line.

    Raises ``ValueError`` for an empty file, a missing special piece, invalid UTF-8 or a repeated piece. For the
    last two, the message contains the line number.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}:{line}: not valid UTF-8") from None
    # Only "\n" ends a line: U+2028 is a piece of the published Chinese vocabulary.
    lines = text.split("\n")
    pieces = [line.strip() for line in (lines[:-1] if lines[-1] == "" else lines)]
    if not any(pieces):
        raise ValueError(f"{name}: the vocabulary is empty")
    seen: dict[str, int] = {}
    for number, piece in enumerate(pieces, start=1):
        if piece in seen:
            problem = f"piece {piece!r} is already on line {seen[piece]}"
            raise ValueError(f"{name}:{number}: {problem}; use each piece once")
        seen[piece] = number
    if missing := [piece for piece in SPECIAL_PIECES if piece not in seen]:
        remedy = f"it must contain {', '.join(SPECIAL_PIECES)}"
        raise ValueError(f"{name}: the vocabulary lacks {', '.join(missing)}; {remedy}")
    return pieces


class _Cache(dict[str, _Value]):
    """Cache of values that are computed on first use, except for long keys; a cache with ``entries`` values is
    emptied, which limits its memory."""

    def __init__(self, compute: Callable[[str], _Value], entries: int) -> None:
        super().__init__()
        self._compute, self._entries = compute, entries

    def __missing__(self, key: str) -> _Value:
        if len(key) > _LONGEST_KEY:
            return self._compute(key)
        if len(self) >= self._entries:
            self.clear()
        value = self[key] = self._compute(key)
        return value


@lru_cache(maxsize=1 << 16)
def is_dropped(char: str) -> bool:
    """Return True if google-research/bert removes ``char``: control and format characters, U+0000, U+FFFD."""
    return char in "\0\ufffd" or (char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf"))


@lru_cache(maxsize=1 << 16)
def is_punctuation(char: str) -> bool:
    """Return True if google-research/bert treats ``char`` as punctuation.

    These are the Unicode categories P* and printable ASCII other than letters, digits and space."""
    if char.isascii():
        return char > " " and char != "\x7f" and not char.isalnum()
    return unicodedata.category(char).startswith("P")


def _strip_accents(text: str) -> str:
    return _short_without_accents(text) if len(text) <= _LONGEST_KEY else without_accents(text)


def without_accents(text: str) -> str:
    """Return ``text`` in parts (NFD), without combining marks."""
    return "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")


_short_without_accents = lru_cache(maxsize=1 << 16)(without_accents)


def is_cjk(char: str) -> bool:
    """Return True if ``char`` is in a CJK block and is therefore a separate word."""
    return CJK_RUN.match(char) is not None


def chunks(text: str, split_cjk: bool = True) -> list[str]:
    """Split ``text`` at white space and, with ``split_cjk``, around CJK characters; no word spans two chunks."""
    return _chunks(text, _CHUNK if split_cjk else _SPACED)


def _chunks(text: str, pattern: re.Pattern[str]) -> list[str]:
    return text.split() if text.isascii() and text.isprintable() else pattern.findall(text)


def chunk_words(chunk: str, lower_case: bool, strip_accents: bool | None = None) -> list[tuple[str, list[int]]]:
    """Return the words of ``chunk``, split as in google-research/bert, each with the indices of its characters in
    ``chunk``.

    If ``strip_accents`` is None, accents are stripped if ``lower_case`` is set, as in google-research/bert.
    """
    kept = [i for i, char in enumerate(chunk) if not is_dropped(char)]
    text = "".join([chunk[i] for i in kept])
    if lower_case:
        # Positions are computed from single characters, but the text from the whole chunk, because lower-casing a
        # sigma depends on its context.
        kept = [i for char, i in zip(text, kept, strict=True) for _ in char.lower()]
        text = text.lower()
    if lower_case if strip_accents is None else strip_accents:
        kept = [i for char, i in zip(text, kept, strict=True) for _ in _strip_accents(char)]
        text = _strip_accents(text)
    words: list[tuple[str, list[int]]] = []
    start = 0
    for end, char in enumerate(text):
        is_space = char.isspace()
        if not is_space and not is_punctuation(char):
            continue
        if end > start:
            words.append((text[start:end], kept[start:end]))
        if not is_space:
            words.append((char, kept[end : end + 1]))
        start = end + 1
    if start < len(text):
        words.append((text[start:], kept[start:]))
    return words


def split_words(chunk: str, lower_case: bool, strip_accents: bool | None = None) -> list[str]:
    """Return the words of a chunk as :func:`chunk_words` does, but without indices; faster for ASCII."""
    if chunk.isascii() and chunk.isprintable():
        return _ASCII_WORD.findall(chunk.lower() if lower_case else chunk)
    return [word for word, _ in chunk_words(chunk, lower_case, strip_accents)]


class WordPieceTokenizer(Tokenizer):
    """BasicTokenizer and WordpieceTokenizer of google-research/bert.

    ``pieces`` are sorted by id and include the special pieces. ``strip_accents`` (None: the value of
    ``lower_case``) and ``split_cjk`` (CJK characters are words) differ from google-research/bert only for some
    published models. With ``cjk_words``, a run of CJK characters is divided from its start into the longest words
    of the vocabulary; this changes nothing if no word has several of them.
    """

    kind = "wordpiece"

    def __init__(
        self,
        pieces: Sequence[str],
        *,
        lower_case: bool,
        strip_accents: bool | None = None,
        split_cjk: bool = True,
        cjk_words: bool = False,
    ) -> None:
        super().__init__(pieces)
        self.lower_case = lower_case
        self.strip_accents = lower_case if strip_accents is None else strip_accents
        self.split_cjk = split_cjk
        header = f"wordpiece\nlower_case={lower_case}\n"
        # Only settings that differ from the reference enter the fingerprint, so that older fingerprints stay valid.
        header += f"strip_accents={self.strip_accents}\n" if self.strip_accents != lower_case else ""
        header += "" if split_cjk else "split_cjk=False\n"
        runs = (len(piece) for piece in pieces if cjk_words and split_cjk and CJK_RUN.fullmatch(piece))
        longest = max(runs, default=0)
        self._longest_cjk = longest if longest > 1 else 0
        header += "cjk_words=True\n" if self._longest_cjk else ""
        self._chunk = _CHUNK if split_cjk else _SPACED
        if self._longest_cjk:
            self._chunk = re.compile(f"{CJK_RUN.pattern}|{_CHUNK.pattern}")
        self.fingerprint = hashlib.sha256((header + "\n".join(pieces)).encode()).hexdigest()
        self.continuation[:] = [piece.startswith("##") for piece in pieces]
        self._lengths = [len(piece.removeprefix("##")) for piece in pieces]
        self._model = models.WordPiece(
            vocab=self._ids,
            unk_token="[UNK]",
            max_input_chars_per_word=MAX_CHARS_PER_WORD,
            continuing_subword_prefix="##",
        )
        self._word_ids = _Cache(self._match, _CACHE_ENTRIES)
        self._chunk_ids = _Cache(self._compute_chunk_ids, _CACHE_ENTRIES)
        self._chunk_offsets = _Cache(self._compute_chunk_offsets, _OFFSET_ENTRIES)

    @property
    def rules(self) -> Rules:
        strip_accents = None if self.strip_accents == self.lower_case else self.strip_accents
        rules: Rules = {"lower_case": self.lower_case, "strip_accents": strip_accents, "split_cjk": self.split_cjk}
        return {**rules, "cjk_words": True} if self._longest_cjk else rules

    @property
    def vocab_txt(self) -> bytes:
        """Content of a vocab.txt with the pieces."""
        return "".join(f"{piece}\n" for piece in self._pieces).encode()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [np.frombuffer(row, np.int32).tolist() for row in self._encode(texts)]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encoded = self._encode(texts)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) // np.int32().nbytes
        return np.frombuffer(b"".join(encoded), np.int32), lengths

    def _encode(self, texts: Sequence[str]) -> list[bytes]:
        lookup = self._chunk_ids.__getitem__
        return [b"".join(map(lookup, _chunks(text, self._chunk))) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        ids: list[int] = []
        offsets: Offsets = []
        for match in self._chunk.finditer(text):
            base = match.start()
            chunk_ids, spans = self._chunk_offsets[match.group()]
            ids += chunk_ids
            offsets += [(base + start, base + end) for start, end in spans]
        return ids, offsets

    def decode(self, ids: Iterable[int]) -> str:
        text = " ".join(self.pieces(ids)).replace(" ##", "").removeprefix("##")
        for pattern, replacement in _PRINTED:
            text = pattern.sub(replacement, text)
        return text

    def _match(self, word: str) -> bytes:
        """Return the ids of a word by greedy longest match, as the bytes of an int32 array."""
        whole = self._ids.get(word)
        if whole is not None and len(word) <= MAX_CHARS_PER_WORD:  # the longest match
            return _ID.pack(whole)
        try:
            found = [token.id for token in self._model.tokenize(word)]
        except UnicodeEncodeError:  # a lone surrogate, which is in no vocabulary
            found = [self.unk_id]
        return b"".join(map(_ID.pack, found))

    def _compute_chunk_ids(self, chunk: str) -> bytes:
        if self._longest_cjk:
            words = [word for word, _ in self._split(chunk)]
        else:
            words = split_words(chunk, self.lower_case, self.strip_accents)
        return b"".join(map(self._word_ids.__getitem__, words))

    def _split(self, chunk: str) -> list[tuple[str, list[int]]]:
        """Return :func:`chunk_words`; a run of CJK characters is divided into words of the vocabulary."""
        whole = chunk_words(chunk, self.lower_case, self.strip_accents)
        if not (self._longest_cjk and is_cjk(chunk[0])):
            return whole
        words = []
        for text, positions in whole:
            start = 0
            while start < len(text):
                sizes = range(min(self._longest_cjk, len(text) - start), 1, -1)
                size = next((size for size in sizes if text[start : start + size] in self._ids), 1)
                words.append((text[start : start + size], positions[start : start + size]))
                start += size
        return words

    def _compute_chunk_offsets(self, chunk: str) -> tuple[list[int], Offsets]:
        ids: list[int] = []
        spans: Offsets = []
        for word, positions in self._split(chunk):
            found = np.frombuffer(self._word_ids[word], np.int32).tolist()
            lengths = [len(word)] if found == [self.unk_id] else [self._lengths[i] for i in found]
            first = 0
            for length in lengths:
                end = positions[first + length - 1] + 1
                # An accent that was stripped belongs to the letter before it.
                while self.strip_accents and end < len(chunk) and unicodedata.category(chunk[end]) == "Mn":
                    end += 1
                spans.append((positions[first], end))
                first += length
            ids += found
        return ids, spans
