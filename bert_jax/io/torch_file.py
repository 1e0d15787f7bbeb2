"""Reader of untrusted files of ``torch.save``, one tensor at a time, without torch.

Two formats exist. Since torch 1.6 a file is an uncompressed zip file of one folder: ``data.pkl`` (the pickle),
``data/KEY`` (the values of a storage), ``byteorder`` (since torch 2.1). Before, it consists of five pickles (magic
number, version, sizes of types, the value, the keys of the storages), and for every key the number of elements in 8
bytes and the values. Checksums in the zip file are not verified, because an option of torch omits them.
"""

import io
import math
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bert_jax.io.errors import one_line
from bert_jax.io.safetensors_file import DTYPES, StoredTensor, aligned_empty, read_values
from bert_jax.io.torch_pickle import Refused, Storage, TensorView, Value, kind, unpickle

# The pickles of BERT-large have about 50 KB, and the list of its zip members likewise.
LARGEST_PICKLE = LARGEST_DIRECTORY = 4 << 20
# Tied tensors and views refer to one storage. Their sizes in total, and the bytes that they are read from, may
# exceed the size of the file by this factor.
MOST_COPIES = 16
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class TorchTensor:
    """A tensor in a file of ``torch.save``; its values are read on demand."""

    # The bytes from the first to the last element, as a tensor with one dimension.
    extent: StoredTensor
    shape: tuple[int, ...]
    # In elements.
    strides: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values; bfloat16 is the ml_dtypes type."""
        return DTYPES[self.extent.dtype]

    def read(self) -> np.ndarray:
        """Read the values into a new, page-aligned, C-contiguous array. Raises ``ValueError`` if the file is too
        short."""
        values = read_values(self.extent)
        if 0 in self.shape or _is_contiguous(self.shape, self.strides):
            return values.reshape(self.shape)
        steps = [stride * self.dtype.itemsize for stride in self.strides]
        target = aligned_empty(self.shape, self.dtype)
        np.copyto(target, np.lib.stride_tricks.as_strided(values, self.shape, steps, writeable=False))
        return target


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def read_torch(file: Path) -> dict[str, TorchTensor]:
    """Return the tensors in ``file``, a state dict that ``torch.save`` wrote, by name. No code is executed.

    Raises ``ValueError`` (one line) for a truncated or damaged file, a pickle that contains anything but plain
    values and tensors, a value that is not a dict of tensors, and big-endian values.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            first = stream.read(24)
            stream.seek(0)
            if first.startswith(b"version https://git-lfs"):
                raise Refused("it is a pointer of Git LFS; run `git lfs pull`")
            state, places = (_zip_file if first.startswith(_ZIP) else _old_file)(stream, size)
        tensors = _tensors(file, state, places)
        _check_sizes(tensors, size)
    except Refused as error:
        raise ValueError(f"{file}: not a torch file of plain tensors: {error}") from None
    except (ValueError, EOFError, struct.error) as error:  # of pickletools and zipfile, depending on the damage
        problem = one_line(error, 160)
        raise ValueError(f"{file}: not a torch file of plain tensors, or damaged ({problem})") from None
    return tensors


def _tensors(file: Path, state: Value, places: dict[str, int]) -> dict[str, TorchTensor]:
    if not isinstance(state, dict):
        raise Refused(f"it contains a {kind(state)}, not a dict of tensors; save only the model's state_dict")
    tensors = {}
    for name, view in state.items():
        if type(view) is not TensorView:
            is_a = f"{name[:80]!a} is a {kind(view)}"
            raise Refused(f"{is_a}, not a tensor; save only the model's state_dict")
        width = DTYPES[view.storage.dtype].itemsize
        begin = places[view.storage.key] + view.offset * width
        extent = StoredTensor(file, view.storage.dtype, (view.length,), begin, begin + view.length * width)
        tensors[name] = TorchTensor(extent, view.shape, view.strides)
    return tensors


def _check_sizes(tensors: dict[str, TorchTensor], size: int) -> None:
    """Raise ``Refused`` if the tensors need far more memory, or far more bytes to be read, than the file has."""
    total = 0
    for name, tensor in tensors.items():
        values = math.prod(tensor.shape) * tensor.dtype.itemsize
        # The product of an empty tensor is 0, but numpy refuses sizes whose product is too large without the 0.
        if values > size or math.prod(max(n, 1) for n in tensor.shape) >= 1 << 59:
            raise Refused(f"{name[:80]!a} has the shape {tensor.shape}, which exceeds the size of the file")
        total += max(values, tensor.extent.end - tensor.extent.begin)
    if total > MOST_COPIES * size:
        problem = f"its tensors overlap: they have {total} bytes in total, the file {size}"
        raise Refused(f"{problem}; save independent tensors")


# ------------------------------------------------------------------ zip files


