"""Find the words that are nearest to a word.

A word is compared by its input embedding, which is one vector for all its meanings, or by the contextual vector of
an occurrence in a text.

Shapes: Q queries, N candidates, V pieces, H width.
"""

import heapq
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.contrib.analysis.neighbors import nearest
from bert_jax.contrib.analysis.word_vectors import (
    WordVectors,
    hidden_layers,
    sentence_word_vectors,
    word_spans,
    word_tokens,
    word_vectors,
)
from bert_jax.inference.batching import BatchOptions
from bert_jax.inference.engine import Engine
from bert_jax.json_values import Json
from bert_jax.metrics.retrieval import unit_vectors
from bert_jax.model.embeddings import word_table
from bert_jax.tasks.word_windows import Span

# Words that are run alone together.
_ALONE = 1024
# Control pieces such as [unused3] and <s>.
_CONTROL = re.compile(r"[\[<].*[\]>]")
# Characters of the context that is printed on each side of a word.
_CONTEXT = 40


class Neighbor(NamedTuple):
    """A word and its cosine similarity to the query; for an occurrence, also its text and its character range."""

    word: str
    score: float
    text: str | None = None
    span: Span | None = None


class Occurrence(NamedTuple):
    """A query in a text: its character range, and its vector float32[H]."""

    word: str
    span: Span
    vector: np.ndarray


# ------------------------------------------------------------------ input embeddings


def embedding_table(loaded: Engine) -> np.ndarray:
    """Return the input embeddings float32[V, E]. Raises ``ValueError`` for a network without such a table."""
    table = word_table(loaded.params)
    if table is None:
        raise ValueError(f"{loaded.name}: the network has no table of input embeddings; use --in")
    return table[: loaded.spec.model.vocab_size]


def vocabulary_words(loaded: Engine, limit: int | None = None) -> tuple[list[str], np.ndarray]:
    """Return the words of the vocabulary and their ids, int64[N], by ascending id: pieces that are whole words,
    with a letter or digit, and no special tokens. ``limit``: only so many words, those with the lowest ids, which
    are usually the most frequent ones."""
    tokenizer = loaded.need_tokenizer()
    size = min(tokenizer.vocab_size, loaded.spec.model.vocab_size)
    possible = np.flatnonzero(~(tokenizer.continuation | tokenizer.special)[:size])
    texts = [tokenizer.decode([i]).strip() for i in possible.tolist()]
    kept = [
        (text, i)
        for text, i in zip(texts, possible.tolist(), strict=True)
        if i != tokenizer.unk_id and any(map(str.isalnum, text)) and not _CONTROL.fullmatch(text)
    ]
    before = " " if tokenizer.space_before_word else ""
    encoded = tokenizer.encode_batch([before + text for text, _ in kept])
    # A piece is a whole word if it is the encoding of its own text.
    words = [(text, i) for (text, i), ids in zip(kept, encoded, strict=True) if ids == [i]][:limit]
    if not words:
        raise ValueError(f"{loaded.name}: the vocabulary has no whole words; use --corpus")
    return [text for text, _ in words], np.array([i for _, i in words], np.int64)


def terms_of(words: Sequence[str]) -> list[list[tuple[float, str]]]:
    """Return the queries as lists of (sign, word): one query per word, or, with + and - between the words, a single
    one. Raises ``ValueError`` unless every sign stands between two words."""
    if not {"+", "-"} & set(words):
        return [[(1.0, word)] for word in words]
    signs, operands = words[1::2], words[::2]
    if len(words) % 2 == 0 or set(signs) - {"+", "-"} or {"+", "-"} & set(operands):
        raise ValueError(f"{' '.join(words)}: + and - must stand between words, as in king - man + woman")
    return [[(-1.0 if sign == "-" else 1.0, word) for sign, word in zip(["+", *signs], operands, strict=True)]]


