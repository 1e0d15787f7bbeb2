"""StableHLO programs, loaded back, against the model itself; their files; the route of a consumer without us."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from architectures import combined
from exported import MODEL, PLAIN, SPECS, mostly_slow, random_weights
from safetensors.numpy import load_file

from bert_jax.config import HeadsConfig, ModelSpec
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.interop.programs import serving
from bert_jax.interop.programs.stablehlo import check_stablehlo, write_stablehlo

BAR = 1e-5
# Each length is compiled anew, so most models are tried at one.
SHAPES = ((1, 1), (3, 17), (8, 40))
TRIED = (
    "pooler", "pretraining", "sequence", "token", "span", "choice", "several", "pre", "sinusoidal", "rotary",
    "roberta", "sentence_dense",
)  # fmt: skip
CONSUMER = """
import sys, jax, numpy as np
from safetensors.numpy import load_file
program = jax.export.deserialize(bytearray(open("program.bin", "rb").read()))
inputs = np.load(sys.argv[1])
outputs = jax.jit(program.call)(load_file("weights.safetensors"), *(inputs[name] for name in inputs.files))
np.savez(sys.argv[2], **outputs)
assert not any(name.startswith(("bert_jax", "flax")) for name in sys.modules)
"""


@pytest.fixture(scope="module")
def span(tmp_path_factory) -> tuple[Path, ModelBundle]:
    """Folder of a program with the span head, and its weights; not to be written to."""
    folder, weights = tmp_path_factory.mktemp("span"), random_weights(SPECS["span"])
    write_stablehlo(folder, weights)
    return folder, weights


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(TRIED, {"roberta", "sentence_dense"}))
def test_outputs_equal_those_of_the_model(tmp_path, name):
    weights = random_weights(SPECS[name])
    assert weights.spec.model.max_length == SHAPES[-1][1]
    write_stablehlo(tmp_path, weights)
    found = check_stablehlo(tmp_path, weights, SHAPES if name == "sentence_dense" else SHAPES[1:2])
    assert list(found) == list(serving.output_names(weights.spec))
    assert max(found.values()) <= BAR, found


def test_signature_names_everything_in_order(tmp_path):
    weights = random_weights(SPECS["pretraining"])
    assert "the program accepts sequence lengths up to 40" in write_stablehlo(tmp_path, weights)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json", "program.bin", "program.mlir", "signature.json", "weights.safetensors",
    ]  # fmt: skip
    signature = json.loads((tmp_path / "signature.json").read_text())
    assert products_are_precise((tmp_path / "program.mlir").read_text())
    assert signature["jax_version"] == jax.__version__
    assert signature["platforms"] == ["cpu", "cuda", "tpu"]
    ids = [{"name": name, "dtype": "int32", "shape": ["batch", "sequence"]} for name in serving.INPUTS]
    assert signature["inputs"] == ids
    assert signature["model"]["heads"]["nsp"] is True
    assert signature["outputs"] == [
        {"name": "prediction_logits", "dtype": "float32", "shape": ["batch", "sequence", 101]},
        {"name": "seq_relationship_logits", "dtype": "float32", "shape": ["batch", 2]},
    ]
    stored = load_file(tmp_path / "weights.safetensors")
    assert stored.keys() == weights.params.keys()
    assert all(np.array_equal(stored[name], weights.params[name]) for name in stored)
    # Argument 0 of the text is the platform; weights follow, then inputs.
    text = (tmp_path / "program.mlir").read_text()
    arguments = text[text.index("@main(") : text.index(") -> ", text.index("@main("))].split("%arg")[2:]
    expected = [
        "x".join([*("?" if isinstance(size, str) else str(size) for size in value["shape"]), kind])
        for group, kind in (("weights", "f32"), ("inputs", "i32"))
        for value in signature[group]
    ]
    assert [argument[argument.index("<") + 1 : argument.index(">")] for argument in arguments] == expected


@pytest.mark.slow
def test_program_is_small_and_names_no_file_of_this_machine(tmp_path):
    spec = dataclasses.replace(PLAIN, model=dataclasses.replace(MODEL, num_layers=6, vocab_size=5000))
    write_stablehlo(tmp_path, random_weights(spec))
    program, text = (tmp_path / "program.bin").read_bytes(), (tmp_path / "program.mlir").read_text()
    assert len(program) < 200_000
    assert b".py" not in program
    assert ".py" not in text


@pytest.mark.slow
def test_a_consumer_needs_only_jax_and_safetensors(tmp_path, span):
    folder, weights = span
    (sample,) = serving.sample_inputs(weights.spec, SHAPES[1:2])
    inputs, outputs = tmp_path / "inputs.npz", tmp_path / "outputs.npz"
    np.savez(inputs, **{name: values.astype(np.int32) for name, values in sample.items()})
    subprocess.run([sys.executable, "-c", CONSUMER, inputs, outputs], cwd=folder, check=True)
    expected = jax.jit(functools.partial(serving.forward, weights.spec))(weights.params, *sample.values())
    with np.load(outputs) as given:
        assert set(given.files) == {"start_logits", "end_logits"}
        for name in given.files:
            np.testing.assert_allclose(given[name], expected[name], atol=BAR, rtol=0)


@pytest.mark.slow
def test_longer_than_the_model_is_refused(span):
    folder, _ = span
    program = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    stored = load_file(folder / "weights.safetensors")
    for length in (40, 41):
        ids = np.zeros((1, length), np.int32)
        if length == 40:
            assert program.call(stored, ids, ids, ids)["start_logits"].shape == (1, 40)
        else:
            with pytest.raises(ValueError):
                program.call(stored, ids, ids, ids)


def products_are_precise(text):
    """Whether accelerators multiply float32 matrices of the program in float32."""
    products = [line for line in text.splitlines() if ".dot_general " in line]
    assert len(products) >= 8 * MODEL.num_layers
    precise = {"[HIGHEST, HIGHEST]" in line for line in products}
    assert len(precise) == 1
    return precise.pop()


@pytest.mark.slow
def test_bfloat16_weights_and_float32_arithmetic(tmp_path):
    """The pooler, which no output uses, stays an argument of the program."""
    weights = random_weights(dataclasses.replace(SPECS["mlm"], heads=HeadsConfig(mlm=True, pooler=True)))
    notes = write_stablehlo(tmp_path, weights, dtype="bfloat16")
    assert any("bfloat16" in note for note in notes)
    found = check_stablehlo(tmp_path, weights, SHAPES[1:2])
    assert max(found.values()) <= BAR
    stored = load_file(tmp_path / "weights.safetensors")
    assert stored.keys() == weights.params.keys()
    assert {str(values.dtype) for values in stored.values()} == {"bfloat16"}
    assert not products_are_precise((tmp_path / "program.mlir").read_text())
    signature = json.loads((tmp_path / "signature.json").read_text())
    assert {value["dtype"] for value in signature["weights"]} == {"bfloat16"}


def test_a_wrong_weight_shows_in_the_check(span):
    folder, weights = span
    changed = dict(weights.params)
    changed["span_head/bias"] = changed["span_head/bias"] + np.float32([0.0, 0.01])
    found = check_stablehlo(folder, dataclasses.replace(weights, params=changed), SHAPES[1:2])
    assert found["start_logits"] <= BAR < 0.009 < found["end_logits"] < 0.011


def test_parameters_that_do_not_fit_are_refused(tmp_path):
    weights = random_weights(PLAIN)
    params = dict(weights.params) | {"pooler/bias": np.zeros(32, np.float32)}
    with pytest.raises(ValueError, match="unexpected pooler/bias"):
        write_stablehlo(tmp_path, dataclasses.replace(weights, params=params))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups",
    [("disentangled", "gpt"), ("alibi", "windows"), pytest.param(("buckets",), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_switches_of_the_network(tmp_path, groups):
    heads = HeadsConfig(mlm=True, pooler=True, sequence_labels=("a", "b"))
    weights = random_weights(ModelSpec(model=combined(groups), heads=heads))
    write_stablehlo(tmp_path, weights)
    found = check_stablehlo(tmp_path, weights, SHAPES[1:2])
    assert found and max(found.values()) <= 1e-5, found
