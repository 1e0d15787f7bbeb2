"""Jobs of ``bert-data clean`` that remove repeated lines and find near duplicates.

Candidates are documents that agree in a band of their MinHash signatures. Groups of documents connected by
candidates are independent of each other, so they are compared in parallel. In a group, documents are visited in the
order of the corpus; a document is dropped if the Jaccard similarity of its 5-grams to an earlier, kept candidate is
at least the threshold. A dropped document is therefore always similar to a document that is kept.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from functools import lru_cache, partial

import numpy as np

from bert_jax.io.files import local_copy, write_whole
from bert_jax.io.storage import Location
from bert_jax.json_values import Json
from data_pipeline.contrib.clean.drop_counts import Tally, excerpt
from data_pipeline.contrib.clean.scanning import count_ranges, first_copies
from data_pipeline.contrib.clean.word_hashes import band_hashes, jaccard, line_keys, min_hashes, ngrams, word_hashes
from data_pipeline.contrib.clean.workspace import (
    TALLIES,
    Chunks,
    Plan,
    example,
    load_arrays,
    load_chunks,
    load_columns,
    load_plan,
    load_raw,
    save_arrays,
    save_counts,
    save_raw,
    save_text,
    source_of,
    split_text,
)

_JOB_BYTES = 8 << 20  # text that one job compares, except for larger groups
_SLICE_BYTES = 2 << 20  # text whose 5-grams are made at a time
_CACHE_BYTES = 64 << 20  # of sets of 5-grams
_CANDIDATES, _GROUPS, _JOBS = "candidates.bin", "groups.bin", "jobs.bin"


# ------------------------------------------------------------------ repeated lines, signatures


@lru_cache(maxsize=1)
def _boilerplate(folder: Location) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the hashes of repeated lines uint64[K], sorted, their numbers of documents and first documents."""
    names = [f"{number:06d}.npz" for number in count_ranges(folder)]
    keys, counts, first = load_columns(folder, "counted", names, key="u8", count="i8", first="i8")
    return keys, counts, first


def sign_chunk(folder: Location, name: str) -> None:
    """Drop the exact duplicates and the repeated lines of a chunk, and sign what remains (a worker job)."""
    plan = load_plan(folder)
    final = plan.path("signed", f"{name}.npz")
    if final.exists():
        return
    tally = Tally()
    arrays = load_arrays(plan.path("scanned", f"{name}.npz"))
    documents = split_text(plan.path("text", f"{name}.txt").read_bytes(), arrays["bytes"])
    kept = _drop_copies(plan, name, documents, arrays["number"], tally)
    words, lengths = _drop_lines(plan, name, documents, kept, arrays["number"], tally)
    kept = [document for document in kept if documents[document]]
    clean = plan.options.clean
    bands, rows = clean.banding
    hashes = np.zeros((bands, 0), np.uint64)
    if clean.near_duplicates and kept:
        values, sizes = ngrams(words, lengths, arrays["content"][kept])
        hashes = band_hashes(min_hashes(values, sizes, bands * rows), bands, rows)
    save_raw(plan.path("signed", f"{name}.bands"), hashes)
    sizes = save_text(plan.path("kept", f"{name}.txt"), [documents[document] for document in kept])
    write_whole(plan.path(TALLIES, f"sign-{name}.json"), tally.as_json())
    save_arrays(final, document=np.array(kept, np.int64), number=arrays["number"][kept], bytes=sizes)


def _drop_copies(plan: Plan, name: str, documents: list[list[str]], numbers: np.ndarray, tally: Tally) -> list[int]:
    """Return the indices of the documents of a chunk that are not exact duplicates of earlier ones."""
    chunks = load_chunks(plan.folder, "scanned")
    start = int(chunks.first[chunks.names.index(name)])
    first = first_copies(plan, start, start + len(documents))
    kept = []
    for index, document in enumerate(documents):
        if first[index] == start + index:
            kept.append(index)
            continue
        tally.add("exact_duplicate", documents=1, characters=sum(map(len, document)))

        def make(index: int = index, document: list[str] = document) -> dict[str, Json]:
            place = _place(plan, "scanned", int(first[index]))
            fields = {"equal_to": example(plan, *place), "text": excerpt("\n".join(document))}
            return example(plan, source_of(name), int(numbers[index]), **fields)

        tally.offer("exact_duplicate", (source_of(name), int(numbers[index])), 0, make)
    return kept


