"""Layers between the encoder and the output layer of a task, and output layers that are not dense layers.

Shapes: B rows, S tokens, M masked positions, V vocabulary (padded in memory), H width of the encoder, F width of
the features, U inputs per row, E embedding width.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.config import HeadsConfig, ModelConfig
from bert_jax.config.spec import Features
from bert_jax.model.dense import Dense, activation, add_bias_of_logits, matmul_f32_grad
from bert_jax.model.dropout import DropoutKey, Site, dropout, site_key
from bert_jax.model.embeddings import Embedding
from bert_jax.model.kernels.common import on_tpu
from bert_jax.model.layers import Block, Norm, compute_dtype
from bert_jax.model.pooling import pooled_tokens
from bert_jax.parallel.axes import constrain, with_logical_axes

# Hidden states (0: embeddings, then the layers) of each kind of features.
_PARTS = {
    "last": slice(-1, None),
    "embeddings": slice(0, 1),
    "second_to_last": slice(-2, -1),
    "weighted_last_four": slice(-4, None),
    "weighted_all": slice(1, None),
    "weighted_with_embeddings": slice(0, None),
    "concat_last_four": slice(-4, None),
}


class ScalarMix(nn.Module):
    """Token features from hidden states (Devlin et al. 2018, section 5.3): one of them, the last four concatenated,
    or a learned scalar mix, gamma * sum(softmax(w) * h) (Peters et al. 2018)."""

    kind: Features

    @nn.compact
    def __call__(self, hidden_NxBxSxH: jax.Array) -> jax.Array:
        """Return the token features, float32[B, S, F], computed from ``hidden``: the output of the embeddings and
        of each encoder layer, in this order."""
        parts = hidden_NxBxSxH[_PARTS[self.kind]].astype(jnp.float32)
        if self.kind == "concat_last_four":
            return jnp.concatenate(list(parts), axis=-1)
        if not self.kind.startswith("weighted"):
            return parts[0]
        weights = self.param("weights", with_logical_axes(nn.initializers.zeros_init(), (None,)), (parts.shape[0],))
        gamma = self.param("gamma", with_logical_axes(nn.initializers.ones_init(), (None,)), (1,))
        return gamma * jnp.einsum("n,nbsh->bsh", jax.nn.softmax(weights), parts)


class MlmHead(Block):
    """Masked-LM head: a dense layer, the activation, LayerNorm, the product with the word embeddings, and a bias.
    The input contains only the hidden states of the positions for which logits are needed. E is the width of the
    embeddings."""

    @nn.compact
    def __call__(self, x_BxMxH: jax.Array, table_VxE: jax.Array) -> jax.Array:
        """Return the logits, float32[B, M, V]; padding rows of the vocabulary are -inf."""
        config, dtype = self.config, compute_dtype(self.execution)
        if config.mlm_layer != "none":
            width, has_bias = config.embedding_width, config.has_bias("mlm_layer")
            x_BxMxE = Dense(width, ("embed", "pooled"), config, dtype, has_bias, name="transform")(x_BxMxH)
            x_BxMxE = Norm(config, dtype, name="layer_norm")(activation(config.mlm_activation, x_BxMxE))
        else:
            x_BxMxE = x_BxMxH
        rows = len(table_VxE)
        if not config.tied_output:
            width = x_BxMxE.shape[-1]
            table_VxE = Embedding(rows, width, ("vocab", "embed"), config, name="output_embeddings")()
        swap = not self.is_initializing() and on_tpu(self.mesh)
        if swap:
            # Positions first: [M, B] becomes one dimension without a copy, because 8 (the rows of a tile) divides B
            # but not M.
            x_BxMxE = x_BxMxE.swapaxes(0, 1)
        logits_BxMxV = matmul_f32_grad(x_BxMxE, table_VxE, 1, jnp.dtype("float32"))
        logits_BxMxV = logits_BxMxV.swapaxes(0, 1) if swap else logits_BxMxV
        if config.has_bias("mlm_output"):
            zeros = with_logical_axes(nn.initializers.zeros_init(), ("vocab",))
            logits_BxMxV = add_bias_of_logits(
                logits_BxMxV, self.param("output_bias", zeros, (rows,)), x_BxMxE.dtype
            )
        logits_BxMxV = constrain(logits_BxMxV, ("act_batch", "act_predictions", "act_vocab"), self.mesh)
        if rows == config.vocab_size:
            return logits_BxMxV
        return jnp.where(jnp.arange(rows) < config.vocab_size, logits_BxMxV, -jnp.inf)


class RtdHead(nn.Module):
    """Head of replaced token detection (Clark et al. 2020, section 2): a dense layer, the activation of the encoder
    and a dense layer with one output."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BxSxH: jax.Array) -> jax.Array:
        """Return one score per token, float32[B, S], positive for a token that was replaced."""
        config = self.config
        x_BxSxH = Dense(config.hidden_size, ("embed", "pooled"), config, self.dtype, name="transform")(x_BxSxH)
        x_BxSxH = activation(config.activation, x_BxSxH).astype(jnp.float32)
        return Dense(1, ("embed", "classes"), config, jnp.dtype("float32"), name="output")(x_BxSxH)[..., 0]


