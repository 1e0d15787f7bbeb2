"""Every recipe under configs/: loads, is headed, and resolves to the stored config."""

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from bert_jax.config import RunOptions
from bert_jax.config.loader import build_config, dump_yaml, take_options
from bert_jax.config.pretrain import PretrainConfig
from bert_jax.model.flops import training_flops_per_sequence
from bert_jax.optim import make_schedule

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIGS = REPOSITORY / "configs"
GOLDEN = REPOSITORY / "tests" / "golden" / "configs"
RECIPES = sorted(
    path.relative_to(CONFIGS).as_posix()
    for folder in (CONFIGS, CONFIGS / "distil", CONFIGS / "story")
    for path in folder.glob("*.yaml")
)


def header(name):
    """The comment block at the head of a recipe, without the comment signs."""
    lines = (CONFIGS / name).read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line[1:].removeprefix(" ") for line in lines[:end])


def commands(name):
    """Arguments of every run_pretrain.py command in the header."""
    text = header(name).replace("\\\n", " ")
    found = re.findall(r"^ *python run_pretrain\.py (.*)$", text, re.MULTILINE)
    return [shlex.split(line) for line in found]


def resolve(arguments):
    _, rest = take_options(RunOptions, arguments)
    return build_config(PretrainConfig, rest.all)


# Golden file -> arguments: each recipe alone, and each further command of its header.
CASES = {name.removesuffix(".yaml"): ["--config", f"configs/{name}"] for name in RECIPES} | {
    f"{name.removesuffix('.yaml')}.command{number}": arguments
    for name in RECIPES
    for number, arguments in enumerate(commands(name)[1:], start=2)
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_resolved_config(case):
    """UPDATE_GOLDEN=1 writes the stored configs anew."""
    text = dump_yaml(resolve(CASES[case]))
    path = GOLDEN / f"{case}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"no {path}: run with UPDATE_GOLDEN=1"
    assert text == path.read_text(), "the resolved config changed: if meant so, run with UPDATE_GOLDEN=1"


def test_no_stored_config_without_a_recipe():
    stored = {path.relative_to(GOLDEN).as_posix().removesuffix(".yaml") for path in GOLDEN.rglob("*.yaml")}
    assert stored == set(CASES)


@pytest.mark.parametrize("name", RECIPES)
def test_header_names_command_hardware_time_and_result(name):
    text = header(name)
    assert any(f"configs/{name}" in words for words in commands(name)), "the header lacks the command"
    for word in ("Hardware:", "Time:", "Result:"):
        assert re.search(rf"^{word}", text, re.MULTILINE), f"the header lacks {word}"


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", RECIPES)
def test_values_stand_in_the_order_of_the_schema(name):
    given = yaml.safe_load((CONFIGS / name).read_text())
    full = yaml.safe_load(dump_yaml(resolve(["--config", f"configs/{name}"])))
    assert list(given) == [section for section in full if section in given]
    for section, values in given.items():
        assert list(values) == [key for key in full[section] if key in values]


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        ("tiny", (2, 128, 2, 512)),
        ("mini", (4, 256, 4, 1024)),
        ("small", (4, 512, 8, 2048)),
        ("medium", (8, 512, 8, 2048)),
    ],
)
def test_small_sizes(size, flags):
    match = re.search(rf"^ +{size} +(--.*)$", header("bert_small_family.yaml"), re.MULTILINE)
    overrides = shlex.split(match[1]) if match else []
    assert bool(overrides) == (size != "small")  # the file itself is small
    model = resolve(["--config", "configs/bert_small_family.yaml", *overrides]).model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.intermediate_size) == flags


def two_phases(case_1, case_2):
    first, second = resolve(CASES[case_1]), resolve(CASES[case_2])
    assert first.model == second.model
    assert first.optimizer == second.optimizer
    assert second.training.num_steps == second.optimizer.decay_steps > first.training.num_steps
    assert (first.data.seq_length, second.data.seq_length) == (128, 512)
    # Vocabulary and tokenized text of the first phase are used again.
    assert second.data.vocab == f"{first.data.shards}/vocab.txt"
    assert second.data.token_store == f"{first.data.shards}/store"
    assert second.data.shards != first.data.shards
    return first, second


@pytest.mark.parametrize(
    ("case_1", "case_2"),
    [
        ("bert_base_phase1", "bert_base_phase2"),
        ("bert_large", "bert_large.command2"),
        ("bert_small_family", "bert_small_family.command2"),
    ],
)
def test_the_papers_two_phases(case_1, case_2):
    first, second = two_phases(case_1, case_2)
    assert first.training.num_steps / second.training.num_steps == 0.9
    assert first.training.global_batch_size == second.training.global_batch_size == 256
    schedule_1 = make_schedule(first.optimizer, first.training.num_steps)
    schedule_2 = make_schedule(second.optimizer, second.training.num_steps)
    assert float(schedule_1(5000)) == pytest.approx(0.5e-4)
    assert float(schedule_1(900_000)) == float(schedule_2(900_000)) == pytest.approx(1e-5)


def test_lambs_two_phases():
    first, second = two_phases("bert_large_lamb", "bert_large_lamb.command2")
    assert (first.training.num_steps, second.training.num_steps) == (7038, 8599)
    assert (first.training.global_batch_size, second.training.global_batch_size) == (65_536, 32_768)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("cases", "flop"),
    [
        (["bert_base_phase1"], ["1.6e19"]),
        (["bert_base_phase2"], ["7.7e18"]),
        (["bert_large", "bert_large.command2"], ["5.5e19", "2.6e19"]),
        (["bert_large_lamb", "bert_large_lamb.command2"], ["1.1e20", "5.2e19"]),
    ],
)
def test_stated_flop(cases, flop):
    """The FLOP in the header are those of the formula."""
    stated = re.search(r"^Time: +(.*) FLOP by formula", header(f"{cases[0]}.yaml"), re.MULTILINE)[1]
    assert stated.split(" and ") == flop
    done = 900_000 if cases == ["bert_base_phase2"] else 0
    for case, expected in zip(cases, flop, strict=True):
        config = resolve(CASES[case])
        per_sequence = training_flops_per_sequence(
            config.model, seq_length=config.data.seq_length, max_predictions=config.data.max_predictions
        )
        total = per_sequence * config.training.global_batch_size * (config.training.num_steps - done)
        assert f"{total:.1e}".replace("+", "") == expected
        done = config.training.num_steps
