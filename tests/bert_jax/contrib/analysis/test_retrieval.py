"""``bert-jax search --rerank``: hits in the order of a model of pairs; ``bert-jax mine``: hard negatives."""

import json

import numpy as np
import pytest
from inference_models import make_model, make_weights, random_texts

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, SentenceConfig
from bert_jax.config.task import TaskDataConfig
from bert_jax.contrib.analysis import retrieval
from bert_jax.contrib.analysis.neighbors import Hits
from bert_jax.contrib.analysis.retrieval import Mining, relevance_label, reranked, with_negatives
from bert_jax.contrib.analysis.texts_or_vectors import Collection
from bert_jax.interop.saved_model import write_saved
from data_pipeline.tasks import read_splits

CLASSES = HeadsConfig(pooler=True, sequence_labels=("no", "yes"))
VALUE = HeadsConfig(pooler=True, sequence_labels=("score",), problem="regression")
QUERIES, TEXTS = random_texts(5, 6, seed=1), random_texts(9, 8, seed=2)


def collection(texts):
    return Collection("texts", range(len(texts)), texts=texts)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [CLASSES, VALUE])
def test_hits_come_in_the_order_of_the_predictions(heads, monkeypatch):
    monkeypatch.setattr(retrieval, "_QUERIES", 2)  # several blocks
    model, rng = make_model(heads), np.random.default_rng(0)
    # One query has no hits, one has fewer than are asked for.
    rows = [rng.permutation(9)[:count] for count in (6, 0, 2, 9, 6)]
    found = (Hits(row, np.arange(len(row), 0, -1.0)) for row in rows)
    label = relevance_label(model, None)
    hits = list(reranked(found, collection(QUERIES), collection(TEXTS), model, label, 3))
    for query, own, row in zip(QUERIES, hits, rows, strict=True):
        predicted = model.predict([(query, TEXTS[i]) for i in row]) if len(row) else []
        scores = np.array([one["value"] if heads is VALUE else one["probabilities"]["yes"] for one in predicted])
        order = np.argsort(-scores, kind="stable")[:3]
        assert own.rows.tolist() == row[order].tolist()
        np.testing.assert_allclose(own.scores, scores[order], rtol=1e-5)
    assert any(own.rows.tolist() != row[:3].tolist() for own, row in zip(hits, rows, strict=True))


@pytest.fixture
def files(tmp_path):
    write_saved(tmp_path / "bi", make_weights(sentence=SentenceConfig()))
    write_saved(tmp_path / "cross", make_weights(CLASSES, seed=1))
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    return tmp_path


