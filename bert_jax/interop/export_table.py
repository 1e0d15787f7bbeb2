"""The table of the model parts that each export format can represent; docs/weights.md shows it."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from bert_jax import registry
from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, SentenceModule
from bert_jax.config.spec import HEADS_OF
from bert_jax.config.switches import every_field, unsupported_fields
from bert_jax.interop.hf import config_json
from bert_jax.interop.hf.config_json import heads_of_class, hf_class
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.programs import onnx_layers
from bert_jax.interop.tf1 import names as tf1_names

FORMATS = ("hf", "sentence-transformers", "tf1", "onnx", "stablehlo", "npz")
# Formats of folders of Hugging Face, which may have details that only this library reads.
HF_FORMATS = ("hf", "sentence-transformers")
DTYPES = ("float32", "float16", "bfloat16", "int8")
Verdict = Literal["yes", "encoder only", "refused"]

_VERDICTS: dict[str, Verdict] = {"y": "yes", "e": "encoder only", "r": "refused"}
# Row -> meaning, and one letter of _VERDICTS per format in the order of FORMATS. If the letters are empty, the
# verdicts are derived from the tables of the writers. Several rows may apply to one model.
_TABLE = {
    "no head": ("an encoder without a head", "yyyyyy"),
    "pooler": ("pooled output", "yyyyyy"),
    "mlm": ("masked language model", "yeyyyy"),
    "nsp": ("prediction for sentence pairs (NSP, SOP)", "yeyyyy"),
    "rtd": ("replaced-token detection (hf: only family electra)", "yeryyy"),
    "sequence": ("classes or a value per text", "yeyyyy"),
    "token": ("a tag per token", "yeeyyy"),
    "span": ("start and end of an answer", "yeyyyy"),
    "choice": ("one score per choice", "yeeyyy"),
    "crf": ("transitions between tags (the token head is kept)", "yeeeey"),
    "pair": ("classifier of two sentence vectors", "eyeeey"),
    "exits": ("early-exit heads", "yeeeey"),
    "sentence": ("pooling and the modules after it (Sentence-BERT)", "eyeyyy"),
    "several heads": ("heads that no single transformers class combines", "reyyyy"),
    "features": ("heads on hidden states other than the last, or after a BiLSTM", "rrrrry"),
    "roberta": ("family roberta", "yyryyy"),
    "family": ("families other than bert and roberta", "yyryyy"),
    "pre-norm": ("LayerNorm before each sub-layer", ""),
    "sinusoidal": ("sinusoidal positions", ""),
    "roberta mlm": ("family roberta with an MLM head and an activation other than gelu", "ryryyy"),
    "offset": ("model.position_offset above 0 in family bert, or 0 in family roberta", "rrryyy"),
    "gelu": ("activation gelu (erf)", ""),
    "gelu_tanh": ("activation gelu_tanh", ""),
    "gelu_sigmoid": ("activation gelu_sigmoid", ""),
    "relu": ("activation relu", ""),
    "epsilon": ("LayerNorm epsilon other than 1e-12", ""),
    "pruned heads": ("layers with fewer attention heads", ""),
    "pruned units": ("feed-forward layers of different widths", ""),
    "float16": ("stored as float16", "yyryyy"),
    "bfloat16": ("stored as bfloat16", "yyryyy"),
    "int8": ("encoder and embeddings stored as int8, with 8-bit matrix products", "rrryrr"),
}
ROWS = {row: meaning for row, (meaning, _) in _TABLE.items()}
# Head -> fields of HeadsConfig that describe it.
_FIELDS_OF = {
    "pooler": ("pooler",), "mlm": ("mlm",), "nsp": ("nsp",), "rtd": ("rtd",),
    "sequence": ("sequence_labels", "problem", "activation", "both_orders"), "token": ("token_labels", "bilstm"),
    "span": ("span",), "choice": ("choice",), "crf": ("crf",), "pair": ("pair_labels", "pair_hidden"),
    "exits": ("exits",),
}  # fmt: skip
# Head -> the head without which it has no meaning.
_NEEDS = {"crf": "token", "pair": "sentence", "exits": "sequence"}

# Row that tests one field of ModelConfig -> (field, value); its verdicts come from the tables of the writers.
_FIELD_ROWS: dict[str, tuple[str, Any]] = {
    "pre-norm": ("norm_position", "pre"),
    "sinusoidal": ("position_embeddings", "sinusoidal"),
    **{kind: ("activation", kind) for kind in ("gelu", "gelu_tanh", "gelu_sigmoid", "relu")},
    "epsilon": ("norm_epsilon", 1e-5),
    "pruned heads": ("layer_heads", (6, *[12] * 11)),
    "pruned units": ("layer_units", (1024, *[3072] * 11)),
}
# Format -> function that returns a line for each field of a model that the format does not support.
UNSUPPORTED: dict[str, Callable[[ModelSpec], list[str]]] = {
    "hf": lambda spec: config_json.unsupported(spec, "hf"),
    # The encoder alone is written.
    "sentence-transformers": lambda spec: config_json.unsupported(
        dataclasses.replace(spec, heads=HeadsConfig()), "sentence-transformers"
    ),
    "tf1": lambda spec: unsupported_fields(spec.model, tf1_names.SUPPORTED, "tf1"),
    "onnx": lambda spec: unsupported_fields(spec.model, onnx_layers.SUPPORTED, "onnx"),
    "stablehlo": lambda spec: unsupported_fields(spec.model, every_field(spec.model), "stablehlo"),
    "npz": lambda spec: unsupported_fields(spec.model, every_field(spec.model), "npz"),
}


def all_formats() -> tuple[str, ...]:
    """Return the names of all formats; those outside the trunk hold only an encoder."""
    return (*FORMATS, *registry.names("formats"))


def _unsupported(spec: ModelSpec, format: str) -> list[str]:
    """Return a line for each field of the model that ``format`` cannot represent."""
    if format in UNSUPPORTED:
        return UNSUPPORTED[format](spec)
    supported = registry.load("formats", format).supported
    return supported(spec) if callable(supported) else unsupported_fields(spec.model, supported, format)


def _cells(row: str) -> tuple[Verdict, ...]:
    if row not in _FIELD_ROWS:
        return tuple(_VERDICTS[letter] for letter in _TABLE[row][1])
    model = dataclasses.replace(ModelConfig(), **dict([_FIELD_ROWS[row]]))
    spec = ModelSpec(model=model, heads=HeadsConfig())
    return tuple("refused" if UNSUPPORTED[format](spec) else "yes" for format in FORMATS)


TABLE: dict[str, dict[str, Verdict]] = {row: dict(zip(FORMATS, _cells(row), strict=True)) for row in ROWS}


def verdict(row: str, format: str) -> Verdict:
    """Return what ``format`` does with the property ``row`` of a model."""
    if format in FORMATS:
        return TABLE[row][format]
    other = registry.load("formats", format)
    if row in (*DTYPES, *other.holds):
        return "yes" if row in (*other.dtypes, *other.holds) else "refused"
    return "yes" if row == "no head" else "encoder only" if row in (*_FIELDS_OF, "sentence") else "refused"


def rows_of(spec: ModelSpec, dtype: str = "float32") -> Iterator[str]:
    """Return the names of the table rows that apply to a model with ``spec`` whose weights are stored as
    ``dtype``."""
    heads, model = spec.heads, spec.model
    conditions = {
        "no head": not heads.present() and spec.sentence is None,
        **dict.fromkeys(heads.present(), True),
        "crf": heads.crf,
        "pair": heads.pair_labels,
        "exits": heads.exits,
        "features": heads.features != "last" or heads.bilstm,
        "sentence": spec.sentence is not None,
        "several heads": not _has_class(spec),
        "roberta": spec.family == "roberta",
        "family": spec.family not in ("bert", "roberta"),
        "roberta mlm": spec.family == "roberta" and heads.mlm and model.mlm_activation not in ("gelu", "none"),
        "offset": spec.family in ("bert", "roberta") and (model.position_offset > 0) != (spec.family == "roberta"),
        **{row: getattr(model, field) == value for row, (field, value) in _FIELD_ROWS.items()},
        "epsilon": model.norm_epsilon != 1e-12,
        "pruned heads": bool(model.layer_heads),
        "pruned units": bool(model.layer_units),
        **{row: row == dtype for row in DTYPES if row != "float32"},
    }
    return (row for row, applies in conditions.items() if applies)


def _has_class(spec: ModelSpec) -> bool:
    try:
        return bool(hf_class(spec))
    except ValueError:
        return False


def formats_of(spec: ModelSpec, dtype: str = "float32") -> list[str]:
    """Return the names of the formats that can represent a model with ``spec`` whose weights are stored as
    ``dtype``, or at least its encoder."""
    rows = list(rows_of(spec, dtype))
    return [
        format
        for format in all_formats()
        if all(verdict(row, format) != "refused" or row in _FIELD_ROWS for row in rows)
        and not _unsupported(spec, format)
    ]


def fit(weights: ModelBundle, format: str, dtype: str = "float32") -> tuple[ModelBundle, list[str]]:
    """Return ``weights`` without the parts that ``format`` cannot represent, and notes that name the omitted parts.

    Raises ``ValueError`` if the table marks a property of the model as refused by ``format``, or if the format does
    not support the value of a field of ``ModelConfig``.
    """
    rows = list(rows_of(weights.spec, dtype))
    fields = _unsupported(weights.spec, format)
    tested = _FIELD_ROWS if format in FORMATS else (*_FIELD_ROWS, "several heads")
    refused = [row for row in rows if verdict(row, format) == "refused" and row not in tested]
    if "several heads" in refused:
        heads = ", ".join(weights.spec.heads.present())
        remedy = "select some of them with --heads, or use another format"
        raise ValueError(f"{format}: no single transformers class has the heads {heads}; {remedy}")
    if refused or fields:
        others = formats_of(weights.spec, dtype)
        problems = "; ".join([*fields, *(f"{ROWS[row]}: not supported" for row in refused)])
        raise ValueError(f"{format}: {problems}; formats that support this model: {', '.join(others) or 'none'}")
    notes = []
    if weights.spec.heads.both_orders and format != "npz":
        reader = ": bert_jax adds them, other libraries do not" if format in (*HF_FORMATS, "tf1") else ""
        notes.append(f"{format} cannot state that the logits of both orders of a pair are to be added{reader}")
        spec = weights.spec
        kind = "classification" if spec.heads.problem == "single_label" else spec.heads.problem
        single = dataclasses.replace(spec.heads, both_orders=False)
        spec = dataclasses.replace(spec, heads=single, task=spec.task or spec.settings_of(kind))
        weights = dataclasses.replace(weights, spec=spec)
    dropped = [row for row in rows if verdict(row, format) == "encoder only" and row != "several heads"]
    if dropped:
        kept = [name for name in _parts(weights.spec) if name not in dropped]
        named = ", ".join(f"{row} ({ROWS[row]})" for row in dropped)
        rest = ", ".join(["the encoder", *kept])
        notes.append(f"WARNING: {format} cannot represent {named}; the export contains: {rest}")
        weights = keep_heads(weights, kept)
    if format in HF_FORMATS and heads_of_class(weights.spec) != weights.spec.heads:
        notes.append(f"{hf_class(weights.spec)} has no pooler: the weights of the pooler are omitted")
        weights = keep_heads(weights, [name for name in _parts(weights.spec) if name != "pooler"])
    return weights, notes


def _parts(spec: ModelSpec) -> list[str]:
    heads = spec.heads
    others = {"crf": heads.crf, "pair": bool(heads.pair_labels), "exits": bool(heads.exits)}
    others["sentence"] = spec.sentence is not None
    return [*heads.present(), *(name for name, is_present in others.items() if is_present)]


def keep_heads(weights: ModelBundle, names: Sequence[str]) -> ModelBundle:
    """Return ``weights`` with only the heads in ``names`` and those that these need: the token head for
    ``crf``, the modules after the pooling for ``pair``, the sequence head for ``exits``, and the pooler for heads
    that read it.

    Raises ``ValueError`` if the model lacks one of the heads in ``names``.
    """
    spec, parts = weights.spec, _parts(weights.spec)
    unknown = [name for name in names if name not in parts]
    if unknown:
        raise ValueError(f"heads: the model has no {', '.join(unknown)}; it has {', '.join(parts) or 'none'}")
    kept = {*names, *(_NEEDS[name] for name in names if name in _NEEDS)}
    if kept & {"nsp", "sequence", "choice"}:
        kept.add("pooler")
    heads = only_heads(spec.heads, kept)
    task = spec.task if spec.task and kept & {*HEADS_OF[spec.task.kind]} else None
    spec = dataclasses.replace(spec, heads=heads, sentence=spec.sentence if "sentence" in kept else None, task=task)
    params = {name: weights.params[name] for name in parameter_shapes(spec)}
    return dataclasses.replace(weights, spec=spec, params=params)


def keep_width(weights: ModelBundle, width: int, format: str) -> ModelBundle:
    """Return ``weights`` with a dense layer that keeps the first ``width`` values of the vectors of texts, before
    they are divided by their norm.

    Raises ``ValueError`` if the model has no vectors of texts, or fewer values, or if ``format`` has no place for
    them.
    """
    holding = [name for name, letter in zip(FORMATS, _TABLE["sentence"][1], strict=True) if letter == "y"]
    if format not in holding:
        raise ValueError(f"--width: not allowed with --format {format}; allowed with {', '.join(holding)}")
    sentence = weights.spec.sentence
    if sentence is None:
        raise ValueError(f"--width: {width}: the model has no sentence vectors; omit --width")
    if weights.spec.heads.pair_labels:
        raise ValueError(f"--width: {width}: the head of pairs reads whole vectors; omit it with --heads sentence")
    whole = sentence.vector_width(weights.spec.model.hidden_size)
    if not 1 <= width <= whole:
        raise ValueError(f"--width: {width} is not allowed; allowed: 1 to {whole}, the width of whole vectors")
    modules = list(sentence.modules)
    place = len(modules) - 1 if modules and modules[-1].kind == "normalize" else len(modules)
    number = sum(module.kind == "dense" for module in modules)
    modules.insert(place, SentenceModule(kind="dense", features=width, bias=False))
    narrow = dataclasses.replace(sentence, modules=tuple(modules))
    params = {**weights.params, f"sentence_head/dense_{number}/kernel": np.eye(whole, width, dtype=np.float32)}
    task = weights.spec.task
    if task is not None:  # longer parts of vectors are gone
        task = dataclasses.replace(task, matryoshka=tuple(size for size in task.matryoshka if size <= width))
    return dataclasses.replace(
        weights, spec=dataclasses.replace(weights.spec, sentence=narrow, task=task), params=params
    )


def only_heads(heads: HeadsConfig, kept: Collection[str]) -> HeadsConfig:
    """Return ``heads`` with only the heads whose names are in ``kept``."""
    absent = HeadsConfig()
    removed = [field for head, fields in _FIELDS_OF.items() if head not in kept for field in fields]
    return dataclasses.replace(heads, **{field: getattr(absent, field) for field in removed})
