"""Word vectors in the text and the binary format of word2vec, and in the format of GloVe (text without a header).

A file holds one vector per word: ``word x1 ... xD``, values as shortest decimals (text) or float32, little-endian
(binary), after a first line with the number of words and of values. A model is ``encoder: none`` with a vocabulary
of whole words. Special tokens that a file lacks get the vector 0, and special tokens with this vector are not
written, so that reading and writing a file preserves words and values.
"""

import dataclasses
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.config.switches import ANY, Supported, check_fields
from bert_jax.contrib.ancestors.config import WordVectorsConfig
from bert_jax.interop.model_bundle import Format, ModelBundle, ReadOptions, StoredDtype, check_shapes
from bert_jax.io.text_lines import opened
from bert_jax.tokenization import SPECIAL_PIECES, build_tokenizer
from bert_jax.tokenization.wordpiece import CJK_RUN

TEXT_FILE, BINARY_FILE = "vectors.txt", "vectors.bin"
TABLE = "embeddings/word_embeddings/embedding"
SUFFIXES = (".txt", ".vec", ".bin", ".txt.gz", ".vec.gz", ".bin.gz")
SUPPORTED: Supported = {field.name: ANY for field in dataclasses.fields(WordVectorsConfig)} | {
    "encoder": ("none",), "position_embeddings": ("none",), "type_vocab_size": (0,), "embedding_norm": ("no",),
    "final_norm": ("no", "auto"), "embedding_scale": (False,),
}  # fmt: skip
_HEADER = re.compile(rb"(\d{1,12}) (\d{1,6})\s*\n")
_LONGEST_WORD = 4096
_BLOCK = 1 << 16


def is_word2vec(path: Path) -> bool:
    """Return True if ``path`` is a file of vectors, or a folder that :func:`write_word2vec` wrote."""
    if path.is_dir():
        return (path / BINARY_FILE).is_file()
    if not path.is_file() or not path.name.endswith(SUFFIXES):
        return False
    with opened(path) as file:
        first = file.readline(_BLOCK)
    return _HEADER.fullmatch(first) is not None or _values_of(first) is not None


def read_word2vec(path: Path, options: ReadOptions) -> ModelBundle:
    """Read a file of vectors. Words that begin or end with a white-space character other than " ", such as a
    no-break space, are skipped, because no word of a text matches them; a note states their number. Raises
    ``ValueError`` with one line for a damaged file, for a word that occurs twice and for a vector that is not
    finite."""
    file = path / BINARY_FILE if path.is_dir() else path
    with opened(file) as stream:
        is_binary = ".bin" in file.suffixes
        every, vectors = _read_binary(file, stream) if is_binary else _read_text(file, stream)
    kept = [row for row, word in enumerate(every) if word == word.strip()]
    words, vectors = [every[row] for row in kept], vectors[kept]
    if not words:
        raise ValueError(f"{file}: contains no word")
    seen: set[str] = set()
    for word in words:
        if word in seen:
            raise ValueError(f"{file}: the word {word[:40]!r} occurs twice; remove one of them")
        seen.add(word)
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        word = words[int(finite.argmin())][:40]
        raise ValueError(f"{file}: the vector of {word!r} has NaN or infinite values; remove the word")
    missing = [piece for piece in SPECIAL_PIECES if piece not in seen]
    vocabulary = [*missing, *words]
    table = np.concatenate([np.zeros((len(missing), vectors.shape[1]), np.float32), vectors])
    lower_case = options.lower_case
    if lower_case is None:
        lower_case = all(word == word.lower() for word in words if word not in SPECIAL_PIECES)
    # The words of many files have accents: they are stripped only where none has.
    rules = TokenizerConfig(
        lower_case=lower_case, strip_accents=False if _has_accents(words) else None,
        cjk_words=any(len(word) > 1 and CJK_RUN.fullmatch(word) for word in words),
    )  # fmt: skip
    spec = ModelSpec(
        model=WordVectorsConfig(
            encoder="none", vocab_size=len(table), hidden_size=table.shape[1], num_layers=0, type_vocab_size=0,
            position_embeddings="none", embedding_norm="no", final_norm="no",
            pooling="mean",
        ),
        heads=HeadsConfig(),
        tokenizer=rules,
    )  # fmt: skip
    params = {TABLE: table}
    content = "".join(f"{word}\n" for word in vocabulary).encode()
    tokenizer = build_tokenizer(rules, content, str(file))
    ids = tokenizer.encode_batch(words)
    found = sum(len(own) == 1 and own[0] == len(missing) + row for row, own in enumerate(ids))
    notes = [f"{len(words):,} words, {table.shape[1]} values each"]
    if len(words) < len(every):
        notes.append(f"{len(every) - len(words):,} words that begin or end with white space are skipped")
    if found < len(words):
        notes.append(f"{len(words) - found:,} words are not found in texts, which are split at punctuation")
    return ModelBundle(
        spec=spec, params=params, tokenizer_content=content, notes=tuple(notes),
        origin={"format": "word2vec", "name": file.name},
    )  # fmt: skip


