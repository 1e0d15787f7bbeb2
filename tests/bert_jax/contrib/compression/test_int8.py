"""Exports in 8 bits: products, ranges from texts, scores beside those of the model, bad input."""

import dataclasses
import json

import numpy as np
import onnx
import pytest
from exported import SPECS, random_weights
from inference_models import make_weights, random_texts

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, SentenceConfig
from bert_jax.contrib.compression.examples import read_examples
from bert_jax.contrib.compression.onnx import quality
from bert_jax.contrib.compression.onnx.calibration import calibrated
from bert_jax.contrib.compression.onnx.quality import check_program
from bert_jax.inference.loaded import prepare
from bert_jax.interop.export import export_model
from bert_jax.interop.programs.onnx_graph import check_onnx, write_onnx
from bert_jax.interop.programs.onnx_int8 import input_scale, quantize
from bert_jax.interop.saved_model import write_saved
from bert_jax.metrics.classification import calibration_error
from bert_jax.process import exits

SENTENCE = make_weights(None, SentenceConfig(pooling=("mean",)))
LABELS = ("no", "yes")
# Head -> (output layers, labels of a record with two texts, or its other fields).
CHECKED = {
    "classification": (HeadsConfig(pooler=True, sequence_labels=LABELS), {"label": "yes"}),
    "regression": (HeadsConfig(pooler=True, sequence_labels=("score",), problem="regression"), None),
    "both orders": (HeadsConfig(pooler=True, sequence_labels=LABELS, both_orders=True), {"label": "no"}),
    "token": (HeadsConfig(token_labels=("O", "B-X")), {"tags": None}),
    "span": (HeadsConfig(span=True), {"answers": None}),
    "choice": (HeadsConfig(pooler=True, choice=True), {"choices": None}),
}


def lines(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def pairs(count=24, longest=9):
    texts = random_texts(2 * count, longest, seed=3)
    return [
        {"text": f"w1 {a}", "text_pair": f"w2 {b}", "label": str(i % 5)}
        for i, (a, b) in enumerate(zip(texts[::2], texts[1::2], strict=True))
    ]


def run(capsys, *words):
    """Exit code, standard output and the last line of standard error of ``bert-jax export``."""
    code = main(["export", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), (printed.err.splitlines() or [""])[-1]


# ------------------------------------------------------------------ numbers


def test_weights_are_rounded_to_the_nearest_of_255_values():
    values = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    values[:, 2] *= 100
    values[:, 4] = 0
    stored, scales = quantize(values, 1)
    assert stored.dtype == np.int8 and scales.shape == (6,) and np.abs(stored).max() == 127
    assert (np.abs(stored * scales - values) <= scales / 2 * (1 + 1e-5)).all()
    rows, of_rows = quantize(values.T, 0)
    np.testing.assert_array_equal(rows.T, stored)
    np.testing.assert_array_equal(of_rows, scales)


@pytest.mark.parametrize(("low", "high"), [(-1.5, 3.0), (0.5, 2.0), (-4.0, -1.0), (0.0, 0.0)])
def test_the_range_of_inputs_holds_0_exactly(low, high):
    scale, zero = input_scale(low, high)
    ends = (np.array([0, 255]) - zero.astype(float)) * scale
    assert ends[0] <= min(low, 0) + scale / 2 and ends[1] >= max(high, 0) - scale / 2
    assert ends[1] - ends[0] <= 1.01 * max(max(high, 0) - min(low, 0), 1e-30)


# Outputs of normed states, whose values are about 1; the logits of the language model are sums of 32 of them.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["several", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sentence_dense", "rotary"))]
)
@pytest.mark.parametrize("is_static", [False, True])
def test_outputs_are_near_those_of_the_model(name, is_static, tmp_path):
    weights = random_weights(SPECS[name])
    if is_static:
        ranges = {product: (-8.0, 8.0) for product in weights.params}
        weights = dataclasses.replace(weights, ranges=ranges)
    assert any("calibrated" in note for note in write_onnx(tmp_path, weights, dtype="int8")) == is_static
    differences = check_onnx(tmp_path, weights, ((1, 1), (3, 17), (8, 40)))
    assert all(1e-4 < value < (0.6 if "logits" in out else 0.25) for out, value in differences.items()), differences
    graph = onnx.load(tmp_path / "model.onnx").graph
    kinds = [node.op_type for node in graph.node]
    products = 6 * weights.spec.model.num_layers + weights.spec.heads.mlm
    assert kinds.count("MatMulInteger") == (0 if is_static else products)
    # The products that share an input share its rounded values.
    inputs = products - 2 * weights.spec.model.num_layers
    assert kinds.count("QuantizeLinear") == inputs
    stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
    in_8_bits = {one for one, kind in stored.items() if kind == onnx.TensorProto.INT8}
    assert {one for one in in_8_bits if "layer_1" in one} == {
        f"encoder/layer_1/{part}/kernel"
        for part in (
            "attention/query", "attention/key", "attention/value", "attention/output",
            "feed_forward/intermediate", "feed_forward/output",
        )
    }  # fmt: skip
    assert "embeddings/word_embeddings/embedding" in in_8_bits and "pooler/kernel" not in in_8_bits


def test_ranges_are_those_of_the_texts(tmp_path):
    texts = tmp_path / "texts.jsonl"
    lines(texts, *pairs())
    said = []
    one = calibrated(SENTENCE, [str(texts)], said.append)
    assert said[0].startswith("calibration: 24 texts, ")
    products = {name for name in SENTENCE.params if name.endswith("kernel")}
    assert one.ranges.keys() == products - {"pooler/kernel"}
    assert all(low < 0 < high for low, high in one.ranges.values())
    shared = [one.ranges[f"encoder/layer_0/attention/{part}/kernel"] for part in ("query", "key", "value")]
    assert shared[0] == shared[1] == shared[2] != one.ranges["encoder/layer_0/attention/output/kernel"]
    # Padding beside the shorter texts does not count.
    alone = [calibrated(SENTENCE, [lines(tmp_path / "one.jsonl", row)], said.append).ranges for row in pairs()[:5]]
    both = calibrated(SENTENCE, [lines(texts, *pairs()[:5])], said.append).ranges
    for name, (low, high) in both.items():
        assert low == pytest.approx(min(one[name][0] for one in alone), rel=1e-4)
        assert high == pytest.approx(max(one[name][1] for one in alone), rel=1e-4)


# ------------------------------------------------------------------ scores


def numbers(value):
    """All numbers of a prediction."""
    if isinstance(value, dict | list):
        return [number for one in (value.values() if isinstance(value, dict) else value) for number in numbers(one)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*CHECKED, "sentence"])