@pytest.mark.slow
def test_the_command(files, capsys):
    words = ["search", "--model", str(files / "bi"), "--corpus", str(files / "texts.txt"), "w1 w2", "--top", "3"]
    assert main([*words, "--rerank", str(files / "cross"), "--candidates", "5"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert main([*words[:-1], "5"]) == 0
    (plain,) = map(json.loads, capsys.readouterr().out.splitlines())
    ids, scores = zip(*((hit["id"], hit["score"]) for hit in line["hits"]), strict=True)
    assert len(ids) == 3 and set(ids) < {hit["id"] for hit in plain["hits"]}
    assert list(scores) == sorted(scores, reverse=True)


def test_what_is_refused(files, capsys, tmp_path):
    np.save(tmp_path / "v.npy", np.eye(9, 16, dtype=np.float32))
    base = ["search", "--model", str(files / "bi"), "--corpus", str(files / "texts.txt"), "w1"]
    cross = ["--rerank", str(files / "cross")]
    for words, message in (
        ([*base, "--candidates", "5"], "--candidates: requires --rerank; add --rerank with a model of pairs"),
        ([*base, "--rerank_label", "a"], "--rerank_label: requires --rerank"),
        ([*base, *cross, "--candidates", "9"], "--candidates: 9 is not allowed; use 10 or more"),
        ([*base, *cross, "--rerank_label", "maybe"], "--rerank_label: maybe is not allowed; use one of no, yes"),
        ([*base, "--rerank", str(files / "bi")], "the model has no head for pairs of texts; fine-tune it on them"),
        (["search", "--corpus", str(tmp_path / "v.npy"), *cross], "v.npy: --rerank reads texts, but these are vec"),
    ):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert relevance_label(make_model(CLASSES), "no") == "no"
    with pytest.raises(ValueError, match=r"^--rerank_label: yes is not allowed; the model predicts a value$"):
        relevance_label(make_model(VALUE), "yes")
    three = HeadsConfig(pooler=True, sequence_labels=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"^--rerank_label: missing; give the class of relevant texts: a, b, c$"):
        relevance_label(make_model(three), None)


# ------------------------------------------------------------------ hard negatives

PAIRS = [("w1 w2", "w1 w3"), ("w1 w2", "w2 w4"), ("w5", "w5 w6"), ("w7 w8 w9", "w1 w3")]


@pytest.mark.slow
@pytest.mark.parametrize("corpus", [None, ["w1 w2", "w5", "w1 w3", *random_texts(20, 5, seed=3), "w2 w4", "w1 w2"]])
@pytest.mark.parametrize("margin", [0.0, 0.05])
def test_negatives_are_near_but_no_answers(corpus, margin):
    """Against every text of the corpus, compared one by one."""
    model = make_model(sentence=SentenceConfig())
    given = None if corpus is None else collection(corpus)
    mining = Mining(count=3, margin=margin, candidates=100)
    lines = list(with_negatives(PAIRS, given, model, mining))
    assert [(line["text"], line["text_pair"]) for line in lines] == PAIRS
    texts = list(dict.fromkeys(corpus or [answer for _, answer in PAIRS]))
    counts = []
    for (text, answer), line in zip(PAIRS, lines, strict=True):
        vectors = np.asarray(model.embed([text, answer, *texts]), np.float64)
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        own, others = unit[0] @ unit[1], unit[2:] @ unit[0]
        answers = {other for one, other in PAIRS if one == text}
        near = sorted(
            (-score, place) for place, score in enumerate(others)
            if texts[place] not in answers and score <= own - margin
        )  # fmt: skip
        assert line["negative"] == [texts[place] for _, place in near[:3]]
        counts.append(len(near))
    assert max(counts) > 3 or corpus is None


@pytest.mark.slow
def test_the_command_writes_what_fine_tuning_reads(files, capsys):
    pairs, out = files / "pairs.jsonl", files / "mined.jsonl"
    pairs.write_text("".join(json.dumps({"text": a, "text_pair": b}) + "\n" for a, b in PAIRS))
    words = ["mine", "--model", str(files / "bi"), "--pairs", str(pairs), "--output", str(out)]
    assert main([*words, "--corpus", str(files / "texts.txt"), "--count", "2", "--margin", "-1"]) == 0
    assert "4 pairs, 2.00 negatives each; 0 pairs have none" in capsys.readouterr().err
    config = TaskDataConfig(train=(str(out),))
    records = read_splits(config, "sentence")["train"]
    assert [record.negatives for record in records] == [
        tuple(json.loads(line)["negative"]) for line in out.read_text().splitlines()
    ]
    assert all(len(record.negatives) == 2 for record in records)
    np.save(files / "v.npy", np.eye(9, 16, dtype=np.float32))
    (files / "bad.jsonl").write_text('{"text": "a"}\n')
    for change, message in (
        (["--count", "0"], "--count: 0 is not allowed; use 1 or more"),
        (["--margin", "3"], "--margin: 3.0 is not allowed; use -2 or more and below 2, a difference of two"),
        (
            ["--pairs", "pairs.tsv"],
            "pairs.tsv: a table; use texts, one per line, or JSON lines, which bert-data",
        ),
        (["--corpus", str(files / "v.npy")], "v.npy: these are vectors; give a file of texts"),
        (["--pairs", str(files / "bad.jsonl")], "bad.jsonl: entry 1: not a pair; write"),
    ):
        assert main([*words, *change]) == 2
        assert message in capsys.readouterr().err
