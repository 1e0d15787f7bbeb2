"""Parts that are found by name: those of the rooms of contrib, and those of other installed packages.

A room is a package in ``bert_jax/contrib`` or ``data_pipeline/contrib``. Its ``__init__.py`` holds a table of
strings for each kind of part, such as ``COMMANDS = {"plan": "bert_jax.contrib.planner.commands:COMMANDS"}``, so
that nothing is imported before it is used, and a deleted room takes its names along. Another package declares an
entry point of the group ``bert_jax.commands``, ``bert_jax.objectives`` or ``bert_jax.formats``; the options of the
other kinds are fixed.
"""

import functools
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Mapping
from typing import Any, Literal

# COMMANDS: subcommands of bert-jax. ENCODERS: values of model.encoder. OBJECTIVES: values of objective.name.
# FORMATS: files of models (interop/exchange.py, Format). EXTENSIONS: what an option of the trunk needs from a room.
# DATA_COMMANDS, DATA_EXTENSIONS: the same for bert-jax data, from the rooms of data_pipeline.
Kind = Literal[
    "commands", "encoders", "objectives", "formats", "extensions", "data_commands", "data_extensions"
]  # fmt: skip


@functools.cache
def names(kind: Kind) -> Mapping[str, str]:
    """Return name -> "module:attribute" (or "module") of every part of a kind outside the trunk.

    Raises ``ValueError`` if two parts have the same name.
    """
    found: dict[str, str] = {}
    package = "data_pipeline.contrib" if kind.startswith("data_") else "bert_jax.contrib"
    tables = [getattr(importlib.import_module(room), kind.upper(), {}) for room in _rooms(package)]
    tables += [{point.name: point.value} for point in importlib.metadata.entry_points(group=f"bert_jax.{kind}")]
    for table in tables:
        for name, target in table.items():
            if name in found:
                raise ValueError(f"{kind}: {name} is {found[name]} and {target}; uninstall one of the packages")
            found[name] = target
    return found


def load(kind: Kind, name: str) -> Any:
    """Return the part ``name``. Raises ``ValueError`` if no room and no installed package has it."""
    if name not in names(kind):
        raise ValueError(f"{name}: not installed; the {kind} that are: {', '.join(sorted(names(kind))) or 'none'}")
    module, _, attribute = names(kind)[name].partition(":")
    part = importlib.import_module(module)
    return getattr(part, attribute) if attribute else part


def _rooms(package: str) -> list[str]:
    """Return the names of the packages in ``package``, which may be missing."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    places = spec.submodule_search_locations if spec is not None else None
    return [f"{package}.{room.name}" for room in pkgutil.iter_modules(places or ()) if room.ispkg]
