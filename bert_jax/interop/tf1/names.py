"""google-research/bert's names of variables in TF1 checkpoints, and its ``bert_config.json``, both directions.

Kernels are [in, out] there as here; output layers applied by ``tf.matmul(..., transpose_b=True)`` are [out, H].
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig, ModelSpec
from bert_jax.config.switches import SIZES, Supported, check_fields
from bert_jax.interop.exchange import parameter_shapes
from bert_jax.interop.stored import StoredName

CONFIG_FILE = "bert_config.json"
# google-research/bert computes with this value, whatever is in bert_config.json.
NORM_EPSILON = 1e-12
# Heads that google-research/bert's programs have variables for.
HEADS = ("pooler", "mlm", "nsp", "sequence", "span")

_MODULES = {
    "embeddings/layer_norm": "bert/embeddings/LayerNorm",
    "pooler": "bert/pooler/dense",
    "mlm_head": "cls/predictions",
    "mlm_head/transform": "cls/predictions/transform/dense",
    "mlm_head/layer_norm": "cls/predictions/transform/LayerNorm",
}
_LAYER = {
    "attention/query": "attention/self/query",
    "attention/key": "attention/self/key",
    "attention/value": "attention/self/value",
    "attention/output": "attention/output/dense",
    "attention/layer_norm": "attention/output/LayerNorm",
    "feed_forward/intermediate": "intermediate/dense",
    "feed_forward/output": "output/dense",
    "feed_forward/layer_norm": "output/LayerNorm",
}
# run_classifier.py has its output layer at the root, run_squad.py under cls/squad.
_OUTPUTS = {"nsp_head": "cls/seq_relationship/", "sequence_head": "", "span_head": "cls/squad/"}
_NORM_LEAF = {"scale": "gamma", "bias": "beta"}

_SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads", "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings", "type_vocab_size": "type_vocab_size",
}  # fmt: skip
_NUMBERS = {
    "hidden_dropout_prob": "hidden_dropout", "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "initializer_range",
}  # fmt: skip
# BertConfig's own defaults; vocab_size has none.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "max_position_embeddings": 512, "type_vocab_size": 16, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02, "hidden_act": "gelu",
}  # fmt: skip
_ACTIVATIONS_OUT = {"gelu": "gelu", "gelu_tanh": "gelu", "relu": "relu"}
SUPPORTED: Supported = SIZES | {
    "position_offset": (0,),
    "activation": tuple(_ACTIVATIONS_OUT),
    "norm_position": ("post",),
    "norm_epsilon": (NORM_EPSILON,),
    "position_embeddings": ("learned",),
}


def tf1_names(spec: ModelSpec) -> dict[str, StoredName]:
    """Canonical name -> variable of every parameter, in the order of parameter_shapes.

    ``spec`` has no heads but :data:`HEADS`, and a model that :data:`SUPPORTED` lists.
    """
    return {name: _variable(name) for name in parameter_shapes(spec)}


def _variable(name: str) -> StoredName:
    module, _, leaf = name.rpartition("/")
    if leaf == "embedding":
        return StoredName(f"bert/{module}", False)
    if module in _OUTPUTS:
        return StoredName(f"{_OUTPUTS[module]}output_{'weights' if leaf == 'kernel' else 'bias'}", leaf == "kernel")
    if module.startswith("encoder/layer_"):
        _, layer, inner = module.split("/", 2)
        target = f"bert/encoder/{layer}/{_LAYER[inner]}"
    else:
        target = _MODULES[module]
    leaf = _NORM_LEAF[leaf] if module.endswith("layer_norm") else leaf
    return StoredName(f"{target}/{leaf}", False)


def tf1_config(model: ModelConfig) -> dict[str, Any]:
    """The eleven keys of ``bert_config.json``. ``ValueError`` for what google-research/bert cannot compute."""
    check_fields(model, SUPPORTED, "tf1")
    values = {**_SIZES, **_NUMBERS}
    config = {key: getattr(model, field) for key, field in values.items()}
    return dict(sorted({**config, "hidden_act": _ACTIVATIONS_OUT[model.activation]}.items()))


def tf1_model(config: Mapping[str, Any], file: Path) -> tuple[ModelConfig, list[str]]:
    """Return the model of ``bert_config.json`` and notes. Raises ``ValueError`` for a missing or unusable value."""
    if "vocab_size" not in config:
        raise ValueError(f"{file}: missing vocab_size; expected google-research/bert's keys")
    values: dict[str, Any] = {}
    notes = []
    for key, field in {**_SIZES, **_NUMBERS}.items():
        value = config.get(key, _DEFAULTS.get(key))
        kinds = int if key in _SIZES else int | float
        if not isinstance(value, kinds) or isinstance(value, bool) or not abs(value) < 1 << 31:
            raise ValueError(f"{file}: {key} is {str(value)[:60]!r}, not a {'whole ' * (kinds is int)}number")
        values[field] = value if key in _SIZES else float(value)
        if key not in config:
            notes.append(f"{file.name} does not say {key}: {value}, as google-research/bert takes it")
    stated = config.get("hidden_act", _DEFAULTS["hidden_act"])
    if stated == "gelu":
        notes.append(
            f"{file.name} says gelu: computed as google-research/bert's published code computes it (gelu_tanh); "
            "the weights of 2018 were trained with erf (gelu), which differs by at most 5e-4"
        )
    elif stated != "relu":
        raise ValueError(f"{file}: hidden_act is {str(stated)[:60]!r}; allowed: gelu, relu")
    activation = "gelu_tanh" if stated == "gelu" else "relu"
    try:
        return ModelConfig(**values, activation=activation, norm_epsilon=NORM_EPSILON), notes
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
