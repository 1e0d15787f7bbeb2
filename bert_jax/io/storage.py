"""Files and folders that may lie in an object store (``gs://bucket/run``), with retries; local paths stay paths.

``location`` gives a ``pathlib.Path`` for a local name and an :class:`ObjectPath` for a URL; both answer to the
methods that checkpoints and logs need. fsspec does the work (for gs:// with the package gcsfs) and is imported by
the first URL.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_jax.io.object_paths import Fault, ObjectUrl, Status, StorageError, first_line, is_url


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
            f"{scheme}://: {first_line(error)}; for gs:// run: pip install 'bert_jax[gcs]'"
        ) from None
    except ValueError as error:
        raise StorageError(f"{scheme}://: {first_line(error)}; allowed: local paths and gs://") from None


class ObjectPath(ObjectUrl):
    """An object or folder of an object store, by its URL, with the methods of ``pathlib.Path`` that runs use."""

    @staticmethod
    def _fault(error: Exception) -> Fault:
        if isinstance(error, FileNotFoundError):
            return "missing"
        return "refused" if lacks_permission(error) else "transient" if is_transient(error) else "other"

    @property
    def _store(self) -> Any:
        return _filesystem(self._scheme)

    def stat(self) -> Status:
        info = self._ask(lambda: self._store.info(self._key))
        return Status(int(info["size"] or 0), info["type"] == "directory")

    def _names(self) -> list[str]:
        found = (str(key).strip("/") for key in self._store.ls(self._key, detail=False))
        names = {key.removeprefix(f"{self._key}/").partition("/")[0] for key in found if key != self._key}
        return [name for name in names if name]

    def rglob(self, pattern: str) -> Iterator["ObjectPath"]:
        """All objects below this folder, at any depth; ``pattern`` is "*"."""
        assert pattern == "*"
        found = self._ask(lambda: self._store.find(self._key))
        return (ObjectPath(f"{self._scheme}://{key}") for key in found)

    def read_bytes(self) -> bytes:
        """In one request, so never of two versions of an object."""
        return bytes(self._ask(lambda: self._store.cat_file(self._key)))

    def _read(self, start: int, length: int) -> bytes:
        return bytes(self._store.cat_file(self._key, start=start, end=start + length))

    def write_bytes(self, content: bytes) -> None:
        """Make or replace the object; it appears whole."""
        try:
            self._ask(lambda: self._store.pipe_file(self._key, content))
        except FileNotFoundError:
            raise StorageError(f"{self}: cannot be written; is the bucket there?") from None

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def touch(self) -> None:
        self.write_bytes(b"")

    def unlink(self, missing_ok: bool = False) -> None:
        with contextlib.suppress(*([FileNotFoundError] if missing_ok else [])):
            self._ask(lambda: self._store.rm_file(self._key))

    def move(self, target: "ObjectPath") -> None:
        """Move this object; copied inside the store, then removed."""
        self._ask(lambda: self._store.cp_file(self._key, target._key))
        self.unlink()


Location = Path | ObjectPath


def location(name: str | Path | ObjectPath) -> Location:
    """``name`` as something with the methods of ``pathlib.Path``."""
    if isinstance(name, Path | ObjectPath):
        return name
    return ObjectPath(name) if is_url(name) else Path(name)


def write_whole(path: Location, content: str | bytes) -> None:
    """Make or replace a file so that a reader never sees half of it."""
    data = content.encode() if isinstance(content, str) else content
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
    else:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(data)
        temporary.rename(path)
