"""``config.json`` of Hugging Face folders, read and written.

Keys, defaults and their meaning are those of transformers' ``BertConfig`` and ``RobertaConfig``.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec
from bert_jax.config.switches import ANY, SIZES, Supported, check_fields
from bert_jax.io.untrusted_folder import json_object, read_small

CONFIG_FILE = "config.json"
# A larger one is no description of a model.
_MOST_LABELS = 1 << 20

# Heads of each class. The heads of a model are those whose tensors are present; its class tells what "classifier"
# means.
CLASSES: dict[str, tuple[str, ...]] = {
    "BertModel": ("pooler",),
    "BertForPreTraining": ("pooler", "mlm", "nsp"),
    "BertForMaskedLM": ("mlm",),
    "BertForNextSentencePrediction": ("pooler", "nsp"),
    "BertForSequenceClassification": ("pooler", "sequence"),
    "BertForTokenClassification": ("token",),
    "BertForQuestionAnswering": ("span",),
    "BertForMultipleChoice": ("pooler", "choice"),
    "RobertaModel": ("pooler",),
    "RobertaForMaskedLM": ("mlm",),
    "RobertaForSequenceClassification": ("pooler", "sequence"),
    "RobertaForTokenClassification": ("token",),
    "RobertaForQuestionAnswering": ("span",),
    "RobertaForMultipleChoice": ("pooler", "choice"),
}
_CLASS_PREFIX = {"bert": "Bert", "roberta": "Roberta"}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "relu": "relu",
}
_ACTIVATIONS_OUT = {"gelu": "gelu", "gelu_tanh": "gelu_new", "gelu_sigmoid": "quick_gelu", "relu": "relu"}
SUPPORTED: Supported = SIZES | {
    "position_offset": ANY,
    "activation": tuple(_ACTIVATIONS_OUT),
    "norm_position": ("post",),
    "norm_epsilon": ANY,
    "position_embeddings": ("learned",),
}
_PROBLEMS = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
# Any other value means another function than this model's.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "position_embedding_type": ("absolute", None),
    "pruned_heads": ({}, [], None),
    "quantization_config": (None, {}),
    "auto_map": (None, {}),
}
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """Content of a ``config.json``. The tensors decide which heads the model has."""

    family: Literal["bert", "roberta"]
    model: ModelConfig
    # The first class of ``architectures`` that is known; None: none is.
    architecture: str | None
    # Names of the classes in id order; None: not stated.
    labels: tuple[str, ...] | None
    # None: not stated, so regression with one label and single_label with several.
    problem: Literal["single_label", "multi_label", "regression"] | None
    # Dropout before the task head; None: the encoder's.
    dropout: float | None
    # Whether the MLM output layer is the word embeddings.
    tied: bool
    # Stored dtype (``dtype``, before transformers 5 ``torch_dtype``); None: not stated.
    dtype: str | None
    notes: tuple[str, ...] = ()


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``. Raises ``ValueError`` when it is not one or larger than 16 MB."""
    return json_object(read_small(file, "a model's description"), file)


def model_parts(config: Mapping[str, Any], name: str) -> HfConfig:
    """Parse ``config``; ``name`` is for messages.

    Raises ``ValueError``: another type of model or another function than this library's, code that would have to
    run (``auto_map``), a value of the wrong type.
    """
    notes: list[str] = []
    family, architecture = _family(config, name)
    for key, allowed in _REFUSED.items():
        if key in config and config[key] not in allowed:
            raise ValueError(f"{name}: {key} is {_short(config[key])}; readable: {_supported()}")
    missing = [key for key in _NEEDED if key not in config]
    if missing:
        raise ValueError(f"{name}: missing {', '.join(missing)}")
    activation = config.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"{name}: hidden_act is {_short(activation)}; allowed: {', '.join(_ACTIVATIONS)}")
    for key, default in (("hidden_act", "gelu"), ("layer_norm_eps", 1e-12)):
        if key not in config:
            notes.append(f"{name} lacks {key}: {default}, the default of transformers")
    pad = _integer(config, "pad_token_id", name, 1) if family == "roberta" else -1
    try:
        model = ModelConfig(
            vocab_size=_integer(config, "vocab_size", name),
            hidden_size=_integer(config, "hidden_size", name),
            num_layers=_integer(config, "num_hidden_layers", name),
            num_attention_heads=_integer(config, "num_attention_heads", name),
            intermediate_size=_integer(config, "intermediate_size", name),
            max_position_embeddings=_integer(config, "max_position_embeddings", name, 512),
            position_offset=pad + 1,
            type_vocab_size=_integer(config, "type_vocab_size", name, 2),
            hidden_dropout=_number(config, "hidden_dropout_prob", name, 0.1),
            attention_dropout=_number(config, "attention_probs_dropout_prob", name, 0.1),
            activation=_ACTIVATIONS[activation],
            norm_epsilon=_number(config, "layer_norm_eps", name, 1e-12),
            initializer_range=_number(config, "initializer_range", name, 0.02),
        )
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(name) else f"{name}: {text}") from None
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


