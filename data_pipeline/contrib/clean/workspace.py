"""Files of an unfinished run of ``bert-data clean``, and the documents in them.

A run reads the corpus in chunks of about a million characters. Files of a chunk, with the name SOURCE-PIECE:

    text/NAME.txt       the documents of the chunk: lines that end with "\\n", without blank lines between documents
    scanned/NAME.npz    D documents: ``number`` uint32[D], the index in the source; ``content`` uint64[D], a hash
    scanned/NAME.keys   uint64[K], sorted: the hash of every different line of each document, and uint32[K]: the
                        index of its document
    kept/NAME.txt       the documents without exact duplicates and boilerplate
    signed/NAME.npz     their ``document`` uint32[D] (index in the scanned chunk)
    signed/NAME.bands   uint64[bands, D]

``bytes`` int64[D] in an .npz file contains the size of every document in the text file. All documents of the run
are numbered in the order of the chunks: twice, as scanned and as kept.
"""

import dataclasses
import json
import pickle
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from bert_jax.io.files import local_copy, write_whole
from bert_jax.io.storage import Location
from bert_jax.json_values import Json
from data_pipeline.build.workers import scratch_file
from data_pipeline.contrib.clean.options import CleanOptions
from data_pipeline.text.documents import Source

PLAN_NAME = "plan"
TALLIES = "tallies"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Inputs of a run, stored in the file ``plan`` of its folder, because jobs run in other processes."""

    folder: Location
    options: CleanOptions
    sources: tuple[Source, ...]
    corpus: dict[str, Json]  # settings that identify the text

    def path(self, room: str, name: str) -> Location:
        """Return the path of the file ``name`` in the subfolder ``room``."""
        return self.folder / room / name


def save_plan(plan: Plan) -> None:
    """Write the plan and create the subfolders of the run."""
    for room in ("text", "scanned", "kept", "signed", "counted", "compared", "output", TALLIES):
        (plan.folder / room).mkdir(parents=True, exist_ok=True)
    write_whole(plan.folder / PLAN_NAME, pickle.dumps(plan))


@lru_cache(maxsize=4)
def load_plan(folder: Location) -> Plan:
    """Load the plan of the run in ``folder``."""
    return pickle.loads((folder / PLAN_NAME).read_bytes())


def chunk_name(source: int, piece: int) -> str:
    """Return the name of a chunk; names sort in the order of the corpus."""
    return f"{source:06d}-{piece:08d}"


def source_of(chunk: str) -> int:
    """Return the index of the source of a chunk."""
    return int(chunk.partition("-")[0])


def save_arrays(path: Location, **arrays: np.ndarray) -> None:
    """Write an .npz file as a whole."""
    with scratch_file(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def load_arrays(path: Location) -> dict[str, np.ndarray]:
    """Read an .npz file."""
    with np.load(local_copy(path)) as arrays:
        return dict(arrays)


def load_columns(folder: Location, room: str, names: Sequence[str], **dtypes: str) -> list[np.ndarray]:
    """Return the arrays that the keys of ``dtypes`` name, of these dtypes, joined from the files ``names``."""
    tables = [load_arrays(load_plan(folder).path(room, name)) for name in names]
    return [
        np.concatenate([np.zeros(0, dtype), *(table[key] for table in tables)]) for key, dtype in dtypes.items()
    ]


def save_text(path: Location, documents: Sequence[Sequence[str]]) -> np.ndarray:
    """Write documents, each a list of lines; return the number of bytes of each, int64[D]."""
    contents = ["".join(f"{line}\n" for line in document).encode("utf-8", "replace") for document in documents]
    with scratch_file(path) as part, part.open("wb") as file:
        file.writelines(contents)
    return np.array([len(content) for content in contents], np.int64)


def split_text(content: bytes, sizes: np.ndarray) -> list[list[str]]:
    """Split the ``content`` of a text file into documents of these ``sizes`` int64[D] in bytes."""
    ends = np.cumsum(sizes).tolist()
    return [
        content[end - size : end].decode().split("\n")[:-1] for end, size in zip(ends, sizes.tolist(), strict=True)
    ]


def save_raw(path: Location, *arrays: np.ndarray) -> None:
    """Write arrays one after the other, without a header."""
    with scratch_file(path) as part, part.open("wb") as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array).tobytes())


def load_raw(path: Location, dtype: str, count: int = -1, offset: int = 0) -> np.ndarray:
    """Read ``count`` values of ``dtype`` that start at byte ``offset``; -1: all values."""
    return np.fromfile(local_copy(path), dtype, count, offset=offset)


class Chunks:
    """The chunks of a run in the order of the corpus, and the numbers of their documents in one of the two stages
    ``scanned`` and ``kept``."""

    def __init__(self, plan: Plan, stage: str) -> None:
        self.plan = plan
        counts = json.loads(plan.path(stage, "counts.json").read_text())
        self.names: list[str] = list(counts)
        # Index of the first document of every chunk, then the number of all documents: int64[C + 1].
        self.first = np.concatenate([[0], np.cumsum([*counts.values()], dtype=np.int64)]).astype(np.int64)

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, first document, end document) for every chunk."""
        for number, name in enumerate(self.names):
            yield name, int(self.first[number]), int(self.first[number + 1])

    def locate(self, documents: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name of a chunk, indices in the chunk) for sorted ``documents`` int64[M]."""
        numbers = np.searchsorted(self.first, documents, "right") - 1
        for number in np.unique(numbers):
            yield self.names[number], documents[numbers == number] - self.first[number]

    def chunk(self, document: int) -> tuple[str, int]:
        """Return the chunk of one document, and the index of the document in the chunk."""
        number = int(np.searchsorted(self.first, document, "right")) - 1
        return self.names[number], document - int(self.first[number])


@lru_cache(maxsize=4)
def load_chunks(folder: Location, stage: str) -> Chunks:
    """Return the chunks of a stage that is finished."""
    return Chunks(load_plan(folder), stage)


def save_counts(plan: Plan, stage: str, counts: dict[str, int]) -> None:
    """Write the number of documents of every chunk after a stage."""
    write_whole(plan.path(stage, "counts.json"), json.dumps(dict(sorted(counts.items()))))


def example(plan: Plan, source: int, number: int, **fields: Any) -> dict[str, Json]:
    """Return the fields of an example: the source and the number of the document, from 1, then ``fields``."""
    return {"source": plan.sources[source].name, "document": number + 1, **fields}
