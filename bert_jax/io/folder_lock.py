"""Exclusive lock on a folder. This module does not import jax, because data preparation does not use jax."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from bert_jax.io.files import require_folder


class FolderTaken(ValueError):
    """Raised if a folder is already locked, by another process or by this process."""


@contextlib.contextmanager
def hold_folder(folder: Path, taken: str) -> Iterator[None]:
    """Create ``folder`` if it is missing, and lock it until the block ends or the process exits.

    Raises ``ValueError`` if ``folder`` is a file, and :class:`FolderTaken` with the message
    ``f"{folder}: {taken}"`` if the folder is already locked. ``taken`` states who may have locked the folder and
    names a remedy.
    """
    require_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderTaken(f"{folder}: {taken}") from None
        yield
