"""``benchmarks/evening.py`` with invented results: its recipes, how it continues, its verdict."""

import json
import sys
from types import SimpleNamespace

import pytest
from benchmark_modules import BENCHMARKS, load_benchmark

from bert_jax.config import PretrainConfig, load_config

PAIRS = 100


@pytest.fixture
def evening(monkeypatch):
    """The module of the command, which trains nothing. ``runs`` lists its runs, ``ahead`` is the lead of the
    evening in nats at the last point."""
    module = load_benchmark("evening", monkeypatch)
    module.runs, module.ahead = [], 1.5

    def pretrain(options, workdir):
        module.runs.append(workdir.name)
        for step in range(0, options["training.num_steps"] + 1, options.get("training.checkpoint_interval", 1000)):
            (workdir / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
        (workdir / "config.yaml").write_text(json.dumps(options, default=str))
        return {"seconds": 9.0, "step_seconds": 0.1}

    class HeldOut:
        unigram = 7.0

        def evaluate(self, workdir):
            options = json.loads((workdir / "config.yaml").read_text())
            (step,) = (int(path.name) for path in (workdir / "checkpoints").iterdir()) if "points" in str(
                workdir) else (0,)  # fmt: skip
            is_paper = options.get("optimizer.name") == "adamw"
            lead = module.ahead if step == 60 else 0.1
            loss = 5 - lead * (not is_paper) + 0.5 * (options["optimizer.learning_rate"] != 3e-3)
            return {"mlm_loss": loss, "mlm_accuracy": 0.2, "targets": 10}

    def score_pairs(model, pairs):
        right = 80 if "evening" in model.name else 60
        return [SimpleNamespace(correct=number < right) for number in range(PAIRS)]

    def score(task, part, texts, model, rate, seed, workdir):
        return {"score": 0.4 + 0.1 * (rate == 3e-3) + 0.1 * (part == "results")}

    monkeypatch.setattr(module, "pretrain", pretrain)
    monkeypatch.setattr(module, "score", score)
    monkeypatch.setattr(module, "score_pairs", score_pairs)
    monkeypatch.setattr(module, "read_pairs", lambda path, limit: None)
    monkeypatch.setattr(module, "load", lambda path: path)
    monkeypatch.setattr(module, "texts", lambda task, data, folder, seed: folder)
    monkeypatch.setattr(module.Text, "prepare", lambda self: None)
    monkeypatch.setattr(module.Text, "rows", lambda self, part, length: HeldOut())
    return module


def command(evening, monkeypatch, capsys, folder, *words):
    monkeypatch.setattr(sys, "argv", ["evening.py", "--folder", str(folder), "--data", "none", *words])
    code = evening.main()
    return code, [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]


def test_both_arms_are_recipes_of_one_size(evening):
    from small_runs import words_of

    base = ["--config", str(BENCHMARKS.parent / "configs/laptop_evening.yaml"), "--data.corpus", "x"]
    ours, paper = (load_config(PretrainConfig, [*base, *words_of(own)]) for own, _ in evening.ARMS.values())
    for name in ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "intermediate_size"):
        assert getattr(ours.model, name) == getattr(paper.model, name)
    assert ours.model.position_embeddings == "rotary" and paper.model.position_embeddings == "learned"
    assert paper.has_nsp and not ours.has_nsp and paper.optimizer.name == "adamw"
    assert ours.data.max_predictions == 26 and paper.data.max_predictions == 20


def test_it_continues_and_judges(evening, monkeypatch, capsys, tmp_path):
    words = ["--seconds", "6"]  # 60 steps
    code, rows = command(evening, monkeypatch, capsys, tmp_path, *words)
    assert code == 0 and len(evening.runs) == 2 * (1 + 3 + 1)
    assert "| 6 | 3.500 | 0.800 | 0.600 | 5.000 | 0.600 | 0.600 |" in rows
    assert rows[-1].startswith("| 6: evening - paper | -1.500 | +0.200 ± 0.040 | +0.000 |")
    lines = (tmp_path / "lines.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [line["step"] for line in found if line["key"].startswith("point/evening")] == [60, 50, 40, 30, 20, 10]
    assert {line["rate"] for line in found if line["key"].startswith("run/")} == {3e-3}
    # Rates of heads are chosen once for each arm.
    assert sum(line["key"].startswith("clinc150/rates") for line in found) == 2 * 3
    assert sum(line["key"].startswith("clinc150/results") for line in found) == 2 * 6
    (tmp_path / "lines.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    assert command(evening, monkeypatch, capsys, tmp_path, *words)[1] == rows and len(evening.runs) == 10


def test_a_small_lead_is_below_the_bar(evening, monkeypatch, capsys, tmp_path):
    evening.ahead = 0.9
    assert command(evening, monkeypatch, capsys, tmp_path, "--seconds", "6")[0] == 3


def test_paired_standard_error(evening):
    mean, error = evening.differences("1101", "0101")
    assert mean == 0.25 and error == pytest.approx(0.25)
