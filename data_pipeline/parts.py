"""The jobs that turn a token store into shards: parts (some documents of one pass), then a merge for every shard.

A part holds the serialised instances of consecutive documents, ordered by (shard, place), and a table; a merge
reads its shard's slice of all parts in order of place. Both are cut by the store's contents alone, so no byte
depends on who does which job.
"""

import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from data_pipeline.instances import (
    Instances,
    InstanceSettings,
    RandomNext,
    Segment,
    instance_keys,
    make_features,
    plan_document,
    shard_and_place,
)
from data_pipeline.shards import ShardEntry, encode_examples, scan_shard, write_records
from data_pipeline.token_store import TokenStore, cached_tokenizer
from data_pipeline.workers import scratch_file

PART_TOKENS = 1 << 18  # of one part, at least
MOST_PARTS = 4096  # larger corpora get larger parts
_BLOCK_CELLS = 1 << 18  # rows x tokens that are assembled together
_MERGE_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class SplitJob:
    """What all jobs of one split share. ``documents`` is a file with the split's document numbers, uint64."""

    store: Path
    documents: Path
    continuation: Path  # a .npy file, bool[V]: pieces that continue a word
    folder: Path  # of parts and finished shards
    num_shards: int
    settings: InstanceSettings


def shard_name(shard: int, num_shards: int) -> str:
    """File name of a shard."""
    return f"shard-{shard:05d}-of-{num_shards:05d}.tfrecord"


def cut_parts(tokens: np.ndarray, passes: int) -> list[tuple[int, int]]:
    """Ranges [first, last) of consecutive documents with about as many tokens each; ``tokens`` int[D]."""
    size = max(PART_TOKENS, int(tokens.sum()) * passes // MOST_PARTS)
    number = (np.cumsum(tokens) - tokens) // size
    borders = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(tokens)]
    return list(pairwise(borders))


@lru_cache(maxsize=2)
def _open(store: Path, documents: Path) -> tuple[TokenStore, np.ndarray, np.ndarray]:
    """The store, the split's documents and the hashes of all contents; ``documents`` names the build."""
    return TokenStore(store), np.memmap(documents, "<u8", "r"), np.memmap(store / "contents.bin", "<u8", "r")


