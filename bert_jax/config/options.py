"""Options of a config class by dotted name, and the conditions under which they exist."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from bert_jax import registry
from bert_jax.config.schema import Section, Value, Weighted

T = TypeVar("T")
# Sources of the settings that are arguments of a command, or of a function.
COMMAND_LINE, PYTHON = "command line", "options"


class Setting(NamedTuple):
    """One value for a config: its source, dotted key and text."""

    source: str
    key: str
    value: str | list[str]


class Option(NamedTuple):
    """One leaf field of a config."""

    type: Any
    default: Any
    # Selecting option -> its values with which this option exists; see ``schema.only``.
    conditions: Mapping[str, tuple[Value, ...]]


def extended(config_type: type[T]) -> type[T]:
    """Return ``config_type``, a config or the options of a run, with the fields and methods that the registered
    parts of the kind ``config_type.PARTS`` add: a subclass of all these, which extend ``config_type``."""
    plain: type = config_type
    found: type[T] = _extended(plain)
    return found


@functools.cache
def _extended(config_type: type) -> type:
    kind = vars(config_type).get("PARTS")
    parts = [registry.load(kind, name) for name in registry.names(kind)] if kind else []
    if not parts:
        return config_type
    content = {"__doc__": config_type.__doc__, "__module__": config_type.__module__}
    whole = type(config_type.__name__, (*parts, config_type), content)
    return dataclasses.dataclass(frozen=True, kw_only=True)(whole)


@functools.cache
def options_of(
    config_type: type, chosen: tuple[type[Section], ...] = (), *, fixed: bool = False
) -> dict[str, Option]:
    """Return every option of ``config_type`` by dotted name, in the order of the fields. The classes ``chosen``
    replace those of the sections that they extend. ``fixed``: instead, the fields that are no options
    (``Section.FIXED``)."""
    hints, found = get_type_hints(config_type), dict[str, Option]()
    for field in dataclasses.fields(config_type):
        if not dataclasses.is_dataclass(hints[field.name]) and fixed != (
            field.name in getattr(config_type, "FIXED", ())
        ):
            continue
        conditions, hint = field.metadata.get("only", {}), hints[field.name]
        if not dataclasses.is_dataclass(hint):
            found[field.name] = Option(hint, field.default, conditions)
            continue
        for name, option in options_of(class_of(hint, chosen), fixed=fixed).items():  # type: ignore[arg-type]
            found[f"{field.name}.{name}"] = option._replace(conditions={**conditions, **option.conditions})
    return found


def class_of(section: type, chosen: Iterable[type[Section]]) -> type:
    """Return the class in ``chosen`` that extends ``section``, else ``section``."""
    return next((one for one in chosen if issubclass(one, section)), section)


def chosen_classes(config_type: type, values: Mapping[str, Value]) -> tuple[type[Section], ...]:
    """Return the classes of the sections that ``values``, by dotted name, choose (``Section.chosen_by``)."""
    classes = []
    for name, hint in get_type_hints(config_type).items():
        if choice := getattr(hint, "chosen_by", None):
            classes.append(hint.class_for({choice.field: values.get(f"{name}.{choice.field}")}))
    return tuple(classes)


def all_options(config_type: type) -> dict[str, Option]:
    """Return :func:`options_of` ``config_type``, and the options that only some registered parts have, which are
    the condition of these options."""
    found = dict(options_of(config_type))
    for name, hint in get_type_hints(config_type).items():
        if (choice := getattr(hint, "chosen_by", None)) is None:
            continue
        selector, owners = f"{name}.{choice.field}", dict[str, tuple[str, ...]]()
        for part in registry.names(choice.options):
            for key, option in options_of(registry.load(choice.options, part)).items():
                if key not in options_of(hint):
                    owners[key] = *owners.get(key, ()), part
                    found[f"{name}.{key}"] = option._replace(
                        conditions={selector: owners[key], **option.conditions}
                    )
    return found


def field_types(config_type: type, *, fixed: bool = False) -> dict[str, Any]:
    """Return the type of every option of ``config_type`` by dotted name; ``fixed``: see :func:`options_of`."""
    return {key: option.type for key, option in options_of(config_type, fixed=fixed).items()}


def absence(config_type: type, options: Mapping[str, Option], key: str, values: Mapping[str, Value]) -> str:
    """Return the name of the option whose value in ``values`` (or whose default) excludes the option ``key``, one
    of ``options``, or an empty string if ``key`` exists. An option that does not exist itself excludes nothing."""
    if values.get(getattr(config_type, "ALL_OPTIONS_WITH", "")) and key in options_of(config_type):
        return ""
    for selector, allowed in options[key].conditions.items():
        if selector not in options or absence(config_type, options, selector, values):
            continue
        if values.get(selector, options[selector].default) not in allowed:
            return selector
    return ""


def join_mappings(types: Mapping[str, Any], settings: Iterable[Setting]) -> Iterator[Setting]:
    """Yield ``settings``. The settings of a YAML mapping under an option of :class:`Weighted` items become one
    setting of items NAME=WEIGHT, which replaces earlier ones as a whole.

    Raises ``ValueError`` if a weight is a list.
    """
    owners = [f"{key}." for key, hint in types.items() if Weighted in get_args(hint)]

    def owner(setting: Setting) -> tuple[str, str]:
        is_file = setting.source not in (COMMAND_LINE, PYTHON)
        found = next((one for one in owners if is_file and setting.key.startswith(one)), "")
        return found, setting.source.rpartition(":")[0] if found else ""

    for (prefix, _), group in itertools.groupby(settings, owner):
        if not prefix:
            yield from group
            continue
        entries, items = list(group), []
        for source, key, value in entries:
            if isinstance(value, list):
                raise ValueError(f"{source}: {key}: requires exactly one weight, got {len(value)}")
            items.append(f"{key.removeprefix(prefix)}={value}")
        yield Setting(entries[0].source, prefix.removesuffix("."), items)
