"""Support of the fields of ``ModelConfig`` by formats and kernels.

A format or kernel has a table of the fields that it supports and of their values. A field that its table lacks is
refused away from the default, so a new switch of the network is refused by name wherever nobody has added it.
"""

import dataclasses
from typing import Any

from bert_jax.config.schema import ModelConfig

ANY = ("any value",)
# Field -> supported values.
Supported = dict[str, tuple[Any, ...]]
SIZES: Supported = dict.fromkeys(
    (
        "vocab_size", "hidden_size", "num_layers", "num_attention_heads", "intermediate_size",
        "max_position_embeddings", "type_vocab_size", "hidden_dropout", "attention_dropout", "initializer_range",
    ),
    ANY,
)  # fmt: skip
# Of what runs or stores the network itself.
EVERY_FIELD: Supported = {field.name: ANY for field in dataclasses.fields(ModelConfig)}


def unsupported_fields(model: ModelConfig, supported: Supported, name: str) -> list[str]:
    """Return a line for each field of ``model`` whose value ``name`` does not support."""
    lines = []
    for field in dataclasses.fields(model):
        value, allowed = getattr(model, field.name), supported.get(field.name, (field.default,))
        if allowed is not ANY and value not in allowed:
            values = ", ".join(map(str, allowed))
            lines.append(f"model.{field.name}: {value} is not supported by {name} (supported: {values})")
    return lines


def check_fields(model: ModelConfig, supported: Supported, name: str) -> None:
    """Raise ``ValueError`` with :func:`unsupported_fields`."""
    lines = unsupported_fields(model, supported, name)
    if lines:
        raise ValueError("; ".join(lines))
