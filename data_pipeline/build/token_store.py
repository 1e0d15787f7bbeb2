"""The token store: a tokenized corpus with random access to documents, from which all shards are built.

A store is a folder with little-endian arrays and ``store.json``, which is written last and marks a finished store.
There are D documents, N sentences and T tokens.

    ids.bin          uint16[T] or uint32[T]   token ids of all sentences
    word_starts.bin  uint8[T]                 with a word segmenter: 1 for the first token of a word
    sentences.bin    uint64[N + 1]            index of the first token of every sentence, then T
    documents.bin    uint64[D + 1, 2]         indices of the first sentence and token of every document, then (N, T)
    contents.bin     uint64[D]                hash of the text of every document
    classes.bin      uint16[D]                with data.label_field: class of every document, from 1; 0: none

Documents without tokens are skipped; the others are numbered in the order of the sources.
"""

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.hashing import hash_key
from bert_jax.io.files import local_copy, remove_tree, write_whole
from bert_jax.io.storage import Location, ObjectPath, location
from bert_jax.json_values import Json
from bert_jax.tokenization import Tokenizer, load_tokenizer
from bert_jax.tokenization.wordpiece import MAX_CHARS_PER_WORD, is_cjk
from data_pipeline.build.identity import file_settings
from data_pipeline.build.masking import uniform
from data_pipeline.build.text_facts import USELESS, chunk_facts, text_facts, text_lines
from data_pipeline.build.workers import Workers, remove_scratch, scratch_file, scratch_folder
from data_pipeline.shards.compatibility import differences, encoding_settings, label_settings
from data_pipeline.text.corpus import Listing
from data_pipeline.text.documents import (
    Document,
    Labels,
    Reading,
    Source,
    read_documents,
    undecodable_together,
)

META_NAME = "store.json"
CHUNK_CHARACTERS = 1 << 20  # characters of text that one job tokenizes
_SPLIT = 0x5EED  # stream of the held-out split
_ARRAYS = ("ids", "word_starts", "sentences", "documents", "contents", "classes")


# ------------------------------------------------------------------ reading


