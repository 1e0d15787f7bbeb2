"""NeoBERT (Le Breton et al. 2025): the folders of the authors' code (``model.py`` of chandar-lab/NeoBERT).

No release of transformers has the family, so the folders name the authors' code (``auto_map``), which is never run
here. Query, key and value of a head are next to each other, rotary positions rotate neighboring dimensions, and the
width of the feed-forward layer is two thirds of ``intermediate_size``, rounded up to a multiple of 8.
"""

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import Family, HeadDropout, Key, Place, Values, name_set
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


def read(values: Values) -> dict[str, Json]:
    """Return the width of the feed-forward layer and the rates of dropout."""
    values.check_code("NeoBERT")
    more = values.config.get("kwargs") or {}
    if not isinstance(more, dict):
        raise values.wrong("kwargs", ", not an object")
    for key, supported in _SUPPORTED.items():
        for stated in (values, Values(more, values.name)):
            stated.require(key, (*supported, None))
    width, heads = values.integer("hidden_size", 768), values.integer("num_attention_heads", 12)
    values.check_head_size("dim_head", width, heads)
    inner = 2 * values.integer("intermediate_size", 3072) // 3
    rate = values.number("dropout", 0.0)
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
    code=_CODE,
    classes={
        "NeoBERT": (),
        "NeoBERTLMHead": ("mlm",),
        "NeoBERTForSequenceClassification": ("pooler", "sequence"),
    },
    prefix="model.",
    keys=bert.keys(
        vocab_size=30522, hidden_size=768, num_hidden_layers=28, num_attention_heads=12, intermediate_size=3072
    )
    | {
        "max_length": Key("max_position_embeddings", 1024),
        "norm_eps": Key("norm_epsilon", 1e-6),
        "decoder_init_range": Key("initializer_range", 0.02),
    },
    fixed={
        "type_vocab_size": 0, "norm": "rms_norm", "norm_position": "pre", "feed_forward": "gated",
        "activation": "silu", "position_embeddings": "rotary", "embedding_dropout": 0.0,
        "without_bias": ("qkv", "attention_output", "feed_forward"), "mlm_layer": "none", "tied_output": False,
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
    dropouts={"sequence": HeadDropout("classifier_dropout", 0.1)},
)  # fmt: skip
