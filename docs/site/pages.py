"""The pages that follow from the code: choosers, recipes, options, commands and the reference.

``write()`` writes them into docs/generated, which git ignores; conf.py calls it.
"""

import argparse
import contextlib
import inspect
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import yaml

import bert_jax
from bert_jax import registry
from bert_jax.commands import main
from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.config import FinetuneConfig, ModelSpec, PretrainConfig, RunOptions
from bert_jax.config.help import comments_of
from bert_jax.config.loader import load_config, read_settings, show_help
from bert_jax.config.options import extended
from bert_jax.config.spec import TaskKind, pretraining_heads
from bert_jax.config.task import WHOLE, SentenceLoss, SentenceTaskConfig
from bert_jax.interop.export_table import formats_of
from bert_jax.tasks.registry import TASKS

REPOSITORY = Path(__file__).resolve().parents[2]
GENERATED = REPOSITORY / "docs" / "generated"
TUTORIALS = REPOSITORY / "docs" / "tutorials"
FOLDERS = {
    "configs": "Recipes of pretraining",
    "configs/finetune": "Recipes of fine-tuning",
    "configs/distil": "Recipes of distillation",
    "configs/story": "Recipes of the systems from word2vec to BERT",
    "configs/models": "Networks alone",
    "docker": "Images",
    "studies": "Studies",
    "docs/design": "Design decisions",
}
# Folder -> the pages below its page in the table of contents.
TREES = {
    "studies": ["../../studies/*/README"],
    "docs/design": ["../design/tour", "../design/house", "../design/*"],
}
# Classes whose subclasses a user writes.
BASES = (
    "bert_jax.objectives.objective.PretrainObjective", "bert_jax.tasks.task.Task",
    "bert_jax.training.logging.logger.Logger",
)  # fmt: skip
# The paragraphs that open the generated pages.
OPTIONS = """What `{command} --help_all` prints. A recipe sets an option as `section: {{option: value}}`, the
command line as `--section.option value`, Python as `options={{"section.option": value}}`."""
COMMANDS = """The help of `bert-jax COMMAND`. `pretrain` and `finetune` take options of recipes:
[pretraining](options-pretrain.md), [fine-tuning](options-finetune.md)."""


def plain(text: str) -> str:
    """Return ``text`` with the characters escaped that mean something in Markdown."""
    return re.sub(r"([\\`*_\[\]<>|$#~{}])", r"\\\1", text)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def first_sentence(part: type) -> str:
    """Return the first sentence of the docstring of a class, without markup."""
    text = re.sub(r":\w+:`([^`]*)`|``([^`]*)``", lambda match: match[1] or match[2], inspect.getdoc(part) or "")
    return plain(re.match(r".*?\.(?=\s|$)|.*", text.replace("\n", " "))[0])  # type: ignore[index]


# ------------------------------------------------------------------ folders and recipes


def page_of(folder: Path) -> Path:
    """Return the generated page of a folder."""
    return GENERATED / f"{str(folder.resolve().relative_to(REPOSITORY)).replace('/', '-')}.md"


