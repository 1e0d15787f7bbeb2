"""One interface for local paths and for paths in an object store (``gs://bucket/run``).

``location`` returns a ``pathlib.Path`` for a local name and an :class:`ObjectPath` for a URL; both have the same
methods. fsspec makes the requests (for ``gs://`` through the package gcsfs); it is imported when a URL is first
used. A request that fails temporarily (429, 5xx, no connection) is retried with increasing delays; any other
failure raises ``StorageError``. An object becomes visible only when it is complete, and is never changed in place.
"""

import contextlib
import fnmatch
import io
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn, TypeVar

from bert_jax.io.errors import first_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

R = TypeVar("R")
_log = logging.getLogger(__name__)

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each retry, randomly increased by up to 50%
BLOCK = 1 << 22  # bytes of one request when a file is read sequentially


class StorageError(OSError):
    """Raised for an error of an object store that a retry cannot fix. The run exits with code 2."""


class StorageUnavailable(StorageError):
    """Raised if a store is unavailable after all retries. The run exits with code 45 and can be restarted."""


class Status(NamedTuple):
    """Result of :meth:`ObjectPath.stat`. The field ``st_size`` is named as in ``os.stat_result``."""

    st_size: int
    is_directory: bool


def is_url(name: object) -> bool:
    """Return True if ``name`` is a URL or an :class:`ObjectPath`."""
    return bool(re.match(r"[a-z][a-z0-9+.-]*://", str(name)))


