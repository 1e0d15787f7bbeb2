"""``benchmarks/ablations.py`` with invented results: its arms, their rates, how it continues, its tables."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_modules import load_benchmark

from bert_jax.config import PretrainConfig, load_config


class HeldOut:
    unigram = 6.5

    def evaluate(self, workdir, of_input=None):
        """Loss 5, 0.1 more without sentence pairs, 0.5 more away from the rate 3e-3, and some for the seed; half of
        it for unchanged tokens, twice as much for [MASK]."""
        options = json.loads((workdir / "options.json").read_text())
        loss = 5 + 0.1 * (options["data.next_sentence"] == "none") + 0.01 * options["training.seed"] ** 2
        loss += 0.5 * (options["optimizer.learning_rate"] != 3e-3)
        name = "lm_loss" if options.get("objective.name") == "causal_lm" else "mlm_loss"
        factor = {None: 1, "mask": 2, "unchanged": 0.5}[of_input]
        return {name: factor * (loss + 0.6 * (name == "lm_loss"))}


@pytest.fixture
def ablations(monkeypatch):
    """The module of the command, which trains nothing; ``pretrained`` and ``tuned`` list its runs."""
    module = load_benchmark("ablations", monkeypatch)
    module.pretrained, module.tuned = [], []

    def pretrain(options, workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "options.json").write_text(json.dumps(options, default=str))
        (workdir / "report.html").touch()
        module.pretrained.append(workdir.name)
        return {"seconds": 1.0, "step_seconds": 0.1}

    def score(task, part, texts, model, rate, seed, workdir):
        assert model.is_dir() and (texts / "done").exists()
        module.tuned.append((model.name, task, part, rate))
        return {"score": 0.8 - 0.1 * ("no_pairs" in model.name) - 0.2 * (rate != 1e-3) + 0.002 * seed, "n": 3}

    monkeypatch.setattr(module, "pretrain", pretrain)
    monkeypatch.setattr(module, "score", score)
    monkeypatch.setattr(module.Text, "prepare", lambda self: None)
    monkeypatch.setattr(module.Text, "rows", lambda self, part, length: HeldOut())
    write = lambda data, folder, seed: None  # noqa: E731
    for name, task in module.TASKS.items():
        monkeypatch.setitem(
            module.TASKS, name, module.SmallTask(task.recipe, write, *list(vars(task).values())[2:])
        )
    return module


def command(ablations, monkeypatch, capsys, folder, *words, code=0):
    monkeypatch.setattr(sys, "argv", ["ablations.py", "--folder", str(folder), *words])
    assert ablations.main() == code
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]


def test_every_arm_is_a_valid_recipe(ablations):
    from small_runs import words_of

    for changes in ablations.ARMS.values():
        config = load_config(PretrainConfig, words_of(ablations.BASE | changes | {"data.shards": "none"}))
        assert config.model.head_size == 64
        assert config.optimizer.name == "muon" and config.model.position_embeddings == "rotary"
    arms = {arm for rows in ablations.TABLES.values() for arm, _ in rows.values()}
    tasks = {name for rows in ablations.TABLES.values() for _, names in rows.values() for name in names if name}
    assert arms == set(ablations.ARMS) and tasks == {*ablations.TASKS, *ablations.INPUTS}


def test_it_continues_and_shows_paired_differences(ablations, monkeypatch, capsys, tmp_path):
    words = ["--data", str(tmp_path), "--tables", "5", "--seeds"]
    rows = command(ablations, monkeypatch, capsys, tmp_path / "out", *words, "0", "1")
    # Three arms and drawn weights, which need no rate; the BiLSTM has no run of its own.
    assert len(ablations.pretrained) == 3 * (3 + 2) + 2
    assert len(ablations.tuned) == 13 * (3 + 2)
    assert {name for name, _, part, _ in ablations.tuned if part == "rates"} == {
        "results-pairs-1500-0-0.003", "results-no_pairs-1500-0-0.003", "results-left_to_right-1500-0-0.003",
        "results-drawn_weights-1-0-1e-12",
    }  # fmt: skip
    assert rows[2].startswith("| pairs | 2 | 5.005 | 0.801 | 0.801 | 0.801 |")
    assert rows[3].startswith("| no pairs | 2 | 5.105 (+0.100 ± 0.000) | 0.701 (-0.100 ± 0.000)")
    assert rows[4].startswith("| left to right, no pairs | 2 | 5.705* | 0.801 (+0.000 ± 0.000)")
    assert rows[5].startswith("| + BiLSTM | 2 | 5.705* | - | - | 0.801 (+0.000 ± 0.000) |")
    assert rows[6].startswith("| drawn weights | 2 | 5.605* (+0.600 ± 0.000) | 0.801 (+0.000 ± 0.000)")
    assert command(ablations, monkeypatch, capsys, tmp_path / "out", *words, "0", "1") == rows
    assert (
        command(ablations, monkeypatch, capsys, tmp_path / "out", "--show", "--tables", "5", "--seeds", "0", "1")
        == rows
    )
    assert len(ablations.pretrained) == 17 and len(ablations.tuned) == 65


def test_unfinished_tables(ablations, monkeypatch, capsys, tmp_path):
    rows = command(ablations, monkeypatch, capsys, tmp_path / "out", "--tables", "6", "--seeds", "0")
    assert len(ablations.pretrained) == 4 * (3 + 1) and not ablations.tuned
    assert rows[2:] == [
        "| 2 layers of 64 | 1 | 5.100 |", "| 2 layers of 128 | 1 | 5.100 (+0.000) |",
        "| 4 layers of 128 | 1 | 5.100 (+0.000) |", "| 4 layers of 256 | 1 | 5.100 (+0.000) |",
    ]  # fmt: skip
    rows = command(ablations, monkeypatch, capsys, tmp_path / "out", "--show", "--tables", "8", code=3)
    assert rows[2] == "| 80, 10, 10 | 1 | 5.100 | - | - | - | - | - |"
    assert rows[3] == "| 100, 0, 0 | 0 | - | - | - | - | - | - |"


def test_losses_of_the_shares_by_what_stands_in_the_row(ablations, monkeypatch, capsys, tmp_path):
    words = ["--data", str(tmp_path), "--tables", "8", "--seeds", "0"]
    rows = command(ablations, monkeypatch, capsys, tmp_path / "out", *words)
    assert rows[0].startswith("| table 8 | seeds | held-out loss | of [MASK] | of unchanged | sick |")
    assert rows[2].startswith("| 80, 10, 10 | 1 | 5.100 | 10.200 | 2.550 | 0.700 |")
    assert rows[6].startswith("| drawn weights | 1 | 5.600* (+0.500) | 11.200 (+1.000) | 2.800 (+0.250) |")
    shown = command(ablations, monkeypatch, capsys, tmp_path / "out", "--show", *words)
    assert shown == rows and len(rows) == 2 + 5


def test_the_predictions_of_what_stands_in_the_row(ablations):
    rows = object.__new__(ablations.Rows)  # without a text
    rows.tokenizer = SimpleNamespace(mask_id=4)
    batch = {
        "input_ids": np.array([[2, 4, 7, 9, 4, 3]]), "mlm_positions": np.array([[1, 2, 3, 0]]),
        "mlm_labels": np.array([[8, 7, 6, 0]]), "mlm_weights": np.array([[1.0, 1.0, 1.0, 0.0]]),
    }  # fmt: skip
    chosen = {name: rows.of_input(batch, name)["mlm_weights"].tolist() for name in ("mask", "unchanged", "random")}
    assert chosen == {"mask": [[1, 0, 0, 0]], "unchanged": [[0, 1, 0, 0]], "random": [[0, 0, 1, 0]]}


def test_another_machine_trains_the_models_that_a_task_needs(ablations, monkeypatch, capsys, tmp_path):
    words = ["--data", str(tmp_path), "--tables", "5", "--seeds", "0"]
    rows = command(ablations, monkeypatch, capsys, tmp_path / "a", *words)
    count = len(ablations.pretrained)
    lines = (tmp_path / "a" / "lines.jsonl").read_text().splitlines(keepends=True)
    lacking = [line for line in lines if '"results/no pairs/1500/sst2/' not in line]
    (tmp_path / "b/runs/results-no_pairs-1500-0-0.003").mkdir(parents=True)  # of a run that was killed
    (tmp_path / "b" / "lines.jsonl").write_text("".join(lacking))
    assert command(ablations, monkeypatch, capsys, tmp_path / "b", *words) == rows
    assert len(lacking) == len(lines) - 1
    assert ablations.pretrained[count:] == ["results-no_pairs-1500-0-0.003"]
