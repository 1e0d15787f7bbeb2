"""The help of the commands: ``bert-jax --help`` in groups, and an example in the help of every command that the
command itself accepts."""

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
from command_lines import DATA_WORK, check_command

from bert_jax import registry
from bert_jax.commands import data, main
from bert_jax.commands.options import Group

REPOSITORY = Path(__file__).resolve().parents[3]
NAMES = [*(one.name for one in main.COMMANDS), *registry.names("commands")]


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


@pytest.mark.parametrize("name", [*NAMES, "pretrain", "finetune"])
def test_the_example_of_a_command(name, capsys):
    (words,) = examples(shown(capsys, name).partition("\nexample:\n")[2], f"bert-jax {name}")
    check_command([name, *words])


@pytest.mark.parametrize("name", DATA_WORK)
def test_the_examples_of_a_data_command(name, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    of_command = examples(shown(capsys, "data", name), f"bert-jax data {name}")
    assert of_command == examples(shown(capsys, "data"), f"bert-jax data {name}") != []
    for words in of_command:
        check_command(["data", name, *(word.replace("RECIPE", "configs/quickstart.yaml") for word in words)])


def test_every_data_command_is_checked():
    assert {*DATA_WORK} == {*data._own(), *registry.names("data_commands")}


def test_a_misspelled_option_has_a_hint(capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["cluster", "--input", "x", "--cluster_count", "3", "--modle", "y"])
    err = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and "unrecognized arguments: --cluster_count" in err
        and "did you mean '--clust" in err
    )


def test_an_unknown_option_before_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["--outptu", "report", "runs/x"])
    assert ended.value.code == 2 and "--outptu; did you mean '--output'?" in capsys.readouterr().err


def test_the_narrowest_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1")
    assert "bert-jax report runs/quickstart" in shown(capsys, "report")
