"""Reader of untrusted npz files. The reader verifies the declared sizes and never unpickles objects."""

import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import numpy as np

from bert_jax.io.errors import one_line
from bert_jax.io.safetensors_file import aligned_empty

R = TypeVar("R")
# Maximum bytes of the header of an array, which consists of a dtype, a flag and a shape.
_LARGEST_HEADER = 1 << 12
_BLOCK = 1 << 22
# Largest expansion factor of Deflate, the only compression that numpy writes.
_DENSEST = 1032
_NUMBERS = re.compile(r"\|[biu]1|<[iuf][248]")


class Header(NamedTuple):
    """Header of an array in an npz file."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype


class NpzFile:
    """An npz file that is open for reading. ``names`` lists the names of its arrays, ``sizes`` their bytes by name
    as the archive states them.

    Raises ``ValueError`` (one line) if the file is not an npz file or contains two arrays with the same name.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._archive = self._guarded(lambda: zipfile.ZipFile(file))
        members = self._archive.infolist()
        self._members = {member.filename.removesuffix(".npy"): member for member in members}
        self.names = list(self._members)
        self.sizes = {name: member.file_size for name, member in self._members.items()}
        if len(self.names) != len(members):
            self._archive.close()
            raise ValueError(f"{file}: two arrays have the same name")

    def __enter__(self) -> "NpzFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def read(self, name: str, *, expected: Header | None = None) -> np.ndarray:
        """Read the array called ``name`` into page-aligned memory.

        Raises ``ValueError`` if the header differs from ``expected``, if the dtype is not a little-endian integer
        or float, if the array is damaged, or if its size differs from the size in its header. Memory is allocated
        only after the header has been checked.
        """
        member, where = self._members[name], f"{self._file}: {name}"
        with self._guarded(lambda: self._archive.open(member)) as stream:
            header = self._header(stream, where)
            _check(header, expected, where)
            begin, size = stream.tell(), math.prod(header.shape) * header.dtype.itemsize
            if begin + size != member.file_size or member.file_size > _DENSEST * self._file.stat().st_size:
                raise ValueError(
                    f"{where}: the array has {member.file_size} bytes, but shape {header.shape} and "
                    f"dtype {header.dtype.str} need {begin + size} bytes, including the header"
                )
            shape = header.shape[::-1] if header.fortran_order else header.shape
            values = aligned_empty(shape, header.dtype)
            self._fill(values.reshape(-1).view(np.uint8), stream, where)
        return values.T if header.fortran_order else values

    def _header(self, stream: IO[bytes], where: str) -> Header:
        """Read the header of an array. numpy parses the header without evaluating code."""
        try:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            return Header(*read(stream, max_header_size=_LARGEST_HEADER))
        except OSError:
            raise
        except Exception as error:  # a damaged header raises one of many types
            raise ValueError(f"{where}: not an array in numpy's format ({one_line(error, 80)})") from None

    def _fill(self, target: np.ndarray, stream: IO[bytes], where: str) -> None:
        done = 0
        while block := self._guarded(lambda: stream.read(_BLOCK)):
            target[done : done + len(block)] = np.frombuffer(block, np.uint8)
            done += len(block)
        if done < target.size:
            raise ValueError(f"{where}: truncated after {done} of {target.size} bytes")

    def _guarded(self, work: Callable[[], R]) -> R:
        """Call ``work`` and return its result. Raises ``ValueError`` for any error other than an I/O error, because
        such an error indicates a damaged file."""
        try:
            return work()
        except OSError:
            raise
        except Exception as error:  # a damaged file raises one of many types
            raise ValueError(f"{self._file}: damaged or not an npz file ({one_line(error)})") from None


def _check(header: Header, expected: Header | None, where: str) -> None:
    stored = f"{header.dtype.str!r:.40} {header.shape!r:.40}"
    objects = "arrays of Python objects are not allowed; " if header.dtype.hasobject else ""
    if expected is not None and header != expected:
        order = "Fortran" if expected.fortran_order else "C"
        wanted = f"{expected.dtype.str} {expected.shape} in {order} order"
        raise ValueError(f"{where}: {objects}stored as {stored}, expected {wanted}")
    sizes = all(0 <= n < 1 << 63 for n in header.shape)
    if not _NUMBERS.fullmatch(header.dtype.str) or not sizes or len(header.shape) > 8:
        raise ValueError(f"{where}: {objects}stored as {stored}; allowed: little-endian integers and floats")
