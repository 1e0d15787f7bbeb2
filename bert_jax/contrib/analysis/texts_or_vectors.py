"""Collections of texts with ids or of vectors, read from a file for search and clustering.

Shapes: N entries, E width of a vector.
"""

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np

from bert_jax.inference.batching import BatchOptions
from bert_jax.inference.embed import VectorOptions, checked_width, embed, vector_width
from bert_jax.inference.engine import Engine
from bert_jax.inference.text_files import Entry, read_texts, refuse_blank
from bert_jax.json_values import Json

Id = int | str
# Number of entries that are processed together, so that memory does not grow with the number of all entries.
BLOCK = 8192


def blocks(count: int, size: int = 0) -> Iterator[slice]:
    """Yield consecutive slices that cover ``count`` entries, each of at most ``size`` (if 0: :data:`BLOCK`)."""
    size = size or BLOCK
    return (slice(start, start + size) for start in range(0, count, size))


@dataclass(frozen=True)
class Collection:
    """Ordered entries with unique ids and either texts or, from an .npy file, vectors [N, E]."""

    name: str
    ids: Sequence[Id]
    texts: Sequence[str] | None = None
    vectors: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def shown(self, entry: int) -> dict[str, str]:
        """Return the text of an entry as ``{"text": text}``; return an empty dict if the entries are vectors."""
        return {} if self.texts is None else {"text": self.texts[entry]}


def read_collection(source: str | None, texts: Sequence[str] = ()) -> Collection:
    """Read a collection from the file ``source`` ("-": standard input), or create it from ``texts``.

    A text file has one text per line; the ids are the indices of its non-blank lines, from 0, which are also the
    row indices in the .npy file that ``bert-jax embed`` writes. A .jsonl file has ``{"id", "text"}`` objects;
    either all or none of them have an id (a string or an integer). An .npy file has vectors [N, E], which are read
    on demand. Raises ``ValueError``, which names the file and the entry, for any other content.
    """
    if source is not None and source.endswith(".npy"):
        vectors = _read_vectors(Path(source))
        return Collection(source, range(len(vectors)), vectors=vectors)
    refuse_blank(texts)
    name = source or "the command line"
    entries = [
        _entry(value, f"{name}: entry {number}") for number, value in enumerate(read_texts(texts, source, False))
    ]
    given = [one for one, _ in entries if one is not None]
    if given and len(given) < len(entries):
        raise ValueError(f"{name}: {len(entries) - len(given)} entries have no id; give every entry an id, or none")
    ids = first_twice(given, name) if given else range(len(entries))
    return Collection(name, ids, texts=[text for _, text in entries])


def first_twice(ids: list[Id], name: str) -> list[Id]:
    """Return ``ids`` unchanged; raise ``ValueError`` if an id occurs twice."""
    seen: set[Id] = set()
    for one in ids:
        if one in seen:
            raise ValueError(f"{name}: the id {one!r} occurs twice; give every entry a different id")
        seen.add(one)
    return ids


def is_id(value: Json) -> TypeGuard[Id]:
    """Return True if a JSON value can be an id: a string or an integer."""
    return isinstance(value, str | int) and not isinstance(value, bool)


def embedded(
    collection: Collection,
    model: Engine | None,
    options: VectorOptions = VectorOptions(),
    batches: BatchOptions = BatchOptions(),
) -> np.ndarray:
    """Return the vectors [N, E] of the collection. Texts are converted to float32 vectors by :func:`embed`; of
    vectors from a file, the first ``width`` values are returned (None: all).

    Raises ``ValueError`` if a vector is not finite, if the vectors have not ``width`` values, or if the collection
    contains texts and ``model`` is None.
    """
    vectors = collection.vectors
    if vectors is None:
        assert collection.texts is not None
        if model is None:
            raise ValueError(f"{collection.name}: texts need a model to compute vectors; set --model")
        width = vector_width(model.spec, options.pooling, options.width)
        vectors = np.empty((len(collection), width), np.float32)
        for row, vector in enumerate(embed(model, collection.texts, options, batches)):
            vectors[row] = vector
    elif options.width is not None:
        vectors = vectors[:, : checked_width(options.width, vectors.shape[1])]
    for part in blocks(len(vectors)):
        finite = np.isfinite(vectors[part]).all(axis=1)
        if not finite.all():
            entry = collection.ids[part.start + int(finite.argmin())]
            raise ValueError(f"{collection.name}: the vector of entry {entry!r} contains NaN or infinity")
    return vectors


def norms(vectors: np.ndarray) -> np.ndarray:
    """Return the Euclidean norm of each row of ``vectors`` [N, E], float64[N]."""
    parts = (np.asarray(vectors[part], np.float64) for part in blocks(len(vectors)))
    return np.concatenate([np.zeros(0), *(np.linalg.norm(part, axis=1) for part in parts)])


def lengths_of(vectors: np.ndarray, name: str = "vectors") -> np.ndarray:
    """Return the Euclidean norms of ``vectors``. Raises ``ValueError`` if one is 0: the vector has no cosine."""
    lengths = norms(vectors)
    if not lengths.all():
        raise ValueError(f"{name}: vector {int(lengths.argmin())} is all zeros and has no cosine; remove it")
    return lengths


def _entry(value: Entry, where: str) -> tuple[Id | None, str]:
    if isinstance(value, str):
        return None, value
    one, text = value.get("id"), value.get("text")
    if not isinstance(text, str):
        raise ValueError(f'{where}: no text; write {{"id": ..., "text": "..."}}')
    if one is not None and not is_id(one):
        raise ValueError(f"{where}: the id {str(one)[:40]!r} is not allowed; use a string or an integer")
    return one, text


def _read_vectors(path: Path) -> np.ndarray:
    try:
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise ValueError(f"{path}: not a numpy array file; write it with bert-jax embed --output") from None
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or vectors.dtype.kind != "f" or not vectors.size:
        what = f"{vectors.dtype}{list(vectors.shape)}" if isinstance(vectors, np.ndarray) else "several arrays"
        raise ValueError(
            f"{path}: {what}; allowed: floats of shape [entries, width], as bert-jax embed writes them"
        )
    return vectors
