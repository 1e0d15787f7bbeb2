"""Metrics of a clustering against labels."""

from collections.abc import Hashable, Sequence

import numpy as np
from scipy.stats import entropy
from scipy.stats.contingency import crosstab

from bert_jax.metrics.score import count_records


def clustering_scores(gold: Sequence[Hashable], found: Sequence[Hashable]) -> dict[str, float]:
    """Return purity, adjusted_rand and nmi of the clusters ``found`` [n] against the labels ``gold`` [n].

    purity: share of records with the most frequent label of their cluster. adjusted_rand (Hubert and Arabie 1985):
    agreement on pairs of records, 0 by chance, 1 for equal partitions. nmi: mutual information divided by the mean
    of both entropies; 1 if both sides have one group. Raises ``ValueError`` for different or no numbers of records.
    """
    n = count_records(gold=gold, found=found)
    counts = crosstab(list(gold), list(found)).count
    rows, columns = counts.sum(axis=1), counts.sum(axis=0)
    return {
        "purity": float(counts.max(axis=0).sum() / n),
        "adjusted_rand": _adjusted_rand(_pairs(counts), _pairs(rows), _pairs(columns), n * (n - 1) / 2),
        "nmi": _nmi(counts / n, rows / n, columns / n),
    }


def _pairs(counts: np.ndarray) -> float:
    return float((counts * (counts - 1) / 2).sum())


def _adjusted_rand(both: float, gold: float, found: float, total: float) -> float:
    expected = gold * found / total if total else 0.0
    most = (gold + found) / 2
    # Every record alone in both, or all together in both.
    return 1.0 if most == expected else (both - expected) / (most - expected)


def _nmi(joint: np.ndarray, gold: np.ndarray, found: np.ndarray) -> float:
    entropies = entropy(gold) + entropy(found)
    return 1.0 if entropies == 0 else float(np.clip(2 * (entropies - entropy(joint.ravel())) / entropies, 0, 1))
