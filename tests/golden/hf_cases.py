"""Classes of transformers, tiny, with weights that follow from their names. numpy only: the tests import it."""

import zlib

import numpy as np

CONFIG = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 20, "attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.3,
}  # fmt: skip
_LABELS = {"id2label": {0: "zero", 1: "one", 2: "two"}, "label2id": {"zero": 0, "one": 1, "two": 2}}
_ROBERTA = {"type_vocab_size": 1, "layer_norm_eps": 1e-5}

# Class -> what its config says beside CONFIG.
CLASSES: dict[str, dict] = {
    "BertModel": {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-3},
    "BertForPreTraining": {"hidden_act": "gelu_new"},
    "BertForMaskedLM": {"hidden_act": "relu"},
    "BertForNextSentencePrediction": {},
    "BertForSequenceClassification": {
        **_LABELS, "classifier_dropout": 0.4, "problem_type": "multi_label_classification",
    },
    "BertForTokenClassification": _LABELS,
    "BertForQuestionAnswering": {"type_vocab_size": 1},
    "BertForMultipleChoice": {},
    "RobertaModel": _ROBERTA,
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": {**_ROBERTA, "num_labels": 1},
    "RobertaForTokenClassification": {**_ROBERTA, **_LABELS},
    "RobertaForQuestionAnswering": _ROBERTA,
    "RobertaForMultipleChoice": _ROBERTA,
}  # fmt: skip


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values of a tensor: normal, around 1 for the scale of a LayerNorm."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    norm = name.lower().endswith(("layernorm.weight", "layer_norm.weight"))
    return (1 + 0.2 * drawn if norm else 0.3 * drawn).astype(np.float32)


def inputs(name: str) -> dict[str, np.ndarray]:
    """Three rows with padding of unequal length on the right."""
    roberta = name.startswith("Roberta")
    ids = np.random.default_rng(1).integers(2, CONFIG["vocab_size"], (3, 9))
    mask = (np.arange(9) < np.array([[9], [6], [2]])).astype(np.int64)
    types = np.zeros_like(ids) if roberta or "QuestionAnswering" in name else (np.arange(9) >= 4) * mask
    return {"input_ids": np.where(mask, ids, 1 if roberta else 0), "attention_mask": mask, "token_type_ids": types}
