"""Shards to host batches in the order of ``data_pipeline.read.order``: the training stream, held-out batches.

Shards lie in a local folder or in an object store. Damaged records become blank rows, which are counted here.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.batch import PRETRAIN_FEATURES, BatchInfo, DataBudgetError
from bert_jax.config.pretrain import DataConfig
from bert_jax.hashing import hash_key
from bert_jax.io.storage import Location
from bert_jax.tokenization import Tokenizer
from data_pipeline.build.masking import MaskingSettings, mask_batch
from data_pipeline.read.order import BatchSizes, HostRows, LaneOrder, usable_lanes
from data_pipeline.read.reader import REASONS, LaneReader, RawBatch, RecordReader, SequentialReader
from data_pipeline.read.tf_stream import Stream, read_batches
from data_pipeline.shards.compatibility import Layout, check_layout, warn_of_changed_files
from data_pipeline.shards.shard_files import ShardIndex, read_index

_log = logging.getLogger(__name__)

_NAMED_BLANKS = 100  # damaged records named one by one; beyond, only when their number doubles
_KEPT_SKIPS = 16  # skipped ranges that the state lists; it stays under 1 KB
_EVAL_EPOCH = 1 << 62  # no training epoch gets here: held-out masks are keyed apart


def _features(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: batch[name] for name in PRETRAIN_FEATURES}


# ------------------------------------------------------------------ damage


class _BlankCounter:
    """Counts the blank rows of consumed batches, names them, and stops above the budget: at once, or (where only a
    part of the rows is read here, and the other processes would wait for theirs) when :meth:`check` is called."""

    def __init__(self, reader: RecordReader, budget: int, *, at_once: bool) -> None:
        self.reader, self.budget, self.at_once, self.count = reader, budget, at_once, 0
        self._last = ""
        self._named: set[int] = set()

    def add(self, batch: Mapping[str, np.ndarray]) -> None:
        """Take in a batch that is about to be handed out; ``DataBudgetError`` leaves the count as it was."""
        damaged = np.flatnonzero(batch["status"])
        if not len(damaged):
            return
        for row in damaged:
            self._last = self._name(int(batch["numbers"][row]), int(batch["status"][row]))
        if self.at_once:
            self.check(len(damaged))
        self.count += len(damaged)

    def check(self, more: int = 0) -> None:
        """``DataBudgetError`` if the count and ``more`` are above the budget."""
        if self.count + more > self.budget:
            raise DataBudgetError(
                f"{self.count + more} damaged records, more than data.max_blank_records ({self.budget}); restore "
                f"the shards or allow more; the last: {self._last}"
            )

    def _name(self, number: int, reason: int) -> str:
        file, record = self.reader.locate(number)
        text = f"{self.reader.index.folder / file}: record {record} {REASONS[reason]}"
        if number not in self._named:
            self._named.add(number)
            if len(self._named) <= _NAMED_BLANKS or len(self._named).bit_count() == 1:
                _log.warning("blank row instead of a damaged record (%d so far): %s", len(self._named), text)
        return text


# ------------------------------------------------------------------ training


class PretrainBatches:
    """The endless stream of training batches (a ``bert_jax.batch.BatchIterator``)."""

    def __init__(
        self, index: ShardIndex, layout: Layout, data: DataConfig, order: LaneOrder, sizes: BatchSizes,
        rows: HostRows, mask: Callable | None,
    ) -> None:  # fmt: skip
        self._layout, self._data, self._order, self._sizes, self._mask = layout, data, order, sizes, mask
        self._records, self._rows = RecordReader(index), rows
        # Otherwise the training step counts the blank rows of all processes, and stops them together.
        whole = rows.rows is None or len(rows.rows) == sizes.final
        self._blanks = _BlankCounter(self._records, data.max_blank_records, at_once=whole)
        self._order_facts = _order_facts(index, data, order, sizes)
        self._data_step = self._skipped_examples = 0
        self._skipped: list[tuple[int, int]] = []
        self._stream: Stream | None = None

    def __iter__(self) -> "PretrainBatches":
        return self

    def __next__(self) -> tuple[dict[str, np.ndarray], BatchInfo]:
        """Next features and their info; ``DataBudgetError`` above ``data.max_blank_records`` damaged records, if
        these are all rows of the batch."""
        if self._stream is None:
            # A reader of its own: threads of a stream that was just closed may still be in the old one.
            reader = LaneReader(self._records, self._order, self._sizes, self._rows)
            self._stream = read_batches(
                reader, self._layout, self._data, steps=(self._data_step, 1 << 62), keys=self._keys, mask=self._mask
            )
        batch = next(self._stream)
        self._blanks.add(batch)
        end = self._sizes.start(self._data_step + 1)
        info = BatchInfo(
            data_step=self._data_step,
            epoch=end / self._order.records,
            examples_seen=end - self._skipped_examples,
            sequences=end - self._sizes.start(self._data_step),
        )
        self._data_step += 1
        return _features(batch), info

    def skip(self, batches: int) -> None:
        """Leave out the next ``batches`` batches (after a loss spike); the state records it."""
        if batches <= 0:
            raise ValueError(f"batches to skip: {batches} is not allowed; allowed: 1 or more")
        start, stop = self._data_step, self._data_step + batches
        self._skipped_examples += self._sizes.start(stop) - self._sizes.start(start)
        if self._skipped and self._skipped[-1][1] == start:
            start = self._skipped.pop()[0]
        self._skipped = [*self._skipped, (start, stop)][-_KEPT_SKIPS:]
        self._data_step = stop
        self.close()

    def state(self) -> dict[str, Any]:
        """Position after the batches returned so far (what was read ahead does not count): JSON under 1 KB."""
        return {
            "data_step": self._data_step,
            "skipped": [list(pair) for pair in self._skipped],
            "skipped_examples": self._skipped_examples,
            "blank_records": self._blanks.count,
            "fingerprint": self._order_facts["fingerprint"],
            "order": {key: value for key, value in self._order_facts.items() if key != "fingerprint"},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after ``state``; ``ValueError`` names what differs when it belongs to another order of data."""
        if state["fingerprint"] != self._order_facts["fingerprint"]:
            differences = [
                f"{key} was {was}, now {self._order_facts.get(key)}"
                for key, was in state["order"].items()
                if self._order_facts.get(key) != was
            ]
            raise ValueError(
                "the saved data position belongs to another order of data: "
                f"{'; '.join(differences) or 'masking options differ'}; set them back, or start a new phase"
            )
        self._data_step = int(state["data_step"])
        self._skipped = [(int(a), int(b)) for a, b in state["skipped"]]
        self._skipped_examples = int(state["skipped_examples"])
        self._blanks.count = int(state["blank_records"])
        self.close()

    def close(self) -> None:
        """Stop reading ahead; the next batch starts it again."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _keys(self, raw: RawBatch) -> np.ndarray:
        return hash_key(self._order.seed, 3, raw.epochs, raw.numbers)


def _order_facts(index: ShardIndex, data: DataConfig, order: LaneOrder, sizes: BatchSizes) -> dict[str, Any]:
    """What the order of data depends on, readable, and its fingerprint."""
    shards = json.dumps([[e.records, e.bytes, e.crc32c] for e in index.entries]).encode()
    facts: dict[str, Any] = {
        "training.seed": order.seed,
        "training.global_batch_size": sizes.final,
        "training.batch_ramp": list(sizes.ramp),
        "lanes": order.lanes,
        "data.window_segments": order.window_segments,
        "data.segment_records": order.segment_records,
        "records": order.records,
        "shards": hashlib.sha256(shards).hexdigest()[:16],
    }
    content = [data.masking]
    if data.masking == "dynamic":
        content += [data.mask_unit, data.mask_fraction, data.mask_token_share, data.random_token_share]
        content += [data.max_predictions, data.span_mean, data.span_max]
    text = json.dumps([1, facts, content], sort_keys=True)
    return facts | {"fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16]}


def pretrain_batches(
    data: DataConfig,
    *,
    folder: Location,
    lanes: int,
    batch_size: int,
    batch_ramp: tuple[int, ...] = (),
    seed: int,
    rows: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
) -> PretrainBatches:
    """The training stream over the indexed shards in ``folder``.

    ``lanes`` divides every batch size; ``batch_ramp`` is pairs of (steps, batch size) that come before
    ``batch_size``; ``rows`` are the rows of the global batch that this host feeds (None: all). The tokenizer is
    needed for dynamic masking, and without it ids are not checked. ``ValueError`` (one line) when there is no
    index or the shards and the config disagree.
    """
    index = read_index(folder)
    layout = check_layout(index, data, tokenizer)
    sizes = BatchSizes(batch_size, tuple(batch_ramp))
    for size in sizes.all:
        if lanes < 1 or size % lanes:
            raise ValueError(f"data.lanes: {lanes} is not allowed; allowed: a divisor of every batch size ({size})")
    warn_of_changed_files(index)
    usable = usable_lanes(lanes, index.records)
    if usable != lanes:
        _log.warning("data.lanes: %d falls to %d: there are only %d records", lanes, usable, index.records)
    order = LaneOrder(
        records=index.records,
        lanes=usable,
        segment_records=data.segment_records,
        window_segments=data.window_segments,
        seed=seed,
    )
    host_rows = HostRows.of(usable, sizes, rows)
    if host_rows.cuts_lanes():
        _log.warning(
            "data.lanes: of %d lanes several processes read the same one, which takes more time and memory; with a "
            "multiple of their number they do not", usable,
        )  # fmt: skip
    return PretrainBatches(index, layout, data, order, sizes, host_rows, _masker(data, tokenizer))


# ------------------------------------------------------------------ evaluation


def eval_batches(
    data: DataConfig,
    *,
    folder: Location,
    batch_size: int,
    rows: Sequence[int] | None = None,
    max_batches: int = 0,
    tokenizer: Tokenizer | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Each held-out record once, in file order; the last batch is filled with blank rows.

    ``max_batches`` above 0 stops after so many. Masks are the same in every call, dynamic shards included.
    Checks happen at the call, not at the first batch. ``DataBudgetError`` while iterating, or, when these ``rows``
    are not all, after the last batch, which the other hosts need too.
    """
    index = read_index(folder)
    layout = check_layout(index, data, tokenizer)
    mask = _masker(data, tokenizer)
    warn_of_changed_files(index)
    records = RecordReader(index)
    reader = SequentialReader(records, batch_size, HostRows.of(1, BatchSizes(batch_size), rows))
    count = -(-index.records // batch_size)
    count = min(count, max_batches) if max_batches else count

    def keys(raw: RawBatch) -> np.ndarray:
        return hash_key(data.seed, 3, _EVAL_EPOCH, raw.numbers)

    def stream() -> Iterator[dict[str, np.ndarray]]:
        whole = rows is None or len(rows) == batch_size
        blanks = _BlankCounter(records, data.max_blank_records, at_once=whole)
        for batch in read_batches(reader, layout, data, steps=(0, count), keys=keys, mask=mask):
            blanks.add(batch)
            yield _features(batch)
        blanks.check()

    return stream()


# ------------------------------------------------------------------ masking at read time


def _masker(data: DataConfig, tokenizer: Tokenizer | None) -> Callable[..., Sequence[np.ndarray]] | None:
    """Function from (ids, word starts, input mask, keys) to (masked ids, positions, labels, weights), or None."""
    if data.masking != "dynamic":
        return None
    if tokenizer is None:
        raise ValueError("data.masking: dynamic needs the vocabulary; give data.vocab")
    settings = MaskingSettings.from_config(data, mask_id=tokenizer.mask_id, vocab_size=tokenizer.vocab_size)
    cls_id, sep_id = tokenizer.cls_id, tokenizer.sep_id

    def mask(
        ids: np.ndarray, word_starts: np.ndarray, input_mask: np.ndarray, keys: np.ndarray
    ) -> Sequence[np.ndarray]:
        maskable = (input_mask > 0) & (ids != cls_id) & (ids != sep_id)
        return mask_batch(
            ids,
            word_starts > 0,
            maskable,
            keys.view(np.uint64),
            max_predictions=data.max_predictions,
            config=settings,
        )

    return mask
