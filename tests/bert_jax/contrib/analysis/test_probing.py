"""Probes: classifiers against plain statements, control labels and baselines by hand, vectors of the words."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from builders import drawn, tiny_model
from inference_models import PIECES, make_model, make_weights
from treebank import drawn_sentences, write_senses, write_treebank

from bert_jax.commands import main as cli
from bert_jax.config import HeadsConfig
from bert_jax.contrib.analysis import linear_probe, probing
from bert_jax.contrib.analysis.probe_tasks import chosen_words, read_examples, spread, tagged_words
from bert_jax.contrib.analysis.probing import Probe, layer_vectors, row_line
from bert_jax.contrib.analysis.word_vectors import sentence_word_vectors
from bert_jax.interop.saved_model import write_saved
from bert_jax.metrics.classification import classification_scores
from bert_jax.metrics.score import value


@pytest.fixture(scope="module")
def loaded():
    return make_model()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    write_saved(folder / "model", make_weights())
    write_treebank(folder / "train.conllu", 60, 0)
    write_treebank(folder / "test.conllu", 40, 1)
    write_senses(folder / "senses")
    (folder / "vectors.txt").write_text("".join(f"w{i} {i - 20} {i % 3} 1\n" for i in range(40)))
    return folder


# ------------------------------------------------------------------ examples


def read(task, files, limit=0):
    """The examples of test.conllu, or of the test part of the senses."""
    paths = [files / "senses"] * 2 if task == "sense" else [files / f"{name}.conllu" for name in ("train", "test")]
    return read_examples(task, *paths, limit)[1]


def test_examples_of_a_treebank(files):
    sentences = list(drawn_sentences(40, 1))
    pos = read("pos", files)
    assert pos.labels == [tag for _, upos, _, _ in sentences for tag in upos]
    relations = read("deprel", files)
    flat = [(n, i) for n, own in enumerate(relations.stored) for i in own]
    expected = [
        ((n, i), (n, heads[i]), relation.partition(":")[0])
        for n, (_, _, heads, names) in enumerate(sentences)
        for i, relation in enumerate(names)
        if heads[i] >= 0
    ]
    got = [(flat[a], flat[b], label) for (a, b), label in zip(relations.places, relations.labels, strict=True)]
    assert got == expected and {label for *_, label in expected} == {"left", "right"}
    assert [relations.sentences[n][i] for (n, i), *_ in expected] == list(relations.types)
    assert spread(list(range(10)), 4) == [0, 2, 5, 7] and spread([1, 2], 0) == [1, 2] == spread([1, 2], 5)
    assert len(read("pos", files, 7).sentences) == 7


def test_examples_of_words_with_labels():
    sentences = [["A", "b"], ["c", "a", "d"]]
    own = tagged_words(sentences, [[None, "X"], ["Y", "X", None]])
    assert (own.labels, own.types, own.groups) == (["X", "Y", "X"], ["b", "c", "a"], None)
    assert (own.stored, own.places.tolist(), own.sentence.tolist()) == ([[1], [0, 1]], [[0], [1], [2]], [0, 1, 1])
    senses = chosen_words(sentences, [0, 2], ["1", "2"], ["a", "d"])
    assert (senses.stored, senses.groups, senses.types) == ([[0], [2]], ["a", "d"], None)
    with pytest.raises(ValueError, match=r"^sentence 1: 2 labels for 3 words; give one per word$"):
        tagged_words(sentences, [["X", "X"], ["X", "Y"]])
    with pytest.raises(ValueError, match=r"^sentence 1: no word 3; allowed: 0 to 2$"):
        chosen_words(sentences, [0, 3], ["1", "2"], ["a", "d"])


def test_bins_of_lengths(files):
    names = set()
    for own in read_examples("length", files / "train.conllu", files / "test.conllu", 0):
        names |= set(own.labels)
        for words, name in zip(own.sentences, own.labels, strict=True):
            low, _, high = name.partition("-")
            assert int(low) <= len(words) <= int(high or 99)
    bounds = sorted((int(name.partition("-")[0]), name.partition("-")[2]) for name in names)
    assert bounds[0][0] == 1 and bounds[-1][1] == "" and len(bounds) in (5, 6)
    assert [int(high) + 1 for _, high in bounds[:-1]] == [low for low, _ in bounds[1:]]


@pytest.mark.slow
def test_vectors_are_those_of_the_words(loaded, files, tmp_path):
    for task in ("deprel", "length"):
        own = read(task, files, 9)
        stored = layer_vectors(loaded, own, (0, 1, 2), tmp_path / task)
        vectors = list(sentence_word_vectors(loaded, own.sentences, layers=(0, 1, 2)))
        if task == "length":
            expected = np.stack([one.mean(axis=1) for one in vectors], axis=1)
        else:
            words = zip(vectors, own.stored, strict=True)
            expected = np.concatenate([one[:, list(kept)] for one, kept in words], axis=1)
        np.testing.assert_allclose(stored, expected, atol=1e-6)
        np.testing.assert_array_equal(layer_vectors(loaded, own, (2, 0)), stored[[2, 0]])
    senses = read("sense", files)
    assert {words[own[0]] for words, own in zip(senses.sentences, senses.stored, strict=True)} == {"w1", "w2"}
    stored = layer_vectors(loaded, senses, (0, 1, 2))
    assert stored.shape == (3, 80, 16)
    (third,) = sentence_word_vectors(loaded, [senses.sentences[3]], layers=(0, 1, 2))
    np.testing.assert_allclose(stored[:, 3], third[:, 1], atol=1e-5)


def test_features_join_the_vectors_of_the_words():
    own = tagged_words([["a", "b"]], [["X", "Y"]])
    own = dataclasses.replace(own, places=np.array([[1, 0], [0, 1]]))
    assert own.features(np.array([[1, 2], [3, 4]])).tolist() == [[3, 4, 1, 2], [1, 2, 3, 4]]


# ------------------------------------------------------------------ probes


def probe_of(task, files, **options):
    paths = [files / "senses"] * 2 if task == "sense" else [files / f"{name}.conllu" for name in ("train", "test")]
    return Probe(*read_examples(task, *paths, 0), **options)


def test_control_labels_and_baselines(files):
    probe = probe_of("pos", files)
    of_type = {}
    for own, labels in ((probe.train, probe.control.train), (probe.test, probe.control.test)):
        for word, label in zip(own.types, labels, strict=True):
            assert of_type.setdefault(word, label) == label
    assert set(of_type.values()) == {0, 1, 2}
    assert (probe_of("pos", files, seed=1).control.train != probe.control.train).any()
    frequent, by_word = probe.baselines()
    most = Counter(probe.train.labels).most_common(1)[0][0]
    share = np.mean([label == most for label in probe.test.labels])
    assert frequent.scores["accuracy"].value == pytest.approx(share)
    seen = set(probe.train.types)
    hits = [word in seen or label == most for word, label in zip(probe.test.types, probe.test.labels, strict=True)]
    assert by_word.scores["accuracy"].value == pytest.approx(np.mean(hits))
    scores = by_word.scores
    assert scores["selectivity"].value == pytest.approx(scores["accuracy"].value - scores["control"].value)
    assert scores["accuracy"].low <= scores["accuracy"].value <= scores["accuracy"].high


def test_a_new_word_has_the_most_frequent_label():
    train = tagged_words([["a", "b", "b"]] * 10, [["X", "Y", "Y"]] * 10)
    probe = Probe(train, tagged_words([["A", "b", "c", "c"]], [["X", "X", "Y", "Y"]]))
    frequent, by_word = probe.baselines()
    assert frequent.scores["accuracy"].value == 0.5
    assert by_word.scores["accuracy"].value == 0.75  # b is wrong, the new word c has the label Y of all words


def test_control_labels_follow_the_distribution_of_the_labels(files):
    probe = probe_of("pos", files)
    drawn = Counter()
    for seed in range(200):
        probe.seed = seed
        control = probe._control()
        drawn.update(dict(zip(probe.train.types, control.train.tolist(), strict=True)).values())
    shares = np.bincount(probe.labels.train) / len(probe.train)
    total = sum(drawn.values())
    np.testing.assert_allclose([drawn[c] / total for c in range(3)], shares, atol=0.03)


@pytest.mark.slow
def test_a_probe_reads_what_the_vectors_hold(loaded, files):
    """The embedding of a word identifies it: parts of speech follow. The sense is a neighbor's: layers show it."""
    probe = probe_of("pos", files)
    rows = list(probe.layers(loaded))
    assert [row.layer for row in rows] == [0, 1, 2] and all(row.decay is not None for row in rows)
    frequent = probe.baselines()[0].scores["accuracy"]
    assert rows[0].scores["accuracy"].low > frequent.high
    assert set(rows[0].scores) == {"accuracy", "control", "selectivity"}
    assert [row_line("pos", row) for row in probe.layers(loaded)] == [row_line("pos", row) for row in rows]
    assert list(probe.layers(loaded, (0, -1))) == [rows[0], rows[2]]
    for classifier, bar in (("linear", 0.8), ("centroid", 0.6)):
        senses = probe_of("sense", files, classifier=classifier)
        embeddings, *layers = (row.scores["macro_f1"].value for row in senses.layers(loaded))
        assert min(layers) > bar > embeddings, classifier