class TokenStore:
    """A finished store, opened for reading. Tokens are read, not memory-mapped, so that memory use stays small.

    Raises ``ValueError`` (one line) if a file is missing or its size differs from the size in ``store.json``.
    """

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        try:
            self.meta: dict[str, Any] = json.loads((self.folder / META_NAME).read_text())
            sizes = _file_sizes(self.meta)
        except (ValueError, KeyError, TypeError):
            raise self._damaged(f"{META_NAME} is not readable") from None
        for name, size in sizes.items():
            path = self.folder / f"{name}.bin"
            on_disk = path.stat().st_size if path.is_file() else None
            if on_disk != size:
                state = "is missing" if on_disk is None else f"has {on_disk:,} bytes instead of {size:,}"
                raise self._damaged(f"{path.name} {state}")
        # Random access needs local copies: in an object store, each of a million reads would cost money and time.
        local = {name: local_copy(folder / f"{name}.bin") for name in sizes}
        # A plain array, because access to single elements of a memmap is slow.
        self.documents = np.asarray(np.memmap(local["documents"], "<u8", "r")).reshape(-1, 2)
        self._contents, self._classes = local["contents"], local.get("classes", "")
        self._files = {name: os.open(path, os.O_RDONLY) for name, path in local.items()}
        self.has_word_starts = "word_starts" in sizes

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.folder}: the token store is damaged: {what}; delete this folder and run again")

    @property
    def contents(self) -> np.ndarray:
        """Hash of the text of every document, uint64[D]; equal for exact duplicates."""
        return np.fromfile(self._contents, "<u8")

    @property
    def classes(self) -> np.ndarray:
        """Class of every document, int64[D]: its place in ``data.classes`` from 1, or 0 for none. Requires a store
        that was built with ``data.label_field``."""
        return np.fromfile(self._classes, "<u2").astype(np.int64)

    def _read(self, name: str, dtype: str, start: int, stop: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize
        return np.frombuffer(os.pread(self._files[name], size * (stop - start), size * start), dtype)

    def sentence_ends(self, start: int, stop: int) -> np.ndarray:
        """Return the index of the first token of each sentence in [start, stop), then the end of the last sentence.

        The result is int64[stop - start + 1].
        """
        return self._read("sentences", "<u8", start, stop + 1).astype(np.int64)

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Return the ids of the tokens [start, stop)."""
        return self._read("ids", self.meta["dtype"], start, stop)

    def word_starts(self, start: int, stop: int) -> np.ndarray:
        """Return a bool mask of the tokens [start, stop) that begin a word; requires ``has_word_starts``."""
        return self._read("word_starts", "?", start, stop)


def _file_sizes(meta: Mapping[str, Any]) -> dict[str, int]:
    """Return the size in bytes of every array of a store, from the contents of ``store.json``."""
    documents, sentences, tokens = (int(meta[name]) for name in ("documents", "sentences", "tokens"))
    sizes = {
        "ids": tokens * np.dtype(meta["dtype"]).itemsize,
        "sentences": 8 * (sentences + 1),
        "documents": 16 * (documents + 1),
        "contents": 8 * documents,
    }
    optional = {"word_starts": tokens, "classes": 2 * documents}
    return sizes | {name: optional[name] for name in _optional_arrays(meta["settings"])}


def _optional_arrays(settings: dict[str, Json]) -> list[str]:
    """Return the names of the arrays that only a store with these settings has."""
    present = {"word_starts": settings["data.word_segmenter"] != "none", "classes": "data.label_field" in settings}
    return [name for name, is_present in present.items() if is_present]


def content_hash(document: Sequence[str]) -> int:
    """Return a 64-bit hash of the text of a document."""
    text = "\n".join(document).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def held_out(contents: np.ndarray, *, seed: int, fraction: float) -> np.ndarray:
    """Return a mask bool[D] of the held-out documents.

    Documents are selected by a hash of (seed, content), so duplicates stay together.

    If ``fraction`` is above 0 and there are at least four distinct documents, at least two are held out and at
    least two remain for training. If there are two or three, at least one is held out and at least one remains.
    """
    distinct = np.unique(contents)
    if fraction == 0 or len(distinct) < 2:
        return np.zeros(len(contents), bool)
    draws = uniform(hash_key(seed, _SPLIT, distinct))
    fewest = 2 if len(distinct) >= 4 else 1
    count = min(max(int((draws < fraction).sum()), fewest), len(distinct) - fewest)
    return np.isin(contents, distinct[np.argsort(draws, kind="stable")[:count]])


# ------------------------------------------------------------------ building


def corpus_settings(
    data: DataConfig, sources: Sequence[Source], recorded: Mapping[str, Json] | None = None
) -> dict[str, Any]:
    """Return the settings that identify the corpus. If ``recorded``, the settings of an earlier build, is given,
    content hashes are included only if it contains them (see :func:`file_settings`)."""
    files = [(source.name, source.path) for source in sources]
    return file_settings("data.corpus", files, location(data.shards) if data.shards else None, recorded)


def store_settings(
    data: DataConfig, tokenizer: Tokenizer, sources: Sequence[Source], recorded: Mapping[str, Json] | None = None
) -> dict[str, Any]:
    """Return the settings that determine the contents of a store. ``recorded``: the settings of a finished
    store."""
    return {
        "vocabulary": tokenizer.fingerprint,
        "data.line": data.line,
        "data.json_field": data.json_field,
        "data.word_segmenter": data.word_segmenter,
        **corpus_settings(data, sources, recorded),
        **label_settings(data),
        **encoding_settings(data),
    }


def store_folder(data: DataConfig) -> Location:
    """Return the folder of the token store of ``data``."""
    return location(data.token_store) if data.token_store else location(data.shards) / "store"


def existing_store(data: DataConfig, tokenizer: Tokenizer, sources: Sequence[Source]) -> TokenStore | None:
    """Open the token store of ``data``; return None if it does not exist.

    Raises ``ValueError`` if the store was built with other settings or is damaged.
    """
    folder = store_folder(data)
    if not (folder / META_NAME).is_file():
        return None
    remove_chunks(folder)
    store = TokenStore(folder)
    recorded = store.meta["settings"]
    if changed := differences(recorded, store_settings(data, tokenizer, sources, recorded), "store"):
        raise ValueError(
            f"{folder}: the token store was built with other settings: {changed}; name another folder in "
            "data.token_store, or delete this folder"
        )
    return store


def chunk_folder(folder: Location, settings: dict[str, Json], cut: str) -> Location:
    """Create the folder for the chunks of an unfinished store; remove chunks built with other settings.

    ``cut`` names the method that splits the text into chunks; chunks made by different methods cannot be combined.
    """
    state = json.dumps([settings, cut])
    chunks = folder / f".chunks-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
    remove_chunks(folder, but=chunks)
    chunks.mkdir(parents=True, exist_ok=True)
    remove_scratch(chunks)
    return chunks


def build_store(
    folder: Location,
    data: DataConfig,
    vocab: Location,
    tokenizer: Tokenizer,
    listing: Listing,
    workers: Workers,
    report: Callable[[str], None],
) -> TokenStore:
    """Build the token store of a corpus in ``folder``; keep the finished chunks of an interrupted build.

    The caller must hold the lock of ``folder`` (``workers.exclusive``). Raises ``ValueError`` if the corpus yields
    no tokens.
    """
    settings = store_settings(data, tokenizer, listing.sources)
    chunks, readings = chunk_folder(folder, settings, "all in one"), list[Reading]()
    finished = {path.name for path in chunks.glob("*.npz")}
    total = 0

    def jobs() -> Iterator[tuple[Any, ...]]:
        nonlocal total
        for number, documents in enumerate(cut_documents(listing.sources, data, readings)):
            total = number + 1
            path = chunks / f"{number:06d}.npz"
            if path.name not in finished:
                yield path, documents, str(vocab), data

    characters = 0
    for done in workers.run(tokenize_chunk, jobs()):
        if (characters + done) >> 24 > characters >> 24:
            report(f"tokenized {(characters + done) / 1e6:,.0f} million characters")
        characters += done
    paths = [chunks / f"{number:06d}.npz" for number in range(total)]
    merge_chunks(folder, paths, settings, tokenizer, listing.summary(), readings)
    remove_chunks(folder)
    store = TokenStore(folder)
    for line in text_lines(store.meta["text"]):
        report(line)
    return store


def remove_chunks(folder: Location, but: Location | None = None) -> None:
    """Remove all chunk folders except ``but``."""
    for chunks in folder.glob(".chunks-*"):
        if chunks != but:
            remove_tree(chunks)


def cut_documents(
    sources: Sequence[Source],
    data: DataConfig,
    readings: list[Reading] | None = None,
    corpus: Sequence[Source] = (),
) -> Iterator[list[Document]]:
    """Yield the documents of all sources in lists of about ``CHUNK_CHARACTERS`` characters.

    How each source is read is appended to ``readings``. Raises ``ValueError`` as ``read_documents`` does, and one
    that names all sources of ``corpus`` (by default of ``sources``) that are not in their encoding.
    """
    chunk: list[Document] = []
    size = 0
    for source in sources:
        labels, reading = Labels(data.label_field, data.classes), Reading(source.name)
        if readings is not None:
            readings.append(reading)
        documents = read_documents(
            source, line=data.line, json_field=data.json_field, labels=labels, reading=reading
        )
        with undecodable_together(corpus or sources):
            for document in documents:
                chunk.append(document)
                size += sum(map(len, document))
                if size >= CHUNK_CHARACTERS:
                    yield chunk
                    chunk, size = [], 0
    if chunk:
        yield chunk


@lru_cache(maxsize=1)
def cached_tokenizer(vocab: str, data: DataConfig) -> Tokenizer:
    """Load the tokenizer once per worker process."""
    return load_tokenizer(local_copy(location(vocab)), **data.rules)


def tokenize_chunk(path: Location, documents: list[Document], vocab: str, data: DataConfig) -> int:
    """Tokenize documents into the chunk file ``path``; return their number of characters. Runs as a worker job."""
    tokenizer = cached_tokenizer(vocab, data)
    texts = [sentence for document in documents for sentence in document]
    arrays = {}
    if data.word_segmenter == "none":
        ids, lengths = tokenizer.encode_flat(texts)
    else:
        ids, lengths, arrays["word_starts"] = _encode_segmented(tokenizer, texts)
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    sentences = np.add.reduceat(lengths > 0, starts, dtype=np.int64)
    contents = np.array([content_hash(document) for document in documents], np.uint64)
    arrays |= chunk_facts(texts, ids, tokenizer)
    arrays["ids"] = ids.astype(_id_dtype(tokenizer))
    arrays["lengths"] = lengths[lengths > 0].astype(np.uint32)
    arrays["sentences"] = sentences[sentences > 0].astype(np.uint32)
    arrays["contents"] = contents[sentences > 0]
    arrays["classes"] = np.array([document.label for document in documents], "<u2")[sentences > 0]
    with scratch_file(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return sum(map(len, texts))


def _id_dtype(tokenizer: Tokenizer) -> str:
    return "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"


def _encode_segmented(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the token ids, the number of tokens per text, and the word starts.

    jieba determines the words of Chinese text; the tokenizer determines all other words.
    """
    jieba = load_jieba()
    ids: list[int] = []
    lengths, starts = [], []
    for text in texts:
        tokens, offsets = tokenizer.encode_with_offsets(text)
        words = {start for _, start, _ in jieba.tokenize(text)}
        for token, (start, _) in zip(tokens, offsets, strict=True):
            if start < len(text) and (is_cjk(text[start]) or (start > 0 and is_cjk(text[start - 1]))):
                starts.append(start in words)
            else:
                starts.append(not tokenizer.continuation[token])
        ids += tokens
        lengths.append(len(tokens))
    return np.array(ids, np.int32), np.array(lengths, np.int64), np.array(starts, bool)


def load_jieba() -> ModuleType:
    """Import the word segmenter jieba. Raises ``ValueError`` if it is not installed."""
    try:
        import jieba
    except ImportError:
        raise ValueError(
            "data.word_segmenter: jieba is not installed; run: pip install 'bert_jax[chinese]', or use "
            "--data.word_segmenter none"
        ) from None
    jieba.setLogLevel("WARNING")
    return jieba


def merge_chunks(
    folder: Location, chunks: Sequence[Location], settings: dict[str, Json], tokenizer: Tokenizer, listed: str,
    readings: Sequence[Reading],
) -> None:  # fmt: skip
    """Concatenate the chunks into the arrays of the store, one chunk at a time, and write ``store.json``.

    ``listed`` states which files were read and skipped. Raises ``ValueError`` if the chunks contain no tokens, or
    if almost all tokens are unknown ([UNK]).
    """
    facts = []
    remove_scratch(folder)
    in_store = isinstance(folder, ObjectPath)
    scratch = Path(tempfile.mkdtemp()) if isinstance(folder, ObjectPath) else scratch_folder(folder)
    files = {name: (scratch / f"{name}.bin").open("wb") for name in _ARRAYS}
    documents = sentences = tokens = labeled = 0
    try:
        for path in chunks:
            with np.load(io.BytesIO(path.read_bytes()) if in_store else path) as chunk:
                first = sentences + _starts_uint64(chunk["sentences"])
                offsets = tokens + _starts_uint64(chunk["lengths"])
                files["ids"].write(chunk["ids"].tobytes())
                facts.append({name: chunk[name] for name in ("sizes", "merged", "merged_counts") if name in chunk})
                if "word_starts" in chunk:
                    files["word_starts"].write(chunk["word_starts"].tobytes())
                files["sentences"].write(offsets[:-1].tobytes())
                files["documents"].write(np.stack([first, offsets[first - sentences]], 1)[:-1].tobytes())
                files["contents"].write(chunk["contents"].tobytes())
                if "classes" in chunk:  # an earlier version made chunks without classes
                    files["classes"].write(chunk["classes"].tobytes())
                    labeled += int(np.count_nonzero(chunk["classes"]))
                documents, sentences, tokens = documents + len(first) - 1, int(first[-1]), int(offsets[-1])
        files["sentences"].write(np.array([tokens], "<u8").tobytes())
        files["documents"].write(np.array([sentences, tokens], "<u8").tobytes())
    finally:
        for file in files.values():
            file.close()
    if not tokens:
        raise ValueError("data.corpus: the corpus yields no tokens; use other text or another vocabulary")
    text = text_facts(listed, readings, facts)
    if text["unknown"] > USELESS * tokens:
        raise ValueError(
            f"data.vocab: {text['unknown'] / tokens:.1%} of the tokens are [UNK], so nothing can be learned; use a "
            f"vocabulary of this text (a word of more than {MAX_CHARS_PER_WORD} characters is always [UNK])"
        )
    optional = _optional_arrays(settings)
    if "classes" in optional and not labeled:
        raise ValueError(
            f"data.label_field: no JSON line of the corpus has the field {settings['data.label_field']!r}; name a "
            "field that holds the class of the document"
        )
    for name in _ARRAYS:
        if name not in ("word_starts", "classes") or name in optional:
            built, final = scratch / f"{name}.bin", folder / f"{name}.bin"
            final.upload(built) if isinstance(final, ObjectPath) else built.replace(final)
    shutil.rmtree(scratch)
    counts = {"documents": documents, "sentences": sentences, "tokens": tokens}
    meta = {"settings": settings, "dtype": _id_dtype(tokenizer), "text": text, **counts}
    write_whole(folder / META_NAME, json.dumps(meta, sort_keys=True, indent=1) + "\n")


def _starts_uint64(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.uint64)]).astype("<u8")
