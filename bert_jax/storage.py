"""Files and folders that may lie in an object store (``gs://bucket/run``), with retries; local paths stay paths.

``location`` gives a ``pathlib.Path`` for a local name and an :class:`ObjectPath` for a URL; both answer to the
methods that checkpoints and logs need. fsspec does the work (for gs:// with the package gcsfs) and is imported by
the first URL. A request that is refused for the moment (429, 5xx, no connection) is tried again with growing waits;
what no waiting mends is one ``StorageError``. Objects appear whole, and a folder exists while something is in it.
"""

import contextlib
import functools
import io
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar

R = TypeVar("R")
_log = logging.getLogger(__name__)

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before the tries after the first, lengthened by up to half at random
_BLOCK = 1 << 22


class StorageError(OSError):
    """An object store cannot be used: one line with what to do. Ends a run with code 2."""


class Status(NamedTuple):
    """What ``stat`` tells, under the name of ``os.stat``."""

    st_size: int


def is_remote(name: object) -> bool:
    """Whether ``name`` is a URL or an :class:`ObjectPath`."""
    return isinstance(name, ObjectPath) or bool(re.match(r"[a-z][a-z0-9+.-]*://", str(name)))


def attempt(url: str, action: Callable[[], R]) -> R:
    """Result of ``action``, a request for ``url``, tried again when the store refuses it for the moment.

    ``FileNotFoundError`` when there is no such object; ``StorageError`` when credentials are missing or refused,
    or after the last try.
    """
    for wait in (*WAITS, None):
        try:
            return action()
        except FileNotFoundError:
            raise
        except Exception as error:  # each store has its own types, without a common base
            if lacks_permission(error):
                raise StorageError(
                    f"{url}: access refused ({_first_line(error)}); run: gcloud auth application-default login, or "
                    "name a key file in GOOGLE_APPLICATION_CREDENTIALS, and check the bucket's permissions"
                ) from None
            if not is_transient(error):
                raise StorageError(f"{url}: {_first_line(error)}") from None
            if wait is None:
                raise StorageError(
                    f"{url}: not reachable, tried {len(WAITS) + 1} times: {_first_line(error)}; check network and "
                    "bucket, then run again"
                ) from None
            _log.warning("%s: %s; trying again in %.0f s", url, _first_line(error), wait)
            time.sleep(wait * random.uniform(1, 1.5))
    raise AssertionError("the last try returns or raises")


def _http_status(error: BaseException) -> int | None:
    """The HTTP status that an error carries, or that tensorstore quotes in its text."""
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(status, int | str) and str(status).isdigit():
        return int(status)
    quoted = re.search(r"HTTP response code: (\d{3})", str(error))
    return int(quoted[1]) if quoted else None


def lacks_permission(error: BaseException) -> bool:
    """Are credentials missing or refused?"""
    named = type(error).__module__.startswith("google.auth") or isinstance(error, PermissionError)
    return (
        named
        or _http_status(error) in (401, 403)
        or bool(re.search("PERMISSION_DENIED|UNAUTHENTICATED", str(error)))
    )


def is_transient(error: BaseException) -> bool:
    """Would the same request be answered later? 408, 429, 5xx, and connections that fail."""
    status = _http_status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.startswith("aiohttp"):
        return True
    return bool(re.search("UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED", str(error)))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


@functools.lru_cache
def _filesystem(scheme: str) -> Any:
    try:
        import fsspec

        # gcsfs logs a page of traceback for what attempt() says in a line.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        # Listings are asked for anew each time: other processes write too.
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        raise StorageError(
            f"{scheme}://: {_first_line(error)}; for gs:// run: pip install 'bert_jax[gcs]'"
        ) from None
    except ValueError as error:
        raise StorageError(f"{scheme}://: {_first_line(error)}; allowed: local paths and gs://") from None


