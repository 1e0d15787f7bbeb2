"""Answers in long passages: overlapping windows of tokens, and the best span over all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.inference.batching import Encoded
from bert_jax.inference.engine import Engine

# google-research/bert run_squad.py: tokens between two windows, longest question, longest answer.
STRIDE, MAX_QUESTION, MAX_ANSWER = 128, 64, 30


@dataclass(frozen=True)
class Window:
    """A part of a passage: its first token's position in the input, the characters of each of its tokens."""

    passage: str
    first: int
    offsets: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class SpanPiece:
    """What the head says of one window: logits of every input token."""

    starts: np.ndarray
    ends: np.ndarray
    window: Window


def encode_spans(loaded: Engine, question: str, passage: str) -> list[Encoded]:
    """Inputs of question and passage; of a long passage several windows."""
    tokenizer = loaded.need_tokenizer()
    asked = tokenizer.encode(question)[:MAX_QUESTION]
    ids, offsets = tokenizer.encode_with_offsets(passage)
    special = len(tokenizer.build_inputs([], [])[0])
    room = loaded.spec.max_length - special - len(asked)
    if room < 1:
        raise ValueError(f"{question[:40]!r}: the question leaves no room for the passage; shorten it")
    windows = []
    for start in range(0, max(1, len(ids) - room + min(STRIDE, room)), min(STRIDE, room)):
        part = ids[start : start + room]
        encoded = loaded.build(asked, part)
        first = len(encoded.ids) - 1 - len(part)  # the passage stands last, before one special token
        window = Window(passage, first, offsets[start : start + room])
        windows.append(Encoded(encoded.ids, encoded.types, window))
        if start + room >= len(ids):
            break
    return windows


def best_answer(pieces: Sequence[SpanPiece]) -> dict[str, Any]:
    """The span with the largest sum of logits, and the least score of the first token over the windows, which
    stands for no answer (SQuAD 2.0)."""
    best: tuple[float, str, int, int] | None = None
    for piece in pieces:
        window = piece.window
        count = len(window.offsets)
        if not count:
            continue
        starts = piece.starts[window.first : window.first + count]
        ends = piece.ends[window.first : window.first + count]
        sums = starts[:, None] + ends[None, :]
        gap = np.arange(count)[None, :] - np.arange(count)[:, None]
        sums = np.where((gap >= 0) & (gap < MAX_ANSWER), sums, -np.inf)
        start, end = np.unravel_index(int(sums.argmax()), sums.shape)
        score = float(sums[start, end])
        if best is None or score > best[0]:
            begin, stop = window.offsets[start][0], window.offsets[end][1]
            best = (score, window.passage[begin:stop], begin, stop)
    none = min(float(piece.starts[0] + piece.ends[0]) for piece in pieces)
    score, answer, begin, stop = best or (none, "", 0, 0)
    return {
        "answer": answer,
        "start": begin,
        "end": stop,
        "score": round(score, 6),
        "no_answer_score": round(none, 6),
    }