def test_macro_f1_is_the_mean_over_words():
    """One word has two senses, another one has three."""
    sizes, count = {"a": 2, "b": 3}, 40
    labels = [str(i % size) for size in sizes.values() for i in range(count)]
    groups = [name for name in sizes for _ in range(count)]
    own = chosen_words([[name] for name in groups], [0] * 2 * count, labels, groups)
    probe = Probe(own, own)
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, size, count) for size in sizes.values()]
    got = probe._scores(np.concatenate([parts[0], parts[1] + 2]), None)["macro_f1"].value
    by_word = []
    for size, predicted in zip(sizes.values(), parts, strict=True):
        scores = classification_scores(np.arange(count) % size, predicted, list("012")[:size])
        by_word.append(value({score.name: score for score in scores}["f1_macro"], count))
    assert got == pytest.approx(np.mean(by_word))


def test_labels_that_training_lacks_are_errors():
    train = tagged_words([["w1", "w2"]] * 10, [["X", "Y"]] * 10)
    probe = Probe(train, tagged_words([["w1", "w2"]], [["X", "Z"]]))
    assert probe.labels.test.tolist() == [0, -1]
    assert probe._scores(np.array([0, 1]), None)["accuracy"].value == 0.5


@pytest.mark.slow
def test_a_control_task_has_the_weight_decay_of_the_task(loaded, files, monkeypatch):
    seen = []

    def fitted(splits, labels, classes, decays=linear_probe.DECAYS):
        seen.append(decays)
        return linear_probe.Fitted(np.zeros(len(splits.test), np.int64), 1e-3)

    monkeypatch.setattr(probing, "linear", fitted)
    list(probe_of("pos", files).layers(loaded, (1,)))
    assert seen == [linear_probe.DECAYS, (1e-3,)]


