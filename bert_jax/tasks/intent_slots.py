"""Joint prediction of the intent of a text and the slot tag of each word (Chen et al. 2019, JointBERT)."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import numpy as np

from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.metrics import Score
from bert_jax.metrics.entities import joint_scores
from bert_jax.model.bert import BertOutput, present
from bert_jax.objectives.label_losses import softmax_denominator
from bert_jax.objectives.objective import Sums
from bert_jax.records import Record
from bert_jax.tasks.tagging import TaggingTask, check_entity_tags, not_learned, predicted_tags
from bert_jax.tasks.task import Constant, Level, ModelInput, Outputs, Prediction, Target, class_loss
from bert_jax.tasks.text_classification import (
    class_number,
    class_predictions,
    mean_over_windows,
    notes_on_classes,
    with_labels,
)


class JointTask(TaggingTask):
    """Joint prediction: the intent is classified from the pooled first token, and the slots are the tags of the
    words. The loss is the sum of the intent loss and the tag loss.

    A text that is split into several windows counts as one example in the intent loss: the weight of each window is
    the reciprocal of the number of windows, and the intent logits are averaged over the windows.
    """

    targets: ClassVar[Mapping[str, Target]] = {
        **TaggingTask.targets,
        "intent_labels": Target("unit", np.int32),
        "intent_shares": Target("unit", np.float32),  # 1 / number of windows of the text
    }
    gold = ("tags", "label")

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        """Return ``config`` with ``data.tags`` and ``data.labels`` filled in: if either option is empty, it is set
        to the values that occur in the training records."""
        config = super().from_data(config, splits)
        check_entity_tags(splits["train"], config.tagging.scoring)
        return with_labels(config, {"train": splits["train"]}, least=2)

    @classmethod
    def notes(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> list[str]:
        labels = {split: {record.label for record in records} - {None} for split, records in splits.items()}
        intents = notes_on_classes(config, splits, "label")
        return super().notes(config, splits) + intents + not_learned("labels", labels, config.data.labels)

    @property
    def heads(self) -> HeadsConfig:
        return dataclasses.replace(super().heads, pooler=True, sequence_labels=self.names)

    def featurize(self, records: Sequence[Record], *, training: bool) -> list[ModelInput]:
        units = super().featurize(records, training=training)
        windows = Counter(unit.record for unit in units)
        labels = self.settings.labels
        together = []
        for unit in units:
            record = records[unit.record]
            number = class_number(record, labels) if training or record.label in labels else None
            intent = {"intent_labels": number or 0, "intent_shares": 1 / windows[unit.record]}
            weight = 0.0 if number is None else unit.weight
            together.append(dataclasses.replace(unit, targets={**unit.targets, **intent}, weight=weight))
        return together

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        weights_BxU = batch["weights"] * batch["intent_shares"]
        of_intents = {"intent_loss": softmax_denominator(batch["intent_labels"], weights_BxU)}
        return of_intents | super().denominators(batch)

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        weights_BxU = batch["weights"] * batch["intent_shares"]
        of_intents = class_loss(
            self.loss_options, present(output.sequence_logits), batch["intent_labels"], weights_BxU
        )
        of_tags = super().loss(output, batch, axis=axis)
        return {f"intent_{name}": pair for name, pair in of_intents.items()} | of_tags

    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        """Return the outputs of :class:`TaggingTask` and ``intent_logits`` float32[rows, units per row, labels]."""
        return {"intent_logits": ("unit", present(output.sequence_logits)), **super().outputs(output, batch)}

    def decode(self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Outputs) -> list[Prediction]:
        """Return for each text the :func:`class_predictions` of its intent, with the labels as in the input files.
        Each prediction also contains ``tokens``, the tagged words, and ``gold``, the correct intent, if known."""
        logits = mean_over_windows("intent_logits", len(records), units, outputs)
        intents = class_predictions(self.settings.labels, logits)
        tagged = super().decode(records, units, outputs)
        return [
            {**intent, **tokens, **({} if record.label is None else {"gold": record.label})}
            for record, intent, tokens in zip(records, intents, tagged, strict=True)
        ]

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        """Return sentence_accuracy (share of texts with the intent and every slot correct), intent_accuracy, and
        each score NAME of :class:`TaggingTask` under the name slot_NAME."""
        slots = [Score(f"slot_{s.name}", s.of, s.higher_is_better) for s in super().scores(records, predictions)]
        joint = joint_scores(
            [record.label or "" for record in records],
            [prediction["label"] for prediction in predictions],
            [record.tags or () for record in records],
            [predicted_tags(prediction) for prediction in predictions],
        )
        return [*joint, *slots]

    def constant(self, train: Sequence[Record]) -> Constant:
        tags, intents = super().constant(train), self.constant_class(train)
        return f"{intents[0]}, {tags[0]}", lambda one: intents[1](tags[1](one))
