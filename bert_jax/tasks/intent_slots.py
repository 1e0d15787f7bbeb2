"""Joint prediction of the intent of a text and the slot of each word (Chen et al. 2019, JointBERT)."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import numpy as np

from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.metrics import Score, joint_scores
from bert_jax.model.bert import BertOutput
from bert_jax.objectives.label_losses import softmax_denominator, softmax_loss
from bert_jax.objectives.objective import Sums
from bert_jax.records import Record
from bert_jax.tasks.tagging import TaggingTask, check_entity_tags, predicted_tags
from bert_jax.tasks.task import Level, ModelInput, Prediction, Target
from bert_jax.tasks.text_classification import class_predictions


class JointTask(TaggingTask):
    """Intents are classes of the pooled first token, slots are tags; the loss is the sum of both losses.

    A text of several windows is one example of its intent: each window counts its share in the loss, and their
    logits are averaged.
    """

    targets: ClassVar[Mapping[str, Target]] = {
        **TaggingTask.targets,
        "intent_labels": Target("unit", np.int32),
        "intent_shares": Target("unit", np.float32),  # 1 / windows of the text
    }
    gold = ("tags", "label")

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        """Return ``config`` with ``data.tags`` and ``data.labels`` from the training records if they are empty."""
        config = super().from_data(config, splits)
        train = splits.get("train", ())
        check_entity_tags(train, config.tagging.scoring)
        labels = config.data.labels or tuple(sorted({_given_label(record) for record in train}))
        for record in train:
            _label_number(record, labels)
        if len(labels) < 2:
            raise ValueError(f"data.train: {len(labels)} labels ({', '.join(labels)}); give files with two or more")
        return dataclasses.replace(config, data=dataclasses.replace(config.data, labels=labels))

    @classmethod
    def notes(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> list[str]:
        notes = super().notes(config, splits)
        for split, records in splits.items():
            found = {record.label for record in records if record.label is not None}
            if unknown := found.difference(config.data.labels):
                notes.append(f"{split}: labels that are not learned count as misses: {', '.join(sorted(unknown))}")
        return notes

    @property
    def intents(self) -> tuple[str, ...]:
        """Names of the intents in exports, in id order."""
        return self.config.data.label_names or self.config.data.labels

    @property
    def heads(self) -> HeadsConfig:
        return dataclasses.replace(super().heads, pooler=True, sequence_labels=self.intents)

    def featurize(self, records: Sequence[Record], *, training: bool) -> list[ModelInput]:
        units = super().featurize(records, training=training)
        windows = Counter(unit.record for unit in units)
        labels = self.config.data.labels
        together = []
        for unit in units:
            record = records[unit.record]
            number = _label_number(record, labels) if training or record.label in labels else None
            targets = {
                **unit.targets, "intent_labels": number or 0, "intent_shares": 1 / windows[unit.record]
            }  # fmt: skip
            weight = 0.0 if number is None else unit.weight
            together.append(dataclasses.replace(unit, targets=targets, weight=weight))
        return together

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        weights_BxU = batch["weights"] * batch["intent_shares"]
        of_intents = {"intent_loss": softmax_denominator(batch["intent_labels"], weights_BxU)}
        return of_intents | super().denominators(batch)

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        options = self.config.loss
        assert output.sequence_logits is not None
        of_intents = softmax_loss(
            output.sequence_logits,
            batch["intent_labels"],
            batch["weights"] * batch["intent_shares"],
            label_smoothing=options.label_smoothing,
            focal_gamma=options.focal_gamma,
        )
        of_tags = super().loss(output, batch, axis=axis)
        return {f"intent_{name}": pair for name, pair in of_intents.items()} | of_tags

    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        """As of tagging, with ``intent_logits`` float32[B, U, labels]."""
        assert output.sequence_logits is not None
        return {"intent_logits": ("unit", output.sequence_logits), **super().outputs(output, batch)}

    def decode(
        self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Sequence[Mapping[str, np.ndarray]]
    ) -> list[Prediction]:
        """The intent (as the files write it) by :func:`class_predictions`, with the ``tokens`` of tagging."""
        logits = np.zeros((len(records), len(self.intents)))
        windows = np.zeros(len(records))
        for unit, output in zip(units, outputs, strict=True):
            logits[unit.record] += output["intent_logits"]
            windows[unit.record] += 1
        intents = class_predictions(self.config.data.labels, logits / windows[:, None])
        tagged = super().decode(records, units, outputs)
        return [
            {**intent, **tokens, **({} if record.label is None else {"gold": record.label})}
            for record, intent, tokens in zip(records, intents, tagged, strict=True)
        ]

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        """sentence_accuracy (the intent and every slot right), intent_accuracy, those of tagging as slot_NAME."""
        slots = [Score(f"slot_{s.name}", s.of, s.higher_is_better) for s in super().scores(records, predictions)]
        found = joint_scores(
            [_given_label(record) for record in records],
            [prediction["label"] for prediction in predictions],
            [record.tags or () for record in records],
            [predicted_tags(prediction) for prediction in predictions],
        )
        return [*found, *slots]


def _given_label(record: Record) -> str:
    """The label of a record that must have one."""
    if record.label is None:
        raise ValueError(f"{record.source}: no label; give the intent of every text")
    return record.label


def _label_number(record: Record, labels: tuple[str, ...]) -> int:
    label = _given_label(record)
    if label not in labels:
        allowed = ", ".join(labels)
        raise ValueError(
            f"{record.source}: label {label!r} is not in data.labels; allowed: {allowed}; correct one of them"
        )
    return labels.index(label)
