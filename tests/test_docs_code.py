"""Every block of code of README, site and rooms: Python runs, parsers understand commands, and a table says why the
rest is neither."""

import functools
import json
import re
import shlex
from pathlib import Path

import pytest
from command_lines import check_command, check_data_command
from sklearn.model_selection import GridSearchCV

import bert_jax
from bert_jax.config import FinetuneConfig, PretrainConfig
from bert_jax.config.options import all_options, extended

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/*.md", "docs/[!g]*/*.md", "docs/guides/*.md", "*/contrib/*/README.md")
    for path in sorted(REPOSITORY.glob(pattern))
}
PROJECT = {"run_pretrain.py": "bert-jax pretrain", "run_finetune.py": "bert-jax finetune"}
# First word of a line of a shell block -> why no test runs it.
PROGRAMS = {
    **dict.fromkeys(
        ("gcloud", "kubectl", "tpu", "tpu()", "docker", "srun", "scancel", "scontrol"), "needs a cluster"
    ),
    **dict.fromkeys(
        ("pip", "uv", "~/.local/bin/uv", "python3", "pre-commit", "curl", "tensorboard", ".", "source"),
        "installs, or asks a network",
    ),
    **dict.fromkeys(
        ("pytest", "tests/other_versions.sh", "ruff", "mypy", "lint-imports", "codespell", "sphinx-build"),
        "the tests themselves",
    ),
    **dict.fromkeys(
        ("export", "cd", "cat", "tail", "trap", "case", "esac", "for", "while", "done", "wait", "echo", "exit",
         "END", "42)", "45|134|137|139)"), "the shell",
    ),
}  # fmt: skip
SCRIPTS = {"python -m": "the tests themselves", "python -c": "needs a GPU", "python studies/": "studies may age"}
SCRIPTS |= {
    "python docs/examples/serve_onnx.py": "tests/entry/test_serve_example.py",
    "python benchmarks/": "hours",
}


def blocks():
    """(page, language, lines) of every block."""
    for page, text in PAGES.items():
        language, lines = None, []
        for line in text.splitlines():
            if language is None and line.startswith("```"):
                language, lines = line[3:].strip(), []
            elif language is not None and line == "```":
                yield page, language, lines
                language = None
            elif language is not None:
                lines.append(line)


def commands():
    """(page, words) of each line of the shell blocks, with the variables of its block replaced, and of the commands
    in the sentences of some pages."""
    for page in ("docs/moving.md", "docs/questions.md"):
        for line in re.findall(r"`(bert-(?:jax|data) [^`]* --[^`]*)`", PAGES[page]):
            yield page, shlex.split(line)
    for page, language, lines in blocks():
        if language not in ("bash", ""):
            continue
        variables = {"i": "0"}  # of a loop
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            for name, value in variables.items():
                line = line.replace(f"${name} ", f"{value} ")
            if setting := re.fullmatch(r'(\w+)="(.*)"', line):
                variables[setting[1]] = setting[2]
                continue
            line = re.sub(r"(^|\s)#.*|<<'?\w+'?|2>&1|>>?\s*\S+|\s&$", "", line)
            for part in re.split(r"&&|\|\||\s\|\s", line):
                try:
                    words = shlex.split(part)
                except ValueError:  # a part of a longer statement of the shell
                    words = []
                while words and re.fullmatch(r"\w+=.*", words[0]):
                    words.pop(0)
                if words:
                    yield page, [words[0].removeprefix(".venv/bin/"), *words[1:]]


def understood(words):
    """Raise unless the program that ``words`` name takes the rest of them; return False for another program."""
    words = words[1:] if words[0] == "python" and words[1].startswith("run_") else words
    name, rest = PROJECT.get(words[0], words[0]), words[1:]
    if name == "bert-data":
        check_data_command(rest[0], rest[1:])
    elif name.startswith("bert-jax"):
        try:
            check_command([*name.split()[1:], *rest])
        except ValueError as error:  # a limit that follows from the initial model, which is not there
            of_model = "--decoder_from" if "--decoder_from" in rest else "position"
            assert of_model in str(error) and "--init_from" in rest
    return name.startswith("bert-")


CASES = [pytest.param(page, words, id=f"{page}: {' '.join(words)}"[:90]) for page, words in commands()]


def test_there_are_commands():
    assert len(CASES) > 150


@pytest.mark.parametrize(("page", "words"), CASES)
def test_a_command_is_understood(page, words, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    if not understood(words):
        known = words[0] in PROGRAMS or any(" ".join(words).startswith(script) for script in SCRIPTS)
        assert known, f"{page}: {' '.join(words)}: no test runs it, and no table says why"


def test_other_blocks():
    """Outputs are text, a request can be read, manifests are those of test_guides.py; there is nothing else."""
    for page, language, lines in blocks():
        if language == "yaml":
            assert page == "docs/guides/gke.md"
        elif language == "json":
            assert json.loads("\n".join(lines)), page
        else:
            assert language in ("python", "bash", "", "text", "{toctree}"), f"{page}: {language}"


def test_options_in_sentences_exist():
    known = {*all_options(PretrainConfig), *all_options(extended(FinetuneConfig))}
    sections = "|".join({name.partition(".")[0] for name in known if "." in name})
    for page in ("docs/moving.md", "docs/questions.md", "docs/optimization.md"):
        named = {*re.findall(rf"(?<![\w./])((?:{sections})\.(?!md)[a-z_]+)\b(?!\()", PAGES[page])}
        assert named and not named - known, named - known


# ------------------------------------------------------------------ Python

# Beginning of a page -> the test that runs its blocks of Python.
ELSEWHERE = {
    "docs/api.md": "test_public_api.py",
    "docs/tutorials/": "test_tutorials.py",
    "docs/zh/": "test_chinese_pages.py",
    "README": "test_chinese_pages.py",
}
# Page -> what is replaced in its blocks, which run here.
HERE = {
    "docs/finetuning.md": {
        "MODEL": "runs/quickstart", "[1e-4, 3e-4]": "[1e-4]", "num_epochs=5": "num_steps=1", "cv=3": "cv=2",
    },
    "docs/guides/generation.md": {"max_new_tokens=20": "max_new_tokens=2"},
    "docs/guides/pictures.md": {'"king", "queen"': '"good", "word"'},
    "docs/small-models.md": {"MINILM": "runs/quickstart"},
    "docs/guides/scoring.md": {},
    "docs/guides/translation.md": {
        '"my_bert/"': '"runs/quickstart_bert"', '"translation.beams": 5': '"training.num_steps": 1',
    },
    "docs/optimization.md": {},
    "docs/guides/words.md": {
        '"DIR"': '"runs/quickstart"', ", ...]": "] * 12",
    },
}  # fmt: skip
TEXTS = [f"A good text about word {i % 7} and word {i % 5}." for i in range(60)]
LABELS = ["yes" if i % 3 else "no" for i in range(60)]
TINY = {
    "model.vocab_size": 120, "model.hidden_size": 32, "model.num_layers": 1, "model.num_attention_heads": 2,
    "model.intermediate_size": 64, "data.num_shards": 1, "data.workers": 1, "optimizer.warmup_steps": 1,
    "loggers": [],
}  # fmt: skip


def python_of(page):
    return ["\n".join(lines) for name, language, lines in blocks() if name == page and language == "python"]


def test_every_page_with_python_has_a_test():
    pages = {page for page, language, _ in blocks() if language == "python"}
    assert {page for page in pages if not page.startswith(tuple(ELSEWHERE))} == set(HERE)


@pytest.mark.slow  # trains
@pytest.mark.parametrize("page", HERE)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pretrain = functools.partial(bert_jax.pretrain, corpus=TEXTS, num_steps=2, report=None)
    causal = {"objective.name": "causal_lm", "model.attention": "causal", "data.next_sentence": "none"}
    if page == "docs/guides/generation.md":
        pretrain("quickstart_bert", workdir="gpt2", options=TINY | causal)
    elif page == "docs/guides/translation.md":
        pretrain("quickstart_bert", workdir="runs/quickstart_bert", options=TINY)
    elif page.startswith(("docs/f", "docs/guides", "docs/small")):
        pretrain("quickstart", workdir="runs/quickstart", options=TINY | {"model.hidden_size": 128})
    names = {"texts": TEXTS, "labels": LABELS, "bert_jax": bert_jax, "GridSearchCV": GridSearchCV}
    names |= {f"{part}{language}": TEXTS[:8] for part in ("", "dev_") for language in ("german", "english")}
    for block in python_of(page):
        for long, short in HERE[page].items():
            assert long in block, f"{page}: {long} is no longer in the block"
            block = block.replace(long, short)
        exec(compile(block, page, "exec"), names)
