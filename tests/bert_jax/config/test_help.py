"""``--help``: every option with the comment above its field."""

import ast
import contextlib
import dataclasses
import inspect
import io
from typing import get_type_hints

import pytest

from bert_jax.config import PretrainConfig, RunOptions, load_config


def comments(section):
    """Field -> the comment above it, as one text."""
    lines = inspect.getsource(section).splitlines()
    found = {}
    for node in ast.parse("\n".join(lines)).body[0].body:
        if isinstance(node, ast.AnnAssign):
            above = []
            for line in reversed(lines[: node.lineno - 1]):
                if not line.strip().startswith("#"):
                    break
                above.insert(0, line.strip().lstrip("# "))
            found[node.target.id] = " ".join(above)
    return found


def test_help_shows_every_option_with_its_comment():
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        load_config(PretrainConfig, ["--model.num_layers", "3", "--help"], extra=RunOptions)
    assert ended.value.code == 0
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
