"""Options in files and commands of earlier versions, and the options that hold their values now.

This module does not import jax.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import fields
from typing import Any, Literal, NamedTuple, TypedDict, cast, get_args, get_type_hints

from bert_jax.config.architecture import HeadPart, ModelConfig
from bert_jax.config.options import Option
from bert_jax.config.schema import SPIKE_SKIPPED, SPIKE_WINDOW, Value
from bert_jax.json_values import Json

# Fields of other encoders that the files of every model held before each encoder had a section of its own.
FORMER_FIELDS: dict[str, Json] = {
    "context_size": 4, "lstm_cells": 0, "lstm_cell_clip": 0.0, "lstm_projection_clip": 0.0, "lstm_skip": False,
    "lstm_weight_dropout": 0.0, "word_dropout": 0.0, "character_filters": [], "character_size": 16,
    "max_characters": 50, "highway_layers": 2, "character_activation": "relu",
}  # fmt: skip
# Item of without_bias -> the field that was false for it.
_BIASES = {
    "norm": "norm_bias", "qkv": "qkv_bias", "attention_output": "attention_output_bias",
    "feed_forward": "feed_forward_bias", "pooler_layer": "pooler_bias", "sequence_head": "sequence_head_bias",
    "mlm_layer": "mlm_transform_bias", "mlm_output": "mlm_output_bias",
}  # fmt: skip


class Former(TypedDict, total=False):
    """Types of former options, by the last part of their names."""

    norm_bias: bool
    qkv_bias: bool
    attention_output_bias: bool
    feed_forward_bias: bool
    pooler_bias: bool
    sequence_head_bias: bool
    mlm_transform_bias: bool
    mlm_output_bias: bool
    pooler_norm: bool
    token_pooler: bool
    span_transform: bool
    mlm_transform: bool
    mlm_activation: Literal["same", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"]
    pooler_dense: bool
    pooler_activation: Literal["tanh", "gelu", "gelu_tanh", "relu", "silu"]
    sequence_activation: Literal["same", "tanh", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"]
    contiguous: bool
    carry_state: bool
    final_mask_fraction: float
    mask_fraction_steps: int
    span_mean: float
    span_max: int
    generator_width: float
    generator_depth: float
    batch_ramp_tokens: tuple[int, ...]
    spike_deviations: float
    spike_window: int
    spike_rollbacks: int
    spike_skip_batches: int


class Merge(NamedTuple):
    """An option that holds the values of several former options."""

    option: str
    former: tuple[str, ...]
    # (values of former options, value of the option without them) -> value of the option.
    value: Callable[[Former, Any], Value]

    def types(self) -> dict[str, Any]:
        """Return the type of each former option."""
        return {name: _TYPES[_last(name)] for name in self.former}


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _without_bias(former: Former, now: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for part, name in _BIASES.items() if not former.get(name, part not in now))


def _mlm_layer(former: Former, now: str) -> str:
    kept = former.get("mlm_activation", "same" if now == "none" else now)
    return kept if former.get("mlm_transform", now != "none") else "none"


def _pooler_layer(former: Former, now: tuple[str, ...]) -> tuple[str, ...]:
    if not former.get("pooler_dense", now != ("none",)):
        return ("none",)
    kept = (*(("tanh",) if now == ("none",) else now), "same")
    first, second = former.get("pooler_activation", kept[0]), former.get("sequence_activation", kept[1])
    return (first,) if second == "same" else (first, second)


def _head_parts(former: Former, now: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for part in get_args(HeadPart) if former.get(part, part in now))


def _row_order(former: Former, now: str) -> str:
    if former.get("carry_state", now == "carried"):
        return "carried"
    return "contiguous" if former.get("contiguous", now != "shuffled") else "shuffled"


def _final_masking(former: Former, now: tuple[float, ...]) -> tuple[float, ...]:
    share, steps = now or (0.0, 0)
    share, steps = former.get("final_mask_fraction", share), former.get("mask_fraction_steps", steps)
    return (share, steps) if share or steps else ()


def _span_lengths(former: Former, now: tuple[float, ...]) -> tuple[float, ...]:
    mean, most = now
    return former.get("span_mean", mean), former.get("span_max", most)


def _generator_size(former: Former, now: tuple[float, ...]) -> tuple[float, ...]:
    width, depth = (*now, 1.0)[:2]
    width, depth = former.get("generator_width", width), former.get("generator_depth", depth)
    return (width,) if depth == 1 else (width, depth)


def _batch_ramp(former: Former, now: tuple[int, ...]) -> tuple[int, ...]:
    return former["batch_ramp_tokens"] or (() if len(now) % 2 else now)


def _spike_limit(former: Former, now: tuple[float, ...]) -> tuple[float, ...]:
    deviations, window = (*now, *(0.0, SPIKE_WINDOW)[len(now) :])
    deviations = former.get("spike_deviations", deviations)
    return (deviations, former.get("spike_window", window)) if deviations else ()


def _spike_rollback(former: Former, now: tuple[int, ...]) -> tuple[int, ...]:
    most, skipped = (*now, *(0, SPIKE_SKIPPED)[len(now) :])
    most = former.get("spike_rollbacks", most)
    return (most, former.get("spike_skip_batches", skipped)) if most else ()


_TYPES = get_type_hints(Former)
MERGES = (
    Merge("model.without_bias", tuple(f"model.{name}" for name in _BIASES.values()), _without_bias),
    Merge("model.head_parts", tuple(f"model.{name}" for name in get_args(HeadPart)), _head_parts),
    Merge("model.mlm_layer", ("model.mlm_transform", "model.mlm_activation"), _mlm_layer),
    Merge(
        "model.pooler_layer",
        ("model.pooler_dense", "model.pooler_activation", "model.sequence_activation"),
        _pooler_layer,
    ),
    Merge("data.row_order", ("data.contiguous", "objective.carry_state"), _row_order),
    Merge("data.final_masking", ("data.final_mask_fraction", "data.mask_fraction_steps"), _final_masking),
    Merge("data.span_lengths", ("data.span_mean", "data.span_max"), _span_lengths),
    Merge("objective.generator_size", ("objective.generator_width", "objective.generator_depth"), _generator_size),
    Merge("training.batch_ramp", ("training.batch_ramp_tokens",), _batch_ramp),
    Merge("training.spike_limit", ("training.spike_deviations", "training.spike_window"), _spike_limit),
    Merge("training.spike_rollback", ("training.spike_rollbacks", "training.spike_skip_batches"), _spike_rollback),
)
# Former option -> the option that holds its values now.
OWNERS = {name: merge.option for merge in MERGES for name in merge.former}


def former_types(options: Container[str]) -> dict[str, Any]:
    """Return the type of each former option whose values one of ``options`` holds now."""
    return {name: kind for merge in MERGES if merge.option in options for name, kind in merge.types().items()}


class OptionsInOrder:
    """Values of former options and of ``options``, which are set one after the other."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        self._options = options
        self._former: dict[str, Value] = {}
        self._present: dict[str, Value] = {}

    def set(self, key: str, value: Value) -> tuple[str, Value]:
        """Set the option ``key`` to ``value``; return the present option that holds it, and the value of this
        option."""
        for merge in MERGES:
            if key == merge.option:
                self._former = {one: old for one, old in self._former.items() if one not in merge.former}
                self._present[key] = value
            elif key in merge.former:
                self._former[key] = value
                now = self._present.get(merge.option, self._options[merge.option].default)
                return merge.option, merge.value(_of(merge, self._former), now)
        return key, value


