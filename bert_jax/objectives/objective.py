"""The interface of objectives, and helpers that several objectives share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from bert_jax.batch import PRETRAIN_FEATURES, Batch, PretrainSource, feature_shapes
from bert_jax.config import HeadsConfig, ModelConfig, PretrainConfig, RunConfig
from bert_jax.model.canonical import Params, Shapes
from bert_jax.model.dropout import TOKEN_FEATURES, DropoutKey
from bert_jax.model.layers import CACHE
from bert_jax.objectives.display import Display, ReportData, Sample
from bert_jax.objectives.inputs import Inputs
from bert_jax.tokenization import Tokenizer

# Features from which the tokens before masking follow.
TEXT_FEATURES = (
    "input_ids", "token_type_ids", "sequence_ids", "position_ids", "mlm_positions", "mlm_labels", "mlm_weights",
)  # fmt: skip
# (sum, weight) of losses and metrics: added over microbatches, replicas and steps, then divided once.
Sums = dict[str, tuple[jax.Array, jax.Array]]
# Loss, gradients and metric sums of a set of rows, and what the rows carry to the next batch (:class:`Aux`).
Gradients = tuple[jax.Array, Params, Sums, Params | None]
# Trees of arrays by name.
Fixed = Mapping[str, "jax.Array | Fixed | None"]
# Metric sums of a set of rows, and what the rows carry to the next batch.
Summed = tuple[Sums, Params | None]
# What the microbatches add up: loss, metric sums, carried arrays.
Added = tuple[jax.Array, Sums, Params | None]


class Aux(NamedTuple):
    """Inputs of an objective other than parameters and batch. Each part is a tree of arrays, which may be empty."""

    # Arrays that no step changes, whole on every replica: the :attr:`Objective.fixed` of the objective and, in
    # training, "start", the parameters that training started from (0 if randomly initialized; None if the state
    # does not contain them).
    fixed: Fixed
    # Arrays [B, ...] with an entry for each row, which a step replaces: what follows from the same row of the
    # batch before (:meth:`Objective.carried`). None: nothing is carried.
    carried: Params | None = None


@dataclass(frozen=True)
class Replica:
    """Inputs of the gradients of one replica other than the parameters and the rows."""

    aux: Aux
    # Denominator of each loss over the global batch.
    denominators: Mapping[str, jax.Array]
    # Number of microbatches.
    count: int
    # Returns the dropout key of a microbatch (its rows, its number); None: no dropout.
    key_of: Callable[[Batch, jax.Array | int], DropoutKey | None]
    # The mesh axis whose replicas compute the other rows of the batch; None: this replica has all rows.
    axis: str | None
    # Shards a tree of gradients.
    constrain: Callable[[Params], Params]


class Objective(ABC):
    """Base class of objectives. The total loss of a global batch is the sum of (sum / denominator) over all
    losses.

    Subclasses for pretraining extend :class:`PretrainObjective`.
    """

    display: Display = Display()

    def __init__(self, config: RunConfig, model: Any) -> None:
        """Construct the objective of ``model``, a Linen module with the fields ``config``, ``execution``, ``mesh``.

        ``model.init(key, features)`` initializes all parameters, so several networks must be parts of one module.
        """
        self.config, self.model = config, model
        # Trees of arrays by name, which the losses read in ``aux.fixed``; each is whole on every replica.
        self.fixed: dict[str, jax.Array | Fixed | None] = {}

    @property
    def mesh(self) -> Mesh | None:
        """The device mesh on which the model runs; None for one device."""
        return self.model.mesh

    @abstractmethod
    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Return the denominator of each loss over the global batch; called before the first forward pass on the
        batch."""

    @abstractmethod
    def sums(self, params: Params, aux: Aux, batch: Batch, key: DropoutKey | None, *, axis: str | None) -> Summed:
        """Return (sum, weight) of the losses and metrics of some rows of the batch, including ``padding_fraction``,
        and the state that the rows carry to the next batch: a tree like ``aux.carried``, so ``aux.carried`` itself
        if the objective carries nothing.

        Args:
            aux: other inputs; without a "start" and carried arrays in an evaluation.
            key: dropout key; None: no dropout.
            axis: the mesh axis whose replicas compute the other rows of the batch; None: ``batch`` has all rows.
        """

    def carried(self) -> Shapes | None:
        """Return the shapes and dtypes of ``aux.carried``, [B, ...] for the B rows of a global batch; the arrays
        are 0 at the first batch. None (default): the objective carries nothing."""
        return None

    def gradients(self, params: Params, batch: Batch, replica: Replica) -> Gradients:
        """Return the loss, the gradients and the sums of the rows of a replica, added over its microbatches.

        Overridden by losses that compare rows of different microbatches.
        """

        def loss(params: Params, rows: Batch, index: jax.Array | int) -> tuple[jax.Array, Added]:
            key = replica.key_of(rows, index)
            sums, carried = self.sums(params, replica.aux, rows, key, axis=replica.axis)
            total = total_loss(sums, replica.denominators)
            return total, (total, sums, carried)

        return accumulate(loss, params, batch, replica)

    def damaged_rows(self, sequence_ids: jax.Array) -> jax.Array:
        """Return the number of rows that replace damaged records; default: the number of rows without tokens.

        ``sequence_ids`` int32[B, S] is 0 at padding.
        """
        return jnp.sum(jnp.all(sequence_ids == 0, axis=-1))


