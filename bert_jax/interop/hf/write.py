"""Writer of Hugging Face folders: ``config.json``, ``model.safetensors`` and the tokenizer's files."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bert_jax.interop.exchange import ModelBundle, StoredDtype, check_shapes
from bert_jax.interop.hf.config_json import CONFIG_FILE, heads_of_class, hf_class, hf_config
from bert_jax.interop.hf.names import hf_names
from bert_jax.interop.stored import StoredName
from bert_jax.interop.tokenizers.folder_files import write_tokenizer_files

WEIGHTS_FILE = "model.safetensors"
_STORED = {"float32": ("F32", np.dtype("<f4")), "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16))}


def write_hf(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """Write what transformers' class for the heads of ``weights`` loads; a sentence head is left to the caller.

    ``folder`` exists and is empty. The tied output layer is not repeated. Returns notes: a pooler that the class
    has no place for, exceptions of the tokenizer. Raises ``ValueError`` when no class computes this model.
    """
    check_shapes(weights.spec, weights.params, folder)
    spec = dataclasses.replace(weights.spec, heads=heads_of_class(weights.spec))
    notes = []
    if spec.heads != weights.spec.heads:
        notes.append(f"{hf_class(spec)} has no pooler: its weights are left out")
    if not spec.heads.present():
        name = hf_class(spec)
        notes.append(
            f"the model has no pooler: load it with {name}.from_pretrained(DIR, add_pooling_layer=False), or "
            "transformers adds one with random weights"
        )
    config = hf_config(spec, dtype)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_safetensors(folder / WEIGHTS_FILE, weights.params, hf_names(spec), dtype)
    if spec.tokenizer is None or weights.tokenizer_content is None:
        return [*notes, "the model has no vocabulary: no tokenizer is written"]
    return [*notes, *write_tokenizer_files(folder, spec, weights.tokenizer_content)]


def write_safetensors(
    file: Path, params: Mapping[str, np.ndarray], names: Mapping[str, StoredName], dtype: str
) -> None:
    """Write the parameters that ``names`` lists under those names; one tensor is in memory beside ``params``
    (``safetensors.numpy.save_file`` wants transposed copies of all at once).

    bfloat16 is rounded to nearest even.
    """
    kind, stored = _STORED[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for canonical, entry in names.items():
        shape = params[canonical].shape[::-1] if entry.transpose else params[canonical].shape
        start, end = end, end + math.prod(shape) * stored.itemsize
        header[entry.name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for canonical, entry in names.items():
            values = params[canonical].T if entry.transpose else params[canonical]
            stream.write(np.ascontiguousarray(values, stored).view(np.uint8).data)
