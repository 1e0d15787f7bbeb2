"""Documents of a corpus: plain text and JSON (uncompressed or compressed), and records of datasets."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any

from bert_jax.io.storage import Location
from bert_jax.json_values import Json
from data_pipeline.text.compressed import COMPRESSIONS
from data_pipeline.text.lines import (
    CUT,
    LINE_END,
    Undecodable,
    newlines,
    split_lines,
    stripped,
    text_blocks,
    text_lines,
)
from data_pipeline.text.sentences import is_lower_case, split_sentences

TEXT_SUFFIXES = (".txt", ".text")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
LONGEST_RECORD = 1 << 25  # characters of a JSON value, which is read at once
_SAMPLE_LINES = 400  # lines of a file, which determine whether a line is a sentence or a paragraph
# Places from which they are taken in a file of at least so many bytes, and bytes of each place.
_SAMPLE_PLACES, _LARGE_FILE, _PLACE_BYTES = 16, 1 << 20, 1 << 15
_BLANK_SAMPLE = 10_000  # first lines, which determine whether blank lines separate documents
_SAMPLE_CHARACTERS = 1 << 24  # most characters of these lines
_SAMPLE_RECORDS = 200
_START, _LETTERS = 4000, 200  # characters of a document that show whether it has capitals, and fewest letters
_MAX_SENTENCES = 1_000_000  # of a document; a longer one is split, so that any file fits in memory
# A document of lines of more than 1,000 characters on average is split when it has this many characters more.
_MAX_CHARACTERS = 1 << 23
# Lines that separate documents: of GPT-2's corpora, and the tags of wikiextractor.
_SEPARATORS = re.compile(r"<\|endoftext\|>|<doc(?: [^<>]*)?>|</doc>")
_BETWEEN_RECORDS = re.compile(r"[\s,\[\]]*")
_LONGEST_TOKEN = 16  # characters, more than any word, number sign or escape of JSON has


class Document(list[str]):
    """The sentences of a document. ``label`` is the number of its class, from 1, or 0 for none."""

    label = 0


@dataclass(frozen=True)
class Labels:
    """The field of a JSON line that names the class of the document, and all classes; no field: no classes."""

    field: str = ""
    classes: tuple[str, ...] = ()

    def number(self, record: Mapping[str, Json], place: str) -> int:
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
    encoding: str = "auto"  # data.encoding


@dataclass
class Reading:
    """Record of how a file was read, which ``read_documents`` fills in."""

    name: str
    line: str = ""  # what a line is: sentence or paragraph
    # What blank lines separate: documents or paragraphs; "" for JSON and records of datasets.
    blank_lines: str = ""
    # Numbers of the lines that were cut into pieces of at most LONGEST_LINE characters, each a separate document.
    long_lines: list[int] = field(default_factory=list)

    @property
    def cut_lines(self) -> list[str]:
        """File and number of each of ``long_lines``."""
        return [f"{self.name}:{number}" for number in self.long_lines]


def plain_suffix(path: Location | PurePath) -> str:
    """Return the suffix of a file in lower case, without the compression suffix."""
    suffix = path.suffix.lower()
    return PurePath(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


def read_documents(
    source: Source, *, line: str, json_field: str, labels: Labels = Labels(), reading: Reading | None = None
) -> Iterator[Document]:
    """Yield the documents of a file, each a nonempty list of stripped sentences.

    ``line`` is the unit of text on a line: "sentence", "paragraph" (which is split into sentences) or "auto"
    (determined from lines of the whole file, or from the first lines of a compressed one). Each record of a JSON
    file or a dataset is one document; ``line`` then applies to the lines of the text in ``json_field``. ``labels``
    reads the classes of the documents in JSON; other documents have none. ``reading`` is filled in before the first
    document. Raises ``ValueError``, with the file and the line, if the text is not valid in its encoding or not
    JSON, or if the text field is missing, and for labels that are not in a JSON record.
    """
    reading = reading or Reading(source.name)
    if source.records or _is_json(source):
        if source.records and labels.field:
            raise ValueError(
                f"data.label_field: {source.name} is a file of a dataset; classes are read from JSON lines only; "
                "write the texts and their classes to a .jsonl file"
            )
        texts = (
            ((text, 0) for text in source.records(json_field))
            if source.records
            else (_text_of(record, place, json_field, labels) for place, record in json_records(source))
        )
        stripped_lines = (
            _document([part for part in map(stripped, text_lines(text)) if part], label) for text, label in texts
        )
        blocks: Iterator[Document] = filter(None, stripped_lines)
        head: list[Any] = _limited(blocks, _SAMPLE_RECORDS)
        sample = _spread([list(chain.from_iterable(head))])
        blocks = chain(head, blocks)
    else:
        lines = split_lines(text_blocks(source.path, source.encoding), reading.long_lines.append)
        stream = map(stripped, map(itemgetter(1), lines))
        head = _limited(stream, _BLANK_SAMPLE)
        sample = _spread([head, *_far_lines(source)])
        separates = _blank_lines_separate_documents(source, head)
        reading.blank_lines = "documents" if separates else "paragraphs"
        blocks = _blocks(chain(head, stream), one_document=not separates)
    reading.line = line if line != "auto" else "sentence" if _are_sentences(sample) else "paragraph"
    has_capitals = not is_lower_case(" ".join(sample[::4]))
    for block in blocks:
        document = block
        if reading.line == "paragraph":
            start = " ".join(text[:_START] for text in islice(block, 100))[:_START]
            lower = is_lower_case(start, _LETTERS) or (not has_capitals and is_lower_case(start))
            document = _document((one for text in block for one in split_sentences(text, lower)), block.label)
        if document:
            yield document


@contextmanager
def undecodable_together(sources: Iterable[Source]) -> Iterator[None]:
    """Raise one ``ValueError`` for all files of ``sources`` that are not in their encoding if the block raises
    one."""
    try:
        yield
    except Undecodable:
        places = []
        for source in sources:
            try:
                for _ in () if source.records else text_blocks(source.path, source.encoding):
                    pass
            except Undecodable as error:
                places.append(str(error).partition("; ")[0])
            except ValueError:  # damaged: reported when it is read
                continue
        more = f" and {len(places) - 20} more files" if len(places) > 20 else ""
        raise ValueError(
            f"{', '.join(places[:20])}{more}; name the encoding of the whole corpus in data.encoding, such as "
            "cp1252, latin-1 or gb18030, or convert the files to UTF-8"
        ) from None


def _document(sentences: Iterable[str], label: int) -> Document:
    document = Document(sentences)
    document.label = label
    return document


def _limited(items: Iterator[Any], count: int) -> list[Any]:
    """Return the next ``count`` texts or documents, or fewer if they have too many characters."""
    taken, size = [], 0
    for item in islice(items, count):
        taken.append(item)
        size += len(item) if isinstance(item, str) else sum(map(len, item))
        if size > _SAMPLE_CHARACTERS:
            break
    return taken


def _far_lines(source: Source) -> Iterator[list[str]]:
    """Yield lines of a large, uncompressed, local file in UTF-8, from places at equal distances."""
    path = source.path
    if not isinstance(path, Path) or source.encoding != "auto" or path.suffix.lower() in COMPRESSIONS:
        return
    size = path.stat().st_size
    if size < _LARGE_FILE:
        return
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, b"\0\0"):  # UTF-16 or UTF-32
            return
        for place in range(1, _SAMPLE_PLACES):
            file.seek(size * place // _SAMPLE_PLACES)
            yield list(map(stripped, file.read(_PLACE_BYTES).decode("utf-8", "ignore").splitlines()[1:-1]))


def _spread(groups: Iterable[Sequence[str]]) -> list[str]:
    """Return nonblank lines, equally many of each group, at equal distances."""
    held = [[line for line in group if line and line != CUT and not _is_separator(line)] for group in groups]
    most = max(1, _SAMPLE_LINES // len(held))
    return [line for lines in held for line in lines[:: max(1, len(lines) // most)]]


def _is_separator(line: str) -> bool:
    return line[:1] == "<" and _SEPARATORS.fullmatch(line) is not None


def _are_sentences(lines: Sequence[str]) -> bool:
    """Return True if at most one line in twenty contains more than one sentence, and these lines hold at most a
    third of the text."""
    lower = is_lower_case(" ".join(lines[::4]))
    several = [line for line in lines if len(split_sentences(line, lower)) > 1]
    size = sum(map(len, lines))
    return 20 * len(several) <= len(lines) and 3 * sum(map(len, several)) <= size


def _blank_lines_separate_documents(source: Source, sample: Sequence[str]) -> bool:
    if any(map(_is_separator, sample)):
        return False
    if source.blank_lines == "auto":
        return any(a and b for a, b in pairwise(sample)) and "" in sample
    return source.blank_lines == "documents"


def _blocks(lines: Iterable[str], *, one_document: bool) -> Iterator[Document]:
    """Yield each block of lines between blank lines, or, with ``one_document``, between separators."""
    block, size = Document(), 0
    for line in lines:
        if not line or line == CUT or _is_separator(line):
            is_end = line != "" or not one_document
        else:
            block.append(line)
            size += len(line) - 1000
            is_end = len(block) >= _MAX_SENTENCES or size >= _MAX_CHARACTERS
        if block and is_end:
            yield block
            block, size = Document(), 0
    if block:
        yield block


# ------------------------------------------------------------------ JSON


def _is_json(source: Source) -> bool:
    """Return True if a file holds JSON: by its suffix, or, unless it is .txt, by an object on its first line."""
    suffix = plain_suffix(source.path)
    if suffix in JSON_SUFFIXES or suffix in TEXT_SUFFIXES:
        return suffix in JSON_SUFFIXES
    try:
        return isinstance(next((value for _, value in json_records(source)), None), dict)
    except Undecodable:
        raise
    except ValueError:
        return False


def json_records(source: Source) -> Iterator[tuple[str, Json]]:
    """Yield (file and line, value) for every JSON value of a file: values one after the other, on one or several
    lines each, or the elements of an array.

    Raises ``ValueError``, with the file and the line, for other content, for a value of more than
    ``LONGEST_RECORD`` characters, and for an array without an end.
    """
    path, decode = source.path, json.JSONDecoder().raw_decode
    text, number, wanted, count, opened, closed = "", 1, 1, 0, False, False
    for block in chain(newlines(text_blocks(path, source.encoding), LINE_END), [None]):
        text += block or ""
        at = 0
        while block is None or len(text) - at >= wanted:
            start = _end_of_gap(text, at)
            place = text.find("[", at, start)
            if place >= 0 and count:
                line = number + text.count("\n", at, place)
                raise ValueError(f"{path}:{line}: not valid JSON: a list among records; write one record per line")
            opened = opened or place >= 0
            closed = closed or text.find("]", at, start) >= 0
            number += text.count("\n", at, start)
            at = start
            if at == len(text):
                break
            try:
                value, end = decode(text, at)
                fault = f"more than {LONGEST_RECORD:,} characters" if end - at > LONGEST_RECORD else ""
            except json.JSONDecodeError as error:
                size, fault = len(text) - at, error.msg
                is_cut = fault.startswith("Unterminated") or error.pos > len(text) - _LONGEST_TOKEN
                if block is not None and is_cut and size <= LONGEST_RECORD:
                    wanted = 2 * size  # a value that ends in a later block
                    break
                fault = f"more than {LONGEST_RECORD:,} characters" if is_cut and size > LONGEST_RECORD else fault
            except (ValueError, RecursionError) as error:
                fault = str(error).partition(";")[0]
            if fault:
                raise ValueError(f"{path}:{number}: not valid JSON: {fault}; write one record per line")
            yield f"{path}:{number}", value
            number += text.count("\n", at, end)
            at, wanted, count, closed = end, 1, count + 1, False
        text = text[at:]
    if opened and not closed:
        raise ValueError(f"{path}:{number}: the JSON array has no end; restore the file")


def _end_of_gap(text: str, at: int) -> int:
    match = _BETWEEN_RECORDS.match(text, at)
    assert match is not None
    return match.end()


def _text_of(record: Any, place: str, field: str, labels: Labels) -> tuple[str, int]:
    """Return the text of a record, and the number of its class."""
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        held = f" ({json.dumps(record[field])[:40]})" if isinstance(record, dict) and field in record else ""
        raise ValueError(
            f"{place}: no text in field {field!r}{held}; set data.json_field to a text field, or remove the record"
        )
    # JSON may contain lone surrogates, which cannot be encoded in UTF-8.
    return text.encode("utf-8", "replace").decode(), labels.number(record, place)
