"""The right one of several choices.

Shapes: B rows, U units per row.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.inference.batching import Encoded
from bert_jax.metrics import Score, classification_scores
from bert_jax.model.bert import BertOutput
from bert_jax.objectives.label_losses import softmax_loss
from bert_jax.objectives.sums import Sums, denominator
from bert_jax.records import Record
from bert_jax.tasks.task import Level, Prediction, Target, Unit
from bert_jax.tasks.text_classification import SequenceTask, class_number, softmax, unlabelled
from bert_jax.tokenization import Tokenizer


class ChoiceTask(SequenceTask):
    """The right one of several continuations, each scored by one output (SWAG; Devlin et al. 2018, section 4.4)."""

    targets: ClassVar[Mapping[str, Target]] = {"labels": Target("unit", np.int32)}

    def __init__(self, config: FinetuneConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        if config.task.truncation == "windows":
            raise ValueError("task.truncation: windows are for single texts; choose another for choices")

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        first = next((record for records in splits.values() for record in records), None)
        count = len(first.choices) if first is not None else 0
        for records in splits.values():
            for record in records:
                if len(record.choices) != count or count < 2:
                    raise ValueError(
                        f"{record.source}: {len(record.choices)} choices; every record needs the same number, two "
                        f"or more (the first one has {count}); check data.columns (role choice)"
                    )
        labels = tuple(str(i) for i in range(count))
        if config.data.labels not in ((), labels):
            raise ValueError(
                f"data.labels: {', '.join(config.data.labels)} is not allowed; choices are numbered from 0 "
                f"({', '.join(labels)}), and so are the labels of the files; leave it out"
            )
        return dataclasses.replace(config, data=dataclasses.replace(config.data, labels=labels))

    @property
    def sequences_per_unit(self) -> int:
        return len(self.config.data.labels)

    @property
    def heads(self) -> HeadsConfig:
        return HeadsConfig(pooler=True, choice=True)

    def featurize(self, records: Sequence[Record], *, training: bool) -> list[Unit]:
        flat = [dataclasses.replace(record, text_pair=choice) for record in records for choice in record.choices]
        inputs = [one for (one,) in self.inputs(flat)]
        count = self.sequences_per_unit
        return [
            _unit(i, inputs[i * count : (i + 1) * count], self.target(record, training=training))
            for i, record in enumerate(records)
        ]

    def target(self, record: Record, *, training: bool) -> Mapping[str, Any]:
        if record.label is None:
            return unlabelled(record, training)
        return {"labels": class_number(record, self.config.data.labels)}

    def _logits(self, output: BertOutput) -> jax.Array:
        assert output.choice_logits is not None
        rows, sequences = output.choice_logits.shape
        return output.choice_logits.reshape(rows, sequences // self.sequences_per_unit, self.sequences_per_unit)

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"loss": denominator(batch["weights"])}

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        options = self.config.loss
        return softmax_loss(
            self._logits(output), batch["labels"], batch["weights"],
            label_smoothing=options.label_smoothing, focal_gamma=options.focal_gamma,
        )  # fmt: skip

    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        return {"logits": ("unit", self._logits(output))}

    def decode(
        self, records: Sequence[Record], units: Sequence[Unit], outputs: Sequence[Mapping[str, np.ndarray]]
    ) -> list[Prediction]:
        """``prediction``, the number of a choice, and ``scores``, the probability of each."""
        chances = softmax(self.mean_logits(len(records), units, outputs))
        return [
            {
                **({} if record.label is None else {"label": int(record.label)}),
                "prediction": int(row.argmax()),
                "scores": row.round(6).tolist(),
            }
            for record, row in zip(records, chances, strict=True)
        ]

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        gold = np.array([class_number(record, self.config.data.labels) for record in records])
        predicted = np.array([one["prediction"] for one in predictions])
        return classification_scores(gold, predicted, self.config.data.labels, None)


def _unit(number: int, sequences: Sequence[Encoded], targets: Mapping[str, Any]) -> Unit:
    return Unit(number, tuple(sequences), targets, float(bool(targets)))
