"""The prose of docstrings, comments, messages and help texts against the rules of docs/glossary.md.

``python tests/test_prose.py`` lists every hit with its place.
"""

import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# Words that have another term, or another place in the sentence.
WORDS = {
    "heeds": r"\bheed(s|ed|ing)?\b",
    "told": r"\b(is|are|was|were|be|been|being) told\b(?! apart)|\btold (by|of|to|the|in|that|when)\b",
    "says, said": r"\b(is|are|was|were|be) said\b|\bsays (whether|which|what|how|where)\b",
    "leave it out": r"\bleave (it|them) out\b",
    "has no use": r"\bha(s|ve) no use\b",
    "of which 0 means": r"\bof which 0 means\b",
    "British spelling": (
        r"\b\w*(minimis|optimis|initialis|finalis|normalis|tokenis|organis|recognis|summaris|serialis|vectoris|randomis)"
        r"(e|es|ed|er|ers|ing|ation|ations)\b|\b\w*(colour|behaviour|neighbour|favour|honour|labour)\w*\b"
        r"|\b(centre|centred|metre|licence|grey|labelled|labelling|modelled|cancelled|travelled)\b"
    ),
}
# The first word of a docstring that makes a noun clause of it.
OPENING = re.compile(r"(What|Whether|Where|How|Which|When|Who)\b(?!.*\?)")


def sources() -> list[Path]:
    """Every Python file of the packages and the run scripts."""
    files = [path for package in ("bert_jax", "data_pipeline") for path in (REPOSITORY / package).rglob("*.py")]
    return sorted([*files, *REPOSITORY.glob("run_*.py")])


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments and the strings with a blank of a Python source: docstrings, messages."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_text = token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
        if is_text and " " in token.string:
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """(line, docstring) of a module, its classes and its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and (found := ast.get_docstring(node)):
            yield node.body[0].lineno, found


def hits() -> list[tuple[str, Path, int, str]]:
    """(rule, file, line, text) of everything that breaks a rule."""
    found = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(REPOSITORY)
        for line, doc in docstrings(text):
            if OPENING.match(doc):
                found.append(("a docstring opens with a noun clause", name, line, doc.splitlines()[0]))
        for line, part in prose(text):
            for rule, pattern in WORDS.items():
                if re.search(pattern, part, re.IGNORECASE):
                    found.append((rule, name, line, part.strip()))
    return found


def test_prose() -> None:
    assert not (found := hits()), "\n".join(f"{name}:{line}: {rule}: {text}" for rule, name, line, text in found)


if __name__ == "__main__":
    everything = hits()
    for rule, name, line, text in everything:
        print(f"{name}:{line}: {rule}: {text}")
    for rule, count in collections.Counter(rule for rule, *_ in everything).most_common():
        print(f"{count:5d} {rule}", file=sys.stderr)
