"""An encoder of one's own: FNet, whose layers mix tokens by a Fourier transform (Lee-Thorp et al. 2021).

    python run_pretrain.py --config configs/quickstart_bert.yaml --model.module docs/examples/fnet_encoder.py
    bert-jax embed --model runs/quickstart_bert --model.module docs/examples/fnet_encoder.py "a text"

The name of the encoder is that of the file. An installed package offers it without the option, by the entry points
``fnet_encoder = fnet_encoder:Encoder`` of the group ``bert_jax.encoders`` and, for its options,
``fnet_encoder = fnet_encoder:Config`` of the group ``bert_jax.encoder_options``.

Shapes: B rows, S and T tokens, H width.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.config import ModelConfig
from bert_jax.config.schema import AtLeast0
from bert_jax.model.dropout import Site, site_key
from bert_jax.model.layers import INTERMEDIATES, Block, EncoderLayer, FeedForward, Norm, compute_dtype, norm_before


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The section ``model`` of FNet."""

    # Top layers that have attention in place of the Fourier transform (FNet-Hybrid, section 4.1).
    attention_layers: AtLeast0[int] = 0

    def __post_init__(self):
        super().__post_init__()
        allowed = f"at most model.num_layers ({self.num_layers})"
        self._require("attention_layers", self.attention_layers <= self.num_layers, allowed)
        self._require("norm_position", self.norm_position != "pre_skip_first", "post or pre with FNet")


class FourierMixing(Block):
    """The real part of the Fourier transform over the tokens of each sequence and over the width (section 3.2),
    with the residual connection and LayerNorm of the other blocks.

    The transform over the tokens is a matrix product, which the paper also uses for short texts: each sequence has
    its own length, so that neither padding nor the other sequences of a packed row change it.
    """

    @nn.compact
    def __call__(self, x_BxSxH, tokens):
        inner_BxSxH, x_BxSxH = norm_before(self, x_BxSxH)
        ids_BxS, positions_BxS = tokens["sequence_ids"], tokens["position_ids"]
        same_BxSxT = (ids_BxS[:, :, None] == ids_BxS[:, None, :]) & (ids_BxS > 0)[:, None, :]
        length_BxSx1 = jnp.maximum(same_BxSxT.sum(-1, keepdims=True), 1)
        turns_BxSxT = positions_BxS[:, :, None] * positions_BxS[:, None, :] % length_BxSx1 / length_BxSx1
        waves_BxSxH = jnp.fft.fft(inner_BxSxH.astype(jnp.float32))
        cos_BxSxT = jnp.where(same_BxSxT, jnp.cos(2 * jnp.pi * turns_BxSxT), 0.0)
        sin_BxSxT = jnp.where(same_BxSxT, jnp.sin(2 * jnp.pi * turns_BxSxT), 0.0)
        mixed_BxSxH = cos_BxSxT @ waves_BxSxH.real + sin_BxSxT @ waves_BxSxH.imag
        dtype = compute_dtype(self.execution)
        sum_BxSxH = x_BxSxH + mixed_BxSxH.astype(dtype)
        is_post = self.config.norm_position == "post"
        return Norm(self.config, dtype, name="layer_norm")(sum_BxSxH) if is_post else sum_BxSxH


class FourierLayer(Block):
    """One layer: Fourier mixing, then the feed-forward block of BERT. ``layer`` counts from 1."""

    layer: int = 1

    @nn.compact
    def __call__(self, x_BxSxH, tokens, dropout_key):
        parts = self.config, self.execution, self.mesh
        x_BxSxH = FourierMixing(*parts, name="fourier")(x_BxSxH, tokens)
        key = site_key(dropout_key, self.layer, Site.FEED_FORWARD_OUTPUT)
        x_BxSxH = FeedForward(*parts, name="feed_forward")(x_BxSxH, key)
        if self.is_mutable_collection(INTERMEDIATES):
            self.sow(INTERMEDIATES, "hidden_states", x_BxSxH)
        return x_BxSxH


class Encoder(Block):
    """The stack of layers, with the interface of ``bert_jax.model.bert.Encoder``: returns the output of the last
    layer and, with ``collect``, the outputs of all layers, [L, B, S, H]."""

    collect: bool = False

    @nn.compact
    def __call__(self, x_BxSxH: jax.Array, tokens, dropout_key):
        parts, outputs = (self.config, self.execution, self.mesh), []
        for layer in range(1, self.config.num_layers + 1):
            name = f"layer_{layer - 1}"
            if layer > self.config.num_layers - self.config.attention_layers:
                x_BxSxH, _ = EncoderLayer(*parts, name=name)(x_BxSxH, layer, tokens, None, dropout_key)
            else:
                x_BxSxH = FourierLayer(*parts, layer, name=name)(x_BxSxH, tokens, dropout_key)
            outputs.append(x_BxSxH)
        if self.config.has_final_norm:
            x_BxSxH = Norm(self.config, compute_dtype(self.execution), name="final_layer_norm")(x_BxSxH)
        return x_BxSxH, jnp.stack(outputs) if self.collect else None
