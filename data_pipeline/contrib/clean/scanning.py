"""First jobs of ``bert-data clean``: apply the rules on single documents, find exact duplicates and count lines."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.storage import Location
from data_pipeline.build.token_store import content_hash, cut_documents
from data_pipeline.contrib.clean.drop_counts import Tally, excerpt
from data_pipeline.contrib.clean.options import CleanConfig
from data_pipeline.contrib.clean.rules import Line, check_line, is_plain, language_of, load_ftfy
from data_pipeline.contrib.clean.word_hashes import line_keys, word_hashes
from data_pipeline.contrib.clean.workspace import (
    TALLIES,
    Plan,
    chunk_name,
    example,
    load_arrays,
    load_chunks,
    load_plan,
    load_raw,
    save_arrays,
    save_counts,
    save_raw,
    save_text,
    source_of,
    write_whole,
)
from data_pipeline.text.documents import Document, Reading

_KEY_BYTES = 12  # of a line in a .keys file
_RANGE_KEYS = 1 << 20  # lines that one counting job sorts
FIRST_NAME = "first.bin"  # int64[D]: for every scanned document, the first document with the same content


def cut_source(
    plan: Plan, index: int, readings: list[Reading] | None = None
) -> Iterator[tuple[str, int, list[Document]]]:
    """Yield (name of the chunk, index of its first document in the source, documents) for a source. How it is read
    is appended to ``readings``."""
    # Lines stay as they are: whether they are sentences is decided when shards are built.
    data = DataConfig(line="sentence", json_field=plan.options.data.json_field)
    first = 0
    for piece, documents in enumerate(cut_documents([plan.sources[index]], data, readings, plan.sources)):
        yield chunk_name(index, piece), first, documents
        first += len(documents)


def scan_chunk(folder: Location, name: str, first: int, documents: Sequence[list[str]]) -> int:
    """Apply the rules on single documents to a chunk; return its number of characters (a worker job).

    ``first`` is the index in the source of the first of the ``documents``.
    """
    plan = load_plan(folder)
    characters = sum(len(line) for document in documents for line in document)
    if plan.path("scanned", f"{name}.npz").exists():
        return characters
    tally, source = Tally(), source_of(name)
    tally.add(str(source), documents_in=len(documents), characters_in=characters)
    scan = _Scan(plan, source, tally)
    repaired = [scan.encoding(number, document) for number, document in enumerate(documents, first)]
    kept = [(number, document) for number, document in enumerate(repaired, first) if document]
    words, counts = word_hashes([line for _, document in kept for line in document])
    owners = np.repeat(np.arange(len(kept)), [len(document) for _, document in kept])
    totals = np.bincount(owners, counts, minlength=len(kept)).astype(np.int64)
    passes = np.array(
        [scan.length(*one, int(total)) and scan.language(*one) for one, total in zip(kept, totals, strict=True)],
        bool,
    )
    chosen = [one for one, is_kept in zip(kept, passes, strict=True) if is_kept]
    keys = line_keys(words, counts)
    long = (counts >= max(plan.options.clean.boilerplate_words, 1)) & passes[owners]
    places = np.cumsum(passes) - 1  # of the kept documents among the chosen ones
    pairs = np.unique(np.stack([keys[long], places[owners[long]].astype(np.uint64)]), axis=1)
    sizes = save_text(plan.path("text", f"{name}.txt"), [document for _, document in chosen])
    save_raw(plan.path("scanned", f"{name}.keys"), pairs[0], pairs[1].astype("<u4"))
    write_whole(plan.path(TALLIES, f"scan-{name}.json"), tally.as_json())
    save_arrays(
        plan.path("scanned", f"{name}.npz"),
        number=np.array([number for number, _ in chosen], np.uint32),
        content=np.array([content_hash(document) for _, document in chosen], np.uint64),
        bytes=sizes,
    )
    return characters


class _Scan:
    """The rules on one document; ``number`` is its index in the source."""

    def __init__(self, plan: Plan, source: int, tally: Tally) -> None:
        self._clean: CleanConfig = plan.options.clean
        self._source, self._tally = source, tally
        self._example = partial(example, plan, source)
        self._languages = frozenset(self._clean.languages)

    def _drop(self, rule: str, number: int, document: Sequence[str], **fields: object) -> None:
        self._tally.add(rule, documents=1, characters=sum(map(len, document)))
        make = partial(self._example, number, **fields, text=excerpt("\n".join(document)))
        self._tally.offer(rule, (self._source, number), 0, make)

    def encoding(self, number: int, document: list[str]) -> list[str]:
        """Return the lines that remain; an empty list if the document is dropped."""
        if self._clean.encoding == "off" or is_plain("\n".join(document)):
            return document
        ftfy, repair = load_ftfy(), self._clean.encoding == "repair"
        checked = [check_line(line, ftfy, repair=repair) for line in document]
        broken = sum(len(line) for line, result in zip(document, checked, strict=True) if not result.text)
        share = broken / sum(map(len, document))
        if share > self._clean.broken_share or not any(result.text for result in checked):
            self._drop("encoding", number, document, broken_share=round(share, 3))
            return []
        for index, (line, result) in enumerate(zip(document, checked, strict=True), start=1):
            if result.text != line:
                self._count_line(number, index, line, result)
        return [result.text for result in checked if result.text]

    def _count_line(self, number: int, index: int, line: str, result: Line) -> None:
        self._tally.add(
            "encoding", lines=int(not result.text), characters=0 if result.text else len(line),
            lines_repaired=int(result.is_repaired and bool(result.text)),
            control_characters_removed=result.removed if result.text else 0,
        )  # fmt: skip
        fields = {"repaired": excerpt(result.text)} if result.text else {}
        make = partial(self._example, number, line=index, text=excerpt(line), **fields)
        self._tally.offer("encoding", (self._source, number), index, make)

    def length(self, number: int, document: list[str], words: int) -> bool:
        """Return True if the number of words is allowed."""
        if words >= self._clean.least_words and (words <= self._clean.most_words or not self._clean.most_words):
            return True
        self._drop("length", number, document, words=words)
        return False

    def language(self, number: int, document: list[str]) -> bool:
        """Return True if the language is allowed."""
        if not self._languages:
            return True
        name, probability = language_of(document)
        if name in self._languages:
            return True
        self._drop("language", number, document, language=name, probability=round(probability, 3))
        return False


def find_exact(folder: Location, names: Sequence[str]) -> None:
    """Find exact duplicates among the documents of the chunks ``names``, and write the counts of the stage
    ``scanned``."""
    plan = load_plan(folder)
    contents = {name: load_arrays(plan.path("scanned", f"{name}.npz"))["content"] for name in names}
    save_counts(plan, "scanned", {name: len(content) for name, content in contents.items()})
    content = np.concatenate([np.zeros(0, np.uint64), *(contents[name] for name in sorted(contents))])
    first = np.arange(len(content))
    if plan.options.clean.exact_duplicates:
        order = np.argsort(content, kind="stable")
        starts = np.flatnonzero(np.diff(content[order], prepend=~content[order[:1]]))
        first[order] = np.repeat(order[starts], np.diff(starts, append=len(order)))
    save_raw(plan.folder / FIRST_NAME, first.astype("<i8"))


def first_copies(plan: Plan, start: int, stop: int) -> np.ndarray:
    """Return, for the scanned documents [start, stop), the first documents with the same content, int64."""
    return load_raw(plan.folder / FIRST_NAME, "<i8", stop - start, 8 * start)


# ------------------------------------------------------------------ lines that repeat


def count_ranges(folder: Location) -> list[int]:
    """Return the indices of the ranges of line hashes that are counted one by one, so that memory stays small."""
    plan = load_plan(folder)
    if not plan.options.clean.boilerplate:
        return []
    names = load_chunks(folder, "scanned").names
    size = sum(plan.path("scanned", f"{name}.keys").stat().st_size for name in names)
    return list(range(1 + size // (_KEY_BYTES * _RANGE_KEYS)))


def count_lines(folder: Location, number: int) -> None:
    """Count the documents of every line whose hash is in the range ``number`` (a worker job).

    Writes the lines that occur in enough documents: ``key`` uint64[K], sorted; ``count`` and ``first`` int64[K],
    the number of documents and the first of them.
    """
    plan = load_plan(folder)
    path = plan.path("counted", f"{number:06d}.npz")
    if path.exists():
        return
    ranges = len(count_ranges(folder))
    borders = np.array([(1 << 64) * edge // ranges for edge in range(1, ranges)], np.uint64)
    keys, owners = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for name, start, stop in load_chunks(folder, "scanned"):
        held, documents = _keys_in_range(plan, name, borders, number)
        is_first = first_copies(plan, start, stop) == np.arange(start, stop)
        chosen = is_first[documents]
        keys.append(held[chosen])
        owners.append(documents[chosen].astype(np.int64) + start)
    key, owner = np.concatenate(keys), np.concatenate(owners)
    order = np.argsort(key, kind="stable")
    key, owner = key[order], owner[order]
    starts = np.flatnonzero(np.diff(key, prepend=~key[:1]))
    counts = np.diff(starts, append=len(key))
    many = counts >= plan.options.clean.boilerplate
    save_arrays(path, key=key[starts[many]], count=counts[many], first=owner[starts[many]])


def _keys_in_range(plan: Plan, name: str, borders: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the line hashes of a chunk in one range uint64[K], and the documents that contain them uint32[K]."""
    path = plan.path("scanned", f"{name}.keys")
    total = path.stat().st_size // _KEY_BYTES
    keys = load_raw(path, "<u8", total)
    low = int(np.searchsorted(keys, borders[number - 1])) if number > 0 else 0
    high = int(np.searchsorted(keys, borders[number])) if number < len(borders) else total
    return keys[low:high], load_raw(path, "<u4", high - low, 8 * total + 4 * low)
