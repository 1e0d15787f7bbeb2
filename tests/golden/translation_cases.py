"""Models and inputs of ``record_translation.py``. numpy only: the tests import it."""

from collections.abc import Callable

import numpy as np

_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 14, "hidden_act": "gelu"}
_BERT = {**_SIZES, "model_type": "bert", "vocab_size": 31, "hidden_size": 12, "max_position_embeddings": 24}
_ROBERTA = {**_SIZES, "model_type": "roberta", "vocab_size": 40, "hidden_size": 12, "max_position_embeddings": 26}
_ROBERTA |= {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
# Encoder and decoder.
CASES = {
    "bert": (_BERT, _BERT),
    "roberta_to_bert": (_ROBERTA, {**_BERT, "num_hidden_layers": 3}),
    "bert_to_roberta": ({**_BERT, "hidden_size": 16}, _ROBERTA),
}
START, END, BEAMS, PENALTY, NEW = 4, 5, 3, 0.8, 16
LENGTHS = ((9, 7), (4, 11), (6, 3))


def drawn(
    name: str, shape: tuple[int, ...], values: Callable[[str, tuple[int, ...]], np.ndarray], scale: int = 3
) -> np.ndarray:
    """``family_cases.values``, without the biases of the output layer, which would make a few tokens the most
    probable ones always, and with kernels of the layers times ``scale``. With 5 the tokens depend on the source and
    on the earlier ones, but the logits of float32 are uncertain by 1e-3."""
    if name.endswith(("predictions.bias", "lm_head.bias", "transform.LayerNorm.bias", "lm_head.layer_norm.bias")):
        return np.zeros(shape, np.float32)
    factor = 3 if "position" in name else scale if len(shape) == 2 and ".layer." in name else 1
    return values(name, shape) * np.float32(factor)


def inputs(source_vocabulary: int, target_vocabulary: int, pad: int, left: bool) -> dict[str, np.ndarray]:
    """Sources with their mask, padded at one side, and labels, -100 at padding: int64[3, 11]."""
    rng, width = np.random.default_rng(7), max(map(max, LENGTHS))
    ids, mask = np.full((3, width), pad, np.int64), np.zeros((3, width), np.int64)
    labels = np.full((3, width), -100, np.int64)
    for row, (source, target) in enumerate(LENGTHS):
        place = slice(width - source, width) if left else slice(source)
        ids[row, place], mask[row, place] = rng.integers(6, source_vocabulary, source), 1
        labels[row, :target] = [*rng.integers(6, target_vocabulary, target - 1), END]
    return {"ids": ids, "mask": mask, "labels": labels}
