"""ELECTRA (Clark et al. 2020), generator and discriminator: ``ElectraConfig`` and ``modeling_electra`` of
transformers.

The network is BERT without a pooler. Embeddings as wide as the encoder are not projected. Sequence and
choice heads have their own dense layer with gelu.
"""

from collections.abc import Mapping
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import Family, HeadDropout, headed, integer

_CLASSIFIER_DROPOUT = HeadDropout("classifier_dropout")


def read(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the width of the embeddings; 0: the encoder's, without a projection."""
    width = integer(config, "embedding_size", name, 128)
    return {"embedding_size": 0 if width == config.get("hidden_size") else width}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the width of the embeddings."""
    return {"embedding_size": model.embedding_width}


FAMILY = Family(
    name="electra",
    title="ELECTRA",
    class_prefix="Electra",
    classes=headed("Electra", ("Model", ()), ("ForPreTraining", ("rtd",))),
    prefix="electra.",
    keys=bert.KEYS,
    prunes=True,
    fixed={"mlm_activation": "gelu", "pooler_activation": "gelu"},
    other_keys=frozenset({"embedding_size"}),
    read=read,
    write=write,
    harmless=frozenset({"summary_first_dropout"}),
    refused={
        "position_embedding_type": ("absolute", None),
        "summary_type": ("first",),
        "summary_use_proj": (True,),
        "summary_activation": ("gelu",),
        "summary_proj_to_labels": (False, None),
    },
    encoder=bert.EMBEDDINGS | {"embeddings/projection": "embeddings_project"},
    layer=bert.FAMILY.layer,
    layers=bert.LAYERS,
    heads={
        "mlm": bert.mlm(
            "generator_lm_head",
            "generator_predictions.dense",
            "generator_predictions.LayerNorm",
            "generator_lm_head",
        ),
        "rtd": {
            "rtd_head": "discriminator_predictions",
            "rtd_head/transform": "discriminator_predictions.dense",
            "rtd_head/output": "discriminator_predictions.dense_prediction",
        },
        "sequence": {"pooler": "classifier.dense", "sequence_head": "classifier.out_proj"},
        "choice": {"pooler": "sequence_summary.summary", "choice_head": "classifier"},
        **bert.TOKEN_AND_SPAN,
    },
    tied={"generator_lm_head.weight": "embeddings/word_embeddings/embedding"},
    sizes=bert.SIZES
    | {
        "embedding_size": ("embeddings_project.weight", 1, 1),
        "hidden_size": ("encoder.layer.0.attention.self.query.weight", 1, 1),
    },
    dropouts={
        "sequence": _CLASSIFIER_DROPOUT, "token": _CLASSIFIER_DROPOUT,
        "choice": HeadDropout("summary_last_dropout", 0.1),
    },
)  # fmt: skip
