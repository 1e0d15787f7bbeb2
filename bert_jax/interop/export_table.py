"""Contents of a model that each format can hold: one table, read by the exporter and shown in docs/weights.md."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec
from bert_jax.config.switches import EVERY_FIELD, unsupported_fields
from bert_jax.interop.exchange import ModelBundle, parameter_shapes
from bert_jax.interop.hf import config_json
from bert_jax.interop.hf.config_json import heads_of_class, hf_class
from bert_jax.interop.programs import onnx_layers
from bert_jax.interop.tf1 import names as tf1_names

FORMATS = ("hf", "sentence-transformers", "tf1", "onnx", "stablehlo", "npz")
DTYPES = ("float32", "bfloat16")
Verdict = Literal["yes", "encoder only", "refused"]

# Row -> what it means. A model is in every row that applies to it.
HEAD_ROWS = {
    "no head": "the encoder alone",
    "pooler": "pooled output",
    "mlm": "masked language model",
    "nsp": "sentence pair",
    "sequence": "classes or a value per text",
    "token": "a tag per token",
    "span": "start and end of an answer",
    "choice": "one score per choice",
    "crf": "transitions between tags (the tags' own scores stay)",
    "pair": "classes of two sentence vectors",
    "sentence": "pooling and what follows it (Sentence-BERT)",
    "several heads": "heads that no single transformers class holds",
}
PROPERTY_ROWS = {
    "features": "heads on other hidden states than the last, or behind a BiLSTM",
    "roberta": "family roberta",
    "pre-norm": "LayerNorm before each sub-layer",
    "sinusoidal": "sinusoidal positions",
    "roberta mlm": "family roberta, an MLM head and another activation than gelu",
    "offset": "family bert with model.position_offset above 0, or roberta with 0",
    "gelu": "activation gelu (erf)",
    "gelu_tanh": "activation gelu_tanh",
    "gelu_sigmoid": "activation gelu_sigmoid",
    "relu": "activation relu",
    "epsilon": "LayerNorm epsilon other than 1e-12",
    "bfloat16": "stored as bfloat16",
}
ROWS = {**HEAD_ROWS, **PROPERTY_ROWS}

_Y: Verdict = "yes"
_E: Verdict = "encoder only"
_R: Verdict = "refused"
# Columns in the order of FORMATS.
_CELLS: dict[str, tuple[Verdict, ...]] = {
    "no head":       (_Y, _Y, _Y, _Y, _Y, _Y),
    "pooler":        (_Y, _Y, _Y, _Y, _Y, _Y),
    "mlm":           (_Y, _E, _Y, _Y, _Y, _Y),
    "nsp":           (_Y, _E, _Y, _Y, _Y, _Y),
    "sequence":      (_Y, _E, _Y, _Y, _Y, _Y),
    "token":         (_Y, _E, _E, _Y, _Y, _Y),
    "span":          (_Y, _E, _Y, _Y, _Y, _Y),
    "choice":        (_Y, _E, _E, _Y, _Y, _Y),
    "crf":           (_E, _E, _E, _E, _E, _Y),
    "pair":          (_E, _E, _E, _E, _E, _Y),
    "sentence":      (_E, _Y, _E, _Y, _Y, _Y),
    "several heads": (_R, _E, _Y, _Y, _Y, _Y),
    "features":      (_R, _R, _R, _R, _R, _Y),
    "roberta":       (_Y, _Y, _R, _Y, _Y, _Y),
    "roberta mlm":   (_R, _Y, _R, _Y, _Y, _Y),
    "offset":        (_R, _R, _R, _Y, _Y, _Y),
    "bfloat16":      (_Y, _Y, _R, _Y, _Y, _Y),
}  # fmt: skip
# Rows that state one field of the model: the cells follow from what the writers support.
_FIELD_ROWS: dict[str, tuple[str, Any]] = {
    "pre-norm": ("norm_position", "pre"),
    "sinusoidal": ("position_embeddings", "sinusoidal"),
    **{kind: ("activation", kind) for kind in ("gelu", "gelu_tanh", "gelu_sigmoid", "relu")},
    "epsilon": ("norm_epsilon", 1e-5),
}
# By the order of FORMATS; sentence-transformers loads its encoder with transformers.
_WRITERS = (config_json.SUPPORTED, config_json.SUPPORTED, tf1_names.SUPPORTED, onnx_layers.SUPPORTED)
SUPPORTED = dict(zip(FORMATS, (*_WRITERS, EVERY_FIELD, EVERY_FIELD), strict=True))


def _cells(row: str) -> tuple[Verdict, ...]:
    if row not in _FIELD_ROWS:
        return _CELLS[row]
    model = dataclasses.replace(ModelConfig(), **dict([_FIELD_ROWS[row]]))
    return tuple(_R if unsupported_fields(model, table, "") else _Y for table in SUPPORTED.values())


TABLE: dict[str, dict[str, Verdict]] = {row: dict(zip(FORMATS, _cells(row), strict=True)) for row in ROWS}


def rows_of(spec: ModelSpec, dtype: str = "float32") -> Iterator[str]:
    """Yield the rows of the table that apply to a model."""
    heads, model = spec.heads.present(), spec.model
    if not heads and spec.sentence is None:
        yield "no head"
    yield from heads
    if spec.heads.crf:
        yield "crf"
    if spec.heads.pair_labels:
        yield "pair"
    if spec.heads.features != "last" or spec.heads.bilstm:
        yield "features"
    if spec.sentence is not None:
        yield "sentence"
    try:
        hf_class(spec)
    except ValueError:
        yield "several heads"
    if spec.family == "roberta":
        yield "roberta"
        if spec.heads.mlm and model.activation != "gelu":
            yield "roberta mlm"
    if (model.position_offset > 0) != (spec.family == "roberta"):
        yield "offset"
    for row, (field, value) in _FIELD_ROWS.items():
        if getattr(model, field) == value or (row == "epsilon" and model.norm_epsilon != 1e-12):
            yield row
    if dtype == "bfloat16":
        yield "bfloat16"


def fit(weights: ModelBundle, format: str, dtype: str = "float32") -> tuple[ModelBundle, list[str]]:
    """Return ``weights`` without the parts that ``format`` cannot hold, and a line for each dropped part.

    Raises ``ValueError`` where the table has "refused" and for a switch of the model that the format does not
    support.
    """
    rows = list(rows_of(weights.spec, dtype))
    fields = unsupported_fields(weights.spec.model, SUPPORTED[format], format)
    refused = [row for row in rows if TABLE[row][format] == "refused" and row not in _FIELD_ROWS]
    if "several heads" in refused:
        raise ValueError(
            f"{format}: no transformers class ({weights.spec.family}) holds the heads "
            f"{', '.join(weights.spec.heads.present())} together; choose some with --heads, or use another format"
        )
    if refused or fields:
        others = [
            other
            for other in FORMATS
            if all(TABLE[row][other] != "refused" for row in rows)
            and not unsupported_fields(weights.spec.model, SUPPORTED[other], other)
        ]
        raise ValueError(
            f"{format}: {'; '.join([*fields, *(f'{ROWS[row]}: not supported' for row in refused)])}; "
            f"formats that can: {', '.join(others) or 'none'}"
        )
    notes = []
    dropped = [row for row in rows if TABLE[row][format] == "encoder only" and row != "several heads"]
    if dropped:
        kept = [name for name in _parts(weights.spec) if name not in dropped]
        named = ", ".join(f"{row} ({ROWS[row]})" for row in dropped)
        rest = ", ".join(["the encoder", *kept])
        notes.append(f"WARNING: {format} has no place for {named}: left out; exported: {rest}")
        weights = keep_heads(weights, kept)
    if format == "hf" and heads_of_class(weights.spec) != weights.spec.heads:
        notes.append(f"{hf_class(weights.spec)} has no pooler: its weights are left out")
        weights = keep_heads(weights, [name for name in weights.spec.heads.present() if name != "pooler"])
    return weights, notes


def _parts(spec: ModelSpec) -> list[str]:
    heads = spec.heads
    others = {"crf": heads.crf, "pair": bool(heads.pair_labels), "sentence": spec.sentence is not None}
    return [*heads.present(), *(name for name, there in others.items() if there)]


def keep_heads(weights: ModelBundle, names: Sequence[str]) -> ModelBundle:
    """Return ``weights`` with the heads in ``names`` alone, and the pooler where one of them needs it.

    Raises ``ValueError`` for a name that the model does not have.
    """
    spec, parts = weights.spec, _parts(weights.spec)
    unknown = [name for name in names if name not in parts]
    if unknown:
        raise ValueError(f"heads: the model has no {', '.join(unknown)}; it has {', '.join(parts) or 'none'}")
    old, kept = spec.heads, set(names)
    heads = HeadsConfig(
        pooler=old.pooler and bool(kept & {"pooler", "nsp", "sequence", "choice"}),
        mlm="mlm" in kept,
        nsp="nsp" in kept,
        sequence_labels=old.sequence_labels if "sequence" in kept else (),
        problem=old.problem if "sequence" in kept else "single_label",
        token_labels=old.token_labels if "token" in kept else (),
        span="span" in kept,
        choice="choice" in kept,
        crf=old.crf and {"crf", "token"} <= kept,
        pair_labels=old.pair_labels if {"pair", "sentence"} <= kept else (),
        pair_hidden=old.pair_hidden if {"pair", "sentence"} <= kept else 0,
        features=old.features,
        bilstm=old.bilstm if "token" in kept else 0,
        dropout=old.dropout,
    )
    spec = dataclasses.replace(spec, heads=heads, sentence=spec.sentence if "sentence" in kept else None)
    params = {name: weights.params[name] for name in parameter_shapes(spec)}
    return dataclasses.replace(weights, spec=spec, params=params)
