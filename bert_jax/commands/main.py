"""The ``bert-jax`` console command and the table of its subcommands."""

from bert_jax.process import early

early.start()

import argparse
import importlib
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import get_args

from bert_jax import __version__, registry
from bert_jax.commands import labels, report, texts, weights
from bert_jax.commands.options import Command, Group, help_width, take_encoder
from bert_jax.io.errors import did_you_mean, unknown_command
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.process.exits import run_command
from bert_jax.process.signals import STOPPED, StopRequest

COMMANDS = (
    *weights.COMMANDS,
    *texts.COMMANDS,
    *labels.COMMANDS,
    *report.COMMANDS,
)
# Commands that parse their own arguments: the options of a recipe, or further commands.
PROGRAMS = {
    "pretrain": ("bert_jax.commands.pretrain", "pretrain an encoder on text (run_pretrain.py)"),
    "finetune": ("bert_jax.commands.finetune", "fine-tune an encoder on a task (run_finetune.py)"),
    "data": ("bert_jax.commands.data", "clean text, and build and inspect vocabularies and shards (bert-data)"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bert-jax`` and return the exit code (2: a user error, reported in one line; 3: a failed check)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in PROGRAMS:
        module = importlib.import_module(PROGRAMS[words[0]][0])
        return int(module.main(words[1:], f"bert-jax {words[0]}"))
    return run_command(lambda: _run(words))


def _run(words: list[str]) -> None:
    words, encoder = take_encoder(words)
    if words and words[0] in PROGRAMS:
        raise ValueError(f"{words[0]}: write {registry.MODULE} FILE after bert-jax {words[0]}")
    arguments = _parsed(words)
    if arguments.takes_recipe:
        arguments.recipe += encoder
    keep_to_cpu_without_accelerator()
    writes = arguments.is_whole and any(getattr(arguments, name, None) for name in ("target", "output"))
    message = "stopped; incomplete output was removed; run the same command again" if writes else STOPPED
    with StopRequest().at_once(message):
        arguments.run(arguments)


def _parsed(words: list[str]) -> argparse.Namespace:
    """Parse the arguments of a subcommand. Only the module of this subcommand is imported; for help, all
    modules."""
    own = {one.name: one for one in COMMANDS}
    names = [*PROGRAMS, *own, *registry.names("commands")]
    known = bool(words) and words[0] in names
    listed = [own.get(name) or _of_a_room(name) for name in ([words[0]] if known else names[len(PROGRAMS) :])]
    parser = argparse.ArgumentParser(
        prog="bert-jax",
        usage="bert-jax [-h] [--version] COMMAND ...",
        description=f"Pretrain, fine-tune, use and convert text encoders.\n\n{_in_groups(listed)}",
        epilog="bert-jax COMMAND --help shows the options of a command and an example",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bert-jax {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog="bert-jax"
    )
    for one in listed:
        one.add(commands)
    if words and not words[0].startswith("-") and not known:
        parser.error(f"{words[0]}: unknown command; allowed: {', '.join(names)}{unknown_command(words[0], names)}")
    arguments, rest = parser.parse_known_args(words)
    if arguments.takes_recipe:
        arguments.recipe = rest
    elif rest:
        options = [name for one in commands.choices[arguments.command]._actions for name in one.option_strings]
        parser.error(f"unrecognized arguments: {' '.join(rest)}{did_you_mean(rest[0], options)}")
    return arguments


def _in_groups(commands: Iterable[Command]) -> str:
    """Return the list of the programs and ``commands`` in the help of ``bert-jax``."""
    groups: dict[str, list[tuple[str, str]]] = {group: [] for group in get_args(Group)}
    groups["train"] += [(name, what) for name, (_, what) in PROGRAMS.items()]
    for one in commands:
        groups[one.group].append((one.name, one.help))
    width = max(len(name) for rows in groups.values() for name, _ in rows) + 4
    lines: list[str] = []
    for group, rows in groups.items():
        lines += ["", f"{group}:"] if lines else [f"{group}:"]
        for name, what in rows:
            lines += textwrap.wrap(
                what, help_width(), initial_indent=f"  {name}".ljust(width), subsequent_indent=" " * width
            )
    return "\n".join(lines)


def _of_a_room(name: str) -> Command:
    """Return a command outside the trunk. Raises ``ValueError`` if its package has none of this name."""
    for one in registry.load("commands", name):
        if one.name == name:
            command: Command = one
            return command
    raise ValueError(f"{name}: {registry.names('commands')[name]} holds no command of this name")


if __name__ == "__main__":
    sys.exit(main())
