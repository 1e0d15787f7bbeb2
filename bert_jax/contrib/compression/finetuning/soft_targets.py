"""Soft targets: outputs of a teacher from which a student of a task learns (Hinton et al. 2015; Sun et al. 2019).

The outputs of the teachers are computed once, before training, and stored with the units of the student: a teacher
may have another vocabulary, and there may be several. Shapes: B rows, S tokens, U units per row, K sequences per
unit, L classes or tags, H width.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.config import HeadsConfig, ModelSpec
from bert_jax.contrib.compression.config import options_of_teachers
from bert_jax.model.bert import BertOutput, present
from bert_jax.model.pooling import gather_positions
from bert_jax.objectives.objective import Sums, denominator
from bert_jax.tasks.task import Level, ModelInput, Outputs, Target, Task


class SoftTargets(ABC):
    """The outputs of a teacher for one kind of task, and their losses against the student's outputs.

    ``targets`` describes the arrays that each unit of the student gets; all are float32. Arrays of several teachers
    are averaged: of logits, this is the geometric mean of their distributions.
    """

    # Output layer that a teacher must have, as a message names it.
    needs = "an output layer for classes"

    def __init__(self, task: Task) -> None:
        config = task.config
        self.task, self.options = task, options_of_teachers(config)
        self.temperature = self.options.temperature
        # Layers of the student, from 1, that learn from the teacher's layers: all but the last.
        self.layers = range(1, config.model.num_layers) if self.options.layers_weight else range(0)
        # The share of a unit in the loss: the windows of a text count as one.
        self.targets: Mapping[str, Target] = {"soft_weights": Target("unit", np.float32), **self.arrays()}
        if self.layers:
            shape = (task.sequences_per_unit, len(self.layers), config.model.hidden_size)
            self.targets = {**self.targets, "soft_layers": Target("unit", np.float32, shape)}

    @abstractmethod
    def arrays(self) -> dict[str, Target]:
        """Return the description of the arrays of a unit."""

    @abstractmethod
    def outputs(self, output: BertOutput, batch: Batch) -> dict[str, tuple[Level, jax.Array]]:
        """Return the outputs of a teacher for a batch, as (level, array) by name, with the columns of the
        teacher."""

    @abstractmethod
    def has_head(self, spec: ModelSpec) -> bool:
        """Return True if the model has the output layer of the task."""

    def order(self, heads: HeadsConfig) -> dict[str, Sequence[int]]:
        """Return, for each output with a column per class or tag, the columns of the teacher in the order of the
        student. Raises ``ValueError`` if the teacher has other classes. Default: none."""
        return {}

    @abstractmethod
    def of_units(
        self, units: Sequence[ModelInput], records: int, read: Sequence[ModelInput], outputs: Outputs
    ) -> list[dict[str, np.ndarray]]:
        """Return the arrays of each of ``units``, the student's inputs of ``records`` records; ``outputs[i]`` are
        the outputs of a teacher for ``read[i]``, the inputs that it reads for the same records."""

    def weights(self, units: Sequence[ModelInput]) -> list[float]:
        """Return ``soft_weights`` of the student's units; default: a text counts as one."""
        counts = Counter(unit.record for unit in units)
        return [1 / counts[unit.record] for unit in units]

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Return the denominator of each part of :meth:`loss` over the global batch, never 0."""
        return {"teacher_loss": denominator(batch["soft_weights"])}

    @abstractmethod
    def loss(self, output: BertOutput, batch: Batch) -> Sums:
        """Return (sum, weight) of each loss between the outputs, by the names of :meth:`counts`."""

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Return the denominator of each loss over the global batch, divided by the weight of the loss."""
        found = {name: count / self.options.weight for name, count in self.counts(batch).items()}
        if self.layers:
            found["teacher_layers_loss"] = denominator(batch["soft_weights"]) / self.options.layers_weight
        return found

    def sums(self, output: BertOutput, batch: Batch) -> Sums:
        """Return (sum, weight) of each loss named in :meth:`denominators`."""
        sums = self.loss(output, batch)
        return sums | layers_loss(output, batch, self.layers) if self.layers else sums


# ------------------------------------------------------------------ patient distillation


def first_tokens(output: BertOutput, batch: Batch, layers: Sequence[int]) -> jax.Array:
    """Return float32[B, U, K, layers, H]: the output of each of ``layers`` (1: the first) for the first token of
    each sequence, divided by its norm (Sun et al. 2019, equation 7)."""
    positions_BxC, units = batch["cls_positions"], batch["weights"].shape[1]
    hidden = present(output.hidden_states)
    states = [gather_positions(hidden[n], positions_BxC) for n in layers]
    x_BxCxNxH = jnp.stack(states, axis=2).astype(jnp.float32)
    x_BxCxNxH *= jax.lax.rsqrt(jnp.maximum(jnp.sum(x_BxCxNxH**2, axis=-1, keepdims=True), 1e-24))
    return x_BxCxNxH.reshape(len(positions_BxC), units, -1, *x_BxCxNxH.shape[2:])


def layers_loss(output: BertOutput, batch: Batch, layers: Sequence[int]) -> Sums:
    """Return ``teacher_layers_loss``: the squared distance of the :func:`first_tokens`, summed over ``layers``
    (patient distillation; Sun et al. 2019, equation 7), the mean over sequences."""
    difference = first_tokens(output, batch, layers) - batch["soft_layers"]
    weights_BxU = batch["soft_weights"]
    error_BxU = jnp.mean(jnp.sum(difference**2, axis=(-2, -1)), axis=-1)
    return {"teacher_layers_loss": (jnp.sum(error_BxU * weights_BxU), jnp.sum(weights_BxU))}