class ExitHead(Block):
    """Sequence head of a lower layer (Xin et al. 2020, section 3): the layers of the pooler and the output layer of
    the last layer, with separate parameters, after the LayerNorm that a pre-norm encoder has at its end."""

    heads: HeadsConfig = HeadsConfig()

    @nn.compact
    def __call__(
        self, x_BxSxH: jax.Array, features: Mapping[str, jax.Array], dropout_key: DropoutKey | None
    ) -> jax.Array:
        """Return the logits of the C sequences of each row, float32[B, C, labels]; ``dropout_key`` is the dropout
        key of the pooled vectors."""
        config, dtype, labels = self.config, compute_dtype(self.execution), len(self.heads.sequence_labels)
        if config.has_final_norm:
            x_BxSxH = Norm(config, dtype, name="final_layer_norm")(x_BxSxH)
        x_BxCxH = pooled_tokens(x_BxSxH, features.get("cls_positions"), features["sequence_ids"], config.pooling)
        kind = config.pooler_activation(has_sequence_head=True)
        if kind != "none":
            width, has_bias = config.hidden_size, config.has_bias("pooler_layer")
            pooler = Dense(width, ("embed", "pooled"), config, dtype, has_bias, name="pooler")
            x_BxCxH = activation(kind, pooler(x_BxCxH))
            x_BxCxH = (
                Norm(config, dtype, name="pooler_norm")(x_BxCxH) if "pooler_norm" in config.head_parts else x_BxCxH
            )
        rate = config.hidden_dropout if self.heads.dropout is None else self.heads.dropout
        x_BxCxH = dropout(x_BxCxH.astype(jnp.float32), rate, site_key(dropout_key, 0, Site.TASK_HEAD))
        axes, float32 = ("embed", "classes"), jnp.dtype("float32")
        return Dense(labels, axes, config, float32, config.has_bias("sequence_head"), name="output")(x_BxCxH)


class BiLstm(nn.Module):
    """Two layers of a bidirectional LSTM (Hochreiter and Schmidhuber 1997) over the tokens of each sequence in a
    row. Returns float32[B, S, 2 * size]. The state is reset to zero at the first token of each sequence and at
    every padding token."""

    size: int
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxSxF: jax.Array, sequence_ids_BxS: jax.Array) -> jax.Array:
        for layer in range(2):
            both = []
            for direction in ("forward", "backward"):
                gates = Dense(
                    4 * self.size,
                    ("embed", "pooled"),
                    self.config,
                    jnp.dtype("float32"),
                    name=f"{direction}_{layer}",
                )(x_BxSxF)
                recurrent = self.param(
                    f"{direction}_{layer}_recurrent",
                    with_logical_axes(nn.initializers.orthogonal(), ("embed", "pooled")),
                    (self.size, 4 * self.size),
                )
                backward = direction == "backward"
                both.append(_run_lstm(gates, recurrent, sequence_ids_BxS, backward))
            x_BxSxF = jnp.concatenate(both, axis=-1)
        return x_BxSxF


def _run_lstm(
    gates_BxSx4D: jax.Array, recurrent: jax.Array, sequence_ids_BxS: jax.Array, backward: bool
) -> jax.Array:
    if backward:
        gates_BxSx4D, sequence_ids_BxS = gates_BxSx4D[:, ::-1], sequence_ids_BxS[:, ::-1]
    size = recurrent.shape[0]
    before = jnp.pad(sequence_ids_BxS[:, :-1], ((0, 0), (1, 0)))
    goes_on_BxS = (sequence_ids_BxS == before) & (sequence_ids_BxS > 0)

    def step(carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, jax.Array]):  # type: ignore[no-untyped-def]
        gates, goes_on = inputs
        hidden, cell = (jnp.where(goes_on[:, None], state, 0.0) for state in carry)
        enter, forget, new, out = jnp.split(gates + hidden @ recurrent, 4, axis=-1)
        cell = jax.nn.sigmoid(forget + 1.0) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((gates_BxSx4D.shape[0], size))
    _, hidden_SxBxD = jax.lax.scan(step, (zeros, zeros), (gates_BxSx4D.swapaxes(0, 1), goes_on_BxS.T))
    hidden_BxSxD = hidden_SxBxD.swapaxes(0, 1)
    return hidden_BxSxD[:, ::-1] if backward else hidden_BxSxD


