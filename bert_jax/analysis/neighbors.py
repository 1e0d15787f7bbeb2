"""Exact nearest neighbors of vectors, in blocks, and their retrieval scores.

Shapes: Q queries, N entries of the corpus, E width of a vector, K hits, W candidates.
"""

from collections.abc import Collection as Container
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bert_jax.analysis.collection import BLOCK, Collection, Id, is_id, lengths_of
from bert_jax.inference.text_files import read_texts
from bert_jax.metrics.resampling import Interval, confidence_intervals
from bert_jax.metrics.retrieval import retrieval_scores

Similarity = Literal["cosine", "dot"]
SIMILARITIES: tuple[Similarity, ...] = ("cosine", "dot")
# float64 numbers that a block of queries may take: its scores of a block of the corpus, or its candidates.
_BUDGET = 2**22
# Candidates kept beyond the hits, so that the rounding of float32 seldom reaches the last hit.
_SPARE = 16
_CUTOFFS = (1, 5, 10, 20, 50, 100)


class Hits(NamedTuple):
    """Rows of the corpus, int64[K], best first, and their scores, float64[K]."""

    rows: np.ndarray
    scores: np.ndarray


def nearest(
    queries: np.ndarray,
    corpus: np.ndarray,
    top: int,
    *,
    similarity: Similarity = "cosine",
    own: np.ndarray | None = None,
) -> Iterator[Hits]:
    """The ``top`` entries of ``corpus`` [N, E] that are most similar to each of ``queries`` [Q, E], in order.

    Scores are those of float64, and equal ones (an entry that is there twice) go by the lower row. ``own``: int[Q],
    the row of the corpus that is left out for each query (-1: none). No array has Q times N numbers: float32
    products of blocks choose candidates, float64 decides among them, and a query whose candidates are not surely
    all that matter (many equal entries) is compared with the whole corpus once more.

    Raises ``ValueError`` for different widths, ``top`` below 1, and vectors of zeros where the cosine is asked for.
    """
    if queries.shape[1] != corpus.shape[1]:
        raise ValueError(
            f"the queries' vectors have {queries.shape[1]} numbers, the corpus's {corpus.shape[1]}; "
            "both must come of the same model"
        )
    if top < 1:
        raise ValueError(f"top: {top} is not allowed; allowed: 1 or more")
    if similarity not in SIMILARITIES:
        raise ValueError(f"similarity: {similarity!r} is not allowed; allowed: {', '.join(SIMILARITIES)}")
    is_cosine = similarity == "cosine"
    lengths_N = lengths_of(corpus, "corpus") if is_cosine else np.ones(len(corpus))
    lengths_Q = lengths_of(queries, "queries") if is_cosine else np.ones(len(queries))
    longest = 1.0 if is_cosine else max(_greatest_length(corpus), 1e-30)
    width = min(top + _SPARE, len(corpus))
    size = max(1, _BUDGET // max(min(BLOCK, len(corpus)), width * corpus.shape[1]))
    for start in range(0, len(queries), size):
        part = slice(start, start + size)
        query_QxE = np.asarray(queries[part], np.float64) / lengths_Q[part, None]
        left_out = np.full(len(query_QxE), -1) if own is None else np.asarray(own[part])
        yield from _block(query_QxE, corpus, lengths_N, top, width, left_out, longest)


def _block(
    query_QxE: np.ndarray,
    corpus: np.ndarray,
    lengths_N: np.ndarray,
    top: int,
    width: int,
    own_Q: np.ndarray,
    longest: float,
) -> Iterator[Hits]:
    rows_QxW, rough_QxW = _candidates(query_QxE, corpus, lengths_N, width)
    exact_QxW = _exact(query_QxE[:, None], corpus[rows_QxW], lengths_N[rows_QxW])
    exact_QxW[rows_QxW == own_Q[:, None]] = -np.inf
    order_QxK = np.lexsort((rows_QxW, -exact_QxW), axis=-1)[:, :top]
    # A float32 product of E numbers is off by at most (E + 4) roundings of the product of both lengths; whoever is
    # no candidate has a rough score of at most the lowest candidate's.
    error_Q = (corpus.shape[1] + 4) * 2.0**-24 * np.linalg.norm(query_QxE, axis=1) * longest
    last_Q = np.take_along_axis(exact_QxW, order_QxK[:, -1:], axis=1)[:, 0]
    sure_Q = rough_QxW.min(axis=1) + error_Q < last_Q
    for number, order in enumerate(order_QxK):
        rows, scores = rows_QxW[number, order], exact_QxW[number, order]
        if width < len(corpus) and not sure_Q[number]:
            rows, scores = _whole(query_QxE[number], corpus, lengths_N, top, own_Q[number])
        there = scores > -np.inf
        yield Hits(rows[there], scores[there])


def _candidates(
    query_QxE: np.ndarray, corpus: np.ndarray, lengths_N: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """int64[Q, W] rows with the greatest float32 scores, and those, in no order."""
    query = query_QxE.astype(np.float32)
    rows = np.zeros((len(query), 0), np.int64)
    rough = np.zeros((len(query), 0), np.float32)
    for start in range(0, len(corpus), BLOCK):
        block = corpus[start : start + BLOCK] / lengths_N[start : start + BLOCK, None]
        scores = query @ block.astype(np.float32).T
        found, best = _greatest(scores, width)
        rows, rough = np.hstack([rows, found + start]), np.hstack([rough, best])
        kept, rough = _greatest(rough, width)
        rows = np.take_along_axis(rows, kept, axis=1)
    return rows, rough


def _greatest(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns of the ``count`` greatest numbers of each row, and those numbers."""
    columns = scores.shape[1]
    if columns <= count:
        return np.broadcast_to(np.arange(columns), scores.shape), scores
    chosen = np.argpartition(scores, columns - count, axis=1)[:, columns - count :]
    return chosen, np.take_along_axis(scores, chosen, axis=1)


def _whole(
    query_E: np.ndarray, corpus: np.ndarray, lengths_N: np.ndarray, top: int, own: int
) -> tuple[np.ndarray, np.ndarray]:
    scores_N = np.empty(len(corpus))
    for start in range(0, len(corpus), BLOCK):
        part = slice(start, start + BLOCK)
        scores_N[part] = _exact(query_E[None], corpus[part], lengths_N[part])
    if own >= 0:
        scores_N[own] = -np.inf
    order = np.argsort(-scores_N, kind="stable")[:top]
    return order, scores_N[order]


def _exact(query: np.ndarray, entries: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float64 products over the last dimension. Summed row by row: a matrix product would round equal entries
    differently by where they stand."""
    return (query * entries.astype(np.float64)).sum(axis=-1) / lengths


def _greatest_length(vectors: np.ndarray) -> float:
    parts = (np.asarray(vectors[i : i + BLOCK], np.float64) for i in range(0, len(vectors), BLOCK))
    return max(float(np.linalg.norm(part, axis=1).max()) for part in parts)


# ------------------------------------------------------------------ JSON lines and scores


def hit_lines(found: Iterator[Hits], queries: Collection, corpus: Collection) -> Iterator[dict[str, Any]]:
    """``{"query": id, "text", "hits": [{"id", "score", "text"}]}`` of every query; texts where there are any."""
    for number, hits in enumerate(found):
        yield {
            "query": queries.ids[number],
            **queries.shown(number),
            "hits": [
                {"id": corpus.ids[row], "score": round(float(score), 7), **corpus.shown(row)}
                for row, score in zip(hits.rows.tolist(), hits.scores, strict=True)
            ],
        }


def read_relevant(source: Path, queries: Collection, corpus: Collection) -> dict[Id, frozenset[Id]]:
    """The relevant ids of each query of ``{"query": id, "relevant": [ids]}`` lines. Raises ``ValueError`` with the
    file and line for what does not fit."""
    known, entries = set(queries.ids), set(corpus.ids)
    relevant: dict[Id, frozenset[Id]] = {}
    for number, line in enumerate(read_texts((), f"{source}", True), 1):
        where, query, ids = f"{source}: entry {number}", line.get("query"), line.get("relevant")
        if not is_id(query) or not isinstance(ids, list) or not ids or not all(map(is_id, ids)):
            raise ValueError(f'{where}: not {{"query": id, "relevant": [id, ...]}}, with one relevant id or more')
        if query not in known:
            raise ValueError(f"{where}: the query {query!r} is not in {queries.name}")
        if query in relevant:
            raise ValueError(f"{where}: the query {query!r} occurs twice; give all its ids in one line")
        strange = [one for one in ids if one not in entries]
        if strange:
            raise ValueError(f"{where}: the relevant id {strange[0]!r} is not in {corpus.name}")
        relevant[query] = frozenset(ids)
    return relevant


def relevance(
    ranked: Sequence[Sequence[Id]], relevant: Sequence[Container[Id]], top: int, seed: int = 0
) -> Mapping[str, Interval]:
    """mrr, precision@1, recall@K and ndcg@K with 95% bootstrap intervals over the queries, for each K of 1, 5, 10,
    20, 50, 100 that is not above ``top``, and ``top`` itself."""
    cutoffs = sorted({top, *(cutoff for cutoff in _CUTOFFS if cutoff < top)})
    scores = retrieval_scores(ranked, relevant, cutoffs)
    intervals = confidence_intervals(scores, len(ranked), seed)
    return {score.name: interval for score, interval in zip(scores, intervals, strict=True)}
