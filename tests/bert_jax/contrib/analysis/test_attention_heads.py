"""Attention from word to word is that of the paper, by loops over the whole matrices; best heads and offsets."""

import json

import numpy as np
import pytest
from inference_models import make_model, make_weights
from treebank import drawn_sentences, write_treebank

from bert_jax.commands import main as cli
from bert_jax.contrib.analysis.attention_heads import ALL, Attended, attended, best_heads
from bert_jax.interop.saved_model import write_saved
from bert_jax.io.conll import ParsedSentence, read_treebank


@pytest.fixture(scope="module")
def loaded():
    return make_model()


def attended_by_loops(loaded, words):
    """int64[W, D, L, A]: the word to which each word attends most, and the one that attends most to it."""
    pieces = [loaded.tokenizer.encode(word) for word in words]
    ids = [loaded.tokenizer.cls_id, *(i for own in pieces for i in own), loaded.tokenizer.sep_id]
    ends = np.cumsum([1, *map(len, pieces)])
    attention = loaded.forward({"input_ids": np.array([ids])}, attentions=True)["attentions"][:, 0]
    best = np.zeros((len(words), 2, *attention.shape[:2]), np.int64)
    for layer, head in np.ndindex(attention.shape[:2]):
        between = np.full((len(words), len(words)), -1.0)
        for a, b in np.ndindex(between.shape):
            if a != b:
                block = attention[layer, head, ends[a] : ends[a + 1], ends[b] : ends[b + 1]]
                between[a, b] = block.sum(axis=1).mean()
        best[:, 0, layer, head], best[:, 1, layer, head] = between.argmax(axis=1), between.argmax(axis=0)
    return best


def parsed(tmp_path, count, seed):
    return list(read_treebank(write_treebank(tmp_path / f"{seed}.conllu", count, seed)))


@pytest.mark.slow
def test_attention_between_words(loaded, tmp_path):
    """Several sentences share rows, and a fifth of the words have two pieces."""
    got = attended(loaded, parsed(tmp_path, 30, 3))
    sentences = list(drawn_sentences(30, 3))
    expected = []
    for words, _, heads, _ in sentences:
        best = attended_by_loops(loaded, words)
        expected += [best[i] == head for i, head in enumerate(heads) if head >= 0]
    np.testing.assert_array_equal(got.hits, expected)
    assert all(0.05 < got.hits[:, direction].mean() < 0.95 for direction in range(2))
    relations = [r.partition(":")[0] for *_, names in sentences for r in names if r != "root"]
    assert got.relations.tolist() == relations and set(relations) == {"left", "right"}
    assert got.offsets.tolist() == [h - i for _, _, heads, _ in sentences for i, h in enumerate(heads) if h >= 0]
    numbers = [n for n, (_, _, heads, _) in enumerate(sentences) for head in heads if head >= 0]
    assert got.sentence.tolist() == numbers and (got.sentences, got.skipped) == (30, 0)
    assert attended(loaded, parsed(tmp_path, 30, 3), 7).sentences == 7
    short = [ParsedSentence(("w1",), ("X",), (-1,), ("root",)), *parsed(tmp_path, 3, 3)]
    assert attended(loaded, short)[-2:] == (4, 0)


def test_long_sentences_are_omitted_and_counted(tmp_path):
    got = attended(make_model(max_length=8), parsed(tmp_path, 30, 3))
    lengths = [len(words) + sum(word.endswith("x") for word in words) + 2 for words, *_ in drawn_sentences(30, 3)]
    assert got.skipped == sum(length > 8 for length in lengths) > 0
    assert set(got.sentence) == {n for n, length in enumerate(lengths) if length <= 8}


def test_best_heads_and_offsets_are_chosen_on_training_words():
    rng = np.random.default_rng(0)

    def draw(count):
        relations = rng.choice(["a", "b", "rare"], count, p=[0.6, 0.39, 0.01])
        offsets = np.where(relations == "a", rng.choice([1, 2, -1], count, p=[0.5, 0.3, 0.2]), -2)
        return Attended(np.arange(count) // 4, relations, offsets, rng.random((count, 2, 2, 3)) < 0.4, count, 0)

    train, test = draw(400), draw(300)
    train.hits[train.relations == "a", 0, 1, 2] = True
    train.hits[train.relations == "b", 1, 0, 1] = True
    rows = {row.name: row for row in best_heads(train, test)}
    assert list(rows) == [ALL, "a", "b"]  # rare relations are not reported
    a, own = rows["a"], test.relations == "a"
    assert (a.layer, a.head, a.to_head, a.offset, a.words) == (2, 3, True, 1, own.sum())
    assert a.accuracy.value == pytest.approx(test.hits[own, 0, 1, 2].mean())
    assert a.offset_accuracy.value == pytest.approx((test.offsets[own] == 1).mean())
    b = rows["b"]
    assert (b.layer, b.head, b.to_head, b.offset) == (1, 2, False, -2)
    assert a.accuracy.low < a.accuracy.value < a.accuracy.high


# ------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    write_saved(folder / "model", make_weights())
    for seed in range(2):
        write_treebank(folder / f"{seed}.conllu", 40, seed)
    write_treebank(folder / "few.conllu", 2, 0)
    vectors = [f"w{i} {i} {i % 3} 1" for i in range(40)]
    (folder / "vectors.txt").write_text("\n".join(vectors) + "\n")
    return folder


def call(files, capsys, *words, model="model", train="0.conllu", test="1.conllu"):
    paths = ["--model", files / model, "--train", files / train, "--test", files / test]
    code = cli.main(["probe", "--task", "heads", *map(str, [*paths, *words])])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), [line for line in captured.err.splitlines() if line.startswith("error")]


@pytest.mark.slow
def test_the_command(files, capsys, tmp_path):
    code, lines, _ = call(files, capsys)
    assert code == 0 and len(lines) == 3 and lines[0].startswith(ALL)
    assert {line.split()[0] for line in lines[1:]} == {"left", "right"}
    assert call(files, capsys, "--output", tmp_path / "out.jsonl")[:2] == (0, [])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[0]["relation"] == ALL and {row["offset"] for row in rows} == {-1, 1}
    assert {row["direction"] for row in rows} <= {"to head", "from head"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("settings", "words", "message"),
    [
        ({"model": "vectors.txt"}, (), "vectors.txt: the encoder (none) has no attention, which heads requires"),
        ({"test": "few.conllu"}, (), "too few words: 13 with a syntactic head; 20 or more are required in both"),
        ({"test": "missing.conllu"}, (), "missing.conllu: no such file; give a CoNLL-U file"),
        ({}, ("--layers", "1"), "--layers cannot be combined with --task heads"),
        ({}, ("--classifier", "linear"), "--classifier cannot be combined with --task heads"),
        ({}, ("--batch_tokens", "0"), "--batch_tokens: 0 is not allowed; allowed: 1 or more"),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(settings, words, message, files, capsys):
    code, lines, errors = call(files, capsys, *words, **settings)
    assert code == 2 and not lines and len(errors) == 1 and message in errors[0], errors
