"""RoBERTa (Liu et al. 2019) and families with its network: XLM-R (Conneau et al. 2020), CamemBERT.

The first position has the row after the padding row, and the MLM head always has the activation gelu.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import Family, headed, integer

HEADS = {
    "pooler": bert.POOLER,
    "mlm": bert.mlm("lm_head", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
    # tanh(dense(first token)) belongs to the head, and the encoder has no pooler.
    "sequence": {"pooler": "classifier.dense", "sequence_head": "classifier.out_proj"},
    "choice": bert.CLASSIFIERS["choice"],
    **bert.TOKEN_AND_SPAN,
}


def read_offset(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the offset of positions: the row after the padding row."""
    return {"position_offset": integer(config, "pad_token_id", name, 1) + 1}


def write_offset(model: ModelConfig) -> dict[str, Any]:
    """Return the ids of the special tokens."""
    return {"pad_token_id": max(model.position_offset - 1, 0), "bos_token_id": 0, "eos_token_id": 2}


ROBERTA = Family(
    name="roberta",
    title="RoBERTa",
    class_prefix="Roberta",
    classes=headed("Roberta"),
    prefix="roberta.",
    keys=bert.KEYS,
    prunes=True,
    refused={"position_embedding_type": ("absolute", None)},
    fixed={"mlm_activation": "gelu"},
    other_keys=frozenset({"pad_token_id"}),
    read=read_offset,
    write=write_offset,
    encoder=bert.EMBEDDINGS,
    layer=bert.FAMILY.layer,
    layers=bert.LAYERS,
    heads=HEADS,
    tied=bert.tied("lm_head.decoder"),
    sizes=bert.SIZES,
)
XLM_ROBERTA = dataclasses.replace(
    ROBERTA, name="xlm-roberta", title="XLM-RoBERTa", class_prefix="XLMRoberta", classes=headed("XLMRoberta")
)
CAMEMBERT = dataclasses.replace(
    ROBERTA, name="camembert", title="CamemBERT", class_prefix="Camembert", classes=headed("Camembert")
)
