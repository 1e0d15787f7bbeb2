"""The wheel trains where the repository is not: it holds the recipes, and its commands find them by name."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command import MAIN_OF_A_COPY

from bert_jax.commands.main import main
from bert_jax.config.loader import RECIPES, find_recipe

REPOSITORY = Path(__file__).resolve().parents[1]
HIDDEN = shutil.ignore_patterns(".*", "*.egg-info", "build", "runs", "tests", "docs", "benchmarks", "studies")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the content of the wheel."""
    pytest.importorskip("setuptools", reason="the test extra brings setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPOSITORY, folder / "source", ignore=HIDDEN)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('../out'))"
    command = [sys.executable, "-c", build]
    done = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(folder / "out" / done.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "installed")
    return folder / "installed"


def listed(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.yaml"))


def test_the_wheel_holds_the_recipes_of_the_checkout(installed):
    assert RECIPES == REPOSITORY / "configs"
    assert len(listed(RECIPES)) > 50 and listed(installed / "bert_jax" / "configs") == listed(RECIPES)


def test_the_wheel_holds_no_example(installed):
    assert not [path for path in installed.rglob("*") if "xlnet" in path.name or "examples" in path.parts]


def test_the_wheel_declares_its_types(installed):
    assert all((installed / package / "py.typed").is_file() for package in ("bert_jax", "data_pipeline"))


def test_the_wheel_holds_the_page_of_pictures(installed):
    room = installed / "bert_jax" / "contrib" / "pictures"
    assert all((room / name).is_file() for name in ("page.html", "page.js"))


@pytest.mark.parametrize(
    "words", [["pretrain", "--config", "quickstart"], ["finetune", "--config", "configs/finetune/sst2.yaml"]]
)
def test_commands_of_the_wheel_read_its_recipes(installed, tmp_path, words, capfd):
    def shown(folder, place):
        environment = os.environ | {"PYTHONPATH": str(folder)}
        command = [sys.executable, "-P", "-c", MAIN_OF_A_COPY, *words, "--print_config"]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert shown(installed, tmp_path) == shown(REPOSITORY, REPOSITORY)


def test_names_of_recipes(tmp_path, monkeypatch, capsys, handlers):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("quickstart") == find_recipe("configs/quickstart.yaml") == RECIPES / "quickstart.yaml"
    assert find_recipe("models/bert_tiny.yaml") == RECIPES / "models" / "bert_tiny.yaml"
    (tmp_path / "quickstart").write_text("training: {seed: 7}\n")
    assert find_recipe("quickstart") == Path("quickstart")  # a file of the user comes first
    assert main(["pretrain", "--config", "quickstar", "--print_config"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_one_command_for_everything(capsys, handlers):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in ("pretrain", "finetune", "data", "embed"))
    assert main(["data", "--help"]) == 0 and "usage: bert-jax data COMMAND" in capsys.readouterr().out
    assert main(["finetune", "--help"]) == 0
    assert "bert-jax finetune" in capsys.readouterr().out
