"""numpy folders: ``weights.npz`` with canonical names, ``dtypes.json``, ``model.json`` and the vocabulary.

Nothing but numpy is needed to read one: uncompressed arrays, bfloat16 as its 16 bits in uint16.
"""

import ast
import json
import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Literal

import ml_dtypes
import numpy as np

from bert_jax.config import ModelSpec, spec_from_json, spec_to_json
from bert_jax.interop.exchange import ReadOptions, Weights, check_shapes, parameter_shapes
from bert_jax.interop.folder import inside, needed
from bert_jax.interop.hf_tensors import listed
from bert_jax.interop.safetensors_file import aligned_empty

WEIGHTS_FILE, DTYPES_FILE, SPEC_FILE = "weights.npz", "dtypes.json", "model.json"
_STORED = {"float32": "<f4", "bfloat16": "<u2"}
# Longest header of an array: a name, a flag and a shape.
_LARGEST_HEADER = 1 << 12
_LARGEST_JSON = 16 << 20
_BLOCK = 1 << 22
_DATE = (1980, 1, 1, 0, 0, 0)  # of every member, so that equal weights give equal bytes


def is_npz(path: Path) -> bool:
    """Whether ``path`` is such a folder or its weights.npz."""
    return (path / WEIGHTS_FILE).exists() or path.name == WEIGHTS_FILE


def write_npz(folder: Path, weights: Weights, *, dtype: Literal["float32", "bfloat16"] = "float32") -> list[str]:
    """Write every parameter under its canonical name into the empty ``folder``; returns notes.

    bfloat16 is rounded to nearest even and stored as uint16; ``dtypes.json`` names the dtype of every array.
    """
    check_shapes(weights.spec, weights.params, folder)
    with zipfile.ZipFile(folder / WEIGHTS_FILE, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name in parameter_shapes(weights.spec):
            values = weights.params[name]
            if dtype == "bfloat16":
                values = values.astype(ml_dtypes.bfloat16).view(np.uint16)
            with archive.open(zipfile.ZipInfo(f"{name}.npy", _DATE), "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.ascontiguousarray(values), allow_pickle=False)
    dtypes = dict.fromkeys(parameter_shapes(weights.spec), dtype)
    (folder / DTYPES_FILE).write_text(json.dumps(dtypes, indent=1) + "\n", encoding="utf-8")
    (folder / SPEC_FILE).write_text(spec_to_json(weights.spec), encoding="utf-8")
    tokenizer = weights.spec.tokenizer
    if tokenizer is None or weights.tokenizer_content is None:
        return ["the model has no vocabulary: none is written"]
    (folder / tokenizer.file).write_bytes(weights.tokenizer_content)
    return []


def read_npz(path: Path, options: ReadOptions) -> Weights:
    """What :func:`write_npz` wrote, by its folder or weights.npz; never unpickles.

    Raises ``ValueError`` in one line: files missing, damaged or of another model, arrays of Python objects.
    """
    folder = path.parent if path.name == WEIGHTS_FILE and not path.is_dir() else path
    spec = spec_from_json(_text(folder, SPEC_FILE), str(folder / SPEC_FILE))
    if options.labels is not None or options.lower_case is not None:
        raise ValueError(f"{folder}: {SPEC_FILE} says labels and case; change them there")
    file = needed(folder, WEIGHTS_FILE)
    try:
        with zipfile.ZipFile(file) as archive:
            params = _read_arrays(archive, file, spec, _dtypes(folder))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error) as error:
        raise ValueError(f"{file}: damaged or no npz file ({error}); export it again") from None
    raised = "" if all(value == "float32" for value in _dtypes(folder).values()) else "bfloat16"
    notes = [f"{raised} raised to float32"] if raised else []
    bad = [name for name, values in params.items() if not np.isfinite(values).all()]
    if bad:
        notes.append(f"WARNING: NaN or infinite values in {listed(bad)}")
    content = None
    if spec.tokenizer is not None:
        content = needed(folder, spec.tokenizer.file).read_bytes()
    origin = {"format": "npz", "name": folder.absolute().name}
    return Weights(spec=spec, params=params, tokenizer_content=content, notes=tuple(notes), origin=origin)


def check_npz(folder: Path, weights: Weights) -> float:
    """Largest difference of any array from ``weights`` (values as stored), read with numpy alone."""
    dtypes = json.loads((folder / DTYPES_FILE).read_text(encoding="utf-8"))
    worst = 0.0
    with np.load(folder / WEIGHTS_FILE, allow_pickle=False) as arrays:
        if set(arrays.files) != set(weights.params):
            return math.inf
        for name, values in weights.params.items():
            stored = arrays[name]
            if dtypes[name] == "bfloat16":  # the upper half of a float32
                stored = (stored.astype(np.uint32) << 16).view(np.float32)
            worst = max(worst, largest_difference(stored, values))
    return worst


def largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    """Largest absolute difference of two arrays; infinite where shapes differ. NaNs in the same place are equal."""
    if one.shape != other.shape:
        return math.inf
    unequal = one != other
    if not unequal.any():
        return 0.0
    # A NaN differs from itself: only its place counts.
    unequal &= ~(np.isnan(one) & np.isnan(other))
    difference = np.abs(one[unequal] - other[unequal])
    return 0.0 if not difference.size else float(np.nan_to_num(difference, nan=math.inf).max())


def _text(folder: Path, name: str) -> str:
    file = needed(folder, name)
    if file.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"{file}: {file.stat().st_size} bytes; at most {_LARGEST_JSON} are read")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file}: not UTF-8 text") from None


