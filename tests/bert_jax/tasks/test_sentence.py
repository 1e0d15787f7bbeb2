"""Sentence embeddings: texts of training and of evaluation, pairs from classes, ranks."""

import dataclasses
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finetune_cases import PIECES, SPLITS, results, run, saved_model

from bert_jax.config import HeadsConfig, ModelConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.task import SentenceTaskConfig, TaskConfig, TaskDataConfig
from bert_jax.finetuning.evaluation import point_values, remarks_of, scores_of
from bert_jax.inference.loaded import load
from bert_jax.model.bert import BertOutput
from bert_jax.model.dropout import TokenKey
from bert_jax.model.task_layers import PairHead
from bert_jax.records import Record
from bert_jax.tasks.sampling import record_permutation
from bert_jax.tasks.sentence_embedding import SentenceTask
from bert_jax.tasks.sentence_training import TRAININGS
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

TOKENIZER = WordPieceTokenizer(PIECES, lower_case=False)


def task_of(loss, labels=(), **options):
    config = FinetuneConfig(
        task=TaskConfig(kind="sentence", max_length=16),
        data=TaskDataConfig(labels=labels),
        sentence=SentenceTaskConfig(loss=loss, **options),
        model=ModelConfig(vocab_size=len(PIECES), max_position_embeddings=64),
    )
    return SentenceTask(config, TOKENIZER)


def texts(count, seed, negatives=0, label=None):
    """Records of a text, a second one that shares its words, and others that do not."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        words = [" ".join(f"w{n}" for n in rng.integers(0, 60, 4)) for _ in range(1 + negatives)]
        pair = " ".join(reversed(words[0].split()))
        found.append(Record(id=str(i), source=f"file:{i + 1}", text=words[0], text_pair=pair,
                            negatives=tuple(words[1:]), label=label and label(i)))  # fmt: skip
    return found


# ------------------------------------------------------------------ texts of a record


LABELS = {"softmax": lambda i: "ab"[i % 2], "cosine": lambda i: str(i % 3 / 2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        "cosine",
        *(pytest.param(loss, marks=pytest.mark.slow) for loss in ("softmax", "triplet", "negatives", "simcse")),
    ],
)
def test_every_kind_of_record_is_scored_whatever_the_loss(tmp_path, loss):
    train = texts(16, 0, 1 if loss == "triplet" else 0, LABELS.get(loss))
    dev = {"triplets": texts(9, 1, 1), "pairs": texts(9, 2), "many": texts(9, 3, 3)}
    run(
        saved_model(tmp_path / "model"), tmp_path / "w",
        f"--task.kind sentence --sentence.loss {loss} --training.num_epochs 1 --task.metric triplet_accuracy",
        {"train": train, **dev},
    )  # fmt: skip
    found = results(tmp_path / "w")
    assert {split: list(found[split]["metrics"]) for split in dev} == {
        "triplets": ["triplet_accuracy"], "pairs": ["mrr", "precision@1"], "many": ["triplet_accuracy"]
    }  # fmt: skip


def test_texts_that_training_has_no_use_for_are_not_seen():
    for loss, given in (("cosine", 2), ("simcse", 2), ("negatives", 5)):
        records = texts(8, 0, 3, LABELS["cosine"])
        config = SentenceTask.from_data(task_of(loss).config, {"train": records})
        task = SentenceTask(config, TOKENIZER, records)
        units = task.featurize(records, training=True)
        assert {len(unit.sequences) for unit in units} == {given} == {task.sequences_per_unit}, loss
    classes = texts(8, 0, 2, LABELS["softmax"])
    config = SentenceTask.from_data(task_of("negatives", pairs_from_classes=True).config, {"train": classes})
    assert SentenceTask(config, TOKENIZER, classes).sequences_per_unit == 2


def test_a_missing_label_names_the_loss_without_labels():
    (record,) = texts(1, 0, negatives=1)
    message = (
        "file:1: no label; sentence.loss softmax requires one; check data.columns (role label), or set "
        f"sentence.loss negatives, which needs none; {record.negatives[0]!r} was read as a negative"
    )
    with pytest.raises(ValueError) as caught:
        SentenceTask.from_data(task_of("softmax").config, {"train": [record]})
    assert str(caught.value) == message


@pytest.mark.slow
def test_examples_may_differ_in_their_number_of_negatives(tmp_path):
    """As those that bert-jax mine writes; a triplet has exactly one."""
    records = [*texts(6, 0, 2), *texts(6, 1), *texts(6, 2, 1)]
    run(
        saved_model(tmp_path / "model"), tmp_path / "w",
        "--task.kind sentence --sentence.loss negatives --training.num_epochs 1", {"train": records},
    )  # fmt: skip
    task = SentenceTask(task_of("negatives").config, TOKENIZER, records)
    units = task.featurize(records, training=True)
    assert [unit.targets["texts"] for unit in units] == [4] * 6 + [2] * 6 + [3] * 6
    assert [len(unit.sequences) for unit in units] == [4] * 6 + [2] * 6 + [3] * 6
    with pytest.raises(ValueError, match=r"^file:1: 2 negatives; sentence.loss triplet requires 1 in every record"):
        SentenceTask.from_data(task_of("triplet").config, {"train": records})


def test_a_negative_without_a_second_text_is_none():
    task = task_of("negatives")
    (unit,) = task.featurize([dataclasses.replace(texts(1, 0, 1)[0], text_pair=None)], training=False)
    assert len(unit.sequences) == 1


def test_some_triplets_among_pairs_are_refused():
    records = [*texts(3, 0, 1), *texts(2, 1)]
    with pytest.raises(
        ValueError, match=r"^file:1: the record has no negative, but other records of the split have one"
    ) as raised:
        task_of("triplet").featurize(records, training=False)
    assert "\n" not in str(raised.value)


# ------------------------------------------------------------------ pairs from classes


def drawn_one_by_one(records, seed):
    """Each record's text, one of its class, one of another."""
    draws = record_permutation(len(records), seed, 1), record_permutation(len(records), seed, 2)
    labels = np.array([record.label for record in records])
    for i, record in enumerate(records):
        own = np.flatnonzero((labels == record.label) & (np.arange(len(records)) != i))
        other = np.flatnonzero(labels != record.label)
        numbers = own[draws[0][i] % len(own)], other[draws[1][i] % len(other)]
        yield (record.text, *(records[number].text for number in numbers))


