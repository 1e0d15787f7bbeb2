"""Families of transformers beyond BERT, tiny and of odd sizes, with weights that follow from their names.

numpy only: the tests import it.
"""

import zlib

import numpy as np

LABELS = {"id2label": {0: "zero", 1: "one", 2: "two"}, "label2id": {"zero": 0, "one": 1, "two": 2}}
HEADS = (
    "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForMultipleChoice",
)  # fmt: skip
_SIZES = {
    "vocab_size": 40, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 14,
    "max_position_embeddings": 26,
}  # fmt: skip
_DISTILBERT = {
    "vocab_size": 40, "dim": 20, "n_layers": 3, "n_heads": 2, "hidden_dim": 14, "max_position_embeddings": 26,
    "pad_token_id": 0,
}  # fmt: skip
_GPT = {
    "vocab_size": 40, "n_embd": 20, "n_layer": 3, "n_head": 2, "n_positions": 26, "pad_token_id": 0,
    "bos_token_id": 39, "eos_token_id": 39,
}  # fmt: skip
_ALBERT = _SIZES | {"embedding_size": 12, "type_vocab_size": 2, "pad_token_id": 0}
_DISTANCES = {"relative_attention": True, "norm_rel_ebd": "layer_norm", "share_att_key": True, "pad_token_id": 0}
_NOMIC = _SIZES | {"type_vocab_size": 2, "pad_token_id": 0}
_NEOBERT = {
    "vocab_size": 40, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12,
    "max_length": 26, "norm_eps": 1e-5, "pad_token_id": 0,
}  # fmt: skip
_BIG_BIRD = _SIZES | {
    "max_position_embeddings": 40, "type_vocab_size": 2, "pad_token_id": 0, "block_size": 4, "num_random_blocks": 1,
}  # fmt: skip
# Name of the case -> prefix of the classes, config, classes (None: HEADS), releases of transformers that have them.
CASES: dict[str, dict] = {
    "modernbert": {
        "prefix": "ModernBert",
        "config": _SIZES | {
            "local_attention": 6, "global_attn_every_n_layers": 2, "classifier_pooling": "mean", "norm_eps": 1e-3,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
        },
    },
    "modernbert_biases": {
        "prefix": "ModernBert",
        "config": _SIZES | {
            "num_hidden_layers": 4, "local_attention": 4,
            "attention_bias": True, "mlp_bias": True, "norm_bias": True,
            "classifier_bias": True, "decoder_bias": False, "classifier_activation": "relu",
            "hidden_activation": "silu", "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
        },
        "classes": ("ForMaskedLM", "ForSequenceClassification"),
    },
    "xlm-roberta": {
        "prefix": "XLMRoberta",
        "config": _SIZES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "relu"},
    },
    "distilbert": {
        "prefix": "DistilBert",
        "config": _DISTILBERT | {"seq_classif_dropout": 0.3, "sinusoidal_pos_embds": True},
    },
    "distilbert_untied": {
        "prefix": "DistilBert",
        "config": _DISTILBERT | {"n_layers": 2, "activation": "relu", "tie_word_embeddings": False},
        "classes": ("ForMaskedLM",),
    },
    "albert": {
        "prefix": "Albert",
        "config": _ALBERT | {"classifier_dropout_prob": 0.2, "hidden_dropout_prob": 0.15},
        "classes": (*HEADS, "ForPreTraining"),
    },
    "albert_untied": {
        "prefix": "Albert",
        "config": _ALBERT | {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "tie_word_embeddings": False},
        "classes": ("ForMaskedLM", "ForPreTraining"),
    },
    "electra": {
        "prefix": "Electra",
        "config": _ALBERT | {"classifier_dropout": 0.2, "summary_last_dropout": 0.3},
        "classes": (*HEADS, "ForPreTraining"),
    },
    "electra_wide": {
        "prefix": "Electra",
        "config": _ALBERT | {
            "embedding_size": 20, "hidden_act": "relu", "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        },
        "classes": ("ForMaskedLM", "ForPreTraining", "ForMultipleChoice"),
    },
    "mpnet": {
        "prefix": "MPNet",
        "config": _SIZES | {"max_position_embeddings": 40, "hidden_act": "relu", "layer_norm_eps": 1e-5},
    },
    "mpnet_untied": {
        "prefix": "MPNet",
        "config": _SIZES | {"hidden_dropout_prob": 0.15, "tie_word_embeddings": False},
        "classes": ("ForMaskedLM",),
    },
    # Rows have more tokens than there are buckets of distances, so that large distances share rows.
    "deberta-v2": {
        "prefix": "DebertaV2",
        "config": _SIZES | _DISTANCES | {
            "pos_att_type": "p2c|c2p", "position_buckets": 4, "position_biased_input": False, "legacy": False,
            "cls_dropout": 0.2,
        },
    },
    "deberta-v2_legacy": {
        "prefix": "DebertaV2",
        "config": _SIZES | _DISTANCES | {
            "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8, "type_vocab_size": 2, "hidden_act": "relu",
            "pooler_hidden_act": "tanh", "layer_norm_eps": 1e-5,
        },
        "classes": ("Model", "ForMaskedLM", "ForSequenceClassification"),
    },
    "deberta-v2_untied": {
        "prefix": "DebertaV2",
        "config": _SIZES | _DISTANCES | {
            "pos_att_type": ["c2p", "p2c"], "position_buckets": 6, "tie_word_embeddings": False,
        },
        "classes": ("ForMaskedLM",),
    },
    # Positions count the padding on the left, which is what transformers does unless position_ids are given.
    "gpt2": {
        "prefix": "GPT2",
        "config": _GPT | {"n_inner": 14, "resid_pdrop": 0.15},
        "classes": ("Model", "LMHeadModel", *HEADS[2:5]),
    },
    "gpt2_untied": {
        "prefix": "GPT2",
        "config": _GPT | {
            "activation_function": "relu", "layer_norm_epsilon": 1e-3, "classifier_dropout": 0.2,
            "tie_word_embeddings": False,
        },
        "classes": ("LMHeadModel", "ForTokenClassification"),
    },
    "openai-gpt": {
        "prefix": "OpenAIGPT",
        "config": _GPT | {"embd_pdrop": 0.15},
        "classes": ("Model", "LMHeadModel", "ForSequenceClassification"),
    },
    "openai-gpt_untied": {
        "prefix": "OpenAIGPT",
        "config": _GPT | {"afn": "silu", "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False},
        "classes": ("LMHeadModel", "ForSequenceClassification"),
    },
    "nomic_bert": {
        "prefix": "NomicBert",
        "family": "nomic_bert",
        "config": _NOMIC,
        "classes": ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    },
    "nomic_bert_untied": {
        "prefix": "NomicBert",
        "family": "nomic_bert",
        "config": _NOMIC | {
            "hidden_act": "gelu", "layer_norm_eps": 1e-5, "hidden_dropout_prob": 0.1, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "classifier_dropout": 0.2,
        },
        "classes": ("ForMaskedLM", "ForTokenClassification"),
    },
    # Recorded by record_neobert.py: transformers has no such family.
    "neobert": {
        "prefix": "NeoBERT",
        "config": _NEOBERT,
        "classes": ("", "LMHead", "ForSequenceClassification"),
    },
    "neobert_sizes": {
        "prefix": "NeoBERT",
        "config": _NEOBERT | {
            "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 31, "norm_eps": 1e-3,
            "classifier_dropout": 0.2,
        },
        "classes": ("LMHead", "ForSequenceClassification"),
    },
    "longformer": {
        "prefix": "Longformer",
        "config": _SIZES | {"max_position_embeddings": 30, "attention_window": [4, 8, 4], "hidden_act": "relu"},
    },
    "longformer_untied": {
        "prefix": "Longformer",
        "config": _SIZES | {
            "type_vocab_size": 1, "attention_window": 4, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        },
        "classes": ("Model", "ForMaskedLM"), "global_tokens": (0, 3, 9),
    },
    # Rows are longer than (5 + 2 * 1) blocks of 4 tokens, and the last block is not full.
    "big_bird": {
        "prefix": "BigBird",
        "family": "big_bird",
        "config": _BIG_BIRD | {"classifier_dropout": 0.2},
        "classes": (*HEADS, "ForPreTraining"), "length": 33,
    },
    "big_bird_untied": {
        "prefix": "BigBird",
        "family": "big_bird",
        "config": _BIG_BIRD | {
            "num_random_blocks": 2, "block_size": 3, "rescale_embeddings": True, "use_bias": False,
            "hidden_act": "relu", "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        },
        "classes": ("ForMaskedLM", "ForSequenceClassification"), "length": 33,
    },
    "big_bird_full": {
        "prefix": "BigBird",
        "family": "big_bird",
        "config": _BIG_BIRD | {"attention_type": "original_full", "hidden_act": "gelu"},
        "classes": ("Model", "ForSequenceClassification"),
    },
    "camembert": {"prefix": "Camembert", "config": _SIZES | {"type_vocab_size": 1}, "classes": ("ForMaskedLM",)},
}  # fmt: skip


def classes(case: str) -> tuple[str, ...]:
    """Names of the classes of ``case``."""
    entry = CASES[case]
    return tuple(entry["prefix"] + suffix for suffix in entry.get("classes", HEADS))


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values of a tensor: normal, around 1 for the scale of a normalization."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    is_scale = len(shape) == 1 and name.endswith("weight")
    return (1 + 0.2 * drawn if is_scale else 0.3 * drawn).astype(np.float32)


def gradient_inputs(case: str) -> dict[str, np.ndarray]:
    """Rows for gradients: those of :func:`inputs`, or rows without padding, whose gradients transformers computes
    as NaN for Longformer."""
    return inputs(case, False, 24) if CASES[case]["prefix"] == "Longformer" else inputs(case, False)


def inputs(case: str, left: bool, full: int = 0) -> dict[str, np.ndarray]:
    """Three rows with padding of unequal length on the right or on the left, or ``full`` tokens without padding."""
    pad = CASES[case]["config"].get("pad_token_id", 1)
    length = full or CASES[case].get("length", 19)
    ids = np.random.default_rng(1).integers(3, 40, (3, length))
    mask = (np.arange(length) < np.array([[length], [11], [2]])).astype(np.int64)
    mask = mask[:, ::-1].copy() if left else mask
    mask = np.ones_like(mask) if full else mask
    types = CASES[case]["config"].get("type_vocab_size", 1)
    if CASES[case]["prefix"] == "Longformer":  # two separators after a question of three tokens, and one at the end
        mask[-1] |= np.roll(np.arange(length) < 8, length - 8 if left else 0)
        place = np.cumsum(mask, axis=1) * mask
        ids = np.where((place == 4) | (place == 5) | (place == mask.sum(1, keepdims=True)), 2, ids)
    batch = {"input_ids": np.where(mask, ids, pad), "attention_mask": mask}
    if "global_tokens" in CASES[case]:
        batch["global_attention_mask"] = np.isin(np.arange(length), CASES[case]["global_tokens"]) * mask
    if types > 1:
        batch["token_type_ids"] = (np.arange(length) >= 6) * mask
    return batch
