"""NomicBERT (Nussbaum et al. 2024): ``NomicBertConfig`` and ``modeling_nomic_bert`` of transformers from 5 on, and
the folders of the authors' code, which have other keys in ``config.json``.

Releases store the names of the authors' code, or, with ``save_original_format=False``, other names, with separate
query, key and value. Both are read; the former are written.
"""

import re
from collections.abc import Mapping

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import Family, Key, Place, Values, name_set
from bert_jax.interop.stored_model import Tensor
from bert_jax.json_values import Json

_PREFIX, _AUTHORS_PREFIX = "nomic_bert.", "bert."
# Key of the authors' code -> (kind, field, default); the class derives from GPT2Config.
_SIZES = {
    "n_embd": ("hidden_size", 768), "n_layer": ("num_layers", 12), "n_head": ("num_attention_heads", 12),
    "n_inner": ("intermediate_size", None), "n_positions": ("max_position_embeddings", 1024),
}  # fmt: skip
_RATES = {
    "resid_pdrop": ("hidden_dropout", 0.1), "attn_pdrop": ("attention_dropout", 0.1),
    "layer_norm_epsilon": ("norm_epsilon", 1e-5), "rotary_emb_base": ("rotary_base", 10_000.0),
}  # fmt: skip
# Key of the authors' code -> (default, supported values).
_SUPPORTED: dict[str, tuple[Json, tuple[Json, ...]]] = {
    "activation_function": ("gelu_new", ("swiglu",)),
    "qkv_proj_bias": (True, (False,)),
    "mlp_fc1_bias": (True, (False,)),
    "mlp_fc2_bias": (True, (False,)),
    "rotary_emb_fraction": (0.0, (1,)),
    "rotary_emb_interleaved": (False, (False,)),
    "rotary_emb_scale_base": (None, (None,)),
    "rotary_scaling_factor": (None, (None, 0)),
    "prenorm": (False, (False,)),
    "parallel_block": (False, (False,)),
    "use_rms_norm": (False, (False, None)),
    "causal": (False, (False,)),
    "num_heads_kv": (None, (None,)),
    "rotary_head_dim": (False, (False,)),
}
# The authors' code rounds the width of the feed-forward layer up to a multiple of this number.
_WIDTH = 256


def read(values: Values) -> dict[str, Json]:
    """Return the base of rotary positions, and all sizes if the authors' code wrote the keys."""
    config = values.config
    values.check_code("NomicBert")
    if "n_embd" in config and "hidden_size" not in config:
        return _authors(values)
    width, heads = values.integer("hidden_size", 768), values.integer("num_attention_heads", 12)
    values.check_head_size("head_dim", width, heads)
    stated = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 1000.0)}
    if not isinstance(stated, dict) or stated.get("rope_type", "default") != "default":
        raise values.wrong("rope_parameters", "; allowed: rope_type default with a rope_theta")
    if stated.get("partial_rotary_factor", 1) != 1:
        raise values.wrong("rope_parameters", "; supported: a partial_rotary_factor of 1")
    return {"rotary_base": Values(stated, f"{values.name}: rope_parameters").number("rope_theta", 1000.0)}


