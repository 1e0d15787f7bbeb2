"""Reader of the tensors of a Hugging Face folder, from safetensors or torch files, which may be sharded."""

import functools
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.interop.stored import Tensor, aligned_copy, listed
from bert_jax.io.errors import one_line
from bert_jax.io.safetensors_file import DTYPES, read_header, read_values
from bert_jax.io.untrusted_folder import inside, json_object, needed, read_small

WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_FOREIGN = ("tf_model.h5", "flax_model.msgpack", "model.ckpt.index", "rust_model.ot")


def open_tensors(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """Return the name of the weights file (the index file if there are shards) and a dict of all tensors by stored
    name.

    Raises ``ValueError`` for a folder without weights, a damaged or unsupported file, a file outside the folder,
    and torch files if torch is not installed.
    """
    name = next((name for name in WEIGHT_FILES if inside(folder, name) is not None), None)
    if name is None:
        foreign = [name for name in _FOREIGN if (folder / name).exists()]
        hint = f"; {', '.join(foreign)}: not supported; save the model as safetensors" if foreign else ""
        raise ValueError(f"{folder}: no weights; looked for {', '.join(WEIGHT_FILES)}{hint}")
    load = _safetensors if name.startswith("model") else _torch
    file = needed(folder, name)
    if not name.endswith(".json"):
        return name, load(file)
    return name, _sharded(folder, file, load)


def _sharded(folder: Path, index: Path, load: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    places = json_object(read_small(index, "an index"), index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{index}: not an index of shards (weight_map must name a file for every tensor)")
    files = sorted(set(places.values()))
    tensors: dict[str, Tensor] = {}
    for file in files:
        shard = load(needed(folder, file))
        twice = sorted(set(shard) & set(tensors))
        if twice:
            raise ValueError(f"{folder / file}: contains {twice[0][:80]!r}, which another shard contains too")
        lacking = [name for name, place in places.items() if place == file and name not in shard]
        if lacking:
            raise ValueError(f"{folder / file}: lacks {listed(lacking)}, which {index.name} assigns to this shard")
        tensors |= shard
    return tensors


def _safetensors(file: Path) -> dict[str, Tensor]:
    return {
        name: Tensor(stored.shape, DTYPES[stored.dtype].name, functools.partial(read_values, stored))
        for name, stored in read_header(file).items()
    }


def _torch(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a ``torch.save`` file without executing code from its pickle."""
    try:
        import torch
    except ImportError:
        raise ValueError(f"{file}: torch is not installed; install it, or save the model as safetensors") from None
    size = file.stat().st_size
    try:
        whole_zip = zipfile.is_zipfile(file)
        if whole_zip:
            _check_zip(file, size)
        # Files that torch before 1.6 wrote are not zip files and cannot be memory-mapped.
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=whole_zip)
    except Exception as error:  # any type, depending on the content of the file
        problem = f"{type(error).__name__}: {one_line(error, 160)}"
        raise ValueError(f"{file}: not a torch file of plain tensors ({problem})") from None
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{file}: contains a {type(state).__name__}, not a map from names to tensors")
    return {name: _torch_tensor(torch, file, name, value, size) for name, value in state.items()}


def _check_zip(file: Path, size: int) -> None:
    """Raise ``ValueError`` for a zip file with compressed members or with members that exceed ``size`` in total."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("the file is compressed, but torch never writes compressed files")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError("the members of the zip file are larger than the file")


def _torch_tensor(torch: Any, file: Path, name: str, value: Any, file_size: int) -> Tensor:
    where = f"{file}: {name[:80]!r}"
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{where} is a {type(value).__name__}, not a tensor; save only the model's state_dict")
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise ValueError(f"{where} is a sparse, quantized or meta tensor; save dense tensors")
    shape = tuple(value.shape)
    if math.prod(shape) * value.element_size() > file_size:
        raise ValueError(f"{where} has the shape {shape}, which exceeds the size of the file; the file is damaged")

    def read() -> np.ndarray:
        plain = value.detach()
        if plain.dtype == torch.bfloat16:  # numpy has no bfloat16; the conversion is exact
            plain = plain.to(torch.float32)
        return aligned_copy(plain.numpy())

    return Tensor(shape, str(value.dtype).removeprefix("torch."), read)
