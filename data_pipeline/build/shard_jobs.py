"""Jobs that convert a token store to shards. The first jobs write parts; then one job merges each shard.

A part consists of a table and of the serialized instances of consecutive documents in one pass, sorted by shard and
then by a random sort key (the place of an instance in its shard; of its document if rows are contiguous). The
merge of a shard reads the records of this shard from all parts, sorted by this key. With ``data.packing``, the
records of parts are those of ``data_pipeline.build.packing``, and the merge packs them into rows. Parts and shards
depend only on the store and the settings, so their bytes do not depend on how the jobs are distributed.
"""

import json
import os
import resource
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from bert_jax.hashing import hash_key
from bert_jax.io.files import local_copy, write_whole
from bert_jax.io.storage import Location, ObjectPath
from data_pipeline.build.instances import (
    IS_NEXT,
    Instances,
    InstanceSettings,
    RandomNext,
    Segment,
    dropped_tokens,
    instance_keys,
    make_features,
    plan_document,
    shard_and_place,
)
from data_pipeline.build.long_sentences import cut_long_sentences
from data_pipeline.build.packing import PackedShape, encode_sequences, pack, row_features, sequences_per_row
from data_pipeline.build.token_store import TokenStore, cached_tokenizer
from data_pipeline.build.workers import scratch_file
from data_pipeline.shards.shard_files import ShardEntry, scan_shard, write_records
from data_pipeline.shards.tfexample import encode_examples, value_bounds

PART_TOKENS = 1 << 18  # approximate number of tokens of a part
MOST_PARTS = 4096  # larger corpora get larger parts
_BLOCK_CELLS = 1 << 18  # cells (rows x tokens) of one batch of instances
_MERGE_ROWS = 1024
_PACKED_ROWS = 256  # packed rows that are encoded together
_PACKING_NAME = "packing.json"
# Counts of a part: tokens of its documents in rows (in A or a B of the document), pairs, those with the label 1 (a
# random or swapped B), predictions (0 if they are chosen when read).
COUNTS = ("tokens_in_rows", "pairs", "second_label", "predictions")
_AFTER_COUNTS = 8 * len(COUNTS)
_REQUESTS = 16  # concurrent requests to an object store


@dataclass(frozen=True, kw_only=True)
class SplitJob:
    """Arguments of all jobs of one split.

    The folder ``build`` contains ``documents.bin`` (uint64[D], the indices of the documents of the split),
    ``continuation.npy`` (bool[V], pieces that continue a word) and ``clusters.npy`` (uint8[V], ``cluster_flags``).
    The jobs write to its subfolders ``parts`` and ``shards``.
    """

    store: Location
    build: Location
    num_shards: int
    settings: InstanceSettings

    @property
    def is_packed(self) -> bool:
        """True if the rows of the shards hold several sequences."""
        return self.settings.data.packing != "none"

    @property
    def has_classes(self) -> bool:
        """True if the shards hold the classes of documents."""
        return self.settings.data.label_field != ""


# A part: (path without suffix, pass, first document, end document), with documents counted within the split.
Part = tuple[Location, int, int, int]


def shard_name(shard: int, num_shards: int) -> str:
    """Return the file name of the shard with the index ``shard``."""
    return f"shard-{shard:05d}-of-{num_shards:05d}.tfrecord"


def cut_parts(tokens: np.ndarray, passes: int) -> list[tuple[int, int]]:
    """Split D documents into ranges [first, end) that yield parts of similar size; ``tokens`` int[D] contains the
    number of tokens of each document."""
    size = max(PART_TOKENS, int(tokens.sum()) * passes // MOST_PARTS)
    number = (np.cumsum(tokens) - tokens) // size
    borders = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(tokens)]
    return list(pairwise(borders))