def _dtypes(folder: Path) -> dict[str, str]:
    """Name -> dtype; empty where the table is missing (then all is float32)."""
    if inside(folder, DTYPES_FILE) is None:
        return {}
    try:
        table = json.loads(_text(folder, DTYPES_FILE))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{folder / DTYPES_FILE}: not JSON ({error})") from None
    if not isinstance(table, dict) or not all(
        isinstance(value, str) and value in _STORED for value in table.values()
    ):
        raise ValueError(f"{folder / DTYPES_FILE}: not a map from names to {' or '.join(_STORED)}")
    return table


def _read_arrays(
    archive: zipfile.ZipFile, file: Path, spec: ModelSpec, dtypes: dict[str, str]
) -> dict[str, np.ndarray]:
    members = archive.infolist()
    found = {member.filename.removesuffix(".npy"): member for member in members}
    expected = parameter_shapes(spec)
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"left over {name[:80]!r}" for name in found if name not in expected]
    problems += ["two arrays of one name"] if len(found) != len(members) else []
    if problems:
        raise ValueError(f"{file}: the arrays are not those of {SPEC_FILE}: {listed(problems)}")
    params = {}
    for name, shape in expected.items():
        member, dtype = found[name], dtypes.get(name, "float32")
        size = math.prod(shape) * np.dtype(_STORED[dtype]).itemsize
        # Before anything is allocated: declared sizes are somebody else's.
        if not size <= member.file_size <= size + _LARGEST_HEADER or member.compress_size > file.stat().st_size:
            raise ValueError(
                f"{file}: {name} has {member.file_size} bytes; {shape} {dtype} has {size} and a header"
            )
        with archive.open(member) as stream:
            params[name] = _read_array(stream, shape, dtype, f"{file}: {name}")
    return params


def _read_array(stream: IO[bytes], shape: tuple[int, ...], dtype: str, where: str) -> np.ndarray:
    """float32 of one member, whose header must say what is expected."""
    header = _header(stream, where)
    if header["descr"] != _STORED[dtype] or header["shape"] != shape or header["fortran_order"]:
        objects = "an array of Python objects is refused; " if "O" in str(header["descr"]) else ""
        said = f"{header['descr']!r:.40} {header['shape']!r:.40}"
        raise ValueError(f"{where}: {objects}stored are {said}, expected {_STORED[dtype]} {shape} in C order")
    stored = aligned_empty(shape, _STORED[dtype])
    target = stored.reshape(-1).view(np.uint8)
    read = 0
    while read < target.size:
        block = stream.read(min(_BLOCK, target.size - read))
        if not block:
            raise ValueError(f"{where}: cut off after {read} of {target.size} bytes; export it again")
        target[read : read + len(block)] = np.frombuffer(block, np.uint8)
        read += len(block)
    if stream.read(1):
        raise ValueError(f"{where}: longer than its header says")
    if dtype == "float32":
        return stored
    values = aligned_empty(shape)
    np.copyto(values, stored.view(ml_dtypes.bfloat16), casting="unsafe")
    return values


def _header(stream: IO[bytes], where: str) -> dict[str, Any]:
    """The header of an array in numpy's format 1 or 2: literals only, nothing is evaluated."""
    start = stream.read(8)
    major = start[6] if len(start) == 8 else 0
    width = {1: 2, 2: 4, 3: 4}.get(major)
    if start[:6] != b"\x93NUMPY" or width is None:
        raise ValueError(f"{where}: no array in numpy's format; export it again")
    length = int.from_bytes(stream.read(width), "little")
    if length > _LARGEST_HEADER:
        raise ValueError(f"{where}: a header of {length} bytes; no array has that")
    try:
        header = ast.literal_eval(stream.read(length).decode("latin1").strip())
        if set(header) != {"descr", "fortran_order", "shape"}:
            raise ValueError("other keys")
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where}: a damaged header ({str(error)[:80]})") from None
    return header
