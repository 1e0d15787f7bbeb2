"""Runs of several hosts build nothing: they are told the command that does, which works as it stands."""

import shlex
from pathlib import Path

import pytest
from text_corpora import write_corpus, write_vocab

from bert_jax.commands.data import main
from bert_jax.config.loader import Settings, load_config, read_settings
from bert_jax.config.pretrain import PretrainConfig
from data_pipeline.build.ensure import require_shards


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Flags of a run whose shards are not there."""
    (tmp_path / "a folder").mkdir()
    recipe = tmp_path / "a folder" / "recipe.yaml"
    corpus, vocab = write_corpus(tmp_path / "corpus.txt"), write_vocab(tmp_path / "vocab.txt")
    recipe.write_text(
        "model:\n  vocab_size: 500\n  hidden_size: 64\n  num_attention_heads: 2\ndata:\n"
        f"  corpus: [{corpus}]\n  vocab: {vocab}\n  shards: {tmp_path}/shards\n  dupe_factor: 2\n  num_shards: 2\n"
    )
    return [
        "--config",
        str(recipe),
        "--data.seq_length",
        "32",
        "--data.max_predictions",
        "5",
        "--data.workers",
        "1",
    ]


def refused(config: PretrainConfig, words: list[str]) -> list[str]:
    """The words of the command that the refusal names."""
    with pytest.raises(
        ValueError, match="several hosts does not build them; run on one host: bert-data shards"
    ) as error:
        require_shards(config, read_settings(words))
    assert "\n" not in str(error.value)
    return shlex.split(str(error.value).partition("run on one host: ")[2])


def test_the_command_builds_what_the_run_needs(words: list[str], tmp_path: Path) -> None:
    config = load_config(PretrainConfig, words)
    command = refused(config, words)
    assert command == ["bert-data", "shards", *words]
    assert not (tmp_path / "shards").exists()
    assert main(command[1:]) == 0
    assert require_shards(config, read_settings(words)) == tmp_path / "vocab.txt"
    with pytest.raises(ValueError, match=r"data\.seq_length: shards 32, config 64"):
        other = [*words, "--data.seq_length", "64"]
        require_shards(load_config(PretrainConfig, other), read_settings(other))


def test_what_the_run_has_changed_is_in_the_command(words: list[str], tmp_path: Path) -> None:
    """A warm start sets the vocabulary, its size and case."""
    vocab = write_vocab(tmp_path / "other.txt", 380)
    flags = ["--data.vocab", str(vocab), "--model.vocab_size", "450", "--data.lower_case", "false"]
    config = load_config(PretrainConfig, [*words, *flags, "--data.dupe_factor", "1"])
    command = refused(config, words)
    assert command[: 2 + len(words)] == ["bert-data", "shards", *words]
    assert load_config(PretrainConfig, command[2:]) == config
    assert main(command[1:]) == 0
    assert require_shards(config, read_settings(words)) == vocab


@pytest.mark.slow
def test_missing_vocabulary_or_held_out_shards(words: list[str], tmp_path: Path) -> None:
    words = [*words, "--data.vocab", ""]
    config = load_config(PretrainConfig, words)
    refused(config, words)
    assert main(["shards", *words]) == 0
    assert require_shards(config, read_settings(words)) == tmp_path / "shards" / "vocab.txt"
    (tmp_path / "shards" / "eval" / "manifest.json").unlink()
    refused(config, words)
    with pytest.raises(ValueError, match=r"data\.shards: not set"):
        require_shards(PretrainConfig(), Settings())


def test_a_warm_start_from_another_encoder(words: list[str]) -> None:
    """The class of the section that the start chooses has fields that the arguments do not have."""
    flags = "--model.encoder lstm --model.num_layers 1 --objective.name causal_lm --data.next_sentence none"
    config = load_config(PretrainConfig, [*words, *flags.split()])
    assert refused(config, words) == ["bert-data", "shards", *words, "--data.next_sentence", "none"]
