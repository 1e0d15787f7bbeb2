"""The command ``bert-data clean``."""

import dataclasses
from collections.abc import Sequence

from bert_jax.commands.data import DataCommand, parsed, report, take_runner
from bert_jax.io.storage import location
from bert_jax.process.signals import StopRequest
from data_pipeline.contrib.clean.options import CleanConfig, CleanDataConfig, CleanOptions


def clean_command(words: Sequence[str]) -> None:
    """Clean the corpus that the arguments ``words`` name."""
    from data_pipeline.build.ensure import STOPPED
    from data_pipeline.contrib.clean.run import clean

    own, words, beam_options = take_runner(words, output={"type": location})
    rules = {field.name: f"clean.{field.name}" for field in dataclasses.fields(CleanConfig)}
    config = parsed(CleanOptions, words, CleanDataConfig, rules)
    if own.output is None:
        raise ValueError("bert-data clean: --output is not set; set it to a new folder for the cleaned text")
    with StopRequest().at_once(STOPPED):
        clean(config, own.output, report, beam_options)
    report(f"text and report in {own.output}")


USAGE = """\
  clean    drop duplicates, repeated lines, other languages and short documents from text, and repair its encoding
             bert-data clean --corpus web_texts/ --output my_texts/ --near_duplicates 0.7 --languages en
           --runner beam works as in bert-data shards; --data.NAME and --clean.NAME may be shortened to --NAME
"""
COMMAND = DataCommand(clean_command, USAGE, CleanOptions)
