"""Figures of the structure: circles between rooms, sizes of files and functions, imports, lines of code.

    python benchmarks/house.py [--base DIR]

Counts the checkout in the working folder from its syntax trees; nothing is imported. ``--base`` names another
checkout to compare the code lines with. Exit code 3 for a circle between rooms, a function above 60 lines, an
objective named in ``bert_jax/training``, or, with ``--base``, more than 2,000 code lines more. Modules that import
more than 12 modules of the project, files above 400 lines and rooms of more than 13 files are listed as advice: no
file is cut to meet a limit.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("bert_jax", "data_pipeline")
MOST_IMPORTS, MOST_FUNCTION, MOST_FILE, FEW_LINES, MOST_FILES = 12, 60, 400, 40, 13
MORE_LINES = 2_000
OBJECTIVE = re.compile(r"(?<![a-z])(mlm|nsp)(?![a-z])", re.IGNORECASE)


class House:
    """Modules of a checkout by dotted name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
        self.texts = {self._module(path): path.read_text(encoding="utf-8") for path in paths}
        self.trees = {module: ast.parse(text) for module, text in self.texts.items()}
        self.names = {self._module(path): path.relative_to(root).as_posix() for path in paths}
        self.imports = {module: self._imports(module) for module in self.trees}

    def _module(self, path: Path) -> str:
        return ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")

    def _imports(self, module: str) -> set[str]:
        """Return the modules of the project that ``module`` imports, anywhere in its code."""
        imported = set()
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names if alias.name in self.trees}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    imported |= {full} if full in self.trees else {node.module} & set(self.trees)
        return imported - {module}

    def circles(self) -> list[list[str]]:
        """Sets of top rooms (``bert_jax/model``) that import each other, directly or by way of others."""
        edges: dict[str, set[str]] = defaultdict(set)
        for module, imported in self.imports.items():
            for other in imported:
                here, there = self._top_room(module), self._top_room(other)
                if here != there and not there.endswith("__init__.py"):
                    edges[here].add(there)
        reached = {room: self._reach(room, edges) for room in edges}
        groups = {
            tuple(sorted({room} | {other for other in reached[room] if room in reached.get(other, ())}))
            for room in edges
            if room in reached[room]
        }
        return sorted(map(list, groups))

    def _top_room(self, module: str) -> str:
        """The package's folder that holds ``module``; a module beside the folders is a room of its own."""
        return "/".join(Path(self.names[module]).parts[:2])

    @staticmethod
    def _reach(room: str, edges: dict[str, set[str]]) -> set[str]:
        seen, todo = set[str](), [room]
        while todo:
            new = edges.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    def many_imports(self) -> dict[str, int]:
        """Return the modules above the limit of imports."""
        return {self.names[m]: len(i) for m, i in sorted(self.imports.items()) if len(i) > MOST_IMPORTS}

    def long_functions(self) -> dict[str, int]:
        """Return the functions above the limit of lines, from ``def`` to the end."""
        return {
            f"{self.names[module]}:{node.name}": node.end_lineno - node.lineno + 1
            for module, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno - node.lineno + 1 > MOST_FUNCTION
        }

    def file_lines(self) -> dict[str, int]:
        """Return the number of lines of every file except ``__init__.py``."""
        names = {m: n for m, n in self.names.items() if not n.endswith("__init__.py")}
        return {name: self.texts[module].count("\n") for module, name in names.items()}

    def full_rooms(self) -> dict[str, int]:
        """Return the rooms with too many files, not counting ``__init__.py``."""
        counts: dict[str, int] = defaultdict(int)
        for name in self.file_lines():
            counts[Path(name).parent.as_posix()] += 1
        return {room: count for room, count in sorted(counts.items()) if count > MOST_FILES}

    def code_lines(self) -> int:
        """Return the number of lines with code, excluding blank lines, comments and docstrings."""
        return sum(len(set(_code_lines(text, self.trees[module]))) for module, text in self.texts.items())

    def objectives_named(self) -> list[str]:
        """Places in ``bert_jax/training`` where an objective stands by name."""
        return [
            f"{self.names[module]}:{number}: {line.strip()}"
            for module, text in self.texts.items()
            if module.startswith("bert_jax.training")
            for number, line in enumerate(text.splitlines(), 1)
            if OBJECTIVE.search(line)
        ]


def _code_lines(text: str, tree: ast.Module) -> Iterator[int]:
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        is_described = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_described and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            yield from (line for line in range(token.start[0], token.end[0] + 1) if line not in docstrings)


def main() -> int:
    """Count, print and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, help="another checkout, to compare the code lines with")
    arguments = parser.parse_args()
    house = House(Path.cwd())
    lines = house.file_lines()
    misses = {
        "circles between rooms": house.circles(),
        f"functions above {MOST_FUNCTION} lines": house.long_functions(),
        "objectives named in training": house.objectives_named(),
    }
    advice = {
        f"modules with more than {MOST_IMPORTS} imports": house.many_imports(),
        f"files above {MOST_FILE} lines": {name: n for name, n in lines.items() if n > MOST_FILE},
        f"rooms with more than {MOST_FILES} files": house.full_rooms(),
        f"files below {FEW_LINES} lines": {name: n for name, n in lines.items() if n < FEW_LINES},
    }
    for title, found in {**misses, **advice}.items():
        print(f"{title}: {len(found)}")
        for entry in found.items() if isinstance(found, dict) else found:
            print("  ", *([entry] if isinstance(entry, str) else entry))
    code = house.code_lines()
    passed = not any(misses.values())
    figures = {title: len(found) for title, found in (misses | advice).items()} | {"code lines": code}
    if arguments.base:
        more = code - House(arguments.base).code_lines()
        figures["more code lines"] = more
        passed &= more <= MORE_LINES
        print(f"code lines: {code:,}, {more:,} more than {arguments.base} (bar {MORE_LINES:,})")
    print(json.dumps(figures))
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
