"""Writer of Hugging Face folders: ``config.json``, ``model.safetensors`` and tokenizer files."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np

from bert_jax.interop.hf.config_json import CONFIG_FILE, hf_class, hf_config
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.hf.names import hf_names
from bert_jax.interop.model_bundle import ModelBundle, StoredDtype, check_shapes
from bert_jax.interop.stored_model import StoredName, stored_array
from bert_jax.interop.tokenizers.folder_writer import write_tokenizer_files
from bert_jax.json_values import Json
from bert_jax.tokenization import build_tokenizer

WEIGHTS_FILE = "model.safetensors"
# Key of config.json -> attribute of the tokenizer.
_TOKENS = {
    "bos_token_id": "cls_id", "eos_token_id": "end_id", "pad_token_id": "pad_id", "cls_token_id": "cls_id",
    "sep_token_id": "sep_id",
}  # fmt: skip
_STORED = {
    "float32": ("F32", np.dtype("<f4")), "float16": ("F16", np.dtype("<f2")),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
}  # fmt: skip


def write_hf(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """Write a folder that the transformers class for the heads of ``weights`` can load.

    The sentence head is omitted, and the output layer that is tied to the word embeddings is not stored separately.
    ``folder`` must exist and be empty. Returns notes on the pooler and the tokenizer. Raises ``ValueError`` if no
    transformers class implements the model.
    """
    check_shapes(weights.spec, weights.params, folder)
    spec, notes = weights.spec, []
    family = FAMILIES[spec.family]
    if not spec.heads.present() and "pooler" in family.classes[name := hf_class(spec)]:
        notes.append(
            f"the model has no pooler: load it with {name}.from_pretrained(DIR, add_pooling_layer=False); "
            "without this argument transformers adds a pooler with random weights"
        )
    config = hf_config(spec, dtype)
    # The sequence head of a causal class reads the last token that is not padding, and generation ends at eos.
    is_causal = spec.model.attention == "causal"
    unknown = [name for name in _TOKENS if (is_causal and name in config) or config.get(name, 0) is None]
    if unknown and spec.tokenizer is not None and weights.tokenizer_content is not None:
        tokenizer = build_tokenizer(spec.tokenizer, weights.tokenizer_content, spec.tokenizer.file)
        config |= {name: getattr(tokenizer, _TOKENS[name]) for name in unknown}
    if "pruned_heads" in config:
        notes.append("the layers have fewer heads (pruned_heads): load the folder with transformers 4")
    write_json(folder / CONFIG_FILE, config)
    names = hf_names(spec)
    # If the output layer is not tied, releases of transformers from 5 on have two biases, and add the second one.
    has_two = spec.heads.mlm and not spec.model.tied_output
    copies = {name: ours for name, ours in family.tied.items() if has_two and ours == "mlm_head/output_bias"}
    params = dict(weights.params)
    if hf_class(spec) in family.idle_pooler:
        module = family.heads["pooler"]["pooler"].format(prefix=family.prefix)
        for leaf, shape in (("weight", (spec.model.hidden_size,) * 2), ("bias", (spec.model.hidden_size,))):
            params[f"idle/{leaf}"] = np.zeros(shape, np.float32)
            names[f"idle/{leaf}"] = StoredName(f"{module}.{leaf}", False)
    write_safetensors(folder / WEIGHTS_FILE, params, names, dtype, copies)
    exact, content = weights.exact_tokenizer, weights.tokenizer_content
    return [*notes, *write_tokenizer_files(folder, spec, content, exact=exact)]


def write_json(file: Path, value: Json, indent: int = 2) -> None:
    """Write ``value`` to ``file`` as JSON in UTF-8."""
    file.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(
    file: Path,
    params: Mapping[str, np.ndarray],
    names: Mapping[str, StoredName],
    dtype: str,
    copies: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the parameters in ``names`` under their stored names; 16-bit values are rounded to nearest even.
    ``copies``: stored names of further copies of whole parameters -> their canonical names.

    Only one tensor at a time is copied, whereas ``safetensors.numpy.save_file`` needs transposed copies of all
    tensors in memory.
    """
    kind, stored = _STORED[dtype]
    places: dict[str, list[str]] = {}
    for canonical, entry in names.items():
        places.setdefault(entry.name, []).append(canonical)
    places |= {name: [canonical] for name, canonical in copies.items()}
    header: dict[str, Json] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, parts in places.items():
        shape = names[parts[0]].stored_shape(params[parts[0]].shape)
        start, end = end, end + math.prod(shape) * stored.itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for parts in places.values():
            values = stored_array([(names[canonical], params[canonical]) for canonical in parts])
            stream.write(np.ascontiguousarray(values, stored).view(np.uint8).data)
