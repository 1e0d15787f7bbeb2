"""``bert-data wikipedia`` extracts the text files of a corpus from MediaWiki XML dumps.

One process reads the dumps and sends chunks of wikitext to workers, which write the paragraphs of each chunk to a
file; the chunks are joined in order. The output depends only on the dumps. A build writes to the folder
``.NAME.partial`` next to the output folder NAME and renames it to NAME when it is complete. If a build is killed,
the next one keeps every finished chunk and file.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bert_jax.io.files import remove_tree, whole_file, write_whole
from bert_jax.io.storage import Location, ObjectPath
from bert_jax.json_values import Json
from data_pipeline.build.identity import HASHES_NAME, file_settings
from data_pipeline.build.workers import Workers, exclusive, processor_count, remove_scratch, scratch_file
from data_pipeline.contrib.wikipedia.dump import MOST_CHARACTERS, Dump
from data_pipeline.contrib.wikipedia.paragraphs import article_paragraphs
from data_pipeline.text.corpus import WIKIPEDIA_NAME

_SETTINGS = "settings.json"
_CHUNK_CHARACTERS = 1 << 20  # characters of wikitext that one job reads
_CHUNKS_PER_FILE = 128
_WRITTEN, _PARAGRAPHS, _CHARACTERS = "articles written", "paragraphs", "characters"
_EMPTY = "articles without a paragraph"
# Last line of a build that a signal has stopped.
STOPPED = "stopped while reading the dump; finished parts are kept: run the same command to continue"


def extract_wikipedia(
    dumps: Sequence[Location], output: Location, *, workers: int, report: Callable[[str], None]
) -> Counter[str]:
    """Write the paragraphs of the articles in ``dumps`` to text files in the folder ``output``; return the counts.

    A paragraph is a line, and a blank line separates documents. The files are named ``articles-00000.txt`` and so
    on; ``wikipedia.json`` holds the dumps and the counts. ``workers`` is the number of processes; 0 means one per
    processor. Raises ``ValueError`` (one line) if a dump is missing, damaged or not a dump, if the dumps contain no
    article with a paragraph, or if ``output`` exists with other contents.
    """
    if isinstance(output, ObjectPath):
        raise ValueError(f"--output {output}: not a local folder; name a local folder and copy it to the store")
    files = _named(dumps)
    if finished := _finished(output, files):
        report(f"{output}: complete, nothing to do")
        return finished
    output = output.absolute()
    partial = output.with_name(f".{output.name}.partial")
    with ExitStack() as stack:
        stack.enter_context(exclusive(partial))
        settings = file_settings("dumps", files, partial)
        _start(partial, settings)
        counts = _write_files(dumps, partial, stack.enter_context(Workers(workers or processor_count())), report)
        if not counts[_WRITTEN]:
            remove_tree(partial)
            raise ValueError(f"{dumps[0]}: no article with a paragraph in {len(dumps)} dump(s); name another dump")
        write_whole(partial / WIKIPEDIA_NAME, _json({**settings, "counts": dict(sorted(counts.items()))}))
        (partial / _SETTINGS).unlink()
        remove_tree(partial / "done")
        partial.rename(output)
        (output / ".lock").unlink()
    return counts


def _named(dumps: Sequence[Location]) -> list[tuple[str, Location]]:
    """Return the names and paths of the dumps. Raises ``ValueError`` if one is missing or named twice."""
    if not dumps:
        raise ValueError("bert-data wikipedia: no dump; run: bert-data wikipedia DUMP.xml.bz2 --output FOLDER")
    for path in dumps:
        if not path.is_file():
            raise ValueError(
                f"{path}: no such file; name a MediaWiki XML dump (.xml, or compressed: .bz2, .gz, .zst)"
            )
    if len({path.resolve() for path in dumps}) < len(dumps):
        raise ValueError("bert-data wikipedia: the same dump is named twice; name each part once")
    return [(path.name, path) for path in dumps]


def _finished(output: Path, files: Sequence[tuple[str, Location]]) -> Counter[str] | None:
    """Return the counts of a complete build of the same dumps in ``output``; None if there is no folder yet."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    try:
        stored = json.loads((output / WIKIPEDIA_NAME).read_text())
    except (OSError, ValueError):
        stored = None  # not a folder of this command
    if isinstance(stored, dict) and "counts" in stored:
        wanted = file_settings("dumps", files, output, stored)
        if all(stored.get(name) == value for name, value in wanted.items()):
            return Counter(stored["counts"])
    raise ValueError(f"{output}: exists and was not made from these dumps; name another folder, or delete this one")


def _start(partial: Path, settings: Mapping[str, Json]) -> None:
    """Empty the folder if it belongs to a build of other dumps."""
    text = _json(settings)
    path = partial / _SETTINGS
    if not path.is_file() or path.read_text() != text:
        for old in partial.iterdir():
            if old.name not in (".lock", HASHES_NAME):
                remove_tree(old) if old.is_dir() else old.unlink()
        write_whole(path, text)
    (partial / "done").mkdir(exist_ok=True)
    remove_scratch(partial / "done")


