"""Clustering of vectors: k-means (k-means++, Arthur and Vassilvitskii 2007) and agglomerative clustering.

Shapes: N vectors, E width of a vector, K clusters.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist

from bert_jax.contrib.analysis.texts_or_vectors import BLOCK, Collection, Id, blocks, is_id, lengths_of
from bert_jax.inference.text_files import read_texts
from bert_jax.json_values import Json

Distance = Literal["cosine", "euclidean"]
# Agglomerative clustering stores the distance of every pair, 8 bytes each.
MOST_AGGLOMERATIVE = 20_000


class Clusters(NamedTuple):
    """A clustering of N vectors.

    The fields are the cluster index of each vector, int64[N], and the cosine similarity of each vector to the mean
    direction of its cluster, float64[N]. Clusters are sorted by decreasing size; clusters of equal size are sorted
    by the row index of their first member.
    """

    labels: np.ndarray
    nearness: np.ndarray

    @property
    def clusters(self) -> int:
        """Number of clusters, K."""
        return int(self.labels.max()) + 1

    def members(self, cluster: int) -> np.ndarray:
        """Return the row indices of the members of ``cluster``."""
        return np.flatnonzero(self.labels == cluster)

    def central(self, cluster: int) -> int:
        """Return the row index of the member nearest to the center of the cluster (the lowest index if tied)."""
        members = self.members(cluster)
        return int(members[self.nearness[members].argmax()])


def kmeans(
    vectors: np.ndarray,
    clusters: int,
    *,
    distance: Distance = "cosine",
    seed: int = 0,
    restarts: int = 10,
    iterations: int = 300,
) -> Clusters:
    """Cluster the normalized vectors by k-means; return the best of ``restarts`` runs.

    Each run of Lloyd's algorithm has a different random initialization; the best run has the lowest inertia.

    With ``distance`` "cosine", centers also have length 1 (spherical k-means, Dhillon and Modha 2001), and the
    inertia is the sum of 1 - cosine; with "euclidean", it is the sum of squared distances. The result is
    reproducible for a given ``seed``, and no cluster is empty. Raises ``ValueError`` if ``clusters`` exceeds the
    number of distinct vectors.
    """
    unit_NxE = _unit(vectors)
    different = len({row.tobytes() for row in unit_NxE})
    if not 1 <= clusters <= different:
        raise ValueError(
            f"clusters: {clusters} is not allowed; use 1 to {different}, the number of distinct vectors"
        )
    if restarts < 1 or iterations < 1:
        raise ValueError(f"restarts is {restarts} and iterations is {iterations}; both must be 1 or more")
    runs = (
        _lloyd(unit_NxE, clusters, distance, np.random.default_rng([seed, restart]), iterations)
        for restart in range(restarts)
    )
    _, labels = min(runs, key=lambda run: run[0])
    return _described(unit_NxE, labels)


def agglomerative(vectors: np.ndarray, *, clusters: int | None = None, threshold: float | None = None) -> Clusters:
    """Merge clusters by average linkage with the cosine distance.

    Merging stops when ``clusters`` clusters remain, or when the distance between the two nearest clusters exceeds
    ``threshold`` (0 to 2).

    Raises ``ValueError`` unless exactly one of ``clusters`` and ``threshold`` is set, and for more than 20,000
    vectors, because the pairwise distances of 20,000 vectors already need 1.6 GB.
    """
    count = len(vectors)
    if (clusters is None) == (threshold is None):
        raise ValueError("clusters and threshold: give exactly one of them")
    if clusters is not None and not 1 <= clusters <= count:
        raise ValueError(f"clusters: {clusters} is not allowed; use 1 to {count}, the number of texts")
    if threshold is not None and not 0 <= threshold <= 2:
        raise ValueError(f"threshold: {threshold} is not allowed; use 0 to 2, a cosine distance")
    if count > MOST_AGGLOMERATIVE:
        raise ValueError(f"{count:,} texts; agglomerative accepts {MOST_AGGLOMERATIVE:,} at most; use kmeans")
    unit_NxE = _unit(vectors)
    if count == 1:
        return _described(unit_NxE, np.zeros(1, np.int64))
    exact_NxE = vectors.astype(np.float64) / lengths_of(vectors)[:, None]
    # 1 - cosine for vectors of length 1; exactly 0 for equal ones, unlike the metric "cosine".
    joined = linkage(pdist(exact_NxE, "sqeuclidean") / 2, "average")
    if clusters is None:
        labels = fcluster(joined, threshold, "distance")
    else:
        # Apply the first N - K joins, leaving exactly K clusters; a distance threshold would apply all joins of
        # equal distance.
        labels = fcluster(joined, count - clusters - 1, "monocrit", monocrit=np.arange(count - 1.0))
    return _described(unit_NxE, labels)


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Return ``vectors`` divided by their Euclidean norms, float32[N, E]."""
    # Computed in float64, in the small buffers of the ufunc.
    unit = np.empty(vectors.shape, np.float32)
    return np.divide(vectors, lengths_of(vectors)[:, None], out=unit, casting="unsafe")


