"""Parts that are found by name: those of the rooms of contrib, and those of other installed packages.

A room is a package in ``bert_jax/contrib`` or ``data_pipeline/contrib``. Its ``__init__.py`` holds a table of
strings for each kind of part, such as ``COMMANDS = {"plan": "bert_jax.contrib.planner.commands:COMMANDS"}``, so
that nothing is imported before it is used, and a deleted room takes its names along. Another package declares an
entry point of the group ``bert_jax.KIND``, such as ``bert_jax.encoders``.
"""

import difflib
import functools
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any, Literal

# COMMANDS: subcommands of bert-jax. ENCODERS: values of model.encoder. OBJECTIVES: values of objective.name.
# ENCODER_OPTIONS, OBJECTIVE_OPTIONS: the class of the section model or objective for these, where it has options of
# its own; importing its module does not import jax. FORMATS: files of models (interop/model_bundle.py, Format).
# LOGGERS: values of --loggers (training/logging/logger.py, Logger). PRETRAIN_OPTIONS, FINETUNE_OPTIONS,
# FINETUNE_CONFIG: subclasses of RunOptions, FinetuneRunOptions, FinetuneConfig with more options, and what these do
# (config/options.py, extended). EXTENSIONS: what an option of the trunk needs from a room. DATA_COMMANDS,
# DATA_EXTENSIONS: the same for bert-jax data, from the rooms of data_pipeline.
Kind = Literal[
    "commands", "encoders", "encoder_options", "objectives", "objective_options", "formats", "loggers",
    "extensions", "pretrain_options", "finetune_options", "finetune_config",
    "data_commands", "data_extensions",
]  # fmt: skip
# The parts of the trunk that have names in options.
_TRUNK: dict[Kind, dict[str, str]] = {
    "encoders": {"transformer": "bert_jax.model.bert:Encoder"},
    "objectives": {
        "masked_lm": "bert_jax.objectives.masked_lm:MaskedLm",
        "masked_lm_classes": "bert_jax.objectives.masked_lm_classes:MaskedLmClasses",
        "causal_lm": "bert_jax.objectives.causal_lm:CausalLm",
        "replaced_tokens": "bert_jax.objectives.replaced_tokens:ReplacedTokens",
    },
    "loggers": {"tensorboard": "bert_jax.training.logging.tensorboard:TensorBoard"},
}


# The option that names the Python file of an encoder.
MODULE = "--model.module"
# How else a part can be given.
_FILE: dict[Kind, str] = {"encoders": f", or name its file with {MODULE}"}
# The parts that this process adds.
_ADDED: dict[Kind, dict[str, str]] = {}


def add(kind: Kind, name: str, target: str) -> None:
    """Add a part that only this process knows, "module:attribute"."""
    _ADDED[kind] = _ADDED.get(kind, {}) | {name: target}
    names.cache_clear()


def module_option() -> list[str]:
    """Return the option with which another process adds the encoder of a file that this process has added; empty:
    none."""
    modules = (sys.modules[target.partition(":")[0]] for target in _ADDED.get("encoders", {}).values())
    return [word for module in modules for word in (MODULE, str(module.__file__))]


@functools.cache
def names(kind: Kind) -> Mapping[str, str]:
    """Return name -> "module:attribute" (or "module") of every part of a kind; commands and formats of the trunk
    are in separate tables.

    Raises ``ValueError`` if two parts have the same name.
    """
    found = dict(_TRUNK.get(kind, {}))
    package = "data_pipeline.contrib" if kind.startswith("data_") else "bert_jax.contrib"
    tables = [getattr(importlib.import_module(room), kind.upper(), {}) for room in _rooms(package)]
    tables += [{point.name: point.value} for point in importlib.metadata.entry_points(group=f"bert_jax.{kind}")]
    tables.append(_ADDED.get(kind, {}))
    for table in tables:
        for name, target in table.items():
            if name in found:
                raise ValueError(f"{kind}: {name} is {found[name]} and {target}; uninstall one of the packages")
            found[name] = target
    return found


def is_of_trunk(kind: Kind, name: str) -> bool:
    """Return True if the trunk has the part ``name``, so that no room is asked for it."""
    return name in _TRUNK.get(kind, {})


def check(kind: Kind, name: str, option: str) -> None:
    """Raise ``ValueError`` unless ``name``, the value of ``option``, is the name of a part."""
    if not is_of_trunk(kind, name) and name not in names(kind):
        close = difflib.get_close_matches(name, names(kind), n=1)
        missing = f"; install the package that brings it{_FILE.get(kind, '')}"
        hint = f"; did you mean {close[0]!r}?" if close else missing
        raise ValueError(f"{option}: {name!r} is not allowed; allowed: {', '.join(names(kind))}{hint}")


def load(kind: Kind, name: str) -> Any:
    """Return the part ``name``. Raises ``ValueError`` if no room and no installed package has it."""
    found = _TRUNK[kind] if is_of_trunk(kind, name) else names(kind)
    if name not in found:
        raise ValueError(f"{name}: not installed; the {kind} that are: {', '.join(sorted(names(kind))) or 'none'}")
    module, _, attribute = found[name].partition(":")
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