def static_neighbors(
    loaded: Engine, queries: Sequence[Sequence[tuple[float, str]]], top: int
) -> Iterator[list[Neighbor]]:
    """Yield the ``top`` vocabulary words nearest to each query by the cosine of input embeddings.

    The vector of a word is the mean of its pieces; a query vector is the signed sum of the unit vectors of its
    words (3CosAdd; Mikolov et al. 2013, Levy and Goldberg 2014). The words of a query are excluded. Raises
    ``ValueError`` for a word without known pieces.
    """
    table, (names, ids) = embedding_table(loaded), vocabulary_words(loaded)
    vectors = []
    for query in queries:
        tokens = word_tokens(loaded.need_tokenizer(), [word for _, word in query])
        parts = [table[own].mean(axis=0, dtype=np.float64) for own in tokens]
        vectors.append(sum(sign * unit_vectors(part) for (sign, _), part in zip(query, parts, strict=True)))
    fold = _folding(loaded)
    excluded = [{fold(word) for _, word in query} for query in queries]
    yield from _ranked(np.stack(vectors), names, table[ids], excluded, top, fold)


def _ranked(
    queries: np.ndarray,
    names: Sequence[str],
    vectors: np.ndarray,
    excluded: Sequence[set[str]],
    top: int,
    fold: Callable[[str], str],
) -> Iterator[list[Neighbor]]:
    kept = np.flatnonzero(vectors.any(axis=1))
    for hits, own in zip(nearest(queries, vectors[kept], top + max(map(len, excluded))), excluded, strict=True):
        pairs = ((names[kept[row]], float(score)) for row, score in zip(hits.rows, hits.scores, strict=True))
        yield [Neighbor(*pair) for pair in itertools.islice((p for p in pairs if fold(p[0]) not in own), top)]


def _folding(loaded: Engine) -> Callable[[str], str]:
    """Return the function that makes texts comparable: of lower case if the tokenizer lower-cases."""
    return str.casefold if loaded.need_tokenizer().lower_case else str


# ------------------------------------------------------------------ occurrences in texts


def default_layer(loaded: Engine) -> int:
    """Return the layer at three quarters of the depth: the last layers of a network serve its objective more than
    the meaning of the word (Coenen et al. 2019; Ethayarajh 2019)."""
    return math.ceil(3 * (hidden_layers(loaded) - 1) / 4)


def find_occurrences(
    loaded: Engine,
    words: Sequence[str],
    text: str,
    layer: int,
    occurrence: int = 1,
    batches: BatchOptions = BatchOptions(),
) -> list[Occurrence]:
    """Find the ``occurrence``-th occurrence (from 1) of each of ``words`` in ``text``, and its vector at ``layer``.

    A word that :func:`word_spans` splits, such as "don't", is searched as a sequence of words; its vector is their
    mean. Case matters unless the tokenizer lower-cases. Raises ``ValueError`` if the word occurs less often in the
    text, or has no known piece.
    """
    fold = _folding(loaded)
    word_tokens(loaded.need_tokenizer(), words)
    ((spans, vectors),) = word_vectors(loaded, [text], layers=(layer,), batches=batches)
    present = [fold(text[begin:end]) for begin, end in spans]
    occurrences = []
    for word in words:
        parts = [fold(word[begin:end]) for begin, end in word_spans(word)]
        places = [i for i in range(len(present)) if parts and present[i : i + len(parts)] == parts]
        if not places:
            raise ValueError(f"{word!r}: not a word of the text {text[:80]!r}; write it as in the text")
        if not 1 <= occurrence <= len(places):
            raise ValueError(
                f"--occurrence: {occurrence} is not allowed; the text has {len(places)} occurrence(s) of {word!r}, "
                "counted from 1"
            )
        at = slice(places[occurrence - 1], places[occurrence - 1] + len(parts))
        own = spans[at]
        occurrences.append(Occurrence(word, (own[0][0], own[-1][1]), vectors[0, at].mean(axis=0)))
    return occurrences


