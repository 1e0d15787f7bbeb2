"""RoBERTa (Liu et al. 2019) and families with its network: XLM-R (Conneau et al. 2020), CamemBERT.

The first position has the row after the padding row, and the MLM head always has the activation gelu.
"""

import dataclasses

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import Values, headed
from bert_jax.json_values import Json


def read_offset(values: Values) -> dict[str, Json]:
    """Return the offset of positions: the row after the padding row."""
    return {"position_offset": values.integer("pad_token_id", 1) + 1}


def write_offset(model: ModelConfig) -> dict[str, Json]:
    """Return the ids of the special tokens."""
    return {"pad_token_id": max(model.position_offset - 1, 0), "bos_token_id": 0, "eos_token_id": 2}


ROBERTA = dataclasses.replace(
    bert.FAMILY,
    name="roberta",
    title="RoBERTa",
    classes=headed("Roberta"),
    prefix="roberta.",
    fixed={"mlm_layer": "gelu"},
    other_keys=frozenset({"pad_token_id"}),
    read=read_offset,
    write=write_offset,
    heads={
        "pooler": bert.FAMILY.heads["pooler"],
        "mlm": bert.mlm("lm_head", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
        # tanh(dense(first token)) belongs to the head, and the encoder has no pooler.
        "sequence": {"pooler": "classifier.dense", "sequence_head": "classifier.out_proj"},
        "choice": bert.CLASSIFIERS["choice"],
        **bert.TOKEN_AND_SPAN,
    },
)
XLM_ROBERTA = dataclasses.replace(ROBERTA, name="xlm-roberta", title="XLM-RoBERTa", classes=headed("XLMRoberta"))
CAMEMBERT = dataclasses.replace(ROBERTA, name="camembert", title="CamemBERT", classes=headed("Camembert"))
