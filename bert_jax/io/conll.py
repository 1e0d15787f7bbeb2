"""Sentences of CoNLL files: one word per line with columns, a blank line between sentences.

CoNLL-U is the format of Universal Dependencies (Nivre et al. 2020), https://universaldependencies.org/format.html.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from bert_jax.io.text_lines import numbered_lines, opened

_DOCUMENT = "-DOCSTART-"
# Ids of multiword ranges (1-2) and of empty nodes (1.1), which are not words.
_NOT_A_WORD = re.compile(r"\d+[-.]\d+")
# Columns of CoNLL-U: ID, FORM, UPOS, HEAD, DEPREL.
_ID, _FORM, _UPOS, _HEAD, _DEPREL, _COLUMNS = 0, 1, 3, 6, 7, 10


class ConllSentence(NamedTuple):
    """A sentence of a CoNLL file.

    It has the number of its first line, the index of its document (0: before the first document), and for every
    word the line number and the columns.
    """

    line: int
    document: int
    rows: list[tuple[int, list[str]]]


class ParsedSentence(NamedTuple):
    """A sentence of a treebank.

    Each word has a form, a part of speech, the index of its head (-1: the root) and its relation to the head.
    """

    words: tuple[str, ...]
    upos: tuple[str, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]


def conll_sentences(lines: Iterable[tuple[int, str]], *, is_conllu: bool) -> Iterator[ConllSentence]:
    """Yield the sentences of (number, line) pairs; documents are numbered from 1.

    Columns are separated by tabs or, in a line without tabs, by spaces. A document begins at a -DOCSTART- line.
    With ``is_conllu``, comments, multiword ranges (1-2) and empty nodes (1.1) are ignored, and a ``# newdoc``
    comment begins a document; otherwise, "#" is a word.
    """
    document, first = 0, 0
    rows: list[tuple[int, list[str]]] = []
    for number, line in lines:
        is_document = line.startswith(_DOCUMENT) or (is_conllu and line.startswith("# newdoc"))
        if rows and (is_document or not line.strip(" \t")):
            yield ConllSentence(first, document, rows)
            rows = []
        if is_document:
            document += 1
        elif line.strip(" \t") and not (is_conllu and line.startswith("#")):
            line = line.rstrip(" \t")
            fields = (
                [part.strip(" ") for part in line.split("\t")] if "\t" in line else re.split(" +", line.strip(" "))
            )
            if is_conllu and _NOT_A_WORD.fullmatch(fields[0]):
                continue
            first = first if rows else number
            rows.append((number, fields))
    if rows:
        yield ConllSentence(first, document, rows)


def read_treebank(path: Path) -> Iterator[ParsedSentence]:
    """Yield the sentences of a CoNLL-U file (.gz: compressed). Raises ``ValueError``, with file and line, for a
    missing or damaged file, a line without the ten columns, ids that do not count from 1, a head that is not a word
    of the sentence, and a file without sentences."""
    empty = True
    for sentence in conll_sentences(_lines(path), is_conllu=True):
        empty = False
        count, heads = len(sentence.rows), []
        for number, (line, fields) in enumerate(sentence.rows, 1):
            if len(fields) != _COLUMNS:
                problem = f"{len(fields)} column(s), but a word of CoNLL-U has {_COLUMNS}, separated by tabs"
                raise ValueError(f"{path}:{line}: {problem}; give a file of this format")
            if fields[_ID] != str(number):
                problem = f"id {fields[_ID]!r}, but word {number} of a sentence has the id {number}"
                raise ValueError(f"{path}:{line}: {problem}; write a blank line after each sentence")
            head = fields[_HEAD]
            if not head.isdecimal() or int(head[:19]) > count or int(head) == number:
                remedy = f"use 0, or the id of another word, up to {count}"
                raise ValueError(f"{path}:{line}: head {head!r} is not allowed; {remedy}")
            heads.append(int(head) - 1)
        columns = list(zip(*(fields for _, fields in sentence.rows), strict=True))
        yield ParsedSentence(columns[_FORM], columns[_UPOS], tuple(heads), columns[_DEPREL])
    if empty:
        raise ValueError(f"{path}: no sentences; give a CoNLL-U file, as text or .gz")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a CoNLL-U file, as text or .gz")
    with opened(path) as file:
        yield from numbered_lines(file, path)
