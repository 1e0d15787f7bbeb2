"""Reader and writer of the ``config.json`` of Hugging Face folders.

Keys, defaults and meanings follow the config classes of transformers; ``families`` lists them.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec
from bert_jax.config.architecture import Biased
from bert_jax.config.spec import Activation, Problem
from bert_jax.config.switches import function_of
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.hf.family import (
    HARMLESS,
    REFUSED,
    TASK_HEADS,
    Family,
    Key,
    Values,
    activation_name,
    pruned_heads,
    short,
    with_pruned_heads,
)
from bert_jax.interop.stored_model import default_labels
from bert_jax.io.untrusted_folder import json_object, read_small
from bert_jax.json_values import Json

CONFIG_FILE = "config.json"
# The largest allowed number of labels.
_MOST_LABELS = 1 << 20

_PROBLEMS: dict[str, Problem] = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
# Activations of torch that a module or a cross-encoder may name -> ours; the first is the default of modules.
TORCH_ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
# Class of transformers -> name of its family.
CLASSES = {name: family for family in FAMILIES.values() for name in (*family.classes, *family.aliases)}


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """The parsed content of a ``config.json``. It does not describe the heads of the model, which follow from
    the tensors."""

    family: Family
    model: ModelConfig
    # The first known class of ``architectures``; None: no class is known.
    architecture: str | None
    # Names of the classes in id order; None: not stated.
    labels: tuple[str, ...] | None
    # None: not stated; then one label means regression, and several labels mean single_label.
    problem: Problem | None
    # Function of the score of a cross-encoder; empty: not stated.
    activation: Literal["", Activation]
    # Task head -> dropout before it; None: the encoder's.
    dropouts: Mapping[str, float | None]
    # Stored dtype (``dtype``, before transformers 5 ``torch_dtype``); None: not stated.
    dtype: str | None
    notes: tuple[str, ...] = ()


def read_config(file: Path) -> dict[str, Json]:
    """Read the JSON object in ``file``. Raises ``ValueError`` for other content and files over 16 MB."""
    return json_object(read_small(file, "a model's description"), file)


def names_family(config: Mapping[str, Json]) -> bool:
    """Return False for the content of a ``config.json`` of 2019, which has neither ``model_type`` nor
    ``architectures``."""
    return config.get("model_type") is not None or bool(config.get("architectures"))


def model_parts(config: Mapping[str, Json], name: str, *, allow_unknown: bool = False) -> HfConfig:
    """Parse ``config``, the content of a ``config.json``. Error messages begin with ``name``.

    Raises ``ValueError`` for an unknown family of models, settings that this library does not implement, code in
    the folder (``auto_map``) and values of the wrong type. Keys that the class of the model in transformers does
    not read are ignored, with a note; in a family of the authors' own code they are refused, unless
    ``allow_unknown`` is True.
    """
    values = Values(config, name)
    family, architecture = _family(values)
    for key, allowed in (REFUSED | dict(family.refused)).items():
        is_read = key in family.other_keys or (key == "pruned_heads" and family.prunes)
        if key in config and not is_read:
            values.require(key, allowed)
    notes = _unknown_keys(family, config, name, allow_unknown)
    for key, entry in family.keys.items():
        if entry.announced and key not in config:
            notes.append(f"{name} lacks {key}: {entry.default} is used, the default of transformers")
    tied = config.get("tie_word_embeddings") is None or values.flag("tie_word_embeddings")
    fields = {"family": family.name, "tied_output": tied, **family.fixed}
    model = model_config(values, family.keys, **fields | family.read(values))
    model = with_pruned_heads(model, values) if family.prunes else model
    problem = None if config.get("problem_type") is None else values.choice("problem_type", None, _PROBLEMS)
    dropouts = {
        head: default if config.get(key) is None else values.number(key)
        for head, (key, default) in family.dropouts.items()
    }
    labels = _labels(values)
    return HfConfig(
        family=family,
        model=model,
        architecture=architecture,
        labels=labels,
        problem=None if problem is None else _PROBLEMS[problem],
        activation=cross_encoder_activation(config, name, len(labels or ())),
        dropouts=dropouts,
        dtype=_dtype(config),
        notes=tuple(notes),
    )


def cross_encoder_activation(config: Mapping[str, Json], name: str, labels: int) -> Literal["", Activation]:
    """Return the activation of a cross-encoder of sentence-transformers with so many ``labels``: by default a
    sigmoid for one label; empty if ``config`` is of another model. Raises ``ValueError`` for one that this library
    does not know."""
    stated, old = config.get("sentence_transformers"), config.get("sbert_ce_default_activation_function")
    path = stated.get("activation_fn", old) if isinstance(stated, dict) else old
    if path is None:
        return "sigmoid" if isinstance(stated, dict) and labels == 1 else ""
    module, _, last = str(path).rpartition(".")
    found = {theirs.rpartition(".")[2]: ours for theirs, ours in TORCH_ACTIVATIONS.items()}.get(last)
    if not module.startswith("torch.nn") or found is None:  # torch.nn.Sigmoid is a name of the same class
        supported = ", ".join(TORCH_ACTIVATIONS)
        raise ValueError(f"{name}: the activation of the cross-encoder is {short(path)}; supported: {supported}")
    return found


def _unknown_keys(family: Family, config: Mapping[str, Json], name: str, allow_unknown: bool) -> list[str]:
    """Return a note that names the keys of ``config`` that no table of ``family`` contains, except keys without a
    value. The tables contain all keys of the classes of transformers. Raises ``ValueError`` if the class is code of
    the authors, which may read other keys, unless ``allow_unknown`` is True."""
    known = {*family.keys, *family.other_keys, *family.harmless, *family.refused, *HARMLESS, *REFUSED}
    known |= {entry.key for entry in family.dropouts.values()}
    unknown = {key: config[key] for key in config if key not in known}
    unknown = {key: value for key, value in unknown.items() if value not in (None, False, "", [], {})}
    if not unknown:
        return []
    text = ", ".join(f"{key} {short(value)}" for key, value in sorted(unknown.items()))
    if (family.code or config.get("auto_map")) and not allow_unknown:
        remedy = "remove keys that do not change the network, or set --allow_mismatch to ignore them"
        raise ValueError(f"{name}: unknown keys for {family.title}: {text}; {remedy}")
    return [f"{name}: keys that {family.title} does not read are ignored: {text}"]


def model_config(values: Values, keys: Mapping[str, Key], **fields: Any) -> ModelConfig:
    """Return a ``ModelConfig`` with the ``values`` of ``keys``, and with ``fields`` as its other fields.

    Raises ``ValueError``, with a message that begins with ``values.name``, for a missing key or a value that is not
    allowed.
    """
    missing = [key for key, entry in keys.items() if key not in values.config and entry.default is None]
    if missing:
        raise ValueError(f"{values.name}: missing {', '.join(missing)}")
    defaults, read, absent = ModelConfig(), dict[str, Json](), {*fields.pop("without_bias", ())}
    for key, entry in keys.items():
        if entry.part is None:
            read[entry.field] = values.of_type(type(getattr(defaults, entry.field)), key, entry.default)
        elif not values.flag(key, entry.default):
            absent.add(entry.part)
    parts = tuple(part for part in get_args(Biased) if part in absent)
    try:
        return ModelConfig(**read | fields, without_bias=parts)
    except ValueError as error:
        raise ValueError(f"{values.name}: {error}") from None


def keys_of(model: ModelConfig, keys: Mapping[str, Key]) -> dict[str, Json]:
    """Return the values of ``keys``, from which :func:`model_config` reads ``model``."""
    values: dict[str, Json] = {}
    for key, entry in keys.items():
        value = getattr(model, entry.field) if entry.part is None else model.has_bias(entry.part)
        if entry.field.endswith("_dropout") and value < 0:
            value = model.hidden_dropout
        values[key] = activation_name(value) if isinstance(value, str) else value
    return values


def _family(values: Values) -> tuple[Family, str | None]:
    """Return the family and the class of the model. In old files without ``model_type`` the class determines the
    family."""
    classes = values.config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(item, str) for item in classes):
        raise values.wrong("architectures", ", not a list of names")
    known = next((item for item in classes if item in CLASSES), None)
    stated = values.config.get("model_type")
    if stated is None and known is not None:
        stated = CLASSES[known].name
    if stated is None:
        problem = "has neither model_type nor a known class in architectures"
        raise ValueError(f"{values.name}: {problem}; supported: {_supported()}")
    if not isinstance(stated, str) or stated not in FAMILIES:
        raise values.wrong("model_type", f"; supported: {_supported()}")
    family = FAMILIES[stated]
    known = family.aliases.get(known, known) if known is not None else None
    if classes and (known is None or known not in family.classes):
        raise values.wrong("architectures", f" with model_type {stated}; supported: {_supported(family)}")
    return family, known


def _supported(family: Family | None = None) -> str:
    kinds = "without custom code or quantization"
    if family is None:
        return f"encoders of model_type {', '.join(FAMILIES)} {kinds}"
    return f"encoders of model_type {family.name} {kinds}, of the classes {', '.join(family.classes)}"


def _dtype(config: Mapping[str, Json]) -> str | None:
    stated = config.get("dtype", config.get("torch_dtype"))
    return None if stated is None else short(stated).strip('"').removeprefix("torch.")


def _labels(values: Values) -> tuple[str, ...] | None:
    """Return the class names in id order (JSON stores the ids as strings). Return None if the config has neither
    ``id2label`` nor ``num_labels``."""
    table = values.config.get("id2label")
    if table is None:
        if values.config.get("num_labels") is None:
            return None
        count = values.integer("num_labels")
        if not 0 < count <= _MOST_LABELS:
            raise values.wrong("num_labels", f"; allowed: 1 to {_MOST_LABELS}")
        return default_labels(count)
    if not isinstance(table, dict) or any(isinstance(label, list | dict) for label in table.values()):
        raise values.wrong("id2label", ", not a map from ids to names")
    ids = [str(number) for number in range(len(table))]
    if {*table} != {*ids}:
        raise ValueError(f"{values.name}: the ids of id2label are not 0 to {len(table) - 1}")
    return tuple(str(table[number]) for number in ids)


def hf_class(spec: ModelSpec) -> str:
    """Return the name of the transformers class that has the heads of ``spec``. The pooler is ignored.

    Raises ``ValueError`` if no class has exactly these heads.
    """
    return FAMILIES[spec.family].class_of(spec)


def heads_of_class(spec: ModelSpec) -> HeadsConfig:
    """Return the heads of ``spec``, without the pooler if the transformers class for these heads has none."""
    family = FAMILIES[spec.family]
    return dataclasses.replace(spec.heads, pooler=spec.heads.pooler and "pooler" in family.classes[hf_class(spec)])


def unsupported(spec: ModelSpec, name: str) -> list[str]:
    """Return a line for each field of the model that the config class of its family cannot express; ``name`` is the
    format. Fields of absent heads do not matter."""
    model, family = spec.model, spec.family
    names = FAMILIES[family]
    written = keys_of(model, names.keys) | names.write(model) | {"tie_word_embeddings": model.tied_output}
    written |= pruned_heads(model) if names.prunes else {}
    try:
        again = function_of(model_parts({"model_type": family, **written}, "config.json").model, spec.heads)
    except ValueError as error:
        return [str(error)]
    again = {field.name: field.default for field in dataclasses.fields(model)} | again
    return [
        f"model.{field}: {getattr(model, field)} is not supported by {name} for {names.title} (supported: "
        f"{again[field]})"
        for field, value in function_of(model, spec.heads).items()
        if value != again[field]
    ]


def _dropout_key(spec: ModelSpec) -> dict[str, float | None]:
    """Return the key of the dropout before the task head of ``spec``, with its value. Return no key if the family
    has no key for it."""
    places = FAMILIES[spec.family].dropouts
    head = next((name for name in TASK_HEADS if name in spec.heads.present()), TASK_HEADS[0])
    key, default = places.get(head, ("", None))
    if not key:
        return {}
    rate = spec.heads.dropout
    # Where a family has a default, its config class does not allow null.
    return {key: spec.model.hidden_dropout if rate is None and default is not None else rate}


def hf_config(spec: ModelSpec, dtype: str) -> dict[str, Json]:
    """Return the content of ``config.json`` for ``spec`` and weights stored as ``dtype`` (``float32`` or
    ``bfloat16``).

    Raises ``ValueError`` for a model that no transformers class implements.
    """
    model, heads, family = spec.model, spec.heads, FAMILIES[spec.family]
    if problems := unsupported(spec, "transformers"):
        raise ValueError("; ".join(problems))
    config: dict[str, Json] = {
        "architectures": [hf_class(spec)],
        "model_type": spec.family,
        **keys_of(model, family.keys),
        "pad_token_id": 0,
        **family.write(model),
        **(pruned_heads(model) if family.prunes else {}),
        **_dropout_key(spec),
        "tie_word_embeddings": model.tied_output,
        "use_cache": False,
        "dtype": dtype,
    }
    labels = heads.sequence_labels or heads.token_labels
    if labels:
        config["id2label"] = {str(i): label for i, label in enumerate(labels)}
        config["label2id"] = {label: i for i, label in enumerate(labels)}
    if heads.sequence_labels:
        config["problem_type"] = next(hf for hf, ours in _PROBLEMS.items() if ours == heads.problem)
    if heads.activation:
        activation = next(name for name, ours in TORCH_ACTIVATIONS.items() if ours == heads.activation)
        config["sentence_transformers"] = {"activation_fn": activation}
    return config
