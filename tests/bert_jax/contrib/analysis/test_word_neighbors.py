"""Vectors of words and nearest words, against brute force over single texts; words that are not there."""

import json

import numpy as np
import pytest
from inference_models import make_model, make_weights

from bert_jax.commands.main import main
from bert_jax.contrib.analysis import word_neighbors
from bert_jax.contrib.analysis.word_vectors import word_spans, word_vectors
from bert_jax.interop.saved_model import write_saved


@pytest.fixture(scope="module")
def loaded():
    return make_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "saved"
    write_saved(path, make_weights())
    return str(path)


@pytest.fixture(scope="module")
def words(loaded):
    """Words of the vocabulary."""
    return [piece for piece in loaded.tokenizer.pieces(range(5, 40)) if piece.isalnum()]


def states(loaded, text):
    """Pieces of a text and its hidden states [L + 1, S, H], by the plain forward pass."""
    ids = loaded.model_inputs([text])[0].ids
    found = loaded.forward({"input_ids": np.array([ids])}, hidden_states=True)["hidden_states"]
    return loaded.tokenizer.pieces(ids), found[:, 0]


def test_words_of_a_text():
    text = "Don't stop 中文, naïve_x!"
    assert [text[a:b] for a, b in word_spans(text)] == [
        "Don", "'", "t", "stop", "中", "文", ",", "naïve_x", "!"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_vectors_of_words_are_those_of_their_pieces(loaded, words, pooling):
    texts = [" ".join(words[:7]), f"{words[0]}x {words[1]}xy, {words[2]}"]
    for text, (spans, vectors) in zip(
        texts, word_vectors(loaded, texts, layers=(0, 1, -1), pooling=pooling), strict=True
    ):
        pieces, hidden = states(loaded, text)
        place = 1
        for word, (begin, end) in enumerate(spans):
            stop = place + 1
            while stop < len(pieces) - 1 and pieces[stop].startswith("##"):
                stop += 1
            own = hidden[[0, 1, -1], place : stop if pooling == "mean" else place + 1].mean(axis=1)
            assert np.abs(vectors[:, word] - own).max() < 1e-5, text[begin:end]
            place = stop
        assert place == len(pieces) - 1


def cosines(vector, others):
    return others @ vector / np.linalg.norm(others, axis=1) / np.linalg.norm(vector)


def test_neighbors_in_the_table_are_those_of_brute_force(loaded):
    names, ids = word_neighbors.vocabulary_words(loaded)
    table = np.asarray(loaded.params["embeddings"]["word_embeddings"]["embedding"])[ids]
    (found,) = word_neighbors.static_neighbors(loaded, [[(1.0, names[3])]], 5)
    scores = cosines(table[3], table)
    order = [i for i in np.argsort(-scores) if i != 3][:5]
    assert [one.word for one in found] == [names[i] for i in order]
    assert np.allclose([one.score for one in found], scores[order], atol=1e-6)
    (found,) = word_neighbors.static_neighbors(
        loaded, word_neighbors.terms_of([names[0], "-", names[1], "+", names[2]]), 3
    )
    units = table / np.linalg.norm(table, axis=1, keepdims=True)
    scores = cosines(units[0] - units[1] + units[2], table)
    assert [one.word for one in found] == [names[i] for i in np.argsort(-scores) if i > 2][:3]


@pytest.mark.slow
def test_neighbors_in_a_corpus_are_those_of_brute_force(loaded, words):
    text = f"{words[0]} {words[1]} {words[0]}"
    corpus = [text, f"{words[2]} {words[0]}", f"{words[1]} {words[3]} , {words[0]} {words[4]}"]
    queries = word_neighbors.find_occurrences(loaded, [words[0]], text, 1, occurrence=2)
    assert queries[0].span == (len(words[0]) + len(words[1]) + 2, len(text))
    (found,) = word_neighbors.corpus_neighbors(loaded, queries, text, corpus, 1, 4)
    _, hidden = states(loaded, text)
    query, candidates = hidden[1, 3], []
    for one in corpus:
        pieces, vectors = states(loaded, one)
        for place in range(1, len(pieces) - 1):
            if pieces[place].isalnum() and (one, place) != (text, 3):
                candidates.append((float(cosines(query, vectors[1, place : place + 1])[0]), one, pieces[place]))
    expected = sorted(candidates, key=lambda row: -row[0])[:4]
    assert [(one.text, one.word) for one in found] == [row[1:] for row in expected]
    assert np.allclose([one.score for one in found], [row[0] for row in expected], atol=1e-5)


@pytest.mark.slow
def test_neighbors_in_the_vocabulary_are_words_alone(loaded, words):
    text = f"{words[1]} {words[0]}"
    (query,) = word_neighbors.find_occurrences(loaded, [words[0]], text, -1)
    (found,) = word_neighbors.vocabulary_neighbors(loaded, [query], -1, 3, candidates=20)
    names, _ = word_neighbors.vocabulary_words(loaded, 20)
    alone = np.stack([states(loaded, name)[1][-1, 1] for name in names])
    order = [i for i in np.argsort(-cosines(query.vector, alone)) if names[i] != words[0]][:3]
    assert [one.word for one in found] == [names[i] for i in order]


@pytest.mark.slow
def test_command_writes_text_and_json_lines(folder, words, tmp_path, capsys):
    text = f"{words[1]} {words[0]}"
    assert main(["neighbors", words[0], "--model", folder, "--top", "2"]) == 0
    assert capsys.readouterr().out.startswith(f"{words[0]} (input embeddings)\n  ")
    (tmp_path / "texts.txt").write_text(f"{words[0]} {words[3]}\n")
    output = tmp_path / "out.jsonl"
    options = ["--in", text, "--corpus", str(tmp_path / "texts.txt"), "--layer", "1", "--output", str(output)]
    assert main(["neighbors", words[0], "--model", folder, *options]) == 0
    (line,) = map(json.loads, output.read_text().splitlines())
    assert (line["word"], line["text"], line["start"], line["layer"]) == (words[0], text, len(words[1]) + 1, 1)
    assert [row["word"] for row in line["neighbors"]][:2] and line["neighbors"][0]["text"].startswith(words[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["☃"], "'☃': the vocabulary has no piece of this word"),
        (["{w}", "--in", "{v}"], "not a word of the text"),
        (["{w}", "--in", "{w}", "--occurrence", "2"], "--occurrence: 2 is not allowed"),
        (["{w}", "--in", "{w}", "--layer", "9"], "layer 9 is not allowed; use -3 to 2"),
        (["{w}", "--layer", "1"], "--layer: requires --in"),
        (["{w}", "+"], "+ and - must stand between words"),
        (["{w}", "--top", "0"], "--top: 0 is not allowed"),
        (
            ["{w}", "--in", "{w}", "--candidates", "3", "--corpus", "x"],
            "--candidates cannot be combined",
        ),
        (["{w}", "-", "{v}", "--in", "{w}"], "--in cannot be combined with + and -"),
    ],
)
def test_bad_input_is_one_line(folder, words, arguments, message, capsys):
    filled = [part.format(w=words[0], v=words[1]) for part in arguments]
    assert main(["neighbors", *filled, "--model", folder]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]


def test_embed_writes_vectors_of_words(folder, loaded, words, capsys):
    text = f"{words[0]} {words[1]}x"
    assert main(["embed", text, "--model", folder, "--per_word", "mean", "--layers", "0,2"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    ((spans, vectors),) = word_vectors(loaded, [text], layers=(0, 2))
    assert [(row["start"], row["end"]) for row in line["words"]] == spans
    assert [row["word"] for row in line["words"]] == text.split()
    for word, row in enumerate(line["words"]):
        assert [layer["index"] for layer in row["layers"]] == [0, 2]
        assert np.allclose([layer["values"] for layer in row["layers"]], vectors[:, word], atol=1e-5)
    for options, message in (
        (["--per_word", "mean", "--per_token"], "--per_token, --per_word: not allowed together"),
        (["--per_word", "mean", "--pooling", "mean"], "--pooling: not allowed with --per_word"),
        (["--per_word", "mean", "--output", "x.npy"], "--output x.npy: not allowed with --per_word"),
        (["--layers", "1"], "--layers: requires --per_token or --per_word"),
    ):
        assert main(["embed", text, "--model", folder, *options]) == 2
        assert message in capsys.readouterr().err
