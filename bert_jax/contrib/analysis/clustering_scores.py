"""Metrics of a clustering against labels."""

from collections.abc import Hashable, Sequence

import numpy as np
from scipy.stats import entropy
from scipy.stats.contingency import crosstab

from bert_jax.metrics.score import count_records


def clustering_scores(gold: Sequence[Hashable], found: Sequence[Hashable]) -> dict[str, float]:
    """Return purity, adjusted_rand and nmi of the clusters ``found`` [n] against the labels ``gold`` [n].

    purity: share of records whose label is the most frequent one in their cluster. adjusted_rand (Hubert and Arabie
    1985): agreement on pairs of records, 0 by chance, 1 for equal partitions. nmi: mutual information divided by
    the mean of the two entropies; 1 if there is only one cluster and one label. Raises ``ValueError`` if the
    numbers of records differ or are 0.
    """
    n = count_records(gold=gold, found=found)
    counts = crosstab(list(gold), list(found)).count
    rows, columns = counts.sum(axis=1), counts.sum(axis=0)
    both, of_gold, of_found, total = (float((c * (c - 1) / 2).sum()) for c in (counts, rows, columns, np.array(n)))
    expected, most = of_gold * of_found / total if total else 0.0, (of_gold + of_found) / 2
    entropies = entropy(rows / n) + entropy(columns / n)
    mutual = entropies - entropy(counts.ravel() / n)
    return {
        "purity": float(counts.max(axis=0).sum() / n),
        # most == expected: one cluster and one label, or a different cluster and label for each record.
        "adjusted_rand": 1.0 if most == expected else (both - expected) / (most - expected),
        "nmi": 1.0 if entropies == 0 else float(np.clip(2 * mutual / entropies, 0, 1)),
    }
