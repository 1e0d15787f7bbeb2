"""Arrays of npz files, read so that nothing a file declares is believed and nothing in it is unpickled."""

import ast
import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from bert_jax.io.errors import one_line
from bert_jax.io.safetensors_file import aligned_empty

# Longest header of an array: a name, a flag and a shape.
_LARGEST_HEADER = 1 << 12
_BLOCK = 1 << 22
# Deflate, the one compression that numpy writes, makes at most so many bytes of one.
_DENSEST = 1032
_NUMBERS = re.compile(r"\|[biu]1|<[iuf][248]")


class Header(NamedTuple):
    """What an array is declared to be; ``descr`` is numpy's name of its dtype ("<f4")."""

    descr: Any
    fortran_order: Any
    shape: Any


class NpzFile:
    """An npz file, open for reading. ``names`` are its arrays. Raises ``ValueError`` in one line for a file that is
    none."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._archive = self._guarded(lambda: zipfile.ZipFile(file))
        members = self._archive.infolist()
        self._members = {member.filename.removesuffix(".npy"): member for member in members}
        self.names = list(self._members)
        if len(self.names) != len(members):
            self._archive.close()
            raise ValueError(f"{file}: two arrays of one name")

    def __enter__(self) -> "NpzFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def read(self, name: str, *, expected: Header | None = None) -> np.ndarray:
        """The array ``name`` in page-aligned memory of its own.

        Raises ``ValueError`` for one that is not as ``expected``, is not of plain little-endian numbers, is
        damaged, or has another size than its header says: before memory is taken for it.
        """
        member, where = self._members[name], f"{self._file}: {name}"
        with self._guarded(lambda: self._archive.open(member)) as stream:
            header, begin = _header(self._reader(stream), where)
            _check(header, expected, where)
            size = math.prod(header.shape) * np.dtype(header.descr).itemsize
            if begin + size != member.file_size or member.file_size > _DENSEST * self._file.stat().st_size:
                raise ValueError(
                    f"{where}: {member.file_size} bytes are not the shape {header.shape} of {header.descr}, which "
                    f"has {begin + size} with its header"
                )
            shape = header.shape[::-1] if header.fortran_order else header.shape
            values = aligned_empty(shape, header.descr)
            self._fill(values.reshape(-1).view(np.uint8), self._reader(stream), where)
        return values.T if header.fortran_order else values

    def _fill(self, target: np.ndarray, read: Callable[[int], bytes], where: str) -> None:
        done = 0
        while block := read(_BLOCK):
            target[done : done + len(block)] = np.frombuffer(block, np.uint8)
            done += len(block)
        if done < target.size:
            raise ValueError(f"{where}: cut off after {done} of {target.size} bytes")

    def _reader(self, stream: IO[bytes]) -> Callable[[int], bytes]:
        return lambda count: self._guarded(lambda: stream.read(count))

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """What a call of the zip library gives; whatever it raises but an I/O error is the file's damage."""
        try:
            return work()
        except OSError:
            raise
        except Exception as error:  # a damaged file ends in any of a dozen types
            raise ValueError(f"{self._file}: damaged or no npz file ({one_line(error)})") from None


def _header(read: Callable[[int], bytes], where: str) -> tuple[Header, int]:
    """The header of an array and its length. Literals only: nothing is evaluated."""
    start = read(8)
    width = {1: 2, 2: 4, 3: 4}.get(start[6] if len(start) == 8 else 0)
    if start[:6] != b"\x93NUMPY" or width is None:
        raise ValueError(f"{where}: no array in numpy's format")
    length = int.from_bytes(read(width), "little")
    if length > _LARGEST_HEADER:
        raise ValueError(f"{where}: a header of {length} bytes; no array has that")
    try:
        header = Header(**ast.literal_eval(read(length).decode("latin1").strip()))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where}: a damaged header ({str(error)[:80]})") from None
    return header, 8 + width + length


def _check(header: Header, expected: Header | None, where: str) -> None:
    said = f"{header.descr!r:.40} {header.shape!r:.40}"
    objects = "an array of Python objects is refused; " if "O" in str(header.descr) else ""
    if expected is not None and header != expected:
        order = "Fortran" if expected.fortran_order else "C"
        raise ValueError(
            f"{where}: {objects}stored are {said}, expected {expected.descr} {expected.shape} in {order} order"
        )
    numbers = isinstance(header.descr, str) and _NUMBERS.fullmatch(header.descr)
    sizes = isinstance(header.shape, tuple) and all(type(n) is int and 0 <= n < 1 << 63 for n in header.shape)
    if not numbers or not sizes or len(header.shape) > 8:
        raise ValueError(f"{where}: {objects}stored are {said}, readable are little-endian integers and floats")
