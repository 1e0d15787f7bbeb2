"""The text of ``--help`` for a config class, which lists every option with type, default and comment."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
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
    ``config_type.USUAL`` names. ``config_type.EXAMPLE``: the arguments of an example; ``config_type.PART_OF``: the
    config that has the sections of ``config_type`` and others.

    ``chosen`` are the classes of the sections that ``given`` chooses. ``given`` (key -> value) contains the options
    on the command line. Options that these exclude are not printed; the others are printed with their conditions.
    """
    usual = () if whole else getattr(config_type, "USUAL", ())

    def shown(options: Mapping[str, Option]) -> dict[str, Option]:
        return {key: option for key, option in options.items() if not usual or key in usual}

    print(f"usage: {prog} [--config FILE ...] [--SECTION.OPTION VALUE ...]\n\n{_summary(config_type)}")
    if example := getattr(config_type, "EXAMPLE", ""):
        print(f"\nexample:\n  {prog} {example}")
    own, options = options_of(extra) if extra else {}, options_of(config_type, chosen)
    if extra:
        _print_section(_summary(extra), extra, "", shown(own), own, given)
    every = options_of(getattr(config_type, "PART_OF", config_type), chosen)
    fields = {field.name: field for field in dataclasses.fields(config_type)}
    for name, hint in get_type_hints(config_type).items():
        if dataclasses.is_dataclass(hint):
            section = class_of(hint, chosen)  # type: ignore[arg-type]
            of_all = fields[name].metadata.get("only", {})
            title = f"{name}: {_summary(section)}{_requirement(of_all, every, given)}"
            of_section = {key: one for key, one in shown(options).items() if key.startswith(f"{name}.")}
            _print_section(title, section, f"{name}.", of_section, every, given, of_all)
    if usual:
        print(f"\nAll {len(own) + len(options)} options: {prog} --help_all")
    elif more := _more_options(config_type):
        print(f"\nFurther options exist with these values; to list them, add such an option to {prog} --help_all:")
        print("\n".join(f"    {one}" for one in more))
        print(f"{registry.MODULE} FILE selects an encoder that a Python file defines as a class Encoder.")


def _more_options(config_type: type) -> list[str]:
    """Return the values of options with which further options exist."""
    choices = {name: getattr(hint, "chosen_by", None) for name, hint in get_type_hints(config_type).items()}
    return [
        f"--{name}.{choice.field} {', '.join(parts)}"
        for name, choice in choices.items()
        if choice and (parts := registry.names(choice.options))
    ]


def _print_section(
    title: str,
    section: type,
    prefix: str,
    options: Mapping[str, Option],
    every: Mapping[str, Option],
    given: Mapping[str, Value],
    known: Mapping[str, tuple[Value, ...]] = MappingProxyType({}),
) -> None:
    """Print ``options``, those of one section. ``every``: those of all sections; ``known``: the conditions of the
    whole section, which its title states."""
    comments, lines = comments_of(section), []
    for key, option in options.items():
        conditions = option.conditions.items()
        if any(selector in given and given[selector] not in allowed for selector, allowed in conditions):
            continue
        default = option.default if isinstance(option.default, tuple) else (option.default,)
        shown = " ".join(map(_shown, default)) or "empty"
        lines.append(f"  --{key} {_type_name(option.type)}  (default: {shown})")
        text, indent = comments.get(key.removeprefix(prefix), ""), " " * 6
        if issubclass(section, Section) and section.chosen_by and key == f"{prefix}{section.chosen_by.field}":
            text += _others(section.chosen_by)
        text += _requirement(option.conditions, every, given, known)
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    if lines:
        print("\n".join(["", title, *lines]))


def _requirement(
    conditions: Mapping[str, tuple[Value, ...]],
    options: Mapping[str, Option],
    given: Mapping[str, Value],
    known: Mapping[str, tuple[Value, ...]] = MappingProxyType({}),
) -> str:
    """Return the sentences that state which values of other options an option requires, with a space before them;
    "" without such values. ``conditions`` are those of the option; ``known``, those that are stated elsewhere;
    ``options``, all options."""
    always, sometimes = list[str](), list[str]()
    for selector, allowed in conditions.items():
        # Values of other options with which the selecting option exists, out of those that are possible here.
        places = list[tuple[str, Sequence[Value], bool]]()
        for key, values in options[selector].conditions.items() if selector in options else ():
            possible = (given[key],) if key in given else conditions.get(key, ())
            found = [value for value in values if value in possible or not possible]
            places.append((key, found, len(found) == len(possible)))
        if selector in given or known.get(selector) == allowed or any(not found for _, found, _ in places):
            continue
        required = f"{selector} {_either(allowed)}"
        if partly := [f"{key} is {_either(found)}" for key, found, is_all in places if not is_all]:
            sometimes.append(f"{required} if {' and '.join(partly)}")
        else:
            always.append(required)
    text = f" Requires {', and '.join(always)}." if always else ""
    if sometimes:
        text += f" {'Also requires' if always else 'Requires'} {', and '.join(sometimes)}."
    return text


def _either(values: Sequence[Value]) -> str:
    *first, last = map(_shown, values)
    return f"{', '.join(first)} or {last}" if first else last


def _others(choice: Choice) -> str:
    """Return a sentence for each part outside the trunk that an option can name: the title of its section."""
    text = ""
    for name in registry.names(choice.parts):
        if not registry.is_of_trunk(choice.parts, name):
            has_options = name in registry.names(choice.options)
            title = registry.load(choice.options, name).TITLE if has_options else ""
            text += f" {name}: {title[0].lower()}{title[1:]}." if title else f" {name}."
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


def _summary(config_type: type) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join((config_type.__doc__ or "").strip().partition("\n\n")[0].replace("``", "").split())