class Crf(nn.Module):
    """Parameters of a CRF over L tags: transition scores [L, L] (from, to), start scores [L] and end scores [L]."""

    labels: int

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        zeros, size = nn.initializers.zeros_init(), self.labels
        transitions = self.param("transitions", with_logical_axes(zeros, ("classes", None)), (size, size))
        start = self.param("start", with_logical_axes(zeros, ("classes",)), (size,))
        return transitions, start, self.param("end", with_logical_axes(zeros, ("classes",)), (size,))


def pair_features(u: jax.Array, v: jax.Array) -> jax.Array:
    """Return the concatenation of ``u``, ``v`` and their absolute difference, [..., 3E] for vectors of width E: the
    input of the softmax classifier of Sentence-BERT."""
    return jnp.concatenate([u, v, jnp.abs(u - v)], axis=-1)


class PairHead(nn.Module):
    """Classifier of pairs of texts. It reads (u, v, |u - v|), where u and v are the embeddings of the two texts
    (Reimers and Gurevych 2019), after dropout if ``heads.dropout`` is set, and may have a hidden layer with
    ReLU."""

    heads: HeadsConfig
    config: ModelConfig

    @nn.compact
    def __call__(self, pair_features_BxUx3E: jax.Array, dropout_key: DropoutKey | None) -> jax.Array:
        """Return the logits of the U pairs of each row, float32[B, U, classes]; ``dropout_key`` is that of the
        pairs."""
        dtype, key = jnp.dtype("float32"), site_key(dropout_key, 0, Site.TASK_HEAD)
        x = dropout(pair_features_BxUx3E, self.heads.dropout or 0.0, key)
        if self.heads.pair_hidden:
            x = jax.nn.relu(
                Dense(self.heads.pair_hidden, ("embed", "pooled"), self.config, dtype, name="hidden")(x)
            )
        return Dense(len(self.heads.pair_labels), ("embed", "classes"), self.config, dtype, name="output")(x)


def beside(x_BxSxH: jax.Array, sequence_ids_BxS: jax.Array) -> jax.Array:
    """Return the sum of the states of the forward direction one token before, and of the backward direction one
    token after each token of its sequence, [B, S, H / 2]: the part of ``x`` in both directions that does not depend
    on the token itself."""
    forward, backward = jnp.split(x_BxSxH, 2, axis=-1)
    same = (sequence_ids_BxS[:, 1:] == sequence_ids_BxS[:, :-1])[..., None]
    before = jnp.pad(jnp.where(same, forward[:, :-1], 0), ((0, 0), (1, 0), (0, 0)))
    return before + jnp.pad(jnp.where(same, backward[:, 1:], 0), ((0, 0), (0, 1), (0, 0)))


def in_question(input_ids_BxS: jax.Array, sequence_ids_BxS: jax.Array, separator_id: int) -> jax.Array:
    """Return float32[B, S], 1 for the tokens up to the first ``separator_id`` of each sequence of a row, except its
    first token; 0 everywhere in a sequence without it.

    Padding at the beginning of a row belongs to its first sequence, so that the first column is the exception, as
    in transformers.
    """
    before_BxS = jnp.pad(sequence_ids_BxS, [(0, 0), (1, 0)])[:, :-1]
    begins_BxS = ((before_BxS > 0) & (sequence_ids_BxS != before_BxS)).at[:, 0].set(True)
    separates_BxS = (input_ids_BxS == separator_id).astype(jnp.int32)
    total_BxS = jnp.cumsum(separates_BxS, axis=1)
    earlier_BxS = total_BxS - separates_BxS
    # Separators before the sequence of each token, and up to its end.
    start_BxS = jax.lax.cummax(jnp.where(begins_BxS, earlier_BxS, 0), axis=1)
    ends_BxS = jnp.pad(begins_BxS, [(0, 0), (0, 1)], constant_values=True)[:, 1:]
    most = jnp.iinfo(jnp.int32).max
    end_BxS = jax.lax.cummin(jnp.where(ends_BxS, total_BxS, most), axis=1, reverse=True)
    is_asked_BxS = (earlier_BxS == start_BxS) & (end_BxS > start_BxS) & ~begins_BxS
    return is_asked_BxS.astype(jnp.float32)
