"""Tasks on a whole text or pair: classes, several labels at once, values.

Shapes: B rows, U units per row, L labels.
"""

import dataclasses
import math
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import expit, softmax

from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.metrics import Score, classification_scores, confusion_matrix, multi_label_scores, regression_scores
from bert_jax.model.bert import BertOutput
from bert_jax.objectives.label_losses import (
    denominator,
    multilabel_loss,
    regression_loss,
    softmax_denominator,
    softmax_loss,
)
from bert_jax.objectives.objective import Sums
from bert_jax.records import Record
from bert_jax.tasks.task import Confusion, Encoded, Level, ModelInput, Prediction, Target, Task
from bert_jax.tasks.truncation import cut_pair, cut_text
from bert_jax.tokenization import Tokenizer


class SequenceTask(Task):
    """Base of the tasks on texts and pairs: model inputs, and outputs averaged over a text's windows."""

    def featurize(self, records: Sequence[Record], *, training: bool) -> list[ModelInput]:
        units = []
        for number, (record, inputs) in enumerate(zip(records, self.inputs(records), strict=True)):
            targets = self.target(record, training=training)
            # Windows of one text count as one example together.
            weight = 1 / len(inputs) if targets else 0.0
            units += [ModelInput(number, (one,), targets, weight) for one in inputs]
        return units

    def inputs(self, records: Sequence[Record]) -> list[list[Encoded]]:
        """Model inputs of each record: one, of a long text with ``task.truncation windows`` several."""
        config, tokenizer = self.config.task, self.tokenizer
        firsts = tokenizer.encode_batch([record.text for record in records])
        paired = [i for i, record in enumerate(records) if record.text_pair is not None]
        if paired and config.truncation == "windows":
            record = records[paired[0]]
            raise ValueError(f"{record.source}: task.truncation: windows are for single texts, this is a pair")
        seconds = dict(
            zip(paired, tokenizer.encode_batch([records[i].text_pair or "" for i in paired]), strict=True)
        )
        one, two = (len(tokenizer.build_inputs([], pair)[0]) for pair in (None, []))
        inputs: list[list[Encoded]] = []
        for i, record in enumerate(records):
            if i in seconds:
                texts = (record.text, record.text_pair or "")
                pair = firsts[i], seconds[i]
                a, b = cut_pair(texts, pair, config.max_length - two, config, tokenizer)
                inputs.append([self._build(a, b, len(a) + len(b) < sum(map(len, pair)))])
            else:
                parts = cut_text(record.text, firsts[i], config.max_length - one, config, tokenizer)
                is_cut = sum(map(len, parts)) < len(firsts[i])
                inputs.append([self._build(part, None, is_cut) for part in parts])
        return inputs

    def _build(self, a: Sequence[int], b: Sequence[int] | None, is_cut: bool) -> Encoded:
        ids, types = self.tokenizer.build_inputs(a, b)
        return Encoded(ids, types if self.config.model.type_vocab_size > 1 else [0] * len(ids), is_cut)

    @abstractmethod
    def target(self, record: Record, *, training: bool) -> Mapping[str, Any]:
        """Targets of a record's units; none for one without a label."""

    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        assert output.sequence_logits is not None
        return {"logits": ("unit", output.sequence_logits)}

    def mean_logits(
        self, count: int, units: Sequence[ModelInput], outputs: Sequence[Mapping[str, np.ndarray]]
    ) -> np.ndarray:
        """float64[records, L]: logits, averaged over a record's windows."""
        sums = np.zeros((count, *outputs[0]["logits"].shape) if outputs else (count, 1))
        windows = np.zeros(count)
        for unit, output in zip(units, outputs, strict=True):
            sums[unit.record] += output["logits"]
            windows[unit.record] += 1
        return sums / np.maximum(windows, 1)[:, None]


def class_predictions(labels: Sequence[str], logits_NxL: np.ndarray) -> list[Prediction]:
    """``label``, its ``score`` and the ``probabilities`` of all classes for each of N texts."""
    probabilities_NxL = softmax(logits_NxL, axis=-1)
    return [
        {"label": labels[best], "score": row[best], "probabilities": dict(zip(labels, row, strict=True))}
        for best, row in zip(probabilities_NxL.argmax(-1).tolist(), probabilities_NxL.tolist(), strict=True)
    ]


def multi_label_predictions(labels: Sequence[str], logits_NxL: np.ndarray) -> list[Prediction]:
    """``labels``, the classes of at least 0.5, and the ``probabilities`` of all classes for each of N texts."""
    named = [dict(zip(labels, row, strict=True)) for row in expit(logits_NxL).tolist()]
    return [{"labels": [label for label, p in one.items() if p >= 0.5], "probabilities": one} for one in named]


