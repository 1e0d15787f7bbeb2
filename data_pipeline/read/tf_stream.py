"""tf.data around a reader of serialised examples: batches are read, parsed and laid out ahead of the trainer.

One map reads and verifies whole batches of serialised examples (numpy), the next parses a batch at once in
TensorFlow and lays out the batch contract of ``bert_jax.batch``; both run ahead by ``data.prefetch`` batches.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from bert_jax.config.pretrain import DataConfig
from bert_jax.io.storage import StorageError
from data_pipeline.host_tensorflow import THREADS, load_tensorflow
from data_pipeline.read.reader import BAD_IDS, RawBatch
from data_pipeline.shards.compatibility import Layout
from data_pipeline.shards.shard_files import encode_examples


class RawReader(Protocol):
    def batch(self, number: int) -> RawBatch: ...


def read_batches(
    reader: RawReader,
    layout: Layout,
    data: DataConfig,
    *,
    steps: tuple[int, int],
    keys: Callable[[RawBatch], np.ndarray],
    mask: Callable[..., Sequence[np.ndarray]] | None,
) -> "Stream":
    """Batches ``steps[0]`` to before ``steps[1]``: contract features, ``status`` and ``numbers``."""
    tf = load_tensorflow()
    blank = encode_examples(
        {
            stored: np.zeros((1, length), np.int64 if kind == "int64" else np.float32)
            for stored, kind, length in layout.features.values()
        }
    )[0]

    failures: list[StorageError] = []
    readers = [reader]  # TensorFlow keeps `fetch` for ever; the reader, with its open files, goes with the stream

    def fetch(step: np.ndarray) -> tuple[np.ndarray, ...]:
        try:
            raw = readers[0].batch(int(step))
        except StorageError as error:
            failures.append(error)  # TensorFlow passes on no exception, only its text with a traceback
            raise
        live = np.array([record is not None for record in raw.records])
        records = [blank if record is None else record for record in raw.records]
        key = np.zeros(len(records), np.int64) if mask is None else keys(raw).view(np.int64)
        return np.array(records, object), live, raw.status, raw.numbers, key

    def read(step: Any) -> Any:
        types = [tf.string, tf.bool, tf.int64, tf.int64, tf.int64]
        tensors = tf.numpy_function(fetch, [step], types, stateful=True)
        for tensor in tensors:
            tensor.set_shape([None])
        return tuple(tensors)

    options = tf.data.Options()
    options.autotune.enabled = False
    options.deterministic = True
    options.threading.private_threadpool_size = THREADS
    options.threading.max_intra_op_parallelism = THREADS
    plain = tf.autograph.experimental.do_not_convert  # rewriting this code would take half a second, for nothing
    dataset = tf.data.Dataset.range(*steps).map(plain(read))
    parse = plain(functools.partial(_parse, tf, layout, data, mask))
    dataset = dataset.map(parse, num_parallel_calls=THREADS)
    return Stream(dataset.prefetch(data.prefetch).with_options(options), failures, readers.clear)


def _parse(
    tf: Any, layout: Layout, data: DataConfig, mask: Callable | None,
    records: Any, live: Any, status: Any, numbers: Any, keys: Any,
) -> dict[str, Any]:  # fmt: skip
    """Serialised examples to the batch contract (graph code); rows that are not ``live`` come out all zero."""
    kinds = {"int64": tf.int64, "float": tf.float32}
    spec = {
        stored: tf.io.FixedLenFeature([length], kinds[kind]) for stored, kind, length in layout.features.values()
    }
    parsed = tf.io.parse_example(records, spec)
    found = {name: parsed[stored] for name, (stored, _, _) in layout.features.items()}
    if layout.vocab_size is not None:
        for name in {"input_ids", "masked_lm_ids"} & set(found):
            good = tf.reduce_all((found[name] >= 0) & (found[name] < layout.vocab_size), axis=1)
            status = tf.where(live & ~good, tf.constant(BAD_IDS, tf.int64), status)
            live = live & good
    factor = tf.cast(live, tf.int32)[:, None]
    ints = {name: tf.cast(value, tf.int32) * factor for name, value in found.items() if name != "masked_lm_weights"}
    weight = tf.cast(factor, tf.float32)
    if mask is None:
        masked = [
            ints["masked_lm_positions"],
            ints["masked_lm_ids"],
            tf.cast(found["masked_lm_weights"], tf.float32),
        ]
    else:
        arguments = [ints["input_ids"], ints["word_starts"], ints["input_mask"], keys]
        ints["input_ids"], *masked = tf.numpy_function(mask, arguments, [tf.int32, tf.int32, tf.int32, tf.float32])
        for tensor, width in zip(
            (ints["input_ids"], *masked), (data.seq_length, *[data.max_predictions] * 3), strict=True
        ):
            tensor.set_shape([None, width])
    rows = tf.shape(ints["input_ids"])[0]
    labels = ints["next_sentence_labels"] if layout.has_labels else tf.zeros([rows, 1], tf.int32)
    return {
        "input_ids": ints["input_ids"] * factor,
        "token_type_ids": ints["segment_ids"],
        "sequence_ids": ints["input_mask"],
        "position_ids": tf.broadcast_to(tf.range(data.seq_length), [rows, data.seq_length]) * factor,
        "mlm_positions": masked[0] * factor,
        "mlm_labels": masked[1] * factor,
        "mlm_weights": masked[2] * weight,
        "cls_positions": tf.zeros([rows, 1], tf.int32),
        "nsp_labels": labels,
        "nsp_weights": weight * float(layout.has_labels),
        "status": status,
        "numbers": numbers,
    }


def _end(iterator: list[Any], release: Callable[[], None]) -> None:
    iterator.clear()
    release()


class Stream:
    """The batches of a dataset. Its threads are gone after ``close``, and before the interpreter goes down:
    threads that still call Python then hang or abort the process. ``release`` is called after that."""

    def __init__(
        self, dataset: Any, failures: Sequence[Exception] = (), release: Callable[[], None] = lambda: None
    ) -> None:
        self._iterator, self._failures = [dataset.as_numpy_iterator()], failures
        self.close = weakref.finalize(self, _end, self._iterator, release)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """The next batch; ``StorageError`` when its object store cannot be used any more."""
        try:
            return next(self._iterator[0])
        except load_tensorflow().errors.OpError:
            if self._failures:
                raise self._failures[0] from None
            raise
