"""GPT-2 (Radford et al. 2019) and GPT (Radford et al. 2018): ``GPT2Config``, ``OpenAIGPTConfig`` and their modeling
files in transformers.

Dense layers of the network store their kernels as [in, out]. The output layer of the language model is the table of
the word embeddings, so a folder has no tensor of the ``mlm`` head unless the two are untied. The sequence head
reads the last token that is not padding: transformers finds it by ``pad_token_id``, this library by the attention
mask.
"""

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import Family, HeadDropout, Key, Place, Values, name_set
from bert_jax.json_values import Json

_KEYS = {
    "vocab_size": Key("vocab_size"),
    "n_embd": Key("hidden_size"),
    "n_layer": Key("num_layers"),
    "n_head": Key("num_attention_heads"),
    "n_positions": Key("max_position_embeddings", 1024),
    "activation_function": Key("activation", "gelu_new"),
    "resid_pdrop": Key("hidden_dropout", 0.1),
    "embd_pdrop": Key("embedding_dropout", 0.1),
    "attn_pdrop": Key("attention_dropout", 0.1),
    "layer_norm_epsilon": Key("norm_epsilon", 1e-5),
    "initializer_range": Key("initializer_range", 0.02),
}
_FIXED: dict[str, Json] = {
    "type_vocab_size": 0, "attention": "causal", "pooling": "last", "pooler_layer": ("none",),
    "mlm_layer": "none", "without_bias": ("sequence_head", "mlm_output"),
}  # fmt: skip
# Keys of OpenAIGPTDoubleHeadsModel and GPT2DoubleHeadsModel, and of old releases.
_HARMLESS = name_set(
    """summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout n_ctx n_special
        predict_special_tokens clf_pdrop"""
)
_LAYERS: dict[str, str | Place] = {
    "attention/layer_norm": "ln_1",
    "attention/query": Place("attn.c_attn", 0, 3, input_first=True),
    "attention/key": Place("attn.c_attn", 1, 3, input_first=True),
    "attention/value": Place("attn.c_attn", 2, 3, input_first=True),
    "attention/output": Place("attn.c_proj", input_first=True),
    "feed_forward/layer_norm": "ln_2",
    "feed_forward/intermediate": Place("mlp.c_fc", input_first=True),
    "feed_forward/output": Place("mlp.c_proj", input_first=True),
}
_HEADS = {
    "mlm": {"mlm_head": "lm_head", "mlm_head/output_embeddings": "lm_head"}, "sequence": {"sequence_head": "score"},
}  # fmt: skip
# The names of activations in ``afn``; the "gelu" of GPT is the approximation with tanh.
_AFN = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


def read_gpt2(values: Values) -> dict[str, Json]:
    """Return the width of the feed-forward layer; by default four times the network width."""
    is_stated = values.config.get("n_inner") is not None
    return {"intermediate_size": values.integer("n_inner") if is_stated else 4 * values.integer("n_embd")}


def write_gpt2(model: ModelConfig) -> dict[str, Json]:
    """Return the width of the feed-forward layer, and the end-of-text id, the last of GPT-2's vocabulary,
    which is also the padding id."""
    width, end = model.intermediate_size, model.vocab_size - 1
    return {
        "n_inner": None if width == 4 * model.hidden_size else width,
        "bos_token_id": end, "eos_token_id": end, "pad_token_id": end,
    }  # fmt: skip


def read_gpt(values: Values) -> dict[str, Json]:
    """Return the width of the feed-forward layer (four times the network width) and the activation."""
    return {
        "intermediate_size": 4 * values.integer("n_embd"),
        "activation": _AFN[values.choice("afn", "gelu", _AFN)],
    }


def write_gpt(model: ModelConfig) -> dict[str, Json]:
    """Return the activation."""
    return {"afn": next((name for name, ours in _AFN.items() if ours == model.activation), model.activation)}


GPT2 = Family(
    name="gpt2",
    title="GPT-2",
    classes={
        "GPT2Model": (),
        "GPT2LMHeadModel": ("mlm",),
        "GPT2ForSequenceClassification": ("pooler", "sequence"),
        "GPT2ForTokenClassification": ("token",),
        "GPT2ForQuestionAnswering": ("span",),
    },
    prefix="transformer.",
    keys=_KEYS,
    fixed=_FIXED | {"norm_position": "pre", "initialization": "megatron"},
    other_keys=frozenset({"n_inner"}),
    read=read_gpt2,
    write=write_gpt2,
    harmless=_HARMLESS | {"reorder_and_upcast_attn"},
    refused={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False, None)},
    encoder={
        "embeddings/word_embeddings": "wte",
        "embeddings/position_embeddings": "wpe",
        "encoder/final_layer_norm": "ln_f",
    },
    layer="h.{i}.",
    layers=_LAYERS,
    heads=_HEADS | bert.TOKEN_AND_SPAN,
    dropouts={"sequence": HeadDropout("", 0.0), "token": HeadDropout("classifier_dropout", 0.1)},
)

GPT = Family(
    name="openai-gpt",
    title="GPT",
    classes={
        "OpenAIGPTModel": (),
        "OpenAIGPTLMHeadModel": ("mlm",),
        "OpenAIGPTForSequenceClassification": ("pooler", "sequence"),
    },
    prefix="transformer.",
    keys={key: entry for key, entry in _KEYS.items() if key != "activation_function"}
    | {"n_positions": Key("max_position_embeddings", 512)},
    fixed=_FIXED | {"embedding_norm": "no"},
    other_keys=frozenset({"afn"}),
    read=read_gpt,
    write=write_gpt,
    harmless=_HARMLESS,
    encoder={"embeddings/word_embeddings": "tokens_embed", "embeddings/position_embeddings": "positions_embed"},
    layer="h.{i}.",
    layers=_LAYERS,
    heads=_HEADS,
    dropouts={"sequence": HeadDropout("", 0.0)},
)
