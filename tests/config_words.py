"""Configs from words and YAML, for tests in a folder of their own."""

import pytest

from bert_jax.config import PretrainConfig, RunOptions, load_config

FILE = "recipe.yaml"


def load(*arguments, text=None, name=FILE):
    """A config from the YAML ``text``, if any, and the words of ``arguments``."""
    words = [word for argument in arguments for word in argument.split()]
    if text is not None:
        with open(name, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text)
        words = ["--config", name, *words]
    return load_config(PretrainConfig, words, extra=RunOptions)


def refusal(*arguments, text=None):
    """The message of the one ``ValueError`` that loading raises."""
    with pytest.raises(ValueError) as raised:
        load(*arguments, text=text)
    message = str(raised.value)
    assert message and "\n" not in message
    return message
