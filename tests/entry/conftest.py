"""The commands that train inside the test's process: much faster than a process of their own."""

import sys

import jax
import pytest

from bert_jax.commands import finetune
from bert_jax.commands import pretrain as pretraining
from bert_jax.parallel import make_mesh


@pytest.fixture
def one_device(monkeypatch):
    """Runs on the first device alone, whose programs compile in half the time; for recipes with mesh.data 1."""
    monkeypatch.setattr("bert_jax.training.run.make_mesh", lambda config, _: make_mesh(config, jax.devices()[:1]))


@pytest.fixture(scope="module")
def program(handlers):
    """``bert_jax.commands.pretrain``."""
    return pretraining


@pytest.fixture(scope="module")
def finetuning(handlers):
    """``bert_jax.commands.finetune``."""
    return finetune


@pytest.fixture
def pretrain(program, one_device, monkeypatch, capsys):
    """Call: exit code, standard output and standard error of ``run_pretrain.py`` with these words."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["run_pretrain.py", *map(str, words)])
        capsys.readouterr()
        code = program.main()
        return code, *capsys.readouterr()

    return call
