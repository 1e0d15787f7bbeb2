"""Tiny Hugging Face folders as transformers saves them, and ways to change one."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from golden.hf_cases import values
from safetensors.numpy import load_file, save_file

FIXTURES = Path(__file__).parent / "golden" / "fixtures"
Tensors = dict[str, np.ndarray]


@cache
def _recorded() -> dict[str, Any]:
    return json.loads((FIXTURES / "hf_classes.json").read_text())


def make_folder(
    folder: Path,
    name: str = "BertForMaskedLM",
    *,
    config: Mapping[str, Any] | None = None,
    change: Callable[[Tensors], Any] | None = None,
    vocabulary: int | None = 40,
) -> Path:
    """``folder`` as transformers saves the class ``name``; ``config`` overrides keys (None: removes one),
    ``change`` edits the tensors in place, ``vocabulary`` is the number of pieces in vocab.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    recorded = _recorded()[name]
    told = {**recorded["config"], **(config or {})}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in told.items() if value is not None})
    )
    tensors = {key: values(key, tuple(shape)) for key, shape in recorded["tensors"].items()}
    if change is not None:
        change(tensors)
    save(folder, tensors)
    if vocabulary is not None:
        (folder / "vocab.txt").write_text("\n".join(pieces(vocabulary)) + "\n")
    return folder


def pieces(count: int) -> list[str]:
    """A WordPiece vocabulary of ``count`` pieces."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return special + [f"w{i}" for i in range(count - len(special))]


def save(folder: Path, tensors: Tensors) -> None:
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def load(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    """A change that replaces ``old`` by ``new`` in every name."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def drop(*prefixes: str) -> Callable[[Tensors], None]:
    """A change that removes every tensor whose name begins with one of ``prefixes``."""

    def change(tensors: Tensors) -> None:
        gone = [name for name in tensors if name.startswith(prefixes)]
        assert gone, prefixes
        for name in gone:
            del tensors[name]

    return change