def labelled(count, classes):
    rng = np.random.default_rng(0)
    numbers = rng.permutation(np.arange(count) % classes)
    return [Record(id=str(i), source="f", text=f"t{i}", label=f"c{n}") for i, n in enumerate(numbers)]


def replace_key(key, number):
    """The dropout key of another step."""
    return dataclasses.replace(key, key=jax.random.fold_in(key.key, number))


def examples(loss, records):
    """Texts of the training examples, as pairs of classes."""
    return TRAININGS[loss](task_of(loss, pairs_from_classes=True).config, records).examples(records)


@pytest.mark.parametrize(("count", "classes"), [(4, 2), (60, 2), (61, 7), (90, 45)])
def test_texts_of_classes_are_drawn_among_all_others(count, classes):
    records = labelled(count, classes)
    found = examples("triplet", records)
    assert found == list(drawn_one_by_one(records, 0))
    assert examples("negatives", records) == [group[:2] for group in found]


@pytest.mark.parametrize("labels", ["aab", "aa"])
def test_classes_that_make_no_pairs(labels):
    records = [dataclasses.replace(one, label=label) for one, label in zip(labelled(3, 2), labels, strict=False)]
    with pytest.raises(ValueError, match="has only one text, or is the only class"):
        examples("negatives", records)