@lru_cache(maxsize=2)
def _open(store: Location, build: Location) -> tuple[TokenStore, list[np.ndarray]]:
    """Return the store, and arrays: the indices of the documents of the split, the hashes of all documents, the
    pieces that continue a word, and the flags of grapheme clusters."""
    paths = (build / "documents.bin", store / "contents.bin")
    numbers = (np.asarray(np.memmap(local_copy(path), "<u8", "r")) for path in paths)
    flags = (np.load(local_copy(build / f"{name}.npy")) for name in ("continuation", "clusters"))
    return TokenStore(store), [*numbers, *flags]


class _Pool:
    """Token pool of a part: the tokens of its documents, followed by the tokens of the chosen random segments."""

    def __init__(self, job: SplitJob, first: int, last: int) -> None:
        self._store, (self._split, self._contents, self._continuation, self._clusters) = _open(job.store, job.build)
        self._most = job.settings.budget
        self._ranges: list[tuple[int, int]] = []
        self.size = 0
        self.documents: list[int] = self._split[first:last].tolist()
        self.starts: list[int] = []
        self.sentences: list[np.ndarray] = []
        for document in self.documents:
            (sentence, token), (last_sentence, end) = self._store.documents[document : document + 2].tolist()
            self.starts.append(self._add(token, end).start)
            lengths = np.diff(self._store.sentence_ends(sentence, last_sentence))
            if job.settings.data.next_sentence != "none":
                lengths = cut_long_sentences(lengths, self._most, partial(self._borders, token))
            self.sentences.append(lengths)

    @cached_property
    def classes(self) -> np.ndarray:
        """Class of every document of the store, int64[D]."""
        return self._store.classes

    def _borders(self, first: int, start: int, stop: int) -> np.ndarray:
        """Return the borders for ``cut_long_sentences`` of a document whose first token is ``first``."""
        ids, is_start = self._tokens([(first + start, first + stop)])
        is_inside = self._clusters[ids] & 1 > 0
        is_inside[1:] |= self._clusters[ids[:-1]] & 2 > 0
        return np.where(is_inside, 0, 1 + is_start).astype(np.uint8)

    def _tokens(self, ranges: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of tokens of the store, and a bool mask of those that begin a word."""
        ids = np.concatenate([self._store.ids(*span) for span in ranges])
        if self._store.has_word_starts:
            return ids, np.concatenate([self._store.word_starts(*span) for span in ranges])
        return ids, ~self._continuation[ids]

    def _add(self, start: int, stop: int) -> Segment:
        segment = Segment(self.size, stop - start)
        self._ranges.append((start, stop))
        self.size += stop - start
        return segment

    def random_next(self, document: int) -> RandomNext:
        """Return a function that samples segment B from the documents of the split other than ``document``.

        Duplicates of ``document`` are also excluded.
        """

        def draw(document_draw: float, sentence_draw: float, needed: int) -> Segment:
            at = int(document_draw * len(self._split))
            other = int(self._split[at])
            # A split has at least two different documents (checked before the build), so the loop terminates.
            while self._contents[other] == self._contents[document]:
                at = (at + 1) % len(self._split)
                other = int(self._split[at])
            first, last = self._store.documents[other : other + 2, 0].tolist()
            place = sentence_draw * (last - first)
            first += int(place)
            # Every sentence has at least one token, so ``needed`` sentences are enough.
            ends = self._store.sentence_ends(first, min(last, first + max(needed, 1))).tolist()
            stop = min(bisect_left(ends, ends[0] + max(needed, 1)), len(ends) - 1)
            # Of a sentence longer than a row, only a part is read, from a random token on.
            start = ends[0] + int(place % 1 * max(0, ends[1] - ends[0] - self._most))
            return self._add(start, min(ends[stop], start + 2 * self._most))

        return draw

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids int[P] of the pool, and bool[P], which marks the first token of every word."""
        return self._tokens(self._ranges)


def write_part(job: SplitJob, path: Location, pass_number: int, first: int, last: int) -> int:
    """Write the instances of documents [first, last) of the split in one pass (a worker job).

    The files are ``path`` with the suffixes .records and .table. Returns the number of instances.
    """
    cached_tokenizer.cache_clear()  # frees its large cache of words, which this job does not need
    pool = _Pool(job, first, last)
    rows: list[tuple[int, ...]] = []
    for i, document in enumerate(pool.documents):
        rows += plan_document(
            pool.sentences[i], document=document, pass_number=pass_number, first_token=pool.starts[i],
            settings=job.settings, random_next=pool.random_next(document),
        )  # fmt: skip
    instances = Instances.from_rows(rows)
    ids, starts = pool.read()
    keys = instance_keys(job.settings, instances, pass_number)
    # Instances of one key stay in order, because both sorts (here and in the merge) are stable.
    data = job.settings.data
    placed = hash_key(data.seed, instances.document, pass_number) if data.is_contiguous else keys
    shard, place = shard_and_place(placed, job.num_shards)
    order = np.lexsort((place, shard))
    instances, keys = Instances(*(column[order] for column in instances)), keys[order]
    block = max(1, _BLOCK_CELLS // job.settings.data.seq_length)
    lengths: list[int] = []
    tokens: list[int] = []
    bounds = []
    predictions = 0
    with scratch_file(path.with_suffix(".records")) as part, part.open("wb") as file:
        for start in range(0, len(keys), block):
            stop = start + block
            chosen = instances.slice(start, stop)
            features = make_features(chosen, keys[start:stop], ids, starts, job.settings)
            if job.has_classes:
                features["document_classes"] = pool.classes[chosen.document][:, None]
            records = encode_sequences(features) if job.is_packed else encode_examples(features)
            lengths += map(len, records)
            tokens += features["input_mask"].sum(1).tolist()
            predictions += int(features.get("masked_lm_weights", np.zeros(0)).sum())
            if not job.is_packed:
                bounds.append(value_bounds(features))
            file.writelines(records)
    borders = np.searchsorted(shard[order], np.arange(job.num_shards + 1))
    drop_a, drop_b = dropped_tokens(instances, job.settings.budget)
    # In SOP, B is text of the document, whatever its label.
    is_own = (instances.label == IS_NEXT) | (job.settings.data.next_sentence == "sop")
    kept = int((instances.a_length - drop_a).sum() + (instances.b_length - drop_b)[is_own].sum())
    has_pair = instances.b_length > 0
    counts = kept, int(has_pair.sum()), int(instances.label[has_pair].sum()), predictions
    _write_table(path, borders, place[order], lengths, tokens, bounds, counts)
    return len(keys)


# ------------------------------------------------------------------ tables of parts


class _Slice(NamedTuple):
    """Records of one shard in one part.

    ``places`` uint64[N] contains the sort key of each record; ``offsets`` and ``lengths`` int64[N] are in bytes;
    ``tokens`` int64[N] is the number of tokens. ``bounds`` int64[1, F, 2] contains the smallest and the largest
    value of each of the F features; it is empty if the part has no records of the shard, and with packing.
    """

    places: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    bounds: np.ndarray


def _write_table(
    path: Location, borders: np.ndarray, places: np.ndarray, lengths: Sequence[int], tokens: Sequence[int],
    bounds: Sequence[np.ndarray], counts: Sequence[int],
) -> None:  # fmt: skip
    """Write the table of a part.

    The table contains the ``counts`` of :data:`COUNTS`, the number of features, the shard borders, the byte
    offsets, the sort keys, the lengths of the records, their numbers of tokens, and the smallest and the largest
    values of the features.
    """
    sizes = np.array(lengths, "<u4")
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])[borders]
    values = np.concatenate(bounds) if bounds else np.zeros((0, 0, 2), np.int64)
    table = np.zeros((len(borders) - 1, values.shape[1], 2), "<i8")
    held = np.flatnonzero(np.diff(borders))
    if len(values):
        table[held, :, 0] = np.minimum.reduceat(values[:, :, 0], borders[held])
        table[held, :, 1] = np.maximum.reduceat(values[:, :, 1], borders[held])
    with scratch_file(path.with_suffix(".table")) as part, part.open("wb") as file:
        file.write(np.array([*counts, values.shape[1], *borders, *offsets], "<u8").tobytes())
        for column in (places.astype("<u8"), sizes, np.array(tokens, "<u4"), table):
            file.write(column.tobytes())


