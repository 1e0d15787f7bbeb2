"""Files and folders that may lie in an object store (``gs://bucket/run``).

``location`` returns a ``pathlib.Path`` for a local name and an :class:`ObjectPath` for a URL; both have the same
methods. fsspec makes the requests (for ``gs://`` with the package gcsfs) and is imported by the first URL. A
request that the store refuses for the moment (429, 5xx, no connection) is repeated after growing waits; any other
failure is one ``StorageError``. Objects appear whole and are never changed in place.
"""

import contextlib
import fnmatch
import functools
import io
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar

from bert_jax.io.errors import first_line

R = TypeVar("R")
_log = logging.getLogger(__name__)

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before the tries after the first, lengthened by up to half at random
BLOCK = 1 << 22  # bytes of one request when a file is read from end to end


class StorageError(OSError):
    """An object store cannot be used: one line with what to do. Ends a run with code 2."""


class StorageUnavailable(StorageError):
    """The store did not answer any of several requests. Ends a run with code 45: later it may answer."""


class Status(NamedTuple):
    """Result of ``stat``, under the names of ``os.stat``."""

    st_size: int
    is_directory: bool


def is_url(name: object) -> bool:
    """Return True if ``name`` is a URL or an :class:`ObjectPath`."""
    return isinstance(name, ObjectPath) or bool(re.match(r"[a-z][a-z0-9+.-]*://", str(name)))


# ------------------------------------------------------------------ errors of a store


def _http_status(error: BaseException) -> int | None:
    """The HTTP status that an error carries, or that tensorstore quotes in its text."""
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(status, int | str) and str(status).isdigit():
        return int(status)
    quoted = re.search(r"HTTP response code: (\d{3})", str(error))
    return int(quoted[1]) if quoted else None


def lacks_permission(error: BaseException) -> bool:
    """Return True if credentials are missing or refused."""
    named = type(error).__module__.startswith("google.auth") or isinstance(error, PermissionError)
    return (
        named
        or _http_status(error) in (401, 403)
        or bool(re.search("PERMISSION_DENIED|UNAUTHENTICATED|^Forbidden", str(error)))
    )


def is_transient(error: BaseException) -> bool:
    """Return True if the same request may succeed later: 408, 429, 5xx, and connections that fail."""
    status = _http_status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    libraries = ("aiohttp", "requests")
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.startswith(libraries):
        return True
    return bool(re.search("UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED", str(error)))


def _filesystem(url: str) -> Any:
    try:
        import fsspec

        # gcsfs logs a traceback for each error that is one line here.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        # Without a cache of listings: other processes write too. fsspec keeps one instance per process.
        return fsspec.filesystem(url.partition("://")[0], use_listings_cache=False)
    except ImportError as error:
        raise StorageError(f"{url}: {first_line(error)}; for gs:// run: pip install 'bert_jax[gcs]'") from None
    except ValueError as error:
        raise StorageError(f"{url}: {first_line(error)}; allowed: local paths and gs://") from None