@pytest.mark.parametrize("labels", ["aaab", "aaabc"])
def test_other_splits_with_one_class_of_several_texts(labels):
    records = [dataclasses.replace(one, label=label) for one, label in zip(labelled(5, 2), labels, strict=False)]
    splits = {"train": labelled(8, 2), "dev": records}
    _, found, lines = SentenceTask.prepare(task_of("triplet", pairs_from_classes=True).config, splits, ["dev"])
    assert all(one.text_pair is None and one.label is None for one in found["dev"])
    assert lines[-1].startswith(f"dev: 0 of {len(labels)} texts are scored")


@pytest.mark.parametrize(("loss", "count"), [("negatives", 8), ("triplet", 21)])
def test_labelled_texts_of_other_splits_are_scored_as_triplets(loss, count):
    config = task_of(loss, pairs_from_classes=True).config
    alone = Record(id="x", source="f", text="alone", label="another")
    splits = {"train": labelled(count, 2), "dev": [*labelled(count, 2), alone], "test": texts(3, 0, 1)}
    config, found, lines = SentenceTask.prepare(config, splits, ["test"])
    assert found["train"] == splits["train"] and found["test"] == splits["test"] and len(lines) == 1
    by_text = {one.text: one.label for one in splits["train"]}
    for before, after in zip(splits["dev"][:-1], found["dev"], strict=False):
        (negative,) = after.negatives
        assert before.text == after.text != after.text_pair
        assert by_text[after.text_pair] == before.label != by_text[negative]
    task = SentenceTask(SentenceTask.from_data(config, found), TOKENIZER, found["train"])
    vectors = np.zeros((count, 3, 4), np.float32)
    vectors[:, :2, 0] = vectors[:, 2, 1] = 1
    units = task.featurize(found["dev"], training=False)
    outputs = [{"embeddings": one} for one in [*vectors, vectors[0, :1]]]
    padded = [{"embeddings": np.resize(one["embeddings"], (3, 4))} for one in outputs]
    predictions = task.decode(found["dev"], units, padded)
    assert point_values(*scores_of(task, found["dev"], predictions)) == {"triplet_accuracy": 1}
    assert scores_of(task, found["dev"], predictions)[1] == count


