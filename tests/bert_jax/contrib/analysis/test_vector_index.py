"""Indexes: recall against exact search, files, the commands that write and read them, bad input."""

import json

import numpy as np
import pytest
from inference_models import make_weights, random_texts

from bert_jax.commands.main import main
from bert_jax.config import SentenceConfig
from bert_jax.contrib.analysis import vector_index
from bert_jax.contrib.analysis.neighbors import nearest
from bert_jax.contrib.analysis.vector_index import VectorIndex, write_index
from bert_jax.interop.saved_model import write_saved


def vectors_of(count, width=70, seed=0):
    """Directions around 40 centers, with lengths that differ."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(7).normal(size=(40, width))
    found = centers[rng.integers(0, 40, count)] + rng.normal(0, 0.8, (count, width))
    return (found * rng.uniform(0.1, 9, (count, 1))).astype(np.float32)


def index_of(folder, vectors, precision, entries=None):
    write_index(folder, entries or [f"text {i}" for i in range(len(vectors))], vectors, precision)
    return VectorIndex(folder)


def recall(found, exact):
    return np.mean([len({*a.rows} & {*b.rows}) / len(b.rows) for a, b in zip(found, exact, strict=True)])


# 70 values: neither whole bytes nor whole words.
@pytest.mark.parametrize("precision", ["int8", "binary"])
def test_most_of_the_exact_hits_are_found(precision, tmp_path, monkeypatch):
    monkeypatch.setattr(vector_index, "NEAR", 300)
    monkeypatch.setattr(vector_index, "_ROWS", 512)
    corpus, queries = vectors_of(3000), vectors_of(40, seed=1)
    index = index_of(tmp_path / "index", corpus, precision)
    exact, found = list(nearest(queries, corpus, 10)), list(index.search(queries, 10))
    assert recall(found, exact) > (0.97 if precision == "int8" else 0.93)
    assert all((np.diff(hits.scores) <= 0).all() and len(hits.rows) == 10 for hits in found)
    scores = dict(zip(exact[0].rows.tolist(), exact[0].scores, strict=True))
    assert all(
        abs(score - scores.get(row, score)) < 0.01
        for row, score in zip(found[0].rows, found[0].scores, strict=True)
    )
    assert index.memory == (0 if precision == "int8" else 3000 * 16)
    # Each stage counts: bits alone, and fewer candidates, find less.
    if precision == "binary":
        monkeypatch.setattr(vector_index, "RESCORED", 10)
        assert recall(index.search(queries, 10), exact) < recall(found, exact) - 0.1
        monkeypatch.setattr(vector_index, "NEAR", 10)
        assert recall(index.search(queries, 10), exact) < recall(found, exact) - 0.2


def test_more_hits_than_candidates_and_than_entries(tmp_path):
    corpus = vectors_of(150)
    index = index_of(tmp_path / "index", corpus, "binary")
    (hits,) = index.search(corpus[3:4], 140)
    assert len(hits.rows) == 140 and hits.rows[0] == 3 and hits.scores[0] > 0.999
    (hits,) = index.search(corpus[3:4], 999)
    assert sorted(hits.rows) == list(range(150))


def test_entries_are_those_that_were_written(tmp_path):
    entries = [{"id": "a", "text": "ä\nb", "more": 1}, {"id": 7, "text": "w2"}]
    index = index_of(tmp_path / "index", vectors_of(2), "int8", entries)
    assert list(index.entries.ids) == ["a", 7] and list(index.entries.texts) == ["ä\nb", "w2"]
    plain = index_of(tmp_path / "plain", vectors_of(2), "int8", ["x", "y"]).entries
    assert list(plain.ids) == [0, 1] and plain.shown(1) == {"text": "y"}
    stored = np.load(tmp_path / "index" / "vectors.npy")
    assert stored.dtype == np.int8 and (np.abs(stored).max(axis=1) == 127).all()
    with pytest.raises(ValueError, match="index: not empty; give a new folder"):
        index_of(tmp_path / "index", vectors_of(2), "int8")


@pytest.mark.parametrize(
    ("entries", "change", "message"),
    [
        (
            [{"id": 1, "text": "a"}, {"id": 1, "text": "b"}],
            None,
            "entry 1: the id 1 is not allowed; give every entry",
        ),
        ([{"id": 1, "text": "a"}, "b"], None, "entry 1: the id None is not allowed"),
        (["b", {"id": 1, "text": "a"}], None, "entry 1: the id 1 is not allowed"),
        ([{"id": True, "text": "a"}, "b"], None, "entry 0: the id True is not allowed"),
        (["a", "b"], 0.0, "entry 1: its vector is zero or not finite"),
        (["a", "b"], np.nan, "entry 1: its vector is zero or not finite"),
    ],
)
def test_what_cannot_be_written(entries, change, message, tmp_path):
    vectors = vectors_of(2)
    if change is not None:
        vectors[1] = change
    with pytest.raises(ValueError, match=message):
        write_index(tmp_path / "index", entries, vectors, "int8")
    assert list(tmp_path.iterdir()) == []


def test_damaged_indexes_are_refused(tmp_path):
    index_of(tmp_path / "index", vectors_of(5), "binary")

    def refused(message):
        with pytest.raises(ValueError, match=message):
            VectorIndex(tmp_path / "index")

    for name, content, message in (
        ("codes.npy", np.zeros((4, 9), np.uint8), r"codes.npy: uint8\[4, 9\], but index.json states uint8\[5, 9\]"),
        ("vectors.npy", np.zeros((5, 70)), r"vectors.npy: float64\[5, 70\], but index.json states int8"),
        ("vectors.npy", b"text", "vectors.npy: .*make the index again"),
        ("entries.jsonl", b'"a"\n', "entries.jsonl: 4 bytes, but offsets.npy states"),
        ("index.json", b"{}", "index.json: not the description of an index"),
    ):
        file = tmp_path / "index" / name
        before = file.read_bytes()
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            np.save(file, content)
        refused(message)
        file.write_bytes(before)
    (tmp_path / "index" / "offsets.npy").unlink()
    refused("offsets.npy: the file is missing")


# ------------------------------------------------------------------ commands


@pytest.fixture
def files(tmp_path):
    """A model of vectors, another one, a corpus with ids, and queries."""
    sentence = SentenceConfig(pooling=("mean",))
    write_saved(tmp_path / "model", make_weights(None, sentence))
    write_saved(tmp_path / "other", make_weights(None, sentence, seed=9))
    rows = ({"id": f"t{i}", "text": f"w{i % 40} {text}"} for i, text in enumerate(random_texts(120, 9)))
    (tmp_path / "corpus.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "queries.txt").write_text("w1 w2 w3\nw7 w8\n")
    return tmp_path


def command(capsys, *words):
    """Exit code, JSON lines of standard output and the last line of standard error of ``bert-jax``."""
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, [json.loads(line) for line in printed.out.splitlines()], (printed.err.splitlines() or [""])[-1]


@pytest.mark.slow
def test_the_commands_find_what_exact_search_finds(files, capsys):
    options = ["--model", files / "model", "--width", 10]
    embed = ["embed", *options, "--input", files / "corpus.jsonl", "--prompt", "w5 "]
    for precision in ("int8", "binary"):
        code, _, said = command(capsys, *embed, "--precision", precision, "--output", files / precision)
        assert code == 0 and said.endswith(f"{precision}: index of 120 texts, width 10, {precision}")
    search = ["search", *options, "--queries", files / "queries.txt", "--top", 4]
    _, exact, _ = command(capsys, *search, "--corpus", files / "corpus.jsonl", "--corpus_prompt", "w5 ")
    for precision in ("int8", "binary"):
        code, found, _ = command(capsys, *search, "--index", files / precision)
        assert code == 0 and [line["text"] for line in found] == ["w1 w2 w3", "w7 w8"]
        for line, right in zip(found, exact, strict=True):
            texts = {hit["id"]: hit["text"] for hit in line["hits"]}
            wanted = {hit["id"]: hit["text"] for hit in right["hits"]}
            assert len(texts) == 4 and len(texts.items() & wanted.items()) >= 3
            assert line["hits"][0]["score"] == pytest.approx(right["hits"][0]["score"], abs=0.01)
    # Vectors as queries, and ids of relevant texts.
    np.save(files / "queries.npy", vectors_of(2, 10))
    code, found, _ = command(capsys, "search", "--index", files / "binary", "--queries", files / "queries.npy")
    assert code == 0 and len(found) == 2 and found[0]["hits"][0]["id"].startswith("t")


def test_bad_input(files, capsys):
    model, index, queries = files / "model", files / "index", files / "queries.txt"
    embed = ["embed", "--model", model, "--input", files / "corpus.jsonl", "--precision", "binary"]
    assert command(capsys, *embed, "--output", index)[0] == 0
    np.save(files / "narrow.npy", vectors_of(2, 10))
    search = ["search", "--model", model, "--index", index, "--queries", queries]
    for words, message in (
        ([*embed, "--output", files / "a.npy"], "--precision binary: an index is a folder; give --output"),
        (embed, "--precision binary: an index is a folder"),
        ([*embed, "--output", index], "not empty; give a new folder"),
        (
            [*embed, "--output", files / "new", "--per_token"],
            "--precision binary cannot be combined",
        ),
        (["search", "--model", model, "w1"], "--corpus and --index: give exactly one of them"),
        ([*search, "--corpus", files / "corpus.jsonl"], "--corpus and --index: give exactly one of them"),
        ([*search, "--whiten"], "--whiten cannot be combined with --index"),
        ([*search, "--similarity", "dot"], "--similarity dot cannot be combined with --index"),
        (search[:5], "--index: no queries; write them"),
        (["search", "--index", model, "w1"], "model: not an index; bert-jax embed --precision binary"),
        (
            ["search", "--model", files / "other", "--index", index, "w1"],
            "the index was made with another model, pooling or dtype",
        ),
        ([*search, "--pooling", "max"], "the index was made with another model, pooling or dtype"),
        ([*search, "--width", "10"], "vectors of width 16, but"),
        (
            ["search", "--index", index, "--queries", files / "narrow.npy"],
            "vectors of width 16, but a query has width 10",
        ),
    ):
        code, _, error = command(capsys, *words)
        assert code == 2 and message in error, (words, error)
    assert not (files / "new").exists()
