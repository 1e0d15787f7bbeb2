"""The code of both READMEs, of docs/pretraining.md and of the pages in Chinese: every command is accepted, and the
code of README and of the tutorials runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import check_command, check_data_command

REPOSITORY = Path(__file__).resolve().parents[1]
ZH = REPOSITORY / "docs" / "zh"
PAGES = [*(REPOSITORY / name for name in ("README.md", "README.zh-CN.md", "docs/pretraining.md"))]
PAGES += sorted(ZH.glob("*.md"))
PROGRAMS = {"run_pretrain.py": "bert-jax pretrain", "run_finetune.py": "bert-jax finetune"}
# The tutorials in order: each uses files of those before. With what makes their runs short.
TUTORIALS = ("tutorial-reviews", "tutorial-domain", "tutorial-python")
SHORT = {
    "count=6000": "count=240",
    "range(1500)": "range(140)",
    "num_epochs=2": "num_steps=3",
    "num_steps=100": "num_steps=3",
    "--training.num_steps 600": "--training.num_steps 3",
    "--training.num_epochs 2": "--training.num_steps 3",
    "--workdir runs/domain\n": "--workdir runs/domain --training.num_steps 3\n",
}


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return [block.replace("\\\n", " ") for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def commands(text):
    """The words of every command of this project in a block."""
    for script, program in PROGRAMS.items():
        text = re.sub(rf"^(.*&& )?\S*python {re.escape(script)}", program, text, flags=re.MULTILINE)
    lines = re.findall(r"^(bert-jax|bert-data) ([^\n|>]*)", text, re.MULTILINE)
    return [(program, shlex.split(words, comments=True)) for program, words in lines]


CASES = [
    pytest.param(program, words, id=f"{page.stem}: {' '.join(words)}"[:60])
    for page in PAGES
    for block in blocks(page, "bash")
    for program, words in commands(block)
]


def test_there_are_commands():
    assert len(CASES) > 30


@pytest.mark.parametrize(("program", "words"), CASES)
def test_commands_are_understood(program, words, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    check_data_command(words[0], words[1:]) if program == "bert-data" else check_command(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_compiles(page):
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


def run_pages(texts, start=""):
    """Run the Python blocks of pages and the commands of their bash blocks, in order, on one device. Return what is
    printed."""
    lines = ["from bert_jax.commands.main import main", start]
    for text in texts:
        for language, block in re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL):
            if language == "python":
                lines.append(block)
                continue
            for _, words in commands(block.replace("\\\n", " ")):
                if not any("google-bert" in word for word in words):  # needs the network
                    lines.append(f"assert main({words!r}) == 0, {words!r}")
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


@pytest.mark.slow
def test_the_tutorials_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [(ZH / f"{name}.md").read_text(encoding="utf-8") for name in TUTORIALS]
    for long, short in SHORT.items():
        assert any(long in text for text in texts), long
        texts = [text.replace(long, short) for text in texts]
    printed = run_pages(texts)
    assert {place.name for place in Path("runs").iterdir()} == {
        "zh",
        "zh_reviews",
        "domain",
        "domain_reviews",
        "zh_python",
    }
    assert Path("out/zh/config.json").exists() and Path("clusters.jsonl").exists()
    assert "条错误" in printed


@pytest.mark.slow
def test_the_code_of_readme_runs(tmp_path, monkeypatch):
    """The lines of Python and of shell of README, on a small text, with three steps each."""
    monkeypatch.chdir(tmp_path)
    texts = [f"the {'good' if i % 2 else 'bad'} film number {i} is about the united states" for i in range(200)]
    labels = ["good" if i % 2 else "bad" for i in range(200)]
    Path("my_texts").mkdir()
    Path("my_texts/all.txt").write_text("\n\n".join(f"{text} .\nso it is ." for text in texts))
    rows = "\n".join(f"{text},{label}" for text, label in zip(texts, labels, strict=True))
    Path("reviews.csv").write_text(f"text,label\n{rows}\n")
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    text = text[text.index("## From Python") :].replace("num_steps=500", "num_steps=3")
    text = text.replace("dev=0.1)", "dev=0.1, num_steps=3)").replace(
        "--workdir", "--training.num_steps 3 --workdir"
    )
    run_pages([text.replace("runs/quickstart", "runs/mine")], f"texts, labels = {texts!r}, {labels!r}")
    assert Path("tuned/config.json").exists() and Path("out/config.json").exists()
