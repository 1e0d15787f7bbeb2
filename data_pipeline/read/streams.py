"""Streams of batches that are read, parsed and masked ahead of the training step, by tf.data or by numpy.

Both streams return the same arrays. The numpy stream needs no TensorFlow.
"""

import functools
import importlib.util
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.storage import StorageError
from data_pipeline.build.masking import Masker
from data_pipeline.build.packing import position_ids, sequence_starts
from data_pipeline.host_tensorflow import THREADS, load_tensorflow
from data_pipeline.read.reader import BAD_IDS, RawBatch
from data_pipeline.shards.compatibility import Layout
from data_pipeline.shards.tfexample import BatchDecoder, encode_examples

HostBatch = dict[str, np.ndarray]
# Features of a batch in the order in which TensorFlow passes them on, with their dtypes.
_DTYPES = {
    "input_ids": np.int32, "token_type_ids": np.int32, "sequence_ids": np.int32, "position_ids": np.int32,
    "sequence_keys": np.uint32, "mlm_positions": np.int32, "mlm_labels": np.int32, "mlm_weights": np.float32,
    "cls_positions": np.int32,
    "nsp_labels": np.int32, "nsp_weights": np.float32, "document_classes": np.int32,
    "status": np.int64, "numbers": np.int64,
}  # fmt: skip
_KINDS = {"int64": np.int64, "float": np.float32}
# Stored features whose values must be ids of the vocabulary.
_CHECKED = {"input_ids", "masked_lm_ids"}


class Stream(ABC, Iterator[HostBatch]):
    """Iterator over batches that are prepared ahead; a batch has the features, ``status`` and ``numbers``."""

    @abstractmethod
    def close(self) -> None:
        """Stop preparing batches."""


def open_stream(
    read: Callable[[int], RawBatch], layout: Layout, data: DataConfig, *, steps: tuple[int, int],
    keys: Callable[[RawBatch], np.ndarray], mask: Masker | None,
) -> Stream:  # fmt: skip
    """Open the stream of the batches [steps[0], steps[1]) that ``data.reader`` names.

    ``read`` returns the serialized examples of a batch; ``keys`` returns the keys of dynamic masking, uint64[B].
    """
    spec = importlib.util.find_spec("tensorflow")
    is_installed = spec is not None and spec.origin is not None  # the origin of a folder without a package is None
    if data.reader == "tensorflow" and not is_installed:
        raise ValueError(
            "data.reader: tensorflow is not installed; use numpy or auto, which read the same batches, or run: "
            "pip install 'bert_jax[data]'"
        )
    use_tensorflow = data.reader != "numpy" and is_installed
    finish = functools.partial(features, layout, data, mask)
    if mask is None:
        keys = _no_keys
    if use_tensorflow:
        return TensorFlowStream(read, finish, layout, data.prefetch, steps, keys, ahead=mask is not None)
    return NumpyStream(read, finish, layout, data.prefetch, steps, keys)


def _no_keys(raw: RawBatch) -> np.ndarray:
    return np.zeros(len(raw.records), np.uint64)


