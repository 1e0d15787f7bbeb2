"""Hits of a search in the order of a cross-encoder, a model that reads a query and a text together (Nogueira and
Cho 2019)."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from bert_jax.analysis.collection import Collection
from bert_jax.analysis.neighbors import Hits
from bert_jax.inference.engine import Engine
from bert_jax.inference.predict import predict

_QUERIES = 64  # whose hits are read together


def relevance_label(model: Engine, label: str | None) -> str | None:
    """Return the class whose probability is the relevance of a text: ``label``, or the second of two classes; None
    for a model that predicts a value, which is the relevance.

    Raises ``ValueError`` for a model that does not classify texts, and if the class is missing or unknown.
    """
    heads = model.spec.heads
    labels = heads.sequence_labels
    if not labels:
        raise ValueError(f"--rerank {model.name}: the model has no head for pairs of texts; fine-tune it on them")
    if heads.problem == "regression":
        if label is not None:
            raise ValueError(f"--rerank_label: {label} is not allowed; the model predicts a value")
        return None
    if label is None and len(labels) != 2:
        raise ValueError(f"--rerank_label: missing; give the class of relevant texts: {', '.join(labels)}")
    if label is not None and label not in labels:
        raise ValueError(f"--rerank_label: {label} is not allowed; allowed: {', '.join(labels)}")
    return labels[1] if label is None else label


def reranked(
    found: Iterator[Hits], queries: Collection, corpus: Collection, model: Engine, label: str | None, top: int,
    **options: Any,
) -> Iterator[Hits]:  # fmt: skip
    """Yield, for each query, the ``top`` best of its hits by the relevance that ``model`` predicts for the pair of
    query and text, with that relevance as score. Hits of the same relevance keep their order.

    ``label``: see :func:`relevance_label`; ``options``: of :func:`bert_jax.inference.predict.predict`. Raises
    ``ValueError`` if the queries or the corpus are vectors without texts.
    """
    for collection in (queries, corpus):
        if collection.texts is None:
            raise ValueError(f"{collection.name}: --rerank reads texts, but these are vectors; give the texts")
    assert queries.texts is not None and corpus.texts is not None
    numbered = enumerate(found)
    while block := list(itertools.islice(numbered, _QUERIES)):
        pairs = [(queries.texts[query], corpus.texts[row]) for query, hits in block for row in hits.rows.tolist()]
        predictions = predict(model, pairs, **options)
        for _, hits in block:
            own = list(itertools.islice(predictions, len(hits.rows)))
            scores = np.array([one["value"] if label is None else one["probabilities"][label] for one in own])
            order = np.argsort(-scores, kind="stable")[:top]
            yield Hits(hits.rows[order], scores[order])
