"""``benchmarks/gpu.py`` on the CPU, at toy size: its lines, how it continues, its table and its exit codes."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = REPOSITORY / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    """The module of the command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def environment(tmp_path):
    """The environment of a machine without TensorFlow and without a GPU."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "tensorflow.py").write_text("raise ImportError('TensorFlow is blocked')")
    return os.environ | {"PYTHONPATH": str(blocked), "CUDA_VISIBLE_DEVICES": ""}


def run(environment, *words):
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def check_lines(gpu, lines, sections):
    assert [(x["section"], x["case"]) for x in lines] == [(s, c) for s in sections for c in gpu.cases(s, True)]
    for line in lines:
        assert line["board"] == "toy" and line["jax"] and line["chip"] is None and "error" not in line
        if line["section"] == "kernels":
            assert line["good"] and 0 < line["of_tolerance"] <= 1 and line["bits_equal"]
        elif line["section"] == "blocks":
            times = line["milliseconds"]
            assert len(times) >= 2 and times[line["best"]] == min(times.values()) <= times[line["default"]]
        else:
            parts = gpu.cases(line["section"], True)[line["case"]].get("parts", (1,))
            tokens = line["rows"] * sum(int(part * line["length"]) for part in parts)
            assert line["tokens_per_second"] == pytest.approx(tokens / line["seconds"], rel=1e-3)


def check_section(gpu, environment, output, sections):
    """The lines of a first call, no line of a second one, a row per case; the first one is returned."""
    words = ("--toy", "--sections", *sections, "--output", output)
    first = run(environment, *words)
    assert first.returncode == 0, first.stderr
    lines = lines_of(first.stdout)
    check_lines(gpu, lines, sections)
    assert lines_of(output.read_text()) == lines
    again = run(environment, *words)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    rows = [row.split(" | ")[0] for row in run(environment, "--table", "--output", output).stdout.splitlines()]
    assert [row for row in rows if row.removeprefix("| ") in {line["case"] for line in lines}] == [
        f"| {line['case']}" for line in lines
    ]
    return words


@pytest.mark.slow
def test_a_section_is_measured_once_and_a_file_that_was_cut_off_is_continued(gpu, environment, tmp_path):
    output = tmp_path / "gpu.jsonl"
    words = check_section(gpu, environment, output, ["blocks"])
    kept = lines_of(output.read_text())
    output.write_text(output.read_text()[:-40])
    third = run(environment, *words)
    assert third.returncode == 0 and [line["case"] for line in lines_of(third.stdout)] == [kept[-1]["case"]]
    continued = lines_of(output.read_text())
    assert continued[:-1] == kept[:-1] and continued[-1]["case"] == kept[-1]["case"]


@pytest.mark.slow
def test_all_sections(gpu, environment, tmp_path):
    check_section(gpu, environment, tmp_path / "gpu.jsonl", list(gpu.SECTIONS))


@pytest.mark.slow
def test_a_killed_call_is_continued_and_leaves_no_process(gpu, environment, tmp_path):
    output = tmp_path / "gpu.jsonl"
    words = ("--toy", "--sections", "kernels", "--output", output)
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        worker = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 2
    while Path(f"/proc/{worker}/exe").exists():
        assert time.monotonic() < until, "the process that measures outlives the command"
        time.sleep(0.1)
    kept = lines_of(output.read_text())
    assert 1 <= len(kept) < len(gpu.cases("kernels", True))
    second = run(environment, *words)
    assert second.returncode == 0, second.stderr
    lines = lines_of(output.read_text())
    assert lines[: len(kept)] == kept and lines_of(second.stdout) == lines[len(kept) :]
    check_lines(gpu, lines, ["kernels"])


@pytest.mark.slow
def test_without_a_gpu_one_line_and_code_2(environment, tmp_path):
    done = run(environment, "--output", tmp_path / "gpu.jsonl")
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "gpu.jsonl").exists()
    assert (
        done.stderr.count("\n") == 1
        and "no NVIDIA GPU (" in done.stderr
        and "; allowed: one GPU" in done.stderr
        and "--toy" in done.stderr
    )


def test_when_the_time_is_over_the_cases_that_are_left_are_named(gpu, environment, tmp_path):
    done = run(environment, "--toy", "--seconds", "0", "--output", tmp_path / "gpu.jsonl")
    assert done.returncode == 42 and done.stdout == ""
    for section in gpu.SECTIONS:
        assert all(f"{section}: {case}" in done.stderr for case in gpu.cases(section, True))


def test_a_case_that_ends_its_process_is_recorded_and_tried_again(gpu, monkeypatch):
    def worker(request, deadline, add):
        assert request["section"] == "base" and len(request["cases"]) == 1
        name = next(iter(request["cases"]))
        asked.append(name)
        if name == "base 512":
            return [], "code -6: out of memory"
        add(line := {"section": "base", "case": name, "board": "card"})
        return [line], ""

    asked, record = [], gpu.Record(None)
    monkeypatch.setattr(gpu, "run_worker", worker)
    cases = gpu.cases("base", False)
    for _ in range(2):
        assert gpu.measure("base", cases, "card", "chip", False, time.monotonic() + 60, record) == []
    assert asked == [*cases, "base 512"]
    assert list(gpu.missed_bars(record, {"card"})) == ["base: base 512 failed: code -6: out of memory"]
    assert record.lines["base", "base 128", "card"]["chip"] == "chip"


@pytest.mark.parametrize(
    ("seconds", "peak_bytes", "missed"),
    [
        (0.1, 10e9, []),
        (0.124, 9.1e9, []),
        (0.126, 10e9, ["seconds measured / predicted 1.260"]),
        (0.097, 10e9, ["seconds measured / predicted 0.970"]),
        (0.1, 11.1e9, ["peak_bytes measured / predicted 1.110"]),
        (0.1, 8.9e9, ["peak_bytes measured / predicted 0.890"]),
    ],
)
def test_measured_over_predicted_has_bars_and_a_row(gpu, seconds, peak_bytes, missed):
    record = gpu.Record(None)
    record.add({"section": "plan", "case": "base 128", "board": "H100 SXM", "seconds": 0.1, "peak_bytes": 10e9})
    measured = {"seconds": seconds, "peak_bytes": peak_bytes, "rows": 256, "length": 128, "mfu": 0.4}
    own = {"section": "base", "case": "base 128", "board": "card", "chip": "H100 SXM"}
    record.add(own | measured | {"tokens_per_second": 32768 / seconds})
    lines = list(gpu.missed_bars(record, {"card", "H100 SXM"}))
    assert len(lines) == len(missed) and all(one in line for one, line in zip(missed, lines, strict=True))
    row = list(gpu.tables(record))[-1]
    assert f"| {seconds * 1e3:.1f} ms, 100.0, {seconds / 0.1:.2f} |" in row
    assert f"| {peak_bytes / 1e9:.1f} GB, 10.0, {peak_bytes / 10e9:.2f} |" in row


@pytest.mark.parametrize("change", [{"good": False}, {"good": False, "bits_equal": False}])
def test_a_kernel_beyond_its_tolerance_is_missed(gpu, change):
    record = gpu.Record(None)
    line = {"section": "kernels", "case": "norm", "board": "card", "of_tolerance": 1.2, "bits_equal": True}
    record.add(line | {"difference": 1e-5, "good": True})
    assert not list(gpu.missed_bars(record, {"card"}))
    record.add(line | {"difference": 1e-5} | change)
    assert len(list(gpu.missed_bars(record, {"card"}))) == 1
