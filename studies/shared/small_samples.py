"""Small samples of public tasks: SST-2, STS-B, SICK (inference), QNLI, RTE, CLINC150, Reuters R8.

Each function returns the records of a seed. The records of choice and of results are the same for every seed; those
for training are drawn from the others.
"""

import csv
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from scipy.sparse import hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge

from bert_jax.hashing import permutation

SCORED_QNLI, SCORED_RTE, INTENTS = 1600, 1000, 20

Record = dict[str, str]  # text, label and, for pairs, text_pair


@dataclass(frozen=True)
class Texts:
    """The records of one seed: for training, for choices, and for results."""

    train: Sequence[Record]
    choice: Sequence[Record]
    results: Sequence[Record]


def table(path: Path, **columns: str) -> list[Record]:
    """Return the records of a file of tab-separated columns; ``columns``: name of the column of each field."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [{field: row[column] for field, column in columns.items()} for row in rows]


def sample(pool: Sequence[Record], scored: Sequence[Record], seed: int, count: int) -> Texts:
    """Return ``count`` records of ``pool`` for training, and each half of ``scored``."""
    chosen = [pool[place] for place in permutation(len(pool), seed)[:count]]
    order = permutation(len(scored), 0)
    first, second = ([scored[place] for place in sorted(part)] for part in (order[::2], order[1::2]))
    return Texts(chosen, first, second)


def split_off(records: Sequence[Record], count: int) -> tuple[list[Record], list[Record]]:
    """Return ``count`` records, the same in every call, and the others."""
    order = permutation(len(records), 0)
    return [records[place] for place in order[:count]], [records[place] for place in order[count:]]


def sst2(data: Path, seed: int, count: int) -> Texts:
    train, dev = (table(data / f"glue/SST-2/{one}.tsv", text="sentence", label="label") for one in ("train", "dev"))
    return sample(train, dev, seed, count)


def stsb(data: Path, seed: int, count: int) -> Texts:
    columns = {"text": "sentence1", "text_pair": "sentence2", "label": "score"}
    train, dev = (table(data / f"glue/STS-B/{one}.tsv", **columns) for one in ("train", "dev"))
    return sample(train, dev, seed, count)


def sick(data: Path, seed: int, count: int) -> Texts:
    """Of all pairs, those of two sentences in a third of the sentences are scored, those of two other sentences are
    for training, and mixed pairs are dropped: no sentence is in both parts."""
    columns = {"text": "sentence_A", "text_pair": "sentence_B", "label": "entailment_judgment"}
    pairs = [pair for part in ("train", "dev") for pair in table(data / f"nli_sick/{part}.tsv", **columns)]
    held_out = [sum(crc32(pair[name].encode()) % 3 == 0 for name in ("text", "text_pair")) for pair in pairs]
    parts = {n: [pair for pair, own in zip(pairs, held_out, strict=True) if own == n] for n in (0, 2)}
    return sample(parts[0], parts[2], seed, count)


def qnli(data: Path, seed: int, count: int) -> Texts:
    columns = {"text": "question", "text_pair": "sentence", "label": "label"}
    scored, pool = split_off(table(data / "glue/QNLI/dev.tsv", **columns), SCORED_QNLI)
    return sample(pool, scored, seed, count)


def rte(data: Path, seed: int, count: int) -> Texts:
    columns = {"text": "sentence1", "text_pair": "sentence2", "label": "label"}
    train, dev = (table(data / f"glue/RTE/{one}.tsv", **columns) for one in ("train", "dev"))
    more, pool = split_off(train, SCORED_RTE)
    return sample(pool, [*dev, *more], seed, count)


def clinc(data: Path, seed: int, count: int) -> Texts:
    """``INTENTS`` of the 150 intents, the same number of training records of each."""
    splits = json.loads((data / "clinc150/data_full.json").read_text(encoding="utf-8"))
    names = sorted({intent for _, intent in splits["train"]})
    kept = {names[place] for place in permutation(len(names), 0)[:INTENTS]}
    parts = {
        part: [{"text": text, "label": intent} for text, intent in splits[part] if intent in kept]
        for part in ("train", "val", "test")
    }
    chosen = []
    for number, name in enumerate(sorted(kept)):
        own = [record for record in parts["train"] if record["label"] == name]
        chosen += [own[place] for place in permutation(len(own), seed, number)[: count // INTENTS]]
    return Texts(chosen, parts["val"], parts["test"])


def tfidf_answers(kind: str, texts: Texts) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the answers of a regression on TF-IDF vectors of words and pairs of words to choice and results; of a
    pair the vectors a, b, abs(a - b) and a * b."""
    names = ("text", "text_pair")
    vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    vectors.fit([record[name] for record in texts.train for name in names if name in record])

    def features(records: Sequence[Record]) -> Any:
        a = vectors.transform([record["text"] for record in records])
        if "text_pair" not in records[0]:
            return a
        b = vectors.transform([record["text_pair"] for record in records])
        return hstack([a, b, abs(a - b), a.multiply(b)]).tocsr()

    is_value = kind == "regression"
    model = Ridge() if is_value else LogisticRegression(C=10, max_iter=1000)
    model.fit(features(texts.train), [float(r["label"]) if is_value else r["label"] for r in texts.train])

    def answers(records: Sequence[Record]) -> list[dict[str, Any]]:
        if is_value:
            found = [{"value": value} for value in model.predict(features(records)).tolist()]
        else:
            rows = model.predict_proba(features(records)).tolist()
            of_classes = [dict(zip(model.classes_, row, strict=True)) for row in rows]
            found = [{"label": max(one, key=one.__getitem__), "probabilities": one} for one in of_classes]
        return [{**one, "gold": record["label"]} for one, record in zip(found, records, strict=True)]

    return answers(texts.choice), answers(texts.results)
