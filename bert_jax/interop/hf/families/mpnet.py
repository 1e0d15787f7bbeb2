"""MPNet (Song et al. 2020): ``MPNetConfig`` and ``modeling_mpnet`` of transformers.

The network is RoBERTa without segment embeddings, with a learned bias per head and bucket of distances,
which all layers share. transformers has 32 buckets and begins at position row 2, whatever ``config.json`` states.
"""

import dataclasses

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert, roberta
from bert_jax.interop.hf.family import headed
from bert_jax.json_values import Json


def write(model: ModelConfig) -> dict[str, Json]:
    """Return the number of buckets and the ids of the special tokens."""
    return {
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
        "relative_attention_num_buckets": model.relative_buckets,
    }  # fmt: skip


FAMILY = dataclasses.replace(
    bert.FAMILY,
    name="mpnet",
    title="MPNet",
    classes=headed("MPNet"),
    prefix="mpnet.",
    prunes=False,
    keys={key: entry for key, entry in bert.KEYS.items() if key != "type_vocab_size"},
    fixed={
        "type_vocab_size": 0, "position_offset": 2, "relative_positions": "buckets", "relative_buckets": 32,
        "relative_max_distance": 128, "mlm_layer": "gelu",
    },
    write=write,
    refused={"relative_attention_num_buckets": (32,), "pad_token_id": (1,)},
    encoder=bert.embeddings("word", "position")
    | {"encoder/relative_attention_bias": "encoder.relative_attention_bias"},
    layers=bert.LAYERS
    | {
        "attention/query": "attention.attn.q",
        "attention/key": "attention.attn.k",
        "attention/value": "attention.attn.v",
        "attention/output": "attention.attn.o",
        "attention/layer_norm": "attention.LayerNorm",
    },
    heads=roberta.ROBERTA.heads,
    dropouts={},
)  # fmt: skip
