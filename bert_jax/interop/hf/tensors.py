"""Reader of the tensors of a Hugging Face folder, from safetensors or torch files, which may be sharded."""

import functools
from collections.abc import Callable
from pathlib import Path

from bert_jax.interop.stored_model import Tensor, listed
from bert_jax.io.safetensors_file import DTYPES, read_header, read_values
from bert_jax.io.torch_file import read_torch
from bert_jax.io.untrusted_folder import inside, json_object, needed, read_small

WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_FOREIGN = ("tf_model.h5", "flax_model.msgpack", "model.ckpt.index", "rust_model.ot")


def open_tensors(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """Return the name of the weights file (the index file if there are shards) and a dict of all tensors by stored
    name.

    Raises ``ValueError`` for a folder without weights, a damaged or unsupported file, a file outside the folder,
    and names that cannot be printed.
    """
    name = next((name for name in WEIGHT_FILES if inside(folder, name) is not None), None)
    if name is None:
        foreign = [name for name in _FOREIGN if (folder / name).exists()]
        hint = f"; {', '.join(foreign)}: not supported; save the model as safetensors" if foreign else ""
        raise ValueError(f"{folder}: no weights; looked for {', '.join(WEIGHT_FILES)}{hint}")
    load = safetensors if name.startswith("model") else _torch
    file = needed(folder, name)
    tensors = _sharded(folder, file, load) if name.endswith(".json") else load(file)
    for stored in tensors:
        if not stored.isprintable():
            raise ValueError(f"{file}: the name {stored[:80]!a} contains characters that cannot be printed")
    return name, tensors


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


def safetensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name. Raises ``ValueError`` for a damaged file."""
    return {
        name: Tensor(stored.shape, DTYPES[stored.dtype].name, functools.partial(read_values, stored))
        for name, stored in read_header(file).items()
    }


def _torch(file: Path) -> dict[str, Tensor]:
    return {name: Tensor(stored.shape, stored.dtype.name, stored.read) for name, stored in read_torch(file).items()}
