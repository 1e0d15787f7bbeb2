"""Lines of files, which may be compressed with gzip, and the locations of errors in them."""

import contextlib
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from bert_jax.io.errors import one_line

S = TypeVar("S")
T = TypeVar("T")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, unpacked if its name ends in ``.gz``.

    Raises ``ValueError`` with one line if the compressed file turns out to be damaged.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield file  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the compressed file is damaged ({one_line(error)}); copy it again") from None


def numbered_lines(stream: Iterable[bytes], name: str | Path) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of each line, without its end and without a byte order mark. Carriage
    returns end lines, too.

    Raises ``ValueError`` for a line that is not UTF-8; the message begins with ``name`` and the number.
    """
    number = 0
    for raw in stream:
        try:
            text = raw.decode("utf-8" if number else "utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError:
            raise ValueError(f"{name}:{number + 1}: not valid UTF-8; convert the file to UTF-8") from None
        for line in text.split("\r"):
            number += 1
            yield number, line


class Each(Iterator[T]):
    """Iterator over ``convert(value)`` of each of ``inputs``. The message of a ``ValueError`` of ``convert`` begins
    with ``inputs.where``, the file and line of the value, if ``inputs`` knows it."""

    def __init__(self, inputs: Iterable[S], convert: Callable[[S], T]) -> None:
        self._inputs, self._reading, self._convert = inputs, iter(inputs), convert

    @property
    def where(self) -> str:
        return getattr(self._inputs, "where", "")

    def __next__(self) -> T:
        value = next(self._reading)
        try:
            return self._convert(value)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}" if self.where else str(error)) from None
