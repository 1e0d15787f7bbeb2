"""Docstrings and messages drawn at random, for readers to judge: which would they write otherwise?

    python studies/structure/prose_sample.py [--commit HEAD] [--docstrings 50] [--messages 30]

Draws from ``bert_jax`` and ``data_pipeline`` of the working tree; the commit's hash is the seed. Messages are texts
of 40 characters or more that are raised, or passed to the functions that report and stop (MESSAGE_CALLS); {...} is
a value. Prints numbered items with their places.
"""

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MESSAGE_CALLS = {"Stop", "ConfigError", "ValueError", "RuntimeError", "FormatError", "report", "line", "print"}
LEAST = 40


def trees() -> Iterator[tuple[str, ast.Module]]:
    for package in ("bert_jax", "data_pipeline"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            yield path.relative_to(REPOSITORY).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def docstrings(name: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield f"{name}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '(module)')}", text


def messages(name: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in MESSAGE_CALLS or called.endswith("Error"):
            for argument in node.args:
                text = text_of(argument)
                if len(text) >= LEAST:
                    yield f"{name}:{argument.lineno}", text


def text_of(node: ast.expr) -> str:
    """The text of a constant or an f-string, with {...} for values; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
            for part in node.values
        )
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--docstrings", type=int, default=50)
    parser.add_argument("--messages", type=int, default=30)
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", arguments.commit], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.strip()
    draw = random.Random(commit)
    found: dict[str, list[tuple[str, str]]] = {"docstrings": [], "messages": []}
    for name, tree in trees():
        found["docstrings"] += docstrings(name, tree)
        found["messages"] += messages(name, tree)
    number = 0
    for kind, items in found.items():
        print(f"== {getattr(arguments, kind)} of {len(items)} {kind}, drawn by {commit}")
        for place, text in draw.sample(items, min(getattr(arguments, kind), len(items))):
            number += 1
            print(f"[{number}] {place}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