def _lloyd(
    unit_NxE: np.ndarray, clusters: int, distance: Distance, rng: np.random.Generator, iterations: int
) -> tuple[float, np.ndarray]:
    """Run Lloyd's algorithm from one random initialization; return the inertia and the labels int64[N]."""
    centers_KxE = unit_NxE[_starts(unit_NxE, clusters, rng)]
    labels = np.full(len(unit_NxE), -1)
    for _ in range(iterations):
        before = labels
        labels, costs_N = _assign(unit_NxE, centers_KxE, distance)
        _fill_empty(labels, costs_N, clusters)
        if np.array_equal(labels, before):
            break
        centers_KxE = _centers(unit_NxE, labels, clusters, distance)
    return float(costs_N.sum()), labels


def _starts(unit_NxE: np.ndarray, clusters: int, rng: np.random.Generator) -> list[int]:
    """Return the row indices of the initial centers, as in k-means++.

    Each center is sampled with a probability proportional to its squared distance from the nearest center sampled
    before. For unit vectors, the squared distance is 2 (1 - cosine), so both values of ``distance`` lead to the
    same initial centers.
    """
    chosen = [int(rng.integers(len(unit_NxE)))]
    nearest_N = np.full(len(unit_NxE), np.inf)
    for _ in range(1, clusters):
        nearest_N = np.minimum(nearest_N, np.maximum(1 - (unit_NxE @ unit_NxE[chosen[-1]]).astype(np.float64), 0))
        nearest_N[chosen[-1]] = 0
        total = nearest_N.sum()
        # If the total is 0, all vectors are equal to chosen ones up to rounding.
        share = nearest_N / total if total else np.full(len(unit_NxE), 1 / len(unit_NxE))
        chosen.append(int(rng.choice(len(unit_NxE), p=share)))
    return chosen


