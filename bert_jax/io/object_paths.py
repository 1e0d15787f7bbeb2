"""What every way to an object store shares: URLs with the methods of ``pathlib``, and requests tried again.

``bert_jax/io/storage.py`` (runs, by fsspec) and ``data_pipeline/storage.py`` (corpora and shards, by TensorFlow)
add the requests. One that the store refuses for the moment (429, 5xx, no connection) is tried again with growing
waits; what no waiting mends is one ``StorageError``. Objects appear whole and are never changed in place.
"""

import functools
import io
import logging
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple, Self, TypeVar

R = TypeVar("R")
_log = logging.getLogger(__name__)

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before the tries after the first, lengthened by up to half at random
BLOCK = 1 << 22  # bytes of one request when a file is read from end to end

# What a failed request means: no such object, credentials missing or refused, no such kind of store, the same
# request would be answered later, anything else.
Fault = Literal["missing", "refused", "scheme", "transient", "other"]


class StorageError(OSError):
    """An object store cannot be used: one line with what to do. Ends a run with code 2."""


class StorageUnavailable(StorageError):
    """The store did not answer, however often it was asked. Ends a run with code 45: later it may."""


class Status(NamedTuple):
    """What ``stat`` tells, under the names of ``os.stat``."""

    st_size: int
    is_directory: bool
    st_mtime_ns: int = 0  # where the store tells it


def is_url(name: object) -> bool:
    """Whether ``name`` is a URL or an :class:`ObjectUrl`."""
    return isinstance(name, ObjectUrl) or bool(re.match(r"[a-z][a-z0-9+.-]*://", str(name)))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, cut to 200 characters."""
    lines = str(getattr(error, "message", error)).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def attempt(url: str, action: Callable[[], R], fault_of: Callable[[Exception], Fault | None]) -> R:
    """Result of ``action``, a request for ``url``, tried again when the store refuses it for the moment.

    ``fault_of`` tells what an exception means, None for one that is not of the store and goes on.
    ``FileNotFoundError`` when there is no such object; ``StorageError`` when credentials are missing or refused,
    when the scheme is unknown, or after the last try.
    """
    for wait in (*WAITS, None):
        try:
            return action()
        except StorageError:
            raise
        except Exception as error:  # each store has its own types, without a common base
            fault, line = fault_of(error), first_line(error)
            if fault is None:
                raise
            if fault == "missing":
                raise FileNotFoundError(f"{url}: no such object") from None
            if fault == "refused":
                raise StorageError(
                    f"{url}: access refused ({line}); run: gcloud auth application-default login, or name a key "
                    "file in GOOGLE_APPLICATION_CREDENTIALS, and check the bucket's permissions"
                ) from None
            if fault == "scheme":
                raise StorageError(f"{url}: {line}; allowed: local paths and gs://") from None
            if fault == "other":
                raise StorageError(f"{url}: {line}") from None
            if wait is None:
                raise StorageUnavailable(
                    f"{url}: not reachable, tried {len(WAITS) + 1} times: {line}; check network and bucket, then "
                    "run again"
                ) from None
            _log.warning("%s: %s; trying again in %.0f s", url, line, wait)
            time.sleep(wait * random.uniform(1, 1.5))
    raise AssertionError("the last try returns or raises")


@functools.total_ordering
class ObjectUrl(ABC):
    """An object or folder of an object store, by its URL. A store's class adds the requests: ``_fault``, ``stat``,
    ``_names`` and ``_read``. A folder exists while something is in it."""

    def __init__(self, url: str) -> None:
        self._scheme, _, key = url.partition("://")
        self._key = key.strip("/")

    def __str__(self) -> str:
        return f"{self._scheme}://{self._key}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectUrl) and str(self) == str(other)

    def __lt__(self, other: object) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str | PurePosixPath) -> Self:
        return type(self)(f"{self}/{name}")

    @property
    def name(self) -> str:
        return self._key.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Self:
        return type(self)(f"{self._scheme}://{self._key.rpartition('/')[0]}")

    def with_name(self, name: str) -> Self:
        return self.parent / name

    def with_suffix(self, suffix: str) -> Self:
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    def absolute(self) -> Self:
        return self

    resolve = absolute

    def relative_to(self, folder: "ObjectUrl") -> PurePosixPath:
        return PurePosixPath(str(self).removeprefix(f"{folder}/"))

    # -------------------------------------------------------------- requests

    @staticmethod
    @abstractmethod
    def _fault(error: Exception) -> Fault | None:
        """What an error of a request means; ``None`` for one of another kind."""

    def _ask(self, action: Callable[[], R]) -> R:
        return attempt(str(self), action, self._fault)

    @abstractmethod
    def stat(self) -> Status:
        """``FileNotFoundError`` when there is neither an object nor a folder of this name."""

    @abstractmethod
    def _names(self) -> list[str]:
        """Names in this folder."""

    @abstractmethod
    def _read(self, start: int, length: int) -> bytes:
        """One request for ``length`` bytes from ``start`` on, fewer at the end."""

    # -------------------------------------------------------------- questions

    def _status(self) -> Status | None:
        try:
            return self.stat()
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        return self._status() is not None

    def is_file(self) -> bool:
        status = self._status()
        return status is not None and not status.is_directory

    def is_dir(self) -> bool:
        status = self._status()
        return status is not None and status.is_directory

    def iterdir(self) -> Iterator[Self]:
        return (self / name for name in sorted(self._ask(self._names)))

    # -------------------------------------------------------------- contents

    def read_range(self, start: int, length: int) -> bytes:
        """``length`` bytes from ``start`` on, fewer at the end of the file. Safe in threads."""
        return self._ask(lambda: self._read(start, length))

    def open(self, mode: str = "rb", buffering: int = BLOCK) -> BinaryIO:
        """The object for reading, as a stream of ranged requests."""
        assert mode == "rb"
        return io.BufferedReader(_Ranges(self, self.stat().st_size), max(buffering, BLOCK))  # type: ignore[return-value]

    def read_bytes(self) -> bytes:
        with self.open() as file:
            return file.read()

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)


class _Ranges(io.RawIOBase):
    """An object read from front to back, each piece by a request of its own."""

    def __init__(self, path: ObjectUrl, size: int) -> None:
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        length = min(len(target), self._size - self._at)
        content = self._path.read_range(self._at, length) if length > 0 else b""
        target[: len(content)] = content
        self._at += len(content)
        return len(content)
