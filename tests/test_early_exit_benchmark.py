"""``benchmarks/early_exit.py``: early exit beside a smaller network at the same cost, from invented lines."""

import pytest
from benchmark_modules import load_benchmark


def point(layers, accuracy):
    return {"entropy": None if layers == 6 else 0.1, "layers": layers, "accuracy": accuracy, "seconds": 2 * layers}


@pytest.mark.parametrize(
    "layers, last", [(2.0, "| layers | 1 | +0.030 |"), (4.0, "| layers | 0 | early exit costs at least 4.00 |")]
)
def test_no_difference_where_every_threshold_costs_more(monkeypatch, tmp_path, layers, last):
    early_exit = load_benchmark("early_exit", monkeypatch)
    lines = early_exit.Lines(tmp_path / "lines.jsonl")
    lines.add(
        {"key": "results/0", "exits": [point(6, 0.94), point(layers, 0.90 if layers == 2 else 0.92)],
         "teacher": point(6, 0.94), "three": point(3, 0.87), "taught": point(3, 0.88)}
    )  # fmt: skip
    rows, good = early_exit.table(lines, [0, 1])
    assert last in rows and not good
