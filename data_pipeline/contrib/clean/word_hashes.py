"""Words of texts as 64-bit hashes, and the n-grams and MinHash signatures of these hashes (numpy only).

A word is a maximal run of letters, digits and combining marks, in lower case. In scripts that put no spaces
between words (Chinese, Japanese, Thai, Lao, Burmese, Khmer), each letter, digit or mark is a word. All hashes are
arithmetic modulo 2^64 on Unicode code points, so they are the same on every machine. Two different words, lines or
n-grams have equal hashes with a probability of about 2^-64.

Sources: n-grams (shingles) and MinHash, Broder 1997; banding, Leskovec, Rajaraman and Ullman, Mining of Massive
Datasets, section 3.4.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from bert_jax.hashing import GOLDEN, hash_key, mix64

WORDS = 5  # length of an n-gram
_BLOCK = 1 << 18  # code points that are hashed at a time
_ASSIGNED = 0x32400  # all letters have smaller code points
# Code points of scripts whose words are not separated by spaces.
_UNSPACED = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3005, 0x3007), (0x3021, 0x3029), (0x3040, 0x312F),
    (0x31A0, 0x31BF), (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0xFF66, 0xFF9F),
    (0x20000, 0x323AF),
)  # fmt: skip
_SEPARATOR, _LETTER, _WORD = 0, 1, 2
_BASE = 0xD1342543DE82EF95  # base of the polynomial hashes; odd, so that it has an inverse modulo 2^64


@lru_cache(maxsize=1)
def _classes() -> np.ndarray:
    """Return the class of every code point, uint8[0x110000]: separator, letter of a word, or whole word."""
    table = np.zeros(0x110000, np.uint8)
    for code in range(_ASSIGNED):
        if unicodedata.category(chr(code))[0] in "LNM":
            table[code] = _LETTER
    for first, last in _UNSPACED:
        table[first : last + 1][table[first : last + 1] == _LETTER] = _WORD
    return table


@lru_cache(maxsize=2)
def _powers(base: int) -> np.ndarray:
    """Return ``base`` to the powers 0 to ``_BLOCK``, modulo 2^64, as uint64[_BLOCK + 1]."""
    powers = np.full(_BLOCK + 1, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def _hash_ranges(values: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return one hash per range [start, end) of ``values`` uint64[at most _BLOCK]: a polynomial in the offset.

    The hash of an empty range is 0.
    """
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * _powers(_BASE)[: len(values)], out=sums[1:])
    return mix64((sums[ends] - sums[starts]) * _powers(pow(_BASE, -1, 1 << 64))[starts])


def word_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all words uint64[W], and the number of words of each of the N texts, int64[N]."""
    hashes, counts = [np.zeros(0, np.uint64)], np.zeros(len(texts), np.int64)
    for indices, block in _blocks(texts):
        values, words = _words_of_block(block)
        hashes.append(values)
        np.add.at(counts, indices, words)
    return np.concatenate(hashes), counts


def _blocks(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Yield blocks of at most ``_BLOCK`` code points as (indices of the texts, lower-cased texts).

    A longer text is cut at fixed offsets.
    """
    indices: list[int] = []
    block: list[str] = []
    size = 0
    for index, text in enumerate(texts):
        lowered = text.lower()
        pieces = [lowered]
        if len(lowered) >= _BLOCK:
            pieces = [lowered[at : at + _BLOCK - 1] for at in range(0, len(lowered), _BLOCK - 1)]
        for piece in pieces:
            if size + len(piece) + 1 > _BLOCK:
                yield indices, block
                indices, block, size = [], [], 0
            indices.append(index)
            block.append(piece)
            size += len(piece) + 1
    if block:
        yield indices, block


