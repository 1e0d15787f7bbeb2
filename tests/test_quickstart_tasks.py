"""``benchmarks/quickstart_tasks.py`` with invented scores: its texts, its rates, how it continues, its verdict."""

import json
import sys
from pathlib import Path

import pytest
from benchmark_modules import load_benchmark


@pytest.fixture
def data(tmp_path):
    """Task files of 2 intents, 1,000 slot texts and 800 pairs."""
    clinc, snips, stsb = (tmp_path / "data" / name for name in ("clinc150", "intent_slot/snips", "glue/STS-B"))
    for folder in (clinc, snips / "train", snips / "valid", stsb):
        folder.mkdir(parents=True)
    rows = [[f"text {number}", f"intent {number % 2}"] for number in range(60)]
    (clinc / "data_full.json").write_text(json.dumps({"train": rows, "val": rows[:4], "test": rows[:6]}))
    for split, count in (("train", 1000), ("valid", 5)):
        for name in ("seq.in", "seq.out", "label"):
            (snips / split / name).write_text("".join(f"{name} {number}\n" for number in range(count)))
    (stsb / "train.tsv").write_text("index\n" + "".join(f"{number}\n" for number in range(800)))
    (stsb / "dev.tsv").write_text("index\n0\n")
    return tmp_path / "data"


@pytest.fixture
def tasks(monkeypatch):
    """The module of the command, whose runs score 0.5 pretrained and 0.3 drawn at rate 1e-3, else 0.1 less."""
    module = load_benchmark("quickstart_tasks", monkeypatch)
    module.runs = []

    def command(script, options, workdir):
        workdir.mkdir(parents=True)
        if script == "run_pretrain.py":
            return 1.0
        module.runs.append(workdir.name)
        score = 0.3 if "drawn" in str(options["init_from"]) else 0.5
        score += 0.001 * options["training.seed"] * (score == 0.5) - 0.1 * (
            options["optimizer.learning_rate"] != 1e-3
        )
        metrics = {name: {"value": score} for name in ("accuracy", "slot_f1", "spearman")}
        (workdir / "metrics.json").write_text(json.dumps([{"n": 7, "metrics": metrics}]))
        return 1.0

    monkeypatch.setattr(module, "command", command)
    monkeypatch.setattr(sys.modules["small_tasks"], "command", command)
    return module


def test_texts(tasks, data, tmp_path):
    study = tasks.Study(Path("model"), data, tmp_path / "out")
    splits = json.loads((study.files("clinc150", 3) / "texts.json").read_text())
    assert len(splits["train"]) == 2 * tasks.OF_INTENT == len({text for text, _ in splits["train"]})
    assert (len(splits["rates"]), len(splits["results"])) == (4, 6)
    slots = study.files("snips", 3)
    texts = {
        part: [(slots / part / name).read_text().splitlines() for name in ("seq.in", "seq.out", "label")]
        for part in ("train", "rates", "results")
    }
    assert [len(names[0]) for names in texts.values()] == [200, 700, 5]
    for names in texts.values():
        assert len({tuple(line.split()[1] for line in lines) for lines in names}) == 1  # the files stay parallel
    assert not set(texts["train"][0]) & set(texts["rates"][0])
    pairs = study.files("stsb", 3)
    assert [len((pairs / f"{part}.tsv").read_text().splitlines()) for part in ("train", "rates")] == [101, 701]


def test_it_continues_and_judges(tasks, data, tmp_path, monkeypatch, capsys):
    words = ["--model", "model", "--data", data, "--folder", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["quickstart_tasks.py", *map(str, words), "--seeds", "0", "1"])
    assert tasks.main() == 0
    assert len(tasks.runs) == 3 * 2 * (3 + 2)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| clinc150")]
    assert rows[0].startswith("| clinc150 | 2 | 0.500 | 0.300 | +0.201 ±")
    assert tasks.main() == 0 and len(tasks.runs) == 30
    monkeypatch.setattr(sys, "argv", ["quickstart_tasks.py", *map(str, words), "--seeds", "0", "--table"])
    assert tasks.main() == 3  # one seed has no standard error
