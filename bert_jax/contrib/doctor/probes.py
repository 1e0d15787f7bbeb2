"""Probes: the loss of a few rows before and after a change that must, or must not, change it.

A probe computes the losses of the objective itself, so it also finds errors of layers and objectives.

Shapes: B rows, S tokens per row, M predictions per row.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from bert_jax.config import PretrainConfig
from bert_jax.contrib.doctor.audit import Rows, original_ids
from bert_jax.contrib.doctor.findings import Finding, finding
from bert_jax.model.canonical import Params, path_name
from bert_jax.objectives.objective import PretrainObjective
from bert_jax.tokenization import Tokenizer

# The losses of the objectives with probes: of masked tokens, and of next tokens.
MASKED, NEXT = "mlm_loss", "lm_loss"
# Relative change of a loss that counts as none; the second one where the order of sums changes.
SAME, NEARLY_SAME = 1e-6, 1e-3
# Nats below the loss of the unigram distribution from which on a network has learned more than frequencies.
LEARNED = 1.0
# Distance of the first loss from the logarithm of the size of the vocabulary.
FIRST_LOSS = (-0.2, 0.5)
# Relative change of a loss by rounding errors of the weights of attention.
SUMS = 1e-5
_WORDS = "word_embeddings/embedding"
_VALUES, _KEYS = (re.compile(rf"/attention/{name}(_global)?/(kernel|bias)$") for name in ("value", "key"))


class Total(NamedTuple):
    """Sum of a loss and of its weights."""

    sum: float
    weight: float

    @property
    def mean(self) -> float:
        """Mean loss; NaN without weights."""
        return self.sum / self.weight if self.weight else math.nan


@dataclass(frozen=True)
class Subject:
    """A network with rows to probe.

    Attributes:
        config: config of the run.
        tokenizer: tokenizer of the run.
        total: returns the main loss of parameters on rows; without dropout.
        outputs: causal language models: returns float32[B, S, K], numbers that determine the logits of each token;
            None for objectives that predict masked tokens.
        params: parameters of the run.
        loud: parameters with which probes of the code compute: those of the run or, larger, those of its start
            (:func:`loud`), because training can make the outputs of small networks independent of their inputs.
        rows: features [B, ...] of ``bert_jax.batch.PRETRAIN_FEATURES``.
        unigram: loss of the unigram distribution of the training targets; None if it is unknown.
        start: initial parameters; None for a run that starts from another model.
    """

    config: PretrainConfig
    tokenizer: Tokenizer
    total: Callable[[Params, Rows], Total]
    outputs: Callable[[Params, Rows], np.ndarray] | None
    params: Params
    loud: Params
    rows: dict[str, np.ndarray]
    unigram: float | None
    start: Params | None = None

    @property
    def predicts_masks(self) -> bool:
        """True if the objective predicts masked tokens."""
        return self.outputs is None

    def loss(self, rows: Rows) -> float:
        """Return the mean loss of the network."""
        return self.total(self.params, rows).mean

    def difference(self, one: Rows, other: Rows, where: np.ndarray) -> float:
        """Return the largest relative difference of the outputs for two versions of the same rows at the tokens
        ``where``, bool[B, S]; 0 if there is no target."""
        if self.outputs is not None:
            first, second = (self.outputs(self.loud, rows)[where] for rows in (one, other))
            return float(np.abs(first - second).max(initial=0) / max(np.abs(first).max(initial=0), 1e-9))
        first, second = (self.total(self.loud, only_at(rows, where)) for rows in (one, other))
        return abs(first.sum - second.sum) / max(abs(first.sum), 1e-9)


def main_loss(kind: type[PretrainObjective]) -> str:
    """Return the name of the loss that is compared with word frequencies; empty for other objectives."""
    return next((name for name in (MASKED, NEXT) if name in kind.display.keys), "")


def chosen(objective: PretrainObjective, rows: Rows) -> dict[str, np.ndarray]:
    """Return the features that the objective reads."""
    return {name: rows[name] for name in objective.features}


Probe = Callable[[Subject], Finding | None]


def loud(params: Params) -> Params:
    """Return parameters whose smaller matrices are scaled to a root mean square of 1 / sqrt(inputs), and smaller
    embeddings to 1 / sqrt(width). With the small initial weights of BERT, other tokens change a loss by less than
    rounding errors do."""

    def scaled(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
        name = path_name(path)
        if not name.endswith(("kernel", "embedding")):
            return leaf
        inputs = leaf.shape[-2 if name.endswith("kernel") else -1]
        size = float(np.sqrt(np.mean(np.square(np.asarray(leaf, np.float64)))))
        return leaf * max(1.0, inputs**-0.5 / max(size, 1e-9))

    scaled_params: Params = jax.tree_util.tree_map_with_path(scaled, params)
    return scaled_params


# ------------------------------------------------------------------ rows


def without_masks(rows: Rows) -> dict[str, np.ndarray]:
    """Return rows with the original tokens and without predictions."""
    return {**rows, "input_ids": original_ids(rows), "mlm_weights": np.zeros_like(rows["mlm_weights"])}


def only_at(rows: Rows, where: np.ndarray) -> dict[str, np.ndarray]:
    """Return rows that predict only tokens at ``where``, bool[B, S]."""
    chosen = np.take_along_axis(where, rows["mlm_positions"], axis=1)
    return {**rows, "mlm_weights": rows["mlm_weights"] * chosen}


def changed(subject: Subject, rows: Rows, where: np.ndarray) -> dict[str, np.ndarray]:
    """Return rows with random tokens at ``where``, bool[B, S]."""
    text = np.flatnonzero(~subject.tokenizer.special)
    other = np.random.default_rng(0).choice(text, size=where.shape).astype(rows["input_ids"].dtype)
    return {**rows, "input_ids": np.where(where, other, rows["input_ids"])}


def _targets(rows: Rows) -> np.ndarray:
    """Return the places of predicted tokens, bool[B, S]."""
    places = np.zeros(rows["input_ids"].shape, bool)
    row, slot = np.nonzero(rows["mlm_weights"] > 0)
    places[row, rows["mlm_positions"][row, slot]] = True
    return places


def _kept(subject: Subject, rows: Rows, where: np.ndarray) -> dict[str, np.ndarray]:
    """Return rows in which all tokens except those at ``where`` are padding."""
    ids = np.where(where, rows["input_ids"], subject.tokenizer.pad_id)
    return only_at({**rows, "input_ids": ids, "sequence_ids": rows["sequence_ids"] * where}, where)


def _first_half(rows: Rows) -> np.ndarray:
    """Return the places of the first half of the first sequence of each row, bool[B, S]."""
    first = rows["sequence_ids"] == 1
    half = np.maximum(first.sum(axis=1, keepdims=True) // 2, 2)
    return first & (np.arange(first.shape[1]) < half)


# ------------------------------------------------------------------ probes


def padding(subject: Subject) -> Finding | None:
    """Other tokens in the padding must not change the outputs of a sequence."""
    where = _first_half(subject.rows)
    rows = _kept(subject, subject.rows, where)
    change = subject.difference(rows, changed(subject, rows, ~where), where)
    return finding(
        "padding", f"other tokens in the padding change the outputs by {change:.1g} of their size", "no change",
        "attention sees padding; check that its mask is True where sequence_ids is not 0",
        fail=change > SAME, number=change,
    )  # fmt: skip


def neighbors(subject: Subject) -> Finding | None:
    """Other tokens in the other sequences of a packed row must not change the outputs of the second sequence."""
    rows, ids = subject.rows, subject.rows["sequence_ids"]
    where = ids == 2
    if not where.any():
        return None
    change = subject.difference(rows, changed(subject, rows, (ids > 0) & ~where), where)
    return finding(
        "neighbors", f"other sequences of a packed row change the outputs by {change:.1g} of their size",
        "no change", "attention crosses sequences; a query must see only keys with its own sequence id",
        fail=change > SAME, number=change,
    )  # fmt: skip


def place_in_the_row(subject: Subject) -> Finding | None:
    """The loss of the second sequence of a packed row must not depend on its place in the row."""
    rows, ids = subject.rows, subject.rows["sequence_ids"]
    second = ids == 2
    is_exact = subject.config.execution.dtype == "float32" and not subject.config.model.attention_block
    if not second.any() or not is_exact:
        return None
    start = np.where(second.any(axis=1), second.argmax(axis=1), 0)[:, None]
    there = _kept(subject, rows, second)
    length = ids.shape[1]
    source = np.minimum(np.arange(length) + start, length - 1)
    here = np.arange(length) < second.sum(axis=1, keepdims=True)
    moved = {
        name: np.take_along_axis(there[name], source, axis=1) * here for name in ("token_type_ids", "sequence_ids")
    }
    moved["sequence_ids"] = (moved["sequence_ids"] > 0).astype(ids.dtype)
    taken = np.take_along_axis(there["input_ids"], source, axis=1)
    moved["input_ids"] = np.where(here, taken, subject.tokenizer.pad_id)
    moved["position_ids"] = np.where(here, np.arange(length), 0).astype(ids.dtype)
    moved["mlm_positions"] = np.where(there["mlm_weights"] > 0, there["mlm_positions"] - start, 0).astype(ids.dtype)
    before, after = (subject.total(subject.loud, one) for one in (there, {**there, **moved}))
    change = abs(before.sum - after.sum) / max(abs(before.sum), 1e-9)
    return finding(
        "place in the row", f"at the start of a row, a sequence has a loss that differs by {change:.1g} of it",
        f"at most {NEARLY_SAME:g}", "positions must restart at 0 in each sequence of a packed row",
        fail=change > NEARLY_SAME, number=change,
    )  # fmt: skip


def other_rows(subject: Subject) -> Finding | None:
    """Other rows of the batch, those before it and those after it, must not change the outputs of a row."""
    ids = subject.rows["sequence_ids"]
    if len(ids) < 2:
        return None
    first = (np.arange(len(ids)) < len(ids) // 2)[:, None] & (ids > 0)
    second = (ids > 0) & ~first
    change = max(
        subject.difference(subject.rows, changed(subject, subject.rows, others), where)
        for where, others in ((first, second), (second, first))
    )
    return finding(
        "other rows", f"other rows of the batch change the outputs by {change:.1g} of their size", "no change",
        "an operation of the network mixes the rows of a batch", fail=change > SAME, number=change,
    )  # fmt: skip


def attention_sums(subject: Subject) -> Finding | None:
    """If all tokens have the same value in attention, the outputs must not depend on the scores, because the
    weights of each query sum to 1."""
    model = subject.config.model
    if not (model.has_attention and model.has_bias("qkv")) or subject.config.execution.dtype != "float32":
        return None

    def total(scores: float) -> float:
        def one(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
            name = path_name(path)
            if _VALUES.search(name):
                kernel = name.endswith("kernel")
                made = np.random.default_rng(0).normal(size=leaf.shape).astype(leaf.dtype) * (not kernel)
                return jax.device_put(made, leaf.sharding if isinstance(leaf, jax.Array) else None)
            return leaf * scores if _KEYS.search(name) else leaf

        return subject.total(jax.tree_util.tree_map_with_path(one, subject.loud), subject.rows).sum

    before, after = total(10.0), total(0.0)  # large scores, whose weights are far from equal
    change = abs(before - after) / max(abs(before), 1e-9)
    return finding(
        "attention sums",
        f"with equal values at all tokens, the scores of attention change the loss by {change:.1g} of it",
        f"at most {SUMS:g}",
        "the weights of a query do not sum to 1: the softmax must be over the keys, after the mask",
        fail=not change <= SUMS, number=change,
    )  # fmt: skip


def loss_weights(subject: Subject) -> Finding | None:
    """Without any weight, the sum of the losses must be 0."""
    if not subject.predicts_masks:
        return None
    rows = subject.rows
    loss = subject.total(subject.loud, {**rows, "mlm_weights": np.zeros_like(rows["mlm_weights"])}).sum
    return finding(
        "loss weights", f"the sum of the losses of places without a weight is {loss:.3g} nats", "0",
        "the loss counts places that predict nothing, whose labels are fillers; multiply the losses by mlm_weights "
        "before they are summed, and divide by the sum of the weights",
        fail=abs(loss) > SAME, number=loss,
    )  # fmt: skip


def other_labels(subject: Subject) -> Finding | None:
    """The labels of places without a weight, in the same row and in other rows, must not change the loss."""
    if not subject.predicts_masks:
        return None
    rows = subject.rows
    row, slot = np.indices(rows["mlm_weights"].shape)
    half = {**rows, "mlm_weights": rows["mlm_weights"] * ((slot % 2 == 0) & (row % 2 == 0))}
    text = np.flatnonzero(~subject.tokenizer.special)
    other = np.random.default_rng(0).choice(text, size=rows["mlm_labels"].shape).astype(np.int32)
    labels = np.where(half["mlm_weights"] > 0, rows["mlm_labels"], other)
    before, after = (subject.total(subject.loud, one).sum for one in (half, {**half, "mlm_labels": labels}))
    change = abs(before - after) / max(abs(before), 1e-9)
    return finding(
        "other labels", f"labels of other places change the loss by {change:.1g} of it", "no change",
        "labels and outputs do not belong to the same places; check shifts and gathers in the objective",
        fail=change > SAME, number=change,
    )  # fmt: skip


def later_tokens(subject: Subject) -> Finding | None:
    """With causal attention, later tokens must not change the outputs of earlier ones."""
    if not subject.config.model.is_causal:
        return None
    rows = without_masks(subject.rows)
    where = _first_half(rows)
    after = (rows["sequence_ids"] == 1) & ~where
    change = subject.difference(rows, changed(subject, rows, after), where)
    return finding(
        "later tokens", f"later tokens change the outputs of earlier ones by {change:.1g} of their size",
        "no change", "the network sees what it predicts; attention must be causal",
        fail=change > SAME, number=change,
    )  # fmt: skip


def context(subject: Subject) -> Finding | None:
    """Other tokens of the text must change the outputs."""
    if not subject.predicts_masks:
        return None
    rows, where = subject.rows, _targets(subject.rows)
    text = (rows["sequence_ids"] > 0) & ~subject.tokenizer.special[rows["input_ids"]] & ~where
    change = subject.difference(rows, changed(subject, rows, text), where)
    return finding(
        "context", f"other words around the masks change the loss by {change:.1g} of it",
        f"more than {SAME:g}", "the outputs do not depend on the context; check attention and residual sums",
        fail=change <= SAME, number=change,
    )  # fmt: skip


def tied_table(subject: Subject) -> Finding | None:
    """Another embedding of a token that is no input must change the loss, if the output layer is the table."""
    model, rows = subject.config.model, subject.rows
    if model.word_rank or not (model.tied_output or not subject.predicts_masks):
        return None
    if subject.predicts_masks:
        absent = ~np.isin(rows["mlm_labels"], rows["input_ids"])
        rows = {**rows, "mlm_weights": rows["mlm_weights"] * absent}
        tokens = np.unique(rows["mlm_labels"][rows["mlm_weights"] > 0])
    else:
        rows = without_masks(rows)
        tokens = np.setdiff1d(np.flatnonzero(~subject.tokenizer.special), rows["input_ids"])
    if not len(tokens):
        return None

    def other(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
        if not path_name(path).endswith(_WORDS):
            return leaf
        table = np.array(leaf)
        noise = np.random.default_rng(0).normal(0, 10 * table.std(), (len(tokens), table.shape[1]))
        table[tokens] += noise.astype(table.dtype)
        return jax.device_put(table, leaf.sharding if isinstance(leaf, jax.Array) else None)

    before = subject.total(subject.loud, rows).sum
    after = subject.total(jax.tree_util.tree_map_with_path(other, subject.loud), rows).sum
    change = abs(before - after) / max(abs(before), 1e-9)
    return finding(
        "tied table", f"other embeddings of the predicted words change the loss by {change:.1g} of it",
        f"more than {SAME:g}", "the output layer has another table than the embeddings (model.tied_output)",
        fail=change <= SAME, number=change,
    )  # fmt: skip


def word_order(subject: Subject) -> Finding | None:
    """Another order of the words of each segment must change the outputs.

    Without initial parameters, a network is probed only if it has learned more than frequencies."""
    if not subject.predicts_masks:
        return None
    if subject.start is None and (
        subject.unigram is None or not subject.loss(subject.rows) < subject.unigram - LEARNED
    ):
        return None
    rows, where = subject.rows, _targets(subject.rows)
    ids, rng = rows["input_ids"].copy(), np.random.default_rng(0)
    fixed = subject.tokenizer.special[ids] | where
    segments = 2 * rows["sequence_ids"] + rows["token_type_ids"]
    for own, segment, keep in zip(ids, segments, fixed, strict=True):
        for number in np.unique(segment[segment > 1]):
            places = np.flatnonzero((segment == number) & ~keep)
            own[places] = own[rng.permutation(places)]
    change = subject.difference(rows, {**rows, "input_ids": ids}, where)
    return finding(
        "word order", f"another order of the words changes the loss by {change:.1g} of it", f"more than {SAME:g}",
        "the network does not see positions; check position_ids and model.position_embeddings",
        fail=change <= SAME, number=change,
    )  # fmt: skip


def token_types(subject: Subject) -> Finding | None:
    """Rows of pairs must have two token types, and other token types must change the outputs."""
    rows, size = subject.rows, subject.config.model.type_vocab_size
    is_pair = (rows["nsp_weights"] > 0).any(axis=1)
    if size < 2 or not is_pair.any():
        return None
    pairs, real = rows["token_type_ids"][is_pair], rows["sequence_ids"] > 0
    has_two = bool((pairs != pairs[:, :1])[real[is_pair]].any())
    swapped = (real & (rows["token_type_ids"] == 0)).astype(np.int32)
    change = subject.difference(rows, {**rows, "token_type_ids": swapped}, real)
    value = f"other token types change the outputs by {change:.1g} of their size"
    advice = "the network does not read token_type_ids; check the embeddings"
    if not has_two:
        value = "both sentences of all pairs have the same token type"
        advice = "token_type_ids are lost where rows are read; the second sentence must have 1"
    return finding(
        "token types", value, f"two types, and more than {SAME:g}", advice,
        fail=not has_two or change <= SAME, number=change,
    )  # fmt: skip


def first_loss(subject: Subject) -> Finding | None:
    """The loss of the initial parameters must be that of equal probabilities for all tokens."""
    if subject.start is None:
        return None
    loss, size = subject.total(subject.start, subject.rows).mean, subject.config.model.vocab_size
    low, high = FIRST_LOSS
    distance = loss - math.log(size)
    return finding(
        "first loss", f"{loss:.2f} nats with the initial parameters",
        f"the logarithm of {size:,}, {math.log(size):.2f}, {low:+g} to {high:+g}",
        "check model.initializer_range and the scale of the output layer",
        fail=not low <= distance <= high, number=loss,
    )  # fmt: skip


# Probes that need only losses, the quickest and most specific first.
PROBES: tuple[Probe, ...] = (
    loss_weights, other_labels, attention_sums, padding, neighbors, place_in_the_row, other_rows, later_tokens,
    token_types, context, tied_table, first_loss, word_order,
)  # fmt: skip


def run_all(subject: Subject) -> list[Finding]:
    """Return the results of all probes that apply to ``subject``."""
    return [found for probe in PROBES if (found := probe(subject)) is not None]


def in_float32(config: PretrainConfig) -> PretrainConfig:
    """Return ``config`` with computations in float32, in which equal outputs have equal bits."""
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, dtype="float32"))
