"""DeBERTa, versions 2 and 3 (He et al. 2021a, 2021b): ``DebertaV2Config`` and ``modeling_deberta_v2`` of
transformers.

Scores contain products of queries and keys with embeddings of the distance, which the projections of queries and
keys also project. Sequence and choice heads have a pooler. The MLM head has two sets of names (``legacy``): both
are read, and those of ``legacy`` true are written, because release 4.57 replaces weights of the other head.
"""

from collections.abc import Mapping
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    Family,
    HeadDropout,
    Key,
    check_head_size,
    choice,
    flag,
    headed,
    integer,
    name_set,
    short,
)

_POOLER = {"pooler": "pooler.dense"}
_DROPOUT = HeadDropout("cls_dropout")
_POSITIONS = ("c2p", "p2c")
_POOLER_ACTIVATIONS = {"tanh": "tanh"} | ACTIVATIONS


def read(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the kinds of positions, the activation of the pooler and the output layer."""
    width, heads = integer(config, "hidden_size", name), integer(config, "num_attention_heads", name)
    for key in ("embedding_size", "pooler_hidden_size"):
        if config.get(key, width) not in (None, width):
            raise ValueError(f"{name}: {key} is {short(config[key])}; supported: hidden_size, {width}")
    check_head_size(config, "attention_head_size", name, width, heads)
    kind = choice(config, "pooler_hidden_act", name, "gelu", _POOLER_ACTIVATIONS)
    fields = {"pooler_activation": _POOLER_ACTIVATIONS[kind]}
    learned = flag(config, "position_biased_input", name, True)
    fields["position_embeddings"] = "learned" if learned else "none"
    if not flag(config, "legacy", name, True):
        fields["tied_output"] = True  # this head multiplies with the word embeddings
    return fields | _distances(config, name)


def _distances(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of the table of distances."""
    kinds = config.get("pos_att_type") or []
    kinds = [kind.strip() for kind in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(
            f"{name}: pos_att_type is {short(kinds)}; allowed: names in a list, or with | between them"
        )
    norms = str(config.get("norm_rel_ebd", "none")).lower()
    if not flag(config, "relative_attention", name, False):
        if kinds or norms != "none":
            other = f"pos_att_type {short(kinds)}, norm_rel_ebd {norms}"
            raise ValueError(f"{name}: relative_attention is false with {other}; supported: neither of them")
        return {"relative_positions": "none"}
    stated = {
        "pos_att_type": sorted(kinds),
        "norm_rel_ebd": norms,
        "share_att_key": config.get("share_att_key", False),
    }
    for key, allowed in {
        "pos_att_type": [*_POSITIONS],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    }.items():
        if stated[key] != allowed:
            raise ValueError(f"{name}: {key} is {short(stated[key])}; supported: {short(allowed)}")
    most = integer(config, "max_relative_positions", name, -1)
    most = most if most > 0 else integer(config, "max_position_embeddings", name, 512)
    buckets = integer(config, "position_buckets", name, -1)
    if buckets >= most:
        problem = f"position_buckets is {buckets} with {most} relative positions"
        raise ValueError(f"{name}: {problem}; supported: -1 or fewer than max_relative_positions")
    buckets = buckets if buckets > 0 else most
    return {
        "relative_positions": "disentangled", "relative_buckets": 2 * buckets, "relative_max_distance": most,
    }  # fmt: skip


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that :func:`read` reads."""
    activation = model.pooler_activation
    found: dict[str, Any] = {
        "pooler_hidden_act": activation if activation == "tanh" else ACTIVATION_NAMES[activation][0],
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
    """Return ``name`` with the names that the MLM head has with ``legacy`` true."""
    head, _, rest = name.partition("lm_predictions.lm_head.")
    if head or not rest:
        return name
    return f"cls.predictions.{rest}" if rest == "bias" else f"cls.predictions.transform.{rest}"


FAMILY = Family(
    name="deberta-v2",
    title="DeBERTa-v2",
    class_prefix="DebertaV2",
    classes=headed("DebertaV2", ("Model", ())),
    prefix="deberta.",
    keys=bert.KEYS
    | {
        "type_vocab_size": Key("type_vocab_size", "integer", 0),
        "layer_norm_eps": Key("norm_epsilon", "number", 1e-7, announced=True),
    },
    other_keys=name_set(
        """embedding_size pooler_hidden_size attention_head_size pooler_hidden_act position_biased_input legacy
            relative_attention pos_att_type norm_rel_ebd share_att_key position_buckets max_relative_positions"""
    ),
    read=read,
    write=write,
    harmless=name_set("conv_act conv_groups"),
    refused={"conv_kernel_size": (0, None), "pooler_dropout": (0, 0.0, None)},
    encoder=bert.EMBEDDINGS
    | {
        "encoder/relative_embeddings": "encoder.rel_embeddings",
        "encoder/relative_layer_norm": "encoder.LayerNorm",
    },
    layer=bert.FAMILY.layer,
    layers=bert.LAYERS | {f"attention/{name}": f"attention.self.{name}_proj" for name in ("query", "key", "value")},
    heads={
        "mlm": bert.FAMILY.heads["mlm"],
        **{head: {**_POOLER, **modules} for head, modules in bert.CLASSIFIERS.items()},
        **bert.TOKEN_AND_SPAN,
    },
    tied=bert.FAMILY.tied,
    sizes=bert.SIZES | {"relative_buckets": ("encoder.rel_embeddings.weight", 0, 1)},
    rename=rename,
    # The head of replaced tokens, which transformers does not have, and positions that no layer reads.
    omitted=("mask_predictions.", "embeddings.position_embeddings.", "deberta.embeddings.position_embeddings."),
    dropouts={"sequence": _DROPOUT, "choice": _DROPOUT},
)
