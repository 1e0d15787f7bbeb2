"""Reader and writer of the ``config.json`` of Hugging Face folders.

Keys, defaults and meanings are those of transformers' ``BertConfig`` and ``RobertaConfig``.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec
from bert_jax.config.switches import ANY, SIZES, Supported, check_fields
from bert_jax.interop.stored import default_labels
from bert_jax.io.untrusted_folder import json_object, read_small

CONFIG_FILE = "config.json"
# The largest allowed number of labels.
_MOST_LABELS = 1 << 20

# Heads of each class. The heads of a model are those whose tensors are present; its class determines
# which head the layer "classifier" belongs to.
_HEADS_OF = {
    "Model": ("pooler",),
    "ForPreTraining": ("pooler", "mlm", "nsp"),
    "ForMaskedLM": ("mlm",),
    "ForNextSentencePrediction": ("pooler", "nsp"),
    "ForSequenceClassification": ("pooler", "sequence"),
    "ForTokenClassification": ("token",),
    "ForQuestionAnswering": ("span",),
    "ForMultipleChoice": ("pooler", "choice"),
}
_CLASS_PREFIX = {"bert": "Bert", "roberta": "Roberta"}
CLASSES: dict[str, tuple[str, ...]] = {
    f"{prefix}{name}": heads
    for family, prefix in _CLASS_PREFIX.items()
    for name, heads in _HEADS_OF.items()
    if family == "bert" or "nsp" not in heads
}
# Key -> field of ModelConfig, for integers and for other numbers. bert_config.json has the same keys.
INTEGERS = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads", "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings", "type_vocab_size": "type_vocab_size",
}  # fmt: skip
NUMBERS = {
    "hidden_dropout_prob": "hidden_dropout", "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "initializer_range",
}  # fmt: skip
# Defaults of BertConfig and RobertaConfig.
_DEFAULTS = {
    "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02,
}  # fmt: skip
# Activation -> its names in transformers; the writer uses the first one.
_ACTIVATION_NAMES = {
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"),
    "gelu_sigmoid": ("quick_gelu",),
    "relu": ("relu",),
}
_ACTIVATIONS: dict[str, Any] = {name: ours for ours, names in _ACTIVATION_NAMES.items() for name in names}
SUPPORTED: Supported = SIZES | {
    "position_offset": ANY,
    "activation": tuple(_ACTIVATION_NAMES),
    "norm_position": ("post",),
    "norm_epsilon": ANY,
    "position_embeddings": ("learned",),
}
_PROBLEMS = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
# Key -> values that this library supports. A model with any other value computes a different function.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "position_embedding_type": ("absolute", None),
    "pruned_heads": ({}, [], None),
    "quantization_config": (None, {}),
    "auto_map": (None, {}),
}


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """The parsed content of a ``config.json``. It does not describe the heads of the model, which follow from
    the tensors."""

    family: Literal["bert", "roberta"]
    model: ModelConfig
    # The first known class of ``architectures``; None: no class is known.
    architecture: str | None
    # Names of the classes in id order; None: not stated.
    labels: tuple[str, ...] | None
    # None: not stated; then one label means regression, and several labels mean single_label.
    problem: Literal["single_label", "multi_label", "regression"] | None
    # Dropout before the task head; None: that of the encoder.
    dropout: float | None
    # True if the word embeddings are also the weights of the MLM output layer.
    tied: bool
    # Stored dtype (``dtype``, before transformers 5 ``torch_dtype``); None: not stated.
    dtype: str | None
    notes: tuple[str, ...] = ()


def read_config(file: Path) -> dict[str, Any]:
    """Read the JSON object in ``file``. Raises ``ValueError`` for other content and files over 16 MB."""
    return json_object(read_small(file, "a model's description"), file)


def names_family(config: Mapping[str, Any]) -> bool:
    """Return False for the content of a ``config.json`` of 2019, which has neither ``model_type`` nor
    ``architectures``."""
    return config.get("model_type") is not None or bool(config.get("architectures"))


def model_parts(config: Mapping[str, Any], name: str) -> HfConfig:
    """Parse ``config``, the content of a ``config.json``. Error messages begin with ``name``.

    Raises ``ValueError`` for a model that is neither BERT nor RoBERTa, settings that this library does not
    implement, code in the folder (``auto_map``), and values of the wrong type.
    """
    notes: list[str] = []
    family, architecture = _family(config, name)
    for key, allowed in _REFUSED.items():
        if key in config and config[key] not in allowed:
            raise ValueError(f"{name}: {key} is {_short(config[key])}; supported: {_supported()}")
    activation = config.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"{name}: hidden_act is {_short(activation)}; allowed: {', '.join(_ACTIVATIONS)}")
    for key, default in (("hidden_act", "gelu"), ("layer_norm_eps", 1e-12)):
        if key not in config:
            notes.append(f"{name} lacks {key}: {default} is used, the default of transformers")
    pad = _integer(config, "pad_token_id", name, 1) if family == "roberta" else -1
    model = model_config(
        config, name, _DEFAULTS,
        position_offset=pad + 1, activation=_ACTIVATIONS[activation],
        norm_epsilon=_number(config, "layer_norm_eps", name, 1e-12),
    )  # fmt: skip
    problem = config.get("problem_type")
    if problem is not None and problem not in _PROBLEMS:
        raise ValueError(f"{name}: problem_type is {_short(problem)}; allowed: {', '.join(_PROBLEMS)}")
    dropout = config.get("classifier_dropout")
    tied = config.get("tie_word_embeddings", True)
    return HfConfig(
        family=family,
        model=model,
        architecture=architecture,
        labels=_labels(config, name),
        problem=None if problem is None else _PROBLEMS[problem],
        dropout=None if dropout is None else _number(config, "classifier_dropout", name),
        tied=tied is not False,
        dtype=_dtype(config),
        notes=tuple(notes),
    )


def model_config(config: Mapping[str, Any], name: str, defaults: Mapping[str, Any], **fields: Any) -> ModelConfig:
    """Return a ``ModelConfig`` with the numbers that ``config`` contains, and with ``fields`` as its other fields.

    ``defaults`` are the values of the keys that ``config`` lacks. Raises ``ValueError``, with a message that begins
    with ``name``, for a missing key or a value that is not allowed.
    """
    missing = [key for key in INTEGERS if key not in config and key not in defaults]
    if missing:
        raise ValueError(f"{name}: missing {', '.join(missing)}")
    values: dict[str, Any] = {
        field: _integer(config, key, name, defaults.get(key)) for key, field in INTEGERS.items()
    }
    values |= {field: _number(config, key, name, defaults.get(key)) for key, field in NUMBERS.items()}
    try:
        return ModelConfig(**values, **fields)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def numbers_of(model: ModelConfig) -> dict[str, Any]:
    """Return a dict of the numbers in ``model``, with the keys from which :func:`model_config` reads them."""
    return {key: getattr(model, field) for key, field in (INTEGERS | NUMBERS).items()}


def _family(config: Mapping[str, Any], name: str) -> tuple[Literal["bert", "roberta"], str | None]:
    """Return the family and the class of the model. In old files without ``model_type`` the class determines the
    family."""
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(item, str) for item in classes):
        raise ValueError(f"{name}: architectures is {_short(classes)}, not a list of names")
    known = next((item for item in classes if item in CLASSES), None)
    family = config.get("model_type")
    if family is None and known is not None:
        family = next(name for name, prefix in _CLASS_PREFIX.items() if known.startswith(prefix))
    if family is None:
        stated = "has neither model_type nor a known class in architectures"
        raise ValueError(f"{name}: {stated}; supported: {_supported()}")
    if family not in _CLASS_PREFIX:
        raise ValueError(f"{name}: model_type is {_short(family)}; supported: {_supported()}")
    if classes and (known is None or not known.startswith(_CLASS_PREFIX[family])):
        stated = f"architectures is {_short(classes)} with model_type {family}"
        raise ValueError(f"{name}: {stated}; supported: {_supported()}")
    return family, known


def _supported() -> str:
    return (
        "encoders of model_type bert or roberta with absolute positions, without custom code or quantization, of "
        f"the classes {', '.join(CLASSES)}"
    )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _integer(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 31) <= value < 1 << 31:
        raise ValueError(f"{name}: {key} is {_short(value)}, not a whole number")
    return value


def _number(config: Mapping[str, Any], key: str, name: str, default: float | None = None) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise ValueError(f"{name}: {key} is {_short(value)}, not a number")
    return float(value)


def _dtype(config: Mapping[str, Any]) -> str | None:
    stated = config.get("dtype", config.get("torch_dtype"))
    return None if stated is None else _short(stated).strip('"').removeprefix("torch.")


def _labels(config: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """Return the class names in id order (JSON stores the ids as strings). Return None if ``config`` has neither
    ``id2label`` nor ``num_labels``."""
    table = config.get("id2label")
    if table is None:
        if config.get("num_labels") is None:
            return None
        count = _integer(config, "num_labels", name)
        if not 0 < count <= _MOST_LABELS:
            raise ValueError(f"{name}: num_labels is {count}; allowed: 1 to {_MOST_LABELS}")
        return default_labels(count)
    try:
        by_id = {int(key): str(label) for key, label in table.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{name}: id2label is {_short(table)}, not a map from ids to names") from None
    if sorted(by_id) != list(range(len(by_id))) or len(by_id) != len(table):
        raise ValueError(f"{name}: the ids of id2label are not 0 to {len(table) - 1}")
    return tuple(by_id[i] for i in range(len(by_id)))


def hf_class(spec: ModelSpec) -> str:
    """Return the name of the transformers class that has the heads of ``spec``. The pooler is ignored.

    Raises ``ValueError`` if no class has exactly these heads.
    """
    heads = set(spec.heads.present()) - {"pooler"}
    if heads == {"nsp"} and spec.family == "roberta":
        raise ValueError("transformers has no RoBERTa class with a sentence-pair (nsp) head")
    for name, held in CLASSES.items():
        if name.startswith(_CLASS_PREFIX[spec.family]) and set(held) - {"pooler"} == heads:
            return name
    held = ", ".join(spec.heads.present())
    known = ", ".join(CLASSES)
    raise ValueError(f"no {spec.family} class of transformers has exactly the heads {held}; known: {known}")


def heads_of_class(spec: ModelSpec) -> HeadsConfig:
    """Return the heads of ``spec``, without the pooler if the transformers class for these heads has none."""
    return dataclasses.replace(spec.heads, pooler=spec.heads.pooler and "pooler" in CLASSES[hf_class(spec)])


def hf_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json`` for ``spec`` and weights stored as ``dtype`` (``float32`` or
    ``bfloat16``).

    Raises ``ValueError`` for a model that no transformers class implements.
    """
    model, heads = spec.model, spec.heads
    check_fields(model, SUPPORTED, "transformers")
    if (model.position_offset > 0) != (spec.family == "roberta"):
        raise ValueError(f"position_offset {model.position_offset} is not supported for {spec.family}")
    if spec.family == "roberta" and heads.mlm and model.activation != "gelu":
        raise ValueError(f"RoBERTa's MLM head has the activation gelu in transformers, not {model.activation}")
    config: dict[str, Any] = {
        "architectures": [hf_class(spec)],
        "model_type": spec.family,
        **numbers_of(model),
        "hidden_act": _ACTIVATION_NAMES[model.activation][0],
        "layer_norm_eps": model.norm_epsilon,
        "pad_token_id": max(model.position_offset - 1, 0),
        "position_embedding_type": "absolute",
        "classifier_dropout": heads.dropout,
        "tie_word_embeddings": True,
        "use_cache": False,
        "dtype": dtype,
    }
    if spec.family == "roberta":
        config |= {"bos_token_id": 0, "eos_token_id": 2}
    labels = heads.sequence_labels or heads.token_labels
    if labels:
        config["id2label"] = {str(i): label for i, label in enumerate(labels)}
        config["label2id"] = {label: i for i, label in enumerate(labels)}
    if heads.sequence_labels:
        config["problem_type"] = next(hf for hf, ours in _PROBLEMS.items() if ours == heads.problem)
    return config
