"""Options that the initial model of a run, or an earlier phase, fixes, and their record.

``WORKDIR/warm_start.yaml`` records the options of the initial model, so that a resumed run and later phases need
neither these options nor the initial model.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from bert_jax.config import ModelConfig
from bert_jax.config.lengths import LENGTH, LENGTHS, OF_LENGTH
from bert_jax.config.loader import Setting, flat_values
from bert_jax.config.schema import Value
from bert_jax.io.hub import is_hub_name
from bert_jax.io.storage import Location, location
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.launch import RECORD
from bert_jax.training.workdir import read_record, record_text

# Options that may differ between a run and its initial model, because they change no parameter. Vocabularies are
# compared by their pieces, not by data.vocab.
MAY_DIFFER = {
    "data.vocab", "model.initializer_range", "model.initialization", "model.pooling", "model.hidden_dropout",
    "model.attention_dropout", "model.embedding_dropout", "model.attention_output_dropout",
    "model.feed_forward_dropout",
}  # fmt: skip
# Model options that a new phase may change, because they do not affect the parameters.
PHASE_MAY_CHANGE = {
    "model.hidden_dropout", "model.attention_dropout", "model.embedding_dropout", "model.attention_output_dropout",
    "model.feed_forward_dropout", "model.rotary_base", "model.rotary_window_base", "model.attention_windows",
    "model.attention_block", "model.random_blocks",
}  # fmt: skip
# Option that a new phase may change if there is no position table, or if the launch extends it.
TABLE_ROWS = "model.max_position_embeddings"
# Options that count from the first step of a phase.
OF_PHASE = (
    "training.num_tokens", "optimizer.warmup_tokens", "optimizer.wsd_decay_tokens", "optimizer.restart_schedule",
)  # fmt: skip
_GENERATOR, _FIRST_STEP = "execution.prng", "training.first_step"
# Sentence pairs of pretraining, which a model without token types cannot read.
NEXT_SENTENCE = "data.next_sentence"
# Options whose defaults follow from the model and the data, and the options that replace each of them. A resumed
# run keeps their values, also those that were the defaults of an older version.
_OF_FINETUNING = {"optimizer.learning_rate": (), "training.num_epochs": (LENGTH,)}
_OF_PRETRAINING = {
    LENGTH: LENGTHS,
    **dict.fromkeys(OF_LENGTH, ()),
    "optimizer.warmup_steps": ("optimizer.warmup_tokens",),
    NEXT_SENTENCE: (),
}

T = TypeVar("T")
# Key of an option -> its typed value, and the origin of the value for messages.
Given = Mapping[str, tuple[Value, str]]


def value_of(given: Given, key: str, default: T) -> T:
    """Return the value of the option ``key``, ``default`` if it is not given."""
    value: Any = given[key][0] if key in given else default
    found: T = value
    return found


def whole_name(source: str) -> str:
    """Return ``source``, the value of ``--init_from``, as an absolute path with links resolved; a URL and a name on
    the Hugging Face Hub are unchanged."""
    return source if not source or is_hub_name(Path(source)) else str(location(source).resolve())


def vocabulary_file(workdir: Location) -> Location | None:
    """Return the vocabulary of a pretraining run, or None if it has none or several."""
    paths = [
        path for path in workdir.glob("*.*") if path.suffix in (".txt", ".model") or path.name == "tokenizer.json"
    ]
    return paths[0] if len(paths) == 1 else None


def model_section(model: ModelConfig) -> dict[str, Any]:
    """Return the options of the section ``model`` by key."""
    return {f"model.{key}": value for key, value in flat_values(model).items()}


def fixed_settings(
    given: Given, source: Mapping[str, Any], resolved: Mapping[str, Any], name: str,
    may_differ: Collection[str] = MAY_DIFFER,
) -> tuple[Setting, ...]:  # fmt: skip
    """Return a setting for each key of ``resolved``, except the keys in ``may_differ`` that the command line sets.

    Raises ``ValueError`` if the command line sets any other of these keys to a value that is neither in ``source``
    nor in ``resolved``.
    """
    own = set(may_differ) & given.keys()
    for key, (value, where) in given.items():
        as_stored = list(value) if isinstance(value, tuple) else value
        if key in resolved and key not in own and as_stored not in (source[key], resolved[key]):
            raise ValueError(
                f"{where}: {key}: {as_stored}, but {name} has {source[key]}; omit {key} or set that value"
            )
    texts = {k: [str(x) for x in v] if isinstance(v, list) else str(v) for k, v in resolved.items() if k not in own}
    return tuple(Setting(name, key, text) for key, text in texts.items())


def recorded_settings(workdir: Location, given: Given) -> tuple[Setting, ...]:
    """Return :func:`fixed_settings` of the record of ``workdir``; no setting if it has no record."""
    record = read_record(workdir)
    if record is None:
        return ()
    return fixed_settings(given, record["source"], record["resolved"], f"{workdir / RECORD}")


def plan_phase(name: str, given: Given) -> tuple[tuple[Setting, ...], str]:
    """Return the settings of a new phase that continues the run in the workdir ``name``, and the text of its
    record: the record of the earlier phase, changed by the options in ``PHASE_MAY_CHANGE`` that the command line
    sets. The phase gets its first step if an option counts from it.
    """
    folder = location(name)
    settings: tuple[Setting, ...] = ()
    steps = saved_steps(folder)
    if steps and any(given[key][0] for key in OF_PHASE if key in given):
        settings = (Setting(name, _FIRST_STEP, str(steps[-1])),)
    record = read_record(folder)
    if record is None:
        return settings, ""
    source, resolved, may_differ = (
        record["source"],
        record["resolved"],
        MAY_DIFFER | PHASE_MAY_CHANGE | {TABLE_ROWS},
    )
    settings += fixed_settings(given, source, resolved, f"{folder / RECORD}", may_differ)
    changed = {key: given[key][0] for key in may_differ & given.keys() & resolved.keys()}
    text = record_text(
        record["init_from"], source, resolved | changed,
        continue_from=whole_name(name), trained_global=record["trained_global"], kept=record["kept"],
    )  # fmt: skip
    return settings, text


def with_length(settings: tuple[Setting, ...], given: Given) -> tuple[Setting, ...]:
    """Return the settings of a pretraining run, with ``training.num_steps`` 0 if nothing sets its length."""
    is_open = {*given, *(setting.key for setting in settings)}.isdisjoint(LENGTHS)
    return (*settings, Setting("default", LENGTH, "0")) if is_open else settings


def kept_settings(workdir: Location, given: Given) -> tuple[Setting, ...]:
    """Return the settings that a resumed run in ``workdir`` keeps: ``training.first_step`` and, unless the command
    line sets them, ``execution.prng``, because runs that began when its default was threefry keep threefry, and the
    options whose defaults follow from the model and the data.

    Returns no setting if the config of the run is missing or damaged.
    """
    path = workdir / "config.yaml"
    if not path.is_file():
        return ()
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
        prng, first_step = stored["execution"]["prng"], stored["training"].get("first_step", 0)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError):
        return ()  # restoring the checkpoint reports a generator that differs
    kept = {} if _GENERATOR in given else {_GENERATOR: prng}
    if first_step:
        kept[_FIRST_STEP] = first_step
    for key, others in (_OF_FINETUNING if "task" in stored else _OF_PRETRAINING).items():
        section, _, name = key.partition(".")
        if given.keys().isdisjoint((key, *others)) and name in stored.get(section, {}):
            kept[key] = stored[section][name]
    return tuple(Setting(f"{path}", key, str(value)) for key, value in kept.items())
