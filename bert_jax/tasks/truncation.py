"""Truncation of texts that exceed the maximum length (Sun et al. 2019, section 4.2, and other methods)."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bert_jax.config import TaskSettings
from bert_jax.tokenization import Tokenizer
from bert_jax.tokenization.tokenizer import longest_first

# The end of a sentence, after its punctuation: closing quotes and brackets, white space.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[。！？…])[」』”’）]*\s*|\n+")  # noqa: RUF001


def cut_text(
    text: str, ids: Sequence[int], budget: int, settings: TaskSettings, tokenizer: Tokenizer
) -> list[list[int]]:
    """Truncate ``ids``, the tokens of ``text``, to at most ``budget`` tokens. The result contains one list of
    tokens or, if ``settings.truncation`` is windows, one list per window."""
    how = settings.truncation
    if len(ids) <= budget:
        return [list(ids)]
    if how == "windows":
        spans = windows(len(ids), budget, min(settings.window_overlap, budget // 2))
        return [list(ids[start:end]) for start, end in spans[: settings.max_windows or None]]
    if how == "tail":
        return [list(ids[len(ids) - budget :])]
    if how == "head_tail":
        head = round(settings.head_share * budget)
        return [[*ids[:head], *ids[len(ids) - (budget - head) :]]]
    if how == "key_sentences":
        return [key_sentences(text, budget, tokenizer)]
    return [list(ids[:budget] if how == "head" else tokenizer.cut(ids, budget))]


def cut_pair(
    texts: tuple[str, str],
    ids: tuple[Sequence[int], Sequence[int]],
    budget: int,
    settings: TaskSettings,
    tokenizer: Tokenizer,
) -> tuple[list[int], list[int]]:
    """Truncate both texts of a pair; :func:`longest_first` determines the number of tokens that remain of each
    text, and ``settings.truncation`` determines how each text is truncated."""
    kept = longest_first(len(ids[0]), len(ids[1]), budget)
    a, b = (
        cut_text(text, side, room, settings, tokenizer)[0]
        for text, side, room in zip(texts, ids, kept, strict=True)
    )
    return a, b


def windows(count: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """Return (start, end) of windows of ``size`` tokens that cover ``count`` tokens.

    Adjacent windows share ``overlap`` tokens; the last window may share more, so that it is full.
    """
    starts = [*range(0, max(count - size, 0), size - overlap), max(count - size, 0)]
    return [(start, min(start + size, count)) for start in starts]


def key_sentences(text: str, budget: int, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of the most central sentences of ``text``, in text order, with at most ``budget`` tokens in
    total.

    Centrality is the cosine between the TF-IDF vectors of a sentence and of the text (Radev et al. 2004: centroid).
    A sentence that exceeds the remaining budget is skipped; if no sentence fits, the result is the beginning of the
    most central sentence.
    """
    sentences = [ids for ids in tokenizer.encode_batch(_split(text)) if ids]
    order = np.argsort(-centrality(sentences), kind="stable")
    chosen, room = set(), budget
    for number in order:
        if len(sentences[number]) <= room:
            chosen.add(int(number))
            room -= len(sentences[number])
    if not chosen:
        return sentences[order[0]][:budget]
    return [piece for number in sorted(chosen) for piece in sentences[number]]


def centrality(sentences: Sequence[Sequence[int]]) -> np.ndarray:
    """Return float64[n], the cosine of the TF-IDF vector of each sentence with the sum of all vectors.

    In the inverse document frequency (idf), log(n / df) + 1, each sentence counts as a document.
    """
    counts = [Counter(sentence) for sentence in sentences]
    documents = Counter(piece for count in counts for piece in count)
    idf = {piece: np.log(len(sentences) / df) + 1 for piece, df in documents.items()}
    vectors = [{piece: n * idf[piece] for piece, n in count.items()} for count in counts]
    total: Counter[int] = Counter()
    for vector in vectors:
        total.update(vector)
    norm = np.sqrt(sum(value**2 for value in total.values()))
    dots = [sum(value * total[piece] for piece, value in vector.items()) for vector in vectors]
    norms = [np.sqrt(sum(value**2 for value in vector.values())) for vector in vectors]
    return np.array([dot / (own * norm) if own else 0.0 for dot, own in zip(dots, norms, strict=True)])


def _split(text: str) -> list[str]:
    ends = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    return [part for start, end in itertools.pairwise(ends) if (part := text[start:end].strip())]
