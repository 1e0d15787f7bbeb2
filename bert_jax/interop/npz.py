"""Folders of numpy arrays: ``weights.npz`` with canonical names, ``dtypes.json``, ``model.json``, the vocabulary.

These folders can be read with numpy alone: the arrays are not compressed, and bfloat16 values are stored as uint16
with the same bits.
"""

import json
import math
import zipfile
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from bert_jax.config import ModelSpec, spec_from_json, spec_to_json
from bert_jax.interop.model_bundle import (
    ModelBundle,
    ReadOptions,
    StoredDtype,
    check_shapes,
    check_sizes,
    parameter_shapes,
)
from bert_jax.interop.stored_model import listed
from bert_jax.io.npz_file import Header, NpzFile
from bert_jax.io.safetensors_file import aligned_empty
from bert_jax.io.untrusted_folder import inside, needed, parse_json, read_small

WEIGHTS_FILE, DTYPES_FILE, SPEC_FILE = "weights.npz", "dtypes.json", "model.json"
_STORED = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_DATE = (1980, 1, 1, 0, 0, 0)  # of every member, so that equal weights produce identical files


def is_npz(path: Path) -> bool:
    """Return True if ``path`` is an npz export or the weights.npz of an npz export."""
    return (path / WEIGHTS_FILE).exists() or path.name == WEIGHTS_FILE


def write_npz(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """Write every parameter under its canonical name into the empty ``folder``; return notes.

    16-bit values are rounded to nearest even; bfloat16 values are stored as uint16. ``dtypes.json`` names the
    dtype of every array.
    """
    check_shapes(weights.spec, weights.params, folder)
    with zipfile.ZipFile(folder / WEIGHTS_FILE, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name in parameter_shapes(weights.spec):
            values = weights.params[name]
            if dtype == "bfloat16":
                values = values.astype(ml_dtypes.bfloat16).view(np.uint16)
            elif dtype == "float16":
                values = values.astype("<f2")
            with archive.open(zipfile.ZipInfo(f"{name}.npy", _DATE), "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.ascontiguousarray(values), allow_pickle=False)
    dtypes = dict.fromkeys(parameter_shapes(weights.spec), dtype)
    (folder / DTYPES_FILE).write_text(json.dumps(dtypes, indent=1) + "\n", encoding="utf-8")
    (folder / SPEC_FILE).write_text(spec_to_json(weights.spec), encoding="utf-8")
    tokenizer = weights.spec.tokenizer
    if tokenizer is None or weights.tokenizer_content is None:
        return ["the model has no vocabulary: no vocabulary file is written"]
    (folder / tokenizer.file).write_bytes(weights.tokenizer_content)
    return []


def read_npz(path: Path, options: ReadOptions) -> ModelBundle:
    """Read a folder that :func:`write_npz` wrote. ``path`` is the folder or its weights.npz.

    Raises ``ValueError`` with a one-line message for missing or damaged files, for files of different models, and
    for arrays of Python objects, which are never unpickled.
    """
    folder = path.parent if path.name == WEIGHTS_FILE and not path.is_dir() else path
    spec = spec_from_json(read_small(needed(folder, SPEC_FILE), "a model description"), str(folder / SPEC_FILE))
    dtypes = _dtypes(folder)
    params = _read_params(needed(folder, WEIGHTS_FILE), spec, dtypes)
    notes = [f"{dtype} converted to float32" for dtype in ("float16", "bfloat16") if dtype in dtypes.values()]
    content = None
    if spec.tokenizer is not None:
        content = needed(folder, spec.tokenizer.file).read_bytes()
    origin = {"format": "npz", "name": folder.absolute().name}
    return ModelBundle(spec=spec, params=params, tokenizer_content=content, notes=tuple(notes), origin=origin)


def check_npz(folder: Path, weights: ModelBundle) -> dict[str, float]:
    """Read the arrays with numpy alone; return {"arrays": 0.0} if they equal ``weights``, else {"arrays": inf}.

    The values of ``weights`` must already be rounded to the dtype of the folder.
    """
    dtypes = json.loads((folder / DTYPES_FILE).read_text(encoding="utf-8"))

    def values_of(name: str, stored: np.ndarray) -> np.ndarray:
        # bfloat16 is the upper half of a float32.
        return (stored.astype(np.uint32) << 16).view(np.float32) if dtypes[name] == "bfloat16" else stored

    with np.load(folder / WEIGHTS_FILE, allow_pickle=False) as arrays:
        return same_arrays(((name, values_of(name, arrays[name])) for name in arrays.files), weights)


def same_arrays(arrays: Iterable[tuple[str, np.ndarray]], weights: ModelBundle) -> dict[str, float]:
    """Return {"arrays": 0.0} if ``arrays`` equal the parameters of ``weights``, else {"arrays": inf}.

    NaN values are considered equal.
    """
    equal = {name: np.array_equal(values, weights.params.get(name, ()), equal_nan=True) for name, values in arrays}
    return {"arrays": 0.0 if equal.keys() == weights.params.keys() and all(equal.values()) else math.inf}


def _dtypes(folder: Path) -> dict[str, str]:
    """Return the dtype of each array by name. Return an empty dict if dtypes.json does not exist; then all
    arrays are float32."""
    file = inside(folder, DTYPES_FILE)
    if file is None:
        return {}
    table = parse_json(read_small(file, "a table of dtypes"), file)
    if not isinstance(table, dict) or not all(
        isinstance(value, str) and value in _STORED for value in table.values()
    ):
        raise ValueError(f"{file}: not a map from names to {' or '.join(_STORED)}")
    return table


def _read_params(file: Path, spec: ModelSpec, dtypes: dict[str, str]) -> dict[str, np.ndarray]:
    """Return every parameter of ``spec`` as float32. Raises ``ValueError`` if an array is missing or unexpected."""
    params = {}
    with NpzFile(file) as arrays:
        check_sizes(spec, {name: (size,) for name, size in arrays.sizes.items()}, file)
        expected = parameter_shapes(spec)
        problems = [f"missing {name}" for name in expected if name not in arrays.names]
        problems += [f"unexpected {name[:80]!r}" for name in arrays.names if name not in expected]
        if problems:
            raise ValueError(f"{file}: the arrays do not match {SPEC_FILE}: {listed(problems)}")
        for name, shape in expected.items():
            stored = _STORED[dtypes.get(name, "float32")]
            values = arrays.read(name, expected=Header(shape, False, np.dtype(stored)))
            if stored == _STORED["float32"]:
                params[name] = values
                continue
            params[name] = aligned_empty(shape)
            narrow = values.view(ml_dtypes.bfloat16) if stored == _STORED["bfloat16"] else values
            np.copyto(params[name], narrow, casting="unsafe")
    return params
