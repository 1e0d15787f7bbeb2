"""The training signal of a fine-tuning run in addition to the labels of its records."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Self

import jax

from bert_jax.batch import Batch
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.json_values import Json
from bert_jax.model import BertOutput
from bert_jax.objectives.display import Display
from bert_jax.objectives.objective import Sums
from bert_jax.records import Record
from bert_jax.tasks.task import ModelInput, Target, Task


class Supervision:
    """No further signal. A room returns a subclass from ``FinetuneRunOptions.supervision``."""

    # Arrays of a training unit that the loss reads in addition to those of the task.
    targets: Mapping[str, Target] = MappingProxyType({})
    # True: the loss reads the outputs of all layers.
    all_layers: bool = False
    # What determines these arrays; part of the digest of the training data.
    key: Sequence[Json] = ()
    # Columns and panels of its losses.
    display: Display = Display()

    def completed(self, config: FinetuneConfig, *, has_labels: bool) -> FinetuneConfig:
        """Return ``config`` with the options that follow from it. ``has_labels``: there are training records.

        Raises ``ValueError`` for options that do not fit, and if there is nothing to train on.
        """
        if not has_labels:
            raise ValueError("data.train: no training records; set data.train to files that contain records")
        return config

    def units(self, task: Task, train: Sequence[Record]) -> list[ModelInput]:
        """Return the units that the run trains on: at least those of the records ``train``."""
        return task.featurize(train, training=True) if train else []

    def of_units(
        self, task: Task, units: Sequence[ModelInput], train: Sequence[Record]
    ) -> tuple[Self, Sequence[ModelInput]]:
        """Return the supervision by the losses of ``task``, and ``units`` with :attr:`targets`."""
        return self, units

    def denominators(self, of_labels: dict[str, jax.Array], batch: Batch) -> dict[str, jax.Array]:
        """Return ``of_labels``, the denominators of the losses of the labels, and those of its losses, each divided
        by the weight of the loss."""
        return of_labels

    def sums(self, output: BertOutput, batch: Batch) -> Sums:
        """Return (sum, weight) of each of its losses."""
        return {}

    def write_record(self, folder: Path) -> None:
        """Write a file to the workdir ``folder`` from which a resumed run finds the supervision again."""


LABELS_ONLY = Supervision()
