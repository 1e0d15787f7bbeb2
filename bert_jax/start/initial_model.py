"""The start of a run from another model (``--init_from``): its weights, changed and extended as the options say."""

import dataclasses
from pathlib import Path
from typing import Literal

from bert_jax import registry
from bert_jax.config import ModelConfig, PretrainConfig, RunOptions
from bert_jax.config.options import Setting
from bert_jax.config.schema import PRESETS
from bert_jax.interop.hf.families.long import has_own_projections
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.readers import leaves_activation_open, leaves_case_open, read_weights
from bert_jax.interop.taken_over import described, kept_facts
from bert_jax.io.hub import model_path
from bert_jax.start.fixed_options import (
    NEXT_SENTENCE,
    Given,
    fixed_settings,
    model_section,
    value_of,
    whole_name,
)
from bert_jax.start.start import Start
from bert_jax.start.state import extend_positions
from bert_jax.start.vocabulary import extend_rows, plan_vocabulary
from bert_jax.training.state import POSITIONS
from bert_jax.training.workdir import record_text


def pretraining_from(options: RunOptions, given: Given, start: ModelBundle | None = None) -> Start:
    """Plan the start of a pretraining run from ``--init_from``, with the words and positions that the run adds.
    ``start``: see :func:`initial_weights`."""
    values, name = {key: value for key, (value, _) in given.items()}, options.init_from
    read, weights = initial_weights(options, given, start)
    source = weights.spec.model
    vocabulary = plan_vocabulary(options, weights, values)
    positions, position_notes = _positions(options, source, given)
    model = dataclasses.replace(
        source,
        vocab_size=max(source.vocab_size, len(vocabulary.extension.pieces)),
        max_position_embeddings=positions,
    )
    params = extend_rows(weights.params, vocabulary.extension.made_of, model.vocab_size)
    table, how = params.get(POSITIONS), options.extend_positions
    if table is not None and how and positions > len(table):
        params[POSITIONS] = extend_positions(table, positions, source.position_offset, how)
    longer = bool(options.extend_positions) or source.max_length > read.spec.model.max_length
    kept, kept_notes = kept_facts(weights.spec, longer=longer)
    kept_notes += [f"kept from the initial model for embed and exports: {described(kept)}"] if kept else []
    pairs: tuple[Setting, ...] = ()
    if source.type_vocab_size < 2 and NEXT_SENTENCE not in given:
        pairs = (Setting(name, NEXT_SENTENCE, "none"),)
        kept_notes.append(f"{NEXT_SENTENCE}: none, because {name} has no token types")
    fixed = {"data.vocab": vocabulary.path, **vocabulary.settings}
    before, after = (model_section(config) | fixed for config in (source, model))
    return Start(
        settings=fixed_settings(given, before, after, name) + pairs,
        messages=(f"starts from {name}", *weights.notes, *vocabulary.notes, *position_notes, *kept_notes),
        weights=dataclasses.replace(weights, spec=dataclasses.replace(weights.spec, model=model), params=params),
        record=record_text(name, before, after, trained_global=has_own_projections(weights.params), kept=kept),
        source=whole_name(name),
        vocabulary=None if vocabulary.content is None else (vocabulary.path, vocabulary.content),
    )


def _positions(options: RunOptions, source: ModelConfig, given: Given) -> tuple[int, list[str]]:
    """Return the number of rows that the run needs in the position table, and lines for the log."""
    rows = source.max_position_embeddings
    if source.position_embeddings != "learned":
        return value_of(given, "model.max_position_embeddings", rows), []
    key, value = "data.seq_length", value_of(given, "data.seq_length", PretrainConfig().data.seq_length)
    wanted, table = value + source.position_offset, value_of(given, "model.max_position_embeddings", 0)
    if table > wanted:
        key, wanted, value = "model.max_position_embeddings", table, table
    where = given[key][1] if key in given else "the default"
    if wanted <= rows:
        unused = f"--extend_positions: not needed, because {options.init_from} has {source.max_length} positions"
        return rows, [unused] if options.extend_positions else []
    if not options.extend_positions:
        few = f"{options.init_from} has {source.max_length} positions"
        raise ValueError(f"{where}: {key}: {value}, but {few}; lower {key}, or set --extend_positions")
    grown = wanted - source.position_offset
    return wanted, [f"positions: {source.max_length} -> {grown} ({options.extend_positions})"]


def initial_weights(
    options: RunOptions, given: Given, start: ModelBundle | None
) -> tuple[ModelBundle, ModelBundle]:
    """Return the model of ``--init_from`` twice: as read, and as changed by the options (``RunOptions.changes``).
    ``start`` is this model, if it is not read from files.

    Raises ``ValueError`` (one line) if it cannot be read, or not be changed.
    """
    name = model_path(options.init_from)
    weights = start or read_weights(name, _reading(name, given, allow_mismatch=options.allow_mismatch))
    if not options.changes:
        return weights, weights
    change = registry.load("extensions", f"--{options.changes[0]}")
    return weights, change(options, weights, given)


def _reading(path: Path, given: Given, *, allow_mismatch: bool = False) -> ReadOptions:
    """Return ``ReadOptions`` with the case of the vocabulary and the GELU variant that the options specify.

    Each of the two is set only if the files at ``path`` are in a format that does not always specify it.
    """
    preset = PRESETS[value_of(given, "training.mode", "standard")]
    activation = value_of(given, "model.activation", preset.get("model.activation"))
    is_open = leaves_activation_open(path)
    # A model of this library records the case of its vocabulary, which the options must not replace.
    case: bool | None = value_of(given, "data.lower_case", None) if leaves_case_open(path) else None
    known: tuple[Literal["gelu", "gelu_tanh"], ...] = ("gelu", "gelu_tanh")
    gelu = next((one for one in known if is_open and one == activation), None)
    return ReadOptions(lower_case=case, activation=gelu, allow_mismatch=allow_mismatch)
