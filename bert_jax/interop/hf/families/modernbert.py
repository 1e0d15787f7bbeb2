"""ModernBERT (Warner et al. 2024) and Ettin: ``ModernBertConfig`` and ``modeling_modernbert`` of transformers.

Releases 4.48 to 4.57 and releases from 5 on write different keys for the windows and the bases of rotary positions;
the reader accepts both, and the writer writes both.
"""

from bert_jax.config import ModelConfig
from bert_jax.config.schema import MOST_LAYERS
from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import (
    TASK_HEADS,
    Family,
    HeadDropout,
    Key,
    Place,
    Values,
    activation_name,
    name_set,
    short,
)
from bert_jax.json_values import Json

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def read(values: Values) -> dict[str, Json]:
    """Return windows, bases of rotary positions and the heads' switches."""
    layers = values.integer("num_hidden_layers", 22)
    if not 0 < layers <= MOST_LAYERS:
        raise values.wrong("num_hidden_layers", f"; allowed: 1 to {MOST_LAYERS}")
    window = values.integer("local_attention", 128) // 2
    if window < 1:
        raise values.wrong("local_attention", "; supported: 2 or more")
    kinds = values.config.get("layer_types")
    if kinds is None:
        every = values.integer("global_attn_every_n_layers", 3)
        if every < 1:
            raise values.wrong("global_attn_every_n_layers", "; allowed: 1 or more")
        kinds = [_LOCAL if i % every else _GLOBAL for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_GLOBAL, _LOCAL) for kind in kinds):
        raise values.wrong("layer_types", f"; allowed: a list of {layers} entries, each {_GLOBAL} or {_LOCAL}")
    base, local_base = _bases(values)
    pooling = values.choice("classifier_pooling", "cls", ("cls", "mean"))
    head_activation = values.activation("classifier_activation", "gelu")
    rate = values.number("attention_dropout", 0.0)
    return {
        "attention_windows": _pattern([0 if kind == _GLOBAL else window for kind in kinds]),
        "rotary_base": base, "rotary_window_base": local_base,
        "without_bias": (
            *(() if values.flag("attention_bias", False) else ("qkv", "attention_output")),
            *(() if values.flag("classifier_bias", False) else ("pooler_layer", "mlm_layer")),
        ),
        "attention_dropout": rate, "attention_output_dropout": rate,
        "pooler_layer": (head_activation,), "mlm_layer": head_activation,
        "pooling": "first" if pooling == "cls" else "mean",
    }  # fmt: skip


def _bases(values: Values) -> tuple[float, float]:
    """Return the bases of rotary positions in layers without and with a window."""
    by_kind = values.config.get("rope_parameters")
    if by_kind is None:
        base = values.number("global_rope_theta", 160_000.0)
        # null and -1 (some converted checkpoints): the base of the other layers.
        is_other = values.config.get("local_rope_theta", 10_000.0) in (None, -1)
        return base, base if is_other else values.number("local_rope_theta", 10_000.0)
    bases = []
    for kind, default in ((_GLOBAL, 160_000.0), (_LOCAL, 10_000.0)):
        stated = by_kind.get(kind, {}) if isinstance(by_kind, dict) else by_kind
        where = f"{values.name}: rope_parameters: {kind}"
        if not isinstance(stated, dict) or stated.get("rope_type", "default") != "default":
            raise ValueError(f"{where} is {short(stated)}; allowed: rope_type default with a rope_theta")
        bases.append(Values(stated, where).number("rope_theta", default))
    return bases[0], bases[1]


def _pattern(windows: list[int]) -> tuple[int, ...]:
    """Return the shortest list whose repetition yields ``windows``; empty if no layer has a window."""
    if not any(windows):
        return ()
    lengths = range(1, len(windows) + 1)
    length = next(n for n in lengths if all(windows[i] == windows[i % n] for i in range(len(windows))))
    return tuple(windows[:length])


