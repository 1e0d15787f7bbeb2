"""The Transformer with BatchNorm (Ioffe and Szegedy 2015) in place of every normalization of its layers.

    python run_pretrain.py --config configs/quickstart_bert.yaml --model.module studies/questions/batch_norm.py

Mean and variance of a feature are those of all tokens of the batch, padding excluded. In training, these are the
tokens of the microbatch. With the collection ``STATISTICS``, the stored mean and mean square take their place; they
are stored if this collection is mutable. The normalizations of the embeddings and of the MLM head stay LayerNorm.

Shapes: B rows, S tokens, H width.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.config import ModelConfig
from bert_jax.model.bert import Encoder as Transformer
from bert_jax.model.layers import Norm

STATISTICS = "statistics"


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The section ``model`` of this encoder: that of the Transformer."""

    @property
    def has_attention(self) -> bool:
        """True: the layers are those of the Transformer."""
        return True


def batch_norm(
    real_BxS: jax.Array, next_method: Callable[..., Any], arguments: Any, named: Any, context: Any
) -> Any:
    """Compute BatchNorm over the tokens ``real`` where ``context`` is the call of a :class:`Norm`."""
    norm = context.module
    if not isinstance(norm, Norm) or context.method_name != "__call__":
        return next_method(*arguments, **named)
    (x_BxSxH,) = arguments
    scale_H, bias_H = norm.parameters(x_BxSxH.shape[-1])
    x_BxSxH = x_BxSxH.astype(jnp.float32)
    if norm.has_variable(STATISTICS, "mean") and not norm.is_mutable_collection(STATISTICS):
        mean_H, square_H = (norm.get_variable(STATISTICS, name) for name in ("mean", "square"))
    else:
        share_BxSx1 = real_BxS[..., None] / jnp.maximum(real_BxS.sum(), 1)
        mean_H = jnp.sum(x_BxSxH * share_BxSx1, axis=(0, 1))
        square_H = jnp.sum(x_BxSxH**2 * share_BxSx1, axis=(0, 1))
    if norm.is_mutable_collection(STATISTICS):
        norm.put_variable(STATISTICS, "mean", mean_H)
        norm.put_variable(STATISTICS, "square", square_H)
    variance_H = jnp.maximum(square_H - mean_H**2, 0.0)
    normal_BxSxH = (x_BxSxH - mean_H) * jax.lax.rsqrt(variance_H + norm.config.norm_epsilon)
    return (normal_BxSxH * scale_H + bias_H).astype(norm.dtype)


class Encoder(Transformer):
    """The stack of layers with BatchNorm, with the interface of ``bert_jax.model.bert.Encoder``."""

    def __call__(self, x_BxSxH, tokens, dropout_key, part=None):  # type: ignore[no-untyped-def]
        real_BxS = tokens["sequence_ids"] > 0
        with nn.intercept_methods(functools.partial(batch_norm, real_BxS)):
            return super().__call__(x_BxSxH, tokens, dropout_key, part)
