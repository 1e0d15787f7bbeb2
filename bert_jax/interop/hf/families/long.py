"""Encoders of long rows: Longformer (Beltagy et al. 2020) and BigBird (Zaheer et al. 2020), ``modeling_longformer``
and ``modeling_big_bird`` of transformers.

Longformer is RoBERTa with a window around each token and further projections for global tokens. BigBird is BERT
with attention in blocks, a further dense layer before the sequence head, and a feed-forward block in the span head.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert, roberta
from bert_jax.interop.hf.family import HeadDropout, Key, Values, headed
from bert_jax.json_values import Json

# Most global tokens of a row that has a question, or whose caller states them.
GLOBAL_TOKENS = 128


def read_longformer(values: Values) -> dict[str, Json]:
    """Return the offset of positions, the windows and the global tokens."""
    windows, layers = values.config.get("attention_window", 512), values.integer("num_hidden_layers")
    listed = windows if isinstance(windows, list) else [windows]
    widths = [width for width in listed if isinstance(width, int) and width > 0 and width % 2 == 0]
    if len(widths) != len(listed) or (isinstance(windows, list) and len(windows) != layers):
        rule = f"; allowed: an even number above 0, or a list of {layers} such numbers"
        raise values.wrong("attention_window", rule)
    return roberta.read_offset(values) | {
        "attention_windows": tuple(width // 2 for width in (widths[:1] if len(set(widths)) == 1 else widths)),
        "global_tokens": GLOBAL_TOKENS,
        "separator_id": 2 if values.config.get("sep_token_id") is None else values.integer("sep_token_id"),
    }


def write_longformer(model: ModelConfig) -> dict[str, Json]:
    """Return the ids of the special tokens and the width of the window of each layer, both sides together.

    RoBERTa's vocabularies end with the separator; in a BERT vocabulary, no token is known to begin a text.
    """
    return roberta.write_offset(model) | {
        "bos_token_id": 0 if model.position_offset == 2 else None,
        "eos_token_id": model.separator_id,
        "attention_window": [2 * window for window in model.layer_windows],
        "sep_token_id": model.separator_id,
    }


LONGFORMER = dataclasses.replace(
    roberta.ROBERTA,
    name="longformer",
    title="Longformer",
    classes=headed("Longformer"),
    prefix="longformer.",
    prunes=False,
    other_keys=frozenset({"pad_token_id", "sep_token_id", "attention_window"}),
    read=read_longformer,
    write=write_longformer,
    harmless=frozenset({"onnx_export", "attention_mode", "ignore_attention_mask"}),
    layers=bert.LAYERS
    | {f"attention/{part}_global": f"attention.self.{part}_global" for part in ("query", "key", "value")},
    dropouts={},
)

# Size of a block where the model has no blocks.
BLOCK = 64


def read_big_bird(values: Values) -> dict[str, Json]:
    """Return the size of a block, 0 for attention over whole rows, the separator, and the activation of the dense
    layer before the sequence head, which equals the encoder's."""
    kind = values.choice("attention_type", "block_sparse", ("block_sparse", "original_full"))
    block = values.integer("block_size", BLOCK)
    if block <= 0:
        raise values.wrong("block_size", "; allowed: above 0")
    return {
        "attention_block": block if kind == "block_sparse" else 0,
        "separator_id": values.integer("sep_token_id", 66),
        "pooler_layer": ("tanh", values.activation("hidden_act", "gelu_new")),
    }


def write_big_bird(model: ModelConfig) -> dict[str, Json]:
    """Return the kind of attention, the size of a block and the ids of the special tokens."""
    return {
        "attention_type": "block_sparse" if model.attention_block else "original_full",
        "block_size": model.attention_block or BLOCK,
        "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": model.separator_id,
    }  # fmt: skip


BIG_BIRD = dataclasses.replace(
    bert.FAMILY,
    name="big_bird",
    title="BigBird",
    classes=headed("BigBird", ("ForPreTraining", ("pooler", "mlm", "nsp"))),
    idle_pooler=frozenset(
        f"BigBirdFor{suffix}" for suffix in ("MaskedLM", "SequenceClassification", "TokenClassification")
    ),
    prunes=False,
    keys=bert.KEYS
    | bert.keys(hidden_act="gelu_new", max_position_embeddings=4096)
    | {
        "num_random_blocks": Key("random_blocks", 3),
        "rescale_embeddings": Key("embedding_scale", False),
        "use_bias": Key("without_bias", True, part="qkv"),
    },
    fixed={"head_parts": ("span_transform",)},
    other_keys=frozenset({"attention_type", "block_size", "sep_token_id"}),
    read=read_big_bird,
    write=write_big_bird,
    heads={
        **bert.FAMILY.heads,
        "pooler": {"pooler": "{prefix}pooler"},
        "sequence": roberta.ROBERTA.heads["sequence"],
        "span": {
            "span_transform/intermediate": "qa_classifier.intermediate.dense",
            "span_transform/output": "qa_classifier.output.dense",
            "span_transform/layer_norm": "qa_classifier.output.LayerNorm",
            "span_head": "qa_classifier.qa_outputs",
        },
    },
    dropouts=dict.fromkeys(("sequence", "token"), HeadDropout("classifier_dropout")),
)


def copy_projections(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return ``params`` with copies of query, key and value of each layer as the projections of global tokens."""
    return dict(params) | {other: params[name] for name, other in _projections(params)}


def has_own_projections(params: Mapping[str, np.ndarray]) -> bool:
    """Return True if the projections of global tokens in ``params`` differ from the other projections."""
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
