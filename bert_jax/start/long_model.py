"""Conversion of an encoder to a Longformer (Beltagy et al. 2020) of more positions (``--to_long``)."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.interop.hf.families.long import GLOBAL_TOKENS, copy_projections

# Families that become a Longformer: those with its network, but for windows and global tokens.
CONVERTIBLE = ("bert", "roberta", "xlm-roberta", "camembert")
# Keys on each side of a query in a converted model, half of the window of the published models.
WINDOW = 256


def long_config(model: ModelConfig, length: int, windows: tuple[int, ...], pad_id: int, sep_id: int) -> ModelConfig:
    """Return the Longformer of ``length`` positions that ``model`` becomes.

    Raises ``ValueError`` (one line, which begins with --to_long) for a network that is not a BERT or RoBERTa, and
    for lengths or windows that do not fit.
    """
    if reason := _unconvertible(model):
        raise ValueError(f"--to_long: {reason}")
    if length <= model.max_length:
        few = f"the model has {model.max_length} positions already"
        raise ValueError(f"--to_long: {length}, but {few}; set a larger number, or omit --to_long")
    if not windows or not all(0 < 2 * window < length for window in windows):
        allowed = f"numbers above 0 and below {length // 2}, half of --to_long"
        raise ValueError(
            f"model.attention_windows: {' '.join(map(str, windows))} is not allowed; allowed: {allowed}"
        )
    offset = max(model.position_offset, pad_id + 1)
    return dataclasses.replace(
        model, family="longformer", attention_windows=windows, global_tokens=GLOBAL_TOKENS, separator_id=sep_id,
        position_offset=offset, max_position_embeddings=length + offset,
        mlm_activation="gelu" if model.head_activation == "gelu" else model.mlm_activation,
    )  # fmt: skip


def _unconvertible(model: ModelConfig) -> str:
    """Return why ``model`` cannot become a Longformer; "" if it can."""
    if any(model.layer_windows):
        return "the model has windows already; omit --to_long (pretraining: --extend_positions adds positions)"
    if model.position_embeddings != "learned":
        kind = model.position_embeddings
        return f"the positions of the model are {kind} and have no table; omit --to_long and set the length"
    if model.relative_positions != "none":
        return f"the model has relative positions ({model.relative_positions}); allowed: {', '.join(CONVERTIBLE)}"
    if model.family_name not in CONVERTIBLE:
        return f"the model is of the family {model.family_name}; allowed: {', '.join(CONVERTIBLE)}"
    if model.attention == "causal" or model.shared_layers or model.embedding_size not in (0, model.hidden_size):
        return "the model is causal, has shared layers or narrow embeddings, which a Longformer does not have"
    return ""


def long_params(params: Mapping[str, np.ndarray], source: ModelConfig, model: ModelConfig) -> dict[str, np.ndarray]:
    """Return the canonical parameters of ``model`` (:func:`long_config`), made of those of ``source``: position
    rows are repeated, and the projections of global tokens are copies of the others."""
    found, table = dict(params), "embeddings/position_embeddings/embedding"
    positions = params[table][source.position_offset :]
    before = np.zeros((model.position_offset, positions.shape[1]), positions.dtype)
    before[: source.position_offset] = params[table][: source.position_offset]
    found[table] = np.concatenate([before, positions[np.arange(model.max_length) % len(positions)]])
    return copy_projections(found)
