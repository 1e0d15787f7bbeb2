"""Conversion of YAML files and ``--section.key value`` flags to a frozen config, with a one-line message for every
mistake.

A YAML file is read as a list of flags, so a typo in a file and a typo on the command line are found by the same
code and have the same message: ``SOURCE: key: mistake; allowed; did you mean``, where SOURCE is ``file:line`` or
``command line``. Later sources override earlier ones: preset of ``training.mode``, ``--config`` files in order,
flags. An option that does not exist with the other values (``schema.only``) is rejected like an unknown option.
"""

import dataclasses
import difflib
import functools
import math
import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from bert_jax import registry
from bert_jax.config.former import OWNERS, OptionsInOrder, former_types
from bert_jax.config.help import print_help
from bert_jax.config.options import (
    COMMAND_LINE,
    PYTHON,
    Option,
    Setting,
    absence,
    all_options,
    chosen_classes,
    class_of,
    extended,
    field_types,
    join_mappings,
    options_of,
)
from bert_jax.config.schema import PRESETS, Value
from bert_jax.json_values import Json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C")
HELP_ALL = "--help_all"
HELP = {"--help", "-h", HELP_ALL}
NULL = "tag:yaml.org,2002:null"
# Source of the settings of a stored config.
STORED = "stored config"
# The recipes of a checkout, else the copies that a wheel holds.
_CHECKOUT, _WHEEL = Path(__file__).parents[2] / "configs", Path(__file__).parents[1] / "configs"
RECIPES = _WHEEL if _WHEEL.is_dir() else _CHECKOUT
_MOST_DIGITS = 30  # int() raises an error without a place for more than 4,300


# A value of an option in Python. A mapping has a weight for each name.
OptionValue = Json | PathLike[str] | Sequence[PathLike[str]]


def python_settings(values: Mapping[str, OptionValue]) -> tuple[Setting, ...]:
    """Return the settings of options by name whose values are Python objects: numbers, booleans, strings, paths,
    lists of these and, for weighted items, mappings from names to weights. Raises ``ValueError`` for other
    objects."""
    return tuple(Setting(PYTHON, key, _text_of(key, value)) for key, value in values.items())


