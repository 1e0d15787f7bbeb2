"""Masking when records are read: decided by epoch and example alone."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from builders import StopAt
from input_shards import (
    VOCAB,
    M,
    S,
    assert_equal,
    config,
    example_features,
    make_shards,
    numbers_of,
    stream,
    take,
)
from support import pretrain_on, tiny_config, untimed
from text_corpora import write_corpus, write_vocab

from bert_jax.config.pretrain import DataConfig
from bert_jax.process.exits import Stop
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.logging.metrics_file import read_metrics
from data_pipeline.build.ensure import ensure_data
from data_pipeline.read.pretrain_input import ShardSource, eval_batches
from data_pipeline.shards import shard_files as shards
from data_pipeline.shards.tfexample import encode_examples

MASKER = SimpleNamespace(vocab_size=VOCAB, mask_id=4, cls_id=2, sep_id=3)


@pytest.fixture(scope="module")
def unmasked(tmp_path_factory) -> Path:
    """256 records without masks: [CLS], number, number, tokens, [SEP], padding; every other token begins a word."""
    features = example_features(np.arange(256))
    for name in ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights"):
        del features[name]
    last = features["input_mask"].sum(1) - 1
    features["input_ids"][:, 0], features["input_ids"][np.arange(256), last] = 2, 3
    features["word_starts"] = features["input_mask"] * (np.arange(S) % 2)
    folder = tmp_path_factory.mktemp("unmasked")
    shards.write_index(folder, [shards.write_records(folder / "a.tfrecord", encode_examples(features))])
    return folder


def unmask(batch: dict[str, np.ndarray]) -> np.ndarray:
    ids = batch["input_ids"].copy()
    row, column = np.nonzero(batch["mlm_weights"])
    ids[row, batch["mlm_positions"][row, column]] = batch["mlm_labels"][row, column]
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["token", "whole_word"])
def test_dynamic_masks_follow_epoch_and_example_alone(unmasked, unit):
    data = config(masking="dynamic", mask_unit=unit, mask_fraction=0.2)
    batches = stream(unmasked, data, tokenizer=MASKER)
    masked: dict[int, list[bytes]] = {}
    seen = take(batches, 32)
    for batch in seen:
        ids = unmask(batch)
        numbers = numbers_of(ids)
        predictions = batch["mlm_weights"].sum(1)
        lengths = batch["sequence_ids"].sum(1)
        assert predictions.any()
        if unit == "token":
            np.testing.assert_array_equal(predictions, np.clip(np.rint(lengths * 0.2), 1, M))
        assert not np.isin(batch["mlm_labels"][batch["mlm_weights"] > 0], [0, 2, 3]).any(), (
            "specials are never masked"
        )
        for row, number in enumerate(numbers.tolist()):
            masked.setdefault(number, []).append(
                batch["mlm_positions"][row].tobytes() + batch["input_ids"][row].tobytes()
            )
    assert sorted(masked) == list(range(256)) and all(len(versions) == 2 for versions in masked.values())
    assert np.mean([first != second for first, second in masked.values()]) > 0.7, "another epoch, other masks"

    again = stream(unmasked, data, tokenizer=MASKER)
    again.restore(batches.state() | {"data_step": 21})
    assert_equal(take(again, 4), seen[21:25])
    part = take(stream(unmasked, data, tokenizer=MASKER, rows=range(4, 8)), 3)
    assert_equal(part, [{name: values[4:8] for name, values in batch.items()} for batch in seen[:3]])
    with pytest.raises(ValueError, match="masking options differ"):
        stream(unmasked, dataclasses.replace(data, mask_fraction=0.3), tokenizer=MASKER).restore(batches.state())


@pytest.mark.cases(1)
@pytest.mark.parametrize("reader", ["tensorflow", "numpy"])
@pytest.mark.parametrize("unit", ["token", "whole_word", "span"])
def test_records_of_electra_have_neither_masks_nor_word_starts(unmasked, tmp_path, unit, reader):
    """The pieces of the vocabulary tell where words start, so that the masks are those of records that do."""
    features = example_features(np.arange(256))
    features = {name: features[name] for name in ("input_ids", "input_mask", "segment_ids")}
    last = features["input_mask"].sum(1) - 1
    features["input_ids"][:, 0], features["input_ids"][np.arange(256), last] = 2, 3
    continuation = np.arange(VOCAB) % 2 == 1
    folders = {name: tmp_path / name for name in ("with", "without")}
    for name, folder in folders.items():
        folder.mkdir()
        more = {"word_starts": ~continuation[features["input_ids"]] & (features["input_mask"] > 0)}
        content = features | (more if name == "with" else {})
        shards.write_index(folder, [shards.write_records(folder / "a.tfrecord", encode_examples(content))])
    data = config(masking="dynamic", mask_unit=unit, next_sentence="none", reader=reader)
    tokenizer = SimpleNamespace(**vars(MASKER), continuation=continuation)
    both = [take(stream(folder, data, tokenizer=tokenizer), 8) for folder in folders.values()]
    assert_equal(*both)
    assert any(batch["mlm_weights"].any() for batch in both[0])
    with pytest.raises(ValueError, match=r"data\.masking: static, but the shards .* contain no masks; use dynamic"):
        stream(folders["without"], config(next_sentence="none"))


def test_both_readers_draw_the_same_masks(unmasked):
    one, other = (
        take(stream(unmasked, config(masking="dynamic", reader=reader), tokenizer=MASKER), 40)
        for reader in ("tensorflow", "numpy")
    )
    assert_equal(one, other)
    assert any(batch["mlm_weights"].any() for batch in one)


def test_dynamic_evaluation_has_fixed_masks(unmasked):
    data = config(masking="dynamic")
    first, second = (
        list(eval_batches(data, folder=unmasked, batch_size=size, tokenizer=MASKER)) for size in (100, 64)
    )
    joined = [{n: np.concatenate([b[n] for b in batches])[:256] for n in batches[0]} for batches in (first, second)]
    assert_equal(*[[batch] for batch in joined])
    ids = unmask(joined[0])
    assert numbers_of(ids).tolist() == list(range(256))
    assert not any(values[56:].any() for values in first[-1].values())


def test_dynamic_masking_needs_unmasked_shards_and_a_vocabulary(unmasked, tmp_path):
    with pytest.raises(ValueError, match=r"data\.masking: dynamic, but the shards .* were masked when built"):
        stream(make_shards(tmp_path, 20), config(masking="dynamic"))
    with pytest.raises(ValueError, match=r"data\.masking: static, but the shards .* contain no masks"):
        stream(unmasked)
    with pytest.raises(ValueError, match=r"data\.masking: dynamic needs the vocabulary"):
        stream(unmasked, config(masking="dynamic"), tokenizer=None)


def shares(batches: list[dict[str, np.ndarray]], first: int, share_of) -> None:
    for step, batch in enumerate(batches, start=first):
        lengths = batch["sequence_ids"].sum(1)
        wanted = np.clip(np.rint(lengths * share_of(step)), 1, 8)
        np.testing.assert_array_equal(batch["mlm_weights"].sum(1), wanted)


def test_the_share_changes_with_the_batch(unmasked):
    """Linear from a half to a tenth over ten batches, in both readers and after a resume."""
    data = config(masking="dynamic", max_predictions=8, mask_fraction=0.5, final_masking=(0.1, 10))

    def share_of(step: int) -> float:
        return 0.5 - 0.04 * min(step, 10)

    batches = stream(unmasked, dataclasses.replace(data, reader="numpy"), tokenizer=MASKER)
    seen = take(batches, 14)
    shares(seen, 0, share_of)
    assert_equal(take(stream(unmasked, dataclasses.replace(data, reader="tensorflow"), tokenizer=MASKER), 14), seen)
    again = stream(unmasked, data, tokenizer=MASKER)
    again.restore(batches.state() | {"data_step": 4})
    assert_equal(take(again, 4), seen[4:8])
    for other in ({"final_masking": (0.2, 10)}, {"final_masking": (0.1, 9)}):
        with pytest.raises(ValueError, match="masking options differ"):
            stream(unmasked, dataclasses.replace(data, **other), tokenizer=MASKER).restore(batches.state())
    held_out = list(eval_batches(data, folder=unmasked, batch_size=64, tokenizer=MASKER))
    shares(held_out, 0, lambda step: 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"final_masking": (0.1, 5)}, r"data.final_masking: \(0.1, 5\) .* static"),
        ({"masking": "dynamic", "final_masking": (0.1,)}, r"data.final_masking: \(0.1,\) .*, 1 or more"),
        ({"masking": "dynamic", "final_masking": (0.1, 0.5)}, r"data.final_masking: \(0.1, 0.5\) .*, 1 or more"),
        ({"masking": "dynamic", "final_masking": (0, 5)}, r"data.final_masking: \(0, 5\) .*above 0"),
        ({"masking": "dynamic", "final_masking": (1.5, 5)}, r"data.final_masking: \(1.5, 5\) .*at most 1"),
    ],
)
def test_a_share_that_cannot_change_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_special_tokens_are_predicted_if_asked(unmasked):
    data = config(masking="dynamic", max_predictions=S, mask_fraction=1.0)
    (without,) = take(stream(unmasked, data, tokenizer=MASKER), 1)
    data = dataclasses.replace(data, mask_special_tokens=True)
    (batch,) = take(stream(unmasked, data, tokenizer=MASKER), 1)
    lengths = batch["sequence_ids"].sum(1)
    np.testing.assert_array_equal(without["mlm_weights"].sum(1), lengths - 2)
    np.testing.assert_array_equal(batch["mlm_weights"].sum(1), lengths)
    assert np.isin([2, 3], batch["mlm_labels"]).all() and not np.isin([2, 3], without["mlm_labels"]).any()
    half = dataclasses.replace(data, mask_fraction=0.5)
    (batch,) = take(stream(unmasked, half, tokenizer=MASKER), 1)
    np.testing.assert_array_equal(batch["mlm_weights"].sum(1), np.rint(batch["sequence_ids"].sum(1) * 0.5))


@pytest.mark.parametrize("specials", [False, True])
def test_static_masks_predict_special_tokens_if_asked(tmp_path, specials):
    write_vocab(tmp_path / "vocab.txt")
    write_corpus(tmp_path / "corpus.txt", documents=8, sentences=4)
    data = DataConfig(
        corpus=(str(tmp_path / "corpus.txt"),), vocab=str(tmp_path / "vocab.txt"), shards=str(tmp_path / "shards"),
        seq_length=32, max_predictions=16, mask_fraction=0.5, dupe_factor=1, num_shards=1, eval_fraction=0.3,
        workers=1, mask_special_tokens=specials,
    )  # fmt: skip
    ensure_data(data, vocab_size=1000, report=lambda _: None)
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    (batch,) = eval_batches(data, folder=tmp_path / "shards" / "train", batch_size=99, tokenizer=tokenizer)
    labels = batch["mlm_labels"][batch["mlm_weights"] > 0]
    assert np.isin([tokenizer.cls_id, tokenizer.sep_id], labels).tolist() == [specials] * 2
    lengths = batch["sequence_ids"].sum(1)[:, None] > 0
    np.testing.assert_array_equal(
        batch["mlm_weights"].sum(1), np.where(lengths[:, 0], np.rint(batch["sequence_ids"].sum(1) * 0.5), 0)
    )
    other = dataclasses.replace(data, mask_special_tokens=True)
    if not specials:
        with pytest.raises(ValueError, match=r"data.mask_special_tokens: shards none, config True"):
            ensure_data(other, vocab_size=1000, report=lambda _: None)


@pytest.mark.slow
def test_a_run_whose_share_changes_resumes_bitwise(tmp_path):
    write_corpus(tmp_path / "corpus.txt")
    vocabulary = write_vocab(tmp_path / "vocab.txt")
    data = DataConfig(
        corpus=(str(tmp_path / "corpus.txt"),), vocab=str(vocabulary), shards=str(tmp_path / "shards"),
        seq_length=32, max_predictions=16, dupe_factor=1, num_shards=2, eval_fraction=0.2, workers=1,
        masking="dynamic", mask_fraction=0.5, final_masking=(0.1, 6), packing="best_fit",
    )  # fmt: skip
    ensure_data(data, vocab_size=500, report=lambda _: None)
    run = tiny_config(
        "--model.vocab_size 500 --training.global_batch_size 16 --training.num_steps 6 --training.eval_interval 6",
        "--training.checkpoint_interval 2 --training.log_interval 1",
    )
    run = dataclasses.replace(run, data=data)
    for workdir, stop in ((tmp_path / "whole", None), (tmp_path / "cut", StopAt(3)), (tmp_path / "cut", None)):
        options = {"source": ShardSource(run, load_tokenizer(vocabulary)), "devices": jax.devices()[:1]}
        if stop is None:
            pretrain_on(run, workdir, vocabulary, **options)
        else:
            with pytest.raises(Stop):
                pretrain_on(run, workdir, vocabulary, **options, stop=stop)
    lines = read_metrics(tmp_path / "whole")
    assert untimed(read_metrics(tmp_path / "cut")) == untimed(lines)
    source = ShardSource(run, load_tokenizer(vocabulary))
    batches = source.train(list(range(source.row_shape.rows(16))))
    targets = [batch["mlm_weights"].sum() for batch in take(batches, 6)]
    assert targets[0] > 2.5 * targets[5] and targets == sorted(targets, reverse=True)
