"""A task of one's own: classes of texts that are read together with the keywords found in them.

    python run_finetune.py --config configs/finetune/csv.yaml --init_from MODEL --data.train my.csv \\
        --task.module docs/examples/keyword_task.py

The keywords of a text become its second text, and texts that have any get a metric of their own.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bert_jax.metrics import Score
from bert_jax.metrics.score import mean_score
from bert_jax.records import Record
from bert_jax.tasks.task import Encoded, Prediction
from bert_jax.tasks.text_classification import ClassificationTask

KEYWORDS = {"no", "not", "never", "nothing"}


def keywords(record: Record) -> str:
    """Those of the text, in its order."""
    return " ".join(word for word in record.text.lower().split() if word in KEYWORDS)


class Task(ClassificationTask):
    """Classification with two things changed: what the model reads, and what is measured."""

    def inputs(self, records: Sequence[Record]) -> list[list[Encoded]]:
        return super().inputs([dataclasses.replace(record, text_pair=keywords(record)) for record in records])

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        right = np.array([one["label"] == one["gold"] for one in predictions])
        found = np.array([bool(keywords(record)) for record in records])
        return [*super().scores(records, predictions), mean_score("accuracy/keywords", right, found)]