def _place(plan: Plan, stage: str, document: int) -> tuple[int, int]:
    """Return (source, index in the source) of a document of a stage."""
    chunk, index = load_chunks(plan.folder, stage).chunk(document)
    room = "scanned" if stage == "scanned" else "signed"
    return source_of(chunk), int(load_arrays(plan.path(room, f"{chunk}.npz"))["number"][index])


def _drop_lines(
    plan: Plan, name: str, documents: list[list[str]], kept: list[int], numbers: np.ndarray, tally: Tally
) -> tuple[np.ndarray, np.ndarray]:
    """Remove the repeated lines from the ``kept`` documents; a document that gets too short becomes empty.

    Returns the words of the nonempty documents uint64[W], and the number of words of each, int64[D].
    """
    chunks = load_chunks(plan.folder, "scanned")
    start = int(chunks.first[chunks.names.index(name)])
    lines = [line for document in kept for line in documents[document]]
    owners = np.repeat(np.array(kept, np.int64), [len(documents[document]) for document in kept])
    words, counts = word_hashes(lines)
    keys, numbers_of_documents, first = _boilerplate(plan.folder)
    repeated = np.zeros(len(lines), bool)
    if len(keys) and len(lines):
        own = line_keys(words, counts)
        at = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
        is_long = counts >= max(plan.options.clean.boilerplate_words, 1)
        repeated = (keys[at] == own) & (first[at] != owners + start) & is_long
        for index in np.flatnonzero(repeated):
            document = int(owners[index])
            number, line = int(numbers[document]), int(index - np.searchsorted(owners, document)) + 1
            tally.add("boilerplate", lines=1, characters=len(lines[index]))
            fields = {"line": line, "documents": int(numbers_of_documents[at[index]])}
            make = partial(example, plan, source_of(name), number, **fields, text=excerpt(lines[index]))
            tally.offer("boilerplate", (source_of(name), number), line, make)
    remaining = np.bincount(owners[~repeated], counts[~repeated], minlength=len(documents)).astype(np.int64)
    changed = set(owners[repeated].tolist())
    is_line_kept = ~repeated
    for document in sorted(changed):
        mine = slice(*np.searchsorted(owners, [document, document + 1]).tolist())
        held = [line for line, gone in zip(lines[mine], repeated[mine], strict=True) if not gone]
        if not held or remaining[document] < plan.options.clean.least_words:
            tally.add("boilerplate", documents=1, characters=sum(map(len, held)))
            left, text = int(remaining[document]), excerpt("\n".join(held))
            make = partial(example, plan, source_of(name), int(numbers[document]), words_left=left, text=text)
            tally.offer("boilerplate", (source_of(name), int(numbers[document])), 0, make)
            held = []
            is_line_kept[mine] = False
        documents[document] = held
    lengths = remaining[[document for document in kept if documents[document]]]
    return words[np.repeat(is_line_kept, counts)], lengths


# ------------------------------------------------------------------ candidates


