"""Documents of a corpus: plain text and JSON lines (uncompressed, .gz or .zst), and records of datasets."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import PurePath
from typing import Any

from bert_jax.io.storage import Location
from data_pipeline.text.compressed import DamagedFile, read_blocks
from data_pipeline.text.sentences import split_sentences

TEXT_SUFFIXES = (".txt",)
JSON_SUFFIXES = (".jsonl", ".ndjson")
COMPRESSIONS = (".gz", ".zst")
_SAMPLE_LINES = 200  # first lines, which determine whether a line is a sentence or a paragraph
_BLANK_SAMPLE = 10_000  # first lines, which determine whether blank lines separate documents
_MAX_SENTENCES = 1_000_000  # of a document; a longer one is split, so that any file fits in memory

Line = tuple[int, str]  # (number in the file, from 1, and text)


class Document(list[str]):
    """The sentences of a document. ``label`` is the number of its class, from 1, or 0 for none."""

    label = 0


@dataclass(frozen=True)
class Labels:
    """The field of a JSON line that names the class of the document, and all classes; no field: no classes."""

    field: str = ""
    classes: tuple[str, ...] = ()

    def number(self, record: Mapping[str, Any], place: str) -> int:
        """Return the number of the class of ``record``, from 1; 0 if the field is missing or null. Raises
        ``ValueError``, with ``place``, if the value is not one of the classes."""
        value = record.get(self.field) if self.field else None
        if value is None:
            return 0
        name = json.dumps(value) if isinstance(value, bool) else str(value)
        if name not in self.classes:
            raise ValueError(
                f"{place}: {value!r} in field {self.field!r} is not one of the classes {', '.join(self.classes)}; "
                "add it to data.classes, or remove the field from the line"
            )
        return self.classes.index(name) + 1


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of a corpus. Files are sorted by ``name``, which is the same on every machine."""

    path: Location
    name: str
    # Blocks between blank lines: documents, paragraphs (the file is one document), or auto, which means documents
    # if one of the first blocks has several lines, otherwise paragraphs.
    blank_lines: str = "documents"
    # For a file of a dataset: function that yields the texts of the field with a given name, one document each.
    records: Callable[[str], Iterator[str]] | None = None

    @property
    def is_json(self) -> bool:
        return _plain_suffix(self.path) in JSON_SUFFIXES


def _plain_suffix(path: Location | PurePath) -> str:
    return PurePath(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def is_text_file(relative: PurePath) -> bool:
    """Return True if the suffix is that of a text file, and neither the file nor one of its folders is hidden."""
    is_hidden = any(part.startswith(".") for part in relative.parts)
    return not is_hidden and _plain_suffix(relative) in TEXT_SUFFIXES + JSON_SUFFIXES


def read_documents(source: Source, *, line: str, json_field: str, labels: Labels = Labels()) -> Iterator[Document]:
    """Yield the documents of a file, each a nonempty list of stripped sentences.

    ``line`` is the unit of text on a line: "sentence", "paragraph" (which is split into sentences) or "auto"
    (determined from the first lines). Each line of a JSON lines file and each record of a dataset is one document;
    ``line`` then applies to the lines of the text in ``json_field``. ``labels`` reads the classes of the documents
    in JSON lines; other documents have none. Raises ``ValueError``, with the file and the line, if the text is not
    valid UTF-8 or JSON, or if the text field is missing, and for labels that are not in a JSON line.
    """
    lines = numbered_lines(source.path)
    if source.is_json or source.records:
        if source.records and labels.field:
            raise ValueError(
                f"data.label_field: {source.name} is a file of a dataset; classes are read from JSON lines only; "
                "write the texts and their classes to a .jsonl file"
            )
        texts = (
            ((text, 0) for text in source.records(json_field))
            if source.records
            else _json_texts(lines, source.path, json_field, labels)
        )
        stripped_lines = (
            _document([part for part in map(str.strip, text.split("\n")) if part], label) for text, label in texts
        )
        blocks: Iterator[Document] = filter(None, stripped_lines)
        sample = list(islice(blocks, _SAMPLE_LINES))
        first = list(chain.from_iterable(sample))[:_SAMPLE_LINES]
        blocks = chain(sample, blocks)
    else:
        head = list(islice(lines, _BLANK_SAMPLE))
        stripped = [text.strip() for _, text in head]
        first = [text for text in stripped[:_SAMPLE_LINES] if text]
        stream = (text.strip() for _, text in chain(head, lines))
        blocks = _blocks(stream, one_document=not _blank_lines_separate_documents(source, stripped))
    by_paragraph = line == "paragraph" or (line == "auto" and not _are_sentences(first))
    for block in blocks:
        document = block
        if by_paragraph:
            document = _document(chain.from_iterable(map(split_sentences, block)), block.label)
        if document:
            yield document


def _document(sentences: Iterable[str], label: int) -> Document:
    document = Document(sentences)
    document.label = label
    return document


def _are_sentences(lines: Sequence[str]) -> bool:
    """Return True if at most one line in twenty contains more than one sentence."""
    return 20 * sum(len(split_sentences(line)) > 1 for line in lines) <= len(lines)


def _blank_lines_separate_documents(source: Source, sample: Sequence[str]) -> bool:
    if source.blank_lines == "auto":
        return any(a and b for a, b in pairwise(sample)) and "" in sample
    return source.blank_lines == "documents"


def _blocks(lines: Iterable[str], *, one_document: bool) -> Iterator[Document]:
    """Yield each block of lines between blank lines, or, with ``one_document``, all nonblank lines as one block."""
    block = Document()
    for line in lines:
        if line:
            block.append(line)
        if block and ((not line and not one_document) or len(block) >= _MAX_SENTENCES):
            yield block
            block = Document()
    if block:
        yield block


def _json_texts(lines: Iterator[Line], path: Location, field: str, labels: Labels) -> Iterator[tuple[str, int]]:
    """Yield the text of each line, and the number of its class."""
    for number, line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not valid JSON: {error}") from None
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{path}:{number}: no text in field {field!r}; set data.json_field to a text field")
        # JSON may contain lone surrogates, which cannot be encoded in UTF-8.
        yield text.encode("utf-8", "replace").decode(), labels.number(record, f"{path}:{number}")


def numbered_lines(path: Location) -> Iterator[Line]:
    """Yield (number from 1, line) for every line of a UTF-8 file.

    Only a newline ends a line; a byte order mark is removed. Raises ``ValueError`` if the file is not UTF-8 or
    damaged.
    """
    number = 0
    try:
        for number, raw in enumerate(_raw_lines(path), start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise ValueError(f"{path}:{number}: not valid UTF-8; convert the file to UTF-8") from None
            yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile, DamagedFile) as error:
        raise ValueError(
            f"{path}: the compressed file is damaged after line {number}: {error}; restore it"
        ) from None


def _raw_lines(path: Location) -> Iterator[bytes]:
    if path.suffix == ".zst":
        yield from _lines(read_blocks(path))
        return
    with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        yield from file


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    tail = b""
    for block in blocks:
        *lines, tail = (tail + block).split(b"\n")
        yield from lines
    if tail:
        yield tail
