"""A map of words: their input embeddings, projected onto the first two principal components."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax.contrib.analysis.word_vectors import word_tokens
from bert_jax.inference.engine import Engine
from bert_jax.io.text_lines import numbered_lines, opened
from bert_jax.model.embeddings import word_table


class WordsMap(NamedTuple):
    """Words with their coordinates float64[words, 2], and the share of the variance on each of the two axes."""

    words: list[str]
    points: np.ndarray
    variance: tuple[float, float]


def words_map(loaded: Engine, words: Sequence[str]) -> WordsMap:
    """Return the map of ``words``. The vector of a word is the mean of the input embeddings of its pieces.

    Raises ``ValueError`` for fewer than two words, a word without known pieces, and a network without a table of
    input embeddings.
    """
    unique = list(dict.fromkeys(words))
    if len(unique) < 2:
        raise ValueError(f"words: {len(unique)} word is not enough for a map; give two or more")
    table = word_table(loaded.params)
    if table is None:
        raise ValueError(f"{loaded.name}: the network has no table of input embeddings; omit words")
    tokens = word_tokens(loaded.need_tokenizer(), unique)
    vectors = np.stack([table[ids].mean(axis=0, dtype=np.float64) for ids in tokens])
    points, variance = principal_components(vectors)
    return WordsMap(unique, points, variance)


def principal_components(vectors: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Return the coordinates float64[N, 2] of ``vectors`` [N, H] on their first two principal components, and the
    share of the variance on each. The sign of an axis makes its largest coordinate positive."""
    centered = vectors - vectors.mean(axis=0)
    left, scales, _ = np.linalg.svd(centered, full_matrices=False)
    points = np.zeros((len(vectors), 2))
    points[:, : len(scales)] = (left * scales)[:, :2]
    largest = np.abs(points).argmax(axis=0)
    points *= np.where(points[largest, [0, 1]] < 0, -1.0, 1.0)
    shares = np.zeros(2)
    shares[: len(scales)] = (scales**2 / max(float((scales**2).sum()), 1e-30))[:2]
    return points, (float(shares[0]), float(shares[1]))


def read_words(value: str) -> list[str]:
    """Return the words of the option ``--words``: those of a file, one per line, or words separated by commas.
    Raises ``ValueError`` if there is no word, for a single word that is not a file, and for a file that is not
    UTF-8."""
    path, is_file = Path(value), False
    with contextlib.suppress(OSError):  # a list can be longer than the name of a file
        is_file = path.is_file()
    if is_file:
        with opened(path) as file:
            words = [line.strip() for _, line in numbered_lines(file, value)]
    elif "," in value:
        words = [word.strip() for word in value.split(",")]
    else:
        raise ValueError(f"--words: {value}: no such file; give a file with a word per line, or words and commas")
    words = [word for word in words if word]
    if not words:
        raise ValueError(f"--words: {value}: no words; give two or more")
    return words
