"""Exact nearest-neighbor search over vectors, in blocks, and retrieval metrics of the hits.

Shapes: Q queries, N entries of the corpus, E width of a vector, K hits, W candidates.
"""

import logging
from collections.abc import Collection as Container
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from bert_jax.contrib.analysis.texts_or_vectors import BLOCK, Collection, Id, blocks, is_id, lengths_of, norms
from bert_jax.inference.text_files import read_texts
from bert_jax.json_values import Json
from bert_jax.metrics.resampling import Interval, confidence_intervals
from bert_jax.metrics.retrieval import have_collapsed, retrieval_scores, tie_width

Similarity = Literal["cosine", "dot"]
SIMILARITIES: tuple[Similarity, ...] = ("cosine", "dot")
# Maximum number of float64 values of a block of queries: its scores for a block of the corpus, or its candidates.
_BUDGET = 2**22
# Additional candidates, so that float32 rounding seldom decides about the last hit.
_SPARE = 16
_CUTOFFS = (1, 5, 10, 20, 50, 100)
_log = logging.getLogger(__name__)


class Hits(NamedTuple):
    """The hits of a query: row indices in the corpus, int64[K], by decreasing score, and the scores, float64[K].
    ``beyond``: number of further entries whose score equals the last one."""

    rows: np.ndarray
    scores: np.ndarray
    beyond: int = 0

    @classmethod
    def of(cls, rows: np.ndarray, scores: np.ndarray, every: np.ndarray) -> "Hits":
        """Return the hits ``rows`` with their ``scores``, which are among the scores ``every``."""
        if not len(scores):
            return cls(rows, scores)
        width = tie_width(scores)
        tied, kept = (int(np.sum(np.abs(one - scores[-1]) <= width)) for one in (every, scores))
        return cls(rows, scores, tied - kept)


