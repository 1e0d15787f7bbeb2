"""Multiple-choice tasks.

Shapes: B rows, U units per row.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import jax
import numpy as np
import scipy

from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.metrics import Score
from bert_jax.metrics.classification import classification_scores
from bert_jax.model.bert import BertOutput, present
from bert_jax.objectives.objective import Sums
from bert_jax.records import Record
from bert_jax.tasks.task import (
    Constant,
    ModelInput,
    Outputs,
    Prediction,
    Target,
    Targets,
    class_loss,
    most_frequent,
)
from bert_jax.tasks.text_classification import SequenceTask, class_number


class ChoiceTask(SequenceTask):
    """Selection of the correct continuation of a text, with one logit for each choice (SWAG; Devlin et al. 2018,
    section 4.4)."""

    targets: ClassVar[Mapping[str, Target]] = {"labels": Target("unit", np.int32)}
    logs_loss = True

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        labels = choice_labels([*splits["train"], *itertools.chain(*splits.values())])
        if config.data.labels not in ((), labels):
            raise ValueError(
                f"data.labels: {', '.join(config.data.labels)} is not allowed; labels are the indices of the "
                f"choices, starting at 0 ({', '.join(labels)}); omit data.labels"
            )
        return dataclasses.replace(config, data=dataclasses.replace(config.data, labels=labels))

    @property
    def sequences_per_unit(self) -> int:
        return len(self.settings.labels)

    def sequences_of(self, units: Sequence[ModelInput]) -> int:
        return max(len(unit.sequences) for unit in units)

    @property
    def heads(self) -> HeadsConfig:
        return HeadsConfig(pooler=True, choice=True)

    def featurize(self, records: Sequence[Record], *, training: bool) -> list[ModelInput]:
        flat = [dataclasses.replace(record, text_pair=choice) for record in records for choice in record.choices]
        inputs = iter(self.inputs(flat))
        units = []
        for i, record in enumerate(records):
            targets = self.targets_of(record, training=training)
            sequences = tuple(next(inputs)[0] for _ in record.choices)
            units.append(ModelInput(i, sequences, targets, float(bool(targets))))
        return units

    def target(self, record: Record) -> Targets:
        return {"labels": class_number(record, self.settings.labels)}

    def reference(self, record: Record) -> int:
        return int(record.label or 0)

    def logits(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> jax.Array:
        return present(output.choice_logits).reshape(*batch["weights"].shape, -1)

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        return class_loss(self.loss_options, self.logits(output, batch), batch["labels"], batch["weights"])

    def decode(self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Outputs) -> list[Prediction]:
        pairs = zip(units, outputs, strict=True)
        logits = [output["logits"][: len(unit.sequences)].astype(np.float64) for unit, output in pairs]
        return self.completed(self.predictions(logits), records, units)

    def predictions(self, logits: Iterable[np.ndarray]) -> list[Prediction]:
        """Return for each record the index of its most probable choice as ``choice``, and the ``probabilities`` of
        all its choices. ``logits`` contains one array per record, with one logit per choice."""
        probabilities = [scipy.special.softmax(logits_K) for logits_K in logits]
        return [{"choice": int(one.argmax()), "probabilities": one.tolist()} for one in probabilities]

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        gold = np.array([class_number(record, self.settings.labels) for record in records])
        predicted = np.array([one["choice"] for one in predictions])
        return classification_scores(gold, predicted, self.settings.labels, None)

    def constant(self, train: Sequence[Record]) -> Constant:
        choice = int(most_frequent(record.label or "0" for record in train))
        return f"choice {choice} for all", lambda one: {**one, "choice": choice}


def choice_labels(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the labels of the choices of ``records``, their indices from 0. Raises ``ValueError`` for records with
    different numbers of choices, or fewer than two."""
    count = len(records[0].choices)
    for record in records:
        if len(record.choices) != count or count < 2:
            raise ValueError(
                f"{record.source}: {len(record.choices)} choices; every record must have the same number of "
                f"choices, two or more (the first record has {count}); check data.columns (role choice)"
            )
    return tuple(str(i) for i in range(count))
