"""The interface of a task: featurization of texts, output layers, loss, decoding of outputs, and metrics.

Shapes: B rows, S tokens per row, C sequences per row, K sequences per unit, U = C / K units per row.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict, TypeVar

import jax
import numpy as np

from bert_jax.config import HeadsConfig, SentenceConfig, TaskSettings
from bert_jax.config.finetune import FinetuneConfig, LossConfig
from bert_jax.metrics import Score
from bert_jax.model.bert import BertOutput
from bert_jax.objectives.display import Confusion
from bert_jax.objectives.label_losses import softmax_loss
from bert_jax.objectives.objective import Sums, denominator
from bert_jax.records import Record
from bert_jax.tasks.classes import Splits, field_values
from bert_jax.tokenization import Tokenizer

Level = Literal["unit", "token", "position"]
Value = TypeVar("Value", bound=Hashable)

# Function of the correct and the predicted answers (``evaluation.answers_of``) and, if it has a parameter
# ``probabilities``, of those of the predictions; a higher value is better.
OwnMetric = Callable[..., float]
OwnMetrics = Mapping[str, OwnMetric]
NO_METRICS: OwnMetrics = MappingProxyType({})


class Token(TypedDict, total=False):
    """A word of a prediction: its text, its tag and, without a CRF, the probability of the tag; for a text that the
    tokenizer splits into words, also the character offsets of the word."""

    text: str
    start: int
    end: int
    label: str
    score: float


class Prediction(TypedDict, total=False):
    """One line of predictions_SPLIT.jsonl, without its id; the fields are those of the task."""

    gold: str | list[str] | float
    truncated: bool
    # Classes. Several labels have no score, choices have a list of probabilities.
    label: str
    labels: list[str]
    score: float
    probabilities: dict[str, float]
    # Regression, multiple choice, tags.
    value: float
    choice: int
    tokens: list[Token]
    # Question answering.
    answer: str
    start: int
    end: int
    no_answer_score: float
    best_answer: str
    # Sentence embeddings; also cosine_N for each N of ``sentence.matryoshka``.
    cosine: float
    cosine_negative: float
    rank: float | None
    # Number of layers that ran, with early exit.
    layers: int


# Values of the targets of a model input, by name.
Targets = Mapping[str, np.ndarray | float]
# An answer that is the same for every record: in words, and as a function that replaces the answer of a prediction.
Constant = tuple[str, Callable[[Prediction], Prediction]]
# What :meth:`Task.prepare` returns.
Prepared = tuple[FinetuneConfig, dict[str, Sequence[Record]], list[str]]
# Arrays of each unit, by name: for level ``unit`` one entry, for level ``token`` one entry per token of the unit.
Outputs = Sequence[Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Encoded:
    """Token ids of one text or text pair, including special tokens, and their token type ids."""

    ids: Sequence[int] | np.ndarray
    types: Sequence[int] | np.ndarray
    # Additional input of ``Task.decode``; stays on the host.
    extra: Any = None


class Target(NamedTuple):
    """The level, dtype and shape of a target array of a batch; entries that do not belong to a unit are 0.

    ``unit``: one value per unit, [B, U, *shape]. ``token``: one value per token of a unit, [B, S, *shape].
    ``position``: the position of a token in the first sequence of the unit, [B, U]. The position is counted from
    the start of the sequence in a :class:`ModelInput`, and from the start of the row in a batch.
    """

    level: Level
    dtype: type
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One unit: consecutive sequences of one row that represent an example or a window of an example.

    ``targets`` has an entry for every name in ``Task.targets``; a target of level ``token`` is an array with one
    entry for each token of the sequences. A unit without labels has weight 0 and may omit the targets that only the
    loss reads.
    """

    # Index of the record.
    record: int
    sequences: tuple[Encoded, ...]
    targets: Targets = field(default_factory=dict)
    # Weight in the loss.
    weight: float = 1.0
    # Additional input of ``Task.decode``; stays on the host.
    extra: Any = None

    @property
    def length(self) -> int:
        """Total number of tokens."""
        return sum(len(sequence.ids) for sequence in self.sequences)