def _write_files(
    dumps: Sequence[Location], partial: Path, workers: Workers, report: Callable[[str], None]
) -> Counter[str]:
    """Write all files of the corpus into ``partial``; return the counts of pages and of their contents."""
    pages: Counter[str] = Counter()
    done = partial / "done"
    sizes: list[int] = []  # known numbers of chunks, one per file

    def jobs() -> Iterator[tuple[Path, list[str], dict[str, str]]]:
        for number, (texts, namespaces) in enumerate(_chunks(dumps, pages)):
            place, file = number % _CHUNKS_PER_FILE, number // _CHUNKS_PER_FILE
            sizes[file:] = [place + 1]
            if not (done / f"{file:05d}.json").is_file() and not _counts_path(_chunk(done, number)).is_file():
                yield _chunk(done, number), texts, namespaces

    for written, _ in enumerate(workers.run(write_chunk, jobs()), start=1):
        if written % _CHUNKS_PER_FILE == 0:
            report(f"read {pages['pages']:,} pages")
            _join_files(partial, len(sizes) - 1)  # the last one may still grow
    _join_files(partial, len(sizes), last=sizes[-1:])
    return sum((_read_counts(done / f"{file:05d}.json") for file in range(len(sizes))), pages)


def _chunk(done: Path, number: int) -> Path:
    return done / f"chunk-{number:07d}.txt"


def _counts_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _chunks(dumps: Sequence[Location], pages: Counter[str]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield lists of wikitext of articles, about ``_CHUNK_CHARACTERS`` characters each, and the namespaces."""
    for path in dumps:
        dump = Dump(path)
        texts: list[str] = []
        size = 0
        for page in dump.pages():
            pages["pages"] += 1
            kind = (
                "pages of other namespaces" if page.namespace != "0"
                else "redirects" if page.is_redirect
                else "pages without wikitext" if page.model != "wikitext"
                else f"pages longer than {MOST_CHARACTERS:,} characters" if page.is_too_long
                else "articles"
            )  # fmt: skip
            pages[kind] += 1
            if kind != "articles":
                continue
            texts.append(page.text)
            size += len(page.text)
            if size >= _CHUNK_CHARACTERS:
                yield texts, dump.namespaces
                texts, size = [], 0
        if texts:
            yield texts, dump.namespaces


def write_chunk(path: Path, texts: Sequence[str], namespaces: Mapping[str, str]) -> None:
    """Write the paragraphs of articles to ``path``, and the numbers of articles, paragraphs and characters to a
    file next to it. Runs as a worker job."""
    counts: Counter[str] = Counter()
    documents = []
    for text in texts:
        paragraphs = article_paragraphs(text, namespaces, counts)
        counts[_WRITTEN if paragraphs else _EMPTY] += 1
        counts[_PARAGRAPHS] += len(paragraphs)
        counts[_CHARACTERS] += sum(map(len, paragraphs))
        if paragraphs:
            documents.append("\n".join(paragraphs) + "\n")
    with scratch_file(path) as part:
        part.write_bytes("\n".join(documents).encode())
    with scratch_file(_counts_path(path)) as part:  # last: it marks a finished chunk
        part.write_text(_json(counts))


def _join_files(partial: Path, count: int, last: Sequence[int] = ()) -> None:
    """Join the chunks of each of the first ``count`` files whose chunks are all finished. ``last`` holds the
    number of chunks of the last file."""
    done = partial / "done"
    for file in range(count):
        size = last[0] if last and file == count - 1 else _CHUNKS_PER_FILE
        chunks = [_chunk(done, number) for number in range(file * _CHUNKS_PER_FILE, file * _CHUNKS_PER_FILE + size)]
        marker = done / f"{file:05d}.json"
        if not marker.is_file() and all(_counts_path(chunk).is_file() for chunk in chunks):
            _join(chunks, partial / f"articles-{file:05d}.txt")
            write_whole(marker, _json(sum((_read_counts(_counts_path(chunk)) for chunk in chunks), Counter())))
            for chunk in chunks:
                chunk.unlink()
                _counts_path(chunk).unlink()


def _join(chunks: Sequence[Path], path: Path) -> None:
    """Write the nonempty chunks to ``path``, with a blank line between them; no file if all chunks are empty."""
    full = [chunk for chunk in chunks if chunk.stat().st_size]
    if not full:
        return
    with whole_file(path) as part, part.open("wb") as target:
        for i, chunk in enumerate(full):
            target.write(b"\n" if i else b"")
            with chunk.open("rb") as source:
                shutil.copyfileobj(source, target)


def _read_counts(path: Path) -> Counter[str]:
    return Counter(json.loads(path.read_text()))


def _json(value: Mapping[str, Json]) -> str:
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
