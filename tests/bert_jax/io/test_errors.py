"""Hints for misspelled commands, models and recipes."""

from pathlib import Path

import pytest
from config_words import refusal

from bert_jax.commands import data as bert_data
from bert_jax.commands import main as bert_jax
from bert_jax.io.errors import near_path


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("embedd", "did you mean 'embed'?"),
        ("fill_mask", "did you mean 'fill-mask'?"),
        ("train", "to pretrain, run: bert-jax pretrain --config RECIPE"),
        ("fine-tune", "to finetune, run: bert-jax finetune --config RECIPE"),
        ("qqqq", "encoder-decoder"),  # the last of the list
    ],
)
def test_unknown_commands_of_bert_jax(word, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        bert_jax.main([word, "--config", "x"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and f"{word}: unknown command; allowed: pretrain, " in line and line.endswith(hint)


@pytest.mark.parametrize(("word", "hint"), [("shard", "did you mean 'shards'?"), ("train", "bert-jax pretrain")])
def test_unknown_commands_of_bert_data(word, hint, capsys):
    assert bert_data.main([word]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {word}: unknown command; allowed: vocab, ") and hint in line


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("runs/quickstat", "runs/quickstart"),
        ("quickstart", "runs/quickstart"),
        ("rnus/quickstart", "runs/quickstart"),
        ("rnus/other", "runs"),
        ("elsewhere/quickstart", ""),
    ],
)
def test_missing_models(path, near, tmp_path, monkeypatch):
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert near_path(Path(path)) == (f"; did you mean {near!r}?" if near else "")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("quickstart.yaml", "configs/quickstart.yaml"),
        ("mine", "configs/own/mine.yaml"),
        ("config/quickstrat.yaml", "configs/quickstart.yaml"),
        ("own/mien.yaml", "configs/own/mine.yaml"),
        ("qqqqqqqqqqqqqqqqqqqq.yaml", ""),
    ],
)
def test_missing_recipes(name, near, tmp_path, monkeypatch):
    for file in ("configs/quickstart.yaml", "configs/own/mine.yaml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bert_jax.config.loader.RECIPES", tmp_path / "none")
    hint = f"; did you mean {near!r}?" if near else ""
    assert (
        refusal(f"--config {name}") == f"command line: config: cannot read {name}: No such file or directory{hint}"
    )
