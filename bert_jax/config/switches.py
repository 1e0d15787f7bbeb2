"""Tables of the fields of ``ModelConfig`` that formats and kernels support.

A format or kernel has a table of the fields and values that it supports. Other fields must have their default, so a
new option of the network is rejected by name until the table contains it.
"""

import dataclasses
from typing import Any

from bert_jax.config.architecture import ModelConfig

ANY = ("any value",)
# Field -> supported values.
Supported = dict[str, tuple[Any, ...]]
SIZES: Supported = dict.fromkeys(
    (
        "family", "vocab_size", "hidden_size", "num_layers", "num_attention_heads", "intermediate_size",
        "max_position_embeddings", "type_vocab_size", "hidden_dropout", "attention_dropout", "initializer_range",
    ),
    ANY,
)  # fmt: skip
# Table of the programs and formats that contain the network itself.
EVERY_FIELD: Supported = {field.name: ANY for field in dataclasses.fields(ModelConfig)}


def unsupported_fields(model: ModelConfig, supported: Supported, name: str) -> list[str]:
    """Return a line for each field of ``model`` whose value is not supported; ``name`` is the format or kernel."""
    lines = []
    for field in dataclasses.fields(model):
        value, allowed = getattr(model, field.name), supported.get(field.name, (field.default,))
        if allowed is not ANY and value not in allowed:
            values = ", ".join(map(str, allowed))
            lines.append(f"model.{field.name}: {value} is not supported by {name} (supported: {values})")
    return lines


def check_fields(model: ModelConfig, supported: Supported, name: str) -> None:
    """Raise ``ValueError`` with the lines of :func:`unsupported_fields` if a field is not supported."""
    lines = unsupported_fields(model, supported, name)
    if lines:
        raise ValueError("; ".join(lines))
