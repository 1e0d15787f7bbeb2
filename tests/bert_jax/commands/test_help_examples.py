"""The help of the commands: ``bert-jax --help`` in groups, and an example in the help of every command that the
command itself accepts."""

import importlib
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from bert_jax import registry
from bert_jax.commands import data, main
from bert_jax.commands.options import Group
from bert_jax.config import FinetuneConfig, PretrainConfig, RunOptions
from bert_jax.config.loader import build_config, take_options
from bert_jax.config.options import extended

REPOSITORY = Path(__file__).resolve().parents[3]
TRUNK = [one.name for one in main.COMMANDS]
NAMES = [*TRUNK, *registry.names("commands")]
# Command of bert-data -> what its work is done by, "module:function".
WORK = {
    "vocab": "data_pipeline.build.vocabulary:ensure_vocabulary",
    "shards": "data_pipeline.build.ensure:ensure_data",
    "index": "data_pipeline.shards.shard_files:index_folder",
    "inspect": "data_pipeline.build.inspection:inspect",
    "records": "data_pipeline.tasks:read_named",
    "clean": "data_pipeline.contrib.clean.run:clean",
    "wikipedia": "data_pipeline.contrib.wikipedia.extract:extract_wikipedia",
}


def shown(capsys, *words):
    """The help that ``bert-jax WORDS --help`` prints."""
    try:
        assert main.main([*words, "--help"]) == 0
    except SystemExit as ended:
        assert ended.code == 0
    return capsys.readouterr().out


def examples(text, program):
    """The arguments of the examples of ``program`` in a help text, without optional parts in brackets."""
    lines = re.findall(rf"^ +{program} (\S.*)$", text, re.MULTILINE)
    return [shlex.split(re.sub(r"\[.*\]", "", line)) for line in lines]


def test_the_commands_are_in_four_groups(capsys):
    text = shown(capsys).partition("\n\noptions:")[0]
    groups = [re.match(r"(.+):\n", part) for part in text.split("\n\n")[2:]]
    assert [found[1] for found in groups] == list(get_args(Group)) and len(groups) == 4
    listed = re.findall(r"^  ([a-z]\S*) ", text, re.MULTILINE)
    assert sorted(listed) == sorted([*main.PROGRAMS, *NAMES])


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_command(name, capsys):
    text = shown(capsys, name)
    (words,) = examples(text.partition("\nexample:\n")[2], f"bert-jax {name}")
    assert main._parsed([name, *words]).command == name


@pytest.mark.parametrize(
    ("name", "options", "config"),
    [
        ("pretrain", RunOptions, PretrainConfig),
        ("finetune", extended(RunOptions), extended(FinetuneConfig)),
    ],
)
def test_the_example_of_training(name, options, config, capsys):
    (words,) = examples(shown(capsys, name), f"bert-jax {name}")
    run, settings = take_options(options, words)
    assert build_config(config, settings.all).data and run.config


def test_the_examples_of_data_commands(capsys, monkeypatch):
    assert {*WORK} == {*data._own(), *registry.names("data_commands")}
    monkeypatch.chdir(REPOSITORY)

    class Parsed(Exception):
        """The work of a command was called."""

    def work(*_, **__):
        raise Parsed

    for name, target in WORK.items():
        module, _, function = target.partition(":")
        monkeypatch.setattr(importlib.import_module(module), function, work)
        of_command = examples(shown(capsys, "data", name), f"bert-jax data {name}")
        assert of_command, name
        for words in of_command:
            with pytest.raises(Parsed):
                data._run(name, [word.replace("RECIPE", "configs/quickstart.yaml") for word in words], "bert-data")
    text = shown(capsys, "data")
    assert all(examples(text, f"bert-jax data {name}") for name in WORK)


def test_a_misspelled_option_has_a_hint(capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["cluster", "--input", "x", "--cluster_count", "3", "--modle", "y"])
    err = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and "unrecognized arguments: --cluster_count" in err
        and "did you mean '--clust" in err
    )
