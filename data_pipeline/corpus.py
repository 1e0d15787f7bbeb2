"""Readers of raw text: plain text, JSON lines, both also .gz and .zst, text of an installed package, datasets."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import chain, islice, pairwise
from pathlib import Path, PurePath

from bert_jax.config.schema import DataConfig
from data_pipeline.sentences import split_sentences
from data_pipeline.storage import Location, location

TEXT_SUFFIXES = (".txt",)
JSON_SUFFIXES = (".jsonl", ".ndjson")
COMPRESSIONS = (".gz", ".zst")
_SAMPLE_LINES = 200  # lines that decide what a line is
_BLANK_SAMPLE = 10_000  # lines that decide what a blank line is: the first document may be long
_MAX_SENTENCES = 1_000_000  # a longer document is cut, so that a file without blank lines stays readable

Line = tuple[int, str]  # number in the file, from 1, and text


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of a corpus. ``name`` orders the files and is the same on every machine."""

    path: Location
    name: str
    # What a blank line separates. documents; paragraphs: the file is one document; auto: documents if any of its
    # first blocks has several lines, else paragraphs.
    blank_lines: str = "documents"
    # Of a dataset's file: the texts of its records, a document each, from the name of their field.
    records: Callable[[str], Iterator[str]] | None = None

    @property
    def is_json(self) -> bool:
        return _plain_suffix(self.path) in JSON_SUFFIXES


def corpus_of(data: DataConfig) -> list[Source]:
    """Sources of the corpus that a config names; see :func:`list_sources`."""
    return list_sources(data.corpus, split=data.dataset_split, tfds_data_dir=data.tfds_data_dir)


def list_sources(corpus: Sequence[str], *, split: str = "train", tfds_data_dir: str = "") -> list[Source]:
    """Files of a corpus, ordered by name: files, folders (recursive), both also in an object store,
    ``package:NAME``, and ``tfds:`` and ``hf:`` datasets, of which ``split`` is the corpus.

    In folders and packages only .txt, .jsonl and .ndjson count, plain or .gz/.zst; a file named outright may have
    any other suffix and is then plain text. ``ValueError`` for what is missing, empty or named twice.
    """
    if not corpus:
        raise ValueError("the corpus is empty: name text files, folders or package:NAME (data.corpus)")
    sources = [source for entry in corpus for source in _sources_of(entry, split, tfds_data_dir)]
    sources.sort(key=lambda source: (source.name, str(source.path)))
    seen: set[Location] = set()
    for source in sources:
        path = source.path.resolve()
        if path in seen:
            raise ValueError(f"{source.path}: is in the corpus twice, so held-out text would be trained on")
        seen.add(path)
    return sources


def _sources_of(entry: str, split: str, tfds_data_dir: str) -> list[Source]:
    if entry.startswith("package:"):
        return _package_sources(entry)
    if entry.startswith("tfds:"):
        from data_pipeline.prepared import tfds_sources

        return tfds_sources(entry, data_dir=tfds_data_dir, split=split)
    if entry.startswith("hf:"):
        from data_pipeline.prepared import hf_sources

        return hf_sources(entry, split=split)
    path = location(entry)
    if path.is_dir():
        files = [file for file in path.rglob("*") if _is_text_file(file.relative_to(path)) and file.is_file()]
        files = [file for file in files if file.stat().st_size > 0]
        if not files:
            raise ValueError(f"{entry}: the folder holds no text (.txt or .jsonl, plain or .gz/.zst)")
        name = path.resolve().name
        return [
            Source(path=file, name=f"{name}/{file.relative_to(path).as_posix()}", blank_lines="auto")
            for file in files
        ]
    if not path.is_file():
        raise ValueError(f"{entry}: no such file or folder")
    if path.stat().st_size == 0:
        raise ValueError(f"{entry}: the file is empty")
    return [Source(path=path, name=path.name)]


