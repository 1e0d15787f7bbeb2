"""A part of a vocabulary that encodes given texts as the whole vocabulary does.

It keeps the pieces of the texts, all special and added pieces, all single characters, and pieces with a character
that is not itself a piece, so other texts have an unknown piece only where the whole vocabulary gives one. It also
keeps pieces that are likely in other texts of the same kind, because every short substring of the piece occurs in a
word of the given texts. For BPE, it keeps the intermediate pieces of the merges that form a kept piece. The order
of the pieces does not change.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.config import TokenizerConfig
from bert_jax.contrib.compression.vocabulary_files import VocabularyFile, vocabulary_file
from bert_jax.tokenization import Tokenizer, build_tokenizer

_TEXTS = 1000  # encoded at a time


@dataclass(frozen=True)
class Subset:
    """``ids`` int64[kept]: the ids of the kept pieces in the whole vocabulary, ascending; the index is the new id.
    ``content`` is the new tokenizer file; ``texts`` and ``tokens`` count what was read."""

    ids: np.ndarray
    content: bytes
    texts: int
    tokens: int


def subset(
    settings: TokenizerConfig, content: bytes, name: str, texts: Callable[[], Iterable[str]], ngram: int = 5
) -> Subset:
    """Return the part of the vocabulary ``content`` that encodes all texts as the whole vocabulary does.

    ``texts`` is called twice: to collect the pieces, and to verify that every text is still encoded as the same
    pieces. A piece that occurs in no text is kept if each of its substrings of ``ngram`` characters occurs in a
    word of the texts; with ``ngram`` 0, no such piece is kept. Raises ``ValueError`` (one line) if the rules of the
    tokenizer do not allow pieces to be removed, or if there is no text.
    """
    tokenizer = build_tokenizer(settings, content, name)
    file = vocabulary_file(tokenizer, content, name)
    keep, count, tokens = file.always(), 0, 0
    likely = _Likely(file, ngram)
    for batch in _batches(texts()):
        for ids in tokenizer.encode_batch(batch):
            keep[ids] = True
            likely.add(ids)
            tokens += len(ids)
        keep[list(file.formed(batch))] = True
        count += len(batch)
    if not count:
        raise ValueError("--corpus: no text in it; give files with one text per line")
    for number in likely.pieces():
        keep[[number, *file.formed_alone(number)]] = True
    kept = np.flatnonzero(keep)
    cut = file.cut(kept)
    _verify(tokenizer, build_tokenizer(settings, cut, name), kept, texts(), name)
    return Subset(kept, cut, count, tokens)


def _batches(texts: Iterable[str]) -> Iterable[list[str]]:
    remaining = iter(texts)
    while batch := list(itertools.islice(remaining, _TEXTS)):
        yield batch


def _verify(whole: Tokenizer, part: Tokenizer, kept: np.ndarray, texts: Iterable[str], name: str) -> None:
    new = np.full(whole.vocab_size, -1)
    new[kept] = np.arange(len(kept))
    for batch in _batches(texts):
        for text, old, own in zip(batch, whole.encode_batch(batch), part.encode_batch(batch), strict=True):
            if new[old].tolist() != own:
                changed = f"with the kept pieces, {text[:60]!r} is encoded differently"
                raise ValueError(f"{name}: {changed}; this tokenizer cannot be trimmed exactly")


class _Likely:
    """The sequences of at most ``ngram`` characters in the words of texts, and the pieces that consist of them."""

    def __init__(self, file: VocabularyFile, ngram: int) -> None:
        self._file, self._ngram = file, ngram
        self._strings = [file.string(piece) for piece in file.pieces]
        self._continues = file.tokenizer.continuation.tolist()
        self._words, self._grams = set[tuple[int, ...]](), set[str]()

    def add(self, ids: Sequence[int]) -> None:
        """Add the words of a text."""
        word: list[int] = []
        for number in ids if self._ngram else ():
            if word and not self._continues[number]:
                self._add_word(tuple(word))
                word = []
            word.append(number)
        if word:
            self._add_word(tuple(word))

    def _add_word(self, word: tuple[int, ...]) -> None:
        if word not in self._words:
            self._words.add(word)
            text = "".join(self._strings[number] for number in word)
            for size in range(1, self._ngram + 1):
                self._grams.update(text[i : i + size] for i in range(len(text) - size + 1))

    def pieces(self) -> list[int]:
        """Return the ids of the pieces that consist of these sequences."""
        size, grams = self._ngram, self._grams
        if not size:
            return []
        return [
            number for number, text in enumerate(self._strings)
            if all(text[i : i + size] in grams for i in range(max(1, len(text) - size + 1)))
        ]  # fmt: skip
