"""Training examples and losses of sentence embeddings, one class per ``sentence.loss``.

Shapes: B rows, U units per row, K texts per unit, E width of a vector.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import jax
import numpy as np

from bert_jax.batch import Batch
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.model.bert import present
from bert_jax.model.pooling import normalize
from bert_jax.objectives.objective import Sums
from bert_jax.objectives.sentence_losses import cosent_loss, cosine_loss, in_batch_negatives_loss, triplet_loss
from bert_jax.records import Record
from bert_jax.tasks.sampling import record_permutation
from bert_jax.tasks.task import class_loss
from bert_jax.tasks.text_classification import class_number, number_of

# Logits of the classifier, float32[B, U, classes]; None: the model has no classifier.
Logits = jax.Array | None


class SentenceTraining(ABC):
    """Training with one ``sentence.loss``: the texts and the label of an example, and the loss of a batch."""

    # Number of texts of an example.
    texts = 2
    # Dtype of the label of an example; None: no label.
    label_type: type | None = None
    # True if the texts after the second one are negatives; True if an example may have fewer of them than others.
    has_negatives = False
    has_any_number = False
    # True if examples differ in their number of texts, which the batch then has as ``texts``.
    differs = False

    def __init__(self, config: FinetuneConfig, records: Sequence[Record]) -> None:
        self.config, self.options = config, config.sentence
        self.pairs_from_classes = self.has_negatives and config.sentence.pairs_from_classes

    def check(self, record: Record) -> None:
        """Raise ``ValueError`` for a training record that lacks a text or a label that the loss requires."""
        loss, source = self.options.loss, record.source
        if record.label is None and (self.pairs_from_classes or self.label_type is not None):
            option = "sentence.pairs_from_classes" if self.pairs_from_classes else f"sentence.loss {loss}"
            advice = "check data.columns (role label)"
            if record.text_pair is not None and not self.pairs_from_classes:
                advice += ", or set sentence.loss negatives, which needs none"
            if record.negatives:
                advice += f"; {record.negatives[0][:40]!r} was read as a negative"
            raise ValueError(f"{source}: no label; {option} requires one; {advice}")
        if self.pairs_from_classes:
            return
        if record.text_pair is None:
            raise ValueError(
                f"{source}: no second text; sentence.loss {loss} requires one; check data.columns (role text_pair)"
            )
        if self.has_negatives and not self.has_any_number and len(record.negatives) != self.texts - 2:
            raise ValueError(
                f"{source}: {len(record.negatives)} negatives; sentence.loss {loss} requires {self.texts - 2} in "
                "every record; check data.columns (role negative), or use sentence.loss negatives"
            )

    def examples(self, records: Sequence[Record]) -> list[tuple[str, ...]]:
        """Return, for each record, the texts of its training example."""
        if self.pairs_from_classes:
            return [texts[: self.texts] for texts in texts_of_classes(records, self.config.data.split_seed)]
        return [record_texts(record)[: self.texts] for record in records]

    def label(self, record: Record) -> float:
        """Return the label of an example; by default, the index of its class. Not called if ``label_type`` is
        None."""
        return class_number(record, self.config.data.labels)

    @abstractmethod
    def loss(self, vectors_BxUxKxE: jax.Array, logits: Logits, batch: Batch, axis: str | None) -> Sums:
        """Return (sum, weight) of the loss of the sentence vectors; ``axis`` has the same meaning as in
        ``Task.loss``."""

    def loss_of_widths(self, vectors_BxUxKxE: jax.Array, logits: Logits, batch: Batch, axis: str | None) -> Sums:
        """Return :meth:`loss`, to which the losses of the first values of the vectors are added, for each width of
        ``sentence.matryoshka`` (Kusupati et al. 2022)."""
        sums = self.loss(vectors_BxUxKxE, logits, batch, axis)
        total, weight = sums["loss"]
        for width in self.options.matryoshka:
            total += self.loss(normalize(vectors_BxUxKxE[..., :width]), None, batch, axis)["loss"][0]
        return sums | {"loss": (total, weight)}


class Softmax(SentenceTraining):
    """Classification of a pair of texts with the vectors u and v, from the features (u, v, abs(u - v))."""

    label_type = np.int32

    def loss(self, vectors_BxUxKxE: jax.Array, logits: Logits, batch: Batch, axis: str | None) -> Sums:
        return class_loss(self.config.loss, present(logits), batch["labels"], batch["weights"])


class Cosent(SentenceTraining):
    """Ranking of pairs: their cosines are trained to have the same order as their labels."""

    label_type = np.float32

    def label(self, record: Record) -> float:
        return number_of(record) / self.options.label_scale

    def loss(self, vectors_BxUxKxE: jax.Array, logits: Logits, batch: Batch, axis: str | None) -> Sums:
        scale = self.options.scale
        return cosent_loss(vectors_BxUxKxE, batch["labels"], batch["weights"], scale=scale, axis=axis)


class Cosine(Cosent):
    """Regression: the cosine of a pair is trained to equal its label."""

    def label(self, record: Record) -> float:
        value = super().label(record)
        if not -1 <= value <= 1:
            raise ValueError(
                f"{record.source}: label {record.label} divided by sentence.label_scale "
                f"{self.options.label_scale:g} is not allowed; use -1 to 1; set "
                "sentence.label_scale to the largest absolute value of a label"
            )
        return value

    def loss(self, vectors_BxUxKxE: jax.Array, logits: Logits, batch: Batch, axis: str | None) -> Sums:
        return cosine_loss(vectors_BxUxKxE, batch["labels"], batch["weights"])


class Triplet(SentenceTraining):
    """Comparison of distances: an anchor is trained to be closer to its positive than to its negative."""

    texts = 3
    has_negatives = True

    def loss(self, vectors_BxUxKxE: jax.Array, logits: Logits, batch: Batch, axis: str | None) -> Sums:
        return triplet_loss(vectors_BxUxKxE, batch["weights"], margin=self.options.margin)


class Negatives(SentenceTraining):
    """Retrieval of the second text of a pair among all second texts and hard negatives in the batch."""

    has_negatives = True
    has_any_number = True

    def __init__(self, config: FinetuneConfig, records: Sequence[Record]) -> None:
        super().__init__(config, records)
        if self.pairs_from_classes:
            self.label_type = np.int32
        elif self.has_negatives:
            counts = {len(record.negatives) for record in records}
            self.texts, self.differs = 2 + max(counts, default=0), len(counts) > 1

    def loss(self, vectors_BxUxKxE: jax.Array, logits: Logits, batch: Batch, axis: str | None) -> Sums:
        # Texts of the same class as the anchor are not negatives.
        classes_BxU = batch["labels"] if self.label_type is not None else None
        return in_batch_negatives_loss(
            vectors_BxUxKxE, batch["weights"], classes_BxU, batch["texts"] if self.differs else None,
            scale=self.options.scale, axis=axis,
        )  # fmt: skip


class SimCse(Negatives):
    """Retrieval of each text among all texts in the batch; each text is encoded twice with different dropout
    masks."""

    has_negatives = False

    def check(self, record: Record) -> None:
        """Accept every record."""

    def examples(self, records: Sequence[Record]) -> list[tuple[str, ...]]:
        return [(record.text, record.text) for record in records]


TRAININGS: dict[str, type[SentenceTraining]] = {
    "softmax": Softmax,
    "cosine": Cosine,
    "cosent": Cosent,
    "triplet": Triplet,
    "negatives": Negatives,
    "simcse": SimCse,
}


def record_texts(record: Record) -> tuple[str, ...]:
    """Return the first text of a record, its second text if it has one, and its negatives."""
    pair = () if record.text_pair is None else (record.text_pair,)
    return (record.text, *pair, *record.negatives)


def texts_of_classes(records: Sequence[Record], seed: int) -> list[tuple[str, ...]]:
    """Return (text, another text of the same class, text of another class) for each record, sampled with ``seed``.

    Raises ``ValueError`` if a class has only one text, or if there is only one class.
    """
    groups: list[tuple[str, ...]] = []
    draws = record_permutation(len(records), seed, 1), record_permutation(len(records), seed, 2)
    _, classes = np.unique([record.label or "" for record in records], return_inverse=True)
    order, sizes = np.argsort(classes, kind="stable"), np.bincount(classes)
    members = np.split(order, np.cumsum(sizes)[:-1])
    # Index of a record within its class; number of records of other classes before each member of a class.
    place = np.empty(len(records), np.int64)
    place[order] = np.concatenate([np.arange(size) for size in sizes])
    before = [own - np.arange(len(own)) for own in members]
    for i, record in enumerate(records):
        own, outside = members[classes[i]], before[classes[i]]
        own_count, other_count = len(own) - 1, len(records) - len(own)
        if not own_count or not other_count:
            raise ValueError(
                f"{record.source}: class {record.label!r} has only one text, or is the only class; "
                "sentence.pairs_from_classes requires two or more classes of two or more texts each"
            )
        drawn = draws[0][i] % own_count
        positive = records[own[drawn + (drawn >= place[i])]].text
        drawn = draws[1][i] % other_count
        negative = records[drawn + np.searchsorted(outside, drawn, side="right")].text
        groups.append((record.text, positive, negative))
    return groups
