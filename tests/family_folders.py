"""Hugging Face folders of the recorded models of every family, and how tests read, run and compare them."""

import json
from functools import cache

import jax
import numpy as np
from golden.family_cases import values
from hf_folders import FIXTURES, save

from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.programs.serving import INPUTS, forward
from bert_jax.interop.readers import read_weights


@cache
def told_of(case):
    return json.loads((FIXTURES / "families" / f"{case}.json").read_text())


def recorded(case, name):
    with np.load(FIXTURES / "families" / f"{case}.npz") as arrays:
        found = {key.partition("/")[2]: arrays[key] for key in arrays if key.startswith(f"{name}/")}
    return told_of(case)[name], found


def make_folder(folder, case, name, config=None, change=None):
    told = told_of(case)[name]
    folder.mkdir(parents=True, exist_ok=True)
    stated = {key: value for key, value in (told["config"] | (config or {})).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(stated))
    tensors = {key: values(key, tuple(shape)) for key, shape in told["tensors"].items()}
    if change is not None:
        change(tensors)
    save(folder, tensors)
    return folder


def read(folder, **options) -> ModelBundle:
    return read_weights(folder, ReadOptions(**options))


def features(batch):
    """The inputs of ``forward`` and its further features."""
    zeros = np.zeros_like(batch["input_ids"])
    arrays = [np.asarray(batch.get(key, zeros), np.int32) for key in INPUTS]
    stated = {"global_tokens": batch["global_attention_mask"]} if "global_attention_mask" in batch else None
    return arrays, stated


def run(weights, *batches):
    """The outputs of one compiled program for each of ``batches``, which have one shape."""
    program = jax.jit(lambda params, arrays, more: forward(weights.spec, params, *arrays, more=more))
    return [program(weights.params, *features(batch)) for batch in batches]


def close(actual, expected, key):
    expected = np.asarray(expected)
    np.testing.assert_allclose(
        np.asarray(actual).reshape(expected.shape), expected, atol=2e-5 * max(1, np.abs(expected).max()), rtol=0,
        err_msg=key,
    )  # fmt: skip
