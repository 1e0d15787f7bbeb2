"""Clusters of separated groups, the same for a seed; agglomerative cuts; labels."""

import numpy as np
import pytest

from bert_jax.contrib.analysis.clustering_scores import clustering_scores
from bert_jax.contrib.analysis.clusters import agglomerative, cluster_lines, kmeans, read_labels, summary_lines
from bert_jax.contrib.analysis.texts_or_vectors import Collection

RNG = np.random.default_rng(0)
SIZES = (60, 45, 30, 15)
GOLD = RNG.permutation(np.repeat(np.arange(4), SIZES))
# Groups around four directions, of many lengths.
CENTRES = np.linalg.qr(RNG.normal(size=(12, 12)))[0][:4]
BLOBS = (CENTRES[GOLD] + RNG.normal(0, 0.06, (150, 12))) * RNG.uniform(0.5, 20, (150, 1))
BLOBS = BLOBS.astype(np.float32)
METHODS = {
    "cosine": lambda vectors: kmeans(vectors, 4),
    "euclidean": lambda vectors: kmeans(vectors, 4, distance="euclidean"),
    "agglomerative": lambda vectors: agglomerative(vectors, clusters=4),
    "threshold": lambda vectors: agglomerative(vectors, threshold=0.5),
}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("method", METHODS)
def test_separated_groups_are_found_and_numbered_by_size(method):
    found = METHODS[method](BLOBS)
    np.testing.assert_array_equal(found.labels, GOLD)  # 0 is the largest, as in SIZES
    assert found.clusters == 4 and clustering_scores(GOLD, found.labels)["adjusted_rand"] == 1
    unit = BLOBS / np.linalg.norm(BLOBS, axis=1, keepdims=True)
    for cluster in range(4):
        members = np.flatnonzero(cluster == GOLD)
        assert found.central(cluster) == members[(unit[members] @ unit[members].mean(axis=0)).argmax()]


def plain_inertia(vectors, labels, distance):
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    total = 0.0
    for label in np.unique(labels):
        group = unit[labels == label]
        centre = group.mean(axis=0)
        if distance == "cosine":
            total += (1 - group @ (centre / np.linalg.norm(centre))).sum()
        else:
            total += ((group - centre) ** 2).sum()
    return total


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_a_seed_gives_the_same_clusters_and_restarts_better_ones(distance, rng):
    vectors = rng.normal(size=(200, 6)).astype(np.float32)
    options = {"clusters": 12, "distance": distance}
    first = kmeans(vectors, seed=3, **options)
    np.testing.assert_array_equal(first.labels, kmeans(vectors, seed=3, **options).labels)
    assert not np.array_equal(first.labels, kmeans(vectors, seed=4, **options).labels)
    # Nobody is nearer to another centre.
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    centres = np.stack([unit[first.labels == label].mean(axis=0) for label in range(12)])
    if distance == "cosine":
        nearest = (unit @ centres.T / np.linalg.norm(centres, axis=1)).argmax(axis=1)
    else:
        nearest = np.linalg.norm(unit[:, None] - centres, axis=-1).argmin(axis=1)
    np.testing.assert_array_equal(first.labels, nearest)
    once = kmeans(vectors, seed=3, restarts=1, **options)
    assert plain_inertia(vectors, first.labels, distance) < plain_inertia(vectors, once.labels, distance)


def test_every_cluster_has_a_member(rng):
    vectors = np.repeat(rng.normal(size=(5, 4)), 20, axis=0).astype(np.float32)
    assert np.bincount(kmeans(vectors, 5).labels).tolist() == [20] * 5
    vectors += rng.normal(0, 3e-7, vectors.shape).astype(np.float32)
    for seed in range(3):
        assert kmeans(vectors[:10], 2, seed=seed).clusters == 2


def test_equal_vectors_are_no_distance_apart():
    """Whatever rounding makes of their cosine."""
    twice = np.repeat(BLOBS, 2, axis=0)
    assert agglomerative(twice, threshold=0).clusters == len(BLOBS)


