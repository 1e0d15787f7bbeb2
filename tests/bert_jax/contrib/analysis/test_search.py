"""Nearest neighbours are those of brute force, in any blocks; whitening; the files that they are read from."""

import json

import numpy as np
import pytest
from inference_models import make_model

from bert_jax.contrib.analysis import neighbors as search
from bert_jax.contrib.analysis.anisotropy import Band, anisotropy, fit_whitening, frequency_bands
from bert_jax.contrib.analysis.neighbors import Hits, hit_lines, nearest, read_relevant, relevance
from bert_jax.contrib.analysis.texts_or_vectors import Collection, embedded, read_collection
from bert_jax.inference.embed import VectorOptions


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def brute_force(queries, corpus, top, similarity="cosine", own=None):
    """Rows and scores by one float64 product, equal scores by the lower row."""
    queries, corpus = queries.astype(np.float64), corpus.astype(np.float64)
    if similarity == "cosine":
        queries, corpus = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, corpus))
    scores = (queries[:, None] * corpus[None]).sum(axis=-1)
    if own is not None:
        scores[np.arange(len(queries)), own] = -np.inf
    rows = np.argsort(-np.round(scores, 12), axis=1, kind="stable")[:, :top]
    return rows, np.take_along_axis(scores, rows, axis=1)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(search, "BLOCK", 64)
    monkeypatch.setattr("bert_jax.contrib.analysis.texts_or_vectors.BLOCK", 64)
    monkeypatch.setattr(search, "_BUDGET", 2**11)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("top", [1, 7, 90, 400])
def test_hits_are_those_of_brute_force(similarity, top, small_blocks, rng):
    corpus = rng.normal(0.3, 1, (301, 24)).astype(np.float32) * rng.uniform(0.1, 9, (301, 1)).astype(np.float32)
    queries = rng.normal(0.3, 1, (53, 24)).astype(np.float32)
    rows, scores = brute_force(queries, corpus, top, similarity)
    found = list(nearest(queries, corpus, top, similarity=similarity))
    assert len(found) == 53
    np.testing.assert_array_equal([hits.rows for hits in found], rows)
    np.testing.assert_allclose([hits.scores for hits in found], scores, rtol=1e-12, atol=1e-12)


def test_equal_entries_go_by_the_lower_row_and_own_ones_are_left_out(small_blocks, rng):
    distinct = rng.normal(size=(9, 24)).astype(np.float32)
    corpus = distinct[rng.integers(0, 9, 300)]  # many more equal entries than candidates
    own = np.arange(300)
    rows, _ = brute_force(corpus, corpus, 5, own=own)
    found = list(nearest(corpus, corpus, 5, own=own))
    np.testing.assert_array_equal([hits.rows for hits in found], rows)
    assert all(row not in hits.rows for row, hits in enumerate(found))
    first = next(nearest(corpus, corpus, 5))
    assert first.rows.tolist() == np.flatnonzero((corpus == corpus[0]).all(axis=1))[:5].tolist()


def test_near_ties_below_the_rounding_of_float32(small_blocks, rng):
    query = rng.normal(size=(1, 24))
    corpus = query + rng.normal(0, 1e-4, (300, 24))  # cosines differ by about 1e-9
    rows, _ = brute_force(query, corpus, 10)
    np.testing.assert_array_equal(next(nearest(query, corpus, 10)).rows, rows[0])


def test_only_entry_and_fewer_than_asked_for():
    vectors = np.eye(3, dtype=np.float32)
    assert [len(hits.rows) for hits in nearest(vectors, vectors, 10, own=np.arange(3))] == [2, 2, 2]
    (alone,) = nearest(vectors[:1], vectors[:1], 10, own=np.arange(1))
    assert len(alone.rows) == len(alone.scores) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"corpus": np.ones((2, 4))}, "width 3, .* width 4"),
        ({"top": 0}, "top: 0 is not allowed"),
        ({"similarity": "l2"}, "'l2' is not allowed; use one of cosine, dot"),
        ({"corpus": np.array([[1.0, 1, 1], [0, 0, 0]])}, "corpus: vector 1 is all zeros"),
    ],
)
def test_what_search_refuses(change, message):
    arguments = {"queries": np.ones((1, 3)), "corpus": np.ones((2, 3)), "top": 1} | change
    with pytest.raises(ValueError, match=message):
        list(nearest(**arguments))


# ------------------------------------------------------------------ whitening


