"""Tags of words: labels, targets, loss, predictions, scores."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tagging_cases import TOKENIZER, WORDS, batch_of, config, outputs_of, random_sentences, record

from bert_jax.metrics import value
from bert_jax.model.bert import BertOutput
from bert_jax.objectives.crf import crf_decode, crf_loss
from bert_jax.records import Record
from bert_jax.tasks.tagging import TaggingTask, predicted_tags
from bert_jax.tokenization import load_tokenizer

TAGS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def task_of(tags=TAGS, max_length=16, tokenizer=TOKENIZER, **sections):
    return TaggingTask(config(task={"max_length": max_length}, data={"tags": tags}, **sections), tokenizer)


def tagged(records, tags, seed=0):
    """The records with random tags."""
    rng = np.random.default_rng(seed)
    return [dataclasses.replace(r, tags=tuple(rng.choice(tags, len(r.words)).tolist())) for r in records]


def perfect(task, units, records):
    """Outputs that hold the gold tags where they are scored, and nonsense elsewhere."""
    numbers = {tag: i for i, tag in enumerate(task.config.data.tags)}
    outputs = []
    for unit in units:
        tags = np.full(unit.length, len(numbers) - 1)
        for word, token in zip(unit.extra.words, unit.extra.tokens, strict=True):
            tags[token] = numbers[records[unit.record].tags[word]]
        outputs.append({"tags": tags, "scores": np.full(unit.length, 0.25, np.float32)})
    return outputs


def tokens(words, tags):
    """A prediction of these tags."""
    return {"tokens": [{"text": word, "label": tag} for word, tag in zip(words.split(), tags.split(), strict=True)]}


# ------------------------------------------------------------------ labels


def test_tags_come_from_the_training_records():
    train = [record("1 2", "B-x O"), record("3 4", "I-x B-a")]
    found = TaggingTask.from_data(config(), {"train": train, "dev": [record("5", "B-new")]})
    assert found.data.tags == ("O", "B-a", "B-x", "I-x")
    given = TaggingTask.from_data(config(data={"tags": ("I-x", "B-x", "B-a", "O", "B-b")}), {"train": train})
    assert given.data.tags == ("I-x", "B-x", "B-a", "O", "B-b")


def test_tags_of_dev_alone_are_noted():
    train, dev = [record("1 2", "B-x O")], [record("1 2 3", "B-z O I-z"), record("4", None)]
    found = TaggingTask.from_data(config(), {"train": train, "dev": dev})
    notes = TaggingTask.notes(found, {"train": train, "dev": dev})
    unseen = "dev: tags that do not occur in training are scored as errors: B-z, I-z"
    assert notes == ["2 tags: O 1, B-x 1", unseen]
    train.append(record("1 2 3 4", "B-y I-y B-y B-x"))
    notes = TaggingTask.notes(TaggingTask.from_data(config(), {"train": train}), {"train": train})
    assert notes[1] == "2 types of entities: x 2, y 2"
    bmes = config(data={"tags": ("O", "B-x", "M-x")})
    assert TaggingTask.notes(bmes, {}) == [
        "only tag accuracy is scored, because 'M-x' is not O and has no prefix B-, I-, E- or S-"
    ]


@pytest.mark.parametrize("tags", ["0 5 0", "12 0 3"])
def test_tags_that_are_numbers_are_in_their_order_and_say_why_there_are_no_entities(tags):
    train = [record("1 2 3", tags), record("1", "10")]
    found = TaggingTask.from_data(config(), {"train": train})
    assert list(found.data.tags) == sorted({*tags.split(), "10"}, key=int)
    assert "because the tags are numbers" in TaggingTask.notes(found, {"train": train})[1]


STRICT, TWO = {"tagging": {"scoring": "strict"}}, {"data": {"tags": ("O", "B-x")}}


@pytest.mark.parametrize(
    ("sections", "train", "dev", "message"),
    [
        ({}, record("1 2"), None, "file:1: no tags for 2 words"),
        ({}, record("1 2", "O"), None, "file:1: 1 tags for 2 words"),
        ({}, record("1 2", "O O"), None, "data.train: tags in the training files: O;"),
        (TWO, record("1 2", "O B-y"), None, "file:1: tag 'B-y' is not in data.tags; allowed: O, B-x;"),
        ({}, record("1 2", "O B-y"), record("1", "NOUN", source="dev:3"), "dev:3: tag 'NOUN' is not allowed"),
        (STRICT, record("1 2", "B-y E-y"), None, "file:1: tag 'E-y' is not allowed with tagging.scoring strict;"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_learned_from(sections, train, dev, message):
    with pytest.raises(ValueError) as caught:
        found = TaggingTask.from_data(config(**sections), {"train": [train], "dev": [dev] if dev else []})
        TaggingTask(found, TOKENIZER).featurize([train], training=True)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_heads():
    heads = task_of().heads
    assert heads.token_labels == TAGS and not heads.crf and heads.present() == ("token",)
    assert task_of(tagging={"crf": True}).heads.crf


# ------------------------------------------------------------------ units


def test_targets_stand_on_the_first_pieces():
    (unit,) = task_of().featurize([record("7xx 8 9x", "B-PER I-PER O")], training=True)
    assert unit.targets["tag_labels"].tolist() == [0, 3, 0, 0, 4, 0, 0, 0]
    assert unit.targets["tag_scored"].tolist() == [0, 1, 0, 0, 1, 1, 0, 0]
    assert {name: values.dtype for name, values in unit.targets.items()} == {
        name: target.dtype for name, target in TaggingTask.targets.items()
    }
    assert unit.weight == 1 and unit.record == 0


@pytest.mark.parametrize("tags", [None, "B-PER X-new"])
def test_without_known_tags_tokens_are_scored_but_not_trained(tags):
    (unit,) = task_of().featurize([record("7x 8", tags)], training=False)
    assert unit.targets["tag_scored"].tolist() == [0, 1, 0, 1, 0]
    assert unit.weight == 0


@pytest.mark.parametrize("tags", [None, "B-PER X-new"])
def test_training_needs_known_tags(tags):
    with pytest.raises(ValueError, match=r"^file:1: "):
        task_of().featurize([record("7x 8", tags)], training=True)


@pytest.mark.parametrize("context", [False, True])
def test_every_word_is_trained_once(context):
    records = tagged(random_sentences(1, 30, 30, 4), TAGS)
    task = task_of(tagging={"document_context": context})
    units = task.featurize(records, training=True)
    assert len(units) > len(records)
    scored = np.zeros(len(records))
    for unit in units:
        assert unit.length <= 16 and unit.weight == 1
        scored[unit.record] += unit.targets["tag_scored"].sum()
        first_pieces = np.asarray(unit.sequences[0].ids)[unit.targets["tag_scored"] > 0]
        assert ((first_pieces >= 5) & (first_pieces < 5 + WORDS)).all()
    assert scored.tolist() == [len(r.words) for r in records]


def test_a_record_without_words():
    task = task_of()
    records = [record("", "", source="file:1"), record("1", "B-LOC", source="file:2")]
    assert [unit.record for unit in task.featurize(records, training=True)] == [1]
    units = task.featurize(records, training=False)
    assert [unit.weight for unit in units] == [0, 1]
    predictions = task.decode(records, units, perfect(task, units, records))
    assert [predicted_tags(p) for p in predictions] == [[], ["B-LOC"]]


# ------------------------------------------------------------------ loss and outputs


def random_batch(task, seed=0):
    """(units, records, batch, places, logits): packed, some units of weight 0, nonsense where nothing is scored."""
    records = tagged(random_sentences(seed, 12, 12, 3), TAGS, seed)
    records[3] = dataclasses.replace(records[3], tags=None)
    units = task.featurize(records, training=False)
    batch, places = batch_of(task, units)
    logits = np.random.default_rng(seed).normal(size=(*batch["input_ids"].shape, len(TAGS))).astype(np.float32)
    return units, records, batch, places, logits


def divided(task, output, batch):
    """Value of every loss over its denominator, and of what is logged beside."""
    sums = task.loss(output, batch, axis=None)
    denominators = task.denominators(batch)
    assert set(denominators) <= set(sums)
    return {name: float(sums[name][0] / d) for name, d in denominators.items()}, sums


@pytest.mark.slow
def test_loss_is_the_mean_over_words_with_a_known_tag():
    task = task_of(max_length=24)
    _, records, batch, _, logits = random_batch(task)
    losses, sums = divided(task, BertOutput(logits, token_logits=jnp.asarray(logits)), batch)
    nll = -np.asarray(jax.nn.log_softmax(logits))
    expected, hits = [], []
    for row, column in zip(*np.nonzero(batch["tag_scored"]), strict=True):
        if batch["weights"][row, batch["sequence_ids"][row, column] - 1]:
            label = batch["tag_labels"][row, column]
            expected.append(nll[row, column, label])
            hits.append(nll[row, column].argmin() == label)
    assert len(expected) == sum(len(r.words) for r in records if r.tags) < batch["tag_scored"].sum()
    assert losses == {"tag_loss": pytest.approx(np.mean(expected), rel=1e-5)}
    assert float(sums["tag_accuracy"][0]) == sum(hits) and float(sums["tag_accuracy"][1]) == len(hits)


def test_a_batch_without_any_label_has_loss_0():
    for crf in (False, True):
        task = task_of(tagging={"crf": crf})
        batch, _ = batch_of(task, task.featurize([record("1 2")], training=False))
        logits = jnp.ones((*batch["input_ids"].shape, len(TAGS)))
        losses, _ = divided(task, BertOutput(logits, token_logits=logits, crf=transitions()), batch)
        assert losses == {"tag_loss": 0}


def test_label_smoothing_and_focal_loss_reach_the_loss():
    values = []
    for options in ({}, {"label_smoothing": 0.2}, {"focal_gamma": 2.0}):
        task = task_of(loss=options)
        _, _, batch, _, logits = random_batch(task)
        values.append(divided(task, BertOutput(logits, token_logits=jnp.asarray(logits)), batch)[0]["tag_loss"])
    assert len(set(values)) == 3 and values[2] < values[0]


def transitions(seed=5):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 5), (5,), (5,)))


@pytest.mark.slow
def test_crf_of_packed_rows_is_that_of_each_chain_alone():
    task = task_of(max_length=24, tagging={"crf": True})
    units, _, batch, places, logits = random_batch(task)
    output = BertOutput(logits, token_logits=jnp.asarray(logits), crf=transitions())
    found = outputs_of(task.outputs(output, batch), places)
    losses, _ = divided(task, output, batch)
    total, chains, decode, loss = 0.0, 0, jax.jit(crf_decode), jax.jit(crf_loss)
    for unit, (row, _, tokens), of_unit in zip(units, places, found, strict=True):
        at = unit.extra.tokens
        emissions, labels = np.zeros((1, 24, len(TAGS)), np.float32), np.zeros((1, 24), np.int32)
        emissions[0, : len(at)], labels[0, : len(at)] = logits[row, tokens][at], unit.targets["tag_labels"][at]
        chain = (np.arange(24) < len(at))[None]
        tags = decode(emissions, chain.astype(np.int32), chain, *transitions())
        assert of_unit["tags"][at].tolist() == tags[0, : len(at)].tolist()
        if unit.weight:
            total += float(loss(emissions, labels, chain.astype(np.int32), chain, *transitions())["loss"][0])
            chains += 1
    assert chains < len(units)
    assert losses == {"tag_loss": pytest.approx(total / chains, rel=1e-5)}


def test_outputs_are_the_likeliest_tags_and_their_probabilities():
    task = task_of(max_length=24)
    units, records, batch, places, logits = random_batch(task)
    found = task.outputs(BertOutput(logits, token_logits=jnp.asarray(logits)), batch)
    assert {name: (level, values.dtype) for name, (level, values) in found.items()} == {
        "tags": ("token", jnp.int32),
        "scores": ("token", jnp.float32),
    }
    predictions = task.decode(records, units, outputs_of(found, places))
    chances = np.asarray(jax.nn.softmax(logits))
    for unit, (row, _, tokens) in zip(units, places, strict=True):
        for word, token in zip(unit.extra.words, unit.extra.tokens, strict=True):
            of_tags = chances[row, tokens][token]
            assert predictions[unit.record]["tokens"][word]["label"] == TAGS[of_tags.argmax()]
            assert predictions[unit.record]["tokens"][word]["score"] == pytest.approx(of_tags.max(), abs=1e-6)
    assert [len(p["tokens"]) for p in predictions] == [len(r.words) for r in records]


# ------------------------------------------------------------------ predictions and scores


@pytest.mark.parametrize("crf", [False, True])
@pytest.mark.parametrize("context", [False, True])
def test_gold_tags_as_outputs_score_1(crf, context):
    records = tagged(random_sentences(2, 30, 30, 4), TAGS)
    task = task_of(tagging={"document_context": context, "crf": crf})
    units = task.featurize(records, training=False)
    predictions = task.decode(records, units, perfect(task, units, records))
    assert [tuple(predicted_tags(p)) for p in predictions] == [r.tags for r in records]
    assert set(predictions[0]["tokens"][0]) == {"text", "label"} | (set() if crf else {"score"})
    scores = task.scores(records, predictions)
    assert [s.name for s in scores[:4]] == ["f1", "precision", "recall", "accuracy"]
    assert {"f1/LOC", "f1/PER"} <= {s.name for s in scores}
    assert {value(s, len(records)) for s in scores} == {1.0}


def test_a_tag_that_was_not_learned_is_a_miss():
    task = task_of(("O", "B-a", "I-a"))
    gold = [record("1 2 3 4", "B-a O B-new O")]
    scores = {s.name: value(s, 1) for s in task.scores(gold, [tokens("1 2 3 4", "B-a O O O")])}
    assert (scores["precision"], scores["recall"], scores["accuracy"]) == (1, 0.5, 0.75)


def test_strict_scoring():
    gold, predicted = [record("1 2", "B-a O")], [tokens("1 2", "B-a I-c")]
    of = {
        scoring: {s.name: value(s, 1) for s in task_of(tagging={"scoring": scoring}).scores(gold, predicted)}
        for scoring in ("conlleval", "strict")
    }
    assert (of["conlleval"]["precision"], of["strict"]["precision"]) == (0.5, 1)


def test_tags_that_mark_no_entities_have_accuracy_alone():
    task = task_of(("NOUN", "VERB"))
    scores = task.scores([record("1 2", "NOUN VERB")], [tokens("1 2", "NOUN NOUN")])
    assert [(s.name, value(s, 1)) for s in scores] == [("accuracy", 0.5)]


# ------------------------------------------------------------------ real tweets


@pytest.mark.parametrize("max_length", [24, 128])
def test_every_word_of_real_tweets_has_one_tag(real_data, max_length):
    tokenizer = load_tokenizer(real_data / "vocabs" / "bert-base-uncased.txt")
    splits = {name: read_conll(real_data / "ner_wnut17" / f"{name}.txt") for name in ("train", "dev")}
    found = TaggingTask.from_data(config(task={"max_length": max_length}), splits)
    assert len(found.data.tags) == 13 and found.data.tags[0] == "O"
    task, records = TaggingTask(found, tokenizer), splits["train"] + splits["dev"]
    distinct = list({word for record_ in records for word in record_.words})
    assert [] in tokenizer.encode_batch(distinct)  # words without a piece are there
    units = task.featurize(records, training=True)
    predictions = task.decode(records, units, perfect(task, units, records))
    assert sum(unit.targets["tag_scored"].sum() for unit in units) == sum(len(r.words) for r in records)
    assert [len(p["tokens"]) for p in predictions] == [len(r.words) for r in records]
    assert {value(s, len(records)) for s in task.scores(records, predictions)} == {1.0}


def read_conll(path):
    sentences = path.read_text(encoding="utf-8").strip().split("\n\n")
    rows = [[line.split() for line in sentence.split("\n")] for sentence in sentences]
    return [
        Record(
            id=str(number), source=f"{path}:{number}", words=tuple(r[0] for r in of_one),
            tags=tuple(r[-1] for r in of_one),
        )
        for number, of_one in enumerate(rows)
    ]  # fmt: skip