def _family(config: Mapping[str, Any], name: str) -> tuple[Literal["bert", "roberta"], str | None]:
    """Return family and class; in old files without ``model_type`` the class determines the family."""
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(item, str) for item in classes):
        raise ValueError(f"{name}: architectures is {_short(classes)}, not a list of names")
    known = next((item for item in classes if item in CLASSES), None)
    family = config.get("model_type")
    if family is None and known is not None:
        family = next(name for name, prefix in _CLASS_PREFIX.items() if known.startswith(prefix))
    if family is None:
        raise ValueError(f"{name}: neither model_type nor a known class in architectures; readable: {_supported()}")
    if family not in _CLASS_PREFIX:
        raise ValueError(f"{name}: model_type is {_short(family)}; readable: {_supported()}")
    if classes and (known is None or not known.startswith(_CLASS_PREFIX[family])):
        raise ValueError(
            f"{name}: architectures is {_short(classes)} with model_type {family}; readable: {_supported()}"
        )
    return family, known


def _supported() -> str:
    return (
        "model_type bert and roberta, as encoders with absolute positions, without code or quantization of their "
        f"own, of the classes {', '.join(CLASSES)}"
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
    """Class names by id; JSON has the ids as strings, so "10" would sort before "2"."""
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


def default_labels(count: int) -> tuple[str, ...]:
    """Names that transformers gives to classes without names."""
    return tuple(f"LABEL_{i}" for i in range(count))


def hf_class(spec: ModelSpec) -> str:
    """The transformers class for the heads of ``spec``; ``CLASSES`` lists its heads (maybe without pooler).

    Raises ``ValueError`` when no class holds these heads together.
    """
    heads = set(spec.heads.present()) - {"pooler"}
    if heads == {"nsp"} and spec.family == "roberta":
        raise ValueError("transformers has no RoBERTa class with a sentence-pair (nsp) head")
    for name, held in CLASSES.items():
        if name.startswith(_CLASS_PREFIX[spec.family]) and set(held) - {"pooler"} == heads:
            return name
    raise ValueError(
        f"no transformers class holds the heads {', '.join(spec.heads.present())} together "
        f"({spec.family}); classes: {', '.join(CLASSES)}"
    )


def heads_of_class(spec: ModelSpec) -> HeadsConfig:
    """The heads of ``spec`` that its transformers class holds: without the pooler where the class has none."""
    return dataclasses.replace(spec.heads, pooler=spec.heads.pooler and "pooler" in CLASSES[hf_class(spec)])


def hf_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """``config.json`` of ``spec`` with weights stored as ``dtype`` (``float32`` or ``bfloat16``).

    Raises ``ValueError`` for what transformers' classes cannot compute.
    """
    model, heads = spec.model, spec.heads
    check_fields(model, SUPPORTED, "transformers")
    if (model.position_offset > 0) != (spec.family == "roberta"):
        raise ValueError(f"position_offset {model.position_offset} does not exist in transformers' {spec.family}")
    if spec.family == "roberta" and heads.mlm and model.activation != "gelu":
        raise ValueError(f"RoBERTa's MLM head has the activation gelu in transformers, not {model.activation}")
    config: dict[str, Any] = {
        "architectures": [hf_class(spec)],
        "model_type": spec.family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.intermediate_size,
        "hidden_act": _ACTIVATIONS_OUT[model.activation],
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": model.max_position_embeddings,
        "type_vocab_size": model.type_vocab_size,
        "initializer_range": model.initializer_range,
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
