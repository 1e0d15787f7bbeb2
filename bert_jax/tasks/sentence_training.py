"""Training examples and losses of sentence embeddings, one class per ``sentence.loss``.

Shapes: B rows, U units per row, K texts per unit, E width of a vector.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.objectives.label_losses import softmax_loss
from bert_jax.objectives.objective import Sums
from bert_jax.objectives.sentence_losses import cosent_loss, cosine_loss, in_batch_negatives_loss, triplet_loss
from bert_jax.records import Record
from bert_jax.tasks.sampling import permutation
from bert_jax.tasks.text_classification import class_number, number_of

Batch = Mapping[str, jax.Array]


class PairOutput(NamedTuple):
    """Outputs of the model that losses read."""

    embeddings_BxUxKxE: jax.Array
    # float32[B, U, classes] of the classifier; None: the model has none.
    logits: jax.Array | None


class SentenceTraining(ABC):
    """Training by one loss: texts and label of an example, the loss of a batch."""

    # Texts of an example.
    texts = 2
    # Type of an example's label; None: it has none.
    label_type: type | None = None

    def __init__(self, config: FinetuneConfig, records: Sequence[Record]) -> None:
        self.config, self.options = config, config.sentence

    def check(self, record: Record) -> None:
        """Raise ``ValueError`` for a training record that lacks a text or label of the loss."""
        if record.text_pair is None:
            raise ValueError(
                f"{record.source}: no second text; sentence.loss {self.options.loss} needs one (role text_pair)"
            )
        if self.label_type is not None and record.label is None:
            raise ValueError(f"{record.source}: no label; sentence.loss {self.options.loss} needs one")

    def examples(self, records: Sequence[Record]) -> list[tuple[str, ...]]:
        """Return the texts of the example that each record gives."""
        return [record_texts(record)[: self.texts] for record in records]

    def label(self, record: Record) -> Any:
        """Return the label of an example with a ``label_type``."""
        return class_number(record, self.config.data.labels)

    @abstractmethod
    def loss(self, output: PairOutput, batch: Batch, axis: str | None) -> Sums:
        """Return (sum, weight) of the loss; for ``axis`` see ``Task.loss``."""


class Softmax(SentenceTraining):
    """Classes of (u, v, abs(u - v))."""

    label_type = np.int32

    def loss(self, output: PairOutput, batch: Batch, axis: str | None) -> Sums:
        options = self.config.loss
        assert output.logits is not None
        return softmax_loss(
            output.logits, batch["labels"], batch["weights"],
            label_smoothing=options.label_smoothing, focal_gamma=options.focal_gamma,
        )  # fmt: skip


class Cosent(SentenceTraining):
    """Order of cosines."""

    label_type = np.float32

    def label(self, record: Record) -> float:
        return number_of(record) / self.options.label_scale

    def loss(self, output: PairOutput, batch: Batch, axis: str | None) -> Sums:
        scale = self.options.scale
        return cosent_loss(output.embeddings_BxUxKxE, batch["labels"], batch["weights"], scale=scale, axis=axis)


class Cosine(Cosent):
    """Regression of the cosine."""

    def label(self, record: Record) -> float:
        value = super().label(record)
        if not -1 <= value <= 1:
            raise ValueError(
                f"{record.source}: label {record.label} divided by sentence.label_scale "
                f"{self.options.label_scale:g} is no cosine; allowed: -1 to 1; set the scale to the largest label"
            )
        return value

    def loss(self, output: PairOutput, batch: Batch, axis: str | None) -> Sums:
        return cosine_loss(output.embeddings_BxUxKxE, batch["labels"], batch["weights"])


class Triplet(SentenceTraining):
    """An anchor nearer to its positive than to its negative."""

    texts = 3

    def check(self, record: Record) -> None:
        if self.options.pairs_from_classes:
            return _check_class(record)
        super().check(record)
        if len(record.negatives) != 1:
            raise ValueError(
                f"{record.source}: {len(record.negatives)} negatives; a triplet has one (role negative)"
            )

    def examples(self, records: Sequence[Record]) -> list[tuple[str, ...]]:
        if self.options.pairs_from_classes:
            return texts_of_classes(records, self.config.data.split_seed)
        return super().examples(records)

    def loss(self, output: PairOutput, batch: Batch, axis: str | None) -> Sums:
        return triplet_loss(output.embeddings_BxUxKxE, batch["weights"], margin=self.options.margin)


class InBatch(SentenceTraining):
    """The right second text among all of the batch."""

    def loss(self, output: PairOutput, batch: Batch, axis: str | None) -> Sums:
        # Other texts of an anchor's class are no wrong answers.
        classes_BxU = batch["labels"] if self.label_type is not None else None
        return in_batch_negatives_loss(
            output.embeddings_BxUxKxE, batch["weights"], classes_BxU, scale=self.options.scale, axis=axis
        )


class SimCse(InBatch):
    """Each text against its own second pass."""

    def check(self, record: Record) -> None:
        """Every record has a text."""

    def examples(self, records: Sequence[Record]) -> list[tuple[str, ...]]:
        return [(record.text, record.text) for record in records]


class Negatives(InBatch):
    """Pairs, with hard negatives where the records have them, or pairs of a class."""

    def __init__(self, config: FinetuneConfig, records: Sequence[Record]) -> None:
        super().__init__(config, records)
        if config.sentence.pairs_from_classes:
            self.label_type = np.int32
        else:
            self.texts = 2 + max((len(record.negatives) for record in records), default=0)

    def check(self, record: Record) -> None:
        if self.options.pairs_from_classes:
            return _check_class(record)
        super().check(record)
        if len(record.negatives) != self.texts - 2:
            raise ValueError(
                f"{record.source}: {len(record.negatives)} hard negatives, others have {self.texts - 2}; give all "
                "the same number"
            )

    def examples(self, records: Sequence[Record]) -> list[tuple[str, ...]]:
        if self.options.pairs_from_classes:
            return [texts[:2] for texts in texts_of_classes(records, self.config.data.split_seed)]
        return super().examples(records)


TRAININGS: dict[str, type[SentenceTraining]] = {
    "softmax": Softmax,
    "cosine": Cosine,
    "cosent": Cosent,
    "triplet": Triplet,
    "negatives": Negatives,
    "simcse": SimCse,
}


def record_texts(record: Record) -> tuple[str, ...]:
    """Return the texts of a record: first, second if it has one, negatives."""
    pair = () if record.text_pair is None else (record.text_pair,)
    return (record.text, *pair, *record.negatives)


def texts_of_classes(records: Sequence[Record], seed: int) -> list[tuple[str, ...]]:
    """Return (text, text of the same class, text of another class) for each record, drawn by ``seed``."""
    groups, draws = [], (permutation(len(records), seed, 1), permutation(len(records), seed, 2))
    _, classes = np.unique([record.label or "" for record in records], return_inverse=True)
    order, sizes = np.argsort(classes, kind="stable"), np.bincount(classes)
    members = np.split(order, np.cumsum(sizes)[:-1])
    # Place of a record among those of its class; and of each member how many of other classes stand before it.
    place = np.empty(len(records), np.int64)
    place[order] = np.concatenate([np.arange(size) for size in sizes])
    before = [own - np.arange(len(own)) for own in members]
    for i, record in enumerate(records):
        own, outside = members[classes[i]], before[classes[i]]
        own_count, other_count = len(own) - 1, len(records) - len(own)
        if not own_count or not other_count:
            raise ValueError(
                f"{record.source}: class {record.label!r} has one text, or is the only class: it makes no pairs"
            )
        drawn = draws[0][i] % own_count
        positive = records[own[drawn + (drawn >= place[i])]].text
        drawn = draws[1][i] % other_count
        negative = records[drawn + np.searchsorted(outside, drawn, side="right")].text
        groups.append((record.text, positive, negative))
    return groups


def _check_class(record: Record) -> None:
    if record.label is None:
        raise ValueError(f"{record.source}: no label; sentence.pairs_from_classes makes pairs of classes")