def test_the_float_program_predicts_what_the_model_predicts(kind, tmp_path):
    heads, fields = CHECKED.get(kind, (None, None))
    weights = SENTENCE if heads is None else make_weights(heads)
    rows = pairs()
    for number, row in enumerate(rows):
        if kind == "token":
            row |= {"words": row.pop("text").split(), "tags": ["O"]}
            row["tags"] *= len(row["words"])
            del row["text_pair"]
        elif kind == "span":
            row["answers"] = [{"text": row["text_pair"].split()[-1], "answer_start": 0}]
        elif kind == "choice":
            row |= {"choices": [row.pop("text_pair"), "w7 w8", "w9"], "label": str(number % 3)}
        elif fields is not None:
            row["label"] = ("no", "1")[number % 2]  # a class by its name, or by its index
    dev, said = lines(tmp_path / "dev.jsonl", *rows), []
    write_onnx(tmp_path, weights)
    check_program(tmp_path, weights, file=dev, allowed=1e-6, dtype="float32", report=said.append)
    assert "24 records: " in said[0] and said[0].endswith("0.0000)")
    engine = prepare(weights)
    task, records = quality._task(engine, quality._head(engine), read_examples([dev]))
    model, program = quality.predictions(engine, task, records, tmp_path)
    of_model, of_program = (np.array(numbers(one)) for one in (model, program))
    assert len(of_model) >= 24 and np.ptp(of_model) > 0.01
    np.testing.assert_allclose(of_program, of_model, atol=2e-5)
    if heads is not None and heads.sequence_labels == LABELS:
        p = np.array([[*one["probabilities"].values()] for one in model])
        gold = np.array([number % 2 for number in range(len(rows))])
        error = f"{calibration_error(gold, p):.4f}"
        assert said[1:] == [f"  calibration error: float32 {error}, float32 {error}"]
    else:
        assert len(said) == 1
    # Another network predicts something else.
    write_onnx(
        tmp_path, dataclasses.replace(weights, params=make_weights(heads, weights.spec.sentence, seed=5).params)
    )
    other = quality.predictions(engine, task, records, tmp_path)[1]
    assert np.abs(np.array(numbers(other))[: len(of_model)] - of_model[: len(numbers(other))]).max() > 0.01