def _title(path: Path) -> str:
    """Return the heading of a Markdown file, or the first sentence of the comment that opens another file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".md":
        return next(line.lstrip("# ") for line in lines if line.startswith("#"))
    header = []
    for line in lines:
        if not line.startswith("# ") or line.startswith("#   "):
            break
        header.append(line[2:])
    return plain(" ".join(header).strip().rstrip(":") or "-")


def folder_page(name: str) -> str:
    """Return the page of a folder: its files, and the README of each folder in it, with their titles."""
    folder = REPOSITORY / name
    files = sorted(
        path for path in folder.iterdir() if path.is_file() and path.suffix in (".md", ".yaml", ".Dockerfile")
    )
    files += sorted(folder.glob("*/README.md"))
    names = {path: path.parent.name if path.name == "README.md" else path.stem for path in files}
    rows = ((f"[{names[path]}](../../{path.relative_to(REPOSITORY)})", _title(path)) for path in files)
    text = f"# {FOLDERS[name]}\n\nThe files in `{name}/`"
    text += ", each with the first sentences of its header." if name.startswith("configs") else "."
    others = [other for other in FOLDERS if Path(other).parent == Path(name)]
    links = ", ".join(f"[{other}]({page_of(REPOSITORY / other).name})" for other in others)
    below = [*(page_of(REPOSITORY / other).name for other in others), *TREES.get(name, ())]
    if links:
        text += f" Further folders: {links}."
    text += f"\n\n{table(('file', 'contents'), rows)}"
    if below:
        text += "\n".join(["\n```{toctree}", ":hidden:", ":glob:", "", *below, "```\n"])
    return text


def recipes(folder: str) -> dict[str, dict[str, dict[str, object]]]:
    """Return name -> content of the recipes in a folder."""
    return {path.stem: yaml.safe_load(path.read_text()) for path in sorted((REPOSITORY / folder).glob("*.yaml"))}


def _recipes_with(section: str, key: str, value: str, default: str, folders: Iterable[str]) -> str:
    found = [
        f"[{name}](../../{folder}/{name}.yaml)"
        for folder in folders
        for name, content in recipes(folder).items()
        if (content.get(section) or {}).get(key, default) == value
    ]
    return ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "") or "-"


# ------------------------------------------------------------------ choosers


def _meanings(comment: str, names: Iterable[str]) -> dict[str, str]:
    """Return name -> meaning from a comment such as "one: meaning. two, three: meaning."."""
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pieces = re.split(rf"(?:^|(?<=\. ))((?:{known})(?:, (?:{known}))*): ", comment)
    return {
        name: plain(what.strip())
        for key, what in zip(pieces[1::2], pieces[2::2], strict=True)
        for name in key.split(", ")
    }


def _parts(kind: registry.Kind, options: registry.Kind, section: str, key: str, default: str) -> str:
    folders = ("configs", "configs/distil", "configs/story")
    rows = []
    for name in registry.names(kind):
        part = registry.load(kind, name)
        title = registry.load(options, name).TITLE if name in registry.names(options) else ""
        meaning = plain(title[0].upper() + title[1:]) if title else first_sentence(part)
        rows.append((f"`{name}`", meaning, _recipes_with(section, key, name, default, folders)))
    return table((f"`{section}.{key}`", "meaning", "recipes"), rows)


def _formats() -> Iterator[tuple[str, str, str]]:
    """Yield (recipe, network, formats) for each recipe of pretraining."""
    for name in recipes("configs"):
        config = load_config(PretrainConfig, ["--config", str(REPOSITORY / "configs" / f"{name}.yaml")])
        model = config.model
        spec = ModelSpec(model=model, heads=pretraining_heads(config.has_nsp), family=model.family_name)
        size = f"{model.num_layers} layers, width {model.hidden_size}"
        yield f"[{name}](../../configs/{name}.yaml)", size, ", ".join(formats_of(spec))


def choosers() -> str:
    """Return the page that helps to choose an objective, a network, a task, a loss, a recipe and a format."""
    kinds = _meanings(comments_of(type(FinetuneConfig().task))["kind"], get_args(TaskKind))
    losses = get_args(SentenceLoss)
    of_losses = _meanings(comments_of(SentenceTaskConfig)["loss"], losses)
    tasks = (
        (
            f"`{kind}`",
            first_sentence(TASKS[kind]) if kind in WHOLE else kinds[kind],
            _recipes_with("task", "kind", kind, "classification", ["configs/finetune"]),
        )
        for kind in TASKS
    )
    return f"""# Which one fits my data?

The tables list everything that is installed.

## Which objective for pretraining?
Text without labels: `masked_lm`. Text to generate: `causal_lm`. Documents with labels: `masked_lm_classes`.

