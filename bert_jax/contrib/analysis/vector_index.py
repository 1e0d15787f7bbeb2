"""Indexes of text vectors in a folder. An index takes a bit per value in memory and a byte per value on disk.

A search with bits has three stages. All entries are compared by the Hamming distance of the signs of query and
entry; the nearest 1,000 by the sum of the query's values with the signs of the entry (Yamada et al. 2021,
"Efficient Passage Retrieval with Hashing"); and the best 100 of these by the cosine with the vector of bytes, which
is read from disk.

    index.json       precision, count, width, prompt of the texts
    entries.jsonl    a text per line, or {"id", "text"}
    offsets.npy      int64[N + 1], the place of each line
    vectors.npy      int8[N, E], the direction of each vector: its values over the largest, times 127
    codes.npy        uint8[N, E / 8], the signs of the values, one bit each (precision binary)

Shapes: N entries, E width of a vector, Q queries.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bert_jax.contrib.analysis.neighbors import Hits, nearest
from bert_jax.contrib.analysis.texts_or_vectors import Collection, Id, blocks, is_id, lengths_of
from bert_jax.inference.batching import BatchOptions
from bert_jax.inference.embed import VectorOptions, embed, prompt_text
from bert_jax.inference.engine import Engine
from bert_jax.inference.text_files import Entry
from bert_jax.io.files import new_folder, whole_folder
from bert_jax.io.untrusted_folder import json_object, needed, read_small

PRECISIONS = ("int8", "binary")
ABOUT, ENTRIES, OFFSETS, VECTORS, CODES = "index.json", "entries.jsonl", "offsets.npy", "vectors.npy", "codes.npy"
# Entries that the Hamming distance selects, and those whose bytes are read.
NEAR, RESCORED = 1000, 100
# Rows whose distances are computed together.
_ROWS = 1 << 16
# Least cosine of a text's vector with its stored directions: rounding to bytes and bfloat16 keep it above.
_SAME = 0.99


def write_index(
    folder: Path, entries: Iterable[Entry], vectors: Iterable[np.ndarray], precision: str, prompt: str = ""
) -> tuple[int, int]:
    """Write an index of ``entries`` (texts, or objects with "text" and "id") and their ``vectors``, float32[E], to
    the new folder ``folder``; return (entries, width).

    Entries and vectors are read one by one. ``prompt``: the text that was inserted before every text. Raises
    ``ValueError`` for a vector that is zero or not finite, for ids that only some entries have or that occur twice,
    and if ``folder`` exists and is not empty.
    """
    folder = new_folder(folder)
    ids: set[Id] = set()
    has_ids, offsets = False, [0]
    with whole_folder(folder) as partial:
        with (partial / ENTRIES).open("wb") as texts, (partial / "rows").open("wb") as rows:
            for number, (entry, vector) in enumerate(zip(entries, vectors, strict=True)):
                one = None if isinstance(entry, str) else entry.get("id")
                has_ids = has_ids or (number == 0 and one is not None)
                if (one is not None) != has_ids or one in ids or not (one is None or is_id(one)):
                    allowed = "give every entry a distinct string or integer, or no entry an id"
                    raise ValueError(f"entry {number}: the id {one!r} is not allowed; {allowed}")
                ids |= set() if one is None else {one}
                largest = np.abs(vector).max()
                if not 0 < largest < np.inf:
                    raise ValueError(f"entry {number}: its vector is zero or not finite; remove it")
                rows.write(np.rint(vector * (127 / largest)).astype(np.int8).tobytes())
                kept = (
                    entry if isinstance(entry, str) else {key: entry[key] for key in ("id", "text") if key in entry}
                )
                texts.write(json.dumps(kept, ensure_ascii=False).encode() + b"\n")
                offsets.append(texts.tell())
        count, width = len(offsets) - 1, vector.size
        np.save(partial / OFFSETS, np.array(offsets))
        directions = np.memmap(partial / "rows", np.int8, "r", shape=(count, width))
        np.save(partial / VECTORS, directions)
        if precision == "binary":
            np.save(
                partial / CODES, np.concatenate([np.packbits(directions[i] > 0, axis=1) for i in blocks(count)])
            )
        (partial / "rows").unlink()
        about = {"precision": precision, "count": count, "width": width, "prompt": prompt, "ids": has_ids}
        (partial / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return count, width


def index_texts(
    folder: Path,
    model: Engine,
    entries: Iterable[tuple[Entry, str]],
    precision: str,
    options: VectorOptions = VectorOptions(),
    batches: BatchOptions = BatchOptions(),
) -> str:
    """Write the index of ``entries``, pairs of an entry of :func:`write_index` and its text, and return a line for
    the log."""
    kept, embedded = itertools.tee(entries)
    text = prompt_text(model.spec, options.prompt, options.prompt_name)
    vectors = embed(model, (one for _, one in embedded), options, batches)
    count, width = write_index(folder, (entry for entry, _ in kept), vectors, precision, text)
    return f"{folder}: index of {count:,} texts, width {width}, {precision}"


class VectorIndex:
    """An index in ``folder``, opened for search: only codes are in memory.

    Raises ``ValueError`` for a folder that is not an index, and for an index whose files contradict each other.
    """

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        if not (folder / ABOUT).is_file():
            raise ValueError(
                f"{folder}: not an index; bert-jax embed --precision binary --output DIR writes one from texts"
            )
        self._folder = folder
        about = json_object(read_small(needed(folder, ABOUT), "a description"), folder / ABOUT)
        expected = {"precision": str, "count": int, "width": int, "prompt": str, "ids": bool}
        if {key: type(value) for key, value in about.items()} != expected or about["precision"] not in PRECISIONS:
            raise ValueError(f"{folder / ABOUT}: not the description of an index; make the index again")
        self.width, self.prompt, count = about["width"], about["prompt"], about["count"]
        self._vectors = self._array(VECTORS, np.int8, (count, self.width), "r")
        self._codes = None
        if about["precision"] == "binary":
            # In words of 64 bits; bits beyond the width are 0 in entries and queries.
            self._codes = _words(self._array(CODES, np.uint8, (count, -(-self.width // 8))))
        offsets = self._array(OFFSETS, np.int64, (count + 1,), "r")
        lines = _Lines(needed(folder, ENTRIES), offsets)
        ids: Sequence[Id] = _Fields(lines, "id") if about["ids"] else range(count)
        self.entries = Collection(self.name, ids, texts=_Fields(lines, "text"))

    def _array(
        self, name: str, dtype: type, shape: tuple[int, ...], mode: Literal["r"] | None = None
    ) -> np.ndarray:
        file = needed(self._folder, name)
        try:
            array = np.load(file, mmap_mode=mode, allow_pickle=False)
            if array.dtype != dtype or array.shape != shape:
                raise ValueError(f"{array.dtype}{list(array.shape)}")
        except (ValueError, EOFError) as error:
            wanted = f"{np.dtype(dtype)}{list(shape)}"
            raise ValueError(f"{file}: {error}, but {ABOUT} states {wanted}; make the index again") from None
        return array

    @property
    def memory(self) -> int:
        """Number of bytes of the codes in memory."""
        return 0 if self._codes is None else self._codes.nbytes

    def check_model(self, model: Engine, options: VectorOptions = VectorOptions()) -> None:
        """Raise ``ValueError`` unless ``model`` computes the stored vector of the first text with ``options`` of
        ``embed``: vectors of another model, pooling or width have no meaning here."""
        assert self.entries.texts is not None
        (vector,) = embed(model, [self.entries.texts[0]], replace(options, prompt=self.prompt))
        self._check_width(vector.size, model.name)
        first = self._vectors[0].astype(np.float64)
        cosine = float(first @ vector / np.linalg.norm(first) / max(float(np.linalg.norm(vector)), 1e-30))
        if not cosine >= _SAME:
            raise ValueError(
                f"{self.name}: the index was made with another model, pooling or dtype (cosine of its first "
                f"text with {model.name}: {cosine:.3f}); use the model and the options with which it was made"
            )

    def _check_width(self, width: int, name: str) -> None:
        if width != self.width:
            raise ValueError(
                f"{self.name}: vectors of width {self.width}, but {name} has width {width}; use the model and the "
                "options with which the index was made"
            )

    def search(self, queries: np.ndarray, top: int) -> Iterator[Hits]:
        """Yield the ``top`` best entries for each row of ``queries`` [Q, E], by the cosine with the vectors of
        bytes; with codes, among the candidates of the first two stages (100, or ``top`` if it is greater).

        Raises ``ValueError`` for queries of another width, and for a query that is zero.
        """
        self._check_width(queries.shape[1], "a query")
        if self._codes is None:
            yield from nearest(queries, self._vectors, top)
            return
        for query, length in zip(queries, lengths_of(queries, "queries"), strict=True):
            yield self._best(np.asarray(query, np.float64) / length, top)

    def _best(self, query_E: np.ndarray, top: int) -> Hits:
        assert self._codes is not None
        code = _words(np.packbits(query_E > 0)[None])
        distances = [
            np.bitwise_count(self._codes[start : start + _ROWS] ^ code).sum(axis=1, dtype=np.int32)
            for start in range(0, len(self._codes), _ROWS)
        ]
        count = max(RESCORED, top)
        rows = _least(np.concatenate(distances), max(NEAR, count))
        bits = np.unpackbits(self._codes[rows].view(np.uint8), axis=1, count=self.width)
        rows = np.sort(rows[_least(-(bits.astype(np.float32) @ query_E.astype(np.float32)), count)])
        vectors = self._vectors[rows].astype(np.float64)
        scores = (vectors * query_E).sum(axis=1) / np.linalg.norm(vectors, axis=1)
        order = np.argsort(-scores, kind="stable")[:top]
        return Hits(rows[order], scores[order])


def _words(codes: np.ndarray) -> np.ndarray:
    """Return the bytes of each row as uint64, filled with zeros."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8)))
    return padded.view(np.uint64)


def _least(values: np.ndarray, count: int) -> np.ndarray:
    return np.argpartition(values, count)[:count] if count < len(values) else np.arange(len(values))


class _Lines:
    """JSON values of a file, each read when it is asked for."""

    def __init__(self, file: Path, offsets: np.ndarray) -> None:
        self._bytes = np.memmap(file, np.uint8, "r")
        self._offsets = offsets
        if offsets[-1] != len(self._bytes):
            raise ValueError(f"{file}: {len(self._bytes)} bytes, but {OFFSETS} states {offsets[-1]}; make it again")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Entry:
        start, end = self._offsets[number], self._offsets[number + 1]
        entry: Entry = json.loads(self._bytes[start:end].tobytes())
        return entry


class _Fields(Sequence[Any]):
    """A field of each line; a line without fields is the text."""

    def __init__(self, lines: _Lines, field: str) -> None:
        self._lines, self._field = lines, field

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self._lines):
            raise IndexError(number)
        value = self._lines[number]
        return value if isinstance(value, str) else value[self._field]