def _of(merge: Merge, values: Mapping[str, Value]) -> Former:
    return cast(Former, {_last(key): value for key, value in values.items() if key in merge.former})


def current_fields(
    values: Mapping[str, Any], prefix: str = "",
    typed: Callable[[type, Any, str], Value] = lambda kind, value, name: value,
) -> dict[str, Any]:  # fmt: skip
    """Return ``values``, the fields of a stored model, converted to the current fields: without fields of
    ``FORMER_FIELDS`` that the encoder lacks, with each :class:`Merge` applied, and with tuples as lists.

    ``prefix`` precedes the keys. ``typed`` returns a value of the given type, and raises ``ValueError`` for one of
    another type; its last argument is the name of the field.
    """
    own = ModelConfig.class_for({"encoder": values.get(f"{prefix}encoder")})
    names = {field.name for field in fields(own)}  # type: ignore[arg-type]
    found = dict(values)
    for name, value in FORMER_FIELDS.items():
        if name not in names and found.get(f"{prefix}{name}") == value:
            del found[f"{prefix}{name}"]
    for merge in MERGES:
        field, former = merge.option.removeprefix("model."), dict[str, Value]()
        if field == merge.option or f"{prefix}{field}" in found:
            continue
        for key, kind in merge.types().items():
            if f"{prefix}{_last(key)}" in found:
                former[key] = typed(kind, found.pop(f"{prefix}{_last(key)}"), _last(key))
        if former:
            value = merge.value(_of(merge, former), getattr(ModelConfig, field))
            found[f"{prefix}{field}"] = list(value) if isinstance(value, tuple) else value
    return found
