"""Convert words to model inputs, in windows that never split a word and that score every word exactly once.

Words are numbered consecutively in a text, which is one sentence or, with document context (Devlin et al. 2018,
section 5.3), all sentences of a document. ``starts`` int64[words + 1] contains the index of the first piece of each
word, followed by the number of pieces.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.records import Record
from bert_jax.tasks.task import Encoded
from bert_jax.tokenization import Tokenizer

Span = tuple[int, int]


class WordWindow(NamedTuple):
    """A model input and the W words of a record that it scores."""

    encoded: Encoded
    words: np.ndarray  # int64[W], indices of the words in the record
    tokens: np.ndarray  # int64[W], positions of their first pieces in the input


def encode_words(words: Iterable[str], tokenizer: Tokenizer, room: int) -> dict[str, list[int]]:
    """Return the first ``room`` pieces of every distinct word, each word encoded separately.

    A word without pieces, such as a variation selector, is encoded as the unknown piece, so that it can be tagged.
    """
    distinct = list(dict.fromkeys(words))
    before = " " if tokenizer.space_before_word else ""
    encoded = tokenizer.encode_batch([before + word for word in distinct])
    return {word: ids[:room] or [tokenizer.unk_id] for word, ids in zip(distinct, encoded, strict=True)}


def word_windows(
    records: Sequence[Record], tokenizer: Tokenizer, max_length: int, *, context: bool
) -> Iterator[list[WordWindow]]:
    """Yield the windows of each record, in order. A record without words has one window, which scores no words.

    With ``context``, a window also contains as many words of neighboring records as fit. Neighbors are consecutive
    records with the same non-empty ``group``.
    """
    room = max_length - len(tokenizer.build_inputs([])[0])
    pieces = encode_words((word for record in records for word in record.words), tokenizer, room)
    for _, texts in itertools.groupby(enumerate(records), lambda item: (context and item[1].group) or item[0]):
        sentences = [record.words for _, record in texts]
        ids = [pieces[word] for words in sentences for word in words]
        starts = np.cumsum([0, *map(len, ids)])
        flat = np.fromiter(itertools.chain.from_iterable(ids), np.int64, int(starts[-1]))
        last = 0
        for words in sentences:
            first, last = last, last + len(words)
            spans = window_spans(starts, (first, last), room)
            owner = owners(starts, spans, (first, last))
            # Sorted by span once: a search for the words of each span would be quadratic.
            order = np.argsort(owner, kind="stable")
            of_spans = np.split(order, np.cumsum(np.bincount(owner, minlength=len(spans)))[:-1])
            windows = []
            for (begin, end), own in zip(spans, of_spans, strict=True):
                # A span without own words is omitted: each of its words has more context in another span.
                if len(own) or not words:
                    encoded = Encoded(*tokenizer.build_inputs(flat[starts[begin] : starts[end]].tolist()))
                    windows.append(WordWindow(encoded, own, tokenizer.framed + starts[first + own] - starts[begin]))
            yield windows


def window_spans(starts: np.ndarray, sentence: Span, room: int) -> list[Span]:
    """Return spans of word indices (first, end), each of at most ``room`` pieces, that cover the words of
    ``sentence``: one span if they fit, otherwise several spans that overlap by about half. Each span is
    then extended (:func:`widened`)."""
    begin, last = sentence
    spans = []
    while True:
        end = min(last, int(np.searchsorted(starts, starts[begin] + room, "right")) - 1)
        spans.append(widened(starts, (begin, end), room))
        if end == last:
            return spans
        half = int(np.searchsorted(starts, starts[begin] + room // 2))
        begin = min(half, end)  # the word at ``end`` is in no window yet


def widened(starts: np.ndarray, span: Span, room: int) -> Span:
    """Extend ``span`` evenly on both sides until no further word fits into ``room`` pieces."""
    begin, end = span
    spare = room - int(starts[end] - starts[begin])
    left = int(np.searchsorted(starts, starts[begin] - spare // 2))
    right = int(np.searchsorted(starts, starts[left] + room, "right")) - 1
    # If the words on the right leave room, add more words on the left.
    left = int(np.searchsorted(starts, starts[right] - room))
    return left, right


def owners(starts: np.ndarray, spans: Sequence[Span], sentence: Span) -> np.ndarray:
    """Return int64[words], the index of the span in which each word of ``sentence`` has the most context.

    The context of a word in a span is the smaller of the numbers of pieces before and after the word, as in
    google-research/bert ``run_squad.py``; on a tie the first span wins.
    """
    first, last = sentence
    owner, most = np.zeros(last - first, np.int64), np.full(last - first, -1, np.int64)
    for number, (begin, end) in enumerate(spans):
        low, high = max(begin, first), min(end, last)
        before = starts[low:high] - starts[begin]
        after = starts[end] - starts[low + 1 : high + 1]
        context = np.minimum(before, after)
        here = slice(low - first, high - first)
        owner[here] = np.where(context > most[here], number, owner[here])
        most[here] = np.maximum(context, most[here])
    return owner
