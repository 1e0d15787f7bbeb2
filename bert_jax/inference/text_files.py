"""Reader of the input texts and writers of the results of commands. Both work text by text, so that neither the
texts nor the results have to fit in memory."""

import contextlib
import shutil
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from bert_jax.io.conll import conll_sentences
from bert_jax.io.files import json_line, whole_file
from bert_jax.io.text_lines import Each, numbered_lines, opened
from bert_jax.io.untrusted_folder import json_object
from bert_jax.json_values import Json

T = TypeVar("T")
# An input of a command: a text, or an object of a JSON line.
Entry = str | dict[str, Json]
# Size of the header of an npy file, which is written last, because it contains the number of rows.
_HEADER = 128
_BLOCK = 1 << 22
_CONLL = (".conll", ".conllu", ".bio", ".iob", ".iob2")
_PAIR = '; write {"text": "..."}, with "text_pair" for a pair'


def read_texts(
    texts: Sequence[str],
    source: str | None,
    json_lines: bool,
    *,
    of_tasks: bool = False,
    report: Callable[[str], None] | None = None,
) -> "Texts":
    """Return an iterator over ``texts``, the texts on the command line. If there are none, over the texts in the
    file ``source`` ("-" or None: standard input).

    A file has one text per line, and blank lines are skipped; a file whose name ends in .gz is unpacked. With
    ``json_lines`` or the suffix .jsonl, a file has one JSON object per line, which is yielded unchanged.
    ``of_tasks``: an object without ``document`` gets the number of the blank lines before it, and a CoNLL file
    (.conll, .conllu, .bio, .iob, .iob2) gives objects with ``words`` and ``document``, as in fine-tuning.
    ``report`` is called at the end with a line about blank lines between texts, after which the rows of the results
    are not those of the lines. Raises
    ``ValueError`` for a line that cannot be read (the message contains the file name and the line number), and for
    texts both on the command line and in a file; at once for a table (.csv, .tsv) and, without ``json_lines``, for
    a .json file.
    """
    suffix = Path(str(source or "").lower().removesuffix(".gz")).suffix
    if not texts and suffix in (".csv", ".tsv", *([] if json_lines else [".json"])):
        what = f"{suffix[1:]} is not read here" if suffix == ".json" else "a table"
        raise ValueError(
            f"{source}: {what}; use texts, one per line, or JSON lines, which bert-data "
            "records prints from a task file"
        )
    return Texts(_placed(texts, source, json_lines, of_tasks, report))


class Texts(Iterator[Entry]):
    """Inputs of a command. ``where`` is the file and line of the last one; empty on the command line."""

    def __init__(self, placed: Iterator[tuple[str, Entry]]) -> None:
        self._placed, self.where = placed, ""

    def __next__(self) -> Entry:
        self.where, value = next(self._placed)
        return value


def _placed(
    texts: Sequence[str], source: str | None, json_lines: bool, of_tasks: bool, report: Callable[[str], None] | None
) -> Iterator[tuple[str, Entry]]:
    if texts:
        if source is not None:
            raise ValueError("texts on the command line and --input: give only one of them")
        yield from (("", text) for text in texts)
        return
    from_stdin = source in (None, "-")
    name = "standard input" if from_stdin else source
    suffix = Path(str(source).lower().removesuffix(".gz")).suffix
    is_json = json_lines or suffix in (".jsonl", ".ndjson")
    if from_stdin and sys.stdin is None:
        raise ValueError("standard input: closed; pass texts on the command line or --input FILE")
    with contextlib.ExitStack() as stack:
        stream = sys.stdin.buffer if from_stdin else stack.enter_context(opened(Path(str(source))))
        is_empty, block, blank, skipped = True, 0, 0, 0
        lines = numbered_lines(stream, str(name))
        if of_tasks and suffix in _CONLL:
            yield from _sentences(lines, str(name), is_conllu=suffix == ".conllu")
            return
        for number, line in lines:
            if line.strip():
                is_empty, blank, skipped = False, 0, skipped + blank
                where = f"{name}:{number}"
                if "\0" in line:
                    raise ValueError(f"{where}: a NUL character; the file is not text, or not in UTF-8")
                value = json_object(line, where, _PAIR) if is_json else {}
                yield where, ({"document": block, **value} if of_tasks else value) if is_json else line
            else:
                blank += 1
                block += not is_empty
        if is_empty:
            other = "pass texts, --input FILE, or one per line on stdin" if from_stdin else "write one per line"
            raise ValueError(f"{name}: no text given; {other}")
        if skipped and report is not None:
            report(f"{name}: blank lines skipped: {skipped:,}; results follow the order of the other lines")