def _read_table(path: Location, shard: int, num_shards: int) -> _Slice:
    table, width = path.with_suffix(".table"), num_shards + 1
    features, *header = _numbers(table, "<u8", _AFTER_COUNTS, 1 + 2 * width).tolist()
    first, last, count = header[shard], header[shard + 1], header[width - 1]
    at = _AFTER_COUNTS + 8 * (1 + 2 * width)
    places = _numbers(table, "<u8", at + 8 * first, last - first)
    lengths, tokens = (
        _numbers(table, "<u4", at + before * count + 4 * first, last - first).astype(np.int64) for before in (8, 12)
    )
    pairs = 2 * features if last > first else 0
    bounds = _numbers(table, "<i8", at + 16 * count + 16 * features * shard, pairs)
    offsets = header[width + shard] + np.cumsum(lengths) - lengths
    return _Slice(places, offsets, lengths, tokens, bounds.reshape(-1, features, 2) if pairs else bounds)


def _numbers(path: Location, dtype: str, offset: int, count: int) -> np.ndarray:
    """Read ``count`` values of type ``dtype`` from a file, starting at byte ``offset``."""
    if isinstance(path, ObjectPath):
        return np.frombuffer(path.read_range(offset, count * np.dtype(dtype).itemsize), dtype)
    return np.fromfile(path, dtype, count, offset=offset)


