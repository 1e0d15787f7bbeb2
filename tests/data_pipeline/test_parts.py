"""The folders of a mixture: names, agreement with the config, held-out shards, the unigram baseline."""

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from input_shards import make_shards
from text_corpora import write_corpus, write_vocab

from bert_jax.commands.data import main
from bert_jax.config import DataConfig, ModelConfig, PretrainConfig, TrainingConfig
from bert_jax.config.loader import Settings
from bert_jax.tokenization import load_tokenizer
from data_pipeline.build.ensure import ensure_data, require_shards
from data_pipeline.read.pretrain_input import ShardSource
from data_pipeline.shards.mixture_parts import held_out_parts, shard_parts

VOCABULARY = 416


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with the parts wiki and books, built with other seeds and passes, and their vocabulary."""
    root = tmp_path_factory.mktemp("mix")
    vocab = str(write_vocab(root / "vocab.txt"))
    for seed, name in enumerate(("wiki", "books"), start=1):
        data = dataclasses.replace(
            mixture_data(root), corpus=(str(write_corpus(root / f"{name}.txt", seed=seed)),), vocab=vocab,
            shards=str(root / name), mixture=(), dupe_factor=seed, num_shards=seed, eval_fraction=0.1, seed=seed,
            workers=1,
        )  # fmt: skip
        ensure_data(data, vocab_size=VOCABULARY, report=lambda line: None)
    return root


def mixture_data(root: Path, *mixture: str, **options) -> DataConfig:
    """Options of a run that mixes the parts in ``root``."""
    return DataConfig(
        **{"shards": str(root), "mixture": mixture or ("wiki=3", "books=1"), "seq_length": 16, "max_predictions": 3}
        | options
    )


def check(data: DataConfig) -> Path:
    return ensure_data(data, vocab_size=VOCABULARY, report=lambda line: None)


def refused(data: DataConfig) -> str:
    with pytest.raises(ValueError) as raised:
        check(data)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def source(data: DataConfig) -> ShardSource:
    model = ModelConfig(vocab_size=VOCABULARY, hidden_size=16, num_attention_heads=2)
    config = PretrainConfig(model=model, data=data, training=TrainingConfig(global_batch_size=8))
    return ShardSource(config, load_tokenizer(check(data)))


# ------------------------------------------------------------------ names


def test_weights_are_shares_and_names_are_folders_or_paths(tmp_path):
    parts = shard_parts(DataConfig(shards="mix", mixture=("wiki=0.7", f"{tmp_path}/b=0.2", "gs://bucket/c=0.1")))
    assert [(part.name, part.weight, str(part.folder)) for part in parts] == [
        ("wiki", 7, "mix/wiki"), (f"{tmp_path}/b", 2, f"{tmp_path}/b"), ("gs://bucket/c", 1, "gs://bucket/c"),
    ]  # fmt: skip
    weights = [part.weight for part in shard_parts(DataConfig(mixture=("./a=14", "./b=4", "./c=2")))]
    assert weights == [7, 2, 1]
    assert [part.weight for part in shard_parts(DataConfig(mixture=("./a=1", "./b=2e-6")))] == [499_999, 1]
    assert shard_parts(DataConfig(shards="alone"))[0] == ("", 1, Path("alone"))


def test_unusable_names(tmp_path):
    with pytest.raises(ValueError, match=r"data\.mixture: wiki is a folder in data\.shards, which is not set"):
        shard_parts(DataConfig(mixture=("wiki=1", "./books=1")))
    with pytest.raises(ValueError, match=rf"wiki and {tmp_path}/x/\.\./wiki are the same folder; name it once"):
        shard_parts(DataConfig(shards=str(tmp_path), mixture=("wiki=1", f"{tmp_path}/x/../wiki=1")))


# ------------------------------------------------------------------ checks


def test_parts_may_differ_in_passes_shards_and_seed(root):
    assert check(mixture_data(root)) == root / "vocab.txt"
    config = PretrainConfig(model=ModelConfig(vocab_size=VOCABULARY), data=mixture_data(root))
    assert require_shards(config, Settings()) == root / "vocab.txt"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_length": 32}, "built with other settings: data.seq_length: shards 16, config 32"),
        ({"masking": "dynamic"}, "data.masking: shards static, config dynamic"),
        ({"mask_fraction": 0.2}, "data.mask_fraction: shards 0.15, config 0.2"),
        ({"next_sentence": "sop"}, "data.next_sentence: shards nsp, config sop"),
        ({"lower_case": False}, "vocabulary: shards "),
    ],
)
def test_a_part_of_other_settings_is_named(root, options, message):
    text = refused(mixture_data(root, **options))
    assert (
        text.startswith(f"data.mixture: wiki: {root}/wiki/train: built with other settings: ") and message in text
    )


def test_the_part_that_differs_is_the_one_that_is_named(root, tmp_path):
    other = dataclasses.replace(
        mixture_data(root), corpus=(str(root / "books.txt"),), vocab=str(root / "vocab.txt"),
        shards=str(tmp_path / "long"), mixture=(), seq_length=32, eval_fraction=0.0, workers=1,
    )  # fmt: skip
    ensure_data(other, vocab_size=VOCABULARY, report=lambda line: None)
    text = refused(mixture_data(root, "wiki=1", f"{tmp_path}/long=1"))
    assert text.startswith(f"data.mixture: {tmp_path}/long: {tmp_path}/long/train: built with other settings: ")


def test_held_out_shards_of_other_settings_are_named(root, tmp_path):
    shutil.copytree(root / "books", tmp_path / "books")
    other = dataclasses.replace(
        mixture_data(root), corpus=(str(root / "books.txt"),), vocab=str(root / "vocab.txt"),
        shards=str(tmp_path / "long"), mixture=(), seq_length=32, eval_fraction=0.1, workers=1,
    )  # fmt: skip
    ensure_data(other, vocab_size=VOCABULARY, report=lambda line: None)
    shutil.rmtree(tmp_path / "books" / "eval")
    shutil.copytree(tmp_path / "long" / "eval", tmp_path / "books" / "eval")
    name = f"{tmp_path}/books"
    assert refused(mixture_data(root, "wiki=1", f"{name}=1")).startswith(
        f"data.mixture: {name}: {name}/eval: built"
    )
    text = refused(mixture_data(root, eval_shards=f"{tmp_path}/long/eval"))
    assert text.startswith(f"data.eval_shards: {tmp_path}/long/eval: built with other settings: data.seq_length")


def test_missing_parts_and_vocabularies(root, tmp_path):
    text = refused(mixture_data(root, "wiki=1", "c4=1"))
    assert text.startswith(f"data.mixture: c4: {root}/c4 contains no shards; build them with bert-data shards")
    assert not (root / "c4").exists()
    (tmp_path / "begun" / ".build-train-1").mkdir(parents=True)
    assert "begun contains no shards" in refused(mixture_data(root, "wiki=1", f"{tmp_path}/begun=1"))
    corpus = mixture_data(root, corpus=("more.txt",))
    assert refused(corpus).startswith("data.corpus: more.txt is not allowed with data.mixture")
    paths = (f"{root}/wiki=1", f"{root}/books=1")
    assert refused(mixture_data(root, *paths, shards="")).startswith(
        "data.vocab: not set; set it to the vocabulary"
    )
    assert "does not exist" in refused(mixture_data(root, *paths, shards=str(tmp_path)))
    given = mixture_data(root, *paths, shards="", vocab=str(root / "vocab.txt"))
    assert check(given) == root / "vocab.txt"


def test_parts_of_other_writers(root, tmp_path):
    """TFRecords that bert-data index has indexed are a part too; their layout is checked."""
    make_shards(tmp_path / "foreign", 40)
    data = mixture_data(root, "wiki=1", f"{tmp_path}/foreign=1")
    assert refused(data).startswith(f"data.mixture: {tmp_path}/foreign: {tmp_path}/foreign/shard-00000")
    shutil.copytree(root / "books" / "train", tmp_path / "bare", ignore=shutil.ignore_patterns("manifest.json"))
    check(mixture_data(root, "wiki=1", f"{tmp_path}/bare=1"))
    text = refused(mixture_data(root, "wiki=1", f"{tmp_path}/bare=1", max_predictions=4, mask_fraction=0.15))
    assert text.startswith("data.mixture: wiki: ")


def test_bert_data_builds_one_part_of_the_recipe_of_a_mixture(root, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{vocab_size: {VOCABULARY}, hidden_size: 64, num_attention_heads: 2}}\n"
        "data: {mixture: {wiki: 3, books: 1}, seq_length: 16, max_predictions: 3, workers: 1, dupe_factor: 1}\n"
    )
    words = ["--corpus", root / "wiki.txt", "--shards", tmp_path / "mix" / "wiki", "--vocab", root / "vocab.txt"]
    assert main(["shards", "--config", str(recipe), *map(str, words)]) == 0
    assert f"shards in {tmp_path}/mix/wiki" in capsys.readouterr().out
    assert (tmp_path / "mix" / "wiki" / "train" / "manifest.json").is_file()


# ------------------------------------------------------------------ the source of a run


def targets(batches) -> list[int]:
    return [label for batch in batches for label in batch["mlm_labels"][batch["mlm_weights"] > 0].tolist()]


@pytest.mark.slow
def test_held_out_records_of_all_parts(root, caplog):
    rows = list(range(4))
    alone = [source(mixture_data(root, shards=str(root / name), mixture=(), vocab=str(root / "vocab.txt"),
             corpus=(), dupe_factor=k, num_shards=k, eval_fraction=0.1, seed=k))
             for k, name in enumerate(("wiki", "books"), start=1)]  # fmt: skip
    expected = sorted(label for one in alone for label in targets(one.held_out(4, rows, 0)))
    assert sorted(targets(source(mixture_data(root)).held_out(4, rows, 0))) == expected
    assert not caplog.text
    # One folder for all parts.
    named = source(mixture_data(root, eval_shards=str(root / "books" / "eval")))
    assert sorted(targets(named.held_out(4, rows, 0))) == sorted(targets(alone[1].held_out(4, rows, 0)))
    with pytest.raises(ValueError, match=r"data\.eval_shards: none is not a folder"):
        held_out_parts(mixture_data(root, eval_shards="none"))


def test_parts_without_held_out_shards_are_reported(root, tmp_path, caplog):
    shutil.copytree(root / "books" / "train", tmp_path / "books")
    some = source(mixture_data(root, "wiki=1", f"{tmp_path}/books=1"))
    assert f"data.mixture: no held-out shards in {tmp_path}/books: evaluations omit these parts" in caplog.text
    assert targets(some.held_out(4, list(range(4)), 0))
    shutil.copytree(root / "wiki" / "train", tmp_path / "wiki")
    none = source(mixture_data(root, f"{tmp_path}/wiki=1", f"{tmp_path}/books=1"))
    assert none.held_out(4, [0], 0) is None and none.unigram_cross_entropy() is None


@pytest.mark.slow
def test_the_unigram_baseline_has_the_weights_of_the_mixture(root):
    """Targets of each part count by its weight, not by its size; add-one over the whole vocabulary."""
    data = mixture_data(root)
    whole = source(data)
    counts = [whole._target_counts([part], 0)[0] for part in whole._train]
    total = sum(count.sum() for count in counts)
    mixed = 1 + total * (0.75 * counts[0] / counts[0].sum() + 0.25 * counts[1] / counts[1].sum())
    held_out = np.array(targets(whole.held_out(4, list(range(4)), 0)))
    expected = -np.log(mixed / mixed.sum())[held_out].mean()
    assert whole.unigram_cross_entropy() == pytest.approx(expected, rel=1e-12)
    other = source(mixture_data(root, "wiki=1", "books=3")).unigram_cross_entropy()
    assert math.isfinite(expected) and abs(other - expected) > 1e-3


def test_rows_of_one_host(root):
    whole, part = source(mixture_data(root)).train(list(range(8))), source(mixture_data(root)).train([1, 5])
    for _ in range(3):
        np.testing.assert_array_equal(next(whole)[0]["input_ids"][[1, 5]], next(part)[0]["input_ids"])