def test_vectors_that_are_not_finite_are_refused(files):
    broken = make_model()
    broken.params["embeddings"]["word_embeddings"]["embedding"] *= np.nan
    with pytest.raises(ValueError, match=r"^small: NaN or infinite outputs for 'w\d+x';"):
        layer_vectors(broken, read("pos", files, 3), (1,))


def test_too_few_words(files):
    ten = [["w1", "w2"]] * 10, [["X", "Y"]] * 10
    train, test = tagged_words(*ten), tagged_words([["w1"]], [["X"]])
    few = tagged_words([["w1", "w2"]] * 9, [["X", "Y"]] * 9)
    one = tagged_words([["w1"]] * 10, [["X"]] * 10)
    none = tagged_words([["w1"]], [[None]])
    Probe(train, test)
    for parts, message in (
        ((few, test), "2 classes in 9 training sentences, 1 test examples; 2, 10 and 1 or more are required; give"),
        ((one, test), "1 classes in 10 training sentences"),
        ((train, none), "0 test examples"),
    ):
        with pytest.raises(ValueError, match=f"^too few words: .*{message}"):
            Probe(*parts)
    senses = [chosen_words([[name]] * 20, [0] * 20, ["1", "2"] * 10, [name] * 20) for name in ("bank", "club")]
    with pytest.raises(ValueError, match=r"^'club': test examples, but no training examples; give both"):
        Probe(*senses)