{_parts("objectives", "objective_options", "objective", "name", "masked_lm")}
## Which network?
{_parts("encoders", "encoder_options", "model", "encoder", "transformer")}
## Which kind of task for my labels?
[Tasks and their files](../finetuning.md#tasks-and-their-files) shows a record of each kind.

{table(("`task.kind`", "labels", "recipes"), tasks)}
## Which loss for text vectors?
With `task.kind sentence`. Pairs without labels: `negatives`. Texts alone: `simcse`. Pairs with a degree of
similarity: `cosent` or `cosine`. Pairs with classes: `softmax`.

{table(("`sentence.loss`", "meaning"), ((f"`{loss}`", of_losses.get(loss, "-")) for loss in losses))}
## Which recipe?
[Pretraining](configs.md), [fine-tuning](configs-finetune.md), [distillation](configs-distil.md).

## Which export format?
`bert-jax export` without `--format` prints the formats of a model. Models of the recipes of pretraining:

{table(("recipe", "network", "formats"), _formats())}
[What each format holds](../weights.md#what-each-format-holds), part by part.
"""


# ------------------------------------------------------------------ options and commands


def _options_of(config: type, extra: type, words: list[str]) -> dict[str, list[tuple[str, str, str, str]]]:
    """Return title of a section -> (option, type, default, meaning), from the help text."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show_help(config, read_settings(words), "", extra, whole=True)
    sections: dict[str, list[tuple[str, str, str, str]]] = {}
    for block in re.split(r"\n\n", out.getvalue())[2:]:
        title, _, rest = block.partition("\n")
        entries = re.split(r"^  --", rest, flags=re.MULTILINE)[1:]
        for entry in entries:
            head, _, text = entry.partition("\n")
            name, kind, default = re.fullmatch(r"(\S+) (.*?)  \(default: (.*)\)", head).groups()  # type: ignore[union-attr]
            sections.setdefault(title, []).append((name, kind, default, " ".join(text.split())))
    return sections


def options_page(title: str, command: str, config: type, extra: type) -> str:
    """Return the page of all options of a command by section, with those of objectives and encoders."""
    words: list[list[str]] = [[]]
    words += [["--model.encoder", name] for name in registry.names("encoder_options")]
    if config is PretrainConfig:
        words += [["--objective.name", name] for name in registry.names("objective_options")]
    lines, seen = [f"# {title}\n\n{OPTIONS.format(command=command)}\n"], set[str]()
    for choice in words:
        for section, options in _options_of(config, extra, choice).items():
            new = [option for option in options if option[0] not in seen]
            if not new:
                continue
            seen |= {name for name, *_ in new}
            name, colon, what = section.partition(": ")
            chosen = f" with {' '.join(choice).removeprefix('--')}" if choice else ""
            heading = f"{name}{chosen}" if colon else "Without a section"
            lines.append(f"## {heading}\n{plain(what if colon else section)}\n")
            for option, kind, default, text in new:
                shown = f", default `{default}`" if default != "empty" else ""
                lines.append(f"`{option}` ({plain(kind)}{shown})\n: {plain(text) or '-'}\n")
    return "\n".join(lines)


def commands_page() -> str:
    """Return the page of the help texts of every subcommand of ``bert-jax``."""
    os.environ["COLUMNS"] = "100"
    parser = argparse.ArgumentParser(prog="bert-jax")
    subparsers = parser.add_subparsers()
    known = {one.name: one for one in main.COMMANDS}
    for name in registry.names("commands"):
        known |= {one.name: one for one in registry.load("commands", name) if one.name == name}
    text = f"# Commands\n\n{COMMANDS}\n"
    for name in sorted(known):
        known[name].add(subparsers)
        text += f"\n## `bert-jax {name}`\n```text\n{subparsers.choices[name].format_help().rstrip()}\n```\n"
    return text


def reference_page() -> str:
    """Return the page that Sphinx fills from the docstrings of the public names and of the base classes."""
    lines = [
        "# Reference of Python names",
        "",
        "From the docstrings. [Python API](../api.md) has an example of each.",
        "",
    ]
    for name in bert_jax.__all__:
        is_class = inspect.isclass(getattr(bert_jax, name))
        directive = "autoclass" if is_class else "autofunction"
        made = "()" if is_class and not name.startswith("Text") else ""  # the library makes it, not the user
        block = f".. {directive}:: bert_jax.{name}{made}" + ("\n   :members:" if is_class else "")
        lines.append(f"## bert\\_jax.{plain(name)}\n```{{eval-rst}}\n{block}\n```\n")
    lines += [
        "## Base classes",
        "Classes to derive from in a file of your own ([extension points](../design/house.md#extension-points)).",
        "",
    ]
    lines += [f"```{{eval-rst}}\n.. autoclass:: {name}\n   :members:\n```\n" for name in BASES]
    return "\n".join(lines)


# ------------------------------------------------------------------ notebooks


def notebook(page: str) -> str:
    """Return a tutorial as a Jupyter notebook. Blocks of Python and commands are cells; outputs are text."""
    cells = []
    for part in re.split(r"^(```(?:python|bash)\n.*?^```\n)", page, flags=re.MULTILINE | re.DOTALL):
        code = re.fullmatch(r"```(python|bash)\n(.*)\n```\n", part, re.DOTALL)
        if code is None:
            cells.append(("markdown", part.strip()))
        elif code[1] == "python":
            cells.append(("code", code[2]))
        else:
            lines = (re.sub(r"^export (\w+)=", r"%env \1=", line) for line in code[2].splitlines())
            cells.append(("code", "\n".join(line if line.startswith("%") else f"!{line}" for line in lines)))
    content = []
    for number, (kind, text) in enumerate(cells):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text}
        content.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": [one for one in content if one["source"]], "metadata": {"kernelspec": kernel}}
    return json.dumps(whole | {"nbformat": 4, "nbformat_minor": 5}, ensure_ascii=False, indent=1) + "\n"


def write() -> None:
    """Write the pages that changed, and delete those that no longer exist."""
    GENERATED.mkdir(exist_ok=True)
    contents = {page_of(REPOSITORY / name).stem: folder_page(name) for name in FOLDERS}
    contents["choose"] = choosers()
    contents["options-pretrain"] = options_page(
        "Options of pretraining", "bert-jax pretrain", PretrainConfig, extended(RunOptions)
    )
    contents["options-finetune"] = options_page(
        "Options of fine-tuning", "bert-jax finetune", extended(FinetuneConfig), extended(FinetuneRunOptions)
    )
    contents["commands"] = commands_page()
    contents["reference"] = reference_page()
    files = {f"{name}.md": text for name, text in contents.items()}
    for path in [*TUTORIALS.glob("*.md"), *TUTORIALS.parent.glob("zh/tutorial-*.md")]:
        files[f"{path.stem}.ipynb"] = notebook(path.read_text(encoding="utf-8"))
    for path in GENERATED.iterdir():
        if path.name not in files and path.is_file():  # an opened notebook leaves a folder
            path.unlink()
    for name, text in files.items():
        path = GENERATED / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