def test_a_classifier_of_pairs_has_a_pair_of_each_class_for_each_text():
    alone, test = Record(id="x", source="f", text="alone", label="another"), texts(3, 0, label=lambda i: "1")
    splits = {"train": labelled(8, 2), "dev": [*labelled(6, 3), alone], "test": test}
    options = {"pairs_from_classes": True, "hidden_size": 8}
    config, found, lines = SentenceTask.prepare(task_of("softmax", **options).config, splits, ["test"])
    assert found["test"] == test and found["dev"][-1] == dataclasses.replace(alone, label=None)
    for split, records in (("train", found["train"]), ("dev", found["dev"][:-1])):
        by_text = {one.text: one.label for one in splits[split]}
        assert [one.text for one in records] == [one.text for one in splits[split] for _ in "10"][: len(records)]
        assert [one.label for one in records] == ["1", "0"] * (len(records) // 2) and records
        assert all(one.text != one.text_pair for one in records)
        assert all((by_text[one.text] == by_text[one.text_pair]) == (one.label == "1") for one in records)
        assert len({one.id for one in records}) == len(records)
    assert lines == [
        "train: 8 of 8 texts make pairs (1: same class, 0: another)",
        "dev: 6 of 7 texts are scored as pairs (1: same class, 0: another)",
    ]
    config = SentenceTask.from_data(config, found)
    assert config.data.labels == ("0", "1")
    task = SentenceTask(config, TOKENIZER, found["train"])
    units = task.featurize(found["train"], training=True)
    assert [unit.targets["labels"] for unit in units] == [1, 0] * 8
    assert task.heads.pair_labels == ("0", "1") and task.heads.pair_hidden == 8
    with pytest.raises(ValueError, match="has only one text, or is the only class"):
        SentenceTask.prepare(config, {"train": [alone, *labelled(4, 2)]}, [])


def test_two_classes_have_the_binary_cross_entropy_of_one_output():
    """As the article on Sentence-BERT trains its head: a sigmoid, whose logit is the difference of the two here."""
    rng = np.random.default_rng(0)
    logits, classes = rng.normal(0, 3, (4, 6, 2)).astype(np.float32), rng.integers(0, 2, (4, 6))
    weights = rng.integers(0, 2, (4, 6)).astype(np.float32)
    batch = {"labels": classes, "weights": weights}
    total, count = TRAININGS["softmax"](task_of("softmax").config, ()).loss(None, logits, batch, None)["loss"]
    p = 1 / (1 + np.exp(-(logits[..., 1] - logits[..., 0]).astype(np.float64)))
    expected = -(np.where(classes, np.log(p), np.log(1 - p)) * weights).sum()
    assert count == weights.sum() > 0 and float(total) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rate", [None, 0.5])
def test_dropout_before_the_classifier_of_pairs(rate):
    """A rate of 0.5 doubles or drops each feature; no rate leaves them, whatever model.hidden_dropout is."""
    width, pairs = 16, 3
    heads = HeadsConfig(pair_labels=("0", "1"), dropout=rate)
    head = PairHead(heads, ModelConfig(hidden_dropout=0.1))
    key = TokenKey(jax.random.key(0), jnp.arange(pairs)[None], jnp.zeros((1, pairs), jnp.int32))
    features = jnp.ones((1, pairs, width))
    params = {"params": {"output": {"kernel": jnp.eye(width, 2), "bias": jnp.zeros(2)}}}
    found = np.concatenate([head.apply(params, features, replace_key(key, n)) for n in range(50)])
    assert set(np.unique(found)) == ({1.0} if rate is None else {0.0, 2.0})
    assert (head.apply(params, features, None) == 1).all()
    if rate:
        assert abs(found.mean() - 1) < 0.15 and not (found[:, 0] == found[:, 1]).all()


@pytest.mark.slow
def test_the_listing_of_sentence_bert_trains(tmp_path):
    """A layer of ReLU after dropout, classes 1 and 0 of pairs of texts; the dropout changes the training only."""
    model, found = saved_model(tmp_path / "model"), {}
    for rate in ("-1", "0", "0.5"):
        options = (
            f"--task.kind sentence --sentence.loss softmax --sentence.pairs_from_classes true "
            f"--sentence.hidden_size 16 --regularization.head_dropout {rate}"
        )
        run(model, tmp_path / rate, options, SPLITS)
        entry = results(tmp_path / rate)["dev"]
        assert entry["n"] == 2 * len(SPLITS["dev"]) and 0 <= entry["metrics"]["accuracy"]["value"] <= 1
        found[rate] = load(tmp_path / rate)
    texts = [("w1 good", "good w2"), ("w1 good", "bad w2")]
    odds = {rate: one.predict_proba(texts) for rate, one in found.items()}
    assert found["0.5"].classes == ("0", "1") and found["0.5"].spec.heads.dropout == 0.5
    assert (odds["-1"] == odds["0"]).all() and np.abs(odds["0.5"] - odds["0"]).max() > 1e-6


@pytest.mark.slow
def test_pairs_of_many_classes_take_little_memory():
    records = labelled(6000, 3000)
    tracemalloc.start()
    examples("triplet", records)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23  # one index array per class of all others: 137 MiB


# ------------------------------------------------------------------ predictions


def decoded(task, records, vectors):
    units = task.featurize(records, training=False)
    return task.decode(records, units, [{"embeddings": one} for one in vectors])


def test_ranks_are_those_of_all_second_texts():
    records, rng = texts(50, 0), np.random.default_rng(0)
    vectors = rng.normal(size=(50, 2, 8)).astype(np.float32)
    vectors[:, 1] += vectors[:, 0]
    unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    cosines = unit[:, 0] @ unit[:, 1].T
    found = decoded(task_of("negatives"), records, vectors)
    assert [one["rank"] for one in found] == (1 + (cosines > np.diag(cosines)[:, None]).sum(1)).tolist()
    assert [one["cosine"] for one in found] == pytest.approx(np.diag(cosines), abs=2e-6)


def test_equal_texts_share_their_rank():
    records = [dataclasses.replace(one, text=f"w{i}", text_pair=f"w{i % 3}") for i, one in enumerate(texts(9, 0))]
    vectors = np.zeros((9, 2, 4), np.float32)
    for i in range(9):
        vectors[i, :, i % 3] = 1
        vectors[i, 1, 3] = 1e-4 * i  # as if other rows had other last digits
    assert [one["rank"] for one in decoded(task_of("negatives"), records, vectors)] == [1] * 9
    # w0's is found for w2's, after three of it, and as near as three others: the first of three among six.
    vectors[:, 0] = vectors[::-1, 0]
    assert [one["rank"] for one in decoded(task_of("negatives"), records, vectors)][:3] == [4.75, 1, 4.75]


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_equal_vectors_have_the_score_of_chance_and_a_warning(noise):
    records, rng = texts(100, 0), np.random.default_rng(0)
    same = rng.normal(size=16) * (1 + noise * rng.normal(size=(100, 2, 16)))
    task = task_of("negatives")
    predictions = decoded(task, records, same.astype(np.float32))
    assert {one["rank"] for one in predictions} == {50.5}
    scores, count = scores_of(task, records, predictions)
    assert point_values(scores, count) == {"mrr": pytest.approx(1 / 50.5), "precision@1": 0}
    assert remarks_of(task, "dev", records, predictions)[0].startswith(
        "WARNING: dev: the vectors of different texts"
    )
    triplets = texts(9, 0, 1)
    predictions = decoded(task, triplets, np.ones((9, 3, 4), np.float32))
    assert point_values(*scores_of(task, triplets, predictions)) == {"triplet_accuracy": 0}
    assert remarks_of(task, "dev", triplets, predictions)
    values = texts(9, 0, label=lambda i: str(i))
    cosine = task_of("cosine", label_scale=9.0)
    predictions = decoded(cosine, values, same[:9].astype(np.float32))
    assert point_values(*scores_of(cosine, values, predictions)) == {"spearman": None, "pearson": None}
    assert remarks_of(cosine, "dev", values, predictions)


def test_ranks_of_a_broken_model_are_undefined():
    records = texts(5, 0)
    vectors = np.random.default_rng(0).normal(size=(5, 2, 4)).astype(np.float32)
    assert remarks_of(task_of("negatives"), "dev", records, decoded(task_of("negatives"), records, vectors)) == []
    vectors[2, 1] = np.nan
    predictions = decoded(task_of("negatives"), records, vectors)
    assert {one["rank"] for one in predictions} == {None}
    scores, count = scores_of(task_of("negatives"), records, predictions)
    assert point_values(scores, count) == {"mrr": None, "precision@1": None}


def test_single_texts_are_no_candidates():
    alone = dataclasses.replace(texts(1, 5)[0], text_pair=None)
    vectors = np.zeros((3, 2, 4), np.float32)
    vectors[:2, 0] = vectors[2, 1] = (1, 0, 0, 0)
    vectors[:2, 1] = (1, 1, 0, 0), (1, 2, 0, 0)
    found = decoded(task_of("negatives"), [*texts(2, 0), alone], vectors)
    assert [one.get("rank") for one in found] == [1, 2, None] and found[2] == {}


@pytest.mark.parametrize("loss", ["softmax", "cosine"])
def test_a_pair_without_a_label_is_predicted_but_not_scored_among_others_that_have_one(loss):
    task, rng = task_of(loss, ("a", "b")), np.random.default_rng(0)
    whole = texts(9, 0, label=LABELS[loss])
    records = [dataclasses.replace(one, label=None) if i in (2, 5) else one for i, one in enumerate(whole)]
    units = task.featurize(records, training=False)
    shapes = {"embeddings": (2, 4), **({"logits": (2,)} if loss == "softmax" else {})}
    outputs = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in units]
    predictions = task.decode(records, units, outputs)
    assert all("cosine" in one for one in predictions)
    scores, count = scores_of(task, records, predictions)
    kept = [i for i in range(9) if i not in (2, 5)]
    expected = task.scores([whole[i] for i in kept], [predictions[i] for i in kept])
    assert count == 7 and point_values(scores, 7) == point_values(expected, 7)
    assert task.notes(task.config, {"train": [], "dev": records, "whole": whole}) == [
        "dev: 2 of 9 pairs have no label and are not scored"
    ]


