"""Read several folders of shards as the parts of a mixture, and compute the values that are logged for each part.

``data_pipeline.read.order`` defines the order. Records are numbered consecutively across the parts.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.storage import Location
from bert_jax.tokenization import Tokenizer
from data_pipeline.read.order import BatchSizes, HostRows, MixtureOrder, assign_places
from data_pipeline.read.reader import LaneReader, RawBatch, RecordReader, SequentialReader
from data_pipeline.shards.compatibility import Layout, check_layout, warn_of_changed_files
from data_pipeline.shards.mixture_parts import Part
from data_pipeline.shards.shard_files import MANIFEST_NAME, read_index, read_manifest


class PartRecords:
    """Readers of the records of every part.

    ``first`` int64[K] is the number of the first record of each part.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.readers = [RecordReader(read_index(part.folder)) for part in parts]
        self.indexes = [reader.index for reader in self.readers]
        self.counts = [index.records for index in self.indexes]
        self.first = np.cumsum([0, *self.counts[:-1]])

    def layout(self, data: DataConfig, tokenizer: Tokenizer | None) -> Layout:
        """Return the features to parse, which are the same in all parts; log a warning for each changed file.

        Raises ``ValueError`` with the name of the part if a part differs from the config or from the first part.
        """
        layouts = []
        for part, index in zip(self.parts, self.indexes, strict=True):
            try:
                layouts.append(check_layout(index, data, tokenizer))
            except ValueError as error:
                raise ValueError(f"data.mixture: {part.name}: {error}" if part.name else str(error)) from None
            if _essential(layouts[-1]) != _essential(layouts[0]):
                raise ValueError(
                    f"data.mixture: {part.name}: the features in {part.folder} have other names, types or sizes "
                    f"than those in {self.parts[0].folder}; build one of them again (packed rows: with the same "
                    "data.sequences_per_row)"
                )
            warn_of_changed_files(index)
        names = set.intersection(*(set(layout.features) for layout in layouts))
        return dataclasses.replace(
            layouts[0], features={name: found for name, found in layouts[0].features.items() if name in names}
        )

    def sequences(self, layout: Layout) -> float:
        """Return the mean number of sequences per row of the mixture.

        Raises ``ValueError`` if a folder of packed rows has no manifest, which contains the number of sequences.
        """
        if not layout.is_packed:
            return 1.0
        means = []
        for index in self.indexes:
            counts = (read_manifest(index.folder) or {}).get("counts", {})
            if "rows" not in counts:
                raise ValueError(
                    f"{index.folder}: the manifest ({MANIFEST_NAME}) of the packed shards is missing; copy it from "
                    "the original folder, or build the shards again"
                )
            means.append(counts["instances"] / max(counts["rows"], 1))
        weights = [part.weight for part in self.parts]
        return float(np.average(means, weights=weights))

    @property
    def are_built(self) -> bool:
        """Return True if ``bert-data shards`` has written a part."""
        return any(read_manifest(index.folder) is not None for index in self.indexes)

    def locate(self, number: int) -> tuple[Location, int]:
        """Return the path of the file that contains record ``number``, and the index of the record in this file."""
        part = int(np.searchsorted(self.first, number, side="right")) - 1
        return self.readers[part].locate(number - int(self.first[part]))


def _essential(layout: Layout) -> Layout:
    """Return ``layout`` without the keys of unpacked sequences, which older shards lack."""
    if layout.is_packed:
        return layout
    kept = {name: found for name, found in layout.features.items() if name != "sequence_keys"}
    return dataclasses.replace(layout, features=kept)


