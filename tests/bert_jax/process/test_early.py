"""A command that cannot run here, or that gets a signal while it is imported, ends with one line and its code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bert_jax.process import early

REPOSITORY = Path(__file__).resolve().parents[3]
# Runs the program of its arguments, and sends itself a signal in the middle of its imports.
SIGNALED = """
import importlib.abc, os, runpy, signal, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "bert_jax.process.exits":
            os.kill(os.getpid(), int(number))

_, number, *sys.argv = sys.argv
sys.meta_path.insert(0, Finder())
sys.path.insert(0, os.getcwd())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*words, **options):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=120,
        **options,
    )  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "program", ["run_pretrain.py", "run_finetune.py", "bert_jax/commands/main.py", "bert_jax/commands/data.py"]
)
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 42, "stopped; run the same command again"),
    ],
)
def test_a_signal_during_the_imports(program, number, code, line):
    done = run("-c", SIGNALED, str(int(number)), program, "--help")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, line)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "program", [["run_pretrain.py"], ["run_finetune.py"], ["-m", "bert_jax.commands.main", "embed"]]
)
def test_a_python_without_the_packages(program):
    done = run("-S", *program)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: numpy is not installed for ") and ".venv" in line


@pytest.mark.parametrize(("version", "refused"), [((3, 10, 13), True), ((3, 9, 0), True), ((3, 12, 1), False)])
def test_an_old_python(monkeypatch, capsys, version, refused):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bert-jax"])
    monkeypatch.setattr(sys, "version_info", version)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if refused:
            with pytest.raises(SystemExit) as ended:
                early.start()
            assert ended.value.code == 2 and "requires Python 3.11 or newer" in capsys.readouterr().err
        else:
            early.start()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_import_by_another_program_changes_nothing(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/main.py"])
    before = signal.getsignal(signal.SIGINT)
    early.start()
    assert signal.getsignal(signal.SIGINT) is before
