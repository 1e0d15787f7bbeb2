"""Prefetching: a background thread copies batches to the devices a few steps in advance."""

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.batch import BatchInfo, BatchIterator
from bert_jax.parallel.mesh import to_global


class DevicePrefetcher(Iterator[tuple[Mapping[str, jax.Array], BatchInfo]]):
    """Iterator over pairs of a global batch on the devices and its ``BatchInfo``. ``state`` is the position in the
    data after the last returned batch."""

    def __init__(
        self, iterator: BatchIterator, mesh: Mesh, host_share: float, depth: int, names: Sequence[str] = ()
    ) -> None:
        """Start the background thread.

        Args:
            host_share: fraction of the rows of a global batch that this process supplies.
            depth: maximum number of batches that are prepared in advance.
            names: names of the features that are copied to the devices; if empty, all features are copied.
        """
        self._iterator, self._mesh, self._host_share, self._names = iterator, mesh, host_share, names
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self.state: Mapping[str, Any] = iterator.state()
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            while not self._closed.is_set():
                features, info = next(self._iterator)
                features = {name: features[name] for name in self._names or features}
                rows = next(iter(features.values())).shape[0]
                batch = to_global(features, self._mesh, round(rows / self._host_share))
                self._put((batch, info, self._iterator.state()))
        except BaseException as error:
            self._put(error)

    def _put(self, item: Any) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def __next__(self) -> tuple[dict[str, jax.Array], BatchInfo]:
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        batch, info, self.state = item
        return batch, info

    def close(self) -> None:
        """Stop the thread and discard the prefetched batches."""
        self._closed.set()
        self._thread.join(timeout=10)