def _package_sources(entry: str) -> list[Source]:
    """Text files of an installed distribution, without importing it; each file is one document."""
    package = entry.removeprefix("package:")
    try:
        distribution = metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError):
        raise ValueError(f"{entry}: the package is not installed (pip install {package})") from None
    sources = []
    for file in distribution.files or []:
        is_metadata = file.parts[0].endswith((".dist-info", ".egg-info")) or file.parts[0] == ".."
        path = Path(str(distribution.locate_file(file)))
        if not is_metadata and _is_text_file(Path(*file.parts)) and path.is_file():
            sources.append(Source(path=path, name=f"{entry}/{file.as_posix()}", blank_lines="paragraphs"))
    if not sources:
        raise ValueError(f"{entry}: the package ships no text files (.txt or .jsonl)")
    return sources


def _plain_suffix(path: Location | PurePath) -> str:
    return PurePath(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def _is_text_file(relative: PurePath) -> bool:
    is_hidden = any(part.startswith(".") for part in relative.parts)
    return not is_hidden and _plain_suffix(relative) in TEXT_SUFFIXES + JSON_SUFFIXES


def read_documents(source: Source, *, line: str, json_field: str) -> Iterator[list[str]]:
    """Documents of a file, each a list of stripped sentences, never empty; read as a stream.

    ``line`` says what a line is: sentence, paragraph (split into sentences) or auto (decided by the file's first
    lines). In JSON lines each line is a document, in a dataset each record; the lines of its field are treated
    likewise. ``ValueError`` names file and line where the text is not UTF-8, not JSON or has no such field.
    """
    if line not in ("auto", "sentence", "paragraph"):
        raise ValueError(f"data.line {line!r}: one of auto, sentence, paragraph")
    lines = _read_lines(source.path)
    if source.is_json or source.records:
        texts = source.records(json_field) if source.records else _json_texts(lines, source.path, json_field)
        blocks: Iterator[list[str]] = filter(None, map(_lines_of, texts))
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
        document = list(chain.from_iterable(map(split_sentences, block))) if by_paragraph else block
        if document:
            yield document


def _are_sentences(lines: Sequence[str]) -> bool:
    """Whether at most one line in twenty holds more than one sentence."""
    return 20 * sum(len(split_sentences(line)) > 1 for line in lines) <= len(lines)


def _blank_lines_separate_documents(source: Source, sample: Sequence[str]) -> bool:
    if source.blank_lines == "auto":
        return any(a and b for a, b in pairwise(sample)) and "" in sample
    return source.blank_lines == "documents"


def _blocks(lines: Iterable[str], *, one_document: bool) -> Iterator[list[str]]:
    """Non-blank lines between blank lines, or all of the file's at once."""
    block: list[str] = []
    for line in lines:
        if line:
            block.append(line)
        if block and ((not line and not one_document) or len(block) >= _MAX_SENTENCES):
            yield block
            block = []
    if block:
        yield block


def _lines_of(text: str) -> list[str]:
    """Non-blank lines of a record's text."""
    return [part for part in map(str.strip, text.split("\n")) if part]


def _json_texts(lines: Iterator[Line], path: Location, field: str) -> Iterator[str]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not valid JSON: {error}") from None
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{path}:{number}: no text in field {field!r} (data.json_field)")
        # JSON can spell a lone surrogate, which is no character.
        yield text.encode("utf-8", "replace").decode()


def _read_lines(path: Location) -> Iterator[Line]:
    """Numbered lines of a UTF-8 file; only a newline ends a line; a byte order mark is dropped."""
    import zstandard

    number = 0
    try:
        for number, raw in enumerate(_raw_lines(path), start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise ValueError(f"{path}:{number}: not valid UTF-8; convert the file first") from None
            yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise ValueError(f"{path}: damaged after line {number}: {error}") from None


def _raw_lines(path: Location) -> Iterator[bytes]:
    if path.suffix == ".zst":
        yield from _zstd_lines(path)
        return
    with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        yield from file


def _zstd_lines(path: Location) -> Iterator[bytes]:
    """Lines of all frames; ``EOFError`` when the last is cut off, which zstandard's own reader passes over."""
    import zstandard

    frame = zstandard.ZstdDecompressor().decompressobj()
    tail = b""
    with path.open("rb") as file:
        while data := file.read(1 << 17):
            while data:
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                *lines, tail = (tail + frame.decompress(data)).split(b"\n")
                yield from lines
                data = frame.unused_data
    if not frame.eof:
        raise EOFError("the compressed data ends early")
    if tail:
        yield tail