def _words_of_block(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the words of all texts, and the number of words of each text."""
    codes = np.frombuffer("\n".join(texts).encode("utf-32-le", "surrogatepass"), "<u4")
    kinds = np.zeros(len(codes) + 2, np.uint8)
    kinds[1:-1] = _classes()[codes]
    before, here, after = kinds[:-2], kinds[1:-1], kinds[2:]
    starts = np.flatnonzero((here == _WORD) | ((here == _LETTER) & (before != _LETTER)))
    ends = np.flatnonzero((here == _WORD) | ((here == _LETTER) & (after != _LETTER))) + 1
    borders = list(accumulate((len(text) + 1 for text in texts), initial=0))
    counts = np.diff(np.searchsorted(starts, borders))
    return _hash_ranges(codes.astype(np.uint64), starts, ends), counts


def line_keys(words: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the hash of the words of every line, uint64[L]; 0 for lines without words.

    ``words`` uint64[W] and ``counts`` int64[L] are the result of :func:`word_hashes`. Lines that differ only in
    punctuation, white space or case have equal hashes.
    """
    keys = np.zeros(len(counts), np.uint64)
    ends = np.cumsum(counts)
    first = 0
    while first < len(counts):
        start = int(ends[first] - counts[first])
        last = max(int(np.searchsorted(ends, start + _BLOCK, "right")), first + 1)
        values = words[start : int(ends[last - 1])]
        if len(values) > _BLOCK:  # one very long line: its end does not matter
            values = values[:_BLOCK]
        stops = np.minimum(ends[first:last] - start, len(values))
        starts = ends[first:last] - counts[first:last] - start
        keys[first:last] = _hash_ranges(values, starts, stops)
        first = last
    return keys


def ngrams(words: np.ndarray, counts: np.ndarray, empty: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the 5-grams of D documents uint64[S], and the number of 5-grams per document int64[D].

    ``words`` uint64[W] are the words of all documents, ``counts`` int64[D] their numbers. The result has at least
    one entry per document: the only 5-gram of a document of one to four words consists of all its words; that of a
    document without words is its entry in ``empty`` uint64[D]. Repeated 5-grams are repeated in the result.
    """
    sizes = np.maximum(counts - WORDS + 1, 1)
    ends = np.cumsum(counts)
    starts, places = ends - counts, np.cumsum(sizes) - sizes
    factors = hash_key(np.arange(1, WORDS + 1)) | np.uint64(1)
    result = np.empty(int(sizes.sum()), np.uint64)
    combined = np.zeros(max(len(words) - WORDS + 1, 0), np.uint64)
    for offset, factor in enumerate(factors):
        combined += words[offset : offset + len(combined)] * factor
    long = counts >= WORDS
    # Positions where a 5-gram of a long document starts, in order: those at which it does not cross its end.
    inside = np.zeros(len(words) + 1, np.int8)
    np.add.at(inside, starts[long], 1)
    np.add.at(inside, ends[long] - WORDS + 1, -1)
    chosen = np.flatnonzero(np.cumsum(inside[: len(combined)], dtype=np.int8))
    target = np.ones(len(result), bool)
    target[places[~long]] = False
    result[target] = mix64(combined[chosen])
    for document in np.flatnonzero(~long):
        own = words[starts[document] : ends[document]]
        value = mix64((own * factors[: len(own)]).sum(keepdims=True) + np.uint64(len(own) + 1))[0]
        result[places[document]] = value if len(own) else empty[document]
    return result, sizes


def min_hashes(values: np.ndarray, sizes: np.ndarray, count: int) -> np.ndarray:
    """Return the MinHash signatures uint64[count, D] of D nonempty multisets.

    ``values`` uint64[S] are the hashes of the elements of all sets, ``sizes`` int64[D] (1 or more) their numbers.
    """
    starts = np.cumsum(sizes) - sizes
    signatures = np.empty((count, len(sizes)), np.uint64)
    multipliers = hash_key(0x3A5, np.arange(count)) | np.uint64(1)
    masks = hash_key(0x3A6, np.arange(count))
    moved = np.empty_like(values)
    for row in range(count if len(sizes) else 0):
        np.bitwise_xor(values, masks[row], out=moved)
        np.multiply(moved, multipliers[row], out=moved)
        np.minimum.reduceat(moved, starts, out=signatures[row])
    return signatures


def band_hashes(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """Return one hash per band and document, uint64[bands, D], of signatures uint64[bands * rows, D].

    Documents that agree in all rows of a band have the same hash in this band; different bands have different
    hashes.
    """
    grouped = signatures.reshape(bands, rows, -1)
    hashes = np.broadcast_to(hash_key(np.arange(bands))[:, None], (bands, grouped.shape[2]))
    for row in range(rows):
        hashes = mix64((hashes ^ grouped[:, row]) * np.uint64(GOLDEN) + np.uint64(GOLDEN))
    return hashes


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Return the Jaccard similarity of two nonempty sets, given as sorted arrays of distinct values."""
    small, large = (first, second) if len(first) <= len(second) else (second, first)
    at = np.minimum(np.searchsorted(large, small), len(large) - 1)
    common = int((large[at] == small).sum())
    return common / (len(first) + len(second) - common)
