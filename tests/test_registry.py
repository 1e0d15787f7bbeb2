"""Parts found by name: rooms of contrib, packages of others, and the trunk without any room."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from command import MAIN_OF_A_COPY

from bert_jax import registry

REPOSITORY = Path(__file__).resolve().parents[1]
COMMAND = """
from bert_jax.commands.options import Command, option

def shout(arguments):
    "Print a word in capitals."
    print(arguments.word.upper())

COMMANDS = (Command("shout", "a word in capitals", shout, (option("word"),)),)
"""


def run(folders, *words):
    """Exit code, standard output and standard error of ``bert-jax`` with these folders in front of all others."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-P", "-c", MAIN_OF_A_COPY, *words]
    done = subprocess.run(command, cwd=folders[-1], env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def package(folder, name, entry):
    """An installed package, as pip leaves it, with a module ``others`` and one entry point."""
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[bert_jax.commands]\n{entry} = others:COMMANDS\n")
    (folder / "others.py").write_text(COMMAND)
    return folder


def test_every_name_of_a_room_can_be_loaded():
    for kind in get_args(registry.Kind):
        assert registry.names(kind)
        for name in registry.names(kind):
            assert registry.load(kind, name) is not None
    for name in registry.names("commands"):
        assert name in [one.name for one in registry.load("commands", name)]


@pytest.mark.parametrize("package", ["bert_jax", "data_pipeline"])
def test_every_room_has_a_page_and_a_contract(package):
    rooms = [path.parent for path in (REPOSITORY / package / "contrib").glob("*/__init__.py")]
    contracts = (REPOSITORY / "setup.cfg").read_text()
    house = (REPOSITORY / "docs" / "design" / "house.md").read_text()
    assert len(rooms) >= 3
    for room in rooms:
        assert "Required rooms: " in (room / "README.md").read_text()
        assert (
            f"\n    {package}.contrib.{room.name}\n" in contracts and f"`{package}/contrib/{room.name}/`" in house
        )


def test_an_unknown_part_is_refused():
    with pytest.raises(
        ValueError, match=r"^no such: not installed; the extensions that are: --decoder_from, --gpt_inputs, "
    ):
        registry.load("extensions", "no such")


def test_a_command_of_another_package(tmp_path):
    package(tmp_path, "others", "shout")
    assert run([tmp_path, REPOSITORY], "shout", "word") == (0, "WORD\n", "")
    assert "a word in capitals" in run([tmp_path, REPOSITORY], "--help")[1]


def test_two_parts_of_one_name_are_refused(tmp_path):
    code, out, err = run([package(tmp_path, "others", "plan"), REPOSITORY], "embed", "--help")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert err.startswith(
        "error: commands: plan is bert_jax.contrib.planner.commands:COMMANDS and others:COMMANDS;"
    )


def test_the_trunk_without_rooms(tmp_path):
    for name in ("bert_jax", "data_pipeline", "configs"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("contrib", "__pycache__"))
    code, out, _ = run([tmp_path], "--help")
    assert code == 0 and " embed " in out and " plan " not in out and " trim " not in out
    code, out, _ = run([tmp_path], "data", "--help")
    assert code == 0 and " shards " in out and " clean " not in out
    code, out, _ = run([tmp_path], "pretrain", "--config", "quickstart", "--print_config")
    assert code == 0 and out == run([REPOSITORY], "pretrain", "--config", "quickstart", "--print_config")[1]
    for command, words, option in (
        ("pretrain", ["--teacher", "x"], "teacher"),
        ("pretrain", ["--to_long", "512"], "to_long"),
        ("finetune", ["--sweep"], "sweep"),
        ("finetune", ["--prune_heads", "0.5"], "prune_heads"),
        ("finetune", ["--distillation.weight", "1"], "distillation.weight"),
        ("finetune", ["--data.unlabelled", "x.tsv"], "data.unlabelled"),
    ):
        code, _, err = run([tmp_path], command, *words, "--print_config")
        assert code == 2 and re.match(f"error: command line: {option}: unknown (section|option)", err), err
    code, out, _ = run([tmp_path], "finetune", "--config", "finetune/rte", "--print_config")
    assert code == 0 and "distillation" not in out
    code, _, err = run([tmp_path], "plan")
    assert code == 2 and "plan: unknown command" in err


@pytest.mark.parametrize("more", [[], ["--objective.module", "a_file_that_is_not_run.py"]])
def test_printing_a_config_loads_neither_a_room_nor_jax_nor_readers_of_models(more):
    code = (
        "import sys; from bert_jax.commands.pretrain import main; "
        f"code = main(['--config', 'quickstart', '--print_config', *{more}]); "
        "others = ('bert_jax.contrib', 'data_pipeline', 'bert_jax.interop', 'bert_jax.model', 'jax', 'orbax'); "
        "print(code, [name for name in sys.modules if name.startswith(others)])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
