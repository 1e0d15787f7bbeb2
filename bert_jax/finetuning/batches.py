"""Training batches of a task: the order of its units, and what is done to them on the way.

Batch k of epoch e is a slice of the permutation of (seed, e), so a position is one number.
The last batch of an epoch holds what is left over.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import BatchInfo
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning import nsp_auxiliary as next_text
from bert_jax.finetuning.augment import augmented, mask_batch
from bert_jax.finetuning.nsp_auxiliary import next_text_units
from bert_jax.finetuning.packing import choose_shape, plan_shapes
from bert_jax.finetuning.resolve import ResolvedTask
from bert_jax.inference.batching import Shape, pack_batch
from bert_jax.parallel import host_rows
from bert_jax.tasks.sampling import epoch_order
from bert_jax.tasks.task import ModelInput, Task


class ExampleBatches:
    """Endless training batches of ``units``; a ``BatchIterator`` whose position is the number of its next batch.

    ``rows_of`` maps a number of rows to the rows of this process.
    """

    def __init__(
        self,
        task: Task,
        units: Sequence[ModelInput],
        shapes: Sequence[Shape],
        rows_of: Callable[[int], list[int]],
        fingerprint: str,
        classes: np.ndarray | None,
    ) -> None:
        """``classes``: int[n], the class of each unit, to draw every class equally often; None: no balancing."""
        self._task, self._units, self._shapes, self._rows_of = task, units, shapes, rows_of
        self._config: FinetuneConfig = task.config
        self._batch_size = self._config.training.global_batch_size
        self._fingerprint, self._classes = fingerprint, classes
        self._data_step = 0
        self._skipped: list[list[int]] = []
        self._epoch, self._order = -1, np.zeros(0, np.int64)
        self.steps_per_epoch = math.ceil(len(units) / self._batch_size)

    def numbers(self, data_step: int) -> np.ndarray:
        """Return the numbers of the units of a batch."""
        epoch, index = divmod(data_step, self.steps_per_epoch)
        if epoch != self._epoch:
            seed = self._config.training.seed
            self._epoch, self._order = epoch, epoch_order(len(self._units), seed, epoch, self._classes)
        return self._order[index * self._batch_size : (index + 1) * self._batch_size]

    def pack(self, data_step: int) -> tuple[dict[str, np.ndarray], int]:
        """Features of the whole batch, and how many units it has."""
        numbers = self.numbers(data_step)
        units = [
            augmented(self._units[number], self._config, self._task.tokenizer, (data_step, int(number)))
            for number in numbers
        ]
        task, config, seed, targets = self._task, self._config, self._config.training.seed, self._task.targets
        also: list[ModelInput] = []
        if config.loss.nsp_weight:
            plain = [self._units[number] for number in numbers]
            also = next_text_units(
                plain, self._units, task.tokenizer, key=(seed, data_step),
                max_length=config.task.max_length, types=config.model.type_vocab_size,
            )  # fmt: skip
            targets = {**targets, **next_text.TARGETS}
        shape, rows = choose_shape([unit.length for unit in (*units, *also)], self._shapes)
        packed = pack_batch(
            [*units, *also], rows, shape,
            sequences=task.sequences_per_unit, targets=targets, pad_id=task.tokenizer.pad_id,
        )  # fmt: skip
        if config.loss.mlm_weight:
            mask_batch(packed.features, task.tokenizer, seed, data_step)
        return packed.features, len(units)

    def __next__(self) -> tuple[dict[str, np.ndarray], BatchInfo]:
        features, count = self.pack(self._data_step)
        rows = self._rows_of(len(features["input_ids"]))
        self._data_step += 1
        done = self._data_step
        epoch, index = divmod(done, self.steps_per_epoch)
        seen = epoch * len(self._units) + min(index * self._batch_size, len(self._units))
        skipped = sum(stop - start for start, stop in self._skipped) * self._batch_size
        info = BatchInfo(
            data_step=done - 1, epoch=seen / len(self._units), examples_seen=max(seen - skipped, 0), sequences=count
        )
        return {name: values[rows] for name, values in features.items()}, info

    def state(self) -> dict[str, Any]:
        """Return the position: number of the next batch, skipped ranges and fingerprint of the data."""
        return {
            "data_step": self._data_step,
            "skipped": [list(span) for span in self._skipped],
            "fingerprint": self._fingerprint,
        }

    def skip(self, batches: int) -> None:
        """Leave out the next ``batches`` batches (after a loss spike)."""
        if batches <= 0:
            raise ValueError(f"batches to skip: {batches} is not allowed; allowed: 1 or more")
        self._skipped.append([self._data_step, self._data_step + batches])
        self._data_step += batches

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after ``state``; ``ValueError`` when the training records or how they are read changed."""
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                "data: the training examples are not those that the checkpoint was trained on (other files, task, "
                "length, batch size or seed); use the same or another --workdir"
            )
        self._data_step = state["data_step"]
        self._skipped = [list(span) for span in state["skipped"]]


class TrainingExamples:
    """The training examples of a run: the shapes of their batches, planned once, and the batches on a mesh."""

    def __init__(self, resolved: ResolvedTask) -> None:
        self._resolved = resolved
        # Those of the first mesh; empty: not planned yet.
        self.shapes: list[Shape] = []

    def batches(self, mesh: Mesh) -> ExampleBatches:
        """Return the batches from the first one on; each process feeds the rows of its own devices."""
        resolved = self._resolved
        self.shapes = self.shapes or self._plan(mesh)
        return ExampleBatches(
            resolved.task,
            resolved.inputs["train"],
            self.shapes,
            lambda count: host_rows(mesh, count),
            resolved.order_digest,
            resolved.train_classes() if resolved.config.input.balanced else None,
        )

    def _plan(self, mesh: Mesh) -> list[Shape]:
        config, task, sizes = self._resolved.config, self._resolved.task, mesh.shape
        lengths = np.array([example.length for example in self._resolved.inputs["train"]])
        # A next-sentence loss sees every example a second time.
        times = 2 if config.loss.nsp_weight else 1
        return plan_shapes(
            lengths,
            config.training.global_batch_size * times,
            steps=config.training.num_steps,
            width=config.model.hidden_size,
            parts=sizes["data"] * sizes["fsdp"] * config.training.accumulation_steps,
            most=config.input.max_shapes,
            packing=config.input.packing,
            limit=max(config.task.max_length * task.sequences_per_unit, int(lengths.max())),
        )

    @staticmethod
    def host_share(mesh: Mesh) -> float:
        """Return the part of a batch's rows that this process feeds."""
        return len(host_rows(mesh, mesh.size)) / mesh.size
