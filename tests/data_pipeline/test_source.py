"""The source of a pretraining run: folders by name, and the unigram baseline of the final evaluation."""

import dataclasses
import gc
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from text_corpora import write_corpus, write_vocab

from bert_jax.config import DataConfig, ModelConfig, PretrainConfig, TrainingConfig
from bert_jax.tokenization import load_tokenizer
from data_pipeline.build.ensure import ensure_data
from data_pipeline.read.pretrain_input import ShardSource
from data_pipeline.shards.shard_files import read_index, read_records, write_index, write_records
from data_pipeline.shards.tfexample import decode_example, encode_examples

VOCABULARY = 416


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A config whose shards are there: 16 tokens, 3 masks, 40 documents."""
    place = tmp_path_factory.mktemp("source")
    data = DataConfig(
        corpus=(str(write_corpus(place / "corpus.txt")),), vocab=str(write_vocab(place / "vocab.txt")),
        shards=str(place / "shards"), seq_length=16, max_predictions=3, dupe_factor=2, num_shards=2,
        eval_fraction=0.1, workers=1,
    )  # fmt: skip
    model = ModelConfig(vocab_size=VOCABULARY, hidden_size=16, num_attention_heads=2)
    ensure_data(data, vocab_size=VOCABULARY, report=lambda line: None)
    return PretrainConfig(model=model, data=data, training=TrainingConfig(global_batch_size=8))


def source(config):
    return ShardSource(config, load_tokenizer(config.data.vocab))


def targets(folder):
    """Every masked id of the shards of a folder, in TensorFlow's reading of them."""
    import tensorflow as tf

    found = []
    for path in sorted(folder.glob("*.tfrecord")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            features = tf.train.Example.FromString(record).features.feature
            weights = features["masked_lm_weights"].float_list.value
            ids = features["masked_lm_ids"].int64_list.value
            found.extend(label for label, weight in zip(ids, weights, strict=True) if weight > 0)
    return found


def shards_of(config, split):
    return Path(config.data.shards) / split


@pytest.mark.slow
def test_unigram_cross_entropy(built):
    """Add-one over the whole vocabulary, on the training targets; mean over all held-out targets."""
    train, held_out = targets(shards_of(built, "train")), targets(shards_of(built, "eval"))
    assert len(train) > 500 and len(held_out) > 20
    counts, total = Counter(train), len(train) + VOCABULARY
    expected = -sum(math.log((counts[label] + 1) / total) for label in held_out) / len(held_out)
    assert source(built).unigram_cross_entropy() == pytest.approx(expected, rel=1e-12)
    # Words of held-out documents are new to it: only add-one makes this finite.
    assert any(counts[label] == 0 for label in held_out)


def pair_labels(folder):
    rows = [decode_example(r) for e in read_index(folder).entries for r in read_records(folder / e.name)]
    return [int(row["next_sentence_labels"][0]) for row in rows]


def test_the_constant_answer(built):
    """The most frequent label of the training pairs, on the held-out pairs."""
    train, held_out = pair_labels(shards_of(built, "train")), pair_labels(shards_of(built, "eval"))
    constant = int(sum(train) * 2 > len(train))
    assert len(held_out) > 5 and sum(train) * 2 != len(train)
    assert source(built).constant_accuracy() == pytest.approx(held_out.count(constant) / len(held_out))


@pytest.mark.filterwarnings("error")
def test_baselines_without_targets_and_pairs(built, monkeypatch):
    bare = source(built)
    empty = {"mlm_labels": np.zeros((2, 3), int), "mlm_weights": np.zeros((2, 3))}
    empty |= {"nsp_labels": np.zeros((2, 1), int), "nsp_weights": np.zeros((2, 1))}
    monkeypatch.setattr(bare, "_whole_part", lambda parts, most: iter([empty]))
    assert bare.unigram_cross_entropy() is None and bare.constant_accuracy() is None


def test_records_that_predict_nothing(built, tmp_path):
    """Static masks whose weights are all 0, and dynamic masks of words that never fit."""
    source(built).require_predictions()
    records = [
        r
        for e in read_index(shards_of(built, "train")).entries
        for r in read_records(shards_of(built, "train") / e.name)
    ]
    rows = [decode_example(record) for record in records]
    # A segment of one token would be a word that fits.
    lengths = [
        (int((row["input_mask"] > row["segment_ids"]).sum()) - 2, int(row["segment_ids"].sum()) - 1) for row in rows
    ]
    rows = [row for row, own in zip(rows, lengths, strict=True) if 1 not in own][:20]
    features = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    features["masked_lm_weights"][:] = 0
    unmasked = {name: values for name, values in features.items() if not name.startswith("masked_lm")}
    unmasked["word_starts"] = np.zeros_like(unmasked["input_ids"])
    for name, content, changes in (
        ("zero", features, {}),
        ("long", unmasked, {"masking": "dynamic", "mask_unit": "whole_word", "max_predictions": 1}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        write_index(folder, [write_records(folder / "a.tfrecord", encode_examples(content))])
        data = dataclasses.replace(built.data, shards=str(folder), **changes)
        with pytest.raises(ValueError, match=rf"{name}: no token is predicted in the first records") as raised:
            source(dataclasses.replace(built, data=data)).require_predictions()
        assert "\n" not in str(raised.value)


def test_held_out_batches_hold_the_same_targets(built):
    """What the baseline is taken on is what the evaluation is taken on."""
    found = []
    for batch in source(built).held_out(4, list(range(4)), 0):
        found.extend(batch["mlm_labels"][batch["mlm_weights"] > 0].tolist())
    assert sorted(found) == sorted(targets(shards_of(built, "eval")))
    assert len(list(source(built).held_out(4, list(range(4)), 2))) == 2


@pytest.mark.slow
def test_rows_of_one_host(built):
    whole, part = source(built).train(list(range(8))), source(built).train([1, 5])
    for _ in range(3):
        np.testing.assert_array_equal(next(whole)[0]["input_ids"][[1, 5]], next(part)[0]["input_ids"])
    whole, part = source(built).held_out(4, [0, 1, 2, 3], 0), source(built).held_out(4, [1, 3], 0)
    for batch, rows in zip(whole, part, strict=True):
        np.testing.assert_array_equal(batch["input_ids"][[1, 3]], rows["input_ids"])


def test_without_held_out_shards(built, tmp_path):
    """Also: a folder that holds the training shards itself."""
    data = dataclasses.replace(built.data, shards=str(shards_of(built, "train")))
    bare = source(dataclasses.replace(built, data=data))
    assert bare.held_out(4, list(range(4)), 0) is None
    assert bare.unigram_cross_entropy() is None
    np.testing.assert_array_equal(
        next(bare.train(list(range(8))))[0]["input_ids"], next(source(built).train(list(range(8))))[0]["input_ids"]
    )
    # Held-out shards that lie elsewhere.
    elsewhere = dataclasses.replace(data, eval_shards=str(shards_of(built, "eval")))
    named = source(dataclasses.replace(built, data=elsewhere))
    assert named.unigram_cross_entropy() == source(built).unigram_cross_entropy()
    # Named, but missing: never silently without evaluation.
    missing = dataclasses.replace(data, eval_shards=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="none"):
        source(dataclasses.replace(built, data=missing)).held_out(4, list(range(4)), 0)


@pytest.mark.slow
def test_evaluations_leave_no_file_open(built):
    """A run evaluates thousands of times: what an evaluation opened is closed with it, not at some collection."""

    def open_files():
        return len(list(Path("/proc/self/fd").iterdir()))

    def evaluate():
        assert len(list(source(built).held_out(8, list(range(8)), 2))) == 2

    evaluate()
    gc.collect()
    gc.disable()
    try:
        before = open_files()
        for _ in range(5):
            evaluate()
        assert open_files() == before
    finally:
        gc.enable()