@pytest.mark.slow
def test_thousands_of_records_are_decoded_in_seconds():
    records = texts(4000, 0)
    task, vectors = task_of("negatives"), np.random.default_rng(0).normal(size=(4000, 2, 16)).astype(np.float32)
    units = task.featurize(records, training=False)
    began = time.perf_counter()
    task.decode(records, units, [{"embeddings": one} for one in vectors])
    assert time.perf_counter() - began < 10  # compiling a concatenation of as many operands: a minute


# ------------------------------------------------------------------ vectors whose first values are trained too


@pytest.mark.cases(1)
@pytest.mark.parametrize("loss", ["cosine", "cosent", "triplet", "negatives"])
def test_the_loss_of_matryoshka_is_the_sum_of_those_of_all_widths(loss):
    texts_of_unit = 3 if loss == "triplet" else 2
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(2, 3 * texts_of_unit, 8)).astype(np.float32)
    batch = {"weights": np.array([[1, 1, 0], [1, 1, 1]], np.float32), "labels": rng.random((2, 3), np.float32)}

    def value(task, vectors):
        output = BertOutput(sequence_output=None, sentence_embeddings=vectors)
        total, weight = task.loss(output, batch, axis=None)["loss"]
        return float(total), float(weight)

    whole, weight = value(task_of(loss), vectors)
    parts = [
        vectors[..., :width] / np.linalg.norm(vectors[..., :width], axis=-1, keepdims=True) for width in (4, 2)
    ]
    expected = whole + sum(value(task_of(loss), part)[0] for part in parts)
    assert value(task_of(loss, matryoshka=(4, 2)), vectors) == (pytest.approx(expected, rel=1e-6), weight)
    assert abs(expected - whole) > 0.1 * abs(whole)