def write(model: ModelConfig) -> dict[str, Json]:
    """Return the keys of both groups of releases."""
    windows = model.layer_windows
    pattern = _pattern(list(windows))
    every = len(pattern) if pattern and not pattern[0] and all(pattern[1:]) else 1
    local = model.rotary_window_base or model.rotary_base
    return {
        "local_attention": 2 * max(windows) or 128,
        "layer_types": [_LOCAL if window else _GLOBAL for window in windows],
        "global_attn_every_n_layers": every,
        "global_rope_theta": model.rotary_base,
        "local_rope_theta": local,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base}
            for kind, base in ((_GLOBAL, model.rotary_base), (_LOCAL, local))
        },
        "classifier_pooling": "cls" if model.pooling == "first" else "mean",
        "attention_bias": model.has_bias("qkv"),
        "attention_dropout": model.attention_dropout,
        "classifier_bias": model.has_bias("pooler_layer"),
        "classifier_activation": activation_name(model.pooler_layer[0]),
        "embedding_dropout": model.dropout_at("embedding"),
        "initializer_cutoff_factor": 2.0,
        "position_embedding_type": "absolute",
        # The defaults of transformers are ids of the published vocabulary; the writer knows those of the tokenizer.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
    }


FAMILY = Family(
    name="modernbert",
    title="ModernBERT",
    classes={
        "ModernBertModel": (),
        "ModernBertForMaskedLM": ("mlm",),
        "ModernBertForSequenceClassification": ("pooler", "sequence"),
        "ModernBertForTokenClassification": ("pooler", "token"),
        "ModernBertForQuestionAnswering": ("pooler", "span"),
        "ModernBertForMultipleChoice": ("pooler", "choice"),
    },
    prefix="model.",
    keys=bert.keys(
        vocab_size=50368, hidden_size=768, num_hidden_layers=22, num_attention_heads=12, intermediate_size=1152,
        max_position_embeddings=8192,
    )
    | {
        "hidden_activation": Key("activation", "gelu"),
        "norm_eps": Key("norm_epsilon", 1e-5),
        "norm_bias": Key("without_bias", False, part="norm"),
        "mlp_bias": Key("without_bias", False, part="feed_forward"),
        "decoder_bias": Key("without_bias", True, part="mlm_output"),
        "initializer_range": Key("initializer_range", 0.02),
        "mlp_dropout": Key("feed_forward_dropout", 0.0),
        "embedding_dropout": Key("embedding_dropout", 0.0),
    },
    fixed={
        "type_vocab_size": 0, "feed_forward": "gated", "norm_position": "pre_skip_first", "embedding_norm": "yes",
        "position_embeddings": "rotary", "head_parts": ("pooler_norm", "token_pooler"),
        "hidden_dropout": 0.0, "initialization": "megatron",
    },
    other_keys=name_set(
        """local_attention layer_types global_attn_every_n_layers global_rope_theta local_rope_theta
        rope_parameters classifier_pooling attention_bias attention_dropout classifier_bias
        classifier_activation"""
    ),
    read=read,
    write=write,
    harmless=name_set(
        """initializer_cutoff_factor layer_norm_eps deterministic_flash_attn sparse_prediction
        sparse_pred_ignore_index reference_compile repad_logits_with_grad position_embedding_type"""
    ),
    refused={"rope_scaling": (None, {})},
    encoder={
        "embeddings/word_embeddings": "embeddings.tok_embeddings",
        "embeddings/layer_norm": "embeddings.norm",
        "encoder/final_layer_norm": "final_norm",
    },
    layer="layers.{i}.",
    layers={
        "attention/layer_norm": "attn_norm",
        **{f"attention/{name}": Place("attn.Wqkv", i, 3) for i, name in enumerate(("query", "key", "value"))},
        "attention/output": "attn.Wo",
        "feed_forward/layer_norm": "mlp_norm",
        "feed_forward/gate": Place("mlp.Wi", 0, 2),
        "feed_forward/intermediate": Place("mlp.Wi", 1, 2),
        "feed_forward/output": "mlp.Wo",
    },
    heads={
        "mlm": {
            "mlm_head/transform": "head.dense", "mlm_head/layer_norm": "head.norm", "mlm_head": "decoder",
            "mlm_head/output_embeddings": "decoder",
        },
        **{
            kind: {"pooler": "head.dense", "pooler_norm": "head.norm", f"{kind}_head": "classifier"}
            for kind in ("sequence", "token", "span", "choice")
        },
    },
    dropouts=dict.fromkeys(TASK_HEADS, HeadDropout("classifier_dropout", 0.0)),
)  # fmt: skip
