"""NeoBERT (Le Breton et al. 2025): the folders of the authors' code (``model.py`` of chandar-lab/NeoBERT).

No release of transformers has the family, so the folders name the authors' code (``auto_map``), which is never run
here. Query, key and value of a head are next to each other, rotary positions rotate neighboring dimensions, and the
width of the feed-forward layer is two thirds of ``intermediate_size``, rounded up to a multiple of 8.
"""

from collections.abc import Mapping

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.family import (
    Family,
    HeadDropout,
    Key,
    Place,
    check_code,
    check_head_size,
    integer,
    name_set,
    number,
    short,
)
from bert_jax.json_values import Json

_MULTIPLE = 8
# Key -> supported values. Training code and forks state them, the published file in "kwargs" or not at all.
_SUPPORTED: dict[str, tuple[Json, ...]] = {
    "rms_norm": (True,),
    "rope": (True,),
    "ngpt": (False,),
    "hidden_act": ("SwiGLU", "swiglu"),
    "swiglu_packed": (True,),
    "rope_theta": (10_000,),
}
_CODE = "chandar-lab/NeoBERT"


def read(config: Mapping[str, Json], name: str) -> dict[str, Json]:
    """Return the width of the feed-forward layer and the rates of dropout."""
    check_code(config, name, "NeoBERT")
    more = config.get("kwargs") or {}
    if not isinstance(more, dict):
        raise ValueError(f"{name}: kwargs is {short(more)}, not an object")
    for key, supported in _SUPPORTED.items():
        for stated in (config, more):
            if (value := stated.get(key)) is not None and value not in supported:
                allowed = ", ".join(map(short, supported))
                raise ValueError(f"{name}: {key} is {short(value)}; supported: {allowed}")
    width, heads = integer(config, "hidden_size", name, 768), integer(config, "num_attention_heads", name, 12)
    check_head_size(config, "dim_head", name, width, heads)
    inner = 2 * integer(config, "intermediate_size", name, 3072) // 3
    rate = number(config, "dropout", name, 0.0)
    return {
        "intermediate_size": -(-inner // _MULTIPLE) * _MULTIPLE, "hidden_dropout": rate, "attention_dropout": rate,
    }  # fmt: skip


def write(model: ModelConfig) -> dict[str, Json]:
    """Return the keys that :func:`read` reads, and the classes of the authors' code."""
    classes = {
        "AutoConfig": "NeoBERTConfig", "AutoModel": "NeoBERT", "AutoModelForMaskedLM": "NeoBERTLMHead",
        "AutoModelForSequenceClassification": "NeoBERTForSequenceClassification",
    }  # fmt: skip
    return {
        "auto_map": {auto: f"{_CODE}--model.{name}" for auto, name in classes.items()},
        "intermediate_size": -(-3 * model.intermediate_size // 2),
        "dim_head": model.head_size,
        "dropout": model.hidden_dropout,
    }


FAMILY = Family(
    name="neobert",
    title="NeoBERT",
    class_prefix="NeoBERT",
    code=_CODE,
    classes={
        "NeoBERT": (),
        "NeoBERTLMHead": ("mlm",),
        "NeoBERTForSequenceClassification": ("pooler", "sequence"),
    },
    prefix="model.",
    keys={
        "vocab_size": Key("vocab_size", "integer", 30522),
        "hidden_size": Key("hidden_size", "integer", 768),
        "num_hidden_layers": Key("num_layers", "integer", 28),
        "num_attention_heads": Key("num_attention_heads", "integer", 12),
        "intermediate_size": Key("intermediate_size", "integer", 3072),
        "max_length": Key("max_position_embeddings", "integer", 1024),
        "norm_eps": Key("norm_epsilon", "number", 1e-6),
        "decoder_init_range": Key("initializer_range", "number", 0.02),
    },
    fixed={
        "type_vocab_size": 0, "norm": "rms_norm", "norm_position": "pre", "feed_forward": "gated",
        "activation": "silu", "position_embeddings": "rotary", "embedding_dropout": 0.0,
        "qkv_bias": False, "attention_output_bias": False, "feed_forward_bias": False,
        "mlm_transform": False, "tied_output": False,
    },
    other_keys=frozenset({"auto_map", "kwargs", "dim_head", "dropout", *_SUPPORTED}),
    read=read,
    write=write,
    harmless=name_set(
        """embedding_init_range classifier_init_range flash_attention pretrained_model_name_or_path
            trust_remote_code base_scale max_position_embeddings"""
    ),
    refused={"rope_scaling": (None, {})},
    encoder={"embeddings/word_embeddings": "encoder", "encoder/final_layer_norm": "layer_norm"},
    layer="transformer_encoder.{i}.",
    layers={
        **{
            f"attention/{name}": Place("qkv", i, 3, per_head=True, interleaved=name != "value")
            for i, name in enumerate(("query", "key", "value"))
        },
        "attention/output": "wo",
        "attention/layer_norm": "attention_norm",
        "feed_forward/gate": Place("ffn.w12", 0, 2),
        "feed_forward/intermediate": Place("ffn.w12", 1, 2),
        "feed_forward/output": "ffn.w3",
        "feed_forward/layer_norm": "ffn_norm",
    },
    heads={
        "mlm": {"mlm_head": "decoder", "mlm_head/output_embeddings": "decoder"},
        "sequence": {"pooler": "dense", "sequence_head": "classifier"},
    },
    sizes={
        "vocab_size": ("encoder.weight", 0, 1),
        "hidden_size": ("encoder.weight", 1, 1),
        "intermediate_size": ("transformer_encoder.0.ffn.w3.weight", 1, 1),
    },
    dropouts={"sequence": HeadDropout("classifier_dropout", 0.1)},
)  # fmt: skip