def features(
    layout: Layout, data: DataConfig, mask: Masker | None,
    parsed: HostBatch, live: np.ndarray, status: np.ndarray, numbers: np.ndarray, keys: np.ndarray,
    steps: np.ndarray,
) -> HostBatch:  # fmt: skip
    """Return the batch of ``parsed`` examples, by their names in google-research/bert. Rows for which ``live`` is
    False, or that contain an id outside the vocabulary, are zero. ``steps`` int64[1] is the index of the batch."""
    if layout.vocab_size is not None:
        good = np.ones(len(live), bool)
        for name in _CHECKED & set(parsed):  # as unsigned numbers, negative ids are large
            good &= parsed[name].view(np.uint64).max(1, initial=0) < layout.vocab_size
        status = np.where(live & ~good, BAD_IDS, status)
        live = live & good
    all_live = live.all()

    def clear(values: np.ndarray, dtype: type = np.int32) -> np.ndarray:
        values = values.astype(dtype, copy=False)
        return values if all_live else values * live[:, None].astype(dtype)

    ints = {name: clear(values) for name, values in parsed.items() if name != "masked_lm_weights"}
    sequence_ids = ints["sequence_ids" if layout.is_packed else "input_mask"]
    if mask is None:
        weights = parsed["masked_lm_weights"]
        positions, labels = ints["masked_lm_positions"], ints["masked_lm_ids"]
    else:
        ints["input_ids"], positions, labels, weights = mask(
            ints["input_ids"], ints.get("word_starts"), sequence_ids, keys, int(steps[0])
        )
    if layout.is_packed:
        starts, lengths = sequence_starts(sequence_ids, layout.sequences_per_row)
        cls_positions, has_pair = starts.astype(np.int32), lengths > 0
        own_positions = position_ids(sequence_ids, starts)
    else:
        cls_positions, has_pair = np.zeros((len(live), 1), np.int32), live[:, None]
        column = np.arange(data.seq_length, dtype=np.int32)
        own_positions = clear(np.broadcast_to(column, (len(live), data.seq_length)))
    if "sequence_keys" in ints:
        sequence_keys = ints["sequence_keys"].view(np.uint32)
    else:
        sequence_keys = clear(numbers[:, None], np.uint32)
    return {
        "input_ids": clear(ints["input_ids"]),
        "token_type_ids": ints["segment_ids"],
        "sequence_ids": sequence_ids,
        "position_ids": own_positions,
        "sequence_keys": sequence_keys,
        "mlm_positions": clear(positions),
        "mlm_labels": clear(labels),
        "mlm_weights": clear(weights, np.float32),
        "cls_positions": cls_positions,
        "nsp_labels": ints["next_sentence_labels"] if layout.has_labels else np.zeros_like(cls_positions),
        "nsp_weights": (has_pair & layout.has_labels).astype(np.float32),
        "document_classes": ints.get("document_classes", np.zeros_like(cls_positions)),
        "status": status,
        "numbers": numbers,
    }


# ------------------------------------------------------------------ numpy


class NumpyStream(Stream):
    """Stream of batches that one thread prepares with numpy. The exit of the interpreter waits for the batches that
    are already requested."""

    def __init__(
        self, read: Callable[[int], RawBatch], finish: Callable[..., HostBatch], layout: Layout, prefetch: int,
        steps: tuple[int, int], keys: Callable[[RawBatch], np.ndarray],
    ) -> None:  # fmt: skip
        decode = BatchDecoder({stored: length for stored, _, length in layout.features.values()})

        def prepare(step: int) -> HostBatch:
            raw = read(step)
            live = np.array([record is not None for record in raw.records])
            decoded = decode([record for record in raw.records if record is not None])
            parsed = {}
            for name, (stored, kind, length) in layout.features.items():
                parsed[name] = np.zeros((len(live), length), _KINDS[kind])
                parsed[name][live] = decoded[stored]
            return finish(parsed, live, raw.status, raw.numbers, keys(raw), np.array([step]))

        self._prepare, self._steps, self._prefetch = prepare, iter(range(*steps)), prefetch
        self._pending = deque[Future[HostBatch]]()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def __next__(self) -> HostBatch:
        """Return the next batch. Raises ``StorageError`` if the object store is no longer available."""
        while len(self._pending) <= self._prefetch and (step := next(self._steps, None)) is not None:
            self._pending.append(self._pool.submit(self._prepare, step))
        if not self._pending:
            raise StopIteration
        batch = self._pending[0].result()  # an error stays in its place, so that no batch is skipped
        self._pending.popleft()
        return batch

    def close(self) -> None:
        self._pending.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)


# ------------------------------------------------------------------ tf.data


