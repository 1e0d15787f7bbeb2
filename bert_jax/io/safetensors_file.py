"""Reader of untrusted safetensors files, one tensor at a time.

Format (huggingface/safetensors): 8 bytes with the length of the JSON header, the header (name -> dtype, shape,
data_offsets), and the little-endian values. Values are read with ``pread``, not memory-mapped, because mapped pages
would count as memory of the process in addition to the arrays into which they are copied.
"""

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from bert_jax.io.errors import one_line
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
    """Read the locations of all tensors in ``file``.

    Raises ``ValueError`` (one line) for a truncated file, a header that the safetensors library refuses (sizes that
    contradict each other or the file, overlapping tensors, gaps between tensors), a name that appears twice, and
    tensors of more than eight dimensions or of an unknown dtype.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(LARGEST_HEADER, size - 8):
            problem = f"not a complete safetensors file (header: {length} bytes, file: {size} bytes)"
            raise ValueError(f"{file}: {problem}; download it again")
        text = stream.read(length)
    try:
        with safe_open(file, "np"):  # checks the header
            header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not a safetensors file, or damaged ({one_line(error, 120)})") from None
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            if dtype not in DTYPES or len(shape) > 8:
                rule = f"at most 8 sizes, and one of the dtypes {', '.join(DTYPES)}"
                raise ValueError(f"{file}: tensor {name[:80]!r}: dtype {dtype}, shape {shape}; supported: {rule}")
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = StoredTensor(file, dtype, shape, begin, end)
    return tensors


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


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
