"""The vocabulary words nearest to each token of a text, in the table of input embeddings and at every layer.

Shapes: L layers, N layers with the embeddings, T tokens, C candidates, H width.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.contrib.analysis.word_neighbors import vocabulary_words
from bert_jax.contrib.analysis.word_vectors import sentence_word_vectors
from bert_jax.inference.engine import Engine
from bert_jax.model.embeddings import word_table

# Multiple of the difference with random parameters from which on a nearest word counts as near.
CLEAR = 1.5
# Words that are run together, and words that are compared together.
_WINDOW, _BLOCK = 512, 256


class NearestWords(NamedTuple):
    """The words nearest to each token by cosine, the nearest first: indices int64[N, T, K] into ``words``, and
    cosines float32[N, T, K]. ``sources`` names the vectors of each of the N rows; ``medians``, float32[N, T],
    are the medians of the cosines to all words."""

    words: list[str]
    sources: list[str]
    indices: np.ndarray
    cosines: np.ndarray
    medians: np.ndarray


def nearest_words(
    loaded: Engine, ids: Sequence[int], hidden_NxTxH: np.ndarray, top: int, candidates: int
) -> NearestWords:
    """Return the ``top`` words nearest to each of the tokens ``ids``, whose hidden states are float32[N, T, H].

    The candidates are ``candidates`` words of the vocabulary: about half of them are nearest to the tokens in the
    table of input embeddings, the others have the lowest ids. At a layer, their vectors are computed from each word
    alone. The first row, only for a network with such a table, compares the rows of the table. The word of a token
    itself is no candidate. Raises ``ValueError`` for a vocabulary without whole words.
    """
    tokenizer, table = loaded.need_tokenizer(), word_table(loaded.params)
    words, word_ids = vocabulary_words(loaded)
    static_TxV = None if table is None else _units(table[list(ids)]) @ _units(table[word_ids]).T
    pool = _pool(len(words), static_TxV, top, candidates)
    names = [words[i] for i in pool.tolist()]
    sources = ["embeddings", *(f"layer {i}" for i in range(1, len(hidden_NxTxH)))]
    scores_NxTxC = np.concatenate([*_contextual(loaded, names, hidden_NxTxH)], axis=2)
    if static_TxV is not None:
        sources.insert(0, "input table")
        scores_NxTxC = np.concatenate([static_TxV[None, :, pool], scores_NxTxC])
    medians = np.median(scores_NxTxC, axis=2)
    fold = str.casefold if tokenizer.lower_case else str
    places = {fold(name): i for i, name in enumerate(names)}
    for token, one in enumerate(ids):
        own = places.get(fold(tokenizer.decode([one]).strip()))
        if own is not None:
            scores_NxTxC[:, token, own] = -np.inf
    top = min(top, len(names) - 1) or 1
    order = np.argsort(-scores_NxTxC, axis=2, kind="stable")[..., :top]
    return NearestWords(names, sources, order, np.take_along_axis(scores_NxTxC, order, axis=2), medians)


def above_random(found: NearestWords, random: NearestWords) -> np.ndarray:
    """Return for which rows and tokens the nearest cosine exceeds the median by more than ``CLEAR`` times the
    difference between these two in ``random``, found with random parameters of the same network: bool[N, T]."""
    own, other = (one.cosines[..., 0] - one.medians for one in (found, random))
    return own > CLEAR * other


def _pool(words: int, static_TxV: np.ndarray | None, top: int, candidates: int) -> np.ndarray:
    """Return the indices of the candidates among ``words`` words, int64[C]."""
    lowest = np.arange(words)
    if static_TxV is None or candidates >= words:
        return lowest[:candidates]
    # One more than shown, because the word of a token is no candidate for it.
    share = min(words, max(top + 1, candidates // (2 * len(static_TxV))))
    near = np.unique(np.argpartition(-static_TxV, share - 1, axis=1)[:, :share])[:candidates]
    return np.union1d(near, np.setdiff1d(lowest, near)[: candidates - len(near)])


def _contextual(loaded: Engine, names: Sequence[str], hidden_NxTxH: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the cosines float32[N, T, C'] of the tokens and C' further words at every layer."""
    tokenizer, queries = loaded.need_tokenizer(), _units(hidden_NxTxH)
    lead = () if tokenizer.framed else (tokenizer.cls_id,)
    layers = range(len(hidden_NxTxH))
    alone = sentence_word_vectors(loaded, ([name] for name in names), layers=layers, lead=lead, window=_WINDOW)
    while block := [vectors[:, 0] for vectors in itertools.islice(alone, _BLOCK)]:
        yield queries @ _units(np.stack(block, axis=1)).swapaxes(1, 2)


def _units(vectors: np.ndarray) -> np.ndarray:
    """Return ``vectors`` with length 1; vectors of zeros stay."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-30)