@pytest.mark.slow
def test_the_command_compares_scores_and_refuses_a_loss(tmp_path, capsys):
    write_saved(tmp_path / "model", SENTENCE)
    dev, texts = lines(tmp_path / "dev.jsonl", *pairs()), tmp_path / "texts.txt"
    texts.write_text("\n".join(f"w1 {text}" for text in random_texts(30, 12)))
    words = ["--from", tmp_path / "model", "--to", tmp_path / "out", "--format", "onnx", "--dtype", "int8"]
    words += ["--calibration", texts, "--check", dev]
    code, out, error = run(capsys, *words, "--check_loss", "-2")
    assert code == exits.VERIFICATION_FAILED and not (tmp_path / "out").exists()
    assert "spearman is worse by" in error and "(allowed: -2); nothing was exported" in error
    code, out, error = run(capsys, *words, "--check_loss", "0.5")
    assert code == 0, error
    (line,) = (line for line in out if line.startswith(dev))
    assert "24 records: spearman float32" in line and ", int8 " in line
    assert any("the ranges of the inputs of products were calibrated on texts" in line for line in out)
    assert (tmp_path / "out" / "model.onnx").exists()
    assert "calibrated on texts" in (tmp_path / "out" / "README.md").read_text()


# ------------------------------------------------------------------ bad input


@pytest.mark.slow
def test_bad_input(tmp_path, capsys):
    write_saved(tmp_path / "model", SENTENCE)
    write_saved(tmp_path / "mlm", make_weights(HeadsConfig(mlm=True)))
    write_saved(tmp_path / "two", make_weights(HeadsConfig(pooler=True, sequence_labels=LABELS, span=True)))
    empty, dev = tmp_path / "empty.txt", lines(tmp_path / "dev.jsonl", *pairs())
    empty.write_text("\n\n")
    unlabeled = lines(tmp_path / "unlabeled.jsonl", {"text": "w1"})
    wrong = lines(tmp_path / "wrong.jsonl", {"text": "w1", "text_pair": "w2", "label": "high"})
    odd = lines(tmp_path / "odd.jsonl", {"text": 1})
    for model, words, message in (
        (
            "model",
            ["onnx", "--dtype", "int8", "--calibration", empty],
            "empty.txt: no text given; write one per line",
        ),
        ("model", ["onnx", "--dtype", "int8", "--calibration", "train.tsv"], "train.tsv: a table; use texts"),
        ("model", ["onnx", "--check", str(tmp_path / "none.jsonl")], "none.jsonl"),
        ("model", ["onnx", "--dtype", "int8", "--calibration", odd], "entry 1: no text; write"),
        (
            "model",
            ["onnx", "--calibration", dev],
            "--calibration: not allowed with --dtype float32; allowed with int8",
        ),
        ("model", ["hf", "--dtype", "int8"], "formats that support this model: onnx"),
        ("model", ["npz", "--check", dev], "--check: not allowed with --format npz; allowed with onnx"),
        ("model", ["onnx", "--check_loss", "0.1"], "--check_loss: requires --check"),
        ("mlm", ["onnx", "--check", dev], "--check: the model has no task (heads: mlm); fine-tune it"),
        ("two", ["onnx", "--check", dev], "several task heads (sequence, span); export one of them with --heads"),
        ("model", ["onnx", "--check", unlabeled], "unlabeled.jsonl: no record has a label (label)"),
        ("model", ["onnx", "--check", wrong], "wrong.jsonl: example 1: label 'high' is not allowed"),
        ("model", ["onnx", "--check", odd], "odd.jsonl: example 1: "),
    ):
        words = ["--from", tmp_path / model, "--to", tmp_path / "out", "--format", *words]
        code, _, error = run(capsys, *words)
        assert code == 2 and message in error, (words, error)
        assert not (tmp_path / "out").exists()


def test_every_format_refuses_what_it_has_not(tmp_path):
    write_saved(tmp_path / "model", SENTENCE)
    for format in ("hf", "sentence-transformers", "tf1", "stablehlo", "npz"):
        with pytest.raises(ValueError, match=rf"^{format}: .*int8.*: not supported; .* model: onnx, gguf$"):
            export_model(tmp_path / "model", tmp_path / "out", format, dtype="int8", report=lambda line: None)
