"""DeBERTa, versions 2 and 3 (He et al. 2021a, 2021b): ``DebertaV2Config`` and ``modeling_deberta_v2`` of
transformers.

Scores contain products of queries and keys with embeddings of the distance, which the projections of queries and
keys also project. Sequence and choice heads have a pooler. The MLM head has two sets of names (``legacy``): both
are read, and those of ``legacy`` true are written, because release 4.57 replaces weights of the other head.
"""

import dataclasses

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import ACTIVATIONS, HeadDropout, Values, activation_name, headed, name_set, short
from bert_jax.json_values import Json

_POOLER_ACTIVATIONS = {"tanh": "tanh"} | ACTIVATIONS


def read(values: Values) -> dict[str, Json]:
    """Return the kinds of positions, the activation of the pooler and the output layer."""
    width, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    for key in ("embedding_size", "pooler_hidden_size"):
        values.require(key, (width, None))
    values.check_head_size("attention_head_size", width, heads)
    kind = values.choice("pooler_hidden_act", "gelu", _POOLER_ACTIVATIONS)
    learned = values.flag("position_biased_input", True)
    # Without ``legacy`` the MLM head multiplies with the word embeddings.
    tied = {} if values.flag("legacy", True) else {"tied_output": True}
    return {
        "pooler_layer": (_POOLER_ACTIVATIONS[kind],), "position_embeddings": "learned" if learned else "none",
        **tied, **_distances(values),
    }  # fmt: skip


def _distances(values: Values) -> dict[str, Json]:
    """Return the fields of the table of distances."""
    config = values.config
    kinds = config.get("pos_att_type") or []
    kinds = [kind.strip() for kind in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise values.wrong("pos_att_type", "; allowed: names in a list, or with | between them")
    norms = str(config.get("norm_rel_ebd", "none")).lower()
    if not values.flag("relative_attention", False):
        if kinds or norms != "none":
            rule = f" with pos_att_type {short(kinds)}, norm_rel_ebd {norms}; supported: neither of them"
            raise values.wrong("relative_attention", rule, False)
        return {"relative_positions": "none"}
    stated = {
        "pos_att_type": sorted(kinds),
        "norm_rel_ebd": norms,
        "share_att_key": config.get("share_att_key", False),
    }
    normal = Values(stated, values.name)
    normal.require("pos_att_type", (["c2p", "p2c"],))
    normal.require("norm_rel_ebd", ("layer_norm",))
    normal.require("share_att_key", (True,))
    most = values.integer("max_relative_positions", -1)
    most = most if most > 0 else values.integer("max_position_embeddings", 512)
    buckets = values.integer("position_buckets", -1)
    if buckets >= most:
        rule = f" with {most} relative positions; supported: -1 or fewer than max_relative_positions"
        raise values.wrong("position_buckets", rule)
    buckets = buckets if buckets > 0 else most
    return {
        "relative_positions": "disentangled", "relative_buckets": 2 * buckets, "relative_max_distance": most,
    }  # fmt: skip


def write(model: ModelConfig) -> dict[str, Json]:
    """Return the keys that :func:`read` reads."""
    found: dict[str, Json] = {
        "pooler_hidden_act": activation_name(model.pooler_layer[0]),
        "position_biased_input": model.position_embeddings == "learned",
        "relative_attention": model.relative_positions == "disentangled",
        "legacy": True,
    }
    if model.relative_positions == "disentangled":
        span, most = model.relative_buckets // 2, model.relative_max_distance
        found |= {
            "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "share_att_key": True,
            "position_buckets": span if most > span else -1, "max_relative_positions": max(most, span),
        }  # fmt: skip
    return found


def rename(name: str) -> str:
    """Return ``name``, with the MLM head names of ``legacy`` false replaced by those of ``legacy`` true."""
    head, _, rest = name.partition("lm_predictions.lm_head.")
    if head or not rest:
        return name
    return f"cls.predictions.{rest}" if rest == "bias" else f"cls.predictions.transform.{rest}"


FAMILY = dataclasses.replace(
    bert.FAMILY,
    name="deberta-v2",
    title="DeBERTa-v2",
    classes=headed("DebertaV2", ("Model", ())),
    prefix="deberta.",
    prunes=False,
    keys=bert.KEYS | bert.keys(type_vocab_size=0, layer_norm_eps=1e-7),
    other_keys=name_set(
        """embedding_size pooler_hidden_size attention_head_size pooler_hidden_act position_biased_input legacy
            relative_attention pos_att_type norm_rel_ebd share_att_key position_buckets max_relative_positions"""
    ),
    read=read,
    write=write,
    harmless=name_set("conv_act conv_groups"),
    refused={"conv_kernel_size": (0, None), "pooler_dropout": (0, 0.0, None)},
    encoder={
        **bert.FAMILY.encoder,
        "encoder/relative_embeddings": "encoder.rel_embeddings",
        "encoder/relative_layer_norm": "encoder.LayerNorm",
    },
    layers=bert.LAYERS | {f"attention/{name}": f"attention.self.{name}_proj" for name in ("query", "key", "value")},
    heads={
        "mlm": bert.FAMILY.heads["mlm"],
        **{head: {"pooler": "pooler.dense", **modules} for head, modules in bert.CLASSIFIERS.items()},
        **bert.TOKEN_AND_SPAN,
    },
    rename=rename,
    # The head of replaced tokens, which transformers does not have, and positions that no layer reads.
    omitted=("mask_predictions.", "embeddings.position_embeddings.", "deberta.embeddings.position_embeddings."),
    dropouts=dict.fromkeys(("sequence", "choice"), HeadDropout("cls_dropout")),
)
