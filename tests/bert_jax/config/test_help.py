"""``--help``: every option with the comment above its field."""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
from typing import get_type_hints

import pytest

from bert_jax import registry
from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.config import FinetuneConfig, PretrainConfig, RunOptions
from bert_jax.config.loader import Settings, read_settings, show_help
from bert_jax.config.options import extended, options_of


def comments(section):
    """Field -> the comment above it, as one text."""
    lines = inspect.getsource(section).splitlines()
    found = {}
    for node in ast.parse("\n".join(lines)).body[0].body:
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            above = []
            for line in reversed(lines[: node.lineno - 1]):
                if not line.strip().startswith("#"):
                    break
                above.insert(0, line.strip().lstrip("# "))
            found[node.target.id] = " ".join(above)
    return found


def test_help_shows_every_option_with_its_comment():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        given = read_settings(["--model.num_layers", "3"])
        show_help(PretrainConfig, given, "program", extended(RunOptions), whole=True)
    shown = "".join(out.getvalue().split())
    types = {**get_type_hints(PretrainConfig), "": RunOptions}
    for name, section in types.items():
        described = comments(section)
        assert set(described) == {field.name for field in dataclasses.fields(section)}
        for field, comment in described.items():
            key = f"{name}.{field}" if name else field
            assert comment, f"{key} has no comment"
            assert f"--{key}" in shown, key
            assert "".join(comment.split()) in shown, key


@pytest.mark.parametrize(
    ("config", "extra"),
    [(PretrainConfig, RunOptions), (FinetuneConfig, FinetuneRunOptions)],
)
def test_help_shows_the_usual_options_and_how_to_see_the_others(config, extra, capsys):
    config, extra = extended(config), extended(extra)
    every = {*options_of(config), *options_of(extra)}
    assert len(config.USUAL) == 20 and every.issuperset(config.USUAL)
    show_help(config, Settings(), "program", extra)
    shown = capsys.readouterr().out
    assert {*re.findall(r"^  --(\S+) ", shown, re.MULTILINE)} == {*config.USUAL}
    assert shown.endswith(f"\nAll {len(every)} options: program --help_all\n")
    show_help(config, Settings(), "program", extra, whole=True)
    assert {*re.findall(r"^  --(\S+) ", capsys.readouterr().out, re.MULTILINE)} == every


@pytest.mark.parametrize("kind", ["encoder", "objective"])
def test_help_describes_the_parts_of_rooms(kind, capsys):
    show_help(PretrainConfig, Settings(), "program", whole=True)
    shown = "".join(capsys.readouterr().out.split())
    rooms = [name for name in registry.names(f"{kind}s") if not registry.is_of_trunk(f"{kind}s", name)]
    assert len(rooms) > 3
    for name in rooms:
        title = registry.load(f"{kind}_options", name).TITLE
        assert title and "".join(f"{name}: {title[0].lower()}{title[1:]}.".split()) in shown


@pytest.mark.parametrize(
    ("words", "option", "sentence"),
    [
        ("", "loss.label_smoothing", "Requires task.kind classification, choice, tagging, joint or sentence. "
         "Also requires sentence.loss softmax if task.kind is sentence, and tagging.crf false if task.kind is "
         "tagging or joint."),
        ("--task.kind sentence", "loss.label_smoothing", "Requires sentence.loss softmax."),
        ("--task.kind classification", "loss.label_smoothing", ""),
        ("", "features.frozen_encoder", "Requires sentence.loss softmax if task.kind is sentence."),
        ("", "task.window_overlap", "Requires task.kind classification, regression or multi_label, and "
         "task.truncation windows."),
        ("", "sentence.margin", "Requires sentence.loss triplet."),
        ("", "qa.n_best", ""),
    ],
)  # fmt: skip
def test_help_says_what_an_option_requires(words, option, sentence, capsys):
    show_help(FinetuneConfig, read_settings(words.split()), "program", whole=True)
    shown = capsys.readouterr().out
    text = re.search(rf"^  --{re.escape(option)} .*\n((?:      .*\n)+)", shown, re.MULTILINE)[1]
    assert " ".join(text.split()).endswith(sentence or ".") and ("Requires" in text) == bool(sentence)
    assert words or "google-research/bert). Requires task.kind qa.\n" in shown
