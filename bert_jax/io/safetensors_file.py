"""Reader of untrusted safetensors files, one tensor at a time.

Format (huggingface/safetensors): 8 bytes with the length of the JSON header, the header (name -> dtype, shape,
data_offsets), and the little-endian values. Values are read with ``pread``, not memory-mapped, because mapped pages
would count as memory of the process in addition to the arrays into which they are copied.
"""

import json
import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from bert_jax.json_values import Json

# The header of BERT-large has about 50 KB; the format allows 100 MB, which would parse to a gigabyte of objects.
LARGEST_HEADER = 4 << 20
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"), "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1"),
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Location, dtype and shape of a tensor that is stored in a file."""

    file: Path
    # Name of the dtype in the file format: F32, BF16, ...
    dtype: str
    shape: tuple[int, ...]
    # Byte offsets from the beginning of the file.
    begin: int
    end: int


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype | str = "float32") -> np.ndarray:
    """Return an uninitialized array with page-aligned data, so that JAX on CPU can use the data without a copy.

    The memory is mapped separately, so that it is returned to the operating system when the array is freed. If
    malloc allocated the memory, the heap of the process would stay larger by nearly the size of the model.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the locations of all tensors in ``file`` and check the locations against the size of the file.

    Raises ``ValueError`` (one line) for a truncated file, an invalid header, sizes that contradict each other,
    overlapping tensors, and gaps between tensors.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        if len(first) < 8:
            raise ValueError(f"{file}: has only {size} bytes and is not a safetensors file; download it again")
        (length,) = struct.unpack("<Q", first)
        if length > LARGEST_HEADER or length > size - 8:
            raise ValueError(
                f"{file}: not a complete safetensors file (header: {length} bytes, file: {size} bytes); "
                "download it again"
            )
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the header is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor(file, name, entry, start, size) for name, entry in header.items()}
    _check_layout(file, tensors, start, size)
    return tensors


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _tensor(file: Path, name: str, entry: Json, start: int, size: int) -> StoredTensor:
    where = f"{file}: tensor {name[:80]!r}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: the header entry is not a JSON object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where}: dtype {str(dtype)[:20]!r} is not supported; supported: {', '.join(DTYPES)}")
    shape, offsets = _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
    if shape is None or len(shape) > 8:
        raise ValueError(f"{where}: the shape is not a list of at most 8 sizes")
    if offsets is None or len(offsets) != 2:
        raise ValueError(f"{where}: data_offsets is not a list of two byte offsets")
    begin, end = start + offsets[0], start + offsets[1]
    if not begin <= end <= size:
        raise ValueError(
            f"{where}: the data is not inside the file ({size} bytes); the file is truncated or damaged"
        )
    if math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise ValueError(f"{where}: {end - begin} bytes do not match shape {tuple(shape)} and dtype {dtype}")
    return StoredTensor(file, dtype, tuple(shape), begin, end)


def _naturals(value: Json) -> list[int] | None:
    """Return ``value`` if it is a list of integers from 0 to 2^63 - 1, else None."""
    if not isinstance(value, list):
        return None
    numbers = [item for item in value if type(item) is int and 0 <= item < 1 << 63]
    return numbers if len(numbers) == len(value) else None


def _check_layout(file: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            what = "overlaps the previous tensor" if tensor.begin < position else "follows a gap"
            raise ValueError(f"{file}: tensor {name[:80]!r} {what}; the file is damaged")
        position = tensor.end
    if position != size:
        raise ValueError(f"{file}: {size - position} bytes after the last tensor; the file is damaged")


def read_values(tensor: StoredTensor) -> np.ndarray:
    """Read the values of a tensor into a new array. Raises ``ValueError`` if the file is too short."""
    values = aligned_empty(tensor.shape, DTYPES[tensor.dtype])
    view = values.reshape(-1).view(np.uint8).data
    descriptor = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + (1 << 26)]], tensor.begin + done)
            if not count:
                raise ValueError(f"{tensor.file}: the file was truncated while it was read")
            done += count
    finally:
        os.close(descriptor)
    return values