@functools.total_ordering
class ObjectPath:
    """An object or folder of an object store, by its URL, with the methods of ``pathlib.Path`` that runs use."""

    def __init__(self, url: str) -> None:
        self._scheme, _, key = url.partition("://")
        self._key = key.strip("/")

    def __str__(self) -> str:
        return f"{self._scheme}://{self._key}"

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

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
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def absolute(self) -> "ObjectPath":
        return self

    resolve = absolute

    def relative_to(self, folder: "ObjectPath") -> PurePosixPath:
        return PurePosixPath(str(self).removeprefix(f"{folder}/"))

    # -------------------------------------------------------------- questions

    def _ask(self, action: Callable[[Any], R]) -> R:
        return attempt(str(self), lambda: action(_filesystem(self._scheme)))

    def _info(self) -> dict[str, Any] | None:
        try:
            return dict(self._ask(lambda store: store.info(self._key)))
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        return self._info() is not None

    def is_file(self) -> bool:
        info = self._info()
        return info is not None and info["type"] == "file"

    def is_dir(self) -> bool:
        info = self._info()
        return info is not None and info["type"] == "directory"

    def stat(self) -> Status:
        info = self._info()
        if info is None:
            raise FileNotFoundError(f"{self}: no such object")
        return Status(int(info["size"]))

    def iterdir(self) -> Iterator["ObjectPath"]:
        found = self._ask(lambda store: store.ls(self._key, detail=False))
        names = {str(key).strip("/").removeprefix(f"{self._key}/").partition("/")[0] for key in found}
        return (self / name for name in sorted(names) if name and f"{self._key}".strip("/") != name)

    def rglob(self, pattern: str) -> Iterator["ObjectPath"]:
        """All objects below this folder, at any depth; ``pattern`` is "*"."""
        assert pattern == "*"
        found = self._ask(lambda store: store.find(self._key))
        return (ObjectPath(f"{self._scheme}://{str(key).strip('/')}") for key in found)

    # -------------------------------------------------------------- contents

    def read_bytes(self) -> bytes:
        return bytes(self._ask(lambda store: store.cat_file(self._key)))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "rb") -> BinaryIO:
        """The object for reading, as a stream of ranged requests."""
        assert mode == "rb"
        return io.BufferedReader(_Ranges(self, self.stat().st_size), _BLOCK)  # type: ignore[return-value]

    def read_range(self, start: int, end: int) -> bytes:
        """Bytes ``start`` to before ``end``."""
        return bytes(self._ask(lambda store: store.cat_file(self._key, start=start, end=end)))

    def write_bytes(self, content: bytes) -> None:
        """Make or replace the object; it appears whole."""
        try:
            self._ask(lambda store: store.pipe_file(self._key, content))
        except FileNotFoundError as error:
            raise StorageError(f"{self}: {_first_line(error)}; is the bucket there?") from None

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def touch(self) -> None:
        self.write_bytes(b"")

    def unlink(self, missing_ok: bool = False) -> None:
        with contextlib.suppress(*([FileNotFoundError] if missing_ok else [])):
            self._ask(lambda store: store.rm_file(self._key))

    def move(self, target: "ObjectPath") -> None:
        """Move this object; copied inside the store, then removed."""
        self._ask(lambda store: store.cp_file(self._key, target._key))
        self.unlink()


class _Ranges(io.RawIOBase):
    """An object read from front to back, each piece by a request of its own."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        end = min(self._at + len(target), self._size)
        content = self._path.read_range(self._at, end) if end > self._at else b""
        target[: len(content)] = content
        self._at += len(content)
        return len(content)


Location = Path | ObjectPath


def location(name: str | Path | ObjectPath) -> Location:
    """``name`` as something with the methods of ``pathlib.Path``."""
    if isinstance(name, Path | ObjectPath):
        return name
    return ObjectPath(name) if is_remote(name) else Path(name)


def write_whole(path: Location, text: str) -> None:
    """Make or replace a file so that a reader never sees half of it."""
    if isinstance(path, ObjectPath):
        path.write_text(text)
    else:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(path)
