"""Windows of passages for extractive question answering, and the best span over all windows of a question.

Follows google-research/bert ``run_squad.py`` in training and prediction, with these differences:

* A question is truncated to half of the available input if this is less than ``qa.max_query_length``.
* The candidates for start and end are the tokens of the passage, not all tokens of the input.
* If no candidates form a span, the answer is the best span over all passage tokens (in the reference: "empty").
* The answer consists of the characters of its pieces. The reference aligns the pieces with the surrounding words.
  The result is the same unless the alignment fails; then the reference returns entire words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from bert_jax.config import TaskSettings
from bert_jax.tasks.task import Encoded
from bert_jax.tokenization import Tokenizer

# Maximum number of windows whose spans are compared at a time, to bound the memory.
_CHUNK = 256


@dataclass(frozen=True, eq=False)
class Passage:
    """A text of N tokens; token i is ``text[starts[i]:ends[i]]``, where ``starts`` and ``ends`` are int32[N]."""

    text: str
    ids: Sequence[int]
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str) -> "Passage":
        """Return ``text``, tokenized with ``tokenizer``, as a passage."""
        ids, offsets = tokenizer.encode_with_offsets(text)
        starts, ends = np.array(offsets, np.int32).reshape(-1, 2).T
        return cls(text, ids, starts, ends)

    def tokens(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the indices of the first and the last token that overlap ``text[start:end]``, or None if no
        token overlaps it."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left")) - 1
        return (first, last) if first <= last else None


@dataclass(frozen=True, eq=False)
class PassageWindow:
    """Tokens ``begin`` to ``begin + count`` (exclusive) of a passage, starting at position ``first`` of a model
    input."""

    passage: Passage
    begin: int
    count: int
    first: int
    # bool[count]: True if the token has its most context in this window, so that an answer may begin there.
    most_context: np.ndarray


@dataclass(frozen=True, eq=False)
class SpanPiece:
    """Outputs of the span head for one window: the start and end logits of every input token."""

    starts: np.ndarray
    ends: np.ndarray
    window: PassageWindow


class Span(NamedTuple):
    """An answer: the characters ``start`` to ``end`` (exclusive) of the passage, their ``text``, and their score.

    ``score`` is the sum of the start logit and the end logit. ``null_score``, the score of "no answer", is the sum
    of both logits of the first token, minimized over the windows. If the passage has no tokens, the text is empty
    and both scores are equal.
    """

    text: str
    start: int
    end: int
    score: float
    null_score: float


# ------------------------------------------------------------------ text to inputs


def span_inputs(
    tokenizer: Tokenizer,
    question: Sequence[int],
    passage: Passage,
    settings: TaskSettings,
) -> list[Encoded]:
    """Return model inputs of at most ``settings.max_length`` tokens, one per window, for the token ids of a
    question and a passage.

    The field ``extra`` of each input is its :class:`PassageWindow`. Raises ``ValueError`` if the special tokens
    leave no room for a passage.
    """
    max_length, left = settings.max_length, settings.max_length - len(tokenizer.build_inputs([], [])[0])
    if left < 1:
        raise ValueError(
            f"task.max_length: {max_length} leaves no room for a passage; allowed: {max_length - left + 1} or more"
        )
    asked = question[: min(settings.max_query_length, left // 2)]
    windows = []
    for begin, most_context in _layout(len(passage.ids), left - len(asked), settings.doc_stride):
        count = len(most_context)
        ids, types = tokenizer.build_inputs(asked, passage.ids[begin : begin + count])
        first = len(ids) - tokenizer.framed - count  # the passage ends before the last special token
        window = PassageWindow(passage, begin, count, first, most_context)
        windows.append(Encoded(ids, types if settings.pair_types else [0] * len(ids), window))
    return windows


def _layout(tokens: int, room: int, stride: int) -> list[tuple[int, np.ndarray]]:
    """Return (index of the first token, ``PassageWindow.most_context``) for every window. Each token has its most
    context in exactly one window."""
    stride = min(stride, room)
    begins = range(0, max(tokens - room, 0) + stride, stride)
    most, owner = np.full(tokens, -1.0), np.zeros(tokens, np.int64)
    for number, begin in enumerate(begins):
        part = slice(begin, begin + room)
        place = np.arange(len(most[part]))
        # The reference's score, rounding included; on a tie the first window wins.
        context = np.minimum(place, place[::-1]) + 0.01 * len(place)
        better = context > most[part]
        most[part][better] = context[better]
        owner[part][better] = number
    return [(begin, owner[begin : begin + room] == number) for number, begin in enumerate(begins)]


# ------------------------------------------------------------------ outputs to answers


def best_spans(questions: Sequence[Sequence[SpanPiece]], settings: TaskSettings) -> list[Span]:
    """Return for each question the span with the largest sum of start and end logits over all of its windows.

    "No answer" is not considered. The candidates are the tokens with the ``qa.n_best`` largest start logits and end
    logits of each window. A span begins at a token that has its most context in that window, and has at most
    ``qa.max_answer_length`` tokens.
    """
    spans = _best_spans(questions, settings.n_best, settings.max_answer_length)
    lost = [i for i, span in enumerate(spans) if span.score == -np.inf]
    everything = _best_spans([questions[i] for i in lost], None, settings.max_answer_length)
    for i, span in zip(lost, everything, strict=True):
        spans[i] = span._replace(score=span.null_score) if span.score == -np.inf else span
    return spans


def _best_spans(questions: Sequence[Sequence[SpanPiece]], n_best: int | None, longest: int) -> list[Span]:
    """Return the best span of each question; its score is -inf if no candidates form a span. If ``n_best`` is
    None, all tokens of the passage are candidates."""
    pieces = list(chain.from_iterable(questions))
    if not pieces:
        return []
    chunks = [_best_in_windows(pieces[i : i + _CHUNK], n_best, longest) for i in range(0, len(pieces), _CHUNK)]
    scores, firsts, lasts = map(np.concatenate, zip(*chunks, strict=True))
    spans, done = [], 0
    for windows in questions:
        null_score = min(float(piece.starts[0]) + float(piece.ends[0]) for piece in windows)
        best = done + int(np.argmax(scores[done : done + len(windows)]))
        done += len(windows)
        score, window = float(scores[best]), pieces[best].window
        if score == -np.inf:
            spans.append(Span("", 0, 0, score, null_score))
            continue
        passage = window.passage
        start = int(passage.starts[window.begin + firsts[best]])
        end = int(passage.ends[window.begin + lasts[best]])
        spans.append(Span(passage.text[start:end], start, end, score, null_score))
    return spans


def _best_in_windows(pieces: Sequence[SpanPiece], n_best: int | None, longest: int) -> tuple[np.ndarray, ...]:
    """Return three arrays [W] that describe the best span in each of W windows: its score (-inf: no span), its
    first token and its last token, counted from ``PassageWindow.begin``."""
    width = max(1, *(piece.window.count for piece in pieces))
    starts, ends = np.full((2, len(pieces), width), -np.inf)
    for row, piece in enumerate(pieces):
        window = piece.window
        tokens = slice(window.first, window.first + window.count)
        starts[row, : window.count] = np.where(window.most_context, piece.starts[tokens], -np.inf)
        ends[row, : window.count] = piece.ends[tokens]
    if n_best is not None and n_best < width:
        for logits in (starts, ends):
            logits[logits < np.partition(logits, -n_best, axis=1)[:, -n_best, None]] = -np.inf
    reach = min(longest, width)
    padded = np.pad(ends, ((0, 0), (0, reach - 1)), constant_values=-np.inf)
    best_ends = ends
    for gap in range(1, reach):
        best_ends = np.maximum(best_ends, padded[:, gap : gap + width])
    sums = starts + best_ends
    rows, first = np.arange(len(pieces)), sums.argmax(axis=1)
    within = padded[rows[:, None], first[:, None] + np.arange(reach)]
    return sums[rows, first], first, first + within.argmax(axis=1)
