"""Metrics of groups that were found without labels, against labels."""

from collections.abc import Hashable, Sequence

import numpy as np

from bert_jax.metrics.score import count_records


def clustering_scores(gold: Sequence[Hashable], found: Sequence[Hashable]) -> dict[str, float]:
    """purity, adjusted_rand and nmi of the group that each record was put in (``found``) and belongs to (``gold``).

    purity: records of the commonest label of their group. adjusted_rand (Hubert and Arabie 1985): pairs that both
    put together or apart, 0 by chance, 1 for the same groups. nmi: mutual information over the mean of both
    entropies; 1 where both have one group.
    """
    n = count_records(gold=gold, found=found)
    counts = _contingency(gold, found)
    rows, columns = counts.sum(axis=1), counts.sum(axis=0)
    return {
        "purity": float(counts.max(axis=0).sum() / n),
        "adjusted_rand": _adjusted_rand(_pairs(counts), _pairs(rows), _pairs(columns), n * (n - 1) / 2),
        "nmi": _nmi(counts / n, rows / n, columns / n),
    }


def _contingency(gold: Sequence[Hashable], found: Sequence[Hashable]) -> np.ndarray:
    """float64[labels, groups] records of each label in each group."""
    numbers = []
    for column in (gold, found):
        known: dict[Hashable, int] = {}
        numbers.append(np.array([known.setdefault(one, len(known)) for one in column]))
    counts = np.zeros((numbers[0].max() + 1, numbers[1].max() + 1))
    np.add.at(counts, tuple(numbers), 1)
    return counts


def _pairs(counts: np.ndarray) -> float:
    return float((counts * (counts - 1) / 2).sum())


def _adjusted_rand(both: float, gold: float, found: float, total: float) -> float:
    expected = gold * found / total if total else 0.0
    most = (gold + found) / 2
    # Every record alone in both, or all together in both.
    return 1.0 if most == expected else (both - expected) / (most - expected)


def _nmi(joint: np.ndarray, gold: np.ndarray, found: np.ndarray) -> float:
    entropies = _entropy(gold) + _entropy(found)
    mutual = entropies - _entropy(joint[joint > 0])
    return 1.0 if entropies == 0 else float(np.clip(2 * mutual / entropies, 0, 1))


def _entropy(shares: np.ndarray) -> float:
    return float(-(shares * np.log(shares)).sum())
