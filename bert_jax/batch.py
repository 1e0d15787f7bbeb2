"""The batch contract: names, shapes and dtypes of every feature, and the iterator that yields batches.

Dimensions: B rows, S tokens per row, M masked positions per row, C sequences per row (1 unless rows are packed).
The features in shards have the names of google-research/bert; see ``data_pipeline.shards.shard_files``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import jax

# Features of a batch on the devices, by name.
Batch = Mapping[str, "jax.Array"]
# Their shapes and dtypes.
BatchShapes = Mapping[str, "jax.ShapeDtypeStruct"]
# name -> (dimensions after the batch dimension, dtype)
PRETRAIN_FEATURES: dict[str, tuple[str, type]] = {
    "input_ids": ("S", np.int32),  # token ids, after masking
    "token_type_ids": ("S", np.int32),  # segment: 0 = A, 1 = B
    # 0 = padding, k = k-th packed sequence. A key is visible iff its id is not 0 and equals the query's; a query
    # with id 0 sees every key whose id is 1, as in google-research/bert (no loss uses the output).
    "sequence_ids": ("S", np.int32),
    "position_ids": ("S", np.int32),  # restart in each packed sequence
    # Identify the sequences, for the hash of dropout: hashes of (document, pass, instance), or the record numbers.
    "sequence_keys": ("C", np.uint32),
    "mlm_positions": ("M", np.int32),  # positions to predict, 0 where mlm_weights is 0
    "mlm_labels": ("M", np.int32),  # original token ids at these positions
    "mlm_weights": ("M", np.float32),  # 1 = predict, 0 = filler
    "cls_positions": ("C", np.int32),  # position of the [CLS] of each sequence
    "nsp_labels": ("C", np.int32),  # 0 = B follows A, 1 = random (nsp) or swapped (sop)
    "nsp_weights": ("C", np.float32),
    "document_classes": ("C", np.int32),  # class of the document, from 1; 0 = none; only for masked_lm_classes
}


@dataclass(frozen=True)
class BatchInfo:
    """Position and size of a batch in the data order."""

    data_step: int  # index of the batch in the data order, from 0
    epoch: float  # number of passes over the records, this batch included
    examples_seen: int  # sequences consumed since the phase began, this batch included
    sequences: int  # sequences in this batch (with packed rows, a mean over many batches)
    # Values for the log line of the step, and messages for the log.
    values: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class DataBudgetError(Exception):
    """Raised if the data contain more damaged records than the config allows. The run then stops with exit code 43.
    All processes of a run raise this error at the same step."""

    agreed = True


class BatchIterator(Protocol):
    """A resumable stream of host batches."""

    def __next__(self) -> tuple[dict[str, np.ndarray], BatchInfo]:
        """Return the features of the rows that this host feeds, and the position and size of the batch. The
        features are NumPy arrays whose leading dimension has one entry per row."""

    def state(self) -> dict[str, Any]:
        """Return the position after the last returned batch, as values that JSON can represent (under 1 KB)."""

    def skip(self, batches: int) -> None:
        """Skip the next ``batches`` batches (1 or more). :meth:`state` then returns the position after them."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at the position ``state``. Raises ``ValueError`` if ``state`` belongs to other data."""


@dataclass(frozen=True)
class RowShape:
    """Sizes of the rows of batches (S, M and C), and the mean number of sequences of a row."""

    seq_length: int
    max_predictions: int
    sequences_per_row: int = 1
    sequences: float = 1.0
    # True if batch sizes count rows.
    counts_rows: bool = False

    def rows(self, size: int) -> int:
        """Return the number of rows in a batch of the given size, which counts rows or sequences.

        With packed sequences, it is the nearest multiple of the largest power of two that is at most a sixteenth
        of the exact number, so that most meshes divide it; it differs from the exact number by at most 1/32, or by
        half a row. It does not depend on the mesh.
        """
        if self.counts_rows or self.sequences_per_row == 1:
            return size
        exact = size / self.sequences
        unit = 2 ** max(int(exact / 16).bit_length() - 1, 0)
        return max(round(exact / unit), 1) * unit

    def features(self, rows: int) -> dict[str, tuple[tuple[int, ...], type]]:
        """Return the shape and dtype of every pretraining feature of a batch of ``rows`` rows."""
        return feature_shapes(rows, self.seq_length, self.max_predictions, self.sequences_per_row)


class PretrainSource(Protocol):
    """A source of training and held-out batches; ``data_pipeline.read.pretrain_input`` implements it."""

    @property
    def row_shape(self) -> RowShape:
        """Shape of the rows of training batches. Held-out rows have the same length, but packed ones may hold
        another number of sequences."""

    def train(self, rows: list[int]) -> BatchIterator:
        """Return an endless iterator over training batches. Each batch contains only ``rows``, the indices of the
        rows that this host feeds. A global batch has ``row_shape.rows(training.global_batch_size)`` rows."""

    def held_out(
        self, batch_size: int, rows: list[int], max_batches: int
    ) -> Iterator[dict[str, np.ndarray]] | None:
        """Return an iterator over at most ``max_batches`` held-out batches (0: all), in which each record occurs
        once; return ``None`` if there are no held-out data."""

    def training_pass(self) -> Iterator[dict[str, np.ndarray]]:
        """Return an iterator over all training records, in batches of any size, each record once. The features are
        those of :meth:`held_out`."""

    def unigram_cross_entropy(self) -> float | None:
        """Return the cross-entropy, in nats per held-out target, of the unigram distribution of the training
        targets (add-one smoothing); return ``None`` if there are no held-out data."""

    def constant_accuracy(self) -> float | None:
        """Return the share of the held-out pairs that have the most frequent label of the training pairs; return
        ``None`` if there are no held-out pairs."""


class RecordFeatures(Protocol):
    """Features of batches in addition to those of the shards, looked up by record number."""

    def rows(self, numbers: np.ndarray, *, held_out: bool) -> dict[str, np.ndarray]:
        """Return the features [B, ...] of the training (or held-out) records ``numbers`` int64[B]."""


def feature_shapes(
    batch_size: int, seq_length: int, max_predictions: int, sequences_per_row: int = 1
) -> dict[str, tuple[tuple[int, ...], type]]:
    """Return the shape and dtype of every pretraining feature, e.g. ``{"input_ids": ((B, S), np.int32), ...}``."""
    sizes = {"S": seq_length, "M": max_predictions, "C": sequences_per_row}
    return {name: ((batch_size, sizes[dim]), dtype) for name, (dim, dtype) in PRETRAIN_FEATURES.items()}


def first_sequences(batch: Mapping[str, np.ndarray], pad_id: int) -> dict[str, np.ndarray]:
    """Return the first sequence of each row of ``batch``; all other sequences become padding."""
    if batch["sequence_keys"].shape[1] == 1:
        return dict(batch)
    first = batch["sequence_ids"] == 1
    own = np.take_along_axis(first, batch["mlm_positions"], 1) & (batch["mlm_weights"] > 0)
    features = {name: batch[name] * own.astype(batch[name].dtype) for name in batch if name.startswith("mlm_")}
    for name in ("token_type_ids", "sequence_ids", "position_ids"):
        features[name] = batch[name] * first
    for name in ("sequence_keys", "cls_positions", "nsp_labels", "nsp_weights", "document_classes"):
        features[name] = batch[name][:, :1]
    return features | {"input_ids": np.where(first, batch["input_ids"], pad_id)}
