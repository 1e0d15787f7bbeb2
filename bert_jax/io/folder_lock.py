"""A folder that one process at a time may change. Imports no jax: text is prepared without it."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class FolderTaken(ValueError):
    """Another process, or this one, holds the folder."""


@contextlib.contextmanager
def hold_folder(folder: Path, taken: str) -> Iterator[None]:
    """Make ``folder`` if it is missing and hold it until the block ends (or the process, however it ends).

    Raises :class:`FolderTaken` "FOLDER: TAKEN" when another process, or this one, holds it already; ``taken``
    explains that and names a remedy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderTaken(f"{folder}: {taken}") from None
        yield