@pytest.mark.parametrize("dimensions", [None, 5])
def test_whitened_vectors_have_the_identity_for_covariance(dimensions, rng):
    vectors = (rng.normal(size=(500, 16)) @ rng.normal(size=(16, 16)) + 4).astype(np.float32)
    whitening = fit_whitening(vectors, dimensions)
    white = whitening.apply(vectors)
    size = dimensions or 16
    assert white.shape == (500, size) and white.dtype == np.float32
    np.testing.assert_allclose(np.cov(white.T, bias=True), np.eye(size), atol=1e-4)
    np.testing.assert_allclose(white.mean(axis=0), 0, atol=1e-4)
    assert np.abs(np.cov(vectors.T, bias=True) - np.eye(16)).max() > 1
    # The directions kept are those of the greatest variance.
    variances = np.linalg.eigvalsh(np.cov(vectors.T.astype(np.float64), bias=True))[::-1][:size]
    np.testing.assert_allclose(np.linalg.norm(whitening.matrix, axis=0) ** -2, variances, rtol=1e-6)


def test_whitening_of_fewer_vectors_than_dimensions(rng):
    vectors = rng.normal(size=(6, 16)).astype(np.float32)
    assert fit_whitening(vectors).apply(vectors).shape == (6, 5)
    with pytest.raises(ValueError, match="dimensions: 6 is not allowed; use 1 to 5"):
        fit_whitening(vectors, 6)
    with pytest.raises(ValueError, match="the 3 vectors are all the same"):
        fit_whitening(np.ones((3, 4), np.float32))
    with pytest.raises(ValueError, match="vectors of width 4"):
        fit_whitening(vectors).apply(np.ones((1, 4)))