def find_candidates(folder: Location, _: int) -> None:
    """Find the groups of documents that are connected by equal bands, and divide them into jobs.

    Writes the numbers of these documents, sorted by group and document, the number of the first document of each
    group, and the borders of the jobs: int64 each. Writes the counts of the stage ``kept``.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    plan = load_plan(folder)
    names = load_chunks(folder, "scanned").names
    counts = {name: len(load_arrays(plan.path("signed", f"{name}.npz"))["number"]) for name in names}
    save_counts(plan, "kept", counts)
    total = sum(counts.values())
    labels = np.arange(total)
    bands = plan.options.clean.banding[0] if plan.options.clean.near_duplicates and total else 0
    for band in range(bands):
        column = np.concatenate(
            [
                load_raw(plan.path("signed", f"{name}.bands"), "<u8", count, 8 * band * count)
                for name, count in counts.items()
            ]
        )
        order = np.argsort(column, kind="stable")
        same = np.flatnonzero(np.diff(column[order]) == 0)
        pairs = labels[order[same]], labels[order[same + 1]]
        graph = coo_array((np.ones(len(same), np.int8), pairs), shape=(total, total))
        labels = connected_components(graph, directed=False)[1][labels]
    _save_groups(plan, labels)


def _save_groups(plan: Plan, labels: np.ndarray) -> None:
    """Write the groups of two or more documents with equal ``labels`` int[D], and the jobs that compare them."""
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    sizes = np.diff(starts, append=len(order))
    first = np.repeat(order[starts], sizes)  # the first document of the group of every document
    chosen = np.repeat(sizes > 1, sizes)
    documents, groups = order[chosen], first[chosen]
    order = np.lexsort((documents, groups))
    documents, groups = documents[order].astype("<i8"), groups[order].astype("<i8")
    save_raw(plan.folder / _CANDIDATES, documents)
    save_raw(plan.folder / _GROUPS, groups)
    begins = np.flatnonzero(np.diff(groups, prepend=-1))
    texts = np.cumsum(_text_sizes(plan, documents))
    before = np.concatenate([[0], texts])[begins]
    jobs = begins[np.diff(before // _JOB_BYTES, prepend=-1) != 0]
    save_raw(plan.folder / _JOBS, np.append(jobs, len(documents)).astype("<i8"))


def _text_sizes(plan: Plan, documents: np.ndarray) -> np.ndarray:
    """Return the size in bytes of each kept document in ``documents``, int64[M]."""
    sizes = np.zeros(len(documents), np.int64)
    order = np.argsort(documents)
    at = 0
    for name, indices in load_chunks(plan.folder, "kept").locate(documents[order]):
        sizes[order[at : at + len(indices)]] = load_arrays(plan.path("signed", f"{name}.npz"))["bytes"][indices]
        at += len(indices)
    return sizes


def comparison_jobs(folder: Location) -> list[int]:
    """Return the indices of the jobs that compare candidates."""
    return list(range(len(load_raw(load_plan(folder).folder / _JOBS, "<i8")) - 1))


# ------------------------------------------------------------------ comparison


def compare(folder: Location, job: int) -> None:
    """Compare the candidates of one job (a worker job).

    Writes the documents to drop: ``document`` and ``similar_to`` int64[M], numbers of the stage ``kept``, and
    ``similarity`` float64[M].
    """
    plan = load_plan(folder)
    path = plan.path("compared", f"{job:06d}.npz")
    if path.exists():
        return
    start, stop = load_raw(plan.folder / _JOBS, "<i8")[job : job + 2].tolist()
    documents, groups = (
        load_raw(plan.folder / name, "<i8", stop - start, 8 * start) for name in (_CANDIDATES, _GROUPS)
    )
    comparison = _Comparison(plan)
    ends = np.cumsum(_text_sizes(plan, documents))
    pieces = np.flatnonzero(np.diff((ends - ends[:1]) // _SLICE_BYTES, prepend=-1, append=-1))
    for low, high in zip(pieces[:-1].tolist(), pieces[1:].tolist(), strict=True):
        comparison.visit(documents[low:high], groups[low:high])
    dropped = np.array(comparison.dropped, np.float64).reshape(-1, 3)
    columns = {"document": dropped[:, 0].astype(np.int64), "similar_to": dropped[:, 1].astype(np.int64)}
    save_arrays(path, **columns, similarity=dropped[:, 2])


class _Comparison:
    """Visits candidates in order of (group, document); keeps the first of several similar documents."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._threshold = plan.options.clean.near_duplicates
        self._group = -1
        self._buckets: dict[int, list[int]] = {}  # hash of a band -> kept documents of the group
        self._sizes: dict[int, int] = {}  # kept document of the group -> number of 5-grams
        self._sets: OrderedDict[int, np.ndarray] = OrderedDict()  # of some of the kept documents
        self._held = 0  # bytes of these sets
        self.dropped: list[tuple[int, int, float]] = []

    def visit(self, documents: np.ndarray, groups: np.ndarray) -> None:
        """Visit ``documents`` int64[M] of the groups ``groups`` int64[M]."""
        sets, bands = _sets(self._plan, documents)
        for index, (document, group) in enumerate(zip(documents.tolist(), groups.tolist(), strict=True)):
            if group != self._group:
                self._group, self._held = group, 0
                for held in (self._buckets, self._sizes, self._sets):
                    held.clear()
            own = bands[:, index].tolist()
            if not self._is_similar(document, sets[index], own):
                for band in own:
                    self._buckets.setdefault(band, []).append(document)
                self._sizes[document] = len(sets[index])
                self._remember(document, sets[index])

    def _is_similar(self, document: int, own: np.ndarray, bands: list[int]) -> bool:
        """Drop ``document`` if it is similar to a kept document; documents with the most equal bands come first."""
        shared = Counter(other for band in bands for other in self._buckets.get(band, ()))
        for other, _ in sorted(shared.items(), key=lambda item: (-item[1], item[0])):
            sizes = len(own), self._sizes[other]
            if min(sizes) / max(sizes) < self._threshold:
                continue  # the similarity is at most the ratio of the sizes
            similarity = jaccard(own, self._recall(other))
            if similarity >= self._threshold:
                self.dropped.append((document, other, similarity))
                return True
        return False

    def _remember(self, document: int, values: np.ndarray) -> None:
        self._sets[document] = values
        self._held += values.nbytes
        while self._held > _CACHE_BYTES and len(self._sets) > 1:
            self._held -= self._sets.popitem(last=False)[1].nbytes

    def _recall(self, document: int) -> np.ndarray:
        """Return the 5-grams of a kept document, from memory or made again from its text."""
        if document not in self._sets:
            self._remember(document, _sets(self._plan, np.array([document]))[0][0])
        self._sets.move_to_end(document)
        return self._sets[document]


