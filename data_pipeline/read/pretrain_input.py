"""Turn shards into the batches of a pretraining run, in the order of ``data_pipeline.read.order``.

A stream (``data_pipeline.read.streams``) reads and verifies the serialized examples of a batch, parses them and
creates the features of ``bert_jax.batch``, ``data.prefetch`` batches ahead. Damaged records become blank rows,
which are counted when a batch is returned.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from bert_jax.batch import PRETRAIN_FEATURES, BatchInfo, BatchIterator, RecordFeatures, RowShape
from bert_jax.config.pretrain import DataConfig, PretrainConfig
from bert_jax.hashing import hash_key
from bert_jax.io.storage import Location
from bert_jax.json_values import Json
from bert_jax.tokenization import Tokenizer
from data_pipeline.build.masking import make_masker
from data_pipeline.read.mixture import PartLog, PartRecords, held_out_reader, train_reader
from data_pipeline.read.order import (
    BatchSizes,
    HostRows,
    LaneOrder,
    MixtureOrder,
    order_facts,
    shards_digest,
    usable_lanes,
)
from data_pipeline.read.reader import BlankCounter, RawBatch
from data_pipeline.read.streams import Masker, Stream, open_stream
from data_pipeline.shards.compatibility import Layout, check_layout
from data_pipeline.shards.mixture_parts import Part, held_out_parts, train_parts

_log = logging.getLogger(__name__)

_KEPT_SKIPS = 16  # largest number of skipped ranges in the state, which must stay under 1 KB
_NO_END = 1 << 62  # more steps and epochs than any run has; also the epoch in the keys of held-out masks
_ANY = 2**31 - 1  # more records than are ever damaged
_FIRST_BATCHES = 8  # training batches of which one must have a prediction
_BASELINE_BATCHES = 2000  # training batches that estimate the unigram distribution


# Returns further features of the records with the numbers int64[B].
MoreFeatures = Callable[[np.ndarray], dict[str, np.ndarray]]


class ShardSource:
    """The ``bert_jax.batch.PretrainSource`` that reads the shards named in ``config.data``."""

    def __init__(self, config: PretrainConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        # Further features of the batches.
        self.more: RecordFeatures | None = None
        self._train, self._eval = train_parts(config.data), held_out_parts(config.data)

    @cached_property
    def row_shape(self) -> RowShape:
        """Shape of the rows of training batches. Raises ``ValueError`` if the shards do not match the config."""
        data = self._config.data
        if data.packing == "none":
            return RowShape(data.seq_length, data.max_predictions)
        records = PartRecords(self._train)
        layout = check_layout(records.indexes[0], data, self._tokenizer)
        sizes = layout.predictions_per_row, layout.sequences_per_row
        counts_rows = self._config.training.batch_unit == "rows"
        return RowShape(data.seq_length, *sizes, records.sequences(layout), counts_rows)

    def train(self, rows: list[int]) -> BatchIterator:
        """Open the infinite stream of training batches; this host feeds ``rows``."""
        config, training, rows_of = self._config, self._config.training, self.row_shape.rows
        steps, sizes = training.batch_ramp[::2], map(rows_of, training.batch_ramp[1::2])
        ramp = tuple(number for pair in zip(steps, sizes, strict=True) for number in pair)
        size = rows_of(training.global_batch_size)
        lanes = config.data.lanes_for(size, *ramp[1::2])
        return pretrain_batches(
            config.data, folder=self._train, lanes=lanes, batch_size=size, batch_ramp=ramp, seed=training.seed,
            rows=rows, tokenizer=self._tokenizer, more=self._more(held_out=False),
        )  # fmt: skip

    def held_out(
        self, batch_size: int, rows: list[int], max_batches: int
    ) -> Iterator[dict[str, np.ndarray]] | None:
        """Return an iterator over held-out batches (``max_batches`` 0: all), or None if no data is held out."""
        if not self._eval:
            return None
        return eval_batches(
            self._config.data, folder=self._eval, batch_size=batch_size, rows=rows, max_batches=max_batches,
            tokenizer=self._tokenizer, more=self._more(held_out=True),
        )  # fmt: skip

    def _more(self, *, held_out: bool) -> MoreFeatures | None:
        return None if self.more is None else partial(self.more.rows, held_out=held_out)

    def content(self, *, held_out: bool) -> tuple[int, str]:
        """Return the number of training (or held-out) records and a digest of their shards; (0, "") without
        them."""
        parts = self._eval if held_out else self._train
        if not parts:
            return 0, ""
        records = PartRecords(parts)
        return sum(records.counts), shards_digest(records.indexes)

    @property
    def examples_per_pass(self) -> int:
        """Number of examples, as batch sizes count them, in one pass over the text (not the copies of it that
        ``data.dupe_factor`` adds)."""
        records, shape = PartRecords(self._train), self.row_shape
        count = sum(records.counts) / (self._config.data.dupe_factor if records.are_built else 1)
        return max(1, round(count * (1 if shape.counts_rows else shape.sequences)))

    def numbered(
        self, *, held_out: bool, batch_size: int, first: int
    ) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Yield the batches from ``first`` on, in which each record occurs once: the numbers of the records,
        int64[at most B], and the features of B rows. Rows after the records are blank.

        A damaged record is a blank row with a number.
        """
        data = dataclasses.replace(self._config.data, max_blank_records=_ANY)
        parts, left = self._eval if held_out else self._train, self.content(held_out=held_out)[0]
        for batch in _batches_once(data, parts, batch_size, None, self._tokenizer, first=first):
            count = min(batch_size, left - first * batch_size)
            first += 1
            yield batch["numbers"][:count], batch

    def training_pass(self) -> Iterator[dict[str, np.ndarray]]:
        """Return an iterator over the training records of all parts, each record once."""
        for part in self._train:
            yield from self._whole_part([part], 0)

    def require_predictions(self) -> None:
        """Raise ``ValueError`` if no token is predicted in the first training records of a part."""
        for part in self._train:
            if not any((batch["mlm_weights"] > 0).any() for batch in self._whole_part([part], _FIRST_BATCHES)):
                reason = (
                    f"all weights are 0, or no unit fits data.max_predictions {self._config.data.max_predictions}"
                )
                raise ValueError(
                    f"{part.folder}: no token is predicted in the first records ({reason}); use --data.mask_unit "
                    "token, or build the shards again"
                )

    def unigram_cross_entropy(self) -> float | None:
        """Return the cross-entropy (nats per held-out target) of the unigram distribution of training targets.

        The distribution is estimated with add-one smoothing from at most the first million training records,
        those of a mixture weighted according to ``data.mixture``. Returns None if there is no held-out data.
        """
        if not self._eval or not (held_out := self._baseline_counts[1][0]).any():
            return None
        train = 1 + self._mixed([counts for counts, _ in self._baseline_counts[0]])
        return float(-(held_out @ np.log(train / train.sum())) / held_out.sum())

    def constant_accuracy(self) -> float | None:
        """Return the share of the held-out pairs that have the most frequent label of the training pairs, which
        :meth:`unigram_cross_entropy` reads too; None if there are no held-out pairs."""
        if not self._eval or not (held_out := self._baseline_counts[1][1]).any():
            return None
        return float(
            held_out[self._mixed([labels for _, labels in self._baseline_counts[0]]).argmax()] / held_out.sum()
        )

    def _mixed(self, counts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the sum of the counts of all parts, each scaled according to its weight in the mixture."""
        total, every = sum(part.weight for part in self._train), sum(one.sum() for one in counts)
        pairs = zip(self._train, counts, strict=True)
        return sum(one * (every / max(one.sum(), 1) * (part.weight / total)) for part, one in pairs)

    @cached_property
    def _baseline_counts(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], tuple[np.ndarray, np.ndarray]]:
        """Counts of the first training records of each part, and of all held-out records."""
        total = sum(part.weight for part in self._train)
        batches = [max(1, _BASELINE_BATCHES * part.weight // total) for part in self._train]
        train = [self._target_counts([part], most) for part, most in zip(self._train, batches, strict=True)]
        return train, self._target_counts(self._eval, 0)

    def _target_counts(self, parts: Sequence[Part], max_batches: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of times each token id is a target of a prediction, int64[vocabulary size], and the
        number of pairs with each label, int64[2]."""
        counts, pairs = np.zeros(self._config.model.vocab_size, np.int64), np.zeros(2, np.int64)
        for batch in self._whole_part(parts, max_batches):
            labels = batch["mlm_labels"][batch["mlm_weights"] > 0]
            counts += np.bincount(labels, minlength=len(counts))
            pairs += np.bincount(batch["nsp_labels"][batch["nsp_weights"] > 0], minlength=2)
        return counts, pairs

    def _whole_part(self, parts: Sequence[Part], max_batches: int) -> Iterator[dict[str, np.ndarray]]:
        # Damaged records are skipped, and must not stop the run when it counts.
        data = dataclasses.replace(self._config.data, max_blank_records=_ANY)
        return eval_batches(data, folder=parts, batch_size=512, max_batches=max_batches, tokenizer=self._tokenizer)


# ------------------------------------------------------------------ training


class PretrainBatches(Iterator[tuple[dict[str, np.ndarray], BatchInfo]]):
    """The infinite stream of training batches (a ``bert_jax.batch.BatchIterator``)."""

    def __init__(
        self, records: PartRecords, layout: Layout, data: DataConfig, order: MixtureOrder, sizes: BatchSizes,
        rows: HostRows, mask: Masker | None, more: MoreFeatures | None,
    ) -> None:  # fmt: skip
        self._more = more
        self._per_row = records.sequences(layout)
        self._layout, self._data, self._order, self._sizes, self._mask = layout, data, order, sizes, mask
        self._records, self._rows, self._parts = records, rows, PartLog(records, order)
        # If several processes read, the training step sums their blank rows and stops all processes together.
        self._blanks = BlankCounter(records.locate, data.max_blank_records, at_once=rows.are_all)
        self._order_facts = order_facts(records.indexes, data, order, sizes)
        self._data_step = self._skipped_examples = 0
        self._skipped: list[tuple[int, int]] = []
        self._stream: Stream | None = None

    def __next__(self) -> tuple[dict[str, np.ndarray], BatchInfo]:
        """Return the features of the next batch and its ``BatchInfo``.

        Raises ``DataBudgetError`` if this host feeds all rows and more than ``data.max_blank_records`` records are
        damaged.
        """
        if self._stream is None:
            # Threads of a stream that was just closed may still use the old reader, so a new reader is created.
            read = train_reader(self._records, self._order, self._sizes, self._rows)

            def keys(raw: RawBatch) -> np.ndarray:
                return hash_key(self._order.seed, 3, raw.epochs, raw.numbers)

            self._stream = open_stream(
                read, self._layout, self._data, steps=(self._data_step, _NO_END), keys=keys, mask=self._mask
            )
        batch = next(self._stream)
        self._blanks.add(batch)
        start, end = (self._sizes.start(step) for step in (self._data_step, self._data_step + 1))
        positions = start // self._order.lanes, end // self._order.lanes
        info = BatchInfo(
            data_step=self._data_step,
            epoch=end / self._order.records,
            examples_seen=round(self._per_row * (end - self._skipped_examples)),
            sequences=round(self._per_row * end) - round(self._per_row * start),
            values=self._parts.values(positions[1]),
            notes=self._parts.notes(*positions),
        )
        self._data_step += 1
        return _named(batch, self._more), info

    def skip(self, batches: int) -> None:
        """Skip the next ``batches`` batches, as after a loss spike, and record the range in the state."""
        if batches <= 0:
            raise ValueError(f"batches to skip: {batches} is not allowed; use 1 or more")
        start, stop = self._data_step, self._data_step + batches
        self._skipped_examples += self._sizes.start(stop) - self._sizes.start(start)
        if self._skipped and self._skipped[-1][1] == start:
            start = self._skipped.pop()[0]
        self._skipped = [*self._skipped, (start, stop)][-_KEPT_SKIPS:]
        self._data_step = stop
        self.close()

    def state(self) -> dict[str, Json]:
        """Return the position after the last returned batch (not the last batch read ahead), as a
        JSON-serializable dict of less than 1 KB."""
        return {
            "data_step": self._data_step,
            "skipped": [list(pair) for pair in self._skipped],
            "skipped_examples": self._skipped_examples,
            "blank_records": self._blanks.count,
            "fingerprint": self._order_facts["fingerprint"],
            "order": {key: value for key, value in self._order_facts.items() if key != "fingerprint"},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at the position that ``state`` contains.

        Raises ``ValueError``, which lists the differences, if ``state`` was recorded with another data order.
        """
        if state["fingerprint"] != self._order_facts["fingerprint"]:
            absent = {"data.mixture": "none", "data.contiguous": False}
            before, now = (absent | order for order in (state["order"], self._order_facts))
            differences = [f"{key} was {was}, now {now[key]}" for key, was in before.items() if now[key] != was]
            raise ValueError(
                "the saved data position was recorded with a different data order: "
                f"{'; '.join(differences) or 'masking options differ'}; set these options back, or start a "
                "new phase"
            )
        self._data_step = int(state["data_step"])
        self._skipped = [(int(a), int(b)) for a, b in state["skipped"]]
        self._skipped_examples = int(state["skipped_examples"])
        self._blanks.count = int(state["blank_records"])
        self.close()

    def close(self) -> None:
        """Stop reading ahead; the next call of ``__next__`` resumes reading."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None


def pretrain_batches(
    data: DataConfig, *, folder: Location | Sequence[Part], lanes: int, batch_size: int, seed: int,
    batch_ramp: tuple[int, ...] = (), rows: Sequence[int] | None = None, tokenizer: Tokenizer | None = None,
    more: MoreFeatures | None = None,
) -> PretrainBatches:  # fmt: skip
    """Open the training stream of the indexed shards in ``folder``, or of a mixture of folders.

    ``lanes`` must divide every batch size; ``batch_ramp`` lists (steps, batch size) pairs that precede
    ``batch_size``; ``rows`` are the rows of the global batch that this host feeds (None: all). Dynamic masking
    requires ``tokenizer``; without a tokenizer, ids are not checked. Raises ``ValueError`` (one line) if the index
    is missing, or if the shards do not match the config.
    """
    records = PartRecords(_parts(folder))
    layout = records.layout(data, tokenizer)
    sizes = BatchSizes(batch_size, tuple(batch_ramp))
    for size in sizes.all:
        if lanes < 1 or size % lanes:
            unit = "rows" if data.packing == "none" else "packed rows"
            raise ValueError(
                f"data.lanes: {lanes} is not allowed; use 0, or a divisor of every batch size, including "
                f"{size} {unit}"
            )
    fewest = min(records.counts)
    usable = usable_lanes(lanes, fewest)
    if data.is_contiguous and (usable != batch_size or batch_ramp):
        raise ValueError(
            f"data.row_order: {data.row_order} is not allowed with {usable} lanes, {fewest} records and batches of "
            f"{', '.join(map(str, sizes.all))} rows, because it needs a lane for every row and a record for every "
            "lane; use smaller batches of one size, or more text"
        )
    if usable != lanes:
        where = f" in {records.indexes[records.counts.index(fewest)].folder}" if len(records.counts) > 1 else ""
        _log.warning(
            "data.lanes: %d is reduced to %d, because there are %d records%s", lanes, usable, fewest, where
        )
    lane_orders = (
        LaneOrder(count, usable, data.segment_records, data.window_segments, seed, data.is_contiguous)
        for count in records.counts
    )
    order = MixtureOrder(tuple(part.weight for part in records.parts), tuple(lane_orders))
    host_rows = HostRows.of(usable, sizes, rows)
    if host_rows.cuts_lanes():
        _log.warning(
            "data.lanes: several processes read the same lanes (of %d), which costs time and memory; use a "
            "multiple of the number of processes", usable,
        )  # fmt: skip
    mask = make_masker(data, layout, tokenizer)
    return PretrainBatches(records, layout, data, order, sizes, host_rows, mask, more)


def _parts(folder: Location | Sequence[Part]) -> Sequence[Part]:
    return folder if isinstance(folder, Sequence) else [Part("", 1, folder)]


# ------------------------------------------------------------------ evaluation


def eval_batches(
    data: DataConfig, *, folder: Location | Sequence[Part], batch_size: int, rows: Sequence[int] | None = None,
    max_batches: int = 0, tokenizer: Tokenizer | None = None, more: MoreFeatures | None = None,
) -> Iterator[dict[str, np.ndarray]]:  # fmt: skip
    """Yield each held-out record once, in file order; the last batch is padded with blank rows.

    The parts of a mixture alternate, with shares of the rows proportional to their numbers of held-out records.

    ``max_batches`` above 0 limits the number of batches. Masks, including dynamic masks, are the same in every
    call. The shards are checked before the first batch is requested. Raises ``DataBudgetError`` if too
    many records are damaged: during the iteration or, if other hosts feed some of the rows and therefore need all
    batches, after the last batch.
    """
    batches = _batches_once(data, _parts(folder), batch_size, rows, tokenizer, max_batches=max_batches)
    return (_named(batch, more) for batch in batches)


def _named(batch: Mapping[str, np.ndarray], more: MoreFeatures | None) -> dict[str, np.ndarray]:
    """Return the features of a batch, and ``more`` features of its records."""
    own = {name: batch[name] for name in PRETRAIN_FEATURES}
    return own if more is None else own | more(batch["numbers"])


def _batches_once(
    data: DataConfig, parts: Sequence[Part], batch_size: int, rows: Sequence[int] | None,
    tokenizer: Tokenizer | None, *, first: int = 0, max_batches: int = 0,
) -> Iterator[dict[str, np.ndarray]]:  # fmt: skip
    """Return the batches of :func:`eval_batches` from ``first`` on, with the numbers of the records."""
    records = PartRecords(parts)
    if data.final_masking:
        data = dataclasses.replace(data, mask_fraction=data.final_masking[0], final_masking=())
    layout = records.layout(data, tokenizer)
    mask = make_masker(data, layout, tokenizer)
    host_rows = HostRows.of(1, BatchSizes(batch_size), rows)
    read = held_out_reader(records, batch_size, host_rows)
    count = -(-sum(records.counts) // batch_size)
    count = min(count, max_batches) if max_batches else count

    def keys(raw: RawBatch) -> np.ndarray:
        return hash_key(data.seed, 3, _NO_END, raw.numbers)

    def stream() -> Iterator[dict[str, np.ndarray]]:
        blanks = BlankCounter(records.locate, data.max_blank_records, at_once=host_rows.are_all)
        for batch in open_stream(read, layout, data, steps=(first, count), keys=keys, mask=mask):
            blanks.add(batch)
            yield batch
        blanks.check()

    return stream()