def test_agglomerative_cuts_equal_distances_into_the_number_asked_for():
    vectors = np.eye(6)  # all distances are 1
    for clusters in range(1, 7):
        assert agglomerative(vectors, clusters=clusters).clusters == clusters
    assert agglomerative(vectors, threshold=0.99).clusters == 6
    assert agglomerative(vectors, threshold=1.01).clusters == 1
    assert agglomerative(vectors[:1], clusters=1).labels.tolist() == [0]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda: kmeans(np.ones((3, 2)), 2),
            "clusters: 2 is not allowed; use 1 to 1, the number of distinct vectors",
        ),
        (lambda: kmeans(np.eye(3), 0), "clusters: 0 is not allowed"),
        (lambda: kmeans(np.eye(3), 2, restarts=0), "restarts is 0"),
        (lambda: kmeans(np.zeros((3, 2)), 1), "vector 0 is all zeros"),
        (lambda: agglomerative(np.eye(3), clusters=4), "clusters: 4 is not allowed; use 1 to 3"),
        (lambda: agglomerative(np.eye(3), threshold=2.5), "threshold: 2.5 is not allowed"),
        (lambda: agglomerative(np.eye(3)), "give exactly one of them"),
        (lambda: agglomerative(np.ones((20_001, 1)), clusters=2), "20,001 texts; agglomerative accepts 20,000"),
    ],
)
def test_what_clustering_refuses(run, message):
    with pytest.raises(ValueError, match=message):
        run()


def test_scores_by_hand():
    # Groups {a a b} {b b} {c}: pairs together in both 1 + 1, in gold 1 + 3, in found 3 + 1, of 15.
    scores = clustering_scores("aabbbc", [0, 0, 0, 1, 1, 2])
    assert scores["purity"] == pytest.approx(5 / 6)
    assert scores["adjusted_rand"] == pytest.approx((2 - 4 * 4 / 15) / (4 - 4 * 4 / 15))
    entropy = -(np.log(1 / 3) / 3 + np.log(1 / 2) / 2 + np.log(1 / 6) / 6)
    joint = -(np.log(1 / 3) / 3 + np.log(1 / 6) / 6 + np.log(1 / 3) / 3 + np.log(1 / 6) / 6)
    assert scores["nmi"] == pytest.approx((2 * entropy - joint) / entropy)
    assert clustering_scores("abc", [2, 0, 1]) == {"purity": 1, "adjusted_rand": 1, "nmi": pytest.approx(1)}
    assert clustering_scores("aaa", [0, 0, 0]) == {"purity": 1, "adjusted_rand": 1, "nmi": 1}
    together = clustering_scores("aabb", [0, 0, 0, 0])
    assert together == {"purity": 0.5, "adjusted_rand": 0, "nmi": 0}


def test_lines_and_labels(tmp_path):
    texts = Collection("texts", ("x", "y", "z"), texts=("first one", "second\tone", "third"))
    found = kmeans(np.array([[0, 1], [1, 0.1], [1, 0]]), 2)
    lines = list(cluster_lines(found, texts))
    assert lines[0] == {"id": "x", "text": "first one", "cluster": 1} and lines[2]["cluster"] == 0
    assert list(summary_lines(found, texts)) == ["cluster 0: 2  second one", "cluster 1: 1  first one"]
    bare = Collection("vectors", range(3), vectors=np.eye(3))
    assert next(summary_lines(found, bare)) == "cluster 0: 2  entry 1"
    path = tmp_path / "labels.txt"
    path.write_text("a\nb\nb\n")
    assert read_labels(str(path), texts) == ["a", "b", "b"]
    path.write_text("a\nb\n")
    with pytest.raises(ValueError, match="2 labels, but texts has 3 entries"):
        read_labels(str(path), texts)
    path = tmp_path / "labels.jsonl"
    lines = ['{"id": "z", "label": 1}\n', '{"id": "x", "label": "a"}\n', '{"id": "y", "label": "b"}\n']
    path.write_text("".join(lines))
    assert read_labels(str(path), texts) == ["a", "b", "1"]
    for content, message in (
        (lines[:2], "no label for id 'y'"),
        ([*lines, lines[0]], "entry 4: the id 'z' occurs twice"),
        (['{"id": "q", "label": "a"}\n'], "entry 1: the id 'q' is not in texts"),
        (['{"id": "x"}\n'], "entry 1: must be {"),
    ):
        path.write_text("".join(content))
        with pytest.raises(ValueError, match=message):
            read_labels(str(path), texts)