def completed(
    predictions: Sequence[Prediction], units: Sequence[ModelInput], gold: Sequence[Any]
) -> list[Prediction]:
    """``predictions`` with ``truncated`` where the model did not read all of a text, and with ``gold``, the right
    answer, where the record has it."""
    truncated = {unit.record for unit in units if any(one.extra for one in unit.sequences)}
    return [
        {
            **prediction,
            **({"truncated": True} if i in truncated else {}),
            **({} if right is None else {"gold": right}),
        }
        for i, (prediction, right) in enumerate(zip(predictions, gold, strict=True))
    ]


def of_training_files(config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> list[Record]:
    """The training records, with those that were cut from the same files for dev: some classes are only there."""
    return [*splits.get("train", ()), *(splits.get("dev", ()) if config.data.dev_fraction else ())]


class ClassificationTask(SequenceTask):
    """One class of several (Devlin et al. 2018, section 4.1)."""

    targets: ClassVar[Mapping[str, Target]] = {"labels": Target("unit", np.int32)}

    def __init__(self, config: FinetuneConfig, tokenizer: Tokenizer, records: Sequence[Record] = ()) -> None:
        super().__init__(config, tokenizer, records)
        self._class_weights = None
        if config.loss.class_weights == "balanced":
            counts, labels = Counter(record.label for record in records), config.data.labels
            weights = [len(records) / (len(labels) * counts[label]) if counts[label] else 0.0 for label in labels]
            self._class_weights = jnp.asarray(weights, jnp.float32)

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        data = config.data
        seen = {record.label for record in of_training_files(config, splits)} - {None}
        labels = data.labels or tuple(sorted(map(str, seen)))
        if len(labels) < 2:
            raise ValueError(
                f"data.labels: the training files have {len(labels)} class ({', '.join(labels) or 'no labels'}); "
                "two or more are needed: check data.columns, or name them all in data.labels"
            )
        return dataclasses.replace(config, data=dataclasses.replace(data, labels=labels))

    @property
    def heads(self) -> HeadsConfig:
        return HeadsConfig(pooler=True, sequence_labels=self.names)

    def target(self, record: Record, *, training: bool) -> Mapping[str, Any]:
        if record.label is None:
            return unlabelled(record, training)
        return {"labels": class_number(record, self.config.data.labels)}

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"loss": softmax_denominator(batch["labels"], batch["weights"], self._class_weights)}

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        assert output.sequence_logits is not None
        return self._loss_of(output.sequence_logits, batch)

    def _loss_of(self, logits_BxUxL: jax.Array, batch: Mapping[str, jax.Array]) -> Sums:
        options = self.config.loss
        return softmax_loss(
            logits_BxUxL, batch["labels"], batch["weights"],
            label_smoothing=options.label_smoothing, focal_gamma=options.focal_gamma,
            class_weights_L=self._class_weights,
        )  # fmt: skip

    def decode(
        self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Sequence[Mapping[str, np.ndarray]]
    ) -> list[Prediction]:
        """:func:`class_predictions`, classes as the files write them.

        Probabilities are not rounded: those of a confident model lie near 0 and 1, and AUROC reads their order.
        """
        logits = self.mean_logits(len(records), units, outputs)
        predictions = class_predictions(self.config.data.labels, logits)
        return completed(predictions, units, [record.label for record in records])

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        labels = self.config.data.labels
        probabilities = probability_table(predictions, labels)
        return classification_scores(*self._numbers(records, predictions), self.names, probabilities)

    def confusion(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> Confusion | None:
        return Confusion(self.names, confusion_matrix(*self._numbers(records, predictions), len(self.names)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes in exports and metrics, in id order."""
        return self.config.data.label_names or self.config.data.labels

    def _numbers(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> np.ndarray:
        """int64[2, n]: the classes of records, and those predicted."""
        numbers = {label: i for i, label in enumerate(self.config.data.labels)}
        pairs = zip(records, predictions, strict=True)
        return np.array([[numbers[record.label or ""], numbers[one["label"]]] for record, one in pairs]).T


class MultiLabelTask(ClassificationTask):
    """Any number of classes at once, each by a sigmoid."""

    gold = ("labels",)
    targets: ClassVar[Mapping[str, Target]] = {}

    def __init__(self, config: FinetuneConfig, tokenizer: Tokenizer, records: Sequence[Record] = ()) -> None:
        super().__init__(config, tokenizer, records)
        self.targets = {"labels": Target("unit", np.float32, (len(config.data.labels),))}  # type: ignore[misc]

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        seen = {label for record in of_training_files(config, splits) for label in record.labels or ()}
        labels = config.data.labels or tuple(sorted(seen))
        if not labels:
            raise ValueError("data.labels: the training files have no labels; check data.columns (role labels)")
        return dataclasses.replace(config, data=dataclasses.replace(config.data, labels=labels))

    @property
    def heads(self) -> HeadsConfig:
        return dataclasses.replace(super().heads, problem="multi_label")

    def target(self, record: Record, *, training: bool) -> Mapping[str, Any]:
        if record.labels is None:
            return unlabelled(record, training)
        labels = self.config.data.labels
        unknown = [label for label in record.labels if label not in labels]
        if unknown:
            raise ValueError(_unknown_label(record, unknown[0], labels))
        return {"labels": np.isin(labels, record.labels).astype(np.float32)}

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"loss": denominator(batch["weights"])}

    def _loss_of(self, logits_BxUxL: jax.Array, batch: Mapping[str, jax.Array]) -> Sums:
        return multilabel_loss(
            logits_BxUxL, batch["labels"], batch["weights"], focal_gamma=self.config.loss.focal_gamma
        )

    def decode(
        self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Sequence[Mapping[str, np.ndarray]]
    ) -> list[Prediction]:
        """:func:`multi_label_predictions`, classes as the files write them."""
        logits = self.mean_logits(len(records), units, outputs)
        gold = [None if record.labels is None else list(record.labels) for record in records]
        return completed(multi_label_predictions(self.config.data.labels, logits), units, gold)

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        labels = self.config.data.labels
        gold = np.array([np.isin(labels, record.labels or ()) for record in records])
        predicted = np.array([np.isin(labels, one["labels"]) for one in predictions])
        return multi_label_scores(gold, predicted, self.names, probability_table(predictions, labels))

    def confusion(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> None:
        return None


class RegressionTask(SequenceTask):
    """A value (STS-B in Devlin et al. 2018: mean squared error)."""

    targets: ClassVar[Mapping[str, Target]] = {"values": Target("unit", np.float32, (1,))}

    @property
    def heads(self) -> HeadsConfig:
        return HeadsConfig(pooler=True, sequence_labels=("score",), problem="regression")

    def target(self, record: Record, *, training: bool) -> Mapping[str, Any]:
        if record.label is None:
            return unlabelled(record, training)
        return {"values": np.float32([number_of(record)])}

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"loss": denominator(batch["weights"])}

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        assert output.sequence_logits is not None
        return regression_loss(output.sequence_logits, batch["values"], batch["weights"])

    def decode(
        self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Sequence[Mapping[str, np.ndarray]]
    ) -> list[Prediction]:
        """``value`` of each record."""
        values = self.mean_logits(len(records), units, outputs)[:, 0]
        gold = [None if record.label is None else number_of(record) for record in records]
        return completed([{"value": round_significant(value)} for value in values], units, gold)

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        predicted = np.array([one["value"] for one in predictions])
        if np.ptp(predicted) == 0:
            warnings.warn("all predicted values are the same: their correlation is not defined", stacklevel=2)
        return regression_scores(np.array([number_of(record) for record in records]), predicted)


def probability_table(predictions: Sequence[Prediction], labels: Sequence[str]) -> np.ndarray:
    """float64[N, L]: the probability of every class."""
    return np.array([[one["probabilities"][label] for label in labels] for one in predictions])


def round_significant(value: float) -> float:
    """A float32 value in the nine digits that tell it from all others."""
    return float(f"{value:.9g}")


def class_number(record: Record, labels: tuple[str, ...]) -> int:
    """Return the number of the record's class; raise ``ValueError`` if ``labels`` lacks it."""
    if record.label not in labels:
        raise ValueError(_unknown_label(record, record.label, labels))
    return labels.index(record.label)


def number_of(record: Record) -> float:
    """Return the value of the record; raise ``ValueError`` if it is not a finite number."""
    try:
        number = float(record.label or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"{record.source}: label {record.label!r} is no number; give a finite one or leave the line out"
        )
    return number


def _unknown_label(record: Record, label: str | None, labels: tuple[str, ...]) -> str:
    shown = ", ".join(labels[:20]) + (f" and {len(labels) - 20} more" if len(labels) > 20 else "")
    return f"{record.source}: label {label!r} is not known; allowed: {shown}; correct it or add it to data.labels"


def unlabelled(record: Record, training: bool) -> Mapping[str, Any]:
    if training:
        raise ValueError(f"{record.source}: no label; training needs one (data.columns)")
    return {}