class _Pool:
    """The tokens that a part's segments point into: its documents', then the random ones as they are drawn."""

    def __init__(
        self, store: TokenStore, split: np.ndarray, contents: np.ndarray, document_numbers: np.ndarray
    ) -> None:
        self._store, self._split, self._contents = store, split, contents
        self._ranges: list[tuple[int, int]] = []
        self.size = 0
        self.starts: list[int] = []
        self.sentences: list[np.ndarray] = []
        for document in document_numbers.tolist():
            (first, token), (last, end) = store.documents[document : document + 2].tolist()
            self.starts.append(self._add(token, end).start)
            self.sentences.append(np.diff(store.sentence_ends(first, last)))

    def _add(self, start: int, stop: int) -> Segment:
        segment = Segment(self.size, stop - start)
        self._ranges.append((start, stop))
        self.size += stop - start
        return segment

    def random_next(self, document: int) -> RandomNext:
        """Draws B for an A of ``document``: from a document of the split with other contents."""

        def draw(document_draw: float, sentence_draw: float, needed: int) -> Segment:
            at = int(document_draw * len(self._split))
            other = int(self._split[at])
            # The split holds at least two contents; neighbours of a duplicate are tried in turn.
            while self._contents[other] == self._contents[document]:
                at = (at + 1) % len(self._split)
                other = int(self._split[at])
            first, last = int(self._store.documents[other, 0]), int(self._store.documents[other + 1, 0])
            first += int(sentence_draw * (last - first))
            # Every sentence has a token, so this many suffice.
            ends = self._store.sentence_ends(first, min(last, first + max(needed, 1)))
            stop = min(int(np.searchsorted(ends, ends[0] + max(needed, 1))), len(ends) - 1)
            return self._add(int(ends[0]), int(ends[stop]))

        return draw

    def read(self, continuation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and word starts of the whole pool."""
        ids = np.concatenate([self._store.ids(*span) for span in self._ranges])
        if self._store.has_word_starts:
            return ids, np.concatenate([self._store.word_starts(*span) for span in self._ranges])
        return ids, ~continuation[ids]


def write_part(job: SplitJob, path: Path, pass_number: int, first: int, last: int) -> int:
    """Job: instances of the split's documents [first, last) in one pass, as ``path`` (.records and .table).

    Returns their number.
    """
    cached_tokenizer.cache_clear()  # not needed any more, and its memory of words is large
    store, split, contents = _open(job.store, job.documents)
    numbers = split[first:last]
    pool = _Pool(store, split, contents, numbers)
    rows: list[tuple[int, ...]] = []
    for i, document in enumerate(numbers.tolist()):
        rows += plan_document(
            pool.sentences[i], document=document, pass_number=pass_number, first_token=pool.starts[i],
            settings=job.settings, random_next=pool.random_next(document),
        )  # fmt: skip
    instances = Instances.from_rows(rows)
    ids, starts = pool.read(np.load(job.continuation))
    keys = instance_keys(job.settings, instances, pass_number)
    shard, place = shard_and_place(keys, job.num_shards)
    order = np.lexsort((place, shard))
    instances, keys = Instances(*(column[order] for column in instances)), keys[order]
    block = max(1, _BLOCK_CELLS // job.settings.seq_length)
    lengths: list[int] = []
    with scratch_file(path.with_suffix(".records")) as part, part.open("wb") as file:
        for start in range(0, len(keys), block):
            stop = start + block
            chosen = instances.slice(start, stop)
            records = encode_examples(make_features(chosen, keys[start:stop], ids, starts, job.settings))
            lengths += map(len, records)
            file.writelines(records)
    _write_table(path, np.searchsorted(shard[order], np.arange(job.num_shards + 1)), place[order], lengths)
    return len(keys)


# ------------------------------------------------------------------ tables of parts


def _write_table(path: Path, borders: np.ndarray, places: np.ndarray, lengths: Sequence[int]) -> None:
    """The part is finished when its table is there: borders and byte offsets of the shards, places, lengths."""
    sizes = np.array(lengths, "<u4")
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])[borders]
    with scratch_file(path.with_suffix(".table")) as part, part.open("wb") as file:
        file.write(np.stack([borders, offsets]).astype("<u8").tobytes())
        file.write(places.astype("<u8").tobytes())
        file.write(sizes.tobytes())


def _read_table(path: Path, shard: int, num_shards: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places, offsets and lengths of one shard's records in a part."""
    width = num_shards + 1
    with path.with_suffix(".table").open("rb") as file:
        header = np.fromfile(file, "<u8", 2 * width).reshape(2, width).astype(np.int64)
        first, last = header[0, shard : shard + 2].tolist()
        file.seek(8 * (2 * width + first))
        places = np.fromfile(file, "<u8", last - first)
        file.seek(8 * (2 * width + int(header[0, -1])) + 4 * first)
        lengths = np.fromfile(file, "<u4", last - first).astype(np.int64)
    return places, header[1, shard] + np.cumsum(lengths) - lengths, lengths


def merge_shard(job: SplitJob, parts: Sequence[Path], shard: int) -> ShardEntry:
    """Job: write one shard from all parts, or scan it when it is finished already."""
    final = job.folder / shard_name(shard, job.num_shards)
    if final.exists():
        return scan_shard(final)
    with scratch_file(final) as path:
        return write_records(path, _records_in_order(parts, shard, job.num_shards))


def _records_in_order(parts: Sequence[Path], shard: int, num_shards: int) -> Iterator[bytes]:
    """Records of one shard from all parts, ordered by place."""
    tables = [_read_table(path, shard, num_shards) for path in parts]
    places, offsets, lengths = (np.concatenate(column) for column in zip(*tables, strict=True))
    part = np.repeat(np.arange(len(parts)), [len(table[0]) for table in tables])
    order = np.argsort(places, kind="stable")
    del tables, places
    _allow_open_files(len(parts) + 64)
    files = [os.open(path.with_suffix(".records"), os.O_RDONLY) for path in parts]
    try:
        for start in range(0, len(order), _MERGE_ROWS):
            rows = order[start : start + _MERGE_ROWS]
            columns = (part[rows].tolist(), offsets[rows].tolist(), lengths[rows].tolist())
            for i, offset, length in zip(*columns, strict=True):
                yield os.pread(files[i], length, offset)
    finally:
        for file in files:
            os.close(file)


def _allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard) if hard >= 0 else count, hard))
