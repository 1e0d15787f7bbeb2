"""README.md: the parsers understand its commands, its table names the entry points, and its Python runs."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from command_lines import check_command

PACKAGE = Path(__file__).resolve().parents[1]
PAGE = (PACKAGE / "README.md").read_text(encoding="utf-8")
REPOSITORY = PACKAGE.parents[1]
# What the Python blocks read, and what makes them short.
SHORT = {"num_steps=500": "num_steps=4, options=SMALL", "dev=0.1": "dev=0.1, num_steps=4"}
SMALL = {
    "model.num_layers": 1, "model.hidden_size": 16, "model.num_attention_heads": 2, "model.intermediate_size": 16,
    "model.vocab_size": 300, "training.global_batch_size": 8, "training.eval_batches": 1, "data.workers": 1,
    "data.num_shards": 1,
}  # fmt: skip


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_commands_are_understood(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    lines = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) == 5 and lines.pop(0) == ["pip", "install", "./examples/xlnet"]
    for program, *words in lines:
        assert program == "bert-jax"
        check_command(words)


def test_the_table_names_every_entry_point():
    points = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, values in points.items():
        (row,) = [line for line in PAGE.splitlines() if line.startswith("|") and f"`{group}`" in line]
        for name, target in values.items():
            module = target.partition(":")[0].rpartition(".")[2]
            assert name in row and f"bert_jax_xlnet/{module}.py" in row


@pytest.mark.slow
def test_the_python_runs(tmp_path, monkeypatch, capsys):
    recipe = REPOSITORY / "examples/xlnet/xlnet_small.yaml"
    (tmp_path / "texts").mkdir()
    for n in range(40):
        (tmp_path / "texts" / f"{n}.txt").write_text(f"The {n} men of state {n} met. They sat and ate.\n" * 3)
    (block,) = blocks("python")
    for long, short in SHORT.items():
        assert long in block
        block = block.replace(long, short)
    texts = [f"{word} text {n}" for n in range(10) for word in ("good", "bad")]
    names = {
        "texts": texts,
        "labels": ["yes", "no"] * 10,
        "SMALL": SMALL | {"data.corpus": str(tmp_path / "texts")},
    }
    monkeypatch.chdir(tmp_path)
    exec(block.replace("examples/xlnet/xlnet_small.yaml", str(recipe)), names)
    assert 0 <= names["tuned"].metrics["accuracy"] <= 1
    assert {"yes", "no"} & {*re.findall(r"\w+", capsys.readouterr().out.splitlines()[-1])}