# ------------------------------------------------------------------ errors of a store


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status code of an error, from its attributes or from tensorstore's message. Return None if
    the error has no HTTP status code."""
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(status, int | str) and str(status).isdigit():
        return int(status)
    quoted = re.search(r"HTTP response code: (\d{3})", str(error))
    return int(quoted[1]) if quoted else None


def lacks_permission(error: BaseException) -> bool:
    """Return True if credentials are missing or refused."""
    if type(error).__module__.startswith("google.auth") or isinstance(error, PermissionError):
        return True
    refused = re.search("PERMISSION_DENIED|UNAUTHENTICATED|^Forbidden", str(error))
    return refused is not None or _http_status(error) in (401, 403)


def is_transient(error: BaseException) -> bool:
    """Return True if the same request may succeed later: HTTP 408, 429 or 5xx, or a failed connection."""
    status = _http_status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    libraries = ("aiohttp", "requests")
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.startswith(libraries):
        return True
    return bool(re.search("UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED", str(error)))


def _filesystem(url: str) -> "AbstractFileSystem":
    try:
        import fsspec

        # gcsfs logs a traceback for each error, which this module reports in one line.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        # No cache of listings, because other processes write too. fsspec keeps one instance per process.
        return fsspec.filesystem(url.partition("://")[0], use_listings_cache=False)
    except ImportError as error:
        remedy = "for gs:// paths, run: pip install 'bert_jax[gcs]'"
        raise StorageError(f"{url}: {first_line(error)}; {remedy}") from None
    except ValueError as error:
        raise StorageError(f"{url}: {first_line(error)}; allowed: local paths and gs://") from None


class ObjectPath(PurePosixPath):
    """URL of an object or folder in an object store, with the methods of ``pathlib.Path``.

    A folder exists as long as it contains an object. Methods raise ``FileNotFoundError`` if the object does not
    exist, and ``StorageError`` if credentials are missing or refused, if the scheme is unknown, or after the last
    retry. Keys with an empty name (``a//b``) are not supported.
    """

    def __str__(self) -> str:
        text = super().__str__()  # the base class merges slashes; the root of a store has none
        return f"{text}//" if text.endswith(":") and "/" not in text else text.replace(":/", "://", 1)

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self}: an ObjectPath is not a local path")

    @property
    def _key(self) -> str:
        return str(self).partition("://")[2]

    def absolute(self) -> "ObjectPath":
        return self

    resolve = absolute

    # -------------------------------------------------------------- requests

    def _request(self, request: Callable[["AbstractFileSystem", str], R]) -> R:
        """Return the result of ``request(store, key)``. Temporary failures are retried."""
        store = _filesystem(str(self))
        for wait in (*WAITS, None):
            try:
                return request(store, self._key)
            except StorageError:
                raise
            except FileNotFoundError:
                raise FileNotFoundError(f"{self}: no such object") from None
            except Exception as error:  # each store raises its own exception types, without a common base
                line = first_line(error)
                if lacks_permission(error):
                    raise StorageError(
                        f"{self}: access refused ({line}); run: gcloud auth application-default login, or name a "
                        "key file in GOOGLE_APPLICATION_CREDENTIALS, and check the bucket's permissions"
                    ) from None
                if not is_transient(error):
                    raise StorageError(f"{self}: {line}") from None
                if wait is None:
                    raise StorageUnavailable(
                        f"{self}: not reachable, tried {len(WAITS) + 1} times: {line}; check the network and the "
                        "bucket, then run the command again"
                    ) from None
                _log.warning("%s: %s; trying again in %.0f s", self, line, wait)
                time.sleep(wait * random.uniform(1, 1.5))
        raise AssertionError("the last try returns or raises")

    def stat(self) -> Status:
        info = self._request(lambda store, key: store.info(key))
        return Status(int(info["size"] or 0), info["type"] == "directory")

    def _type(self) -> str | None:
        try:
            return "folder" if self.stat().is_directory else "file"
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        return self._type() is not None

    def is_file(self) -> bool:
        return self._type() == "file"

    def is_dir(self) -> bool:
        return self._type() == "folder"

    def iterdir(self) -> Iterator["ObjectPath"]:
        keys = (str(key).strip("/") for key in self._request(lambda store, key: store.ls(key, detail=False)))
        names = {key.removeprefix(f"{self._key}/").partition("/")[0] for key in keys if key != self._key}
        return (self / name for name in sorted(names - {""}))

    def glob(self, pattern: str) -> Iterator["ObjectPath"]:
        """Yield the files and folders in this folder whose names match ``pattern``. The folder may be missing."""
        try:
            return (path for path in list(self.iterdir()) if fnmatch.fnmatchcase(path.name, pattern))
        except FileNotFoundError:
            return iter(())

    def rglob(self, pattern: str) -> Iterator["ObjectPath"]:
        """Yield the objects below this folder, at any depth, whose names match ``pattern``."""
        keys = self._request(lambda store, key: store.find(key))
        for key in keys:
            if "//" in key.strip("/"):
                raise StorageError(f"{self}: the key {key!r} has an empty name between slashes; rename the object")
            path = ObjectPath(f"{self.parts[0]}//{key}")
            if fnmatch.fnmatchcase(path.name, pattern):
                yield path

    # -------------------------------------------------------------- contents

    def read_range(self, start: int, length: int) -> bytes:
        """Read ``length`` bytes from offset ``start`` in one request, or fewer bytes if the object ends earlier.

        May be called from several threads at the same time.
        """

        def read(store: Any, key: str) -> bytes:
            try:
                return bytes(store.cat_file(key, start=start, end=start + length))
            except Exception as error:
                if _http_status(error) != 416:
                    raise
                return b""  # the range begins beyond the end

        return self._request(read)

    def read_bytes(self) -> bytes:
        """Read the object in one request, so that all bytes belong to the same version of the object."""
        return bytes(self._request(lambda store, key: store.cat_file(key)))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "rb", buffering: int = BLOCK) -> BinaryIO:
        """Open the object for reading as a stream of range requests."""
        assert mode == "rb"
        return io.BufferedReader(_Ranges(self, self.stat().st_size), max(buffering, BLOCK))  # type: ignore[return-value]

    def write_bytes(self, content: bytes) -> None:
        """Create or replace the object."""
        self._write(lambda store, key: store.pipe_file(key, content))

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def touch(self) -> None:
        self.write_bytes(b"")

    def upload(self, local: Path) -> None:
        """Create or replace the object with the content of a local file."""
        self._write(lambda store, key: store.put_file(str(local), key))

    def _write(self, request: Callable[["AbstractFileSystem", str], object]) -> None:
        try:
            self._request(request)
        except FileNotFoundError:
            raise StorageError(f"{self}: cannot be written; create the bucket or use another bucket") from None

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Do nothing: an object store creates a folder with its first object."""

    def replace(self, target: "ObjectPath") -> None:
        """Copy this object to ``target`` inside the store, then remove this object."""
        self._request(lambda store, key: store.cp_file(key, target._key))
        self.unlink()

    def unlink(self, missing_ok: bool = False) -> None:
        with contextlib.suppress(*([FileNotFoundError] if missing_ok else [])):
            self._request(lambda store, key: store.rm_file(key))

    def remove_tree(self) -> None:
        """Remove a folder and its contents."""
        self._request(lambda store, key: store.rm(key, recursive=True))

    def version(self) -> str:
        """Return a hash of the object's properties; the hash changes when the object is replaced."""
        return str(self._request(lambda store, key: store.ukey(key)))


class _Ranges(io.RawIOBase):
    """Raw stream that reads an object sequentially, one request per read."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        length = min(len(target), self._size - self._at)
        content = self._path.read_range(self._at, length) if length > 0 else b""
        target[: len(content)] = content
        self._at += len(content)
        return len(content)


Location = Path | ObjectPath


def location(name: str | Path | ObjectPath) -> Location:
    """Return ``name`` as a ``pathlib.Path``, or as an :class:`ObjectPath` if it is a URL."""
    if isinstance(name, Path | ObjectPath):
        return name
    return ObjectPath(name) if is_url(name) else Path(name)
