"""``bert-jax benchmark-inference``: each form in a process of its own, sizes, bad input."""

import json
import os
import signal

import pytest
from hf_folders import make_folder
from inference_models import make_weights

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig
from bert_jax.contrib.experiments import latency
from bert_jax.interop.saved_model import write_saved


@pytest.fixture
def model(tmp_path):
    write_saved(tmp_path / "model", make_weights(HeadsConfig(pooler=True, sequence_labels=("a", "b"))))
    return str(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("forms", [["jax"], pytest.param([], marks=pytest.mark.slow)])
def test_every_form_is_timed(model, tmp_path, capsys, forms):
    assert main(["benchmark-inference"]) == 2 == main(["benchmark-inference", model, "--model", model])
    assert capsys.readouterr().err.count("error: --model: name one model") == 2
    words = ["--batches", "1", "3", "--lengths", "8", "70", "512"]
    words += ["--seconds", "0.01", "--repeats", "4", "--cpus", "1"]
    words += ["--forms", *forms] if forms else []
    assert main(["benchmark-inference", "--model", model, *words, "--output", str(tmp_path / "lines.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    sizes = [(1, 8), (1, 70), (3, 8), (3, 70)]  # the model has 70 positions
    forms = forms or latency.installed_forms()
    assert {"jax", "jax-bfloat16", "stablehlo"} <= set(latency.installed_forms())
    assert [(line["form"], line["batch"], line["length"]) for line in lines] == [
        (form, *size) for form in forms for size in sizes
    ]
    for line in lines:
        assert 0 < line["median_ms"] <= line["p99_ms"] and line["runs"] >= 4
        assert line["texts_per_second"] == pytest.approx(1e3 * line["batch"] / line["median_ms"], rel=0.05)
        assert line["megabytes"] > 0
    memory = {line["form"]: line["peak_memory_mb"] for line in lines}
    if "onnx" in memory:
        assert memory["onnx"] < memory["jax"]  # that process has no jax
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "lengths skipped: 512; texts of the model have at most 70 tokens"
    assert printed[1] == f"about 1 min: {len(forms)} forms of 4 sizes"
    assert len(printed) == len(forms) + 3 + 2 * len(lines) and "p99 ms" in printed[-len(lines) - 1]


@pytest.mark.slow
def test_a_folder_whose_files_contradict_each_other(tmp_path, capsys):
    folder = str(make_folder(tmp_path / "hf", config={"vocab_size": 7}))
    words = [
        "benchmark-inference",
        folder,
        *["--batches", "1", "--lengths", "8", "--seconds", "0.01", "--repeats", "1", "--forms", "jax"],
    ]
    assert main(words) == 2 and "set --allow_mismatch" in capsys.readouterr().err
    assert main([*words, "--allow_mismatch"]) == 0
    assert any("vocab_size is 7" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.slow
def test_a_form_that_cannot_hold_the_model_is_left_out(model, capsys, monkeypatch):
    def refuse(*arguments, **options):
        raise ValueError("onnx: not this model")

    monkeypatch.setattr(latency, "export_model", refuse)
    words = ["--batches", "1", "--lengths", "8", "--seconds", "0.01", "--repeats", "1"]
    words += ["--forms", "stablehlo", "jax"]
    assert main(["benchmark-inference", model, *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "stablehlo: skipped; onnx: not this model" and len(printed) == 6


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
def test_a_stopped_benchmark_keeps_its_rows(model, tmp_path, capsys, monkeypatch, number, code):
    row = {"batch": 1, "length": 16, "median_ms": 1.0, "p99_ms": 2.0, "texts_per_second": 1000.0, "runs": 5}
    asked = []

    def run(form, folder, vocab_size, lengths, load):
        asked.append((load.batches, lengths, load.seconds, load.repeats))
        yield {**row, "peak_memory_mb": 10.0}
        yield {**row, "length": 32, "peak_memory_mb": 20.0}
        os.kill(os.getpid(), number)

    monkeypatch.setattr(latency, "_run", run)
    words = ["--quick", "--lengths", "16", "32", "--forms", "jax", "--output", str(tmp_path / "rows.jsonl")]
    assert main(["benchmark-inference", model, *words]) == code
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(one["length"], one["peak_memory_mb"]) for one in rows] == [(16, 20.0), (32, 20.0)]
    assert asked == [([1, 8], [16, 32], 0.5, 5)]  # --quick, except for what is given
    said = capsys.readouterr()
    assert "1 x 32" in said.out.splitlines()[-1] and said.err == "stopped; run the same command again\n"


def test_bad_input(model, capsys, monkeypatch):
    monkeypatch.setattr(latency, "installed_forms", lambda: ("jax",))
    for words, message in (
        (["--forms", "tflite"], "--forms: 'tflite' is not allowed; use one of jax, jax-bfloat16, onnx, stablehlo"),
        (["--forms", "onnx"], "--forms: onnx: requires the package onnxruntime; install it, or omit onnx"),
        (["--lengths", "71"], "--lengths: texts of the model have at most 70 tokens; give a smaller length"),
        (["--batches", "0"], "--batches: 0 is not allowed; use 1 or more"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--cpus", "4096"], "--cpus: 4096 is not allowed; use 1 to "),
    ):
        assert main(["benchmark-inference", model, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