@pytest.mark.slow
def test_matryoshka_is_scored_at_each_width(tmp_path):
    options = "--task.kind sentence --sentence.loss cosent --training.num_epochs 1 --sentence.matryoshka 8 2"
    splits = {"train": texts(16, 0, 0, LABELS["cosine"]), "dev": texts(12, 1, 0, LABELS["cosine"])}
    run(saved_model(tmp_path / "model"), tmp_path / "w", options, splits)
    assert list(results(tmp_path / "w")["dev"]["metrics"]) == [
        "spearman", "pearson", "spearman_8", "pearson_8", "spearman_2", "pearson_2",
    ]  # fmt: skip


@pytest.mark.parametrize("widths", ["0", "32", "4 4"])
def test_widths_that_vectors_do_not_have(tmp_path, widths):
    splits = {"train": texts(16, 0, 0, LABELS["cosine"]), "dev": texts(12, 1, 0, LABELS["cosine"])}
    options = f"--task.kind sentence --sentence.loss cosine --sentence.matryoshka {widths}"
    with pytest.raises(ValueError, match=r"sentence\.matryoshka: \[.*\] is not allowed; allowed: .* from 1 to 31$"):
        run(saved_model(tmp_path / "model"), tmp_path / "w", options, splits)
    with pytest.raises(ValueError, match=r"sentence\.matryoshka: unknown option with sentence\.loss softmax"):
        run(tmp_path / "model", tmp_path / "v", options.replace("cosine", "softmax"), splits)