def vocabulary_neighbors(
    loaded: Engine,
    queries: Sequence[Occurrence],
    layer: int,
    top: int,
    *,
    candidates: int,
    batches: BatchOptions = BatchOptions(),
) -> Iterator[list[Neighbor]]:
    """Yield the ``top`` vocabulary words nearest to each occurrence, by the cosine of vectors at ``layer``.

    The vector of a vocabulary word is computed from the word alone, between the special tokens of the model; for a
    model without such a frame (GPT) it follows the first token. The candidates are the ``candidates`` words with
    the lowest ids, excluding the word itself.
    """
    tokenizer = loaded.need_tokenizer()
    names, _ = vocabulary_words(loaded, candidates)
    lead = () if tokenizer.framed else (tokenizer.cls_id,)
    alone = sentence_word_vectors(
        loaded, ([name] for name in names), layers=(layer,), lead=lead, window=_ALONE, batches=batches
    )
    vectors = np.stack([one[0, 0] for one in alone])
    fold = _folding(loaded)
    excluded = [{fold(query.word)} for query in queries]
    yield from _ranked(np.stack([query.vector for query in queries]), names, vectors, excluded, top, fold)


def corpus_neighbors(
    loaded: Engine,
    queries: Sequence[Occurrence],
    text: str,
    corpus: Iterable[str],
    layer: int,
    top: int,
    batches: BatchOptions = BatchOptions(),
) -> list[list[Neighbor]]:
    """Return the ``top`` occurrences in the texts of ``corpus`` nearest to each query, by the cosine of vectors at
    ``layer``. Every word with a letter or digit is a candidate, except for the query itself in ``text``. The texts
    are read once, and memory does not grow with their number."""
    unit_QxH = np.stack([unit_vectors(query.vector.astype(np.float64)) for query in queries])
    # Heaps of (score, -order, neighbor): the worst of the best is first, and of equal scores the earlier text wins.
    best: list[list[tuple[float, int, Neighbor]]] = [[] for _ in queries]
    order = itertools.count()
    first, second = itertools.tee(corpus)
    for one, (spans, vectors) in zip(
        first, _checked(word_vectors(loaded, second, layers=(layer,), batches=batches)), strict=True
    ):
        kept = [i for i, (begin, end) in enumerate(spans) if any(map(str.isalnum, one[begin:end]))]
        words_WxH = vectors[0, kept].astype(np.float64)
        norms_W = np.maximum(np.linalg.norm(words_WxH, axis=1), 1e-30)
        scores_QxW = (unit_QxH @ words_WxH.T) / norms_W
        for query, heap, scores in zip(queries, best, scores_QxW, strict=True):
            for i, score in zip(kept, scores.tolist(), strict=True):
                if len(heap) == top and score <= heap[0][0]:
                    continue
                if one == text and spans[i] == query.span:
                    continue
                begin, end = spans[i]
                entry = (score, -next(order), Neighbor(one[begin:end], score, one, spans[i]))
                (heapq.heappushpop if len(heap) == top else heapq.heappush)(heap, entry)
    return [[neighbor for *_, neighbor in sorted(heap, reverse=True)] for heap in best]


def _checked(words: Iterable[WordVectors]) -> Iterator[WordVectors]:
    for one in words:
        if not np.isfinite(one.vectors).all():
            raise ValueError("a vector of a word contains NaN or infinity; the model is damaged or diverged")
        yield one


# ------------------------------------------------------------------ lines


def neighbor_line(query: str, neighbors: Sequence[Neighbor], **fields: Json) -> dict[str, Json]:
    """Return ``{"word", ..., "neighbors": [{"word", "score", "text", "start", "end"}]}``; text and character range
    are those of an occurrence. ``fields`` are added after the word."""
    rows = []
    for one in neighbors:
        row: dict[str, Json] = {"word": one.word, "score": round(one.score, 7)}
        if one.span is not None:
            row |= {"text": one.text, "start": one.span[0], "end": one.span[1]}
        rows.append(row)
    return {"word": query, **fields, "neighbors": rows}


def printed(neighbor: Neighbor) -> str:
    """Return a neighbor as a line of text; an occurrence is shown in brackets with the words around it."""
    if neighbor.text is None or neighbor.span is None:
        return f"  {neighbor.score:.3f}  {neighbor.word}"
    begin, end = neighbor.span
    left, right = neighbor.text[max(0, begin - _CONTEXT) : begin], neighbor.text[end : end + _CONTEXT]
    shown = " ".join(f"{left}[{neighbor.text[begin:end]}]{right}".split())
    return f"  {neighbor.score:.3f}  {shown}"
