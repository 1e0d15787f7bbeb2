"""The text of ``--help`` for a config class, which lists every option with type, default and comment."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bert_jax import registry
from bert_jax.config.options import Option, class_of, options_of
from bert_jax.config.schema import Choice, Section, Value, Weighted

_WIDTH = 100


def print_help(
    config_type: type, chosen: tuple[type[Section], ...], extra: type | None, prog: str, given: Mapping[str, Value],
    *, whole: bool = True,
) -> None:  # fmt: skip
    """Print the options of ``extra``, then those of ``config_type`` by section; with ``whole`` False, those that
    ``config_type.USUAL`` names. ``config_type.EXAMPLE``: the arguments of an example.

    ``chosen`` are the classes of the sections that ``given`` chooses. ``given`` (key -> value) contains the options
    on the command line. Options that these exclude are not printed; the others are printed with their conditions.
    """
    usual = () if whole else getattr(config_type, "USUAL", ())

    def shown(options: Mapping[str, Option]) -> dict[str, Option]:
        return {key: option for key, option in options.items() if not usual or key in usual}

    print(f"usage: {prog} [--config FILE ...] [--SECTION.OPTION VALUE ...]\n\n{_first_line(config_type)}")
    if example := getattr(config_type, "EXAMPLE", ""):
        print(f"\nexample:\n  {prog} {example}")
    own, options = options_of(extra) if extra else {}, options_of(config_type, chosen)
    if extra:
        _print_section(_first_line(extra), extra, "", shown(own), given)
    for name, hint in get_type_hints(config_type).items():
        if dataclasses.is_dataclass(hint):
            section = class_of(hint, chosen)  # type: ignore[arg-type]
            of_section = shown({key: one for key, one in options.items() if key.startswith(f"{name}.")})
            _print_section(f"{name}: {_first_line(section)}", section, f"{name}.", of_section, given)
    if usual:
        print(f"\nAll {len(own) + len(options)} options: {prog} --help_all")
    elif more := _more_options(config_type):
        print(f"\nMore options: {prog} --help_all with {'; '.join(more)}")
        print(f"User-defined encoder: {prog} {registry.MODULE} FILE, a Python file that defines a class Encoder")


def _more_options(config_type: type) -> list[str]:
    """Return the values of options with which further options exist."""
    choices = {name: getattr(hint, "chosen_by", None) for name, hint in get_type_hints(config_type).items()}
    return [
        f"--{name}.{choice.field} {', '.join(parts)}"
        for name, choice in choices.items()
        if choice and (parts := registry.names(choice.options))
    ]


def _print_section(
    title: str, section: type, prefix: str, options: Mapping[str, Option], given: Mapping[str, Value]
) -> None:
    comments, lines = comments_of(section), []
    for key, option in options.items():
        conditions = option.conditions.items()
        if any(selector in given and given[selector] not in allowed for selector, allowed in conditions):
            continue
        default = " ".join(map(str, option.default)) if isinstance(option.default, tuple) else option.default
        lines.append(f"  --{key} {_type_name(option.type)}  (default: {default})")
        text, indent = comments.get(key.removeprefix(prefix), ""), " " * 6
        if issubclass(section, Section) and section.chosen_by and key == f"{prefix}{section.chosen_by.field}":
            text += _others(section.chosen_by)
        for selector, allowed in conditions:
            if selector not in given:
                text += f" [only with {selector} {', '.join(map(_shown, allowed))}]"
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    if lines:
        print("\n".join(["", title, *lines]))


def _others(choice: Choice) -> str:
    """Return a sentence for each part outside the trunk that an option can name: the title of its section."""
    text = ""
    for name in registry.names(choice.parts):
        if not registry.is_of_trunk(choice.parts, name):
            has_options = name in registry.names(choice.options)
            title = registry.load(choice.options, name).TITLE if has_options else ""
            text += f" {name}: {title}." if title else f" {name}."
    return text


def comments_of(section: type) -> dict[str, str]:
    """Return the comment above each field, joined to one line, by field name. A field without a comment
    inherits the comment of the base class."""
    comments: dict[str, str] = {}
    for base in reversed([base for base in section.__mro__ if dataclasses.is_dataclass(base)]):
        names, above = {field.name for field in dataclasses.fields(base)}, list[str]()
        for line in map(str.strip, inspect.getsource(base).splitlines()):
            if line.startswith("#"):
                above.append(line.lstrip("# "))
                continue
            name = re.match(r"\w*", line)[0]  # type: ignore[index]
            if name in names and above:
                comments[name] = " ".join(above)
            above = []
    return comments


def _shown(value: Value) -> str:
    """Return ``value`` as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type_name(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"[{_type_name(get_args(hint)[0])} ...]"
    if get_origin(hint) is Literal:
        return f"{{{','.join(get_args(hint))}}}"
    if hint is Weighted:
        return "NAME=WEIGHT"
    return "{true,false}" if hint is bool else hint.__name__.upper()


def _first_line(config_type: type) -> str:
    return (config_type.__doc__ or "").strip().partition("\n")[0]
