"""ALBERT (Lan et al. 2020): ``AlbertConfig`` and ``modeling_albert`` of transformers.

The embeddings are narrower than the encoder, all layers share their parameters, and the sentence-pair head predicts
the order of two texts. The pooler is one dense layer without a module, and no dropout follows the
feed-forward output.
"""

import dataclasses

from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import TASK_HEADS, HeadDropout, Key, headed, name_set

FAMILY = dataclasses.replace(
    bert.FAMILY,
    name="albert",
    title="ALBERT",
    classes=headed("Albert", ("ForPreTraining", ("pooler", "mlm", "nsp"))),
    prefix="albert.",
    prunes=False,
    keys=bert.KEYS
    | bert.keys(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_act="gelu_new")
    | {"embedding_size": Key("embedding_size")},
    fixed={"shared_layers": True, "feed_forward_dropout": 0.0},
    # Options of the authors' code without a counterpart in transformers.
    harmless=name_set("net_structure_type gap_size num_memory_blocks down_scale_factor layers_to_keep"),
    refused={**bert.FAMILY.refused, "num_hidden_groups": (1,), "inner_group_num": (1,)},
    encoder={**bert.FAMILY.encoder, "embeddings/projection": "encoder.embedding_hidden_mapping_in"},
    layer="encoder.albert_layer_groups.0.albert_layers.0.",
    layers={
        "attention/query": "attention.query",
        "attention/key": "attention.key",
        "attention/value": "attention.value",
        "attention/output": "attention.dense",
        "attention/layer_norm": "attention.LayerNorm",
        "feed_forward/intermediate": "ffn",
        "feed_forward/output": "ffn_output",
        "feed_forward/layer_norm": "full_layer_layer_norm",
    },
    heads={
        "pooler": {"pooler": "{prefix}pooler"},
        "mlm": bert.mlm("predictions", "predictions.dense", "predictions.LayerNorm", "predictions.decoder"),
        "nsp": {"nsp_head": "sop_classifier.classifier"},
        **bert.CLASSIFIERS,
        **bert.TOKEN_AND_SPAN,
    },
    outputs={"seq_relationship_logits": "sop_logits"},
    dropouts=dict.fromkeys(TASK_HEADS, HeadDropout("classifier_dropout_prob", 0.1)),
)
