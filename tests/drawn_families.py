"""Tiny models of odd sizes with drawn weights: every class of every family of Hugging Face folders."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import HeadsConfig, ModelSpec
from bert_jax.interop.hf.config_json import model_parts
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.hf.write import WEIGHTS_FILE
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.io.safetensors_file import read_header

SIZES = {
    "vocab_size": 43, "hidden_size": 20, "num_layers": 3, "num_attention_heads": 2, "intermediate_size": 14,
    "embedding_size": 12, "max_position_embeddings": 27,
}  # fmt: skip
# Family -> further keys of config.json.
MORE: dict[str, dict[str, Any]] = {
    "modernbert": {"local_attention": 6},
    "deberta-v2": {
        "relative_attention": True, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "position_biased_input": False,
        "pos_att_type": "p2c|c2p", "position_buckets": 4,
    },
    "gpt2": {"n_inner": 14},
    "longformer": {"attention_window": [4, 8, 4]},
    "big_bird": {"block_size": 2, "num_random_blocks": 1},
}  # fmt: skip


def drawn_models(family: str) -> Iterator[tuple[str, ModelBundle]]:
    """Yield the models of :func:`drawn_specs` with random weights."""
    for name, spec in drawn_specs(family):
        yield name, ModelBundle(spec=spec, params=random_params(spec))


def drawn_specs(family: str) -> Iterator[tuple[str, ModelSpec]]:
    """Yield a model for every class of ``family``, by name; the names of those with an output layer of their own
    end in ", untied"."""
    told = FAMILIES[family]
    sizes = {key: SIZES[entry.field] for key, entry in told.keys.items() if entry.field in SIZES}
    model = model_parts({"model_type": family, **sizes, **MORE.get(family, {})}, "config.json").model
    for name, held in told.classes.items():
        flags = {head: True for head in held if head not in ("sequence", "token")}
        labels = {f"{head}_labels": ("a", "b", "c") for head in held if head in ("sequence", "token")}
        heads = HeadsConfig(**flags, **labels)
        kinds = (True, False) if "mlm" in held else (True,)
        for tied in kinds if "tied_output" not in told.fixed else (told.fixed["tied_output"],):
            changed = dataclasses.replace(model, tied_output=tied)
            spec = ModelSpec(model=changed, heads=heads, family=changed.family)
            yield name if tied or len(kinds) == 1 or "tied_output" in told.fixed else f"{name}, untied", spec


def random_params(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Return random parameters: normal, around 1 for the scale of a normalization."""
    rng, params = np.random.default_rng(0), {}
    for name, shape in parameter_shapes(spec).items():
        drawn = 0.3 * rng.standard_normal(shape, np.float32)
        params[name] = np.float32(1 if name.endswith("scale") else 0) + drawn
    return params


def digest(folder: Path) -> str:
    """Return the SHA-256 digest of the config.json in ``folder`` and of the names and shapes of its tensors."""
    shapes = {name: list(entry.shape) for name, entry in read_header(folder / WEIGHTS_FILE).items()}
    config = json.loads((folder / "config.json").read_text())
    return hashlib.sha256(json.dumps([config, shapes], sort_keys=True).encode()).hexdigest()
