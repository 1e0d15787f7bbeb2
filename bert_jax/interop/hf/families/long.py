"""Encoders of long rows: Longformer (Beltagy et al. 2020), ``LongformerConfig`` and ``modeling_longformer`` of
transformers.

The network is that of RoBERTa with a window around each token and further projections for global tokens.
"""

from collections.abc import Mapping
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert, roberta
from bert_jax.interop.hf.family import Family, headed, integer, short

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
    """Return the ids of the special tokens and the width of the window of each layer, both sides together."""
    return roberta.write_offset(model) | {
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