def _sentences(lines: Iterator[tuple[int, str]], name: str, *, is_conllu: bool) -> Iterator[tuple[str, Entry]]:
    """Yield the place, the words (first column; .conllu: FORM) and the document of each sentence of a CoNLL file;
    if no line begins a document, each sentence is one. Raises ``ValueError`` for a line or a file without words."""
    sentences = [*conll_sentences(lines, is_conllu=is_conllu)]
    if not sentences:
        raise ValueError(f"{name}: no text given; write one word per line")
    are_marked = any(sentence.document for sentence in sentences)
    for number, sentence in enumerate(sentences):
        short = next((line for line, fields in sentence.rows if len(fields) <= is_conllu), None)
        if short is not None:
            raise ValueError(f"{name}:{short}: no word; CoNLL-U has it in the second column")
        words = [fields[int(is_conllu)] for _, fields in sentence.rows]
        document = sentence.document if are_marked else f"sentence {number}"
        yield f"{name}:{sentence.line}", {"words": words, "document": document}


def refuse_blank(texts: Sequence[str]) -> None:
    """Raise ``ValueError`` if one of ``texts``, those on the command line, is blank."""
    if not all(text.strip() for text in texts):
        raise ValueError("a text on the command line is blank; give it words, or omit it")


def with_ids(
    inputs: Iterable[T], run: Callable[[Iterator[T]], Iterable[Mapping[str, object]]]
) -> Iterator[Mapping[str, object]]:
    """Yield the rows of ``run(inputs)``, one for each input, in order. The row of an object with ``id`` begins with
    this id."""
    ids = deque[Json]()

    def noted(value: T) -> T:
        ids.append(value.get("id") if isinstance(value, Mapping) else None)
        return value

    for row in run(Each(inputs, noted)):
        number = ids.popleft()
        yield row if number is None else {"id": number, **row}


def write_json_lines(rows: Iterable[Mapping[str, object]], target: Path | None) -> None:
    """Write each row as a JSON line to ``target`` (None: standard output, flushed row by row).

    The file ``target`` appears only when it is complete.
    """
    if target is None:
        for row in rows:
            print(json_line(row), flush=True)
        return
    with whole_file(target) as partial, partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json_line(row) + "\n")


def write_vectors(rows: Iterable[np.ndarray], target: Path) -> tuple[int, int]:
    """Write ``rows``, which have the same width, as float32[rows, width]; return this shape.

    The format is numpy's npy, or, if the suffix of ``target`` is .npz, npz with one array, ``embeddings``. Rows are
    written one by one, and the file ``target`` appears only when it is complete.
    """
    with whole_file(target) as partial:
        if target.suffix != ".npz":
            with partial.open("wb") as file:
                return _write_npy(rows, file)
        array = partial.with_name(f"{partial.name}.npy")
        try:
            with array.open("w+b") as file, zipfile.ZipFile(partial, "w") as archive:
                shape = _write_npy(rows, file)
                file.seek(0)
                # The header of a zip member contains a checksum, so that the array must be complete.
                with archive.open("embeddings.npy", "w", force_zip64=True) as member:
                    shutil.copyfileobj(file, member, _BLOCK)
        finally:
            array.unlink(missing_ok=True)
        return shape


def _write_npy(rows: Iterable[np.ndarray], file: IO[bytes]) -> tuple[int, int]:
    count = width = 0
    file.write(bytes(_HEADER))
    for row in rows:
        count, width = count + 1, row.size
        file.write(np.ascontiguousarray(row, "<f4").tobytes())
    file.seek(0)
    header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
    np.lib.format.write_array_header_1_0(file, header)
    assert file.tell() == _HEADER, "the header of an npy file has another length"
    return count, width
