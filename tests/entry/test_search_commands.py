"""``bert-jax search`` and ``cluster`` as a person calls them."""

import json

import numpy as np
import pytest
from inference_models import make_weights, random_texts

import bert_jax
from bert_jax.commands import main as cli
from bert_jax.config import SentenceConfig
from bert_jax.interop.saved_model import write_saved

TEXTS = [*(text for text in random_texts(30, 12) if text), "w1 w2", "w1 w2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A saved model and a file of texts."""
    folder = tmp_path_factory.mktemp("search")
    write_saved(folder / "model", make_weights(sentence=SentenceConfig()))
    (folder / "texts.txt").write_text("\n\n".join(TEXTS) + "\n")
    return folder


@pytest.fixture
def call(capsys):
    """Run a command that must end well: (stdout lines, stderr)."""

    def run(*words):
        assert cli.main([str(word) for word in words]) == 0, capsys.readouterr().err
        captured = capsys.readouterr()
        return captured.out.splitlines(), captured.err

    return run


def cosines(files, **options):
    vectors = bert_jax.load(files / "model").embed(TEXTS, **options).astype(np.float64)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return (unit[:, None] * unit[None]).sum(axis=-1)


def ids_of(lines):
    return [[hit["id"] for hit in json.loads(line)["hits"]] for line in lines]


@pytest.mark.slow
def test_search_gives_what_brute_force_gives(files, call, tmp_path):
    words = ("search", "--model", files / "model", "--corpus", files / "texts.txt", "--top", 4)
    scores = cosines(files)
    lines, _ = call(*words, "--keep_self")
    assert ids_of(lines) == np.argsort(-scores.round(12), axis=1, kind="stable")[:, :4].tolist()
    np.fill_diagonal(scores, -np.inf)
    expected = np.argsort(-scores.round(12), axis=1, kind="stable")[:, :4]
    lines, _ = call(*words)
    assert ids_of(lines) == expected.tolist()
    last = json.loads(lines[-1])
    assert (last["query"], last["text"]) == (len(TEXTS) - 1, "w1 w2")
    assert last["hits"][0] == {"id": len(TEXTS) - 2, "score": 1.0, "text": "w1 w2"}
    # The same from vectors alone, without a model.
    call("embed", "--model", files / "model", "--input", files / "texts.txt", "--output", tmp_path / "v.npy")
    call("search", "--corpus", tmp_path / "v.npy", "--top", 4, "--output", tmp_path / "hits.jsonl")
    lines = (tmp_path / "hits.jsonl").read_text().splitlines()
    assert ids_of(lines) == expected.tolist() and "text" not in lines[0]
    # Queries of one's own, with other pooling.
    pooled = cosines(files, pooling="max")[3]
    (line,), _ = call(*words, "--pooling", "max", TEXTS[3])
    assert ids_of([line]) == [np.argsort(-pooled.round(12), kind="stable")[:4].tolist()]


@pytest.mark.slow
def test_search_against_what_is_relevant(files, call, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": f"t{i}", "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    scores = cosines(files)
    np.fill_diagonal(scores, -np.inf)
    order = np.argsort(-scores.round(12), axis=1, kind="stable")
    relevant = tmp_path / "relevant.jsonl"
    # Found first, second, and not at all.
    wanted = ((0, order[0, 0]), (1, order[1, 1]), (2, order[2, 7]))
    relevant.write_text("".join(json.dumps({"query": f"t{q}", "relevant": [f"t{r}"]}) + "\n" for q, r in wanted))
    words = ("search", "--model", files / "model", "--corpus", corpus, "--top", 5, "--relevant", relevant)
    lines, _ = call(*words, "--output", tmp_path / "hits.jsonl")
    assert lines[0] == f"3 queries, 5 hits each ({len(TEXTS) - 3} queries without relevant ids are not counted)"
    values = dict(line.split()[:2] for line in lines[1:])
    assert (values["mrr"], values["precision@1"], values["recall@5"]) == ("0.5000", "0.3333", "0.6667")
    assert len((tmp_path / "hits.jsonl").read_text().splitlines()) == len(TEXTS)
    relevant.write_text('{"query": "t0", "relevant": ["t0"]}\n')
    assert cli.main([str(word) for word in words]) == 2


def test_whitened_search(files, call):
    words = ("search", "--model", files / "model", "--corpus", files / "texts.txt", "--top", 4)
    plain, _ = call(*words)
    lines, err = call(*words, "--whiten", "--dimensions", 6)
    assert ids_of(lines) != ids_of(plain) and "6 of 16 dimensions" in err
    before, after = (float(err.split(word)[1].split()[0].strip(",")) for word in ("pairs", "whitened"))
    assert abs(after) < 0.1 < before


def test_anisotropy(files, call, tmp_path):
    scores = cosines(files, pooling="cls")
    expected = (scores.sum() - np.trace(scores)) / scores.size / (1 - 1 / len(scores))
    words = ("anisotropy", "--pooling", "cls", "--model", files / "model", "--input", files / "texts.txt")
    lines, _ = call(*words)
    assert lines[0] == f"{len(TEXTS)} texts: mean cosine of all pairs {expected:.4f}"
    model = bert_jax.load(files / "model")
    used = sorted({model.tokenizer.piece_id(word) for text in TEXTS for word in text.split()})
    rows = np.asarray(model.params["embeddings"]["word_embeddings"]["embedding"])[used]
    length = np.linalg.norm(rows, axis=1).mean()
    assert lines[1].startswith(f"pieces 1 to {len(used)} by frequency: ") and lines[1].endswith(f"{length:.3f}")
    call("embed", "--model", files / "model", "--input", files / "texts.txt", "--output", tmp_path / "v.npy")
    assert len(call("anisotropy", "--input", tmp_path / "v.npy")[0]) == 1


@pytest.mark.slow
def test_cluster(files, call, tmp_path):
    words = ("cluster", "--model", files / "model", "--input", files / "texts.txt")
    lines, err = call(*words, "--clusters", 3)
    rows = [json.loads(line) for line in lines]
    assert [row["text"] for row in rows] == TEXTS and {row["cluster"] for row in rows} == {0, 1, 2}
    assert rows[-1]["cluster"] == rows[-2]["cluster"] and err.startswith("cluster 0: ")
    labels = tmp_path / "labels.txt"
    labels.write_text("".join(f"{row['cluster']}\n" for row in rows))
    said, _ = call(*words, "--clusters", 3, "--labels", labels, "--output", tmp_path / "c.jsonl")
    assert (tmp_path / "c.jsonl").read_text().splitlines() == lines
    assert said[-1] == "purity 1.0000  adjusted_rand 1.0000  nmi 1.0000" and len(said) == 4
    lines, _ = call(*words, "--method", "agglomerative", "--threshold", 0)
    assert len({json.loads(line)["cluster"] for line in lines}) == len(set(TEXTS))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("search", "--corpus", "TEXTS"), "texts.txt: texts need a model"),
        (("search", "--corpus", "TEXTS", "--queries", "TEXTS", "w1"), "give only one of them"),
        (("search", "--corpus", "TEXTS", "--top", "0"), "--top: 0 is not allowed"),
        (("search", "--corpus", "TEXTS", "--dimensions", "3"), "--dimensions: requires --whiten"),
        (("search", "--corpus", "TEXTS", "--query_prompt", "q"), "--query_prompt requires queries"),
        (("search", "--corpus", "MISSING"), "No such file"),
        (("search", "--model", "MODEL", "--corpus", "TEXTS", "--queries", "VECTORS"), "width 3"),
        (("search", "--model", "MODEL", "--corpus", "TEXTS", "--queries", "VECTORS", "--whiten"), "width 3"),
        (("search", "--corpus", "VECTORS", "--batch_tokens", "0"), "--batch_tokens: 0 is not allowed"),
        (("cluster", "--input", "VECTORS"), "--clusters and --threshold: give exactly one"),
        (("cluster", "--input", "VECTORS", "--threshold", "1"), "--threshold cannot be combined with kmeans"),
        (
            ("cluster", "--input", "VECTORS", "--clusters", "1", "--method", "agglomerative", "--seed", "1"),
            "--seed cannot be combined",
        ),
        (("cluster", "--input", "VECTORS", "--clusters", "9"), "clusters: 9 is not allowed; use 1 to 2"),
        (("cluster", "--input", "VECTORS", "--clusters", "2", "--seed", "-1"), "--seed: -1 is not allowed"),
    ],
)
def test_refusals(files, tmp_path, capsys, words, message):
    vectors = tmp_path / "vectors.npy"
    np.save(vectors, np.eye(2, 3, dtype=np.float32))
    paths = {
        "TEXTS": files / "texts.txt", "MODEL": files / "model", "VECTORS": vectors, "MISSING": tmp_path / "x.txt"
    }  # fmt: skip
    assert cli.main([str(paths.get(word, word)) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1, captured.err
    assert captured.err.startswith("error: ") and message in captured.err
