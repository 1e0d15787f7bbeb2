"""A format outside the project, by entry point: written, read back, embedded and refused."""

import re

import numpy as np
import pytest
from builders import content, drawn, tiny_model
from outside import fresh, install  # noqa: F401 (fresh is a fixture)

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.interop.export import export_model
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "river", "##s", "bank"]
FORMAT = """
import json
import numpy as np
from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.config.switches import SIZES
from bert_jax.interop.model_bundle import Format, ModelBundle

NAMES = "vocab_size hidden_size num_layers num_attention_heads intermediate_size max_position_embeddings".split()

def write(folder, weights, *, dtype="float32"):
    sizes = {name: getattr(weights.spec.model, name) for name in NAMES}
    (folder / "plain.json").write_text(json.dumps({"sizes": sizes, "pieces": weights.tokenizer_content.decode()}))
    np.savez(folder / "plain.npz", **{name: values.astype(dtype) for name, values in weights.params.items()})
    return ["as plain as can be"]

def read(path, options):
    told = json.loads((path / "plain.json").read_text())
    with np.load(path / "plain.npz") as arrays:
        params = {name: arrays[name].astype(np.float32) for name in arrays}
    spec = ModelSpec(model=ModelConfig(**told["sizes"]), heads=HeadsConfig(), tokenizer=TokenizerConfig())
    return ModelBundle(spec=spec, params=params, tokenizer_content=told["pieces"].encode())

FORMAT = Format(
    "a plain folder", lambda path: (path / "plain.json").is_file(), read, write, SIZES, "plain.load('DIR')",
    ("float32", "float16"),
)
"""


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    (tmp_path / "plain_format.py").write_text(FORMAT)
    points = {"formats": "plain = plain_format:FORMAT"}
    monkeypatch.syspath_prepend(install(tmp_path / "installed", tmp_path / "plain_format.py", points))


def model(folder, **fields):
    """A saved model with weights that all show in its outputs."""
    spec = ModelSpec(
        model=tiny_model(len(PIECES), **fields), heads=HeadsConfig(pooler=True), tokenizer=TokenizerConfig()
    )  # fmt: skip
    weights = drawn(spec, 0.2, PIECES)
    write_saved(folder, weights)
    return weights


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float16"])
def test_it_is_written_and_read_back(dtype, tmp_path, capsys):
    weights, target = model(tmp_path / "model"), tmp_path / "exported"
    words = ["export", "--model", str(tmp_path / "model"), "--format", "plain", "--to", str(target)]
    assert main([*words, "--dtype", dtype]) == 0
    said = capsys.readouterr().out
    assert "the export contains: the encoder" in said and "read back: 37 arrays, bitwise equal" in said
    assert "as plain as can be" in said and "no other library is run for plain" in said
    found = read_weights(target)
    assert found.spec.model == weights.spec.model and found.tokenizer_content == content(PIECES)
    for name, values in found.params.items():
        assert np.array_equal(values, weights.params[name].astype(dtype).astype(np.float32))
    assert main(["embed", "--model", str(target), "the rivers"]) == 0
    assert f"plain.load('{target.name}')" in (target / "README.md").read_text().replace("DIR", target.name)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("fields", "dtype", "message"),
    [
        ({"norm_position": "pre"}, "float32", "model.norm_position: pre is not supported by plain"),
        ({}, "bfloat16", "plain: stored as bfloat16: not supported"),
        ({"family": "electra"}, "float32", "plain: families other than bert and roberta: not supported"),
    ],
)
def test_what_is_refused(fields, dtype, message, tmp_path):
    weights = model(tmp_path / "model", **{key: value for key, value in fields.items() if key != "family"})
    if "family" in fields:
        spec = ModelSpec(model=weights.spec.model, heads=HeadsConfig(), family="electra")
        write_saved(tmp_path / "other", drawn(spec, 0.2))
    source = tmp_path / ("other" if "family" in fields else "model")
    with pytest.raises(ValueError, match=re.escape(message)):
        export_model(source, tmp_path / "exported", "plain", dtype=dtype, report=lambda line: None)
    assert not (tmp_path / "exported").exists()
