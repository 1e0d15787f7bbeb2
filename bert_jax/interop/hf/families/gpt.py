"""GPT-2 (Radford et al. 2019) and GPT (Radford et al. 2018): ``GPT2Config``, ``OpenAIGPTConfig`` and their modeling
files in transformers.

Dense layers of the network store their kernels as [in, out]. The output layer of the language model is the table of
the word embeddings, so a folder has no tensor of the ``mlm`` head unless the two are untied. The sequence head
reads the last token that is not padding: transformers finds it by ``pad_token_id``, this library by the attention
mask.
"""

from collections.abc import Mapping

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.family import Family, HeadDropout, Key, Place, choice, integer, name_set
from bert_jax.json_values import Json

_SIZES = {
    "vocab_size": Key("vocab_size", "integer"),
    "n_embd": Key("hidden_size", "integer"),
    "n_layer": Key("num_layers", "integer"),
    "n_head": Key("num_attention_heads", "integer"),
}
_TRAINING = {
    "resid_pdrop": Key("hidden_dropout", "number", 0.1),
    "embd_pdrop": Key("embedding_dropout", "number", 0.1),
    "attn_pdrop": Key("attention_dropout", "number", 0.1),
    "layer_norm_epsilon": Key("norm_epsilon", "number", 1e-5),
    "initializer_range": Key("initializer_range", "number", 0.02),
}
_FIXED = {
    "type_vocab_size": 0,
    "attention": "causal",
    "pooling": "last",
    "pooler_dense": False,
    "sequence_head_bias": False,
    "mlm_transform": False,
    "mlm_output_bias": False,
}
# Keys of OpenAIGPTDoubleHeadsModel and GPT2DoubleHeadsModel, and of old releases.
_HARMLESS = name_set(
    """summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout n_ctx n_special
        predict_special_tokens clf_pdrop"""
)
_LAYERS: dict[str, str | Place] = {
    "attention/layer_norm": "ln_1",
    **{
        f"attention/{name}": Place("attn.c_attn", part, 3, input_first=True)
        for part, name in enumerate(("query", "key", "value"))
    },
    "attention/output": Place("attn.c_proj", input_first=True),
    "feed_forward/layer_norm": "ln_2",
    "feed_forward/intermediate": Place("mlp.c_fc", input_first=True),
    "feed_forward/output": Place("mlp.c_proj", input_first=True),
}
_LANGUAGE_MODEL = {"mlm_head": "lm_head", "mlm_head/output_embeddings": "lm_head"}
_SEQUENCE = {"sequence_head": "score"}
# No dropout before the sequence head.
_NO_DROPOUT = HeadDropout("", 0.0)
# The names of activations in ``afn``; the "gelu" of GPT is the approximation with tanh.
_AFN = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


def _stored_sizes(words_table: str, positions_table: str) -> dict[str, tuple[str, int, int]]:
    return {
        "vocab_size": (f"{words_table}.weight", 0, 1),
        "hidden_size": (f"{words_table}.weight", 1, 1),
        "max_position_embeddings": (f"{positions_table}.weight", 0, 1),
        "intermediate_size": ("h.0.mlp.c_fc.weight", 1, 1),
    }


def read_gpt2(config: Mapping[str, Json], name: str) -> dict[str, Json]:
    """Return the width of the feed-forward layer; by default four times the network width."""
    if config.get("n_inner") is None:
        return {"intermediate_size": 4 * integer(config, "n_embd", name)}
    return {"intermediate_size": integer(config, "n_inner", name)}


def write_gpt2(model: ModelConfig) -> dict[str, Json]:
    """Return the width of the feed-forward layer, and the end-of-text id, the last of GPT-2's vocabulary,
    which is also the padding id."""
    width, end = model.intermediate_size, model.vocab_size - 1
    return {
        "n_inner": None if width == 4 * model.hidden_size else width,
        "bos_token_id": end, "eos_token_id": end, "pad_token_id": end,
    }  # fmt: skip


def read_gpt(config: Mapping[str, Json], name: str) -> dict[str, Json]:
    """Return the width of the feed-forward layer, four times the network width, and the activation."""
    kind = choice(config, "afn", name, "gelu", _AFN)
    return {"intermediate_size": 4 * integer(config, "n_embd", name), "activation": _AFN[kind]}


def write_gpt(model: ModelConfig) -> dict[str, Json]:
    """Return the activation."""
    known = next((name for name, ours in _AFN.items() if ours == model.activation), None)
    return {"afn": model.activation if known is None else known}


GPT2 = Family(
    name="gpt2",
    title="GPT-2",
    class_prefix="GPT2",
    classes={
        "GPT2Model": (),
        "GPT2LMHeadModel": ("mlm",),
        "GPT2ForSequenceClassification": ("pooler", "sequence"),
        "GPT2ForTokenClassification": ("token",),
        "GPT2ForQuestionAnswering": ("span",),
    },
    prefix="transformer.",
    keys=_SIZES
    | {
        "n_positions": Key("max_position_embeddings", "integer", 1024),
        "activation_function": Key("activation", "activation", "gelu_new"),
    }
    | _TRAINING,
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
    heads={
        "mlm": _LANGUAGE_MODEL,
        "sequence": _SEQUENCE,
        "token": {"token_head": "classifier"},
        "span": {"span_head": "qa_outputs"},
    },
    tied={"lm_head.weight": "embeddings/word_embeddings/embedding"},
    sizes=_stored_sizes("wte", "wpe"),
    dropouts={"sequence": _NO_DROPOUT, "token": HeadDropout("classifier_dropout", 0.1)},
)

GPT = Family(
    name="openai-gpt",
    title="GPT",
    class_prefix="OpenAIGPT",
    classes={
        "OpenAIGPTModel": (),
        "OpenAIGPTLMHeadModel": ("mlm",),
        "OpenAIGPTForSequenceClassification": ("pooler", "sequence"),
    },
    prefix="transformer.",
    keys=_SIZES | {"n_positions": Key("max_position_embeddings", "integer", 512)} | _TRAINING,
    fixed=_FIXED | {"embedding_norm": "no"},
    other_keys=frozenset({"afn"}),
    read=read_gpt,
    write=write_gpt,
    harmless=_HARMLESS,
    encoder={"embeddings/word_embeddings": "tokens_embed", "embeddings/position_embeddings": "positions_embed"},
    layer="h.{i}.",
    layers=_LAYERS,
    heads={"mlm": _LANGUAGE_MODEL, "sequence": _SEQUENCE},
    tied={"lm_head.weight": "embeddings/word_embeddings/embedding"},
    sizes=_stored_sizes("tokens_embed", "positions_embed"),
    dropouts={"sequence": _NO_DROPOUT},
)
