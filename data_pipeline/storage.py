"""Folders that may lie in an object store (``gs://...``): what this package needs of ``pathlib``, with retries.

``location`` gives a ``pathlib.Path`` for a local name and an :class:`ObjectPath` for a URL; both answer to the same
methods. TensorFlow's file systems do the work and TensorFlow is imported by the first URL, never for local files.
A request that is refused for the moment (429, 5xx, no connection) is tried again with growing waits.
"""

import contextlib
import errno
import fcntl
import fnmatch
import functools
import hashlib
import io
import logging
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar

from data_pipeline.host_tensorflow import load_tensorflow

R = TypeVar("R")
_log = logging.getLogger(__name__)

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before the tries after the first, lengthened by up to half at random
_BUFFER = 1 << 22  # bytes of one request when a file is read from end to end


class StorageError(OSError):
    """An object store cannot be used: one line with what to do. Ends a run with code 2."""


class Status(NamedTuple):
    """What ``stat`` tells, under the names of ``os.stat``."""

    st_size: int
    st_mtime_ns: int
    is_directory: bool


def is_remote(name: object) -> bool:
    """Whether ``name`` is a URL or an :class:`ObjectPath`."""
    return isinstance(name, ObjectPath) or bool(re.match(r"[a-z][a-z0-9+.-]*://", str(name)))


def attempt(url: str, action: Callable[[], R]) -> R:
    """Result of ``action``, a request for ``url``, tried again when the store refuses it for the moment.

    ``FileNotFoundError`` when there is no such object; ``StorageError`` (one line) when credentials are missing or
    refused, when the scheme is unknown, or after the last try.
    """
    errors = load_tensorflow().errors
    for wait in (*WAITS, None):
        try:
            return action()
        except errors.NotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url) from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise StorageError(
                f"{url}: access refused ({_first_line(error)}); run: gcloud auth application-default login, or "
                "name a key file in GOOGLE_APPLICATION_CREDENTIALS, and check the bucket's permissions"
            ) from None
        except errors.UnimplementedError as error:
            raise StorageError(f"{url}: {_first_line(error)}; allowed: local paths and gs://") from None
        except errors.OpError as error:
            if not _is_transient(error):
                raise StorageError(f"{url}: {_first_line(error)}") from None
            if wait is None:
                raise StorageError(
                    f"{url}: not reachable, tried {len(WAITS) + 1} times: {_first_line(error)}; check network and "
                    "bucket, then run again"
                ) from None
            _log.warning("%s: %s; trying again in %.0f s", url, _first_line(error), wait)
            time.sleep(wait * random.uniform(1, 1.5))
    raise AssertionError("the last try returns or raises")


def _is_transient(error: Exception) -> bool:
    errors = load_tensorflow().errors
    # 429 and 5xx arrive as the first four; Aborted ends TensorFlow's own retries; without a connection curl fails
    # and the code is FailedPrecondition.
    kinds = (
        errors.UnavailableError, errors.ResourceExhaustedError, errors.InternalError, errors.DeadlineExceededError,
        errors.AbortedError, errors.UnknownError,
    )  # fmt: skip
    return isinstance(error, kinds) or "libcurl" in str(error)


def _first_line(error: Exception) -> str:
    lines = str(getattr(error, "message", error)).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


