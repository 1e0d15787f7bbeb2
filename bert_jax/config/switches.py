"""Fields of ``ModelConfig``: those that determine its outputs, and those that formats and kernels support.

A format or kernel has a table of the fields and values that it supports. Other fields must have their default, so a
new option of the network is rejected by name until the table contains it.
"""

import dataclasses
from typing import Any, Literal, get_args

from bert_jax.config.architecture import HeadPart, ModelConfig
from bert_jax.config.schema import Value
from bert_jax.config.spec import HeadsConfig
from bert_jax.json_values import Json

# Fields without an effect on the outputs of a trained model.
TRAINING_ONLY = (
    "hidden_dropout", "attention_dropout", "embedding_dropout", "attention_output_dropout", "feed_forward_dropout",
    "initializer_range", "initialization", "family",
)  # fmt: skip

ANY = ("any value",)
# Field -> supported values.
Supported = dict[str, tuple[Value, ...]]
SIZES: Supported = dict.fromkeys(
    (
        "family", "vocab_size", "hidden_size", "num_layers", "num_attention_heads", "intermediate_size",
        "max_position_embeddings", "type_vocab_size", "hidden_dropout", "attention_dropout", "initializer_range",
    ),
    ANY,
)  # fmt: skip


def every_field(model: ModelConfig) -> Supported:
    """Return the table of the programs and formats that contain the network itself."""
    return dict.fromkeys(
        (field.name for field in dataclasses.fields(ModelConfig.class_for({"encoder": model.encoder}))), ANY
    )


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


def function_of(model: ModelConfig, heads: HeadsConfig | None = None) -> dict[str, Any]:
    """Return the fields of ``model`` that determine the outputs of the encoder and of ``heads`` (None: any heads),
    in a form that is equal for equal functions."""
    of_absent = heads.unread_fields() if heads else ()
    has_classes = heads is None or bool(heads.sequence_labels)
    values = dataclasses.asdict(model) | {
        "embedding_norm": model.has_embedding_norm, "final_norm": model.has_final_norm,
        "mlm_layer": model.mlm_activation,
        "pooler_layer": tuple(dict.fromkeys(map(model.pooler_activation, (False, has_classes)))),
        "attention_windows": model.layer_windows, "layer_heads": model.heads_by_layer,
        "layer_units": model.units_by_layer,
        "head_parts": tuple(
            part for part in get_args(HeadPart) if part in model.head_parts and not part.startswith(of_absent)
        ),
        "without_bias": tuple(
            part for part in model.biased_parts if not model.has_bias(part) and not part.startswith(of_absent)
        ),
    }  # fmt: skip
    rotary = model.position_embeddings == "rotary"
    values["rotary_base"] = model.rotary_base if rotary else 0
    windowed = rotary and any(model.layer_windows)
    values["rotary_window_base"] = model.rotary_base_of(1) if windowed else 0
    if not model.global_tokens and "span_transform" not in model.head_parts:
        values["separator_id"] = 0
    if not model.attention_block:
        values["random_blocks"] = 0
    if model.relative_positions not in ("buckets", "disentangled"):
        values |= {"relative_buckets": 0, "relative_max_distance": 0}
    unread = {*TRAINING_ONLY, *model.unread_fields}
    return {
        field: value for field, value in values.items() if field not in unread and not field.startswith(of_absent)
    }


def training_values(model: ModelConfig) -> dict[str, Json]:
    """Return the fields of ``model`` that have an effect only on training, with the rate of each dropout."""
    places: tuple[Literal["embedding", "attention_output", "feed_forward"], ...]
    places = ("embedding", "attention_output", "feed_forward")
    rates = {f"{place}_dropout": model.dropout_at(place) for place in places}
    others = ("attention_dropout", "initializer_range", "initialization")
    return rates | {name: getattr(model, name) for name in others}
