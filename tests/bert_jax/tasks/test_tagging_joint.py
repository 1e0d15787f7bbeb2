"""Intent and slots together: labels, targets, loss, predictions, scores."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tagging_cases import TOKENIZER, batch_of, config, outputs_of, random_sentences, record

from bert_jax.metrics import value
from bert_jax.model.bert import BertOutput
from bert_jax.tasks.intent_slots import JointTask
from bert_jax.tasks.tagging import TaggingTask
from bert_jax.tokenization import load_tokenizer

TAGS, LABELS = ("O", "B-day", "I-day"), ("book", "play", "rate")


def task_of(max_length=16, tokenizer=TOKENIZER, data=None, **sections):
    given = {"tags": TAGS, "labels": LABELS} | (data or {})
    return JointTask(config(task={"max_length": max_length}, data=given, **sections), tokenizer)


def labelled(records, seed=0):
    """The records with random tags and labels."""
    rng = np.random.default_rng(seed)
    return [
        dataclasses.replace(r, tags=tuple(rng.choice(TAGS, len(r.words)).tolist()), label=str(rng.choice(LABELS)))
        for r in records
    ]


def perfect(task, units, records):
    """Outputs from which the gold labels and tags follow."""
    tags = {tag: i for i, tag in enumerate(task.config.data.tags)}
    outputs = []
    for unit in units:
        gold = records[unit.record]
        logits = np.zeros(len(task.names), np.float32)
        logits[task.config.data.labels.index(gold.label)] = 1
        found = np.zeros(unit.length, np.int32)
        found[unit.extra.tokens] = [tags[gold.tags[word]] for word in unit.extra.words]
        outputs.append({"tags": found, "scores": np.ones(unit.length, np.float32), "intent_logits": logits})
    return outputs


def test_labels_and_tags_come_from_the_training_records():
    train = [record("1 2", "B-b O", "play"), record("3", "B-a", "book")]
    dev = [record("4", "B-c", "sing"), record("4", None, None)]
    splits = {"train": train, "dev": dev}
    found = JointTask.from_data(config(), splits)
    assert (found.data.labels, found.data.tags) == (("book", "play"), ("O", "B-a", "B-b"))
    assert JointTask.notes(found, splits) == [
        "3 tags: O 1, B-a 1, B-b 1",
        "2 types of entities: a 1, b 1",
        "dev: tags that do not occur in training are scored as errors: B-c",
        "2 classes: book 1, play 1",
        "WARNING: classes of one training record: book (file:1), play (file:1)",
        "dev: labels that do not occur in training are scored as errors: sing",
    ]


@pytest.mark.parametrize(
    ("labels", "train", "message"),
    [
        ((), [record("1 2", "O B-a")], "file:1: no label"),
        ((), [record("1 2", "O B-a", "play")], "data.labels: labels in the training files: play"),
        (("book", "rate"), [record("1 2", "O B-a"), record("1", "O", "rate")], "file:1: no label"),
        (("book", "rate"), [record("1 2", "O B-a", "play")], "file:1: label 'play' is not in data.labels;"),
        ((), [record("1 2", "VERB NOUN", "play"), record("1", "VERB", "rate")], "file:1: tag 'VERB' is not"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_learned_from(labels, train, message):
    with pytest.raises(ValueError) as caught:
        found = JointTask.from_data(config(data={"labels": labels}), {"train": train})
        JointTask(found, TOKENIZER).featurize(train, training=True)
    assert message in str(caught.value)


def test_heads():
    heads = task_of(data={"label_names": ("Book", "Play", "Rate")}).heads
    assert heads.present() == ("pooler", "sequence", "token")
    assert (heads.sequence_labels, heads.token_labels) == (("Book", "Play", "Rate"), TAGS)
    assert heads.problem == "single_label"


def test_the_windows_of_a_text_share_its_intent():
    task = task_of(max_length=8)
    texts = [record("1 2 3 4 5 6 7 8 9", "O " * 9, "rate"), record("1", "B-day", "play")]
    units = task.featurize(texts, training=True)
    assert [(u.record, u.targets["intent_labels"], u.targets["intent_shares"]) for u in units] == [
        (0, 2, 0.5), (0, 2, 0.5), (1, 1, 1)
    ]  # fmt: skip
    batch, _ = batch_of(task, units)
    assert float(task.denominators(batch)["intent_loss"]) == 2


@pytest.mark.parametrize(("tags", "label"), [(None, "play"), ("O", None), ("O", "sing"), ("B-new", "play")])
def test_what_is_not_labelled_is_not_trained(tags, label):
    task = task_of()
    (unit,) = task.featurize([record("1", tags, label)], training=False)
    assert unit.weight == 0 and unit.targets["tag_scored"].sum() == 1
    with pytest.raises(ValueError, match=r"^file:1: "):
        task.featurize([record("1", tags, label)], training=True)


def test_the_loss_is_that_of_the_intents_and_that_of_the_slots():
    task = task_of(max_length=12, loss={"label_smoothing": 0.1})
    records = labelled(random_sentences(0, 9, 15, 3))
    records[2] = dataclasses.replace(records[2], label="sing")
    units = task.featurize(records, training=False)
    assert len(units) > len(records)
    batch, places = batch_of(task, units)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.normal(size=(*batch["input_ids"].shape, 3)), jnp.float32)
    intents = jnp.asarray(rng.normal(size=(*batch["weights"].shape, 3)), jnp.float32)
    output = BertOutput(tokens, token_logits=tokens, sequence_logits=intents)
    sums, denominators = task.loss(output, batch, axis=None), task.denominators(batch)
    nll = -np.asarray(jax.nn.log_softmax(intents))
    expected = 0.0
    for unit, (row, slot, _) in zip(units, places, strict=True):
        of_labels = nll[row, slot]
        smoothed = 0.9 * of_labels[unit.targets["intent_labels"]] + 0.1 * of_labels.mean()
        expected += unit.weight * unit.targets["intent_shares"] * smoothed
    assert float(denominators["intent_loss"]) == pytest.approx(len(records) - 1)
    assert float(sums["intent_loss"][0]) == pytest.approx(expected, rel=1e-5)
    tagging = TaggingTask(task.config, TOKENIZER)
    assert set(denominators) == {"intent_loss", "tag_loss"}
    assert float(sums["tag_loss"][0]) == float(tagging.loss(output, batch, axis=None)["tag_loss"][0]) > 0
    assert float(denominators["tag_loss"]) == float(tagging.denominators(batch)["tag_loss"])


def test_outputs_become_intents_slots_and_their_probabilities():
    task = task_of(data={"label_names": ("Book", "Play", "Rate")})
    units = task.featurize([record("1x 2"), record("3")], training=False)
    batch, places = batch_of(task, units)
    intents = np.zeros((*batch["weights"].shape, 3), np.float32)
    tokens = np.zeros((*batch["input_ids"].shape, 3), np.float32)
    for unit, (row, slot, here), label, tags in zip(units, places, (1, 2), ((0, 1), (2,)), strict=True):
        intents[row, slot, label] = np.log(2)
        tokens[row, np.arange(here.start, here.stop)[unit.extra.tokens], list(tags)] = np.log(6)
    output = BertOutput(tokens, token_logits=jnp.asarray(tokens), sequence_logits=jnp.asarray(intents))
    given = [record("1x 2", None, "rate"), record("3")]
    predictions = task.decode(given, units, outputs_of(task.outputs(output, batch), places))
    # As the files write labels, whatever exports call them.
    scores = [{"book": 0.25, "play": 0.5, "rate": 0.25}, {"book": 0.25, "play": 0.25, "rate": 0.5}]
    assert [prediction.pop("probabilities") for prediction in predictions] == [pytest.approx(one) for one in scores]
    assert predictions == [
        {
            "label": "play",
            "score": pytest.approx(0.5),
            "tokens": tagged(("1x", "O"), ("2", "B-day"), score=0.75),
            "gold": "rate",
        },
        {"label": "rate", "score": pytest.approx(0.5), "tokens": tagged(("3", "I-day"), score=0.75)},
    ]


def test_the_windows_of_a_text_are_averaged():
    task, texts = task_of(max_length=8), [record("1 2 3 4 5 6 7 8 9"), record("1")]
    units = task.featurize(texts, training=False)
    outputs = [
        {"tags": np.zeros(unit.length, np.int32), "scores": np.ones(unit.length), "intent_logits": np.array(logits)}
        for unit, logits in zip(units, [(0, 0, 4), (3, 0, 0), (0, 1, 0)], strict=True)
    ]
    predictions = task.decode(texts, units, outputs)
    assert [p["label"] for p in predictions] == ["rate", "play"]
    chance = np.exp(2) / (np.exp(1.5) + np.exp(0) + np.exp(2))  # of the means 1.5, 0, 2
    assert predictions[0]["probabilities"]["rate"] == pytest.approx(chance, abs=1e-12)


def tagged(*pairs, **values):
    return [
        {"text": text, "label": label, **{k: pytest.approx(v) for k, v in values.items()}} for text, label in pairs
    ]


@pytest.mark.parametrize("names", [(), ("Book", "Play", "Rate")])
def test_gold_outputs_score_1(names):
    records = labelled(random_sentences(3, 30, 30, 4))
    task = task_of(data={"label_names": names})
    units = task.featurize(records, training=False)
    assert len(units) > len(records)
    scores = task.scores(records, task.decode(records, units, perfect(task, units, records)))
    assert [s.name for s in scores[:6]] == [
        "sentence_accuracy", "intent_accuracy", "slot_f1", "slot_precision", "slot_recall", "slot_accuracy"
    ]  # fmt: skip
    assert {value(s, len(records)) for s in scores} == {1.0}


def test_scores_by_hand():
    gold = [record("1 2", "B-day I-day", "play"), record("3", "B-day", "rate"), record("4", "O", "sing")]
    predicted = [
        {"label": "play", "tokens": tagged(("1", "B-day"), ("2", "I-day"))},
        {"label": "rate", "tokens": tagged(("3", "O"))},
        {"label": "book", "tokens": tagged(("4", "O"))},
    ]
    scores = {s.name: value(s, 3) for s in task_of().scores(gold, predicted)}
    assert scores["sentence_accuracy"] == pytest.approx(1 / 3)
    assert scores["intent_accuracy"] == pytest.approx(2 / 3)
    assert (scores["slot_precision"], scores["slot_recall"]) == (1, 0.5)


@pytest.mark.parametrize("max_length", [12, 64])
def test_every_word_of_real_requests_has_one_slot(real_data, max_length):
    splits = {name: read_slots(real_data / "intent_slot" / "snips" / name) for name in ("train", "valid")}
    found = JointTask.from_data(config(task={"max_length": max_length}), splits)
    assert len(found.data.labels) == 7 and len(found.data.tags) == 72
    task = JointTask(found, load_tokenizer(real_data / "vocabs" / "bert-base-uncased.txt"))
    records = splits["train"] + splits["valid"]
    units = task.featurize(records, training=True)
    predictions = task.decode(records, units, perfect(task, units, records))
    assert [len(p["tokens"]) for p in predictions] == [len(r.words) for r in records]
    assert {value(s, len(records)) for s in task.scores(records, predictions)} == {1.0}


def read_slots(folder):
    lines = [(folder / name).read_text(encoding="utf-8").splitlines() for name in ("seq.in", "seq.out", "label")]
    return [
        record(words, tags, label.strip(), source=f"{folder}:{number}")
        for number, (words, tags, label) in enumerate(zip(*lines, strict=True), start=1)
    ]
