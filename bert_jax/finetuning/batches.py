"""Training batches of a task: order, augmentation and packing of its model inputs (units).

Batch k of epoch e is slice k of a permutation that depends on the seed and e, so that a single number identifies
the position in the training data. The last batch of an epoch contains the remaining units.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import BatchInfo
from bert_jax.finetuning import nsp_auxiliary
from bert_jax.finetuning.augment import augmented, mask_for_mlm_loss
from bert_jax.finetuning.batch_shapes import choose_shape, plan_shapes
from bert_jax.finetuning.resolve import ResolvedTask
from bert_jax.inference.batching import Shape, pack_batch
from bert_jax.json_values import Json
from bert_jax.parallel import host_rows
from bert_jax.tasks.sampling import epoch_order


def planned_shapes(resolved: ResolvedTask, mesh: Mesh) -> list[Shape]:
    """Return the shapes of the training batches on ``mesh``, the cheapest first."""
    config = resolved.config
    lengths = np.array([example.length for example in resolved.inputs["train"]])
    # The next-sentence loss reads every example a second time.
    times = 2 if config.loss.nsp_weight else 1
    return plan_shapes(
        lengths,
        config.training.global_batch_size * times,
        steps=config.training.num_steps,
        width=config.model.hidden_size,
        parts=mesh.shape["data"] * mesh.shape["fsdp"] * config.training.accumulation_steps,
        most=config.input.max_shapes,
        packing=config.input.packing,
        limit=max(config.task.max_length * resolved.task.sequences_per_unit, int(lengths.max())),
    )


class ExampleBatches:
    """Endless training batches of a task: a ``BatchIterator`` whose position is the index of the next batch.

    Each process yields the rows of its own devices in ``mesh``.
    """

    def __init__(self, resolved: ResolvedTask, shapes: Sequence[Shape], mesh: Mesh) -> None:
        self._resolved, self._shapes, self._mesh = resolved, shapes, mesh
        self._config, self._task, self._units = resolved.config, resolved.task, resolved.inputs["train"]
        self._batch_size = self._config.training.global_batch_size
        # The class of each unit, to sample every class equally often; None: each unit once per epoch.
        self._classes = resolved.train_classes() if self._config.input.balanced else None
        self._data_step = 0
        self._skipped: list[list[int]] = []
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    @property
    def host_share(self) -> float:
        """Fraction of the rows of a batch that this process feeds."""
        return len(host_rows(self._mesh, self._mesh.size)) / self._mesh.size

    def numbers(self, data_step: int) -> np.ndarray:
        """Return the indices of the model inputs in batch ``data_step``."""
        epoch, index = divmod(data_step, self._resolved.steps_per_epoch)
        if epoch != self._epoch:
            seed = self._config.training.seed
            self._epoch, self._order = epoch, epoch_order(len(self._units), seed, epoch, self._classes)
        return self._order[index * self._batch_size : (index + 1) * self._batch_size]

    def pack(self, data_step: int) -> tuple[dict[str, np.ndarray], int]:
        """Return the features of the global batch ``data_step``, and its number of training examples."""
        task, config, tokenizer = self._task, self._config, self._task.tokenizer
        numbers, targets = self.numbers(data_step).tolist(), {**task.targets, **self._resolved.supervision.targets}
        units = [augmented(self._units[i], config, tokenizer, (data_step, i)) for i in numbers]
        keys = [2 * i for i in numbers]
        if config.loss.nsp_weight:
            chosen = [self._units[i] for i in numbers]
            units += nsp_auxiliary.next_text_units(chosen, self._units, config, tokenizer, data_step)
            targets = {**targets, **nsp_auxiliary.TARGETS}
            keys += range(1, 2 * (len(units) - len(keys)), 2)
        shape, rows = choose_shape([unit.length for unit in units], self._shapes)
        sequences = task.sequences_per_unit
        packed = pack_batch(
            units, rows, shape, sequences=sequences, targets=targets, pad_id=tokenizer.pad_id, keys=keys
        )
        if config.loss.mlm_weight:
            mask_for_mlm_loss(packed.features, tokenizer, config.training.seed, data_step)
        return packed.features, len(numbers)

    def __next__(self) -> tuple[dict[str, np.ndarray], BatchInfo]:
        features, count = self.pack(self._data_step)
        rows = host_rows(self._mesh, len(features["input_ids"]))
        self._data_step += 1
        done = self._data_step
        epoch, index = divmod(done, self._resolved.steps_per_epoch)
        seen = epoch * len(self._units) + min(index * self._batch_size, len(self._units))
        skipped = sum(stop - start for start, stop in self._skipped) * self._batch_size
        info = BatchInfo(
            data_step=done - 1, epoch=seen / len(self._units), examples_seen=max(seen - skipped, 0), sequences=count
        )
        return {name: values[rows] for name, values in features.items()}, info

    def state(self) -> dict[str, Json]:
        """Return the position: the index of the next batch, the skipped ranges and the fingerprint of the data."""
        return {
            "data_step": self._data_step,
            "skipped": [list(span) for span in self._skipped],
            "fingerprint": self._resolved.order_digest,
        }

    def skip(self, batches: int) -> None:
        """Skip the next ``batches`` batches (1 or more), after a loss spike."""
        self._skipped.append([self._data_step, self._data_step + batches])
        self._data_step += batches

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; raise ``ValueError`` if the training examples or their order have changed."""
        if state["fingerprint"] != self._resolved.order_digest:
            raise ValueError(
                "data: the training examples or their order differ from those of the checkpoint (other files, "
                "task, length, batch size or seed); restore these options, or use another --workdir"
            )
        self._data_step = state["data_step"]
        self._skipped = [list(span) for span in state["skipped"]]