# ------------------------------------------------------------------ the command


def call(files, capsys, *words, model="model"):
    code = cli.main(["probe", "--model", str(files / model), *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def treebank(files):
    return "--train", files / "train.conllu", "--test", files / "test.conllu"


@pytest.mark.slow
def test_the_command(files, capsys, tmp_path):
    code, lines, _ = call(files, capsys, "--task", "deprel", *treebank(files))
    assert code == 0 and len(lines) == 5 and lines[2].startswith("embeddings ") and "selectivity" in lines[2]
    code, lines, _ = call(files, capsys, "--task", "length", *treebank(files), "--limit", 30, "--layers", "2,0")
    assert code == 0 and [line.split("  ")[0] for line in lines] == ["most frequent label", "layer 2", "embeddings"]
    assert "control" not in lines[1]
    target = tmp_path / "out.jsonl"
    words = ("--task", "sense", "--train", files / "senses", "--classifier", "centroid", "--output", target)
    assert call(files, capsys, *words)[:2] == (0, [])
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["layer"] for row in rows] == [None, 0, 1, 2] and len(rows[1]["macro_f1"]) == 3
    # The folder of one word.
    code, lines, _ = call(files, capsys, "--task", "sense", "--train", files / "senses" / "w1")
    assert code == 0 and len(lines) == 4


@pytest.mark.slow
def test_word_vectors_have_one_layer(files, capsys):
    code, lines, _ = call(files, capsys, "--task", "pos", *treebank(files), model="vectors.txt")
    assert code == 0 and len(lines) == 3 and lines[2].startswith("embeddings ")


def causal_weights():
    """A GPT-2: causal attention, pre-LN."""
    weights = make_weights(HeadsConfig(mlm=True), types=0, positions=64)
    model = dataclasses.replace(
        weights.spec.model, attention="causal", norm_position="pre", embedding_norm="no", mlm_layer="none"
    )
    return drawn(dataclasses.replace(weights.spec, model=model), 0.2, PIECES)


@pytest.mark.slow
def test_elmo(files, capsys, tmp_path):
    weights = make_weights(types=0)
    model = tiny_model(
        weights.spec.model.vocab_size, encoder="bidirectional_lstm", type_vocab_size=0, embedding_size=8,
        position_embeddings="none", embedding_norm="no", final_norm="no", mlm_layer="none",
    )  # fmt: skip
    spec = dataclasses.replace(weights.spec, model=model, heads=HeadsConfig(mlm=True))
    write_saved(tmp_path / "model", drawn(spec, 0.2, PIECES))
    code, lines, errors = call(tmp_path, capsys, "--task", "pos", *treebank(files))
    assert code == 0 and [line.split("  ")[0] for line in lines[2:]] == ["embeddings", "layer 1", "layer 2"], errors
    code, lines, errors = call(tmp_path, capsys, "--task", "heads", *treebank(files))
    assert code == 2 and not lines and "the encoder (bidirectional_lstm) has no attention" in errors[-1]


@pytest.mark.slow
def test_a_causal_model(files, capsys, tmp_path):
    write_saved(tmp_path / "model", causal_weights())
    code, lines, errors = call(tmp_path, capsys, "--task", "pos", *treebank(files))
    assert code == 0 and len(lines) == 5, errors
    code, lines, errors = call(tmp_path, capsys, "--task", "heads", *treebank(files))
    assert code == 0 and len(lines) == 3, errors


def bad(files, tmp_path):
    train, test = treebank(files)[:2], treebank(files)[2:]
    (tmp_path / "broken.conllu").write_text("1\tw1\n")
    write_treebank(tmp_path / "few.conllu", 3, 0)
    places = {"short": ("1\tw1 w2\n0\tw1", "0"), "place": ("7\tw1 w2", "0"), "text": ("w1 w2", "0")}
    for name, (lines, gold) in places.items():
        (tmp_path / name / "w1").mkdir(parents=True)
        (tmp_path / name / "w1" / "train.data.txt").write_text(lines)
        (tmp_path / name / "w1" / "train.gold.txt").write_text(gold)
    yield ("pos", *train), "--test: required with --task pos; give a CoNLL-U file"
    yield (
        ("pos", *train, "--test", tmp_path / "missing"),
        "missing: no such file; give a CoNLL-U file",
    )
    yield ("pos", *train, "--test", tmp_path / "broken.conllu"), "broken.conllu:1: 2 column(s), but a word"
    yield ("pos", "--train", tmp_path / "few.conllu", *test), "too few words: 3 classes in 3 training sentences"
    yield ("pos", *train, *test, "--limit", "-1"), "--limit: -1 is not allowed; use 0 or more"
    yield ("pos", *train, *test, "--layers", "0,3"), "layer 3 is not allowed; use -3 to 2 (0: the embeddings"
    yield ("pos", *train, *test, "--layers", "all"), "--layers: 'all' is not allowed; allowed: integers separated"
    yield ("sense", *train), "train.conllu: no such folder; sense reads a folder in the layout of CoarseWSD-20"
    yield ("sense", "--train", tmp_path), "no train.data.txt in this folder or in its subfolders; give a folder"
    yield ("sense", "--train", tmp_path / "short"), "1 senses, but train.data.txt has 2 sentences; write one"
    yield ("sense", "--train", tmp_path / "place"), "train.data.txt:1: '7\\tw1 w2' is not allowed; use the pos"
    yield ("sense", "--train", tmp_path / "text"), "train.data.txt:1"


def test_mistakes_are_one_line_with_exit_code_2(files, capsys, tmp_path):
    for words, message in bad(files, tmp_path):
        code, lines, errors = call(files, capsys, "--task", *words)
        errors = [line for line in errors if line.startswith("error:")]
        assert code == 2 and not lines and len(errors) == 1 and message in errors[0], (words, errors)


@pytest.mark.slow
def test_models_that_probe_cannot_read(files, capsys, tmp_path):
    words = ("--task", "pos", *treebank(files))
    code, _, errors = call(tmp_path, capsys, *words, model="none")
    assert code == 2 and len(errors) == 1 and str(tmp_path / "none") in errors[0]
    weights = make_weights(types=0)
    model = tiny_model(
        weights.spec.model.vocab_size, encoder="lstm", type_vocab_size=0, lstm_cells=24,
        position_embeddings="none", embedding_norm="no", final_norm="no", mlm_layer="none",
    )  # fmt: skip
    spec = dataclasses.replace(weights.spec, model=model, heads=HeadsConfig(mlm=True))
    write_saved(tmp_path / "lstm", drawn(spec, 0.2, PIECES))
    code, lines, errors = call(tmp_path, capsys, *words, model="lstm")
    errors = [line for line in errors if line.startswith("error:")]
    assert code == 2 and not lines and len(errors) == 1
    assert "different widths (16, 24, 16), so only the last layer can be read; use a model" in errors[0]
