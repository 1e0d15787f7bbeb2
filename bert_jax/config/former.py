"""Fields of the network in files and commands of earlier versions, and the fields that hold their values now.

This module does not import jax.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Literal, NamedTuple, get_args

from bert_jax.config.architecture import HeadPart, ModelConfig

# Fields of other encoders that the files of every model held before each encoder had a section of its own.
FORMER_FIELDS: dict[str, object] = {
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


class Merge(NamedTuple):
    """A field that holds the values of several former fields."""

    field: str
    # Former field -> its type.
    former: Mapping[str, Any]
    # (values of former fields, value of the field without them) -> value of the field.
    value: Callable[[Mapping[str, Any], Any], Any]


def _without_bias(former: Mapping[str, Any], now: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for part, name in _BIASES.items() if not former.get(name, part not in now))


def _mlm_layer(former: Mapping[str, Any], now: str) -> str:
    kept: str = former.get("mlm_activation", "same" if now == "none" else now)
    return kept if former.get("mlm_transform", now != "none") else "none"


def _pooler_layer(former: Mapping[str, Any], now: tuple[str, ...]) -> tuple[str, ...]:
    if not former.get("pooler_dense", now != ("none",)):
        return ("none",)
    kept = (*(("tanh",) if now == ("none",) else now), "same")
    first, second = former.get("pooler_activation", kept[0]), former.get("sequence_activation", kept[1])
    return (first,) if second == "same" else (first, second)


def _head_parts(former: Mapping[str, Any], now: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for part in get_args(HeadPart) if former.get(part, part in now))


MERGES = (
    Merge("without_bias", dict.fromkeys(_BIASES.values(), bool), _without_bias),
    Merge("head_parts", dict.fromkeys(get_args(HeadPart), bool), _head_parts),
    Merge(
        "mlm_layer",
        {
            "mlm_transform": bool,
            "mlm_activation": Literal["same", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"],
        },
        _mlm_layer,
    ),
    Merge(
        "pooler_layer",
        {
            "pooler_dense": bool,
            "pooler_activation": Literal["tanh", "gelu", "gelu_tanh", "relu", "silu"],
            "sequence_activation": Literal["same", "tanh", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"],
        },
        _pooler_layer,
    ),
)
# Former option -> type of its values.
FORMER_OPTIONS = {f"model.{name}": kind for merge in MERGES for name, kind in merge.former.items()}


class OptionsInOrder:
    """Values of former and present options, which are set one after the other."""

    def __init__(self) -> None:
        self._former: dict[str, Any] = {}
        self._present: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> tuple[str, Any]:
        """Set the option ``key`` to ``value``; return the present option that holds it, and the value of this
        option."""
        section, _, name = key.rpartition(".")
        for merge in MERGES if section == "model" else ():
            if name == merge.field:
                self._former = {one: old for one, old in self._former.items() if one not in merge.former}
                self._present[name] = value
            elif name in merge.former:
                self._former[name] = value
                now = self._present.get(merge.field, getattr(ModelConfig, merge.field))
                return f"model.{merge.field}", merge.value(self._former, now)
        return key, value


def current_fields(
    values: Mapping[str, Any], prefix: str = "",
    typed: Callable[[Any, Any, str], Any] = lambda kind, value, name: value,
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
        given = {name: kind for name, kind in merge.former.items() if f"{prefix}{name}" in found}
        if given and f"{prefix}{merge.field}" not in found:
            former = {name: typed(kind, found.pop(f"{prefix}{name}"), name) for name, kind in given.items()}
            value = merge.value(former, getattr(ModelConfig, merge.field))
            found[f"{prefix}{merge.field}"] = list(value) if isinstance(value, tuple) else value
    return found
