"""Metrics of ranked lists of retrieved ids."""

from collections.abc import Collection, Hashable, Sequence

import numpy as np

from bert_jax.metrics.score import Score, count_records, mean_score


def retrieval_scores(
    ranked: Sequence[Sequence[Hashable]],
    relevant: Sequence[Collection[Hashable]],
    cutoffs: Sequence[int] = (1, 5, 10),
) -> list[Score]:
    """Return the scores mrr, precision@1, and recall@K and ndcg@K for each K of ``cutoffs``; a record is a query.

    ``ranked``: the retrieved ids of each query, best first, each id at most once. ``relevant``: the relevant ids,
    one or more for every query. mrr: 1 / rank of the first relevant id in the entire list, 0 if the list contains
    no relevant id. ndcg: gain 1, discount log2(rank + 1), divided by the value of the best possible list. Raises
    ``ValueError`` for a query without relevant ids or with a repeated id.
    """
    n = count_records(ranked=ranked, relevant=relevant)
    if any(cutoff < 1 for cutoff in cutoffs):
        raise ValueError(f"cutoffs: {list(cutoffs)} is not allowed; every cutoff must be 1 or more")
    longest = max(1, *cutoffs, *map(len, ranked))
    hits = np.zeros((n, longest), bool)
    for query, (ids, right) in enumerate(zip(ranked, map(frozenset, relevant), strict=True)):
        if not right:
            raise ValueError(f"query {query} has no relevant id; remove the query")
        if len(set(ids)) != len(ids):
            raise ValueError(f"query {query} has an id twice in its ranked list; give each id once")
        hits[query, : len(ids)] = [one in right for one in ids]
    total = np.array([len(frozenset(right)) for right in relevant])
    discount = 1 / np.log2(np.arange(longest) + 2)
    first = np.where(hits.any(axis=1), hits.argmax(axis=1) + 1, np.inf)
    scores = [mean_score("mrr", 1 / first), mean_score("precision@1", hits[:, 0])]
    for cutoff in cutoffs:
        best = np.cumsum(discount)[np.minimum(total, cutoff) - 1]
        scores.append(mean_score(f"recall@{cutoff}", hits[:, :cutoff].sum(axis=1) / total))
        scores.append(mean_score(f"ndcg@{cutoff}", hits[:, :cutoff] @ discount[:cutoff] / best))
    return scores
