"""Tables of the documentation are those that their commands print from the lines under docs/results."""

import json
from pathlib import Path

from benchmark_modules import load_benchmark

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_switches(monkeypatch):
    switches = load_benchmark("switches", monkeypatch)
    lines = switches.Lines(DOCS / "results" / "switches.jsonl")
    rows = switches.table(switches.Study(None, lines, 600), [0, 1, 2])
    page = (DOCS / "results.md").read_text(encoding="utf-8").splitlines()
    missing = [row for row in rows if row.startswith("|") and row not in page]
    assert len(rows) == 2 + 2 + 2 * len(switches.SWITCHES) and not missing
    assert not any(" - |" in row for row in rows)


def test_ablations(monkeypatch, tmp_path):
    ablations = load_benchmark("ablations", monkeypatch)
    (tmp_path / "lines.jsonl").write_bytes((DOCS / "results" / "ablations.jsonl").read_bytes())
    study = ablations.Finished(ablations.Text((), tmp_path, 0), None, 600)
    page = (DOCS / "results.md").read_text(encoding="utf-8").splitlines()
    for number, arms in ablations.TABLES.items():
        rows = ablations.table(study, number, [0, 1, 2])
        missing = [row for row in rows if row not in page]
        assert len(rows) == 2 + len(arms) and not missing
        without_runs = sum(not name for _, columns in arms.values() for name in columns)
        assert sum(row.count(" - |") for row in rows) == without_runs


def test_evening(monkeypatch):
    evening = load_benchmark("evening", monkeypatch)
    rows, _ = evening.table(evening.Lines(DOCS / "results" / "evening.jsonl"))
    page = (DOCS / "results.md").read_text(encoding="utf-8").splitlines()
    assert len(rows) >= 2 + evening.POINTS and not [row for row in rows if row not in page]


def test_small_models(monkeypatch):
    small = load_benchmark("small_models", monkeypatch)
    lines = [json.loads(line) for line in (DOCS / "results" / "small_models.jsonl").read_text().splitlines()]
    rows = small.table(lines)
    page = (DOCS / "small-models.md").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 2 + len(small.MODELS) * len(small.DTYPES) and small.is_good(lines)
    assert not [row for row in rows if row not in page]


def test_matryoshka(monkeypatch, tmp_path):
    matryoshka = load_benchmark("matryoshka", monkeypatch)
    (tmp_path / "lines.jsonl").write_bytes((DOCS / "results" / "matryoshka.jsonl").read_bytes())
    rows, _ = matryoshka.table(matryoshka.Study(None, None, tmp_path), [0, 1, 2])
    page = (DOCS / "results.md").read_text(encoding="utf-8").splitlines()
    measured = [line.rsplit(" | ", 1)[0] + " |" for line in page]  # without the column of the bars
    assert len(rows) == 2 + len(matryoshka.ARMS) * len(matryoshka.WIDTHS)
    assert not [row for row in rows[2:] if row not in measured]


def test_early_exit(monkeypatch):
    early_exit = load_benchmark("early_exit", monkeypatch)
    rows, good = early_exit.table(early_exit.Lines(DOCS / "results" / "early_exit.jsonl"), [0, 1, 2])
    page = (DOCS / "results.md").read_text(encoding="utf-8").splitlines()
    assert good and len(rows) == 6 + len(early_exit.ENTROPIES) + 5 and not [row for row in rows if row not in page]


def test_taught_tasks(monkeypatch, tmp_path):
    taught = load_benchmark("taught_tasks", monkeypatch)
    (tmp_path / "lines.jsonl").write_bytes((DOCS / "results" / "taught_tasks.jsonl").read_bytes())
    rows, _ = taught.table(taught.Study(None, None, tmp_path), [0, 1, 2, 3, 4])
    page = (DOCS / "results.md").read_text(encoding="utf-8").splitlines()
    tables = 2 + len(taught.TASKS), len(taught.TASKS) * (3 + 1 + len(taught.VARIANTS))
    assert len(rows) == sum(tables) and not [row for row in rows if row not in page]


def test_taught_encoder(monkeypatch):
    taught = load_benchmark("taught_encoder", monkeypatch)
    rows, good = taught.table(taught.Lines(DOCS / "results" / "taught_encoder.jsonl"), [0, 1, 2, 3, 4])
    page = (DOCS / "results.md").read_text(encoding="utf-8").splitlines()
    assert good and len(rows) == 2 + len(taught.BUDGETS) * len(taught.TASKS)
    assert not [row for row in rows if row not in page]
