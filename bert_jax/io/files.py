"""Atomic writes of local files and folders and of objects in a store, local copies of objects, lines of JSON."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from bert_jax.io.storage import BLOCK, Location, ObjectPath


def remove_tree(folder: Location) -> None:
    """Remove a folder and its contents."""
    if isinstance(folder, ObjectPath):
        folder.remove_tree()
    else:
        shutil.rmtree(folder)


def require_folder(folder: Path, option: str = "") -> None:
    """Raise ``ValueError`` if ``folder``, which may be missing, cannot be one, because it or a folder above it is a
    file or a dangling link. The message begins with ``option``, if set."""
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{option}{path}: a dangling link; create its target, or name another folder")
        if path.exists():
            if not path.is_dir():
                raise ValueError(f"{option}{path}: a file, not a folder; name another folder")
            return


def local_copy(path: Location) -> Path:
    """Return a local path unchanged. For an object, download it if necessary and return the path of the local copy.

    Copies are stored in the temporary folder (``TMPDIR``) and shared by the processes of the user on this machine.
    """
    if isinstance(path, Path):
        return path
    folder = Path(tempfile.gettempdir()) / f"bert-data-copies-{os.getuid()}"
    folder = folder / hashlib.sha256(f"{path} {path.version()}".encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / path.name
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes wait for the copy instead of downloading it too
        if not final.exists():
            with whole_file(final) as part, path.open() as source, part.open("wb") as target:
                shutil.copyfileobj(source, target, BLOCK)
    return final


@contextlib.contextmanager
def whole_file(path: Location, scratch: Path | None = None) -> Iterator[Path]:
    """Yield the path of a temporary local file for the block to write. When the block ends, this file replaces
    ``path``; after an exception, ``path`` is unchanged.

    Readers see the old file or the complete new file, even after a crash of the machine. Symbolic links are
    followed, and missing folders are created. ``scratch`` is a folder on the same disk that only this process uses
    for temporary files. With ``scratch``, several processes may write ``path`` at the same time, but a crash of the
    machine may lose the new file. Raises ``ValueError`` if ``path`` exists and is not a file.
    """
    if isinstance(path, ObjectPath):
        with tempfile.TemporaryDirectory(prefix="bert_jax-") as folder:
            local = Path(folder) / path.name
            yield local
            path.upload(local)
        return
    final = path.resolve()
    if final.exists() and not final.is_file():
        raise ValueError(f"{path}: exists and is not a file; name a file for the output")
    require_folder(final.parent)
    final.parent.mkdir(parents=True, exist_ok=True)
    part = final.with_name(f".{final.name}.tmp") if scratch is None else scratch / final.name
    try:
        yield part
        if scratch is None:
            _sync(part)
        part.replace(final)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if scratch is None:
        _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Location, content: str | bytes) -> None:
    """Create or replace a file atomically (:func:`whole_file`)."""
    data = content.encode() if isinstance(content, str) else content
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
        return
    with whole_file(path) as part:
        part.write_bytes(data)


def new_folder(folder: Path) -> Path:
    """Return ``folder`` with links resolved, those to a folder that does not exist yet too. Raises ``ValueError``
    unless it is missing or an empty folder."""
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: {'is a file' if folder.is_file() else 'not empty'}; give a new folder")
    return folder


@contextlib.contextmanager
def whole_folder(folder: Path, replaced: Path | None = None) -> Iterator[Path]:
    """Yield a new, empty folder for the block to fill. When the block ends, the new folder replaces ``folder``;
    after an exception, ``folder`` is unchanged.

    An existing ``folder`` must be empty unless ``replaced`` is set. With ``replaced``, the existing folder is moved
    to the path ``replaced`` and is deleted after the new folder has replaced it.
    """
    folder = folder.absolute()
    part = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        if replaced is None or not folder.exists():
            part.rename(folder)  # replaces an empty folder too
            return
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
        try:
            part.rename(folder)
        except OSError:
            replaced.rename(folder)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def json_line(row: Mapping[str, object], what: str = "the result") -> str:
    """Return ``row`` as JSON. Raises ``ValueError``, which begins with ``what``, for NaN and infinite numbers."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        shown = json.dumps(row, ensure_ascii=False)[:80]
        raise ValueError(f"{what} has NaN or infinite values, which JSON cannot hold: {shown}") from None
