"""ELECTRA (Clark et al. 2020), generator and discriminator: ``ElectraConfig`` and ``modeling_electra`` of
transformers.

The network is BERT without a pooler. Embeddings as wide as the encoder are not projected. Sequence and choice heads
contain a separate dense layer with gelu.
"""

import dataclasses

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import HeadDropout, Values, headed
from bert_jax.json_values import Json


def read(values: Values) -> dict[str, Json]:
    """Return the width of the embeddings; 0: the encoder's, without a projection."""
    width = values.integer("embedding_size", 128)
    return {"embedding_size": 0 if width == values.config.get("hidden_size") else width}


def write(model: ModelConfig) -> dict[str, Json]:
    """Return the width of the embeddings."""
    return {"embedding_size": model.embedding_width}


FAMILY = dataclasses.replace(
    bert.FAMILY,
    name="electra",
    title="ELECTRA",
    classes=headed("Electra", ("Model", ()), ("ForPreTraining", ("rtd",))),
    prefix="electra.",
    fixed={"mlm_layer": "gelu", "pooler_layer": ("gelu",)},
    other_keys=frozenset({"embedding_size"}),
    read=read,
    write=write,
    harmless=frozenset({"summary_first_dropout"}),
    refused={
        **bert.FAMILY.refused,
        "summary_type": ("first",), "summary_use_proj": (True,), "summary_activation": ("gelu",),
        "summary_proj_to_labels": (False, None),
    },
    encoder={**bert.FAMILY.encoder, "embeddings/projection": "embeddings_project"},
    heads={
        "mlm": bert.mlm(
            "generator_lm_head", "generator_predictions.dense", "generator_predictions.LayerNorm",
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
    dropouts={
        **dict.fromkeys(("sequence", "token"), HeadDropout("classifier_dropout")),
        "choice": HeadDropout("summary_last_dropout", 0.1),
    },
)  # fmt: skip
