"""Folders that may lie in an object store (``gs://...``): what this package needs of ``pathlib``, with retries.

``location`` gives a ``pathlib.Path`` for a local name and an :class:`ObjectPath` for a URL; both answer to the same
methods. TensorFlow's file systems do the work and TensorFlow is imported by the first URL, never for local files.
"""

import contextlib
import fcntl
import fnmatch
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bert_jax.io.object_paths import BLOCK, Fault, ObjectUrl, Status, StorageError, is_url
from data_pipeline.host_tensorflow import load_tensorflow

__all__ = ["Location", "ObjectPath", "StorageError", "is_url", "local_copy", "location", "new_file", "remove_tree"]


class ObjectPath(ObjectUrl):
    """A file or folder in an object store, by its URL."""

    @staticmethod
    def _fault(error: Exception) -> Fault | None:
        errors = load_tensorflow().errors
        if isinstance(error, errors.NotFoundError):
            return "missing"
        if isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError):
            return "refused"
        if isinstance(error, errors.UnimplementedError):
            return "scheme"
        # 429 and 5xx arrive as the first four; Aborted ends TensorFlow's own retries; without a connection curl
        # fails and the code is FailedPrecondition.
        kinds = (
            errors.UnavailableError, errors.ResourceExhaustedError, errors.InternalError,
            errors.DeadlineExceededError, errors.AbortedError, errors.UnknownError,
        )  # fmt: skip
        if isinstance(error, kinds) or "libcurl" in str(error):
            return "transient"
        return "other" if isinstance(error, errors.OpError) else None

    def stat(self) -> Status:
        found = self._ask(lambda: load_tensorflow().io.gfile.stat(str(self)))
        return Status(int(found.length), bool(found.is_directory), int(found.mtime_nsec))

    def _names(self) -> list[str]:
        return [name.rstrip("/") for name in load_tensorflow().io.gfile.listdir(str(self))]

    def glob(self, pattern: str) -> Iterator["ObjectPath"]:
        """Files and folders of this folder whose names match; none when there is no such folder."""
        try:
            return (path for path in list(self.iterdir()) if fnmatch.fnmatchcase(path.name, pattern))
        except FileNotFoundError:
            return iter(())

    def rglob(self, pattern: str) -> Iterator["ObjectPath"]:
        """Files below this folder, at any depth, whose names match."""
        walk = self._ask(lambda: list(load_tensorflow().io.gfile.walk(str(self))))
        for folder, _, names in walk:
            yield from (ObjectPath(folder) / name for name in names if fnmatch.fnmatchcase(name, pattern))

    def _read(self, start: int, length: int) -> bytes:
        tf = load_tensorflow()
        with tf.io.gfile.GFile(str(self), "rb") as file:
            try:
                file.seek(start)  # beyond the end is an error already
                return bytes(file.read(length))
            except tf.errors.OutOfRangeError:
                return b""

    def upload(self, local: Path) -> None:
        """Make this object of a local file; it appears whole."""
        self._ask(lambda: load_tensorflow().io.gfile.copy(str(local), str(self), overwrite=True))

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        self._ask(lambda: load_tensorflow().io.gfile.makedirs(str(self)))

    def replace(self, target: "ObjectPath") -> None:
        self._ask(lambda: load_tensorflow().io.gfile.rename(str(self), str(target), overwrite=True))

    def unlink(self, missing_ok: bool = False) -> None:
        with contextlib.suppress(*([FileNotFoundError] if missing_ok else [])):
            self._ask(lambda: load_tensorflow().io.gfile.remove(str(self)))

    def remove_tree(self) -> None:
        """Remove a folder and all in it."""
        self._ask(lambda: load_tensorflow().io.gfile.rmtree(str(self)))


Location = Path | ObjectPath


def location(name: str | Path | ObjectPath) -> Location:
    """``name`` as something with the methods of ``pathlib.Path``."""
    if isinstance(name, Path | ObjectPath):
        return name
    return ObjectPath(name) if is_url(name) else Path(name)


def remove_tree(folder: Location) -> None:
    """Remove a folder and all in it."""
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:
        folder.remove_tree()


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
                shutil.copyfileobj(source, target, BLOCK)
            part.replace(final)
    return final