def train_reader(
    records: PartRecords, order: MixtureOrder, sizes: BatchSizes, rows: HostRows
) -> Callable[[int], RawBatch]:
    """Return a function that takes a data step and reads the rows of its batch that this host feeds."""
    readers = [
        LaneReader(reader, lanes, sizes, rows) for reader, lanes in zip(records.readers, order.orders, strict=True)
    ]
    if len(readers) == 1:
        return readers[0].batch

    def batch(data_step: int) -> RawBatch:
        size = sizes.size(data_step)
        lanes, places = rows.at(size)
        parts, positions = order.locate(lanes, places + sizes.start(data_step) // order.lanes)

        def read(part: int, chosen: np.ndarray) -> RawBatch:
            return readers[part].read(lanes[chosen], positions[chosen], size // order.lanes)

        return _read_parts(records, parts, read)

    return batch


def held_out_reader(records: PartRecords, batch_size: int, rows: HostRows) -> Callable[[int], RawBatch]:
    """Return a function that takes the number of a held-out batch and reads its rows that this host feeds.

    Each record occurs once, in file order within a part. The parts alternate, with shares of the rows proportional
    to their numbers of records, so that the first batches represent all parts. Rows after the last record have
    status 0.
    """
    readers = [SequentialReader(reader, batch_size, rows) for reader in records.readers]
    if len(readers) == 1:
        return readers[0].batch

    def batch(number: int) -> RawBatch:
        parts, before = assign_places(records.counts, readers[0].wanted(number))
        return _read_parts(records, parts, lambda part, chosen: readers[part].read(before[chosen, part]))

    return batch


def _read_parts(records: PartRecords, parts: np.ndarray, read: Callable[[int, np.ndarray], RawBatch]) -> RawBatch:
    """Return the batch whose rows belong to ``parts`` int64[N]; ``read`` reads some rows, all of one part."""
    payloads: list[bytes | None] = [None] * len(parts)
    columns = np.zeros((3, len(parts)), np.int64)
    for part in np.unique(parts).tolist():
        chosen = np.flatnonzero(parts == part)
        raw = read(part, chosen)
        for row, payload in zip(chosen.tolist(), raw.records, strict=True):
            payloads[row] = payload
        columns[:, chosen] = raw.status, raw.numbers + records.first[part], raw.epochs
    return RawBatch(payloads, *columns)


# ------------------------------------------------------------------ log


class PartLog:
    """Log values and messages about the parts of a mixture; both are functions of the position in the order."""

    def __init__(self, records: PartRecords, order: MixtureOrder) -> None:
        names = [part.name for part in records.parts]
        short = [name.rstrip("/").rpartition("/")[2] for name in names]
        self._names = [last if short.count(last) == 1 else name for name, last in zip(names, short, strict=True)]
        self._counts, self._order = np.array(records.counts), order
        self._is_mixture = len(names) > 1

    def values(self, position: int) -> Mapping[str, float]:
        """Return, for each part, its share of the rows before ``position`` in the lanes, and its passes."""
        if not self._is_mixture:
            return {}
        rows = self._order.rows(position)
        values: dict[str, float] = {}
        for name, share, epochs in zip(self._names, rows / rows.sum(), rows / self._counts, strict=True):
            values |= {f"share_{name}": float(share), f"epoch_{name}": float(epochs)}
        return values

    def notes(self, start: int, stop: int) -> tuple[str, ...]:
        """Return messages about the positions [start, stop) of the lanes: the parts, at the first position, and the
        parts that complete a pass. After pass 1, only passes whose number reaches a power of two are reported."""
        if not self._is_mixture:
            return ()
        notes, total = [], sum(self._order.weights)
        if not start:
            shares = (f"{name} {weight / total:.1%} of the rows ({count:,} records)" for name, weight, count
                      in zip(self._names, self._order.weights, self._counts.tolist(), strict=True))  # fmt: skip
            notes.append(f"mixture: {', '.join(shares)}")
        passes = [(self._order.rows(place) // self._counts).tolist() for place in (start, stop)]
        for name, count, before, after in zip(self._names, self._counts.tolist(), *passes, strict=True):
            if after.bit_length() > before.bit_length():
                notes.append(f"mixture: all {count:,} records of {name} are read {after} time(s); it starts again")
        return tuple(notes)
