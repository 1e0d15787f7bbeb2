"""Pieces of sentences that are longer than a row, so that rows of sentence pairs hold all of their text."""

from collections.abc import Callable

import numpy as np

from bert_jax.tokenization import Tokenizer
from data_pipeline.text.graphemes import continues_cluster, joins_next

_PIECES_PER_ROW = 8  # few tokens exceed a row, from which pairs of pieces are truncated
# First characters of pieces of a byte-level tokenizer that begin with a later byte of a character.
_LATER_BYTES = frozenset(map(chr, [*range(0xA1, 0xC0), *range(0x122, 0x144)]))


def cluster_flags(tokenizer: Tokenizer) -> np.ndarray:
    """Return uint8[V]: 1 for a piece that begins inside a grapheme cluster, plus 2 for a piece after which the
    cluster may go on."""
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    return np.array([0 if piece.isascii() else _flags(piece, tokenizer) for piece in pieces], np.uint8)


def _flags(piece: str, tokenizer: Tokenizer) -> int:
    text = piece.removeprefix("##").removeprefix("\u2581")
    if not text or text.isascii():
        return 0
    if tokenizer.space_before_word:  # the characters of the piece stand for bytes
        if text[0] in _LATER_BYTES:
            return 1
        text = tokenizer.decode([tokenizer.piece_id(piece)]).replace("\ufffd", "") or "-"
    return continues_cluster(text[0]) + 2 * joins_next(text[-1])


def cut_long_sentences(lengths: np.ndarray, most: int, borders: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Return the lengths of the sentences of a document, with pieces for a sentence of more than ``most`` tokens.

    ``lengths`` int64[n] contains the numbers of tokens. ``borders(start, stop)`` returns uint8[stop - start] for
    tokens of the document: 2 for the first token of a word, 1 for the first of a grapheme cluster, 0 for others.
    """
    if not (lengths > most).any():
        return lengths
    size = max(1, most // _PIECES_PER_ROW)
    pieces: list[int] = []
    start = 0
    for length in lengths.tolist():
        pieces += [length] if length <= most else _pieces(borders(start, start + length), size)
        start += length
    return np.array(pieces, np.int64)


def _pieces(kinds: np.ndarray, size: int) -> list[int]:
    """Return lengths, at most ``size``, that cut a sentence before words if possible, else between clusters."""
    places = [np.flatnonzero(kinds == 2), np.flatnonzero(kinds)]
    ends = [0]
    while len(kinds) - ends[-1] > size:
        limit, end = ends[-1] + size, 0
        for found, least in zip(places, (ends[-1] + size // 2, ends[-1]), strict=True):
            at = int(np.searchsorted(found, limit, "right")) - 1
            if not end and at >= 0 and found[at] > least:
                end = int(found[at])
        ends.append(end or limit)
    return np.diff([*ends, len(kinds)]).tolist()