class PretrainObjective(Objective):
    """Base class of pretraining objectives, which train on shards (files of the data pipeline). A subclass creates
    its model in :meth:`make_model`."""

    config: PretrainConfig
    # Features of ``bert_jax.batch.PRETRAIN_FEATURES`` that are sent to the devices; those of dropout are added.
    features: Sequence[str] = tuple(name for name in PRETRAIN_FEATURES if name != "document_classes")
    # True if :meth:`prepare` reads the training records, so that the step cannot be traced without them.
    reads_records: ClassVar[bool] = False
    # Names of the networks that are trained together, the one to fine-tune first; empty: one network.
    networks: ClassVar[tuple[str, ...]] = ()
    # Inputs that a run reads for the objective in addition to the training records.
    inputs: ClassVar[type[Inputs]] = Inputs

    def __init__(self, config: PretrainConfig, mesh: Mesh | None) -> None:
        super().__init__(config, self.make_model(config, mesh))
        # With packed rows, replaced after the constructor by the shape of the data.
        self.row_shape = config.row_shape
        self.features = tuple(dict.fromkeys((*self.features, *TOKEN_FEATURES)))

    @staticmethod
    @abstractmethod
    def make_model(config: PretrainConfig, mesh: Mesh | None) -> nn.Module:
        """Return the module whose parameters are trained."""

    @classmethod
    def network(
        cls, config: PretrainConfig, model: nn.Module, params: Mapping[str, np.ndarray], name: str
    ) -> tuple[ModelConfig, HeadsConfig, Mapping[str, np.ndarray]]:
        """Return the architecture, the heads and the parameters of the network ``name`` (of :attr:`networks`).

        ``params`` are the canonical parameters of ``model``. The default implementation is for an objective with
        one network: it ignores ``name`` and returns all of ``params``.
        """
        return config.model, getattr(model, "heads", HeadsConfig()), params

    @classmethod
    def placed(cls, config: PretrainConfig, params: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return the parameters of a loaded network with the names that they have in the model. Raises
        ``ValueError`` if the model cannot start from a network."""
        return params

    def prepare(self, source: PretrainSource, tokenizer: Tokenizer) -> None:
        """Read the training records for data that the objective needs before the first step; default: none."""

    @property
    def batch_rows(self) -> int:
        """Number of rows of a global batch."""
        return self.row_shape.rows(self.config.training.global_batch_size)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of each feature of a global batch of ``batch_size`` rows."""
        shapes = self.row_shape.features(batch_size)
        return {name: jax.ShapeDtypeStruct(*shapes[name]) for name in shapes if name in self.features}

    def flops_per_sequence(self) -> float:
        """Return the training FLOPs of a sequence; 0 (default) if unknown, in which case the MFU is null."""
        return 0.0

    def evaluation(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the values that an evaluation reports. For each loss and metric, ``totals`` contains an
        array float64[2]: its sum and its weight over all held-out rows.

        The values must include ``loss``. By default, each value is its sum divided by its weight.
        """
        return {name: float(total / weight) for name, (total, weight) in totals.items() if weight}

    def baselines(self, source: PretrainSource) -> dict[str, float | None]:
        """Return values to compare with the evaluations, which the first and the last one log; only process 0
        computes them. Default: none."""
        return {}

    def samples(self, params: Params, tokenizer: Tokenizer, batch: Mapping[str, np.ndarray]) -> list[Sample]:
        """Return JSON-serializable predictions of ``params`` (host arrays) on a held-out batch; default: none."""
        return []

    def result_lines(self, final: Mapping[str, float], samples: Sequence[Sample]) -> list[str]:
        """Return the lines that are printed at the end of a run. ``final`` contains the values of the last
        evaluation; it is empty if there was no evaluation."""
        return [f"held-out: loss {final['loss']:.4f} nats"] if final else []

    def report_data(self, final: Mapping[str, float], samples: Sequence[Sample]) -> ReportData:
        """Return the content of report_data.json; see ``bert_jax.training.logging.report.write_report``."""
        evaluation = {name: value for name, value in final.items() if name not in ("step", "split")}
        return {"summary": self.result_lines(final, ()), "evaluation": evaluation, "samples": list(samples)}


def total_loss(sums: Sums, denominators: Mapping[str, jax.Array]) -> jax.Array:
    """Return the sum of (sum / denominator) over the losses that ``denominators`` names."""
    return sum((sums[name][0] / total for name, total in denominators.items()), jnp.zeros(()))


def split_microbatches(batch: Batch, count: int) -> dict[str, jax.Array]:
    """Reshape features [B, ...] to [count, B / count, ...]; microbatch i consists of rows i, i + count, ...

    No row moves to another device, so the split needs no communication on any mesh.
    """
    return {
        name: jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1) for name, x in batch.items()
    }


def accumulate(
    loss: Callable[[Params, Batch, jax.Array | int], tuple[jax.Array, Added]],
    params: Params,
    rows: Batch,
    replica: Replica,
) -> Gradients:
    """Split ``rows`` into ``replica.count`` microbatches, differentiate ``loss(params, microbatch, number)`` for
    each in turn, and return the sum of the results.

    ``loss`` returns the value to differentiate, and the loss, the sums and the carried arrays to add up.
    """
    differentiated = jax.grad(loss, has_aux=True)

    def results(found: tuple[Params, Added]) -> Gradients:
        grads, (value, sums, carried) = found
        return value, replica.constrain(grads), sums, carried

    def gradients(rows: Batch, index: jax.Array | int) -> Gradients:
        return results(differentiated(params, rows, index))

    count = replica.count
    if count == 1:
        return results(differentiated(params, rows, 0))
    split = split_microbatches(rows, count)
    shapes = jax.eval_shape(gradients, {name: x[0] for name, x in split.items()}, 0)

    def add(total: Gradients, inputs: tuple[Batch, jax.Array]) -> tuple[Gradients, None]:
        return jax.tree.map(jnp.add, total, gradients(*inputs)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zeros, (split, jnp.arange(count)))[0]


def cache_shapes(model: nn.Module, rows: int) -> Shapes:
    """Return the shapes and dtypes of the collection ``CACHE`` of ``model`` for so many rows, the carried arrays of
    :func:`apply_carried`."""
    batch = {n: jax.ShapeDtypeStruct(s, d) for n, (s, d) in feature_shapes(rows, 8, 1).items()}
    batch["cache_start"] = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.eval_shape(lambda batch: model.init(jax.random.key(0), batch)[CACHE], batch)


def apply_carried(
    model: nn.Module, params: Params, features: Batch, key: DropoutKey | None, carried: Params | None
) -> tuple[Any, Params | None]:
    """Return the output of ``model`` with the state ``carried`` (its collection ``CACHE``) before the first column,
    and the state after the last one. If ``carried`` is None, the state starts at zero, and None is returned."""
    if carried is None:
        return model.apply({"params": params}, features, key), None
    features = {**features, "cache_start": jnp.zeros((), jnp.int32)}
    output, changed = model.apply({"params": params, CACHE: carried}, features, key, mutable=[CACHE])
    return output, changed[CACHE]


def denominator(weights: jax.Array) -> jax.Array:
    """Return the sum of ``weights``, or 1 if all are 0. They must be the weights of the global batch before it is
    split.

    This is the denominator of every loss except softmax_loss with class weights and crf_loss (number of chains).
    """
    total = jnp.sum(weights)
    return jnp.where(total > 0, total, 1.0)


def with_predictions(ids_BxS: jax.Array, batch: Batch, tokens_BxM: jax.Array) -> jax.Array:
    """Return int32[B, S], ``ids`` with ``tokens`` int32[B, M] at the masked positions of ``batch``."""
    positions_BxM = batch["mlm_positions"]
    changes_BxM = tokens_BxM - jnp.take_along_axis(ids_BxS, positions_BxM, axis=1)
    # A sum, so that the fillers (position 0) change nothing if the token at position 0 is masked as well.
    changes_BxM = jnp.where(batch["mlm_weights"] > 0, changes_BxM, 0)
    rows_Bx1 = jnp.arange(len(ids_BxS))[:, None]
    return jnp.asarray(ids_BxS).at[rows_Bx1, positions_BxM].add(changes_BxM)


def weighted_cross_entropy(name: str, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Sums:
    """Return the (sum, weight) pairs ``{name}_loss`` and ``{name}_accuracy`` for float32 ``logits`` [..., classes],
    integer ``labels`` [...] and ``weights`` [...]."""
    # A sum instead of a gather, which crashes the compiler on logits sharded over two axes (design/sharding.md).
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    label_logits = jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    log_sum, largest = log_normalizer(logits)
    nll = log_sum - label_logits
    # The maximum is already part of the loss; argmax would be one more pass over the logits.
    correct = (label_logits >= largest).astype(jnp.float32)
    weight = jnp.sum(weights)
    return {
        f"{name}_loss": (jnp.sum(nll * weights), weight),
        f"{name}_accuracy": (jnp.sum(correct * weights), weight),
    }


@jax.custom_vjp
def log_normalizer(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logarithm of the sum of the exponentials of ``logits``, float32[..., classes], and their maximum,
    each [...]. The maximum has no gradient."""
    return _log_normalizer_forward(logits)[0]


def _two_passes(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the maximum of ``logits`` and the sum of the exponentials of their differences from it."""
    largest = jnp.max(logits, axis=-1)
    return largest, jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1)


def _one_pass(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute :func:`_two_passes` with a running sum (Milakov and Gimelshein 2018), which reads the logits once."""

    def join(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        largest = jnp.maximum(left[0], right[0])
        return largest, left[1] * jnp.exp(left[0] - largest) + right[1] * jnp.exp(right[0] - largest)

    # Not -inf: the difference of two would be NaN.
    start = (jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0))
    finite = jnp.maximum(logits, start[0])
    ones = jnp.where(logits > start[0], jnp.float32(1), jnp.float32(0))
    largest, total = jax.lax.reduce((finite, ones), start, join, (logits.ndim - 1,))
    return largest, total


def _log_normalizer_forward(logits: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    largest, total = jax.lax.platform_dependent(logits, cuda=_one_pass, default=_two_passes)
    return (largest + jnp.log(total), largest), (logits, largest, total)


def _log_normalizer_backward(
    saved: tuple[jax.Array, ...], gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array]:
    logits, largest, total = saved
    return ((gradients[0] / total)[..., None] * jnp.exp(logits - largest[..., None]),)


log_normalizer.defvjp(_log_normalizer_forward, _log_normalizer_backward)


def z_loss(name: str, coefficient: float, logits: jax.Array, weights: jax.Array) -> Sums:
    """Return the (sum, weight) pair ``{name}_z_loss`` of ``coefficient`` times the squared logarithm of the softmax
    normalizer (Chowdhery et al. 2022, section 5), for float32 ``logits`` [..., classes] and ``weights`` [...].

    It has the denominator of the cross-entropy of the same logits. The result is empty if ``coefficient`` is 0.
    """
    if not coefficient:
        return {}
    squares = jnp.square(log_normalizer(logits)[0])
    return {f"{name}_z_loss": (coefficient * jnp.sum(squares * weights), jnp.sum(weights))}


def padding_sums(sequence_ids: jax.Array) -> Sums:
    """Return ``padding_fraction``, the share of padding among all tokens; ``sequence_ids`` is 0 at padding."""
    padding = (sequence_ids == 0).astype(jnp.float32)
    return {"padding_fraction": (jnp.sum(padding), jnp.asarray(padding.size, jnp.float32))}
