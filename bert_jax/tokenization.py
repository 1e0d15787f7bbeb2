"""Text to ids and back: WordPiece (``vocab.txt``) by google-research/bert's rules, and SentencePiece (``.model``).

WordPiece follows ``tokenization.py`` of google-research/bert on every input. A text is first cut at white space
and around CJK characters; everything the rules say about such a chunk depends on the chunk alone, so its ids are
computed once and remembered. Normalisation is Python's ``unicodedata``, as in the reference; the greedy longest
match is the WordPiece model of the ``tokenizers`` library.
"""

import hashlib
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from tokenizers import models

SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_CHARS_PER_WORD = 200  # a longer word is [UNK], as in the reference

# Characters that stand alone: the eight CJK blocks of the reference (neither kana nor Hangul).
CJK = "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
CJK += "\U0002b820-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f"
# White space, less the control characters that str.split takes for white space: the rules drop those instead.
_SPACE = "\t\n\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_CHUNK = re.compile(f"[{CJK}]|[^{_SPACE}{CJK}]+")
_CJK_CHAR = re.compile(f"[{CJK}]")
_ASCII_WORD = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CACHE_ENTRIES = 1 << 17  # bounds the memory of one cache to some 30 MB

_Value = TypeVar("_Value")
Offsets = list[tuple[int, int]]


class Tokenizer(ABC):
    """A vocabulary and the rules that turn text into its ids.

    ``continuation`` (bool[vocab_size]) marks pieces that continue the word before them; ``special``
    (bool[vocab_size]) marks control pieces, which no text yields ([UNK] is none). ``fingerprint`` (hex sha256)
    covers kind, case and all pieces in order.
    """

    kind: Literal["wordpiece", "sentencepiece"]
    lower_case: bool
    fingerprint: str

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = list(pieces)
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        self.vocab_size = len(self._pieces)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = map(self.piece_id, SPECIAL_PIECES)
        self.special = np.zeros(self.vocab_size, bool)
        self.special[[self.pad_id, self.cls_id, self.sep_id, self.mask_id]] = True
        self.continuation = np.zeros(self.vocab_size, bool)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; no special tokens are added, and "[MASK]" in the text is plain text."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of every text."""

    @abstractmethod
    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts one after another (int32[N]) and their number per text (int64[len(texts)]); fastest."""

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Ids and, for each, the characters (start, end) of ``text`` that it stands for.

        Starts and ends never decrease. Two pieces share a character where normalisation makes several of one.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Readable text; special tokens stay visible."""

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The vocabulary's piece of every id."""
        return [self._pieces[i] for i in ids]

    def piece_id(self, piece: str) -> int:
        """Id of a piece; ``ValueError`` when the vocabulary lacks it."""
        if piece not in self._ids:
            raise ValueError(f"the vocabulary has no piece {piece!r}")
        return self._ids[piece]


def load_tokenizer(path: str | Path, *, lower_case: bool = True) -> Tokenizer:
    """Tokenizer of a ``.txt`` (WordPiece, one piece a line) or ``.model`` (SentencePiece) file.

    ``lower_case`` (lower-case and strip accents) applies to WordPiece; a SentencePiece model carries its own
    normalisation. ``ValueError`` says what is wrong with the file.
    """
    path = Path(path)
    if path.suffix not in (".txt", ".model"):
        raise ValueError(f"{path}: a vocabulary is a .txt (WordPiece) or .model (SentencePiece) file")
    if not path.is_file():
        raise ValueError(f"{path}: no such vocabulary file")
    content = path.read_bytes()
    if path.suffix == ".model":
        return SentencePieceTokenizer(content, name=str(path))
    return WordPieceTokenizer(_read_pieces(content, str(path)), lower_case=lower_case)


def _read_pieces(content: bytes, name: str) -> list[str]:
    """Pieces of a vocab.txt, stripped as in the reference; the id is the line number, from 0."""
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
            raise ValueError(f"{name}:{number}: piece {piece!r} stands on line {seen[piece]} already")
        seen[piece] = number
    missing = [piece for piece in SPECIAL_PIECES if piece not in seen]
    if missing:
        raise ValueError(f"{name}: the vocabulary lacks {', '.join(missing)}")
    return pieces