def nearest(
    queries: np.ndarray,
    corpus: np.ndarray,
    top: int,
    *,
    similarity: Similarity = "cosine",
    own: np.ndarray | None = None,
) -> Iterator[Hits]:
    """Yield, for each row of ``queries`` [Q, E], the ``top`` most similar entries of ``corpus`` [N, E].

    Scores are computed in float64; entries with equal scores are sorted by row index. ``own`` int[Q] contains
    the row index of the corpus entry to exclude for each query (-1: none). No array has Q x N elements: float32
    products of blocks select candidates, which are ranked in float64. If the candidates of a query may not include
    all of the best entries because many entries are equal, the query is compared with the entire corpus in float64.

    Raises ``ValueError`` if the widths differ, if ``top`` is below 1, and, with ``similarity`` "cosine", if a
    vector is all zeros.
    """
    if queries.shape[1] != corpus.shape[1]:
        widths = f"{queries.shape[1]}, but the corpus vectors have width {corpus.shape[1]}"
        raise ValueError(f"the vectors of the queries have width {widths}; use the same model for both")
    if top < 1:
        raise ValueError(f"top: {top} is not allowed; use 1 or more")
    if similarity not in SIMILARITIES:
        raise ValueError(f"similarity: {similarity!r} is not allowed; use one of {', '.join(SIMILARITIES)}")
    if have_collapsed(corpus):
        _log.warning(
            "WARNING: all vectors of the corpus are equal (cosines above 0.999999): the model has collapsed, and "
            "the hits are arbitrary"
        )
    is_cosine = similarity == "cosine"
    lengths_N = lengths_of(corpus, "corpus") if is_cosine else np.ones(len(corpus))
    lengths_Q = lengths_of(queries, "queries") if is_cosine else np.ones(len(queries))
    longest = 1.0 if is_cosine else max(norms(corpus).max(), 1e-30)
    width = min(top + _SPARE, len(corpus))
    size = max(1, _BUDGET // max(min(BLOCK, len(corpus)), width * corpus.shape[1]))
    for part in blocks(len(queries), size):
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
    # The error of a float32 product of E numbers is at most (E + 4) rounding errors of the product of both lengths;
    # scores that differ by two of them are equal. The rough score of an entry that is not a candidate is at most
    # that of the lowest candidate.
    error_Q = (corpus.shape[1] + 6) * 2.0**-24 * np.linalg.norm(query_QxE, axis=1) * longest
    last_Q = np.take_along_axis(exact_QxW, order_QxK[:, -1:], axis=1)[:, 0]
    sure_Q = rough_QxW.min(axis=1) + error_Q < last_Q
    for number, order in enumerate(order_QxK):
        rows, every = rows_QxW[number, order], exact_QxW[number]
        scores = every[order]
        if width < len(corpus) and not sure_Q[number]:
            rows, every = _whole(query_QxE[number], corpus, lengths_N, top, own_Q[number])
            scores = every[rows]
        included = scores > -np.inf
        yield Hits.of(rows[included], scores[included], every)


def _candidates(
    query_QxE: np.ndarray, corpus: np.ndarray, lengths_N: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the corpus rows with the greatest float32 scores, int64[Q, W], and these scores, unsorted."""
    query = query_QxE.astype(np.float32)
    rows = np.zeros((len(query), 0), np.int64)
    rough = np.zeros((len(query), 0), np.float32)
    for part in blocks(len(corpus)):
        block = corpus[part] / lengths_N[part, None]
        scores = query @ block.astype(np.float32).T
        found, best = _greatest(scores, width)
        rows, rough = np.hstack([rows, found + part.start]), np.hstack([rough, best])
        kept, rough = _greatest(rough, width)
        rows = np.take_along_axis(rows, kept, axis=1)
    return rows, rough


def _greatest(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the column indices of the ``count`` greatest values of each row, and these values."""
    columns = scores.shape[1]
    if columns <= count:
        return np.broadcast_to(np.arange(columns), scores.shape), scores
    chosen = np.argpartition(scores, columns - count, axis=1)[:, columns - count :]
    return chosen, np.take_along_axis(scores, chosen, axis=1)


def _whole(
    query_E: np.ndarray, corpus: np.ndarray, lengths_N: np.ndarray, top: int, own: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the ``top`` best entries, and the scores of all entries."""
    scores_N = np.empty(len(corpus))
    for part in blocks(len(corpus)):
        scores_N[part] = _exact(query_E[None], corpus[part], lengths_N[part])
    if own >= 0:
        scores_N[own] = -np.inf
    return np.argsort(-scores_N, kind="stable")[:top], scores_N


def _exact(query: np.ndarray, entries: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the float64 scores of ``entries``, computed from products over the last dimension.

    The products are summed row by row, because a matrix product would round equal entries differently depending on
    their position.
    """
    return (query * entries.astype(np.float64)).sum(axis=-1) / lengths


# ------------------------------------------------------------------ JSON lines and scores


def hit_lines(found: Iterator[Hits], queries: Collection, corpus: Collection) -> Iterator[dict[str, Json]]:
    """Yield ``{"query": id, "text", "hits": [{"id", "score", "text"}]}`` for every query.

    The key "text" is omitted if the collection has no texts.
    """
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
    """Read the relevant ids of each query from ``{"query": id, "relevant": [ids]}`` lines.

    Raises ``ValueError``, which names the file and the entry, for a line in another format, an unknown id, or a
    query that occurs twice.
    """
    known, entries = set(queries.ids), set(corpus.ids)
    relevant: dict[Id, frozenset[Id]] = {}
    for number, line in enumerate(read_texts((), f"{source}", True), 1):
        where, entry = f"{source}: entry {number}", {} if isinstance(line, str) else line
        query, given = entry.get("query"), entry.get("relevant")
        ids = [one for one in given if is_id(one)] if isinstance(given, list) else []
        if not is_id(query) or not ids or given != ids:
            raise ValueError(
                f'{where}: must be {{"query": id, "relevant": [id, ...]}} with at least one relevant id'
            )
        if query not in known:
            raise ValueError(f"{where}: the query {query!r} is not in {queries.name}")
        if query in relevant:
            raise ValueError(f"{where}: the query {query!r} occurs twice; give all its relevant ids on one line")
        strange = [one for one in ids if one not in entries]
        if strange:
            raise ValueError(f"{where}: the relevant id {strange[0]!r} is not in {corpus.name}")
        relevant[query] = frozenset(ids)
    return relevant


def relevance(
    found: Sequence[Hits], ids: Sequence[Id], relevant: Sequence[Container[Id]], top: int, seed: int = 0
) -> Mapping[str, Interval]:
    """Return the metrics mrr, precision@1, recall@K and ndcg@K of the hits ``found`` of each query, with 95%
    bootstrap intervals over the queries. ``ids``: ids of the corpus entries.

    K takes the value ``top`` and each smaller value among 1, 5, 10, 20, 50 and 100. Hits of equal scores share
    their mean rank.
    """
    cutoffs = sorted({top, *(cutoff for cutoff in _CUTOFFS if cutoff < top)})
    ranked = [[ids[row] for row in hits.rows.tolist()] for hits in found]
    values, beyond = [hits.scores for hits in found], [hits.beyond for hits in found]
    scores = retrieval_scores(ranked, relevant, cutoffs, values, beyond)
    intervals = confidence_intervals(scores, len(ranked), seed)
    return {score.name: interval for score, interval in zip(scores, intervals, strict=True)}
