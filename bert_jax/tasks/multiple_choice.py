"""The right one of several choices.

Shapes: B rows, U units per row.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from scipy.special import softmax

from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.metrics import Score, classification_scores
from bert_jax.model.bert import BertOutput
from bert_jax.objectives.label_losses import softmax_loss
from bert_jax.objectives.objective import Sums, denominator
from bert_jax.records import Record
from bert_jax.tasks.task import Level, ModelInput, Prediction, Target
from bert_jax.tasks.text_classification import SequenceTask, class_number, completed, unlabelled


class ChoiceTask(SequenceTask):
    """The right one of several continuations, each scored by one output (SWAG; Devlin et al. 2018, section 4.4)."""

    targets: ClassVar[Mapping[str, Target]] = {"labels": Target("unit", np.int32)}

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        first = next((record for records in splits.values() for record in records), None)
        count = len(first.choices) if first is not None else 0
        for records in splits.values():
            for record in records:
                if len(record.choices) != count or count < 2:
                    raise ValueError(
                        f"{record.source}: {len(record.choices)} choices; every record needs the same number, two "
                        f"or more (the first record has {count}); check data.columns (role choice)"
                    )
        labels = tuple(str(i) for i in range(count))
        if config.data.labels not in ((), labels):
            raise ValueError(
                f"data.labels: {', '.join(config.data.labels)} is not allowed; labels are the numbers of the "
                f"choices, from 0 ({', '.join(labels)}); omit data.labels"
            )
        return dataclasses.replace(config, data=dataclasses.replace(config.data, labels=labels))

    @property
    def sequences_per_unit(self) -> int:
        return len(self.config.data.labels)

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
            targets = self.target(record, training=training)
            sequences = tuple(next(inputs)[0] for _ in record.choices)
            units.append(ModelInput(i, sequences, targets, float(bool(targets))))
        return units

    def target(self, record: Record, *, training: bool) -> Mapping[str, Any]:
        if record.label is None:
            return unlabelled(record, training)
        return {"labels": class_number(record, self.config.data.labels)}

    def _logits(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> jax.Array:
        """[B, U, K]"""
        assert output.choice_logits is not None
        return output.choice_logits.reshape(*batch["weights"].shape, -1)

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"loss": denominator(batch["weights"])}

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        options = self.config.loss
        return softmax_loss(
            self._logits(output, batch), batch["labels"], batch["weights"],
            label_smoothing=options.label_smoothing, focal_gamma=options.focal_gamma,
        )  # fmt: skip

    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        return {"logits": ("unit", self._logits(output, batch))}

    def decode(
        self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Sequence[Mapping[str, np.ndarray]]
    ) -> list[Prediction]:
        """``choice``, its number from 0, and ``probabilities`` of all of them."""
        predictions: list[Prediction] = []
        for unit, output in zip(units, outputs, strict=True):
            probabilities = softmax(output["logits"][: len(unit.sequences)].astype(np.float64))
            predictions.append({"choice": int(probabilities.argmax()), "probabilities": probabilities.tolist()})
        gold = [None if record.label is None else int(record.label) for record in records]
        return completed(predictions, units, gold)

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        gold = np.array([class_number(record, self.config.data.labels) for record in records])
        predicted = np.array([one["choice"] for one in predictions])
        return classification_scores(gold, predicted, self.config.data.labels, None)
