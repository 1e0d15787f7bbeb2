"""Ranks of retrieved entries, where entries with equal scores share their mean rank, and metrics of these ranks."""

from collections.abc import Collection, Hashable, Sequence

import numpy as np

from bert_jax.metrics.score import Score, count_records, mean_score

# Scores are equal if they differ by at most this share of the largest: vectors and logits are float32.
RESOLUTION = 2.0**-23
# Vectors whose cosines are all above this are of a model that has collapsed: float32 has few values up to 1.
COLLAPSED = 1 - 1e-6


def tie_width(scores: np.ndarray) -> float:
    """Return the largest difference of two of ``scores`` [N] that counts as equal."""
    return RESOLUTION * float(np.abs(scores).max(initial=0.0))


def mean_ranks(scores: np.ndarray, right: np.ndarray, beyond: int = 0) -> np.ndarray:
    """Return float64[R]: the ranks (from 1) of the R entries that ``right`` (bool[N]) selects by ``scores``
    (float64[N], higher is better), in ascending order.

    Equal scores (:func:`tie_width`) are in random order, and a rank is the mean over these orders: for one right
    entry among equal ones it is their average rank. ``beyond``: number of further entries, not in ``scores``, that
    equal the lowest score. All ranks are NaN (undefined) if a score is not finite.
    """
    own = np.sort(scores[right])[::-1]
    if not np.isfinite(scores).all():
        return np.full(len(own), np.nan)
    width, ranks = tie_width(scores), np.empty(len(own))
    done = 0
    while done < len(own):
        score = own[done]
        alike = int(np.sum(own[done:] >= score - width))
        tied = int(np.sum(np.abs(scores - score) <= width))
        tied += beyond if score - scores.min() <= width else 0
        higher = int(np.sum(scores > score + width))
        ranks[done : done + alike] = higher + np.arange(1, alike + 1) * (tied + 1) / (alike + 1)
        done += alike
    return ranks


def first_rank_scores(ranks: np.ndarray) -> list[Score]:
    """Return the scores mrr and precision@1 of the ranks float64[n] of the first right entry of each query; inf: it
    was not found, NaN: the rank is undefined, and so are the scores."""
    is_first = np.where(np.isnan(ranks), np.nan, ranks == 1)
    return [mean_score("mrr", 1 / ranks), mean_score("precision@1", is_first)]


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Return ``vectors`` [..., E] divided by their Euclidean norms; zero vectors remain zero."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def have_collapsed(vectors: np.ndarray) -> bool:
    """Return True if the three or more ``vectors`` [N, E] have the same direction, as those of a model that has
    diverged; of many vectors, a thousand are compared with the first."""
    sample = np.asarray(vectors[:: 1 + len(vectors) // 1000], np.float64)
    lengths = np.linalg.norm(sample, axis=1)
    if len(sample) < 3 or not np.isfinite(lengths).all() or not lengths.all():
        return False
    return bool((sample @ sample[0] / lengths / lengths[0]).min() > COLLAPSED)


def retrieval_scores(
    ranked: Sequence[Sequence[Hashable]],
    relevant: Sequence[Collection[Hashable]],
    cutoffs: Sequence[int] = (1, 5, 10),
    scores: Sequence[np.ndarray] | None = None,
    beyond: Sequence[int] | None = None,
) -> list[Score]:
    """Return the scores mrr, precision@1, and recall@K and ndcg@K for each K of ``cutoffs``; a record is a query.

    ``ranked``: the retrieved ids of each query, best first, each id at most once. ``relevant``: the relevant ids,
    one or more for every query. ``scores``: the score of each retrieved id; equal ones share their mean rank
    (:func:`mean_ranks`, with the entries ``beyond`` the list). None: the rank is the place in the list. mrr: 1 /
    rank of the first relevant id in the entire list, 0 if the list contains no relevant id. ndcg: gain 1, discount
    log2(rank + 1), divided by the value of the best possible list. Raises ``ValueError`` for a query without
    relevant ids or with a repeated id.
    """
    count_records(ranked=ranked, relevant=relevant)
    if any(cutoff < 1 for cutoff in cutoffs):
        raise ValueError(f"cutoffs: {list(cutoffs)} is not allowed; every cutoff must be 1 or more")
    ranks = []
    for query, (ids, right) in enumerate(zip(ranked, map(frozenset, relevant), strict=True)):
        if not right:
            raise ValueError(f"query {query} has no relevant id; remove the query")
        if len(set(ids)) != len(ids):
            raise ValueError(f"query {query} has an id twice in its ranked list; give each id once")
        hits = np.array([one in right for one in ids], bool)
        more = 0 if beyond is None else beyond[query]
        ranks.append(
            np.flatnonzero(hits) + 1.0 if scores is None else mean_ranks(np.asarray(scores[query]), hits, more)
        )
    total = np.array([len(frozenset(right)) for right in relevant])
    first = np.array([one.min(initial=np.inf) for one in ranks])
    found = first_rank_scores(first)
    for cutoff in cutoffs:
        best = np.cumsum(1 / np.log2(np.arange(cutoff) + 2))[np.minimum(total, cutoff) - 1]
        kept = [one[one <= cutoff] for one in ranks]
        found.append(mean_score(f"recall@{cutoff}", np.array([len(one) for one in kept]) / total))
        found.append(mean_score(f"ndcg@{cutoff}", np.array([(1 / np.log2(one + 1)).sum() for one in kept]) / best))
    return found