def write_word2vec(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """Write the vectors to the empty ``folder``, as text and binary; return notes. Raises ``ValueError`` for a
    model that is more than a table of vectors, and for one without a vocabulary of words."""
    model = weights.spec.model
    check_fields(model, SUPPORTED, "word2vec")
    check_shapes(weights.spec, weights.params, folder)
    tokenizer = weights.spec.tokenizer
    if tokenizer is None or weights.tokenizer_content is None or not tokenizer.file.endswith(".txt"):
        raise ValueError("word2vec: the model has no vocab.txt; vectors without words cannot be written")
    words = build_tokenizer(tokenizer, weights.tokenizer_content, tokenizer.file).pieces(range(model.vocab_size))
    rows = [
        (word.encode("utf-8"), vector)
        for word, vector in zip(words, weights.params[TABLE].astype("<f4", copy=False), strict=True)
        if word not in SPECIAL_PIECES or vector.any()
    ]
    header = f"{len(rows)} {model.hidden_size}\n".encode()
    with (folder / BINARY_FILE).open("wb") as binary, (folder / TEXT_FILE).open("wb") as text:
        binary.write(header)
        text.write(header)
        for word, vector in rows:
            binary.write(word + b" " + vector.tobytes() + b"\n")
            text.write(word + b" " + " ".join(map(str, vector)).encode() + b"\n")
    return [f"{TEXT_FILE}, {BINARY_FILE}: {len(rows):,} words, {model.hidden_size} values each"]


def _values_of(line: bytes) -> np.ndarray | None:
    """Return the values after the word of a line of text; None if it is not such a line."""
    parts = line.rstrip().split(b" ")[1:]
    try:
        with np.errstate(over="ignore"):  # values beyond float32 become infinite and are refused
            return np.array([np.float32(part) for part in parts], np.float32) if parts else None
    except ValueError:
        return None


def _read_text(path: Path, file: IO[bytes]) -> tuple[list[str], np.ndarray]:
    first = file.readline(_BLOCK)
    header = _HEADER.fullmatch(first)
    expected = int(header[1]) if header else None
    lines: Iterator[bytes] = iter(file)
    words, rows, width = [], [], int(header[2]) if header else None
    for number, line in enumerate(lines if header else _with(first, lines), 2 if header else 1):
        if not line.strip():
            continue
        word, _, _ = line.partition(b" ")
        values = _values_of(line)
        width = width or (None if values is None else len(values))
        if values is None or len(values) != width:
            found = "none" if values is None else len(values)
            raise ValueError(f"{path}:{number}: {found} values after the word; expected {width}")
        words.append(_decoded(path, word))
        rows.append(values)
    if not rows or (expected is not None and expected != len(rows)):
        raise ValueError(f"{path}: {len(rows):,} words; the first line states {expected or 'none'}")
    return words, np.stack(rows)


def _with(first: bytes, lines: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from lines


def _read_binary(path: Path, file: IO[bytes]) -> tuple[list[str], np.ndarray]:
    header = _HEADER.fullmatch(file.readline(_BLOCK))
    if header is None:
        raise ValueError(f"{path}: the first line must hold the number of words and of values; not a binary file")
    count, width = int(header[1]), int(header[2])
    size = 4 * width
    words: list[str] = []
    rows: list[np.ndarray] = []
    for number in range(count):
        word = bytearray()
        while (byte := file.read(1)) not in (b" ", b"") and len(word) <= _LONGEST_WORD:
            if byte != b"\n":  # the line break after the vector before, which some writers omit
                word += byte
        vector = file.read(size)
        if byte != b" " or len(vector) < size:
            raise ValueError(f"{path}: ends or is damaged at word {number + 1:,} of {count:,}; copy the file again")
        words.append(_decoded(path, bytes(word)))
        rows.append(np.frombuffer(vector, "<f4").astype(np.float32))
    if not rows:
        raise ValueError(f"{path}: contains no vector")
    return words, np.stack(rows)


def _has_accents(words: list[str]) -> bool:
    """Return True if a word has a mark that the tokenizer would strip."""
    return any(
        unicodedata.category(char) == "Mn"
        for word in words
        if not word.isascii()
        for char in unicodedata.normalize("NFD", word)
    )


def _decoded(path: Path, word: bytes) -> str:
    if not word:
        raise ValueError(f"{path}: a vector without a word; remove it")
    try:
        return word.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: the word {word[:40]!r} is not UTF-8; convert the file") from None


FORMAT = Format(
    "a file of word vectors (word2vec: .txt, .vec, .bin; GloVe: .txt)",
    is_word2vec,
    read_word2vec,
    write_word2vec,
    SUPPORTED,
    "from gensim.models import KeyedVectors\n\n"
    'vectors = KeyedVectors.load_word2vec_format("DIR/vectors.bin", binary=True)',
)
