"""Whether a command line of the documentation is one that the command accepts."""

import importlib
from collections.abc import Sequence

import pytest

from bert_jax.commands import data, main
from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.config import FinetuneConfig, PretrainConfig, RunOptions
from bert_jax.config.loader import build_config, take_options
from bert_jax.config.options import extended

# Command of bert-data -> the function that does its work, "module:function".
DATA_WORK = {
    "vocab": "data_pipeline.build.vocabulary:ensure_vocabulary",
    "shards": "data_pipeline.build.ensure:ensure_data",
    "index": "data_pipeline.shards.shard_files:index_folder",
    "inspect": "data_pipeline.build.inspection:inspect",
    "records": "data_pipeline.tasks:read_named",
    "clean": "data_pipeline.contrib.clean.run:clean",
    "wikipedia": "data_pipeline.contrib.wikipedia.extract:extract_wikipedia",
}


class _ParsedError(Exception):
    """The work of a command was called."""


def check_data_command(name: str, words: Sequence[str]) -> None:
    """Check that ``bert-data NAME WORDS`` gets to its work, which is not done."""
    module, _, function = DATA_WORK[name].partition(":")

    def work(*_: object, **__: object) -> None:
        raise _ParsedError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_ParsedError):
        patch.setattr(importlib.import_module(module), function, work)
        data._run(name, list(words), "bert-data")


def check_command(words: Sequence[str]) -> None:
    """Check that ``bert-jax WORDS`` is accepted, with recipes relative to the working folder; nothing is run."""
    name, rest = words[0], list(words[1:])
    if name == "data":
        return check_data_command(rest[0], rest[1:])
    if name in main.PROGRAMS:
        options, config = {
            "pretrain": (RunOptions, PretrainConfig),
            "finetune": (extended(FinetuneRunOptions), extended(FinetuneConfig)),
        }[name]
        assert build_config(config, take_options(options, rest)[1].all)
        return None
    assert main._parsed([name, *rest]).command == name
    return None