class _BoundedReads:
    """The file that ``zipfile`` reads; it refuses to read a large list of members at once."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int = -1) -> bytes:
        if size > LARGEST_DIRECTORY:
            raise Refused(f"the list of the zip file's members has {size} bytes")
        return self._stream.read(size if size >= 0 else LARGEST_DIRECTORY)


def _zip_file(stream: BinaryIO, size: int) -> tuple[Value, dict[str, int]]:
    """Return the value in the pickle and the position of each storage."""
    members = _members(stream, size)
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise Refused(f"the zip file has {len(pickles)} members data.pkl, expected 1")
    root = pickles[0].removesuffix("data.pkl")

    def content(name: str, most: int) -> bytes:
        begin, length = members[root + name]
        if length > most:
            raise Refused(f"{name} has {length} bytes; at most {most} are read")
        stream.seek(begin)
        return stream.read(length)

    if root + "byteorder" in members and content("byteorder", 16) != b"little":
        raise Refused("the values are big-endian; save the file on a little-endian machine")
    pickled = io.BytesIO(content("data.pkl", LARGEST_PICKLE))
    state, storages = unpickle(pickled)
    if pickled.read(1):
        raise Refused("bytes follow the pickle")
    places = {}
    for key, storage in storages.items():
        place = members.get(f"{root}data/{key}")
        if place is None:
            raise Refused(f"the storage {key[:80]!a} is missing")
        if place[1] != storage.elements * DTYPES[storage.dtype].itemsize:
            raise Refused(
                f"the storage {key[:80]!a} has {place[1]} bytes, which is not the size of {storage.elements} "
                f"elements of {storage.dtype}"
            )
        places[key] = place[0]
    return state, places


def _members(stream: BinaryIO, size: int) -> dict[str, tuple[int, int]]:
    """Return the position and the number of bytes of each member of a zip file, whose members must be stored
    uncompressed, one after the other, from the beginning of the file."""
    try:
        with zipfile.ZipFile(_BoundedReads(stream)) as archive:  # type: ignore[call-overload]
            entries = archive.infolist()
    # NotImplementedError: of zipfile, for a version of the format that it does not know.
    except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
        raise Refused(f"the zip file is truncated or damaged ({one_line(error, 80)})") from None
    members: dict[str, tuple[int, int]] = {}
    position = 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        name = entry.orig_filename
        if name in members:
            raise Refused(f"two members of the zip file have the name {name[:80]!a}")
        if name.startswith("/") or "\\" in name or {"..", ""} & set(name.split("/")):
            raise Refused(f"the zip file has a member with the name {name[:80]!a}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise Refused("the zip file is compressed or encrypted; torch writes neither")
        if entry.header_offset < position or (not members and entry.header_offset != 0):
            raise Refused("the members of the zip file overlap, or do not begin at its first byte")
        stream.seek(entry.header_offset)
        header = stream.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(_ZIP):
            raise Refused("the zip file is damaged: a member has no header")
        _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        begin = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if begin + entry.file_size > size:
            raise Refused("the zip file is damaged: a member is not inside the file")
        if entry.file_size != entry.compress_size:
            raise Refused("the zip file is damaged: a member has two sizes")
        members[name] = (begin, entry.file_size)
        position = begin + entry.file_size
    return members


# ------------------------------------------------------------------ files of torch before 1.6


def _old_file(stream: BinaryIO, size: int) -> tuple[Value, dict[str, int]]:
    """Return the value in the pickle and the position of each storage."""
    pickled = io.BytesIO(stream.read(LARGEST_PICKLE))
    magic, _ = unpickle(pickled)
    if type(magic) is not int or magic != _MAGIC:
        raise Refused("the first value is not torch's magic number")
    version, _ = unpickle(pickled)
    if type(version) is not int or version != _VERSION:
        raise Refused("the version of the format is unknown")
    system, _ = unpickle(pickled)
    if type(system) is not dict or system.get("little_endian") is not True:
        raise Refused("the values are big-endian; save the file on a little-endian machine")
    state, storages = unpickle(pickled)
    keys, _ = unpickle(pickled)
    names = [key for key in keys if type(key) is str] if type(keys) is list else []
    if type(keys) is not list or len(names) != len(keys):
        raise Refused("the keys of the storages are not a list of strings")
    if len(set(names)) != len(names) or set(names) != set(storages):
        raise Refused("the keys of the storages and of the tensors differ")
    return state, _old_places(stream, size, pickled.tell(), [storages[name] for name in names])


def _old_places(stream: BinaryIO, size: int, position: int, storages: list[Storage]) -> dict[str, int]:
    places = {}
    for storage in storages:
        stream.seek(position)
        (count,) = struct.unpack("<q", stream.read(8))
        if count != storage.elements:
            raise Refused(f"the storage {storage.key[:80]!a} has {count} elements, not {storage.elements}")
        places[storage.key] = position + 8
        position += 8 + count * DTYPES[storage.dtype].itemsize
        if position > size:
            raise Refused(f"the storage {storage.key[:80]!a} is not inside the file, which is truncated")
    if position != size:
        raise Refused(f"{size - position} bytes after the last storage")
    return places