@functools.total_ordering
class ObjectPath:
    """A file or folder in an object store, by its URL. Files there appear whole and are never changed in place."""

    def __init__(self, url: str) -> None:
        self._url = url if url.endswith("://") else url.rstrip("/")

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"ObjectPath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and self._url == other._url

    def __lt__(self, other: object) -> bool:
        return self._url < str(other)

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str | PurePosixPath) -> "ObjectPath":
        return ObjectPath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> "ObjectPath":
        return ObjectPath(self._url.rpartition("/")[0])

    def with_name(self, name: str) -> "ObjectPath":
        return self.parent / name

    def with_suffix(self, suffix: str) -> "ObjectPath":
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    def relative_to(self, folder: "ObjectPath") -> PurePosixPath:
        return PurePosixPath(self._url.removeprefix(f"{folder}/"))

    def resolve(self) -> "ObjectPath":
        return self

    # -------------------------------------------------------------- questions

    def stat(self) -> Status:
        """``FileNotFoundError`` when there is neither an object nor a folder of this name."""
        found = attempt(self._url, lambda: load_tensorflow().io.gfile.stat(self._url))
        return Status(int(found.length), int(found.mtime_nsec), bool(found.is_directory))

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

    def iterdir(self) -> Iterator["ObjectPath"]:
        names = attempt(self._url, lambda: load_tensorflow().io.gfile.listdir(self._url))
        return (self / name.rstrip("/") for name in names)

    def glob(self, pattern: str) -> Iterator["ObjectPath"]:
        """Files and folders of this folder whose names match; none when there is no such folder."""
        try:
            return (path for path in list(self.iterdir()) if fnmatch.fnmatchcase(path.name, pattern))
        except FileNotFoundError:
            return iter(())

    def rglob(self, pattern: str) -> Iterator["ObjectPath"]:
        """Files below this folder, at any depth, whose names match."""
        walk = attempt(self._url, lambda: list(load_tensorflow().io.gfile.walk(self._url)))
        for folder, _, names in walk:
            yield from (ObjectPath(folder) / name for name in names if fnmatch.fnmatchcase(name, pattern))

    # -------------------------------------------------------------- contents

    def read_range(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on, fewer at the end of the file. Safe in threads."""
        tf = load_tensorflow()

        def read() -> bytes:
            with tf.io.gfile.GFile(self._url, "rb") as file:
                try:
                    file.seek(offset)  # beyond the end is an error already
                    return bytes(file.read(length))
                except tf.errors.OutOfRangeError:
                    return b""

        return attempt(self._url, read)

    def read_bytes(self) -> bytes:
        with self.open() as file:
            return file.read()

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def open(self, mode: str = "rb", buffering: int = _BUFFER) -> BinaryIO:
        """The file for reading, as a stream of ranged requests."""
        assert mode == "rb"
        return io.BufferedReader(_Ranges(self), max(buffering, _BUFFER))  # type: ignore[return-value]

    def upload(self, local: Path) -> None:
        """Make this object of a local file; it appears whole."""
        attempt(self._url, lambda: load_tensorflow().io.gfile.copy(str(local), self._url, overwrite=True))

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        attempt(self._url, lambda: load_tensorflow().io.gfile.makedirs(self._url))

    def replace(self, target: "ObjectPath") -> None:
        attempt(self._url, lambda: load_tensorflow().io.gfile.rename(self._url, str(target), overwrite=True))

    def unlink(self, missing_ok: bool = False) -> None:
        with contextlib.suppress(*([FileNotFoundError] if missing_ok else [])):
            attempt(self._url, lambda: load_tensorflow().io.gfile.remove(self._url))


class _Ranges(io.RawIOBase):
    """A file read from front to back, each piece by a request of its own."""

    def __init__(self, path: ObjectPath) -> None:
        self._path, self._at = path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        content = self._path.read_range(self._at, len(target))
        target[: len(content)] = content
        self._at += len(content)
        return len(content)


Location = Path | ObjectPath


def location(name: str | Path | ObjectPath) -> Location:
    """``name`` as something with the methods of ``pathlib.Path``."""
    if isinstance(name, Path | ObjectPath):
        return name
    return ObjectPath(name) if is_remote(name) else Path(name)


def remove_tree(folder: Location) -> None:
    """Remove a folder and all in it."""
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:
        attempt(str(folder), lambda: load_tensorflow().io.gfile.rmtree(str(folder)))


@contextlib.contextmanager
def new_file(path: ObjectPath) -> Iterator[Path]:
    """A local file that becomes ``path`` when the block ends without an exception."""
    with tempfile.TemporaryDirectory(prefix="bert-data-") as folder:
        local = Path(folder) / path.name
        yield local
        path.upload(local)


def local_copy(path: Location) -> Path:
    """``path`` itself, or this machine's copy of a file in an object store, fetched when first asked for.

    Copies lie in the folder for temporary files (``TMPDIR``) and are shared by all processes of the machine.
    """
    if isinstance(path, Path):
        return path
    status = path.stat()
    key = f"{path.parent} {path.name} {status.st_size} {status.st_mtime_ns}"
    folder = Path(tempfile.gettempdir()) / f"bert-data-copies-{os.getuid()}"
    folder = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / path.name
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait for the copy instead of making their own
        if not final.exists():
            part = folder / f".{path.name}.part"
            with path.open() as source, part.open("wb") as target:
                shutil.copyfileobj(source, target, _BUFFER)
            part.replace(final)
    return final