def mean_cosine(vectors):
    """Of all pairs, one by one."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return (unit @ unit.T)[~np.eye(len(unit), dtype=bool)].mean()


def test_anisotropy(rng, monkeypatch):
    monkeypatch.setattr("bert_jax.contrib.analysis.texts_or_vectors.BLOCK", 16)
    vectors = rng.normal(2, 1, (40, 16)).astype(np.float32)
    assert anisotropy(vectors) == pytest.approx(mean_cosine(vectors), rel=1e-6)
    assert anisotropy(np.vstack([vectors, np.zeros((1, 16))])) == anisotropy(vectors)
    # Two vectors: the one pair there is, never one with itself.
    assert anisotropy(np.eye(2)) == 0
    with pytest.raises(ValueError, match="1 vectors; at least 2"):
        anisotropy(vectors[:1])


@pytest.mark.slow
def test_anisotropy_by_frequency(rng):
    table, counts = rng.normal(1, 1, (5100, 4)), rng.permutation(5100) * 3
    by_rank = table[np.argsort(-counts)][:-1]  # one piece does not occur
    found = frequency_bands(table, counts)
    assert [(band.first, band.last) for band in found] == [(1, 100), (101, 500), (501, 5000), (5001, 5099)]
    for band in found:
        vectors = by_rank[band.first - 1 : band.last]
        assert band.mean_length == pytest.approx(np.linalg.norm(vectors, axis=1).mean())
        assert band.anisotropy == pytest.approx(mean_cosine(vectors))
    assert frequency_bands(np.eye(101), np.ones(101, int)) == [Band(1, 100, 1.0, 0.0)]  # the rest is one piece


# ------------------------------------------------------------------ files


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def test_collections(tmp_path):
    found = read_collection(write(tmp_path / "a.txt", "w1", "", " w2 "))
    assert (list(found.ids), found.texts) == ([0, 1], ["w1", " w2 "])
    found = read_collection(write(tmp_path / "a.jsonl", '{"id": "x", "text": "w1"}', '{"id": 7, "text": "w2"}'))
    assert (list(found.ids), found.texts) == (["x", 7], ["w1", "w2"])
    assert list(read_collection(write(tmp_path / "b.jsonl", '{"text": "w1"}')).ids) == [0]
    np.save(tmp_path / "a.npy", np.eye(3, dtype=np.float32))
    found = read_collection(str(tmp_path / "a.npy"))
    assert np.array_equal(embedded(found, None, VectorOptions(width=2)), np.eye(3)[:, :2])
    with pytest.raises(ValueError, match=r"^width: 4 is not allowed; use 1 to 3, the width of whole vectors$"):
        embedded(found, None, VectorOptions(width=4))
    assert list(found.ids) == [0, 1, 2] and found.shown(1) == {}
    np.testing.assert_array_equal(embedded(found, None), np.eye(3))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"id": 1, "text": "a"}', '{"id": 1, "text": "b"}'], "the id 1 occurs twice"),
        (['{"id": 1, "text": "a"}', '{"text": "b"}'], "1 entries have no id"),
        (['{"id": true, "text": "a"}'], "entry 0: the id 'True' is not allowed"),
        (['{"id": 1}'], "entry 0: no text"),
        (["[1]"], "c.jsonl:1: not a JSON object"),
        ([], "no text given"),
    ],
)
def test_what_collections_refuse(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_collection(write(tmp_path / "c.jsonl", *lines))


def test_arrays_that_are_no_vectors(tmp_path):
    path = tmp_path / "a.npy"
    for array, message in (
        (np.ones(3), r"float64\[3\]; allowed: floats"),
        (np.ones((2, 2), int), r"int64\[2, 2\]; allowed: floats"),
        (np.array([{}]), "not a numpy array file"),
    ):
        np.save(path, array)
        with pytest.raises(ValueError, match=message):
            read_collection(str(path))
    path.write_text("text")
    with pytest.raises(ValueError, match="not a numpy array file"):
        read_collection(str(path))
    np.save(path, np.array([[1.0, 2], [np.nan, 1]]))
    with pytest.raises(ValueError, match="the vector of entry 1 contains NaN"):
        embedded(read_collection(str(path)), None)


def test_texts_are_embedded():
    model = make_model()
    texts = Collection("texts", ("a", "b"), texts=("w1 w2", "w3"))
    np.testing.assert_array_equal(
        embedded(texts, model, VectorOptions(pooling="max")), model.embed(["w1 w2", "w3"], pooling="max")
    )
    with pytest.raises(ValueError, match="texts: texts need a model"):
        embedded(texts, None)


QUERIES = Collection("queries", ("q1", "q2"), texts=("one", "two"))
CORPUS = Collection("corpus", (10, 11, 12), texts=("a", "b", "c"))


def test_lines_of_hits():
    vectors = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
    lines = list(hit_lines(nearest(vectors[:2], vectors, 2), QUERIES, CORPUS))
    assert lines[1] == {
        "query": "q2",
        "text": "two",
        "hits": [{"id": 11, "score": 1.0, "text": "b"}, {"id": 12, "score": 0.7071068, "text": "c"}],
    }
    assert json.dumps(lines)


def test_relevance():
    found = [Hits(np.array(rows), np.array([0.9, 0.5])) for rows in ([0, 2], [2, 1], [1, 0])]
    scores = relevance(found, [10, 11, 12], [{12}, {12, 10}, {12}], 2)
    assert set(scores) == {"mrr", "precision@1", "recall@1", "ndcg@1", "recall@2", "ndcg@2"}
    assert scores["mrr"].value == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert scores["precision@1"].value == pytest.approx(1 / 3)
    assert scores["recall@2"].value == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert scores["mrr"].low < scores["mrr"].value < scores["mrr"].high


@pytest.mark.parametrize("top", [2, 30])
def test_equal_entries_share_their_rank_and_keep_the_order_of_the_corpus(top, caplog):
    corpus = np.ones((40, 4), np.float32)
    found = list(nearest(corpus[:3], corpus, top))
    assert all(hits.rows.tolist() == list(range(top)) and hits.beyond == 40 - top for hits in found)
    assert "the model has collapsed" in caplog.text
    scores = relevance(found, range(40), [{0}, {1}, {0}], top)
    assert scores["mrr"].value == pytest.approx(1 / 20.5) and scores["precision@1"].value == 0
    caplog.clear()
    (first,) = nearest(corpus[:1], np.eye(4, dtype=np.float32), 2)
    assert (first.rows.tolist(), first.beyond, caplog.text) == ([0, 1], 2, "")


def test_relevant_ids(tmp_path):
    path = tmp_path / "relevant.txt"
    write(path, '{"query": "q2", "relevant": [10, 12, 12]}')
    assert read_relevant(path, QUERIES, CORPUS) == {"q2": {10, 12}}
    for line, message in (
        ('{"query": "q3", "relevant": [10]}', "entry 2: the query 'q3' is not in queries"),
        ('{"query": "q2", "relevant": [10]}', "entry 2: the query 'q2' occurs twice"),
        ('{"query": "q1", "relevant": [13]}', "entry 2: the relevant id 13 is not in corpus"),
        ('{"query": "q1", "relevant": ["10"]}', "entry 2: the relevant id '10' is not in corpus"),
        ('{"query": "q1", "relevant": []}', "entry 2: must be {"),
        ('{"query": "q1", "relevant": 10}', "entry 2: must be {"),
        ('{"relevant": [10]}', "entry 2: must be {"),
    ):
        write(path, '{"query": "q2", "relevant": [10]}', line)
        with pytest.raises(ValueError, match=message):
            read_relevant(path, QUERIES, CORPUS)