class TensorFlowStream(Stream):
    """Stream of a tf.data pipeline: a first map reads and verifies the serialized examples, and a second map parses
    them. With ``ahead``, which pays for dynamic masks, the second map also creates the features; otherwise
    ``__next__`` does, because the transfer of all features to TensorFlow and back costs more than they do."""

    def __init__(
        self, read: Callable[[int], RawBatch], finish: Callable[..., HostBatch], layout: Layout, prefetch: int,
        steps: tuple[int, int], keys: Callable[[RawBatch], np.ndarray], *, ahead: bool,
    ) -> None:  # fmt: skip
        tf = load_tensorflow()
        empty = {stored: np.zeros((1, length), _KINDS[kind]) for stored, kind, length in layout.features.values()}
        (blank,) = encode_examples(empty)
        # TensorFlow never releases `fetch`, so `fetch` must not refer to the reader or to this object.
        self._failures = failures = list[StorageError]()
        readers = [read]

        def fetch(step: np.ndarray) -> tuple[np.ndarray, ...]:
            try:
                raw = readers[0](int(step))
            except StorageError as error:
                failures.append(error)  # TensorFlow reports only the text of an exception
                raise
            live = np.array([record is not None for record in raw.records])
            records = [blank if record is None else record for record in raw.records]
            own_keys = keys(raw).view(np.int64)
            return np.array(records, object), live, raw.status, raw.numbers, own_keys, np.array([step], np.int64)

        def read_batch(step: Any) -> Any:
            types = [tf.string, tf.bool, tf.int64, tf.int64, tf.int64, tf.int64]
            tensors = tf.numpy_function(fetch, [step], types, stateful=True)
            for tensor in tensors:
                tensor.set_shape([None])
            return tuple(tensors)

        parsed = _parser(tf, layout)

        count = len(layout.features)

        def complete(*arrays: np.ndarray) -> HostBatch:
            return finish(dict(zip(layout.features, arrays[:count], strict=True)), *arrays[count:])

        def in_order(*arrays: np.ndarray) -> list[np.ndarray]:
            batch = complete(*arrays)
            return [batch[name] for name in _DTYPES]

        def parse(records: Any, *others: Any) -> tuple[Any, ...]:
            arrays = [*parsed(records), *others]
            return tuple(tf.numpy_function(in_order, arrays, list(_DTYPES.values())) if ahead else arrays)

        options = tf.data.Options()
        options.autotune.enabled = False
        options.deterministic = True
        options.threading.private_threadpool_size = THREADS
        options.threading.max_intra_op_parallelism = THREADS
        plain = tf.autograph.experimental.do_not_convert  # a conversion would take half a second
        dataset = tf.data.Dataset.range(*steps).map(plain(read_batch)).map(plain(parse), num_parallel_calls=THREADS)
        self._iterator = [dataset.prefetch(prefetch).with_options(options).as_numpy_iterator()]
        self._complete = None if ahead else complete
        # A thread that called Python after the exit of the interpreter would hang or abort the process.
        self._finalize = weakref.finalize(
            self, lambda *parts: [part.clear() for part in parts], self._iterator, readers
        )

    def __next__(self) -> HostBatch:
        """Return the next batch. Raises ``StorageError`` if the object store is no longer available."""
        try:
            arrays = next(self._iterator[0])
        except load_tensorflow().errors.OpError:
            if self._failures:
                raise self._failures[0] from None
            raise
        return dict(zip(_DTYPES, arrays, strict=True)) if self._complete is None else self._complete(*arrays)

    def close(self) -> None:
        self._finalize()


def _parser(tf: ModuleType, layout: Layout) -> Callable[[Any], list[Any]]:
    """Return a TensorFlow function that parses serialized examples to the features of ``layout``."""
    spec = {
        stored: tf.io.FixedLenFeature([length], _KINDS[kind]) for stored, kind, length in layout.features.values()
    }
    # Ids are checked before they lose their high bits.
    wide = _CHECKED if layout.vocab_size is not None else set()

    def parse(records: Any) -> list[Any]:
        parsed = tf.io.parse_example(records, spec)
        return [
            # TensorFlow converts without the lock of the interpreter, which the readers need.
            tf.cast(parsed[stored], tf.int32) if kind == "int64" and name not in wide else parsed[stored]
            for name, (stored, kind, _) in layout.features.items()
        ]

    return parse
