"""Tasks on a text or a text pair: single-label and multi-label classification, and regression.

Shapes: B rows, U units per row, L labels.
"""

import dataclasses
import itertools
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from bert_jax.config import HeadsConfig, TaskSettings
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.metrics import Score
from bert_jax.metrics.classification import classification_scores, confusion_matrix, multi_label_scores
from bert_jax.metrics.correlation import regression_scores
from bert_jax.model.bert import BertOutput, present
from bert_jax.objectives.display import MOST_CLASSES, MOST_CONFUSIONS
from bert_jax.objectives.label_losses import multilabel_loss, regression_loss, softmax_denominator
from bert_jax.objectives.objective import Sums
from bert_jax.records import Record
from bert_jax.tasks import task
from bert_jax.tasks.classes import Splits, class_lines, class_order, field_values, record_lines
from bert_jax.tasks.task import (
    Confusion,
    Encoded,
    Level,
    ModelInput,
    Outputs,
    Prediction,
    Prepared,
    Target,
    Targets,
    Task,
    class_loss,
)
from bert_jax.tasks.truncation import cut_pair, cut_text
from bert_jax.tokenization import Tokenizer


class SequenceTask(Task):
    """Base class of tasks on texts and text pairs. It builds the model inputs, and averages the outputs over the
    windows of a text."""

    def featurize(self, records: Sequence[Record], *, training: bool) -> list[ModelInput]:
        units = []
        orders = [self.inputs(records), *([self.inputs(swapped(records))] if self.sequences_per_unit == 2 else [])]
        for number, (record, *inputs) in enumerate(zip(records, *orders, strict=True)):
            targets = self.targets_of(record, training=training)
            # The windows of a text together count as one example.
            weight = 1 / len(inputs[0]) if targets else 0.0
            units += [ModelInput(number, each, targets, weight) for each in zip(*inputs, strict=True)]
        return units

    @property
    def sequences_per_unit(self) -> int:
        return 2 if self.settings.pair_order == "both" else 1

    def inputs(self, records: Sequence[Record]) -> list[list[Encoded]]:
        """Return the model inputs of each record: one input, or one per window if ``task.truncation`` is
        windows."""
        settings, tokenizer = self.settings, self.tokenizer
        firsts = tokenizer.encode_batch([record.text for record in records])
        pairs = [record for record in records if record.text_pair is not None]
        if pairs and settings.truncation == "windows":
            raise ValueError(
                f"{pairs[0].source}: task.truncation windows is not allowed for a pair of texts; allowed: "
                "longest_first, head, tail, head_tail, key_sentences"
            )
        seconds = iter(tokenizer.encode_batch([record.text_pair or "" for record in pairs]))
        one, two = (len(tokenizer.build_inputs([], second)[0]) for second in (None, list[int]()))
        inputs: list[list[Encoded]] = []
        for record, first in zip(records, firsts, strict=True):
            if record.text_pair is None:
                parts = cut_text(record.text, first, settings.max_length - one, settings, tokenizer)
                is_cut = sum(map(len, parts)) < len(first)
                inputs.append([self._build(part, None, is_cut) for part in parts])
            else:
                texts, pair = (record.text, record.text_pair), (first, next(seconds))
                a, b = cut_pair(texts, pair, settings.max_length - two, settings, tokenizer)
                inputs.append([self._build(a, b, len(a) + len(b) < sum(map(len, pair)))])
        return inputs

    def _build(self, a: Sequence[int], b: Sequence[int] | None, is_cut: bool) -> Encoded:
        ids, types = self.tokenizer.build_inputs(a, b)
        return Encoded(ids, types if self.settings.pair_types else [0] * len(ids), is_cut)

    def targets_of(self, record: Record, *, training: bool) -> Targets:
        """Return the targets of the model inputs of a record; empty if the record has no label.

        Raises ``ValueError`` for an invalid label and, with ``training``, for a missing label.
        """
        if self.is_labelled(record):
            return self.target(record)
        if training:
            raise missing_label(record)
        return {}

    @abstractmethod
    def target(self, record: Record) -> Targets:
        """Return the targets of the model inputs of a labeled record."""

    def reference(self, record: Record) -> str | list[str] | float:
        """Return the correct answer of a labeled record, in the format of the predictions; default: the label."""
        return record.label or ""

    def logits(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the logits of the model inputs, float32[rows, units per row, labels]."""
        logits, orders = present(output.sequence_logits), self.sequences_per_unit
        return logits if orders == 1 else logits.reshape(len(logits), -1, orders, logits.shape[-1]).sum(2)

    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        return {"logits": ("unit", self.logits(output, batch))}

    @abstractmethod
    def predictions(self, logits: np.ndarray) -> list[Prediction]:
        """Return the predictions for N texts; ``logits`` is float64[N, labels]."""

    def decode(self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Outputs) -> list[Prediction]:
        """Average the logits over the windows of each text, and return their :meth:`predictions` with the fields
        that :meth:`completed` adds."""
        predictions = self.predictions(mean_over_windows("logits", len(records), units, outputs))
        return self.completed(predictions, records, units)

    def completed(
        self, predictions: list[Prediction], records: Sequence[Record], units: Sequence[ModelInput]
    ) -> list[Prediction]:
        """Add ``truncated`` to the predictions of texts that the model did not read completely, and ``gold``, the
        :meth:`reference`, to those of labeled records. Changes ``predictions`` in place and returns it."""
        truncated = {unit.record for unit in units if any(one.extra for one in unit.sequences)}
        for i, (prediction, record) in enumerate(zip(predictions, records, strict=True)):
            if i in truncated:
                prediction["truncated"] = True
            if self.is_labelled(record):
                prediction["gold"] = self.reference(record)
        return predictions


def swapped(records: Sequence[Record]) -> list[Record]:
    """Return the records with the texts of each pair in the other order. Raises ``ValueError`` for a record without
    a pair."""
    for record in records:
        if record.text_pair is None:
            raise ValueError(
                f"{record.source}: task.pair_order both needs a pair of texts; add text_pair, or use given"
            )
    return [dataclasses.replace(one, text=one.text_pair or "", text_pair=one.text) for one in records]


def mean_over_windows(name: str, count: int, units: Sequence[ModelInput], outputs: Outputs) -> np.ndarray:
    """Return float64[count, L]: for each of ``count`` records, the L values of the output ``name``, averaged over
    the windows of the record."""
    sums = np.zeros((count, *outputs[0][name].shape) if outputs else (count, 1))
    windows = np.zeros(count)
    for unit, output in zip(units, outputs, strict=True):
        sums[unit.record] += output[name]
        windows[unit.record] += 1
    return sums / np.maximum(windows, 1)[:, None]


def class_predictions(labels: Sequence[str], logits_NxL: np.ndarray) -> list[Prediction]:
    """Return for each of N texts the most probable class as ``label``, its probability as ``score``, and the
    ``probabilities`` of all classes."""
    probabilities_NxL = scipy.special.softmax(logits_NxL, axis=-1)
    return [
        {"label": labels[best], "score": row[best], "probabilities": dict(zip(labels, row, strict=True))}
        for best, row in zip(probabilities_NxL.argmax(-1).tolist(), probabilities_NxL.tolist(), strict=True)
    ]


def multi_label_predictions(labels: Sequence[str], logits_NxL: np.ndarray) -> list[Prediction]:
    """Return for each of N texts ``labels``, those with a probability of at least 0.5, and the ``probabilities`` of
    all labels."""
    named = [dict(zip(labels, row, strict=True)) for row in scipy.special.expit(logits_NxL).tolist()]
    return [{"labels": [label for label, p in one.items() if p >= 0.5], "probabilities": one} for one in named]


def with_labels(config: FinetuneConfig, splits: Splits, least: int, field: str = "label") -> FinetuneConfig:
    """Return ``config`` with ``data.labels`` filled in: if this option is empty, it is set to the labels of the
    training files, in the order of :func:`class_order`.

    These include the labels of dev records that were split off from the training files, because some classes may
    occur only there. ``field``, label or labels, names the record field. Raises ``ValueError`` for a
    training record without a label, and for fewer than ``least`` labels.
    """
    for record in splits["train"]:
        if getattr(record, field) is None:
            raise missing_label(record)
    labels = config.data.labels or class_order(field_values(_of_training_files(config, splits), field))
    if len(labels) < least:
        raise ValueError(
            f"data.labels: {'' if config.data.labels else 'labels in the training files: '}"
            f"{', '.join(labels) or 'none'}; {least} or more are required; check data.columns, or list all labels "
            "in data.labels"
        )
    return dataclasses.replace(config, data=dataclasses.replace(config.data, labels=labels))


def _of_training_files(config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> list[Record]:
    return [*splits["train"], *(splits.get("dev", ()) if config.data.dev_fraction else ())]


def notes_on_classes(config: FinetuneConfig, splits: Splits, field: str) -> list[str]:
    """Return the lines about the classes in ``field`` (label or labels) of the training records."""
    names, train = config.data.labels, splits["train"]
    counts = Counter(one for record in train for one in {*field_values([record], field)})
    lines = class_lines(names, counts, "classes" if field == "label" else "labels")
    if field == "label" and not config.input.few_shot:
        lines += record_lines(names, _of_training_files(config, splits))
    other = "labels" if field == "label" else "label"
    if any(getattr(record, other) is not None for record in train):
        lines.append(f"the column {other} is not read: task.kind {config.task.kind} has its classes in {field}")
    repeats = [record for record in train if len({*(record.labels or ())}) < len(record.labels or ())]
    if field == "labels" and repeats:
        lines.append(f"WARNING: {len(repeats):,} training records name a label twice, such as {repeats[0].source}")
    return lines if train else []


class ClassificationTask(SequenceTask):
    """Single-label classification (Devlin et al. 2018, section 4.1)."""

    targets: ClassVar[Mapping[str, Target]] = {"labels": Target("unit", np.int32)}

    def __init__(
        self, config: FinetuneConfig | TaskSettings, tokenizer: Tokenizer, records: Sequence[Record] = ()
    ) -> None:
        super().__init__(config, tokenizer, records)
        self._class_weights = None
        if self.loss_options.class_weights == "balanced" and "label" in self.gold:
            counts, labels = Counter(record.label for record in records), self.settings.labels
            weights = [len(records) / (len(labels) * counts[label]) if counts[label] else 0.0 for label in labels]
            self._class_weights = jnp.asarray(weights, jnp.float32)

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        return with_labels(config, splits, least=2)

    @classmethod
    def notes(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> list[str]:
        return super().notes(config, splits) + notes_on_classes(config, splits, cls.gold[0])

    @property
    def heads(self) -> HeadsConfig:
        return HeadsConfig(pooler=True, sequence_labels=self.names, both_orders=self.sequences_per_unit == 2)

    def target(self, record: Record) -> Targets:
        return {"labels": class_number(record, self.settings.labels)}

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"loss": softmax_denominator(batch["labels"], batch["weights"], self._class_weights)}

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        logits, labels, weights = self.logits(output, batch), batch["labels"], batch["weights"]
        return class_loss(self.loss_options, logits, labels, weights, self._class_weights)

    def predictions(self, logits: np.ndarray) -> list[Prediction]:
        """Return the :func:`class_predictions`, with the labels as in the input files.

        Probabilities are not rounded: a confident model's are close to 0 and 1, and AUROC depends on their
        order.
        """
        return class_predictions(self.settings.labels, logits)

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        return class_scores(records, predictions, self.settings.labels, self.names)

    def constant(self, train: Sequence[Record]) -> task.Constant:
        return self.constant_class(train)

    def confusion(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> Confusion | None:
        gold, predicted = _class_numbers(records, predictions, self.settings.labels)
        return confusions(gold, predicted, list(self.names))


class MultiLabelTask(ClassificationTask):
    """Multi-label classification, with a sigmoid for each label."""

    gold = ("labels",)
    targets: ClassVar[Mapping[str, Target]] = {}
    logs_loss = True

    def __init__(
        self, config: FinetuneConfig | TaskSettings, tokenizer: Tokenizer, records: Sequence[Record] = ()
    ) -> None:
        super().__init__(config, tokenizer, records)
        self.targets = {"labels": Target("unit", np.float32, (len(self.settings.labels),))}  # type: ignore[misc]

    @classmethod
    def prepare(cls, config: FinetuneConfig, splits: Splits, tests: Sequence[str]) -> Prepared:
        """Prepare the records; lists of 0 and 1 of all labels become names of labels.

        Lists have this form if all training lists have the same length, contain only 0 and 1, and one of them has a
        value twice; the labels are ``data.labels`` or the numbers from 0. A record of a split in ``tests`` with an
        empty list is unlabeled if no training record has one, or if all records of the split have one.
        """
        config, prepared, lines = super().prepare(config, splits, tests)
        lists = [record.labels for record in splits["train"] if record.labels is not None]
        for split in tests:
            empty = [record.labels == () for record in prepared[split]]
            if any(empty) and (all(empty) or () not in lists):
                pairs = zip(prepared[split], empty, strict=True)
                prepared[split] = [dataclasses.replace(one, labels=None) if gone else one for one, gone in pairs]
        if _are_indicators(lists):
            names = config.data.labels or tuple(map(str, range(len(lists[0]))))
            prepared = {split: [_named(record, names) for record in records] for split, records in prepared.items()}
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, labels=names))
            lines.append(f"lists of 0 and 1 are read as a value for each of {len(names)} labels")
        return config, prepared, lines

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        return with_labels(config, splits, least=1, field="labels")

    @property
    def heads(self) -> HeadsConfig:
        return dataclasses.replace(super().heads, problem="multi_label")

    def target(self, record: Record) -> Targets:
        labels = self.settings.labels
        for label in record.labels or ():
            if label not in labels:
                raise ValueError(_unknown_label(record, label, labels))
        return {"labels": np.isin(labels, record.labels or ()).astype(np.float32)}

    def reference(self, record: Record) -> list[str]:
        return list(record.labels or ())

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        gamma = self.loss_options.focal_gamma
        return multilabel_loss(self.logits(output, batch), batch["labels"], batch["weights"], focal_gamma=gamma)

    def predictions(self, logits: np.ndarray) -> list[Prediction]:
        """Return the result of :func:`multi_label_predictions`, with the labels as in the input files."""
        return multi_label_predictions(self.settings.labels, logits)

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        labels = self.settings.labels
        gold = np.array([np.isin(labels, record.labels or ()) for record in records])
        predicted = np.array([np.isin(labels, one["labels"]) for one in predictions])
        return multi_label_scores(gold, predicted, self.names, probability_table(predictions, labels))

    def constant(self, train: Sequence[Record]) -> task.Constant:
        labels = task.most_frequent(tuple(sorted(record.labels or ())) for record in train)
        values = {label: float(label in labels) for label in self.settings.labels}
        named = f"labels {', '.join(labels) or 'none'} for all"
        return named, lambda one: {**one, "labels": [*labels], "probabilities": values}

    def confusion(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> None:
        return None


# Values of lists that have one for each label.
_INDICATORS = {text: value for value in (False, True) for text in (f"{value:d}", f"{value:d}.", f"{value:d}.0")}
_INDICATORS |= {"false": False, "true": True}


def _are_indicators(lists: Sequence[tuple[str, ...]]) -> bool:
    is_twice = any(len({*one}) < len(one) for one in lists)
    return is_twice and len({*map(len, lists)}) == 1 and _INDICATORS.keys() >= {*itertools.chain(*lists)}


def _named(record: Record, names: Sequence[str]) -> Record:
    """Return ``record`` with the names of the labels whose value is 1 in its list."""
    values = record.labels
    if values is None:
        return record
    if len(values) != len(names) or not _INDICATORS.keys() >= {*values}:
        allowed = f"{len(names)} values 0 and 1, one for each of the labels {', '.join(names[:9])}"
        raise ValueError(f"{record.source}: labels {', '.join(values)} are not allowed; use {allowed}")
    labels = itertools.compress(names, map(_INDICATORS.__getitem__, values))
    return dataclasses.replace(record, labels=tuple(labels))


class RegressionTask(SequenceTask):
    """Regression of one value with the mean squared error as the loss (STS-B in Devlin et al. 2018)."""

    targets: ClassVar[Mapping[str, Target]] = {"values": Target("unit", np.float32, (1,))}
    logs_loss = True

    @property
    def heads(self) -> HeadsConfig:
        both = self.sequences_per_unit == 2
        return HeadsConfig(pooler=True, sequence_labels=("score",), problem="regression", both_orders=both)

    def target(self, record: Record) -> Targets:
        return {"values": np.array([number_of(record)], np.float32)}

    def reference(self, record: Record) -> float:
        return number_of(record)

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        return regression_loss(self.logits(output, batch), batch["values"], batch["weights"])

    def predictions(self, logits: np.ndarray) -> list[Prediction]:
        """Return for each of N texts the predicted ``value``."""
        return [{"value": round_significant(value)} for value in logits[:, 0]]

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        predicted = np.array([one["value"] for one in predictions])
        return regression_scores(np.array([number_of(record) for record in records]), predicted)

    def constant(self, train: Sequence[Record]) -> task.Constant:
        mean = float(np.mean([number_of(record) for record in train]))
        return f"the training mean {mean:.4g} for all", lambda one: {**one, "value": mean}


def probability_table(predictions: Sequence[Prediction], labels: Sequence[str]) -> np.ndarray:
    """Return float64[N, L]: the probability of every class in each prediction."""
    return np.array([[one["probabilities"][label] for label in labels] for one in predictions])


def class_scores(
    records: Sequence[Record], predictions: Sequence[Prediction], labels: Sequence[str], names: Sequence[str]
) -> list[Score]:
    """Return the scores of :func:`class_predictions` of labeled records. In the names of the scores, each label is
    replaced by the corresponding entry of ``names``."""
    gold, predicted = _class_numbers(records, predictions, labels)
    return classification_scores(gold, predicted, names, probability_table(predictions, labels))


def confusions(gold: np.ndarray, predicted: np.ndarray, names: list[str]) -> Confusion:
    """Return the confusions of the classes ``gold`` int64[n] with ``predicted`` int64[n]."""
    if len(names) <= MOST_CLASSES:
        return {"labels": names, "counts": confusion_matrix(gold, predicted, len(names)).tolist()}
    wrong = gold != predicted
    pairs, counts = np.unique(np.stack([gold[wrong], predicted[wrong]]), axis=1, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MOST_CONFUSIONS]
    largest = [(*pair, count) for pair, count in zip(pairs.T[order].tolist(), counts[order].tolist(), strict=True)]
    sizes = np.bincount(gold, minlength=len(names)).tolist()
    return {"labels": names, "sizes": sizes, "right": int((~wrong).sum()), "largest": largest}


def _class_numbers(
    records: Sequence[Record], predictions: Sequence[Prediction], labels: Sequence[str]
) -> np.ndarray:
    """Return int64[2, n]: the indices of the correct classes and of the predicted classes."""
    numbers = {label: i for i, label in enumerate(labels)}
    pairs = zip(records, predictions, strict=True)
    return np.array([[numbers[record.label or ""], numbers[one["label"]]] for record, one in pairs]).T


def round_significant(value: float) -> float:
    """Round a float32 value to nine significant digits, which suffice to restore it exactly."""
    return float(f"{value:.9g}")


def missing_label(record: Record) -> ValueError:
    """Return the error for a training record without a label."""
    return ValueError(
        f"{record.source}: no label; training requires one; check data.columns (role label; multi_label: labels)"
    )


def class_number(record: Record, labels: tuple[str, ...]) -> int:
    """Return the index of the record's class; raise ``ValueError`` if ``labels`` does not contain this class."""
    if record.label not in labels:
        raise ValueError(_unknown_label(record, record.label, labels))
    return labels.index(record.label)


def number_of(record: Record) -> float:
    """Return the label of the record as a number; raise ``ValueError`` if it is not a finite number."""
    try:
        number = float(record.label or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"{record.source}: label {record.label!r} is not allowed; use a finite number such as "
            "3 or 2.5, or remove the line"
        )
    return number


def _unknown_label(record: Record, label: str | None, labels: tuple[str, ...]) -> str:
    shown = ", ".join(labels[:20]) + (f" and {len(labels) - 20} more" if len(labels) > 20 else "")
    if label is None:
        return f"{record.source}: no label; give one of data.labels: {shown}"
    what = f"label {label!r} is not in data.labels"
    return f"{record.source}: {what}; allowed: {shown}; correct the label, or add it to data.labels"
