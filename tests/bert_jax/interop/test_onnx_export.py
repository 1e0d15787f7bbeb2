"""ONNX files in onnxruntime against the model itself: heads, variants, file layout, quantization."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from architectures import COMBINED, combined
from builders import content, words
from exported import MODEL, PLAIN, SPECS, mostly_slow, random_weights, source
from onnxruntime.quantization import quantize_dynamic

from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.interop.export import export_model
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.programs import onnx_graph, serving
from bert_jax.interop.programs.onnx_graph import check_onnx, write_onnx, write_onnx_folder, write_program
from bert_jax.interop.readers import read_weights

# One token, ragged rows, the full length of the models of these tests.
SHAPES = ((1, 1), (3, 17), (8, 40))
RAGGED = SHAPES[1:2]
BAR = 1e-5
NO_TOKENIZER = "the model has no vocabulary: no tokenizer is written"


def session(folder: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])


def inputs(ids: np.ndarray) -> dict[str, np.ndarray]:
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def weight_bytes(weights: ModelBundle) -> int:
    return sum(values.nbytes for values in weights.params.values())


@pytest.mark.parametrize("name", mostly_slow(SPECS))
def test_outputs_equal_those_of_the_model(tmp_path, name):
    weights = random_weights(SPECS[name])
    write_onnx(tmp_path, weights)
    assert weights.spec.model.max_length == SHAPES[-1][1]
    found = check_onnx(tmp_path, weights, SHAPES if name == "sentence_dense" else RAGGED)
    assert found
    assert max(found.values()) <= BAR, found


@pytest.mark.parametrize("groups", COMBINED, ids=" ".join)
def test_switches_of_the_network(tmp_path, groups):
    heads = HeadsConfig(mlm=True, pooler=True, sequence_labels=("a", "b"), token_labels=("x", "y", "z"))
    weights = random_weights(ModelSpec(model=combined(groups), heads=heads))
    write_onnx(tmp_path, weights)
    # Attention in blocks and windows takes other paths for short rows and full ones.
    shapes = SHAPES[:2] if {"blocks", "windows"} & {*groups} else RAGGED
    found = check_onnx(tmp_path, weights, shapes)
    assert len(found) == 3 and max(found.values()) <= 1e-4, found


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("pretraining", {
            "prediction_logits": ["batch", "sequence", 101], "seq_relationship_logits": ["batch", 2],
        }),
        ("choice", {"logits": ["batch", 1]}),
        ("several", {
            "prediction_logits": ["batch", "sequence", 101], "sequence_logits": ["batch", 2],
            "token_logits": ["batch", "sequence", 2], "start_logits": ["batch", "sequence"],
            "end_logits": ["batch", "sequence"],
        }),
        ("sentence", {"last_hidden_state": ["batch", "sequence", 32], "sentence_embedding": ["batch", 32]}),
    ],
)  # fmt: skip
def test_signature_is_that_of_transformers(tmp_path, name, outputs):
    write_onnx(tmp_path, random_weights(SPECS[name]))
    opened = session(tmp_path)
    assert {value.name: (value.type, value.shape) for value in opened.get_inputs()} == {
        value: ("tensor(int64)", ["batch", "sequence"])
        for value in ("input_ids", "attention_mask", "token_type_ids")
    }
    assert {value.name: value.shape for value in opened.get_outputs()} == outputs


@pytest.mark.slow
def test_a_row_without_a_visible_token_is_like_the_model_s(tmp_path):
    weights = random_weights(SPECS["sentence_dense"])
    write_onnx(tmp_path, weights)
    opened = session(tmp_path)
    names = [value.name for value in opened.get_outputs()]

    def hidden(sample):
        return sample | {"attention_mask": np.zeros_like(sample["attention_mask"])}

    samples = [hidden(sample) for sample in serving.sample_inputs(weights.spec, SHAPES)]
    reference = jax.jit(functools.partial(serving.forward, weights.spec))
    for sample in samples:
        expected = reference(weights.params, *(sample[name] for name in serving.INPUTS))
        for name, given in zip(names, opened.run(names, sample), strict=True):
            np.testing.assert_allclose(given, expected[name], atol=BAR, rtol=0)


def test_tied_table_is_stored_once(tmp_path):
    spec = dataclasses.replace(SPECS["pretraining"], model=dataclasses.replace(MODEL, vocab_size=8000))
    weights = random_weights(spec)
    assert write_onnx(tmp_path, weights) == [NO_TOKENIZER]
    assert weight_bytes(weights) < (tmp_path / "model.onnx").stat().st_size < 1.1 * weight_bytes(weights)
    stored = {tensor.name: tuple(tensor.dims) for tensor in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert stored.items() >= parameter_shapes(spec).items()


def test_every_stored_array_is_used(tmp_path):
    """onnxruntime warns of others."""
    for name in ("plain", "offset"):
        spec = dataclasses.replace(SPECS[name], heads=HeadsConfig())
        write_program(tmp_path, ModelBundle(spec=spec, params=random_weights(spec).params), "int8")
        graph = onnx.load(tmp_path / "model.onnx").graph
        read = {name for node in graph.node for name in node.input}
        assert {tensor.name for tensor in graph.initializer} <= read


def test_folder_holds_what_a_user_of_the_program_needs(tmp_path):
    vocabulary = content(words(96))
    spec = dataclasses.replace(SPECS["sequence"], tokenizer=TokenizerConfig(max_length=30))
    weights = dataclasses.replace(random_weights(spec), tokenizer_content=vocabulary)
    assert NO_TOKENIZER not in write_onnx(tmp_path, weights)
    assert (tmp_path / "vocab.txt").read_bytes() == vocabulary
    assert json.loads((tmp_path / "config.json").read_text())["id2label"] == {"0": "no", "1": "yes", "2": "maybe"}
    described = json.loads(session(tmp_path).get_modelmeta().custom_metadata_map["bert_jax"])
    assert described["weights_dtype"] == "float32"
    assert described["model"] == json.loads(json.dumps(dataclasses.asdict(spec)))


def test_large_weights_lie_beside_the_graph(tmp_path, monkeypatch):
    weights = random_weights(SPECS["pretraining"])
    monkeypatch.setattr(onnx_graph, "EXTERNAL_DATA_BYTES", weight_bytes(weights) - 1)
    assert any("model.onnx.data" in note for note in write_onnx(tmp_path, weights))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.onnx", "model.onnx.data"]
    assert (tmp_path / "model.onnx").stat().st_size < 0.6 * weight_bytes(weights)
    found = check_onnx(tmp_path, weights, RAGGED)
    assert found and max(found.values()) <= BAR
    onnx.checker.check_model(str(tmp_path / "model.onnx"))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in list(tmp_path.glob("model*")):
        file.rename(moved / file.name)
    assert check_onnx(moved, weights, RAGGED) == found


def test_weights_at_the_threshold_stay_inside(tmp_path, monkeypatch):
    weights = random_weights(PLAIN)
    monkeypatch.setattr(onnx_graph, "EXTERNAL_DATA_BYTES", weight_bytes(weights))
    write_onnx(tmp_path, weights)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.onnx"]


@pytest.mark.slow
@pytest.mark.parametrize("external", [False, True])
def test_bfloat16_halves_the_file_and_computes_in_float32(tmp_path, monkeypatch, external):
    if external:
        monkeypatch.setattr(onnx_graph, "EXTERNAL_DATA_BYTES", 0)
    weights = random_weights(SPECS["pretraining"])
    notes = write_onnx(tmp_path, weights, dtype="bfloat16")
    assert any("bfloat16" in note for note in notes)
    found = check_onnx(tmp_path, weights, RAGGED)
    assert found and max(found.values()) <= BAR
    tensors = {tensor.name: tensor for tensor in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert {tensors[name].data_type for name in weights.params} == {onnx.TensorProto.BFLOAT16}
    assert sum(len(tensors[name].raw_data) for name in weights.params) == weight_bytes(weights) / 2
    # The reference of the check is rounded as well; against unrounded weights the rounding shows.
    exact = serving.largest_differences(
        weights.spec,
        weights.params,
        lambda sample: dict(zip(found, session(tmp_path).run(list(found), sample), strict=True)),
        serving.sample_inputs(weights.spec, RAGGED),
    )
    assert min(exact.values()) > 1e-4


@pytest.mark.slow
def test_what_no_output_uses_is_left_out_and_said(tmp_path):
    spec = dataclasses.replace(SPECS["mlm"], heads=HeadsConfig(mlm=True, pooler=True))
    weights = random_weights(spec)
    assert "pooler: omitted, because no output of the ONNX file uses it" in write_onnx(tmp_path, weights)
    assert max(check_onnx(tmp_path, weights, RAGGED).values()) <= BAR


def test_a_wrong_weight_shows_in_the_check(tmp_path):
    weights = random_weights(SPECS["span"])
    write_onnx(tmp_path, weights)
    changed = dict(weights.params)
    changed["span_head/bias"] = changed["span_head/bias"] + np.float32([0.0, 0.01])
    found = check_onnx(tmp_path, dataclasses.replace(weights, params=changed), RAGGED)
    assert found["start_logits"] <= BAR < 0.009 < found["end_logits"] < 0.011


def test_scores_of_excluded_tokens_do_not_hide_the_others():
    expected = np.array([[0.5, -1e6 + 0.25, 1.0]], np.float32)
    rounded = expected + np.float32([0, 0.0625, 0])
    assert serving._difference(rounded, expected) == 0
    assert serving._difference(expected + np.float32([0.5, 0, 0]), expected) == 0.5
    assert serving._difference(np.float32([[0.5, 0.25, 1.0]]), expected) > 9e5
    assert serving._difference(np.float32([[0.5, -2e6, 1.0]]), expected) > 9e5
    assert serving._difference(np.float32([[0.5, -np.inf, 1.0]]), expected) == np.inf


@pytest.mark.slow
def test_not_a_number_is_an_infinite_difference(tmp_path):
    weights = random_weights(PLAIN)
    params = dict(weights.params)
    params["embeddings/layer_norm/bias"] = np.full(32, np.nan, np.float32)
    broken = dataclasses.replace(weights, params=params)
    write_onnx(tmp_path, broken)
    assert check_onnx(tmp_path, broken, RAGGED) == {"last_hidden_state": np.inf}


def test_parameters_that_do_not_fit_are_refused(tmp_path):
    weights = random_weights(PLAIN)
    params = {name: values for name, values in weights.params.items() if "layer_1" not in name}
    with pytest.raises(ValueError, match="missing encoder/layer_1/attention/query/kernel"):
        write_onnx(tmp_path, dataclasses.replace(weights, params=params))
    assert list(tmp_path.iterdir()) == []


def test_missing_packages(tmp_path, monkeypatch):
    weights = random_weights(PLAIN)
    write_onnx(tmp_path, weights)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert check_onnx(tmp_path, weights, RAGGED) is None
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ValueError, match=r"bert_jax\[onnx\]"):
        write_onnx(tmp_path / "new", weights)


def test_dynamic_quantization_keeps_the_embedding(tmp_path):
    weights = random_weights(SPECS["sentence"])
    write_onnx(tmp_path, weights)
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    quantize_dynamic(tmp_path / "model.onnx", quantized / "model.onnx")
    kinds = [node.op_type for node in onnx.load(quantized / "model.onnx").graph.node]
    assert kinds.count("MatMulInteger") == 6 * weights.spec.model.num_layers
    ids = np.random.default_rng(1).integers(0, 101, (6, 30))
    exact, rounded = (
        opened.run(["sentence_embedding"], inputs(ids))[0] for opened in (session(tmp_path), session(quantized))
    )
    assert np.min(np.sum(exact * rounded, axis=1)) > 0.995


# ------------------------------------------------------------------ a folder onnx in a Hugging Face folder


@pytest.mark.parametrize("name", ["sentence", pytest.param("mlm", marks=pytest.mark.slow)])
def test_programs_of_transformers_js(name, tmp_path):
    weights = random_weights(SPECS[name])
    assert write_onnx_folder(tmp_path, weights) == []
    found = check_onnx(tmp_path / "onnx", weights, RAGGED)
    assert found and max(found.values()) <= BAR
    rounded = check_onnx(tmp_path / "onnx", weights, RAGGED, "model_quantized.onnx")
    values = session(tmp_path / "onnx").run(None, inputs(np.arange(80).reshape(4, 20)))
    # Rounding to 8 bits moves a weight by at most 0.4% of the largest of its block.
    assert list(rounded) == list(found) and BAR < max(rounded.values()) < 0.015 * max(map(np.max, values))
    stored = onnx.load(tmp_path / "onnx" / "model_quantized.onnx").graph.initializer
    kinds = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in stored}
    assert kinds["embeddings/word_embeddings/embedding"] == (onnx.TensorProto.UINT8, (101, 1, 32))
    assert kinds["encoder/layer_0/attention/query/kernel"] == (onnx.TensorProto.UINT8, (32, 1, 32))
    # Small tables, and rows of 48 values, which blocks of 32 do not fill, stay float32.
    for part in ("embeddings/position_embeddings/embedding", "encoder/layer_0/feed_forward/output/kernel"):
        assert kinds[part][0] == onnx.TensorProto.FLOAT


def test_values_of_blocks(tmp_path):
    """The rounded kernel, read from the file, differs from the kernel by half a step of its block at most."""
    weights = random_weights(PLAIN)
    write_onnx_folder(tmp_path, weights)
    graph = onnx.load(tmp_path / "onnx" / "model_quantized.onnx").graph
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    product = next(node for node in graph.node if "encoder/layer_1/attention/key/kernel" in node.input)
    values, scales = (arrays[name].astype(np.float32) for name in product.input[1:3])
    kernel = weights.params[product.input[1]].T.reshape(values.shape)
    assert np.all(np.abs((values - 128) * scales[:, :, None] - kernel) <= 0.501 * scales[:, :, None])


def test_an_export_with_programs(tmp_path):
    source(tmp_path / "source", SPECS["sequence"], tokenizer=True)
    lines = []
    export_model(tmp_path / "source", tmp_path / "target", "hf", with_onnx=True, report=lines.append)
    files = {str(file.relative_to(tmp_path / "target")) for file in (tmp_path / "target").rglob("*.*")}
    assert files >= {"onnx/model.onnx", "onnx/model_quantized.onnx", "tokenizer.json", "config.json"}
    assert any(line.startswith("onnx/model.onnx logits: largest difference from onnxruntime") for line in lines)
    assert read_weights(tmp_path / "target").spec.heads == SPECS["sequence"].heads
    card = (tmp_path / "target" / "README.md").read_text()
    assert "- transformers.js" in card and 'pipeline("text-classification", "DIR", ' in card
    with pytest.raises(ValueError, match="--with_onnx: not allowed with --format npz; allowed with hf, sentence-t"):
        export_model(tmp_path / "source", tmp_path / "other", "npz", with_onnx=True, report=lines.append)