def _assign(unit_NxE: np.ndarray, centers_KxE: np.ndarray, distance: Distance) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the center nearest to each vector, int64[N], and the cost of each vector, float64[N]."""
    labels, costs = np.empty(len(unit_NxE), np.int64), np.empty(len(unit_NxE))
    squares_K = (centers_KxE**2).sum(axis=1)
    for part in blocks(len(unit_NxE), max(1, BLOCK * 64 // len(centers_KxE))):
        cosines = unit_NxE[part] @ centers_KxE.T
        cost = 1 - cosines if distance == "cosine" else 1 + squares_K - 2 * cosines
        labels[part] = cost.argmin(axis=1)
        costs[part] = cost.min(axis=1)
    return labels, np.maximum(costs, 0)


def _fill_empty(labels: np.ndarray, costs: np.ndarray, clusters: int) -> None:
    """Move one vector into each empty cluster: of the vectors in clusters with several members, the vector that is
    farthest from its center."""
    sizes = np.bincount(labels, minlength=clusters)
    for empty in np.flatnonzero(sizes == 0):
        row = int(np.where(sizes[labels] > 1, costs, -1).argmax())
        sizes[labels[row]] -= 1
        sizes[empty] += 1
        labels[row], costs[row] = empty, 0


def _centers(unit_NxE: np.ndarray, labels: np.ndarray, clusters: int, distance: Distance) -> np.ndarray:
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels, minlength=clusters)
    firsts = np.cumsum(sizes) - sizes
    sums_KxE = np.add.reduceat(unit_NxE[order], firsts, axis=0, dtype=np.float64)
    if distance == "cosine":
        scale = np.linalg.norm(sums_KxE, axis=1, keepdims=True)
    else:
        scale = sizes[:, None].astype(np.float64)
    return (sums_KxE / np.where(scale > 0, scale, 1)).astype(np.float32)


def _described(unit_NxE: np.ndarray, labels: np.ndarray) -> Clusters:
    """Convert ``labels``, which may be arbitrary integers, to :class:`Clusters`, sorted by decreasing size."""
    _, firsts, numbers, sizes = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    rank = np.empty(len(sizes), np.int64)
    rank[np.lexsort((firsts, -sizes))] = np.arange(len(sizes))
    ordered = rank[numbers]
    centers_KxE = _centers(unit_NxE, ordered, len(sizes), "cosine")
    nearness = np.empty(len(ordered))
    for part in blocks(len(ordered)):
        nearness[part] = (unit_NxE[part].astype(np.float64) * centers_KxE[ordered[part]]).sum(axis=1)
    return Clusters(ordered, nearness)


# ------------------------------------------------------------------ lines and labels


def cluster_lines(found: Clusters, collection: Collection) -> Iterator[dict[str, Json]]:
    """Yield ``{"id", "text", "cluster"}`` for every entry, in the order of the collection."""
    for row, cluster in enumerate(found.labels.tolist()):
        yield {"id": collection.ids[row], **collection.shown(row), "cluster": cluster}


def summary_lines(found: Clusters, collection: Collection) -> Iterator[str]:
    """Yield a line per cluster: index, size, and the text (or, without texts, the id) of the central member."""
    for cluster in range(found.clusters):
        row = found.central(cluster)
        text = collection.shown(row).get("text", f"entry {collection.ids[row]}")
        yield f"cluster {cluster}: {len(found.members(cluster)):,}  {' '.join(text.split())[:100]}"


def read_labels(source: str, collection: Collection) -> Sequence[str]:
    """Read the correct label of every entry.

    A text file has one label per line, in the order of the entries; a .jsonl file has ``{"id", "label"}`` objects.
    Raises ``ValueError`` for an entry without a label and for a label without an entry.
    """
    lines = list(read_texts((), source, False))
    if not source.endswith(".jsonl"):
        if len(lines) != len(collection):
            raise ValueError(
                f"{source}: {len(lines)} labels, but {collection.name} has {len(collection)} entries; give "
                "one label per entry"
            )
        return [str(line) for line in lines]
    known, labels = set(collection.ids), dict[Id, str]()
    for number, line in enumerate(lines, 1):
        where, entry = f"{source}: entry {number}", {} if isinstance(line, str) else line
        one, label = entry.get("id"), entry.get("label")
        if not is_id(one) or not is_id(label):
            raise ValueError(f'{where}: must be {{"id": ..., "label": ...}}')
        if one not in known or one in labels:
            what = "occurs twice" if one in labels else f"is not in {collection.name}"
            raise ValueError(f"{where}: the id {one!r} {what}")
        labels[one] = str(label)
    missing = next((one for one in collection.ids if one not in labels), None)
    if missing is not None:
        raise ValueError(f"{source}: no label for id {missing!r}; label every entry of {collection.name}")
    return [labels[one] for one in collection.ids]
