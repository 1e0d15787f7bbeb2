"""``benchmarks/story.py`` with invented results: its recipes, its units, how it continues, its tables."""

import json
import sys

import pytest
from benchmark_modules import load_benchmark

from bert_jax.config import PretrainConfig, load_config
from bert_jax.config.finetune import FinetuneConfig


@pytest.fixture
def story(monkeypatch):
    """The module of the command, whose units run in this process and train nothing; ``runs`` lists them."""
    module = load_benchmark("story", monkeypatch)
    module.runs = []

    def pretrain(options, workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        module.runs.append((workdir.name, options["training.num_steps"]))
        loss = 7.0 if "bert" in workdir.name else 4.0  # BERT learns nothing
        loss += 0.5 * (options.get("optimizer.learning_rate") != 3e-3) if "modern" in workdir.name else 0
        evaluation = {"split": "eval", "loss": loss, "unigram_cross_entropy": 6.5}
        (workdir / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n" + json.dumps(evaluation))
        return {"seconds": 9.0, "step_seconds": 0.1 if "skip_gram" in workdir.name else 0.2}

    def score(task, part, texts, model, rate, seed, workdir):
        module.runs.append((workdir.name, rate))
        is_frozen = "features.frozen_encoder" in task.options
        return {"score": 0.5 + 0.2 * ("modern" in model.name) - 0.1 * is_frozen - 0.1 * (rate not in (3e-3, 9e-3))}

    measured = {"score": 0.6, "layers": [0.5, 0.6]}
    for name in ("minimal_pairs", "parts_of_speech", "similarity"):
        monkeypatch.setattr(module, name, lambda model, data: measured)
    module.static = 0.5
    monkeypatch.setattr(
        module,
        "senses",
        lambda model, data: measured | ({"score": module.static} if "skip_gram" in model.name else {}),
    )
    monkeypatch.setattr(module, "pretrain", pretrain)
    monkeypatch.setattr(module, "score", score)
    monkeypatch.setattr(module, "texts", lambda task, data, folder, seed: folder)
    monkeypatch.setattr(module.Story, "prepare", lambda self, seeds: None)
    monkeypatch.setattr(module, "run_units", lambda names, words, workers, folder: module.units(names, words))

    def units(names, words):
        given = sys.argv
        for name in names:
            monkeypatch.setattr(sys, "argv", ["story.py", *words, "--unit", name])
            assert module.main() == 0
        monkeypatch.setattr(sys, "argv", given)

    module.units = units
    return module


def test_every_model_of_the_story_has_the_positions_that_its_tasks_read(story):
    """The commands of the units are refused otherwise, after the pretraining."""
    for system in story.SYSTEMS.values():
        pretraining = load_config(
            PretrainConfig, ["--config", str(story.REPOSITORY / f"configs/story/{system.recipe}.yaml")]
        )
        for task in story.TASKS.values():
            recipe = story.REPOSITORY / f"configs/finetune/{task.task.recipe}.yaml"
            finetuning = load_config(FinetuneConfig, ["--config", str(recipe)])
            assert finetuning.task.max_length <= pretraining.model.max_position_embeddings, (system, task)


def command(story, monkeypatch, folder, *words):
    systems = ["skip_gram", "bert", "modern", "drawn modern"]
    given = ["--folder", str(folder), "--data", "none", "--seconds", "100", "--systems", *systems, *words]
    monkeypatch.setattr(sys, "argv", ["story.py", *given])
    return story.main()


def tables(capsys):
    return "\n".join(line for line in capsys.readouterr().out.splitlines() if not line.startswith("{"))


def test_every_system_is_a_recipe(story, tmp_path):
    from small_runs import words_of
    from story_table import LANGUAGE_MODELS, STEPS, SYSTEMS

    of = story.Story(tmp_path, story.Text((), tmp_path / "text", story.VOCABULARY), None, 1.0)
    for name, system in story.SYSTEMS.items():
        config = load_config(PretrainConfig, words_of(of.options(system)))
        assert (config.model.encoder == "none") == (not system.has_context), name
        assert config.has_nsp == (system.shards == "pairs") and name in SYSTEMS
        if system.has_context and not system.drawn:
            assert name in LANGUAGE_MODELS and len(system.rates) == 3
    assert {name for step in STEPS for name in step} <= set(story.SYSTEMS)


def test_equal_seconds_and_equal_tokens(story, monkeypatch, capsys, tmp_path):
    command(story, monkeypatch, tmp_path, "--seeds", "0")
    steps = dict(story.runs)
    assert steps["seconds-skip_gram-0"] == 1000 and steps["seconds-modern-0"] == 500
    assert steps["rates-modern-0.001"] == 500 // story.RATE_SHARE
    assert steps["seconds-drawn_modern-0"] == 1
    # 500 steps of 64 rows of 64 tokens; skip-gram has 32 rows of 128.
    assert steps["tokens-skip_gram-0"] == 500 * 64 * 64 / (32 * 128)
    found = json.loads((tmp_path / "lines" / "seconds-0-modern.jsonl").read_text().splitlines()[0])
    assert found["rate"] == 3e-3 and found["tokens"] == 500 * 64 * 64


def test_it_continues_and_compares(story, monkeypatch, capsys, tmp_path):
    assert command(story, monkeypatch, tmp_path, "--seeds", "0", "1") == 0
    printed = tables(capsys)
    (bert,) = (line for line in printed.splitlines() if line.startswith("| bert | 2 |"))
    assert "| 7.000 ± 0.000* |" in bert  # not 1 nat under 6.5
    (modern,) = (line for line in printed.splitlines() if line.startswith("| modern | 2 |"))
    assert "| 4.000 ± 0.000 |" in modern
    assert "| 100 |" in modern  # 500 steps of 0.2 s; their command took 9 s
    (step,) = (line for line in printed.splitlines() if line.startswith("| modern - bert |"))
    assert step.count("+0.200 ± 0.000") == 6 and "- drawn vectors" not in printed
    assert (tmp_path / "story.png").stat().st_size > 10_000
    count = len(story.runs)
    path = tmp_path / "lines" / "seconds-1-bert.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]) + '{"key": "cut')
    assert command(story, monkeypatch, tmp_path, "--seeds", "0", "1", "--table") == 3  # a result is missing
    assert "1 of 96 results are missing, first task/results/" in capsys.readouterr().err
    assert command(story, monkeypatch, tmp_path, "--seeds", "0", "1") == 0
    # The model of the run whose line was cut is continued, and the run is made.
    assert [name for name, _ in story.runs[count:]] == ["seconds-bert-1", "task-results-stsb-tuned-seconds-bert-1"]
    assert tables(capsys) == printed


def test_another_machine_makes_what_the_output_lacks(story, monkeypatch, capsys, tmp_path):
    output = tmp_path / "all.jsonl"
    words = ("--seeds", "0", "1", "--output", str(output))
    assert command(story, monkeypatch, tmp_path / "a", *words) == 0
    printed, count = tables(capsys), len(story.runs)
    assert command(story, monkeypatch, tmp_path / "b", *words) == 0
    assert len(story.runs) == count and tables(capsys) == printed
    lines = output.read_text().splitlines(keepends=True)
    lacking = [line for line in lines if '"task/results/sst2/frozen/seconds/modern/0"' not in line]
    assert len(lacking) == len(lines) - 1
    output.write_text("".join(lacking))
    assert command(story, monkeypatch, tmp_path / "b", *words) == 0
    assert story.runs[count:] == [
        ("seconds-modern-0", 500), ("task-results-sst2-frozen-seconds-modern-0", 3e-3),
    ]  # fmt: skip
    assert tables(capsys) == printed and len(output.read_text().splitlines()) == len(lines)


def test_options_of_tasks(story):
    slots, intents = story.TASKS["snips"], story.TASKS["clinc150"]
    options = {
        (way, has_context): slots.of(way, has_context=has_context).options
        for way in ("frozen", "tuned") for has_context in (True, False)
    }  # fmt: skip
    # Word vectors have no context of their own, so the task's BiLSTM stays when they are tuned.
    assert {key for key, own in options.items() if own.get("features.bilstm_size") == 128} == {
        ("frozen", True), ("frozen", False), ("tuned", False),
    }  # fmt: skip
    assert {key for key, own in options.items() if "features.frozen_encoder" in own} == {
        ("frozen", True), ("frozen", False),
    }  # fmt: skip
    assert "features.bilstm_size" not in intents.of("frozen", has_context=False).options
    assert slots.of("frozen", has_layers=True).options["features.layers"] == "weighted_with_embeddings"
    assert not any("features.layers" in own for own in options.values())
    assert [name for name, system in story.SYSTEMS.items() if not system.has_context] == [
        "cbow", "skip_gram", "glove", "drawn vectors",
    ]  # fmt: skip


def test_contextual_vectors_must_be_ahead(story, monkeypatch, capsys, tmp_path):
    story.static = 0.6
    assert command(story, monkeypatch, tmp_path, "--seeds", "0", "1") == 3
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1] == "senses: modern - skip_gram +0.000, standard error 0.000"
    assert not any("bert - skip_gram" in line for line in errors)  # BERT does not count as trained