@lru_cache(maxsize=256)
def _text_ends(folder: Location, name: str) -> np.ndarray:
    return np.cumsum(load_arrays(load_plan(folder).path("signed", f"{name}.npz"))["bytes"])


def _sets(plan: Plan, documents: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the sorted, distinct 5-grams of kept ``documents`` int64[M], and their bands uint64[bands, M]."""
    chunks = load_chunks(plan.folder, "kept")
    order = np.argsort(documents)
    sets: list[np.ndarray] = [np.zeros(0, np.uint64)] * len(documents)
    bands = np.zeros((plan.options.clean.banding[0], len(documents)), np.uint64)
    at = 0
    for name, indices in chunks.locate(documents[order]):
        places = order[at : at + len(indices)]
        at += len(indices)
        for place, values in zip(places.tolist(), _chunk_sets(plan, chunks, name, indices), strict=True):
            sets[place] = values
        held = load_raw(plan.path("signed", f"{name}.bands"), "<u8").reshape(len(bands), -1)
        bands[:, places] = held[:, indices]
    return sets, bands


def _chunk_sets(plan: Plan, chunks: Chunks, name: str, indices: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the sorted, distinct 5-grams of the documents ``indices`` int64[M] of a chunk."""
    ends = _text_ends(plan.folder, name)
    lines: list[str] = []
    lengths, empty = [], []
    arrays = load_arrays(plan.path("signed", f"{name}.npz"))
    contents = load_arrays(plan.path("scanned", f"{name}.npz"))["content"]
    with local_copy(plan.path("kept", f"{name}.txt")).open("rb") as file:
        for index in indices.tolist():
            size = int(arrays["bytes"][index])
            file.seek(int(ends[index]) - size)
            document = file.read(size).decode().split("\n")[:-1]
            lengths.append(len(document))
            lines += document
            empty.append(contents[arrays["document"][index]])
    words, counts = word_hashes(lines)
    totals = np.add.reduceat(counts, np.cumsum([0, *lengths[:-1]]))
    values, sizes = ngrams(words, totals, np.array(empty, np.uint64))
    for end, size in zip(np.cumsum(sizes).tolist(), sizes.tolist(), strict=True):
        yield np.unique(values[end - size : end])
