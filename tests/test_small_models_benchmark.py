"""``benchmarks/small_models.py``: its commands, how it continues, its verdict; it trains nothing here."""

import argparse
import json
import sys
from types import SimpleNamespace

import pytest
from benchmark_modules import load_benchmark

from bert_jax.commands.main import COMMANDS


@pytest.fixture
def small(monkeypatch):
    """The module of the command; ``ran`` lists the words of its commands, ``code`` is their exit code."""
    module = load_benchmark("small_models", monkeypatch)
    module.ran, module.code = [], 0

    def run(words, **_):
        module.ran.append(words[1:])
        return SimpleNamespace(returncode=module.code)

    monkeypatch.setattr(module.subprocess, "run", run)
    return module


def test_the_commands_are_valid_and_build_on_each_other(small):
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for command in COMMANDS:
        command.add(subparsers)
    made: set[str] = set()
    for name, line in small.commands().items():
        program, *words = line.split()
        if program == "bert-jax":
            parser.parse_args(words)
        read = {word.split("/")[1] for word in words if word.startswith("DIR/")} - {name}
        assert read <= made and f"DIR/{name}" in words
        made.add(name)
    assert made >= {f"{name}-{dtype}" for name in small.MODELS for dtype in small.DTYPES}


def test_a_finished_step_is_kept_and_a_failed_one_reported(small, tmp_path):
    places = {"MODEL": tmp_path / "a DIR", "TEXTS": tmp_path / "texts", "DIR": tmp_path}
    line = "bert-jax trim --from MODEL --to DIR/out --corpus TEXTS/train.txt"
    (tmp_path / "out").mkdir()  # of a command that was killed
    small.run("out", line, places, tmp_path)
    small.run("out", line, places, tmp_path)
    assert not (tmp_path / "out").exists()
    (words,) = small.ran
    assert words[:3] == ["-m", "bert_jax.commands.main", "trim"]
    assert words[3:] == [
        "--from", f"{tmp_path}/a DIR", "--to", f"{tmp_path}/out", "--corpus", f"{tmp_path}/texts/train.txt"
    ]  # fmt: skip
    (tmp_path / "tuned").mkdir()
    small.run("tuned", "run_finetune.py --workdir DIR/tuned", places, tmp_path)
    assert (tmp_path / "tuned").exists() and small.ran[1][0].endswith("/run_finetune.py")
    small.code = 2
    with pytest.raises(RuntimeError, match="exit code 2: bert-jax trim"):
        small.run("other", line, places, tmp_path)
    assert not (tmp_path / "done/other").exists()


@pytest.mark.parametrize("ms, code", [(2.0, 0), (2.1, 3)])  # 10 / 2.1 is below 5
def test_table_and_verdict(small, monkeypatch, capsys, tmp_path, ms, code):
    lines = [
        {"program": "tuned-float32", "parameters": 22_700_000, "bytes": 90_000_000, "ms": 10.0, "accuracy": 0.9},
        {"program": "trimmed-int8", "parameters": 5_400_000, "bytes": 11_000_000, "ms": ms, "accuracy": 0.8712},
    ]
    monkeypatch.setattr(small, "write_texts", lambda data, folder: folder / "texts")
    monkeypatch.setattr(small, "measure", lambda folder, files, cpus: lines)
    words = ["--model", "m", "--data", "d", "--folder", str(tmp_path), "--output", str(tmp_path / "out.jsonl")]
    monkeypatch.setattr(sys, "argv", ["small_models.py", *words])
    assert small.main() == code
    assert f"| trimmed, int8 | 5.4 | 11.0 | {ms:.2f} | 0.871 |" in capsys.readouterr().out
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == lines
    assert len(small.ran) == len(small.commands())