def part_counts(parts: Sequence[Location]) -> dict[str, int]:
    """Return the sums of the :data:`COUNTS` of all parts."""

    def read(path: Location) -> np.ndarray:
        return _numbers(path.with_suffix(".table"), "<u8", 0, len(COUNTS)).astype(np.int64)

    with ThreadPoolExecutor(_REQUESTS if isinstance(parts[0], ObjectPath) else 1) as pool:
        totals = sum(pool.map(read, parts), np.zeros(len(COUNTS), np.int64))
    return dict(zip(COUNTS, totals.tolist(), strict=True))


def choose_packing(job: SplitJob, parts: Sequence[Location]) -> None:
    """Write the shape of packed rows, and counts, to the folder of a build all of whose parts are written.

    The number of sequences per row follows from the histogram of the lengths of all instances, unless
    ``data.sequences_per_row`` sets it.
    """
    data, width = job.settings.data, job.num_shards + 1

    def lengths(path: Location) -> np.ndarray:
        table = path.with_suffix(".table")
        count = int(_numbers(table, "<u8", _AFTER_COUNTS + 8 * width, 1)[0])
        tokens = _numbers(table, "<u4", _AFTER_COUNTS + 8 * (1 + 2 * width) + 12 * count, count)
        return np.bincount(tokens, minlength=data.seq_length + 1)

    with ThreadPoolExecutor(_REQUESTS if isinstance(parts[0], ObjectPath) else 1) as pool:
        histogram = sum(pool.map(lengths, parts), np.zeros(data.seq_length + 1, np.int64))
    most = data.sequences_per_row or sequences_per_row(histogram, data.seq_length)
    facts = {
        "sequences_per_row": most,
        "predictions_per_row": data.most_predictions(most) if data.masking == "static" else 0,
        "sequences": int(histogram.sum()),
        "tokens": int(histogram @ np.arange(len(histogram))),
    }
    write_whole(job.build / _PACKING_NAME, json.dumps(facts))


def chosen_packing(job: SplitJob) -> dict[str, int]:
    """Return what :func:`choose_packing` wrote; empty without packing."""
    return json.loads((job.build / _PACKING_NAME).read_bytes()) if job.is_packed else {}


