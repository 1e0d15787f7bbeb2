"""``bert-jax data`` and ``bert-data``: extract text of Wikipedia dumps, clean text, build vocabularies and shards,
inspect shards, print task files as JSON lines."""

from bert_jax.process import early

early.start()

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from bert_jax import registry
from bert_jax.commands.options import with_encoder
from bert_jax.config import DataConfig, FinetuneConfig, PretrainConfig, TaskDataConfig
from bert_jax.config.loader import HELP, Settings, build_config, dump_yaml, read_settings, show_help
from bert_jax.config.options import extended
from bert_jax.io.errors import unknown_command
from bert_jax.io.storage import Location, location
from bert_jax.process.exits import run_command
from bert_jax.process.signals import StopRequest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_VOCAB = """\
  vocab    train a vocabulary on text
             bert-data vocab --corpus my_texts/ --vocab_size 30522 --kind wordpiece --output vocab.txt
"""
_SHARDS = """\
  shards   build the token store and the shards of a recipe; train a vocabulary first if the recipe names none
             bert-data shards --config configs/quickstart.yaml --workers 4
           --runner beam builds with Apache Beam, on this machine unless options after -- select another Beam runner
             bert-data shards --config RECIPE --runner beam [-- --runner=DataflowRunner --project=P ...]
           --tfds NAME is short for --corpus tfds:NAME; --tfds_data_dir FOLDER names the folder of prepared datasets
"""
_INDEX = """\
  index    write an index for a folder of TFRecords that another program wrote, so that training can read them
             bert-data index DIR
"""
_INSPECT = """\
  inspect  print statistics and examples of a folder of shards
             bert-data inspect DIR --examples 3
           --records N sets the maximum number of records to read (default 20000)
           --vocab FILE names the vocabulary (default: the one in the folder of the shards)
"""
_RECORDS = """\
  records  print the records of a fine-tuning file as JSON lines, which bert-jax predict and other commands read
             bert-data records dev.tsv --columns text=sentence label=label
             bert-data records dev.tsv --config configs/finetune/sst2.yaml --data.dir glue/SST-2
           the columns of the file are named by --columns or by a recipe
"""
_NOTES = """\
The commands vocab and shards accept a pretraining recipe (--config FILE) and the options that a recipe can set;
--data.NAME may be shortened to --NAME. --vocab_size sets model.vocab_size, and --kind sets data.tokenizer. --output
names the vocabulary file to write (vocab) or the folder of the shards (shards). For a recipe whose encoder is
defined in a Python file, also set --model.module FILE, as in training.
"""
_RECORD_NOTES = """\
The command records accepts a fine-tuning recipe (--config FILE) and the options that a recipe can set; --data.NAME
may be shortened to --NAME, and --kind sets task.kind.
"""
_MORE = """\
bert-data COMMAND --help shows the options of a command. For a command that accepts a recipe, --print_config prints
the values of its options as YAML.
"""
_PRINT = "--print_config"
_SHORT = {"vocab_size": "model.vocab_size", "kind": "data.tokenizer"}
C = TypeVar("C", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of ``bert-data vocab`` and ``bert-data shards``: the section data of a pretraining recipe."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Options of ``bert-data records``: the section data of a fine-tuning recipe."""

    PART_OF: ClassVar[type] = FinetuneConfig

    data: TaskDataConfig = dataclasses.field(default_factory=TaskDataConfig)


@dataclass(frozen=True)
class DataCommand:
    """A command of ``bert-data``: ``run`` is called with its arguments, ``usage`` is its part of the help, with an
    example on the line after its name, ``options`` is the class of the options that its help lists, and ``notes``
    states which others it accepts."""

    run: Callable[[list[str]], None]
    usage: str = ""
    options: type | None = None
    notes: str = ""


def main(argv: Sequence[str] | None = None, program: str = "bert-data") -> int:
    """Run the command; return the exit code: 0 for success, 2 for a user error, which is reported in one line.
    ``program`` is the name of the command in its help."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in HELP:
        commands = {
            **_own(),
            **{name: registry.load("data_commands", name) for name in registry.names("data_commands")},
        }
        usage = "".join(command.usage for command in commands.values())
        _show(f"usage: bert-data COMMAND [options]\n\ncommands:\n{usage}\n{_NOTES}{_RECORD_NOTES}{_MORE}", program)
        return 0 if words else 2
    return run_command(lambda: _run(words[0], words[1:], program))


def _show(usage: str, program: str) -> None:
    print(usage.replace("bert-data", program), end="")


def _own() -> dict[str, DataCommand]:
    """Return the commands of the trunk."""
    return {
        "vocab": DataCommand(_vocab, _VOCAB, DataOptions, _NOTES),
        "shards": DataCommand(_shards, _SHARDS, DataOptions, _NOTES),
        "index": DataCommand(_index, _INDEX),
        "inspect": DataCommand(_inspect, _INSPECT),
        "records": DataCommand(_records, _RECORDS, RecordOptions, _RECORD_NOTES),
    }


def _run(name: str, words: list[str], program: str) -> None:
    own = _own()
    names = [*own, *registry.names("data_commands")]
    if name not in names:
        raise ValueError(f"{name}: unknown command; allowed: {', '.join(names)}{unknown_command(name, names)}")
    command: DataCommand = own.get(name) or registry.load("data_commands", name)
    if _PRINT in words and command.options is None:
        others = {**own, **{one: registry.load("data_commands", one) for one in names if one not in own}}
        allowed = ", ".join(one for one, other in others.items() if other.options is not None)
        raise ValueError(f"bert-data {name}: {_PRINT}: this command accepts no recipe; allowed for: {allowed}")
    if not HELP & set(words):
        with contextlib.suppress(Printed):
            command.run(words)
        return
    _show(f"usage: bert-data {name} [options]\n\n{command.usage}", program)
    if command.options is not None:
        print()
        _show(command.notes and f"{command.notes}\n", program)
        with contextlib.suppress(SystemExit):
            show_help(command.options, Settings(), f"{program} {name}")
    sys.stdout.flush()  # run_command ignores the error of a closed pipe (`| head`) only if it is raised here


def parsed(config_type: type[C], words: Sequence[str], data_type: type, short: Mapping[str, str]) -> C:
    """Parse the arguments ``words`` into a config; option names without a section refer to ``data``. With
    ``--print_config``, print the values of the options that ``data_type`` and ``short`` name, and raise
    :class:`Printed`."""
    fields = {field.name: f"data.{field.name}" for field in dataclasses.fields(data_type)} | dict(short)
    full = []
    for word in (word for word in words if word != _PRINT):
        name, equals, value = word[2:].partition("=")
        full.append(f"--{fields[name]}{equals}{value}" if word.startswith("--") and name in fields else word)
    config = build_config(config_type, with_encoder(read_settings(full)).all)
    if _PRINT in words:
        print(dump_yaml(config, {*fields.values()}), end="")
        raise Printed
    return config


class Printed(Exception):
    """The options of a command are printed, so the command does nothing else."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"command line: {message}")


def take(words: Sequence[str], **flags: dict[str, Any]) -> tuple[Any, list[str]]:
    """Parse the options ``flags``, which are not config fields; return their values and the remaining arguments."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, settings in flags.items():
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_known_args(words)


def take_runner(words: Sequence[str], **flags: dict[str, Any]) -> tuple[Any, list[str], list[str] | None]:
    """Parse the options ``flags`` and ``--runner`` as :func:`take` does; also return the options of Beam after
    ``--``, or None without ``--runner beam``."""
    at = words.index("--") if "--" in words else len(words)
    own, rest = take(words[:at], runner={"choices": ["processes", "beam"]}, **flags)
    beam_options = list(words[at + 1 :])
    if own.runner == "beam":
        return own, rest, beam_options
    if beam_options:
        raise ValueError("command line: options after -- require --runner beam; add --runner beam, or omit them")
    return own, rest, None


def report(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True)


def _vocab(words: list[str]) -> None:
    from data_pipeline.build.ensure import STOPPED
    from data_pipeline.build.vocabulary import ensure_vocabulary

    own, words = take(words, output={"type": Path})
    config = parsed(PretrainConfig, words, DataConfig, _SHORT)
    size = config.model.vocab_size
    with StopRequest().at_once(STOPPED):
        path = ensure_vocabulary(config.data, vocab_size=size, report=report, output=own.output)
    report(f"vocabulary: {path}")


def _shards(words: list[str]) -> None:
    from data_pipeline.build.ensure import STOPPED, ensure_data

    own, words, beam_options = take_runner(words, tfds={}, output={})
    words += ["--data.corpus", f"tfds:{own.tfds}"] if own.tfds is not None else []
    words += ["--data.shards", own.output] if own.output is not None else []
    config = parsed(PretrainConfig, words, DataConfig, _SHORT)
    size, data = config.model.vocab_size, dataclasses.replace(config.data, mixture=())  # builds one folder
    with StopRequest().at_once(STOPPED):
        vocab = ensure_data(data, vocab_size=size, report=report, beam_options=beam_options)
    report(f"shards in {data.shards}, vocabulary {vocab}")


def _folder(words: Sequence[str], command: str) -> Location:
    if len(words) != 1 or words[0].startswith("--"):
        raise ValueError(f"bert-data {command}: expected one folder of shards, got: {' '.join(words) or 'none'}")
    return location(words[0])


def _index(words: list[str]) -> None:
    from data_pipeline.shards.shard_files import index_folder

    folder = _folder(words, "index")
    index = index_folder(folder)
    report(f"{folder}: indexed {index.records:,} records in {len(index.entries)} shard(s)")


def _inspect(words: list[str]) -> None:
    from data_pipeline.build.inspection import inspect

    examples, records = ({"type": whole_number, "default": default} for default in (3, 20_000))
    case = {"choices": ["true", "false"]}
    own, words = take(words, examples=examples, records=records, vocab={"type": location}, lower_case=case)
    inspect(
        _folder(words, "inspect"),
        examples=own.examples,
        most_records=own.records,
        vocab=own.vocab,
        lower_case=own.lower_case != "false",
    )


def _records(words: list[str]) -> None:
    from data_pipeline.tasks import as_json, read_named, with_label_names

    has_file = bool(words) and not words[0].startswith("--")
    if not has_file and _PRINT not in words:
        raise ValueError("bert-data records: no file before the options; run: bert-data records FILE [OPTIONS]")
    config = parsed(extended(FinetuneConfig), words[has_file:], TaskDataConfig, {"kind": "task.kind"})
    for record in read_named(words[0], config.data, config.task.kind, "dev"):
        report(json.dumps(as_json(with_label_names(record, config.data)), ensure_ascii=False))


def whole_number(text: str) -> int:
    """Parse a whole number of an option, from 0."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a whole number of 0 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
