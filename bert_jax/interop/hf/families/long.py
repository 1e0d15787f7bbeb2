"""Encoders of long rows: Longformer (Beltagy et al. 2020) and BigBird (Zaheer et al. 2020), ``modeling_longformer``
and ``modeling_big_bird`` of transformers.

Longformer is RoBERTa with a window around each token and further projections for global tokens. BigBird is BERT
with attention in blocks, a dense layer of its own before the sequence head, and a feed-forward block in the span
head.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert, roberta
from bert_jax.interop.hf.family import Family, HeadDropout, Key, activation, choice, headed, integer, short

# Most global tokens of a row that has a question, or whose caller states them.
GLOBAL_TOKENS = 128


def read_longformer(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the offset of positions, the windows and the global tokens."""
    windows, layers = config.get("attention_window", 512), integer(config, "num_hidden_layers", name)
    listed = windows if isinstance(windows, list) else [windows]
    is_even = all(isinstance(width, int) and width > 0 and width % 2 == 0 for width in listed)
    if not is_even or (isinstance(windows, list) and len(windows) != layers):
        allowed = f"an even number above 0, or a list of {layers} such numbers"
        raise ValueError(f"{name}: attention_window is {short(windows)}; allowed: {allowed}")
    return roberta.read_offset(config, name) | {
        "attention_windows": tuple(width // 2 for width in (listed[:1] if len(set(listed)) == 1 else listed)),
        "global_tokens": GLOBAL_TOKENS,
        "separator_id": 2 if config.get("sep_token_id") is None else integer(config, "sep_token_id", name),
    }


def write_longformer(model: ModelConfig) -> dict[str, Any]:
    """Return the ids of the special tokens and the width of the window of each layer, both sides together.

    RoBERTa's vocabularies end with the separator; in a BERT vocabulary, no token is known to begin a text.
    """
    return roberta.write_offset(model) | {
        "bos_token_id": 0 if model.position_offset == 2 else None,
        "eos_token_id": model.separator_id,
        "attention_window": [2 * window for window in model.layer_windows],
        "sep_token_id": model.separator_id,
    }


LONGFORMER = Family(
    name="longformer",
    title="Longformer",
    class_prefix="Longformer",
    classes=headed("Longformer"),
    prefix="longformer.",
    keys=bert.KEYS,
    fixed={"mlm_activation": "gelu"},
    other_keys=frozenset({"pad_token_id", "sep_token_id", "attention_window"}),
    read=read_longformer,
    write=write_longformer,
    harmless=frozenset({"onnx_export", "attention_mode", "ignore_attention_mask"}),
    refused={"position_embedding_type": ("absolute", None)},
    encoder=bert.EMBEDDINGS,
    layer=bert.FAMILY.layer,
    layers=bert.LAYERS
    | {f"attention/{part}_global": f"attention.self.{part}_global" for part in ("query", "key", "value")},
    heads=roberta.HEADS,
    tied=bert.tied("lm_head.decoder"),
    sizes=bert.SIZES,
    dropouts={},
)

_CLASSIFIER_DROPOUT = HeadDropout("classifier_dropout")
# Size of a block where the model has no blocks.
BLOCK = 64


def read_big_bird(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the size of a block, 0 for attention over whole rows, the separator, and the activation of the dense
    layer before the sequence head, which equals the encoder's."""
    kind = choice(config, "attention_type", name, "block_sparse", ("block_sparse", "original_full"))
    block = integer(config, "block_size", name, BLOCK)
    if block <= 0:
        raise ValueError(f"{name}: block_size is {block}; allowed: above 0")
    return {
        "attention_block": block if kind == "block_sparse" else 0,
        "separator_id": integer(config, "sep_token_id", name, 66),
        "sequence_activation": activation(config, "hidden_act", name, "gelu_new"),
    }


def write_big_bird(model: ModelConfig) -> dict[str, Any]:
    """Return the kind of attention, the size of a block and the ids of the special tokens."""
    return {
        "attention_type": "block_sparse" if model.attention_block else "original_full",
        "block_size": model.attention_block or BLOCK,
        "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": model.separator_id,
    }  # fmt: skip


BIG_BIRD = Family(
    name="big_bird",
    title="BigBird",
    class_prefix="BigBird",
    classes=headed("BigBird", ("ForPreTraining", ("pooler", "mlm", "nsp"))),
    idle_pooler=frozenset(
        f"BigBirdFor{suffix}" for suffix in ("MaskedLM", "SequenceClassification", "TokenClassification")
    ),
    prefix="bert.",
    keys=bert.KEYS
    | {
        "hidden_act": Key("activation", "activation", "gelu_new", announced=True),
        "max_position_embeddings": Key("max_position_embeddings", "integer", 4096),
        "num_random_blocks": Key("random_blocks", "integer", 3),
        "rescale_embeddings": Key("embedding_scale", "flag", False),
        "use_bias": Key("qkv_bias", "flag", True),
    },
    fixed={"span_transform": True},
    other_keys=frozenset({"attention_type", "block_size", "sep_token_id"}),
    read=read_big_bird,
    write=write_big_bird,
    refused={"position_embedding_type": ("absolute", None)},
    encoder=bert.EMBEDDINGS,
    layer=bert.FAMILY.layer,
    layers=bert.LAYERS,
    heads={
        "pooler": {"pooler": "{prefix}pooler"},
        "mlm": bert.FAMILY.heads["mlm"],
        "nsp": bert.FAMILY.heads["nsp"],
        "sequence": {"pooler": "classifier.dense", "sequence_head": "classifier.out_proj"},
        "choice": bert.CLASSIFIERS["choice"],
        "token": bert.TOKEN_AND_SPAN["token"],
        "span": {
            "span_transform/intermediate": "qa_classifier.intermediate.dense",
            "span_transform/output": "qa_classifier.output.dense",
            "span_transform/layer_norm": "qa_classifier.output.LayerNorm",
            "span_head": "qa_classifier.qa_outputs",
        },
    },
    tied=bert.FAMILY.tied,
    sizes=bert.SIZES,
    dropouts={"sequence": _CLASSIFIER_DROPOUT, "token": _CLASSIFIER_DROPOUT},
)


def copy_projections(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return ``params`` with copies of query, key and value of each layer as the projections of global tokens."""
    return dict(params) | {other: params[name] for name, other in _projections(params)}


def has_own_projections(params: Mapping[str, np.ndarray]) -> bool:
    """Return True if the projections of global tokens in ``params`` are no copies of the others."""
    pairs = _projections(params)
    return any(other in params and not np.array_equal(params[name], params[other]) for name, other in pairs)


def _projections(params: Mapping[str, np.ndarray]) -> list[tuple[str, str]]:
    """Return the names of query, key and value of each layer, and of those of global tokens."""
    pairs = []
    for name in params:
        *place, part, kind = name.split("/")
        if place[-1:] == ["attention"] and part in ("query", "key", "value"):
            pairs.append((name, "/".join((*place, f"{part}_global", kind))))
    return pairs