def _authors(values: Values) -> dict[str, Json]:
    """Return the fields from the keys of the authors' code."""
    for key, (default, supported) in _SUPPORTED.items():
        values.require(key, supported, default)
    stated = Values({key: value for key, value in values.config.items() if value is not None}, values.name)
    sizes: dict[str, int] = {}
    for key, (field, size) in _SIZES.items():
        sizes[field] = stated.integer(key, size if size is not None else 8 * sizes["hidden_size"] // 3)
    multiple = max(1, stated.integer("pad_vocab_size_multiple", 1))
    rows, inner = stated.integer("vocab_size", 50257), sizes["intermediate_size"]
    return {
        **sizes, **{field: stated.number(key, rate) for key, (field, rate) in _RATES.items()},
        "vocab_size": -(-rows // multiple) * multiple, "intermediate_size": -(-inner // _WIDTH) * _WIDTH,
    }  # fmt: skip


def write(model: ModelConfig) -> dict[str, Json]:
    """Return the base of rotary positions."""
    return {
        "head_dim": model.head_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
    }


_NAMES = (
    (r"(^|\.)layers\.(\d+\.)", r"\1encoder.layers.\2"), (r"encoder\.encoder\.", "encoder."),
    (r"embeddings\.LayerNorm\.", "emb_ln."), (r"self_attn\.o_proj\.", "attn.out_proj."),
    (r"mlp\.up_proj\.", "mlp.fc11."), (r"mlp\.gate_proj\.", "mlp.fc12."), (r"mlp\.down_proj\.", "mlp.fc2."),
    (r"post_attention_layernorm\.", "norm1."), (r"post_mlp_layernorm\.", "norm2."),
)  # fmt: skip


def rename(name: str) -> str:
    """Return the name that the authors' code has for the tensor ``name`` of transformers."""
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` with query, key and value of a layer in one tensor, and with the prefix of transformers.
    The MLM head of the authors' code has no biases: they are added as zeros."""
    found = dict(tensors)
    parts = ("q_proj", "k_proj", "v_proj")
    for name in tensors:
        place, _, part = name.rpartition("self_attn.")
        names = [f"{place}self_attn.{part}.weight" for part in parts]
        if part == "q_proj.weight" and all(map(found.__contains__, names)):
            found[f"{place}attn.Wqkv.weight"] = _joined([found.pop(name) for name in names])
    if not any(name.startswith(_AUTHORS_PREFIX) for name in found):
        return found
    found = {
        f"{_PREFIX}{name.removeprefix(_AUTHORS_PREFIX)}" if name.startswith(_AUTHORS_PREFIX) else name: tensor
        for name, tensor in found.items()
    }
    table, head = found.get(f"{_PREFIX}embeddings.word_embeddings.weight"), "cls.predictions"
    biases = (f"{head}.transform.dense.bias", f"{head}.bias")
    given = (*biases, f"{head}.decoder.bias")
    if table is not None and f"{head}.transform.dense.weight" in found and not any(map(found.__contains__, given)):
        for bias, size in zip(biases, table.shape[::-1], strict=True):
            found[bias] = Tensor((size,), table.dtype, lambda size=size: np.zeros(size, np.float32))  # type: ignore[misc]
    return found


def _joined(parts: list[Tensor]) -> Tensor:
    """Return one tensor with the rows of ``parts``."""
    rows = sum(part.shape[0] for part in parts)
    return Tensor(
        (rows, *parts[0].shape[1:]), parts[0].dtype, lambda: np.concatenate([part.read() for part in parts])
    )


FAMILY = Family(
    name="nomic_bert",
    title="NomicBERT",
    classes={
        "NomicBertModel": (),
        "NomicBertForMaskedLM": ("mlm",),
        "NomicBertForSequenceClassification": ("pooler", "sequence"),
        "NomicBertForTokenClassification": ("token",),
    },
    aliases={"NomicBertForPreTraining": "NomicBertForMaskedLM"},
    prefix=_PREFIX,
    keys=bert.keys(
        vocab_size=30528, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        max_position_embeddings=2048, type_vocab_size=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.02,
    )
    | {"hidden_act": Key("activation", "silu"), "layer_norm_eps": Key("norm_epsilon", 1e-12)},
    fixed={
        "feed_forward": "gated", "position_embeddings": "rotary",
        "without_bias": ("qkv", "attention_output", "feed_forward"),
    },
    other_keys=frozenset({"auto_map", "head_dim", "rope_parameters", "rope_theta", "pad_vocab_size_multiple"})
    | {*_SIZES, *_RATES, *_SUPPORTED},
    read=read,
    write=write,
    harmless=name_set(
        """embd_pdrop fused_bias_fc fused_dropout_add_ln use_flash_attn use_xentropy dense_seq_output
            parallel_block_tied_norm max_trained_positions n_ctx summary_type summary_use_proj summary_activation
            summary_proj_to_labels summary_first_dropout scale_attn_weights scale_attn_by_inverse_layer_idx
            reorder_and_upcast_attn add_pooling_layer default_theta"""
    ),
    refused={"rope_scaling": (None, {})},
    encoder={
        "embeddings/word_embeddings": "embeddings.word_embeddings",
        "embeddings/token_type_embeddings": "embeddings.token_type_embeddings",
        "embeddings/layer_norm": "emb_ln",
    },
    layer="encoder.layers.{i}.",
    layers={
        **{f"attention/{name}": Place("attn.Wqkv", i, 3) for i, name in enumerate(("query", "key", "value"))},
        "attention/output": "attn.out_proj",
        "attention/layer_norm": "norm1",
        "feed_forward/intermediate": "mlp.fc11",
        "feed_forward/gate": "mlp.fc12",
        "feed_forward/output": "mlp.fc2",
        "feed_forward/layer_norm": "norm2",
    },
    heads={
        "pooler": bert.FAMILY.heads["pooler"],
        "mlm": bert.mlm(
            "cls.predictions", "cls.predictions.transform.dense", "cls.predictions.transform.layer_norm",
            "cls.predictions.decoder",
        ),
        "sequence": bert.CLASSIFIERS["sequence"],
        "token": bert.TOKEN_AND_SPAN["token"],
    },
    rename=rename,
    convert=convert,
)  # fmt: skip