def _text_of(key: str, value: OptionValue) -> str | list[str]:
    if isinstance(value, Mapping):
        return [f"{name}={_text_of(key, one)}" for name, one in value.items()]
    value = value.tolist() if value is not None and hasattr(value, "tolist") else value  # of numpy
    if isinstance(value, list | tuple):
        return [str(_text_of(key, one)) for one in value]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str | PathLike):
        return str(value)
    kind = type(value).__name__
    raise ValueError(
        f"{PYTHON}: {key}: {kind} is not allowed; allowed: a number, a string, a path, True, False, a list, "
        "or a dict"
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of one command line, or of one call from Python: recipe files, then single options. Later ones
    override earlier ones."""

    # Names of recipes, as --config takes them.
    files: tuple[str, ...] = ()
    flags: tuple[Setting, ...] = ()

    @functools.cached_property
    def all(self) -> tuple[Setting, ...]:
        """The settings of the files, which are read once, then the flags. Raises ``ValueError`` for an invalid
        file."""
        return (*(setting for file in self.files for setting in read_yaml(find_recipe(file))), *self.flags)

    def followed_by(self, *flags: Setting) -> "Settings":
        """Return these settings and then ``flags``."""
        return Settings(self.files, (*self.flags, *flags))

    def words(self) -> list[str]:
        """Return the words of a command line with these settings."""
        words = [word for file in self.files for word in ("--config", file)]
        for _, key, value in self.flags:
            words += [f"--{key}", *([value] if isinstance(value, str) else value)]
        return words


def take_options(options_type: type[C], argv: Sequence[str]) -> tuple[C, Settings]:
    """Return :func:`split_settings` of a command line, without ``--help``, for which the options include those of
    registered parts."""
    return split_settings(extended(options_type) if HELP & set(argv) else options_type, read_settings(argv))


def split_settings(options_type: type[C], given: Settings) -> tuple[C, Settings]:
    """Split ``given`` into the options of ``options_type`` and the settings of the config.

    The options include those of registered parts (:func:`extended`) if there is a flag that only they can have. A
    flag without a value means true, or its value in ``options_type.VALUE_WITHOUT_ARGUMENT``. Raises ``ValueError``
    with a one-line message if a value is invalid.
    """
    types = field_types(options_type) | field_types(options_type, fixed=True)
    if {key for _, key, _ in given.flags if "." not in key} - types.keys():
        options_type = extended(options_type)
        types |= field_types(options_type)
    bare = getattr(options_type, "VALUE_WITHOUT_ARGUMENT", {})
    own = [
        setting._replace(value="true" if types[setting.key] is bool else bare.get(setting.key, []))
        if setting.value == []
        else setting
        for setting in given.flags
        if setting.key in types
    ]
    if given.files and "config" in types:
        own.append(Setting(COMMAND_LINE, "config", [*given.files]))
    rest = tuple(setting for setting in given.flags if setting.key not in types)
    return build_config(options_type, own), Settings(given.files, rest)


def load_config(config_type: type[C], argv: Sequence[str], extra: type | None = None) -> C:
    """Build ``config_type`` from command-line arguments, ``--config FILE`` (repeatable) and ``--section.key value
    ...`` in any order. ``extra``: class of further options of the command, for hints.

    Raises ``ValueError`` with a one-line message for an invalid argument.
    """
    return build_config(config_type, read_settings(argv).all, [*field_types(extra)] if extra else [])


def show_help(
    config_type: type, settings: Settings, prog: str, extra: type | None = None, *, whole: bool = False
) -> None:
    """Print the usual options of ``config_type``, or with ``whole`` all of them, with the values in ``settings``.

    Args:
        prog: name of the command.
        extra: class of further options of the command.
    """
    given = parse_settings(config_type, settings.all, [*field_types(extra)] if extra else [])
    values = {key: value for key, (value, _) in given.items()}
    print_help(config_type, chosen_classes(config_type, values), extra, prog, values, whole=whole)


def find_recipe(name: str) -> Path:
    """Return the file that ``--config NAME`` names: the path ``name``, else the recipe of this name, such as
    quickstart, finetune/sst2 or configs/quickstart.yaml, which come with the library."""
    known = RECIPES / f"{name.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    return known if known.is_file() and not Path(name).is_file() else Path(name)


def parse_settings(
    config_type: type, settings: Sequence[Setting], also: Sequence[str] = ()
) -> dict[str, tuple[Value, str]]:
    """Return key -> (typed value, source) in the order of the last setting of each key, which wins. A former option
    sets the option that holds its values now. For ``also`` see :func:`build_config`.

    Raises ``ValueError`` for an unknown key or a value of the wrong type.
    """
    former, fixed = getattr(config_type, "FORMER_OPTIONS", {}), options_of(config_type, fixed=True)
    settings = [*join_mappings(field_types(config_type), settings)]
    options, parsed = known_options(config_type, settings), dict[str, tuple[Value, str]]()
    types, in_order = {key: option.type for key, option in options.items()}, OptionsInOrder(options)
    types |= former_types(options)
    stored = {setting.key for setting in settings if setting.source == STORED}
    for source, key, value in settings:
        if key in former and source not in (COMMAND_LINE, PYTHON) and former[key] in (None, value):
            continue  # in the stored config of an older version
        if source == STORED and OWNERS.get(key) in stored:
            continue  # an older version stored what followed from a former option too
        if key in former and former[key] is not None:
            raise ValueError(f"{source}: {key}: no longer an option, as if it were {former[key]}; omit it")
        if key in fixed:
            if _convert(fixed[key].type, value, f"{source}: {key}") == fixed[key].default:
                continue  # in the stored config of an older version
            raise ValueError(f"{source}: {key}: an option of pretraining only; omit it")
        if key not in types:
            _require_parts(config_type, settings)
            raise ValueError(f"{source}: {key}: {_unknown(key, options, also)}")
        key, typed = in_order.set(key, _convert(types[key], value, f"{source}: {key}"))
        parsed.pop(key, None)  # so that the keys stay in the order of their last settings
        parsed[key] = (typed, source)
    return parsed


def known_options(config_type: type, settings: Sequence[Setting]) -> dict[str, Option]:
    """Return the options of ``config_type`` with the sections that ``settings`` choose, by dotted name; if one of
    the settings is not among them, also the options of the registered parts that are not chosen."""
    options = options_of(config_type, chosen_classes(config_type, _last_values(settings)))
    known = options.keys() | options_of(config_type, fixed=True).keys() | OWNERS.keys()
    if {setting.key for setting in settings} <= known:
        return options
    return {**all_options(config_type), **options}


def _last_values(settings: Sequence[Setting]) -> dict[str, str]:
    return {key: value.strip() for _, key, value in settings if isinstance(value, str)}


def _require_parts(config_type: type, settings: Sequence[Setting]) -> None:
    """Raise ``ValueError`` if ``settings`` choose a section by the name of a part that is not installed."""
    values = _last_values(settings)
    for name, hint in get_type_hints(config_type).items():
        if (choice := getattr(hint, "chosen_by", None)) and (key := f"{name}.{choice.field}") in values:
            registry.check(choice.parts, values[key], key)


def build_config(
    config_type: type[C], settings: Sequence[Setting], also: Sequence[str] = (), *, stored: bool = False
) -> C:
    """Validate ``settings`` and apply them in order on top of the preset that ``training.mode`` names.

    Args:
        also: names of further options of the command, for hints about misspelled options.
        stored: True for a stored config. There, an option that does not apply, given the other options, may have
            any value; otherwise such an option must have its default.
    """
    parsed = parse_settings(config_type, settings, also)
    options = known_options(config_type, [*join_mappings(field_types(config_type), settings)])
    if "training.mode" in options:
        mode = str(parsed.get("training.mode", ("standard", ""))[0])
        for key, text in PRESETS[mode].items():
            value = _convert(options[key].type, text, f"preset {mode}: {key}")
            parsed.setdefault(key, (value, f"preset {mode}"))
    if not stored and (complete := getattr(config_type, "complete", None)):
        parsed = complete(parsed)
    values = {key: value for key, (value, _) in parsed.items()}
    for key, (value, source) in parsed.items():
        selector = absence(config_type, options, key, values)
        if selector and value != options[key].default and not stored:
            allowed = ", ".join(map(_written, options[key].conditions[selector]))
            now = _written(values.get(selector, options[selector].default))
            raise ValueError(
                f"{source}: {key}: unknown option with {selector} {now}; it exists only with {selector} {allowed}"
            )
        if selector:
            del values[key]
    sources = {key: source for key, (_, source) in parsed.items()}
    return _construct(config_type, values, sources, chosen_classes(config_type, values))


def _written(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_settings(argv: Sequence[str]) -> Settings:
    """Return the ``--config`` files and the other flags of a command line, without ``--help``; ``--key=value`` is
    also allowed."""
    files: list[str] = []
    flags: list[Setting] = []
    words = [word for word in argv if word not in HELP]
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ValueError(f"command line: {word}: not an option; options look like --section.key value")
        key, has_value, value = word[2:].partition("=")
        values = [value] if has_value else []
        while not has_value and words and not words[0].startswith("--"):
            values.append(words.pop(0))
        if key == "config":
            if not values:
                raise ValueError("command line: config: needs a file, such as --config recipe.yaml")
            files.extend(values)
        else:
            flags.append(Setting(COMMAND_LINE, key, values if len(values) != 1 else values[0]))
    return Settings(tuple(files), tuple(flags))


def read_yaml(path: Path) -> list[Setting]:
    """Return the settings of a YAML recipe in file order, with line numbers. Scalars stay text, because YAML would
    convert some of them (octal numbers, ``off``, ``1:30``)."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        hint = _near_recipe(path) if isinstance(error, FileNotFoundError) else ""
        raise ValueError(f"command line: config: cannot read {path}: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise ValueError(f"{path}{line}: not valid YAML: {problem}") from None
    except RecursionError:
        raise ValueError(f"{path}{_deep_place(path)}: lists or mappings are nested too deeply") from None
    return list(_yaml_settings(path, root, "")) if root is not None else []


def _near_recipe(path: Path) -> str:
    places = (path.parent.glob("*.yaml"), *(at.rglob("*.yaml") for at in (Path("configs"), RECIPES)))
    recipes = [recipe for place in places for recipe in sorted(place)]
    same = [str(recipe) for recipe in recipes if recipe.stem == path.stem]
    close = difflib.get_close_matches(path.stem, [recipe.stem for recipe in recipes], n=1)
    near = same or [str(recipe) for recipe in recipes if recipe.stem in close]
    return f"; did you mean {near[0]!r}?" if near else ""


def _deep_place(path: Path) -> str:
    """Return the line, and the last name before it, where the nesting of a YAML file exceeds 50 levels."""
    depth, name = 0, ""
    for event in yaml.parse(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        name = event.value if isinstance(event, yaml.ScalarEvent) else name
        if depth > 50 and event.start_mark:
            return f":{event.start_mark.line + 1}" + (f": {_short(name)}" if name else "")
    return ""


def _yaml_settings(
    path: Path, node: yaml.Node, prefix: str, above: tuple[yaml.Node, ...] = ()
) -> Iterator[Setting]:
    source = f"{path}:{node.start_mark.line + 1}"
    key = prefix.rstrip(".")
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            where = f"{path}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise ValueError(f"{where}: {key or 'top level'}: a key must be a string, not a list or a mapping")
            if key_node.value in seen:
                raise ValueError(f"{where}: {prefix}{key_node.value}: occurs twice in this file; remove one")
            seen.add(key_node.value)
            if isinstance(value_node, yaml.MappingNode) and not value_node.value:
                if prefix:
                    yield Setting(where, f"{prefix}{key_node.value}", [])
                continue
            if value_node in (*above, node):
                raise ValueError(f"{where}: {prefix}{key_node.value}: the alias contains itself; remove it")
            yield from _yaml_settings(path, value_node, f"{prefix}{key_node.value}.", (*above, node))
    elif not key:
        raise ValueError(f"{source}: not a recipe; write sections such as 'model:' with keys under them")
    elif isinstance(node, yaml.SequenceNode):
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise ValueError(f"{source}: {key}: a list may contain only scalars")
        if any(item.tag == NULL for item in node.value):
            raise ValueError(
                f"{source}: {key}: the list has an item without a value; add a value or remove the item"
            )
        yield Setting(source, key, [item.value for item in node.value])
    else:
        if node.tag == NULL:
            raise ValueError(f"{source}: {key}: has no value; add a value or remove the key")
        yield Setting(source, key, node.value)


def _unknown(key: str, types: Collection[str], also: Sequence[str] = ()) -> str:
    """Return the end of the message for an unknown key, with the most similar option."""
    section, _, name = key.rpartition(".")
    sections = sorted({known.rpartition(".")[0] for known in types})
    if key in sections:
        return f"is a section; use one of its options, such as {next(k for k in types if k.startswith(key))}"
    if section in types:
        return f"unknown option; {section} is an option, not a section"
    if section not in sections:
        owners = [known for known in types if known.rpartition(".")[2] == key]
        near = _did_you_mean(key, also) if not section else ""
        hint = near or _did_you_mean(section or key, sections)
        hint = f"; did you mean {owners[0]!r}?" if owners else hint
        return f"unknown section; allowed: {', '.join(s for s in sections if s)}{hint}"
    names = [known.rpartition(".")[2] for known in types if known.rpartition(".")[0] == section]
    hint = _did_you_mean(name, names, f"{section}." if section else "")
    return f"unknown option{hint}" if hint else f"unknown option; allowed in {section}: {', '.join(names)}"


def _did_you_mean(word: str, allowed: Sequence[str], prefix: str = "") -> str:
    longer = [name for name in allowed if name.endswith(f"_{word}")]
    close = longer or difflib.get_close_matches(word, allowed, n=1)
    return f"; did you mean {' or '.join(repr(prefix + name) for name in close)}?" if close else ""


def _convert(hint: Any, value: str | list[str], where: str) -> Any:
    """Return ``value`` converted to the type ``hint``: bool, int, float, str, Literal or tuple[X, ...]."""
    if get_origin(hint) is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_convert(get_args(hint)[0], item, where) for item in items)
    if isinstance(value, list):
        raise ValueError(f"{where}: requires exactly one value, got {len(value)}")
    text = value.strip()
    if get_origin(hint) is Literal:
        allowed = get_args(hint)
        if text in allowed:
            return text
        raise ValueError(
            f"{where}: {_short(text)!r} is not allowed; allowed: {', '.join(allowed)}{_did_you_mean(text, allowed)}"
        )
    if hint is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError(f"{where}: {_short(text)!r} is not allowed; allowed: true, false")
    if hint is int:
        return _whole(text, where)
    if hint is float:
        return _number(text, where, "a number")
    return value


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


def _number(text: str, where: str, what: str) -> float:
    try:
        if not re.fullmatch(r"[-+0-9.eE_]+|[-+]?(nan|inf|infinity)", text, re.IGNORECASE):
            raise ValueError
        number = float(text)
    except ValueError:
        raise ValueError(f"{where}: {_short(text)!r} is not {what}") from None
    if not math.isfinite(number):
        raise ValueError(f"{where}: {_short(text)!r} is not allowed; allowed: a finite number")
    return number


def _whole(text: str, where: str) -> int:
    if re.fullmatch(r"[-+]?\d[\d_]*", text):
        if len(text) > _MOST_DIGITS:
            raise ValueError(f"{where}: {_short(text)!r} has {len(text)} digits; allowed: at most {_MOST_DIGITS}")
        return int(text)
    number = _number(text, where, "a whole number")
    if number != int(number):
        raise ValueError(f"{where}: {_short(text)!r} is not a whole number")
    return int(number)


def _construct(
    config_type: type[C],
    values: dict[str, Value],
    sources: dict[str, str],
    chosen: Sequence[type],
    prefix: str = "",
) -> C:
    arguments: dict[str, Any] = {}
    for name, hint in get_type_hints(config_type).items():
        if dataclasses.is_dataclass(hint):
            section = class_of(hint, chosen)  # type: ignore[arg-type]
            arguments[name] = _construct(section, values, sources, (), f"{prefix}{name}.")
        elif f"{prefix}{name}" in values:
            arguments[name] = values[f"{prefix}{name}"]
    try:
        return config_type(**arguments)
    except ValueError as error:
        # The message begins with the name of the field; add the source if the value has one.
        key = str(error).partition(":")[0]
        source = sources.get(key)
        raise ValueError(f"{source}: {error}" if source and str(error).startswith(key) else str(error)) from None


def to_dict(config: "DataclassInstance", only: Collection[str] | None = None) -> dict[str, Any]:
    """Return the options of ``config``, or those that ``only`` names, as nested plain dicts, lists and scalars.
    Options that do not exist with the values of the others are omitted."""
    flat, tree, options = flat_values(config), dict[str, Any](), _options_in(config)
    for key, value in flat.items():
        if (only is None or key in only) and not absence(type(config), options, key, flat):
            *sections, name = key.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value
    return tree


def flat_values(config: "DataclassInstance") -> dict[str, Any]:
    """Return the value of every option by dotted name; tuples are converted to lists."""
    values = {key: operator.attrgetter(key)(config) for key in _options_in(config)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _options_in(config: "DataclassInstance") -> dict[str, Option]:
    sections = (type(value) for value in vars(config).values())
    chosen = tuple(section for section in sections if dataclasses.is_dataclass(section))
    return options_of(type(config), chosen)  # type: ignore[arg-type]


def dump_yaml(config: "DataclassInstance", only: Collection[str] | None = None) -> str:
    """Return the resolved config as YAML that ``--config`` reads back to an equal config; ``only``: the names of
    the options to return (None: all)."""
    return yaml.safe_dump(to_dict(config, only), sort_keys=False, allow_unicode=True, width=1000)


def from_dict(config_type: type[C], values: Mapping[str, Json]) -> C:
    """Build a config from the nested values that :func:`to_dict` returns; raises ``ValueError`` for unknown keys or
    wrong types."""
    settings: list[Setting] = []

    def walk(node: Mapping[str, Json], prefix: str) -> None:
        for name, value in node.items():
            if isinstance(value, Mapping):
                walk(value, f"{prefix}{name}.")
            else:
                text = [str(item) for item in value] if isinstance(value, list | tuple) else str(value)
                settings.append(Setting(STORED, f"{prefix}{name}", text))

    walk(values, "")
    return build_config(config_type, settings, stored=True)


def differences(old: "DataclassInstance", new: "DataclassInstance") -> list[str]:
    """Return ``key: old -> new`` for every option in which two configs of the same type differ."""
    before, after = flat_values(old), flat_values(new)
    return [f"{key}: {before[key]} -> {after[key]}" for key in after if before.get(key, after[key]) != after[key]]
