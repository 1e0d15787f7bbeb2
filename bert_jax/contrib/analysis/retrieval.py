"""Rerank search hits with a cross-encoder, and mine hard negatives.

A cross-encoder reads a query and a text together (Nogueira and Cho 2019). Hard negatives are training data for
retrieval (Karpukhin et al. 2020)."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bert_jax.contrib.analysis.neighbors import Hits, nearest
from bert_jax.contrib.analysis.texts_or_vectors import Collection, embedded, lengths_of
from bert_jax.inference.batching import BatchOptions
from bert_jax.inference.embed import VectorOptions
from bert_jax.inference.engine import Engine
from bert_jax.inference.predict import predict
from bert_jax.metrics.retrieval import RESOLUTION

_QUERIES = 64  # whose hits are read together


def relevance_label(model: Engine, label: str | None) -> str | None:
    """Return the class whose probability is the relevance of a text: ``label``, or the second of two classes; None
    for a model that predicts a value, which is the relevance.

    Raises ``ValueError`` for a model that does not classify texts, and if the class is missing or unknown.
    """
    heads = model.spec.heads
    # Predictions have the names of the classes in the files of the run, which exports may have renamed.
    labels, names = model.spec.settings_of("classification").labels, heads.sequence_labels
    if not labels:
        raise ValueError(f"--rerank {model.name}: the model has no head for pairs of texts; fine-tune it on them")
    if heads.problem == "regression":
        if label is not None:
            raise ValueError(f"--rerank_label: {label} is not allowed; the model predicts a value")
        return None
    if label is None and len(labels) != 2:
        raise ValueError(f"--rerank_label: missing; give the class of relevant texts: {', '.join(labels)}")
    if label is not None and label not in (*labels, *names):
        raise ValueError(f"--rerank_label: {label} is not allowed; use one of {', '.join(labels)}")
    return labels[1] if label is None else label if label in labels else labels[names.index(label)]


def require_texts(*collections: Collection) -> None:
    """Raise ``ValueError`` if a collection has vectors instead of texts."""
    for collection in collections:
        if collection.texts is None:
            raise ValueError(f"{collection.name}: --rerank reads texts, but these are vectors; give the texts")


def reranked(
    found: Iterator[Hits], queries: Collection, corpus: Collection, model: Engine, label: str | None, top: int,
    batches: BatchOptions = BatchOptions(),
) -> Iterator[Hits]:  # fmt: skip
    """Yield, for each query, the ``top`` best of its hits by the relevance that ``model`` predicts for the pair of
    query and text, with that relevance as score. Hits of the same relevance keep their order.

    ``label``: see :func:`relevance_label`. Raises ``ValueError`` if the queries or the corpus are vectors without
    texts.
    """
    require_texts(queries, corpus)
    assert queries.texts is not None and corpus.texts is not None
    numbered = enumerate(found)
    while block := list(itertools.islice(numbered, _QUERIES)):
        pairs = [(queries.texts[query], corpus.texts[row]) for query, hits in block for row in hits.rows.tolist()]
        predictions = predict(model, pairs, batches=batches)
        for _, hits in block:
            own = list(itertools.islice(predictions, len(hits.rows)))
            scores = np.array([one["value"] if label is None else one["probabilities"][label] for one in own])
            order = np.argsort(-scores, kind="stable")[:top]
            yield Hits.of(hits.rows[order], scores[order], scores)


# ------------------------------------------------------------------ hard negatives


@dataclass(frozen=True)
class Mining:
    """Choice of negatives among the ``candidates`` nearest texts: at most ``count``, each less similar than the
    right answer by ``margin``."""

    count: int = 5
    margin: float = 0.0
    candidates: int = 50


def with_negatives(
    pairs: Sequence[tuple[str, str]], corpus: Collection | None, model: Engine, mining: Mining,
    *, query_prompt: str | None = None, corpus_prompt: str | None = None,
    options: VectorOptions = VectorOptions(), batches: BatchOptions = BatchOptions(),
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield ``{"text", "text_pair", "negative": [texts]}`` for each pair of a text and its right answer.

    Negatives are the texts of ``corpus`` (None: the right answers of all pairs) that are most similar to the text
    by cosine, except those that are right answers of the same text in any pair, and those whose similarity is above
    that of the right answer minus the margin, and not equal to it: they may be further right answers. Raises
    ``ValueError`` for a corpus of vectors, and for vectors that are zero.
    """
    answers: dict[str, set[str]] = {}
    for text, answer in pairs:
        answers.setdefault(text, set()).add(answer)
    queries = _collection(list(answers))
    own = _collection(list(dict.fromkeys(answer for _, answer in pairs)))
    given = own if corpus is None else corpus
    if given.texts is None:
        raise ValueError(f"{given.name}: these are vectors; give a file of texts")
    of_queries, of_corpus = replace(options, prompt=query_prompt), replace(options, prompt=corpus_prompt)
    query_vectors = _unit_vectors(queries, model, of_queries, batches)
    own_vectors = _unit_vectors(own, model, of_corpus, batches)
    vectors = own_vectors if corpus is None else _unit_vectors(corpus, model, of_corpus, batches)
    hits = list(nearest(query_vectors, vectors, mining.candidates))
    query_rows, own_rows = ({text: row for row, text in enumerate(one.texts or ())} for one in (queries, own))
    for text, answer in pairs:
        query = query_rows[text]
        most = float(query_vectors[query] @ own_vectors[own_rows[answer]]) - mining.margin
        near = zip(hits[query].rows, hits[query].scores, strict=True)
        found = (given.texts[row] for row, score in near if score <= most + RESOLUTION)
        negatives = dict.fromkeys(one for one in found if one not in answers[text])
        yield {"text": text, "text_pair": answer, "negative": list(negatives)[: mining.count]}


def _collection(texts: Sequence[str]) -> Collection:
    return Collection("the pairs", range(len(texts)), texts=texts)


def _unit_vectors(
    collection: Collection, model: Engine, options: VectorOptions, batches: BatchOptions
) -> np.ndarray:
    vectors = embedded(collection, model, options, batches).astype(np.float64)
    return vectors / lengths_of(vectors, collection.name)[:, None]
