"""The commands, options, recipes and export formats of the project against a recorded list: additions are free, a
removal or a changed default is listed here with its reason."""

import argparse
import configparser
import contextlib
import importlib
import io
import json
import os
import re
from pathlib import Path

import pytest

from bert_jax import registry
from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.config import FinetuneConfig, PretrainConfig, RunOptions
from bert_jax.config.former import OWNERS
from bert_jax.config.loader import read_settings, show_help
from bert_jax.config.options import extended

REPOSITORY = Path(__file__).resolve().parents[1]
RECORDED = REPOSITORY / "tests" / "golden" / "offers.json"
# "command --option" or "command: option" as recorded -> its new name, or why it is gone or has another default.
RENAMED = {
    "generate model": "--model; the argument without a name, now called place, is still read",
    "run_finetune.py --class_weights": "follows from the records; still read from stored configs",
    "run_finetune.py --hard_negatives": "follows from the records; still read from stored configs",
    "run_finetune.py --input.mask_fraction": "none used it; loss.mlm_weight masks tokens and predicts them",
    "run_finetune.py --input.span_max": "none set it; spans of input.span_deletion have at most 5 words",
    "run_finetune.py --training.min_delta": "none set it; any improvement counts",
    "run_finetune.py --optimizer.learning_rate": "follows from the width of the model; a resumed run keeps its own",
    "run_finetune.py --training.log_interval": "follows from the number of steps; at most the former 50",
    "run_finetune.py --training.num_epochs": "follows from the number of records; a resumed run keeps its own",
}
RENAMED |= {
    f"run_finetune.py --{name}": "is of pretraining only; stored configs with its default are still read"
    for name in (
        "training.batch_ramp", "training.eval_batches", "training.eval_batch_size", "continue_from", "add_words",
        "vocab_slots", "extend_positions",
    )
}  # fmt: skip
_SPIKES = [name for name in OWNERS if name.startswith("training.spike_")]
_SPANS = ["data.span_mean", "data.span_max"]
RENAMED |= {
    f"{command} --{name}": f"is part of {OWNERS[name]}; still read"
    for command, names in {
        "run_pretrain.py": [*_SPANS, *_SPIKES], "run_finetune.py": _SPIKES, "vocab": _SPANS, "shards": _SPANS
    }.items()
    for name in names
}  # fmt: skip
VERDICTS = ["refused", "encoder only", "yes"]


def console_script(name):
    """The function behind a console command, by its entry in setup.cfg."""
    settings = configparser.ConfigParser()
    settings.read(REPOSITORY / "setup.cfg")
    target = re.search(rf"{name} = (\S+)", settings["options.entry_points"]["console_scripts"])[1]
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def options_of_help(text):
    """Option -> default and choices, from the help of a config: a line ``--NAME KIND  (default: VALUE)`` each."""
    lines = re.findall(r"^  (--\S+) (.*)  \(default: (.*)\)$", text, re.MULTILINE)
    return {
        name: {"default": default, "choices": kind.strip("{}").split(",") if kind.startswith("{") else None}
        for name, kind, default in lines
    }


def script_options(config_type, extra):
    """The options of a run, with those of the encoders and objectives that have sections of their own."""
    shown = {}
    for choice in ("", *(f"--model.encoder {name}" for name in registry.names("encoder_options"))):
        for objective in ("", *(f"--objective.name {name}" for name in registry.names("objective_options"))):
            if objective and config_type is not PretrainConfig:
                continue
            with contextlib.redirect_stdout(io.StringIO()) as out:
                show_help(config_type, read_settings(f"{choice} {objective}".split()), "", extra, whole=True)
            shown |= options_of_help(out.getvalue()) | shown
    return shown


def model_commands():
    """Subcommand of ``bert-jax`` -> option -> default and choices, from its parser."""
    parsers = []

    def keep(parser, *_, **__):
        parsers.append(parser)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", keep)
        console_script("bert-jax")([])
    (subparsers,) = (a for a in parsers[0]._actions if isinstance(a, argparse._SubParsersAction))
    return {
        command: {
            name: {
                "default": None if action.default is None else str(action.default),
                "choices": [str(choice) for choice in action.choices] if action.choices else None,
            }
            for action in parser._actions
            for name in action.option_strings or [action.dest]
        }
        for command, parser in subparsers.choices.items()
    }


def data_commands():
    """The same for ``bert-data``; its own flags are those that the usage text names."""
    main = console_script("bert-data")

    def printed(*words):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main([*words, "--help"]) == 0
        return out.getvalue()

    usage = printed()
    commands = re.findall(r"^  ([a-z]+)  +\S", usage, re.MULTILINE)
    flags = {name: {"default": None, "choices": None} for name in re.findall(r" (--[a-z_]+)\b", usage)}
    return {"of several commands": flags} | {name: options_of_help(printed(name)) for name in commands}


def offers():
    from bert_jax.interop.export_table import TABLE

    recipes = sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "configs").rglob("*.yaml"))
    return {
        "scripts": {
            "run_pretrain.py": script_options(PretrainConfig, extended(RunOptions)),
            "run_finetune.py": script_options(extended(FinetuneConfig), extended(FinetuneRunOptions)),
        },
        "bert-jax": model_commands(),
        "bert-data": data_commands(),
        "recipes": recipes,
        "formats": {row: dict(cells) for row, cells in TABLE.items()},
    }


@pytest.fixture(scope="module")
def current():
    found = offers()
    if os.environ.get("UPDATE_GOLDEN") == "1":
        RECORDED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return found


@pytest.fixture(scope="module")
def recorded(current):
    return json.loads(RECORDED.read_text())


@pytest.mark.parametrize("group", ["scripts", "bert-jax", "bert-data"])
def test_commands_and_options(group, recorded, current):
    """Every recorded command and option exists, with the same default and at least the same choices."""
    missing = []
    for command, options in recorded[group].items():
        assert command in current[group], f"{group}: no command {command}"
        for name, before in options.items():
            now = current[group][command].get(name)
            if f"{command} {name}" in RENAMED:
                continue
            if now is None:
                missing.append(f"{command} {name}")
            elif now["default"] != before["default"]:
                missing.append(f"{command} {name}: default {before['default']} is now {now['default']}")
            elif gone := set(before["choices"] or []) - set(now["choices"] or before["choices"] or []):
                missing.append(f"{command} {name}: without {', '.join(sorted(gone))}")
    assert not missing


def test_renamed_lists_only_recorded_options(recorded):
    known = {
        f"{command} {name}"
        for group in ("scripts", "bert-jax", "bert-data")
        for command, options in recorded[group].items()
        for name in options
    }
    assert set(RENAMED) <= known


def test_recipes(recorded, current):
    assert set(recorded["recipes"]) <= set(current["recipes"])


def test_formats_take_at_least_the_recorded_heads(recorded, current):
    worse = [
        f"{row} as {name}: {before} is now {current['formats'][row][name]}"
        for row, cells in recorded["formats"].items()
        for name, before in cells.items()
        if VERDICTS.index(current["formats"][row][name]) < VERDICTS.index(before)
    ]
    assert not worse
