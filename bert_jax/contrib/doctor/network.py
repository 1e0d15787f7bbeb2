"""Measures of a network: gradients, size of the updates, states of tokens, attention, dropout masks.

Shapes: B rows, S tokens per row, L layers, A heads, H width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from bert_jax.config import ExecutionConfig, HeadsConfig, ModelConfig, OptimizerConfig
from bert_jax.contrib.doctor.audit import Rows
from bert_jax.contrib.doctor.findings import Finding, finding
from bert_jax.model import BertModel, from_canonical
from bert_jax.model.bert import bert_output, of_layers
from bert_jax.model.canonical import Params, abstract_params, canonical_leaves, canonical_shapes
from bert_jax.model.dropout import TOKEN_FEATURES, DropoutKey, TokenKey
from bert_jax.model.layers import INTERMEDIATES

# Peak learning rate as a share of the root mean square of the matrices: the largest for LOOK and FAIL, and the
# smallest from random parameters.
RATE, LEAST_RATE = (0.2, 0.5), 0.002
# Share of the trained parameters whose lower 16 bits are 0.
ROUNDED = 0.5
# Relative difference of gradients where the order of sums changes.
NEARLY_SAME = 1e-3
# Mean cosine of the states of two tokens.
COSINE = (0.95, 0.99)
# Entropy in nats under which a head attends to one token, and the share of such heads.
LEAST_ENTROPY, FEW_HEADS = 0.1, 0.5
# Correlation of the dropout masks of two layers.
CORRELATION = 0.2
_LARGE = 1e3
_MATRICES = ("kernel", "embedding")


@dataclass(frozen=True)
class Network:
    """The encoder of a run: one network with its parameters by canonical name, and rows that it reads."""

    config: ModelConfig
    heads: HeadsConfig
    arrays: Mapping[str, np.ndarray]
    rows: Rows

    @property
    def model(self) -> BertModel:
        """The network without its heads, in float32 on one device."""
        execution = ExecutionConfig(attention="xla", residual_norm="xla", vocab_multiple=1)
        return BertModel(self.config, execution, HeadsConfig())

    def params(self, changes: Mapping[str, np.ndarray]) -> Params:
        """Return the parameter tree with the arrays in ``changes`` instead of those of the run."""
        model = self.model
        flat = {name: changes.get(name, self.arrays[name]) for name in canonical_shapes(model)}
        return from_canonical(flat, nn.unbox(abstract_params(model)), self.config.vocab_size)


# ------------------------------------------------------------------ gradients and weights


def gradients(grads: Params, vocab_size: int) -> Finding:
    """Return whether each parameter has a gradient."""
    names = [name for name, grad in canonical_leaves(grads, vocab_size) if not np.asarray(grad).any()]
    unused = [name for name in names if not name.endswith(("bias", "output_embeddings/embedding"))]
    value = f"{len(unused)} arrays have no gradient" + (f", such as {unused[0]}" if unused else "")
    return finding(
        "gradients", value, "0", "the loss does not depend on them; check stop_gradient and unused layers",
        fail=bool(unused), number=float(len(unused)),
    )  # fmt: skip


def accumulation(whole: Params, accumulated: Params) -> Finding:
    """Compare the gradient that the training step accumulates over microbatches with that of the ``whole``
    batch."""
    size = float(optax.tree.norm(whole))
    change = float(optax.tree.norm(jax.tree.map(jnp.subtract, accumulated, whole))) / max(size, 1e-9)
    return finding(
        "accumulation", f"the gradient of the microbatches differs from that of the batch by {change:.1g} of it",
        f"at most {NEARLY_SAME:g}",
        "training.accumulation_steps changes the training: the sum over the microbatches lacks some of them, or "
        "each is divided by a number of its own",
        fail=not change <= NEARLY_SAME, number=change,
    )  # fmt: skip


def updates(
    optimizer: OptimizerConfig, arrays: Mapping[str, np.ndarray], *, is_random: bool = True
) -> Finding | None:
    """Compare the peak learning rate with the root mean square of the matrices, by canonical name (median).

    An update of Adam changes each weight by about the rate, and Muon is used with the rates of Adam. Returns None
    for other optimizers, whose rate has another meaning. ``arrays`` are the initial parameters, with ``is_random``,
    or those of a run that starts from another model, whose rate may be small.
    """
    if optimizer.name not in ("adamw", "bert_adam", "stable_adamw", "muon"):
        return None
    matrices = (values for name, values in arrays.items() if name.endswith(_MATRICES) and values.ndim > 1)
    size = float(np.median([np.sqrt(np.mean(np.square(one))) for one in matrices]))
    share = optimizer.learning_rate / max(size, 1e-9)
    look, fail = RATE
    is_low = is_random and share < LEAST_RATE
    advice = "the learning rate is too high; set optimizer.learning_rate to a tenth or a hundredth"
    if is_low:
        advice = "the learning rate is too low for random parameters; multiply optimizer.learning_rate by 10"
    return finding(
        "updates", f"an update at the peak rate is {share:.3g} of the matrices' root mean square, {size:.2g}",
        f"{LEAST_RATE:g} to {look:g}" if is_random else f"at most {look:g}", advice,
        fail=not share <= fail, look=share > look or is_low, number=share,
    )  # fmt: skip


def rounded_weights(arrays: Mapping[str, np.ndarray]) -> Finding:
    """Return the share of the float32 values that are also bfloat16 values, whose lower 16 bits are 0. Zeros and
    ones, the initial values of biases and of scales, do not count. ``arrays`` are trained parameters."""
    rounded = total = 0
    for values in arrays.values():
        if values.dtype == np.float32:
            bits = np.ascontiguousarray(values).view(np.uint32)[(values != 0) & (values != 1)]
            rounded, total = rounded + int((bits & 0xFFFF == 0).sum()), total + bits.size
    share = rounded / max(total, 1)
    return finding(
        "rounded weights", f"{share:.1%} of the parameters are rounded to bfloat16", f"at most {ROUNDED:.0%}",
        "parameters must stay float32 between steps, because small updates are lost in bfloat16; round copies for "
        "the computation only (execution.dtype bfloat16)",
        fail=share > ROUNDED, number=share,
    )  # fmt: skip


# ------------------------------------------------------------------ states and attention


def states_and_attention(network: Network) -> list[Finding]:
    """Return how similar the last states of different tokens are and, with attention, how many heads attend to one
    token."""
    model, rows = network.model, network.rows
    inner = network.config.has_attention

    @jax.jit
    def run(params: Params, rows: Rows) -> tuple[jax.Array, jax.Array]:
        output, state = model.apply({"params": params}, rows, mutable=[INTERMEDIATES])
        real_BxS = rows["sequence_ids"] > 0
        states_BxSxH = bert_output(output).sequence_output.astype(jnp.float32)
        unit = states_BxSxH / jnp.maximum(jnp.linalg.norm(states_BxSxH, axis=-1, keepdims=True), 1e-9)
        count = jnp.sum(real_BxS)
        total = jnp.sum(unit * real_BxS[..., None], axis=(0, 1))
        cosine = (jnp.sum(total**2) - count) / jnp.maximum(count * (count - 1), 1)
        if not inner:
            return cosine, jnp.zeros(0)
        entropies = []
        for p_BxAxSxS in of_layers(state[INTERMEDIATES]["encoder"], network.config, "attention", "attentions"):
            own = -jnp.sum(p_BxAxSxS * jnp.log(jnp.maximum(p_BxAxSxS, 1e-20)), axis=-1)
            entropies.append(jnp.sum(own * real_BxS[:, None], axis=(0, 2)) / jnp.maximum(count, 1))
        return cosine, jnp.concatenate(entropies)

    cosine, entropies = (np.asarray(x) for x in run(network.params({}), _inputs(rows)))
    found = [_similarity(float(cosine))]
    return found + ([_heads(entropies)] if inner else [])


def _similarity(cosine: float) -> Finding:
    look, fail = COSINE
    return finding(
        "token states", f"the last states of two tokens have a mean cosine of {cosine:.2f}", f"at most {look}",
        "all tokens look alike to the network; lower optimizer.learning_rate, check norms and residual sums",
        fail=not cosine <= fail, look=cosine > look, number=cosine,
    )  # fmt: skip


def _heads(entropies: np.ndarray) -> Finding:
    few = entropies < LEAST_ENTROPY
    return finding(
        "attention heads", f"{few.sum()} of {len(few)} heads attend to one token (entropy under {LEAST_ENTROPY})",
        f"at most {FEW_HEADS:.0%}", "attention has collapsed; lower optimizer.learning_rate or lengthen warmup",
        look=bool(few.mean() > FEW_HEADS), number=float(few.mean()),
    )  # fmt: skip


def _inputs(rows: Rows) -> dict[str, np.ndarray]:
    names = ("input_ids", "token_type_ids", "sequence_ids", "position_ids")
    return {name: rows[name] for name in names}


# ------------------------------------------------------------------ dropout


def dropout_masks(network: Network, prng: str) -> Finding | None:
    """Compare the dropout masks of the feed-forward outputs of the layers, which must be independent.

    The attention outputs are set to 0 and the feed-forward outputs to a large constant, so that the states of a
    layer show its mask. ``network`` should have initial parameters. Returns None without dropout, or with one
    layer.
    """
    config = network.config
    rate = config.dropout_at("feed_forward")
    if not (config.has_attention and config.num_layers > 1 and rate > 0):
        return None
    names = [name for name in network.arrays if "/feed_forward/output/" in name or "/attention/output/" in name]
    changes = {name: np.zeros_like(network.arrays[name]) for name in names}
    # Without a bias, equal columns give each token the same large number in all columns.
    large = "bias" if config.has_bias("feed_forward") else "kernel"
    for name in names:
        if name.endswith(f"/feed_forward/output/{large}"):
            changes[name] = np.full_like(network.arrays[name], _LARGE)
    rows = {**_inputs(network.rows), "sequence_keys": network.rows["sequence_keys"]}
    model = network.model

    @jax.jit
    def run(params: Params, rows: Rows) -> list[jax.Array]:
        key = _dropout_key(jax.random.key(0), rows) if prng == "hash" else jax.random.key(0)
        _, state = model.apply({"params": params}, rows, key, mutable=[INTERMEDIATES])
        sown = state[INTERMEDIATES]
        return [sown["hidden_states"][0], *of_layers(sown["encoder"], config, "hidden_states")]

    states = [np.asarray(x, np.float32) for x in run(network.params(changes), rows)]
    real = network.rows["sequence_ids"] > 0
    dropped = []
    for before, after in pairwise(states):
        own = (after - before if config.norm_position != "post" else after)[real]
        middle = (own.max(axis=-1, keepdims=True) + own.min(axis=-1, keepdims=True)) / 2
        is_above = own > middle
        few = is_above.mean(axis=-1, keepdims=True) < 0.5
        dropped.append(np.where(few == (rate < 0.5), is_above, ~is_above).ravel().astype(np.float64))
    pairs = [float(np.corrcoef(one, other)[0, 1]) for one, other in pairwise(dropped)]
    most = max(pairs, key=abs)
    return finding(
        "dropout", f"the masks of two layers have a correlation of {most:.2f}", f"at most {CORRELATION}",
        "layers have the same dropout; derive the key of each layer from its number",
        fail=abs(most) > CORRELATION, number=most,
    )  # fmt: skip


def _dropout_key(key: jax.Array, rows: Rows) -> DropoutKey:
    return TokenKey.of(key, *(jnp.asarray(rows[name]) for name in TOKEN_FEATURES))
