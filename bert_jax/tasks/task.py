"""The contract of a task: text to arrays, output layers, loss, outputs to predictions, metrics.

Shapes: B rows, S tokens per row, C sequences per row, K sequences per unit, U = C / K units per row.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np

from bert_jax.config import HeadsConfig, SentenceConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.metrics import Score
from bert_jax.model.bert import BertOutput
from bert_jax.objectives.objective import Sums
from bert_jax.records import Record
from bert_jax.tokenization import Tokenizer

Level = Literal["unit", "token", "position"]
# A JSON-able object: one line of predictions_SPLIT.jsonl, without its id.
Prediction = dict[str, Any]


@dataclass(frozen=True)
class Encoded:
    """Token ids of one text or pair, special tokens included, with their segments."""

    ids: Sequence[int]
    types: Sequence[int]
    # Read by the decoder of the outputs, not by the device.
    extra: Any = None


class Target(NamedTuple):
    """Place of an array of a unit in a batch.

    ``unit``: [B, U, *shape]. ``token``: one value for each of its tokens, [B, S, *shape]. ``position``: a token of
    its first sequence, counted from that sequence's start; in the batch [B, U], counted from the row's.
    What no unit fills is 0.
    """

    level: Level
    dtype: type
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Sequences that stand one after the other in one row: an example, or a window of one.

    ``targets`` has an entry for every name in ``Task.targets``; of level ``token`` an array as long as all its
    sequences together. A unit without labels has weight 0, and targets where the device needs them (masks).
    """

    # Number of the record that it belongs to.
    record: int
    sequences: tuple[Encoded, ...]
    targets: Mapping[str, Any] = field(default_factory=dict)
    # How much it counts in the loss.
    weight: float = 1.0
    # What ``Task.decode`` needs beside the outputs; not seen by the device.
    extra: Any = None

    @property
    def length(self) -> int:
        """Tokens in all."""
        return sum(len(sequence.ids) for sequence in self.sequences)


class Confusion(NamedTuple):
    """``counts`` int64[C, C] of records by the class that is given (row) and the one that is predicted (column)."""

    labels: tuple[str, ...]
    counts: np.ndarray


class Task(ABC):
    """A kind of task with its config, tokenizer and labels. Nothing changes after construction.

    ``features`` of a batch are those of ``bert_jax.batch`` (``cls_positions`` [B, C]), every target of ``targets``
    under its name, and ``weights`` float32[B, U].
    """

    # Targets by their names in a batch.
    targets: ClassVar[Mapping[str, Target]]
    # Fields of a record that say what is right.
    gold: ClassVar[tuple[str, ...]] = ("label",)

    def __init__(self, config: FinetuneConfig, tokenizer: Tokenizer, records: Sequence[Record] = ()) -> None:
        """``config`` is completed by :meth:`from_data`; ``records`` are those of training, for values that follow
        from them and are no options, such as weights of classes."""
        self.config, self.tokenizer = config, tokenizer

    @classmethod
    def from_data(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> FinetuneConfig:
        """``config`` with what the records decide, such as labels; ``splits`` has "train" and others.

        Raises ``ValueError`` for records that the task cannot learn from: no label, one class only.
        """
        return config

    @classmethod
    def notes(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> list[str]:
        """Lines to log about the records, ``config`` being what :meth:`from_data` gave."""
        return []

    @classmethod
    def is_labelled(cls, record: Record) -> bool:
        """Return True if a record has the reference that it is scored by."""
        return all(getattr(record, name) is not None for name in cls.gold)

    @classmethod
    def scored(cls, records: Sequence[Record]) -> list[int]:
        """Numbers of those records of a split that are scored, in order: the labelled ones."""
        return [i for i, record in enumerate(records) if cls.is_labelled(record)]

    @property
    def sequences_per_unit(self) -> int:
        """K of training."""
        return 1

    def sequences_of(self, units: Sequence[ModelInput]) -> int:
        """K of batches of such ``units``, one or more, that are predicted."""
        return self.sequences_per_unit

    @property
    @abstractmethod
    def heads(self) -> HeadsConfig:
        """Output layers of the model."""

    @property
    def sentence(self) -> SentenceConfig | None:
        """Pooling of a sequence into one vector, for tasks on vectors."""
        return None

    @abstractmethod
    def featurize(self, records: Sequence[Record], *, training: bool) -> list[ModelInput]:
        """Units of every record, in the order of the records; those of a record stand together.

        With ``training`` a record may be left out (a window without an answer, an unlabelled word sequence).
        Raises ``ValueError`` with ``record.source`` for a label or text that does not fit.
        """

    @abstractmethod
    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Denominator of each loss over the whole global batch, known before the forward pass; never 0."""

    @abstractmethod
    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        """(sum, weight) of each loss named in :meth:`denominators` and of what is logged beside them.

        The loss is the sum of each one's sum / denominator. ``axis``: the mesh axis over which other replicas hold
        other rows of the same batch, for losses over all of it.
        """

    @abstractmethod
    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        """Return arrays for predictions by name: [B, U, ...] (``unit``) or [B, S, ...] (``token``)."""

    @abstractmethod
    def decode(
        self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Sequence[Mapping[str, np.ndarray]]
    ) -> list[Prediction]:
        """A prediction for every record, in order. ``outputs[i]`` are those of ``units[i]``: one entry of a
        ``unit`` array, of a ``token`` array as many as the unit has tokens."""

    @abstractmethod
    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        """Metrics over the records that are :meth:`scored`, the one that chooses the best checkpoint first."""

    def confusion(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> Confusion | None:
        """Which classes were taken for which, over labelled records; None for a task that is not of one class."""
        return None