class Task(ABC):
    """A task with its settings, tokenizer and labels; immutable after construction.

    Only ``settings`` affects the conversion of texts and outputs. ``config``, the options of a run, is for its
    training and evaluation; a task of a saved model has none.

    A batch has the features of ``bert_jax.batch`` (``cls_positions`` [B, C]), every array of ``targets`` under its
    name, and ``weights`` float32[B, U].
    """

    # Targets by their names in a batch.
    targets: ClassVar[Mapping[str, Target]]
    # Fields of a record that contain the correct answer.
    gold: ClassVar[tuple[str, ...]] = ("label",)

    # True: evaluations log the mean of the training loss over the units of a split, because no metric shows it.
    logs_loss: ClassVar[bool] = False

    # Options of the run, if the task belongs to one.
    config: FinetuneConfig
    # Metrics of the run in addition to :meth:`scores`: name -> function of the lists of correct and of predicted
    # answers (``evaluation.answers_of``); a higher value is better.
    own_metrics: OwnMetrics = NO_METRICS

    def __init__(
        self, config: FinetuneConfig | TaskSettings, tokenizer: Tokenizer, records: Sequence[Record] = ()
    ) -> None:
        """Construct a task from the ``config`` of a run, a result of :meth:`from_data`, or from the settings of a
        saved model.

        ``records``: the training records, for values computed from them, such as class weights.
        """
        self.tokenizer = tokenizer
        if isinstance(config, TaskSettings):
            self.settings, self.loss_options = config, LossConfig()
        else:
            self.config, self.settings, self.loss_options = config, config.settings, config.loss

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        """Return ``config`` with the values that depend on the records, such as labels.

        ``splits`` must contain "train". Raises ``ValueError`` for records that the task cannot learn from, such as
        records without labels or of a single class.
        """
        return config

    @classmethod
    def prepare(cls, config: FinetuneConfig, splits: Splits, tests: Sequence[str]) -> Prepared:
        """Return ``config`` and the records as the task reads them, and lines for the log; called before
        :meth:`from_data`.

        If all labels of a split in ``tests`` are -1, and no training label is below 0, its records are unlabeled.
        """
        prepared, lines = dict(splits), []
        for split in tests:
            for name in ("label", "labels", "tags"):
                values, known = ({*map(_number, field_values(splits[one], name))} for one in (split, "train"))
                if values == {-1.0} and not any(one < 0 for one in known):
                    prepared[split] = [_hidden(record, name) for record in prepared[split]]
                    lines.append(f"{split}: {name} is -1 in every record, so these values are treated as hidden")
        return config, prepared, lines

    @classmethod
    def notes(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> list[str]:
        """Return lines to log about the records; ``config`` is the result of :meth:`from_data`."""
        return []

    @classmethod
    def is_labelled(cls, record: Record) -> bool:
        """Return True if ``record`` contains the correct answer, so that a prediction can be scored."""
        return all(getattr(record, name) is not None for name in cls.gold)

    @classmethod
    def scored(cls, records: Sequence[Record]) -> list[int]:
        """Return the indices of the scored records of a split in ascending order; default: all labeled records."""
        return [i for i, record in enumerate(records) if cls.is_labelled(record)]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes in exports and metrics, sorted by class index."""
        return self.settings.label_names or self.settings.labels

    @property
    def sequences_per_unit(self) -> int:
        """Number of sequences per unit (K) in training batches."""
        return 1

    def sequences_of(self, units: Sequence[ModelInput]) -> int:
        """Return the number of sequences per unit (K) in a prediction batch of ``units`` (one or more)."""
        return self.sequences_per_unit

    @property
    @abstractmethod
    def heads(self) -> HeadsConfig:
        """Output layers of the model."""

    @property
    def sentence(self) -> SentenceConfig | None:
        """Pooling of a sequence into one vector. None (the default) if the task does not use sentence vectors."""
        return None

    @abstractmethod
    def featurize(self, records: Sequence[Record], *, training: bool) -> list[ModelInput]:
        """Return the model inputs (units) of all records, in the order of the records.

        With ``training``, units without a training signal, such as a record without words, may be omitted. Raises
        ``ValueError``, with ``record.source`` in its message, for an invalid label or text.
        """

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the denominator of each loss by name, never 0, computed only from ``batch``, the global batch.

        Default: one loss, ``loss``, whose denominator is the sum of the weights, or 1 if all weights are 0.
        """
        return {"loss": denominator(batch["weights"])}

    @abstractmethod
    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        """Return (sum, weight) of each loss named in :meth:`denominators` and of each additional logged value.

        The total loss is the sum of (sum / denominator) over all losses. ``axis`` is the mesh axis over which the
        rows of the batch are sharded, for losses that compare examples across the batch; it is None if ``batch``
        contains all rows.
        """

    @abstractmethod
    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        """Return (level, array) by name for :meth:`decode`. Arrays of level ``unit`` have the shape [B, U, ...];
        arrays of level ``token`` have the shape [B, S, ...]."""

    @abstractmethod
    def decode(self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Outputs) -> list[Prediction]:
        """Return a prediction for every record, in order; ``outputs[i]`` belongs to ``units[i]``."""

    @abstractmethod
    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        """Return the metrics over the :meth:`scored` records. The first metric selects the best parameters unless
        ``task.metric`` names another."""

    def remarks(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[str]:
        """Return warnings about the predictions of a split, such as of a model that has collapsed."""
        return []

    def constant(self, train: Sequence[Record]) -> Constant | None:
        """Return the best answer of a predictor that reads no text, which follows from the labels of ``train``, one
        or more training records. None (default): the task has no such answer.
        """
        return None

    def plain_answer(self, record: Record) -> str | None:
        """Return the answer to ``record`` by a simple rule without a model, for tasks without :meth:`constant`.
        None (default): the task has no such rule."""
        return None

    def constant_class(self, train: Sequence[Record]) -> Constant:
        """Return the most frequent class of the training records as the answer for all records."""
        label = most_frequent(record.label or "" for record in train)
        values = {other: float(other == label) for other in self.config.data.labels}
        return f"class {label} for all", lambda one: {**one, "label": label, "score": 1.0, "probabilities": values}

    def confusion(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> Confusion | None:
        """Return the confusion matrix of scored records; None (default) unless each record has exactly one
        class."""
        return None


def _hidden(record: Record, name: Literal["label", "labels", "tags"]) -> Record:
    if name == "label":
        return dataclasses.replace(record, label=None)
    return dataclasses.replace(record, labels=None) if name == "labels" else dataclasses.replace(record, tags=None)


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def most_frequent(values: Iterable[Value]) -> Value:
    """Return the most frequent of ``values``, which must not be empty; of equally frequent ones the first."""
    return Counter(values).most_common(1)[0][0]


def class_loss(
    options: LossConfig,
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    class_weights_L: jax.Array | None = None,
) -> Sums:
    """Return :func:`softmax_loss` with the label smoothing and the focal exponent of ``options``."""
    smoothing, gamma = options.label_smoothing, options.focal_gamma
    return softmax_loss(
        logits, labels, weights, label_smoothing=smoothing, focal_gamma=gamma, class_weights_L=class_weights_L
    )
