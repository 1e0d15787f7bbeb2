"""The run scripts inside the test's process: much faster than a process of their own."""

import importlib
import signal
import sys

import jax
import pytest

from bert_jax.parallel import make_mesh
from bert_jax.process.exits import run_command


def imported(name):
    """A run script as a module; its signal handlers are taken back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    module = importlib.import_module(name)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return module


@pytest.fixture
def one_device(monkeypatch):
    """Runs on the first device alone, whose programs compile in half the time; for recipes with mesh.data 1."""
    monkeypatch.setattr("bert_jax.training.run.make_mesh", lambda config, _: make_mesh(config, jax.devices()[:1]))


@pytest.fixture(scope="module")
def program():
    """``run_pretrain`` as a module."""
    return imported("run_pretrain")


@pytest.fixture(scope="module")
def finetuning():
    """``run_finetune`` as a module."""
    return imported("run_finetune")


@pytest.fixture
def pretrain(program, one_device, monkeypatch, capsys):
    """Call: exit code, standard output and standard error of ``run_pretrain.py`` with these words."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["run_pretrain.py", *map(str, words)])
        capsys.readouterr()
        code = run_command(program.main)
        return code, *capsys.readouterr()

    return call
