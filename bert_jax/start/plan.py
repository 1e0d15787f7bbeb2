"""The plan of the start of a run, made before the options are loaded.

An initial model (``--init_from``), an earlier phase (``--continue_from``) or a checkpoint of the run itself fixes
options and the tokenizer. Options on the command line must agree with it.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bert_jax.config import HeadsConfig, ModelSpec, PretrainConfig, RunOptions
from bert_jax.config.loader import Setting, parse_settings
from bert_jax.config.options import field_types
from bert_jax.io.files import require_folder
from bert_jax.io.storage import Location, location
from bert_jax.start.fixed_options import (
    Given,
    kept_settings,
    plan_phase,
    recorded_settings,
    value_of,
    vocabulary_file,
    with_length,
)
from bert_jax.start.start import EXTENSIONS, Start
from bert_jax.start.tokenizer import CASE
from bert_jax.tokenization import FILE_NAMES
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.workdir import read_record

if TYPE_CHECKING:
    from bert_jax.interop.model_bundle import ModelBundle


def plan_start(
    config_type: type, options: RunOptions, workdir: Location, settings: Sequence[Setting],
    model: "ModelBundle | None" = None,
) -> Start:  # fmt: skip
    """Plan the start of a run whose config has the type ``config_type``.

    ``settings`` are those of the config, and ``options`` the others of the run. ``model`` is the model that
    ``options.init_from`` names, if it is not read from files. A run that has a checkpoint resumes from it. Raises
    ``ValueError`` with a one-line message if ``workdir`` is a file, if a model cannot be read, if options
    contradict the model, or if words cannot be added to its vocabulary.
    """
    if isinstance(workdir, Path):
        require_folder(workdir, "--workdir: ")
    given = parse_settings(config_type, settings, [*field_types(type(options))])
    if config_type is PretrainConfig:
        start = _plan_pretraining(options, workdir, given, model)
        start = dataclasses.replace(start, settings=with_length(start.settings, given))
    else:
        from bert_jax.start.finetuning import plan_finetuning

        start = plan_finetuning(options, workdir, given, model)
    return dataclasses.replace(
        start,
        continue_from=location(options.continue_from) if options.continue_from else None,
        extend_positions=options.extend_positions,
        allow_numeric_change=options.allow_numeric_change,
    )


def _plan_pretraining(options: RunOptions, workdir: Location, given: Given, model: "ModelBundle | None") -> Start:
    given_flags = [flag for flag in ("init_from", *EXTENSIONS) if getattr(options, flag)]
    flags = [f"--{flag}" for flag in (*given_flags, *options.changes)]
    if options.init_from and options.continue_from:
        raise ValueError(
            "--init_from and --continue_from: give only one of them; --init_from starts at step 0, and "
            "--continue_from continues an earlier run"
        )
    if saved_steps(workdir):
        message = f"{', '.join(flags)}: ignored, because the run resumes from its own checkpoint"
        settings = recorded_settings(workdir, given) + kept_settings(workdir, given)
        if options.continue_from and not any(setting.key == "data.vocab" for setting in settings):
            settings += _vocabulary_of(workdir, given)
        return Start(settings=settings, messages=(message,) if flags else ())
    if options.continue_from and set(flags) <= {"--extend_positions"}:
        settings, record = plan_phase(options.continue_from, given)
        settings += _vocabulary_of(location(options.continue_from), given)
        return Start(settings=settings, record=record)
    if options.init_from:
        from bert_jax.start.initial_model import pretraining_from  # reads all formats of models

        return pretraining_from(options, given, model)
    if begun := read_record(workdir):
        flag = "continue_from" if begun["continue_from"] else "init_from"
        start = f"was started with --{flag} {begun[flag]} and has no checkpoint"
        raise ValueError(f"{workdir}: the run {start}; give the same --{flag}, or another --workdir")
    if flags:
        first = next((flag for flag in flags if flag != "--extend_positions"), flags[0])
        raise ValueError(f"{first}: requires --init_from, which names the model to extend")
    return Start()


def _vocabulary_of(workdir: Location, given: Given) -> tuple[Setting, ...]:
    """Return the vocabulary of the run in ``workdir`` and its case as settings, so that shards are built with them.
    No settings if an option names a vocabulary, or if the folder of the shards has one."""
    path, shards = vocabulary_file(workdir), value_of(given, "data.shards", "")
    config = workdir / "config.yaml"
    named = value_of(given, "data.vocab", "") or value_of(given, "data.mixture", ())
    if path is None or named or not shards or not config.is_file():
        return ()
    if any((location(shards) / name).is_file() for name in FILE_NAMES.values()):
        return ()
    stored = yaml.safe_load(config.read_text(encoding="utf-8"))["data"]
    names = (*CASE, "word_segmenter")  # determine how the vocabulary is read
    case = {f"data.{name}": str(stored[name]).lower() for name in names if name in stored}
    values = {"data.vocab": str(path.absolute()), **case}
    return tuple(Setting(str(workdir), key, value) for key, value in values.items() if key not in given)


def pretraining_spec(config: PretrainConfig, model: Any) -> ModelSpec:
    """Return the spec of a pretraining run. ``model`` is the model that the objective of the run trains."""
    heads = getattr(model, "heads", HeadsConfig())
    return ModelSpec(model=config.model, heads=heads, family=config.model.family_name)