@functools.total_ordering
class ObjectPath:
    """An object or folder of an object store, by its URL, with methods of ``pathlib.Path``. A folder exists while
    it holds an object.

    Methods raise ``FileNotFoundError`` when there is no such object, ``StorageError`` when credentials are missing
    or refused, when the scheme is unknown, or after the last try.
    """

    def __init__(self, url: str) -> None:
        self._scheme, _, key = url.partition("://")
        self._key = key.strip("/")

    def __str__(self) -> str:
        return f"{self._scheme}://{self._key}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __lt__(self, other: object) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str | PurePosixPath) -> "ObjectPath":
        return ObjectPath(f"{self}/{name}")

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
    def parent(self) -> "ObjectPath":
        return ObjectPath(f"{self._scheme}://{self._key.rpartition('/')[0]}")

    def with_name(self, name: str) -> "ObjectPath":
        return self.parent / name

    def with_suffix(self, suffix: str) -> "ObjectPath":
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    def absolute(self) -> "ObjectPath":
        return self

    resolve = absolute

    def relative_to(self, folder: "ObjectPath") -> PurePosixPath:
        return PurePosixPath(str(self).removeprefix(f"{folder}/"))

    # -------------------------------------------------------------- requests

    def _request(self, request: Callable[[Any, str], R]) -> R:
        """Result of ``request(store, key)``, repeated while the store refuses it for the moment."""
        store = _filesystem(str(self))
        for wait in (*WAITS, None):
            try:
                return request(store, self._key)
            except StorageError:
                raise
            except FileNotFoundError:
                raise FileNotFoundError(f"{self}: no such object") from None
            except Exception as error:  # each store has its own types, without a common base
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
                        f"{self}: not reachable, tried {len(WAITS) + 1} times: {line}; check network and bucket, "
                        "then run again"
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
        """Return the files and folders in this folder whose names match; none if the folder does not exist."""
        try:
            return (path for path in list(self.iterdir()) if fnmatch.fnmatchcase(path.name, pattern))
        except FileNotFoundError:
            return iter(())

    def rglob(self, pattern: str) -> Iterator["ObjectPath"]:
        """Objects below this folder, at any depth, whose names match."""
        keys = self._request(lambda store, key: store.find(key))
        paths = (ObjectPath(f"{self._scheme}://{key}") for key in keys)
        return (path for path in paths if fnmatch.fnmatchcase(path.name, pattern))

    # -------------------------------------------------------------- contents

    def read_range(self, start: int, length: int) -> bytes:
        """``length`` bytes from ``start`` on in one request, fewer at the end of the object. Safe in threads."""

        def read(store: Any, key: str) -> bytes:
            try:
                return bytes(store.cat_file(key, start=start, end=start + length))
            except Exception as error:
                if _http_status(error) != 416:
                    raise
                return b""  # the range begins beyond the end

        return self._request(read)

    def read_bytes(self) -> bytes:
        """In one request, so never of two versions of an object."""
        return bytes(self._request(lambda store, key: store.cat_file(key)))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "rb", buffering: int = BLOCK) -> BinaryIO:
        """The object for reading, as a stream of ranged requests."""
        assert mode == "rb"
        return io.BufferedReader(_Ranges(self, self.stat().st_size), max(buffering, BLOCK))  # type: ignore[return-value]

    def write_bytes(self, content: bytes) -> None:
        """Make or replace the object."""
        self._write(lambda store, key: store.pipe_file(key, content))

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def touch(self) -> None:
        self.write_bytes(b"")

    def upload(self, local: Path) -> None:
        """Make or replace the object by the content of a local file."""
        self._write(lambda store, key: store.put_file(str(local), key))

    def _write(self, request: Callable[[Any, str], object]) -> None:
        try:
            self._request(request)
        except FileNotFoundError:
            raise StorageError(f"{self}: cannot be written; is the bucket there?") from None

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Do nothing: a folder comes with its first object."""

    def replace(self, target: "ObjectPath") -> None:
        """Move this object; copied inside the store, then removed."""
        self._request(lambda store, key: store.cp_file(key, target._key))
        self.unlink()

    def unlink(self, missing_ok: bool = False) -> None:
        with contextlib.suppress(*([FileNotFoundError] if missing_ok else [])):
            self._request(lambda store, key: store.rm_file(key))

    def remove_tree(self) -> None:
        """Remove a folder with its content."""
        self._request(lambda store, key: store.rm(key, recursive=True))

    def version(self) -> str:
        """A hash of the object's properties, which changes when it is replaced."""
        return str(self._request(lambda store, key: store.ukey(key)))


class _Ranges(io.RawIOBase):
    """An object read from front to back, each piece by a request of its own."""

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
    """``name`` as an object with the methods of ``pathlib.Path``."""
    if isinstance(name, Path | ObjectPath):
        return name
    return ObjectPath(name) if is_url(name) else Path(name)