def merge_shard(job: SplitJob, parts: Sequence[Location], shard: int) -> ShardEntry:
    """Write one shard from all parts, or scan a finished shard; return its index entry (a worker job)."""
    final = job.build / "shards" / shard_name(shard, job.num_shards)
    with ThreadPoolExecutor(_REQUESTS if isinstance(parts[0], ObjectPath) else 1) as pool:
        slices = list(pool.map(lambda path: _read_table(path, shard, job.num_shards), parts))
    bounds = [one.bounds for one in slices if len(one.bounds)]
    if final.exists():
        return scan_shard(final, bounds or None)
    order = np.argsort(np.concatenate([one.places for one in slices]), kind="stable")
    with scratch_file(final) as path:
        if not job.is_packed:
            return write_records(path, _records(parts, slices, order), bounds)
        return write_records(path, _packed_records(job, parts, slices, order, bounds), bounds)


def _packed_records(
    job: SplitJob, parts: Sequence[Location], slices: Sequence[_Slice], order: np.ndarray, bounds: list[np.ndarray]
) -> Iterator[bytes]:
    """Yield the packed rows of a shard, whose sequences have the random order ``order`` int[N]; append the value
    bounds of the yielded rows to ``bounds``."""
    facts = chosen_packing(job)
    shape = PackedShape(job.settings.data.seq_length, facts["sequences_per_row"], facts["predictions_per_row"])
    chosen, counts = pack(np.concatenate([one.tokens for one in slices])[order], shape)
    sequences = _records(parts, slices, order[chosen])
    for start in range(0, len(counts), _PACKED_ROWS):
        own = counts[start : start + _PACKED_ROWS]
        records = list(islice(sequences, int(own.sum())))
        features = row_features(records, own, shape, job.settings.pad_id, has_classes=job.has_classes)
        values = value_bounds(features)
        bounds.append(np.stack([values[:, :, 0].min(0), values[:, :, 1].max(0)], 1)[None])
        yield from encode_examples(features)


def _records(parts: Sequence[Location], slices: Sequence[_Slice], order: np.ndarray) -> Iterator[bytes]:
    """Yield the records of one shard from all parts; ``order`` int[N] indexes the concatenation of ``slices``."""
    offsets, lengths = (np.concatenate([one[column] for one in slices]) for column in (1, 2))
    counts = [len(one.places) for one in slices]
    part = np.repeat(np.arange(len(parts)), counts)
    with _open_records(parts, slices) as (files, shifts):
        offsets += np.repeat(shifts, counts)
        for start in range(0, len(order), _MERGE_ROWS):
            rows = order[start : start + _MERGE_ROWS]
            columns = (part[rows].tolist(), offsets[rows].tolist(), lengths[rows].tolist())
            for i, offset, length in zip(*columns, strict=True):
                yield os.pread(files[i], length, offset)


@contextmanager
def _open_records(parts: Sequence[Location], slices: Sequence[_Slice]) -> Iterator[tuple[list[int], list[int]]]:
    """Open the files with the records of all parts.

    Yields a list of file descriptors and a list of values to add to the byte offsets, with one entry per part.
    """
    if isinstance(parts[0], ObjectPath):
        # The records of a shard are contiguous in every part, so one request per part suffices.
        first = [int(one.offsets[0]) if len(one.offsets) else 0 for one in slices]
        sizes = [int(one.lengths.sum()) for one in slices]
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        with tempfile.TemporaryFile() as file, ThreadPoolExecutor(_REQUESTS) as pool:

            def fetch(i: int) -> None:
                content = parts[i].with_suffix(".records").read_range(first[i], sizes[i])  # type: ignore[union-attr]
                os.pwrite(file.fileno(), content, starts[i])

            list(pool.map(fetch, range(len(parts))))
            yield [file.fileno()] * len(parts), [start - begin for start, begin in zip(starts, first, strict=True)]
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (count := len(parts) + 64):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard) if hard >= 0 else count, hard))
    files = [os.open(path.with_suffix(".records"), os.O_RDONLY) for path in parts]
    try:
        yield files, [0] * len(parts)
    finally:
        for opened in files:
            os.close(opened)
