"""Variable names in TF1 checkpoints of google-research/bert; conversion to and from ``bert_config.json``.

Kernels have the shape [inputs, outputs], except for output layers, whose kernels have the shape [outputs, inputs]
(``tf.matmul(..., transpose_b=True)``).
"""

from collections.abc import Mapping
from pathlib import Path

from bert_jax.config import ModelConfig, ModelSpec
from bert_jax.config.switches import SIZES, Supported
from bert_jax.interop.hf.config_json import keys_of, model_config
from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import Place, Values
from bert_jax.interop.model_bundle import parameter_shapes
from bert_jax.interop.stored_model import StoredName
from bert_jax.json_values import Json

CONFIG_FILE = "bert_config.json"
# google-research/bert always uses this value, regardless of bert_config.json.
NORM_EPSILON = 1e-12

# Prefixes of output layers: run_classifier.py uses none, run_squad.py cls/squad/.
_OUTPUTS = {"nsp_head": "cls/seq_relationship/", "sequence_head": "", "span_head": "cls/squad/"}
_NORM_LEAF = {"scale": "gamma", "bias": "beta"}
# Defaults of BertConfig; vocab_size has none.
_DEFAULTS: dict[str, Json] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "max_position_embeddings": 512, "type_vocab_size": 16, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02,
}  # fmt: skip
# The numbers in bert_config.json.
_KEYS = bert.keys(vocab_size=None, **_DEFAULTS)
_ACTIVATIONS_OUT = {"gelu": "gelu", "gelu_tanh": "gelu", "relu": "relu"}
SUPPORTED: Supported = SIZES | {
    "position_offset": (0,),
    "activation": tuple(_ACTIVATIONS_OUT),
    "norm_position": ("post",),
    "norm_epsilon": (NORM_EPSILON,),
    "position_embeddings": ("learned",),
}


def tf1_names(spec: ModelSpec) -> dict[str, StoredName]:
    """Return a dict from canonical to stored parameter names, in the order of ``parameter_shapes``.

    ``spec`` may have only heads of google-research/bert, and its model only values that :data:`SUPPORTED` allows.
    """
    places = bert.FAMILY.places("bert.", spec.model.num_layers, spec.heads.present())
    return {name: _variable(name, places) for name in parameter_shapes(spec)}


def _variable(name: str, places: Mapping[str, Place]) -> StoredName:
    module, _, leaf = name.rpartition("/")
    if module in _OUTPUTS:
        return StoredName(f"{_OUTPUTS[module]}output_{'weights' if leaf == 'kernel' else 'bias'}", leaf == "kernel")
    # The names are transformers' with slashes instead of dots.
    target = places[module].module.replace("encoder.layer.", "encoder.layer_").replace(".", "/")
    leaf = _NORM_LEAF[leaf] if module.endswith("layer_norm") else leaf
    return StoredName(target if leaf == "embedding" else f"{target}/{leaf}", False)


def tf1_config(model: ModelConfig) -> dict[str, Json]:
    """Return the content of ``bert_config.json`` (eleven keys)."""
    return dict(sorted({**keys_of(model, _KEYS), "hidden_act": _ACTIVATIONS_OUT[model.activation]}.items()))


def tf1_model(config: Mapping[str, Json], file: Path) -> tuple[ModelConfig, list[str]]:
    """Return the ``ModelConfig`` that ``bert_config.json`` describes, and notes. Raises ``ValueError`` for a
    missing or unusable value."""
    notes = [
        f"{file.name} lacks {key}: {value} is used, the default of google-research/bert"
        for key, value in _DEFAULTS.items()
        if key not in config
    ]
    stated = config.get("hidden_act", "gelu")
    if stated == "gelu":
        notes.append(
            f"{file.name} specifies gelu: computed as in google-research/bert's published code (gelu_tanh); "
            "the weights of 2018 were trained with erf (gelu); the two functions differ by at most 5e-4"
        )
    elif stated != "relu":
        raise ValueError(f"{file}: hidden_act is {str(stated)[:60]!r}; allowed: gelu, relu")
    activation = "gelu_tanh" if stated == "gelu" else "relu"
    return model_config(Values(config, str(file)), _KEYS, activation=activation, norm_epsilon=NORM_EPSILON), notes