class _Cache(dict[str, _Value]):
    """Values computed on first use; emptied when full, so memory is bounded on any corpus."""

    def __init__(self, compute: Callable[[str], _Value]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, key: str) -> _Value:
        if len(self) >= _CACHE_ENTRIES:
            self.clear()
        value = self[key] = self._compute(key)
        return value


@lru_cache(maxsize=1 << 16)
def _is_dropped(char: str) -> bool:
    return char in "\0\ufffd" or (char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf"))


@lru_cache(maxsize=1 << 16)
def is_punctuation(char: str) -> bool:
    """Whether the reference splits at ``char``: every ASCII character but letters, digits, space; Unicode P*."""
    if char.isascii():
        return char > " " and char != "\x7f" and not char.isalnum()
    return unicodedata.category(char).startswith("P")


@lru_cache(maxsize=1 << 16)
def _strip_accents(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")


def is_cjk(char: str) -> bool:
    """Whether ``char`` is always a word of its own, as punctuation is."""
    return _CJK_CHAR.match(char) is not None


def chunks(text: str) -> list[str]:
    """The pieces of ``text`` between white space and around CJK characters; words never cross their borders."""
    if text.isascii() and text.isprintable():
        return text.split()
    return _CHUNK.findall(text)


def chunk_words(chunk: str, lower_case: bool) -> list[tuple[str, list[int]]]:
    """Words of a chunk by the reference's rules, each with the index in ``chunk`` of every character."""
    kept = [i for i, char in enumerate(chunk) if not _is_dropped(char)]
    text = "".join([chunk[i] for i in kept])
    if lower_case:
        # Only the whole chunk tells a final sigma; alone it is as long, so character by character gives positions.
        lowered = text.lower()
        kept = [i for char, i in zip(text, kept, strict=True) for _ in char.lower()]
        text = _strip_accents(lowered)
        kept = [i for char, i in zip(lowered, kept, strict=True) for _ in _strip_accents(char)]
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


def split_words(chunk: str, lower_case: bool) -> list[str]:
    """Words of a chunk, as ``chunk_words``; faster on ASCII."""
    if chunk.isascii() and chunk.isprintable():
        return _ASCII_WORD.findall(chunk.lower() if lower_case else chunk)
    return [word for word, _ in chunk_words(chunk, lower_case)]


class WordPieceTokenizer(Tokenizer):
    """google-research/bert's BasicTokenizer and WordpieceTokenizer; ``pieces`` in id order, specials included."""

    kind = "wordpiece"

    def __init__(self, pieces: Sequence[str], *, lower_case: bool) -> None:
        super().__init__(pieces)
        self.lower_case = lower_case
        header = f"wordpiece\nlower_case={lower_case}\n"
        self.fingerprint = hashlib.sha256((header + "\n".join(pieces)).encode()).hexdigest()
        self.continuation[:] = [piece.startswith("##") for piece in pieces]
        self._lengths = [len(piece.removeprefix("##")) for piece in pieces]
        self._model = models.WordPiece(
            vocab=self._ids,
            unk_token="[UNK]",
            max_input_chars_per_word=MAX_CHARS_PER_WORD,
            continuing_subword_prefix="##",
        )
        self._word_ids = _Cache(self._match)
        self._chunk_ids = _Cache(self._compute_chunk_ids)
        self._chunk_offsets = _Cache(self._compute_chunk_offsets)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        lookup = self._chunk_ids.__getitem__
        return [np.frombuffer(b"".join(map(lookup, chunks(text))), np.int32).tolist() for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        lookup = self._chunk_ids.__getitem__
        encoded = [b"".join(map(lookup, chunks(text))) for text in texts]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) // np.int32().nbytes
        return np.frombuffer(b"".join(encoded), np.int32), lengths

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        ids: list[int] = []
        offsets: Offsets = []
        for match in _CHUNK.finditer(text):
            base = match.start()
            chunk_ids, spans = self._chunk_offsets[match.group()]
            ids += chunk_ids
            offsets += [(base + start, base + end) for start, end in spans]
        return ids, offsets

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.pieces(ids)).replace(" ##", "")

    def _match(self, word: str) -> bytes:
        """Greedy longest match first, as int32 bytes."""
        try:
            found = [token.id for token in self._model.tokenize(word)]
        except UnicodeEncodeError:  # a lone surrogate, which no vocabulary can hold
            found = [self.unk_id]
        return np.array(found, np.int32).tobytes()

    def _compute_chunk_ids(self, chunk: str) -> bytes:
        return b"".join(map(self._word_ids.__getitem__, split_words(chunk, self.lower_case)))

    def _compute_chunk_offsets(self, chunk: str) -> tuple[list[int], Offsets]:
        ids: list[int] = []
        spans: Offsets = []
        for word, positions in chunk_words(chunk, self.lower_case):
            found = np.frombuffer(self._word_ids[word], np.int32).tolist()
            lengths = [len(word)] if found == [self.unk_id] else [self._lengths[i] for i in found]
            first = 0
            for length in lengths:
                end = positions[first + length - 1] + 1
                # An accent that was stripped belongs to the letter before it.
                while self.lower_case and end < len(chunk) and unicodedata.category(chunk[end]) == "Mn":
                    end += 1
                spans.append((positions[first], end))
                first += length
            ids += found
        return ids, spans


class SentencePieceTokenizer(Tokenizer):
    """A serialised SentencePiece model with [UNK] as its unknown piece and the other specials as control pieces."""

    kind = "sentencepiece"

    def __init__(self, model: bytes, *, name: str = "SentencePiece model") -> None:
        import sentencepiece

        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError:
            raise ValueError(f"{name}: not a SentencePiece model") from None
        size = self._processor.get_piece_size()
        pieces = [self._processor.id_to_piece(i) for i in range(size)]
        missing = [piece for piece in SPECIAL_PIECES if piece not in pieces]
        if missing:
            raise ValueError(f"{name}: the model lacks {', '.join(missing)}; bert-data vocab trains one that fits")
        super().__init__(pieces)
        wrong = [pieces[i] for i in np.flatnonzero(self.special).tolist() if not self._processor.is_control(i)]
        wrong += [] if self._processor.is_unknown(self.unk_id) else ["[UNK]"]
        if wrong:
            raise ValueError(f"{name}: {', '.join(wrong)} must be control pieces ([UNK]: the unknown piece)")
        normalizer = sentencepiece.SentencePieceNormalizer(model_proto=model)
        self.lower_case = "a" in normalizer.normalize("A")
        self.special |= np.array([self._processor.is_control(i) for i in range(size)])
        self.continuation[:] = [not piece.startswith("\u2581") for piece in pieces]
        self.continuation[self.special] = False
        self.continuation[self.unk_id] = False
        self.fingerprint = hashlib.sha256(b"sentencepiece\n" + model).hexdigest()

    def _encode(self, texts: Sequence[str], return_type: Any) -> list[Any]:
        # U+FFFD is as long as a lone surrogate, which cannot be passed on as UTF-8.
        safe = [text if text.isascii() else _SURROGATE.sub("\ufffd", text) for text in texts]
        encoded: list[Any] = self._processor.encode(safe, return_type=return_type, num_threads=1)
        return encoded

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode(texts, int)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encoded = self._encode(texts, int)
        return np.array(list(chain.from_iterable(encoded)), np.int32), np.array(list(map(len, encoded)), np.int64)

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        (mapping,) = self._encode([text], "offset_mapping")
        offsets: Offsets = []
        for piece, (start, end) in zip(mapping["pieces"], mapping["offsets"], strict=True):
            # A piece's leading U+2581 stands for the white space before the word.
            while start < end and text[start].isspace():
                start += 1
            # Of the pieces that share one character (a ligature) only the last is given it.
            if start == end < len(text) and piece != "\u2581":
                end += 1
            offsets.append((start, end))
        return list(mapping["ids"]), offsets

    def decode(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            if not self.special[i]:
                run.append(int(i))
                continue
            parts += [self._processor.decode(run), self._pieces[i]]
            run = []
        return " ".join(part for part in [*parts, self._processor.decode(run)] if part)
