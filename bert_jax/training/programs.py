"""Programs of a run: the training step, compiled ahead of time, and the evaluation step."""

import functools
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.batch import Batch, BatchShapes
from bert_jax.config.schema import require
from bert_jax.model.canonical import Params, Shapes
from bert_jax.objectives.objective import Fixed, Objective, PretrainObjective, Sums
from bert_jax.optim import decay_mask, make_optimizer
from bert_jax.parallel import batch_sharding, check_batches
from bert_jax.parallel.hardware import TPUS
from bert_jax.training.memory import device_bytes, explain_memory, gib, step_advice, step_bytes
from bert_jax.training.state import (
    TrainState,
    abstract_state,
    compute_shardings,
    key_words,
    make_prng_key,
    parameter_count,
)
from bert_jax.training.step import StepMetrics, make_eval_step, make_train_step

# Sum gradients in several collectives during the backward pass instead of in one collective after it. The compiler
# does so only if the size of a combined collective is limited (last option, in bytes). Only for v5e, v5p and v6e:
# v4 has too little fast memory, and TPU7x has the same program without them (docs/design/tpu-performance.md).
_COLLECTIVE_OPTIONS: dict[str, str | bool] = {
    "xla_enable_async_all_gather": "true",
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_jf_crs_combiner_threshold_in_bytes": "1000000",
}
# Chips, as in bert_jax.parallel.hardware, that are compiled with them.
_WITH_COLLECTIVE_OPTIONS = ("TPU v5e", "TPU v5p", "TPU v6e")

# cuBLAS for all products: it adds the gradient of a residual in the product, which Triton's products leave to a
# pass through memory (docs/design/gpu-performance.md).
_NVIDIA_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """Return the compiler options of the training step on ``mesh``, except those that ``LIBTPU_INIT_ARGS`` or
    ``XLA_FLAGS`` sets."""
    kind = mesh.devices.flat[0].device_kind
    is_listed = any(TPUS.get(kind) == TPUS[name] for name in _WITH_COLLECTIVE_OPTIONS)
    options = _COLLECTIVE_OPTIONS if is_listed else _NVIDIA_OPTIONS if "NVIDIA" in kind else {}
    variable = "XLA_FLAGS" if "NVIDIA" in kind else "LIBTPU_INIT_ARGS"
    own = set(re.findall(r"--(\w+)", os.environ.get(variable, "")))
    return {name: value for name, value in options.items() if name not in own}


StepFunction = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


def train_programs(objective: PretrainObjective) -> "TrainPrograms":
    """Return the programs that pretrain ``objective`` on its mesh, without allocating or compiling anything.

    The devices of the mesh need not be attached to this machine (see ``jax.experimental.topologies``). Raises
    ``ValueError`` if the rows of a batch cannot be divided equally over the mesh.
    """
    assert objective.mesh is not None
    check_batches(objective.config.training, objective.mesh.shape, objective.row_shape.rows)
    return make_programs(objective)


def make_programs(objective: Objective, *, unfreeze_updates: Any = None, **step_options: Any) -> "TrainPrograms":
    """Return the programs that train and evaluate ``objective`` on its mesh.

    ``unfreeze_updates`` is passed to :func:`bert_jax.optim.make_optimizer`, and ``step_options`` are passed to
    :func:`bert_jax.training.step.make_train_step`.
    """
    config, model, mesh = objective.config, objective.model, objective.mesh
    assert mesh is not None
    optimizer = make_optimizer(config.optimizer, unfreeze_updates, config.model.vocab_size)
    abstract = abstract_state(config, model, optimizer, mesh, _carried(objective))
    decay_mask(abstract.params, config.optimizer.without_decay)  # raises for a name that no parameter has
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.params)
    step = make_train_step(objective, optimizer, shardings=shardings, **step_options)
    return TrainPrograms(step, abstract, objective, optimizer)


def _carried(objective: Objective) -> Shapes | None:
    """Return ``objective.carried()``. Raises ``ValueError`` for carried arrays and batches of other rows."""
    carried, training = objective.carried(), objective.config.training
    if carried is not None:
        suffix = "with an objective that carries arrays from batch to batch"
        steps, ramp = training.accumulation_steps, training.batch_ramp
        require(steps == 1, "training.accumulation_steps", steps, f"1 {suffix}")
        require(not ramp, "training.batch_ramp", ramp, f"none {suffix}")
    return carried


def pretraining_batch(objective: PretrainObjective, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes, dtypes and shardings of the features of a global batch of ``batch_size`` rows."""
    assert objective.mesh is not None
    return with_shardings(objective.batch_shapes(batch_size), objective.mesh)


def with_shardings(batch: BatchShapes | Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a ``jax.ShapeDtypeStruct``, sharded over ``mesh``, for each feature of a global batch.

    The features are arrays or ``jax.ShapeDtypeStruct`` objects.
    """
    sharding = batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in batch.items()}


class TrainPrograms:
    """Programs of one objective on its mesh: the training step, compiled ahead of time for each batch shape, and
    the evaluation step."""

    def __init__(
        self,
        step: Callable[[TrainState, Batch, Fixed, jax.Array], tuple[TrainState, StepMetrics]],
        abstract: TrainState,
        objective: Objective,
        optimizer: optax.GradientTransformation,
    ) -> None:
        assert objective.mesh is not None
        self.objective, self.abstract, self.optimizer = objective, abstract, optimizer
        self.mesh, self.model = objective.mesh, objective.model
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._step = jax.jit(
            step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=compiler_options(self.mesh)
        )
        self._eval_step = jax.jit(make_eval_step(objective))
        self._gather = jax.jit(lambda params: params, out_shardings=compute_shardings(self.model, self.mesh))
        self._compiled: dict[tuple[tuple[str, tuple[int, ...]], ...], StepFunction] = {}
        self.compile_seconds = 0.0
        # Peak memory of the last compiled step in bytes per device; None: unknown.
        self.step_bytes: int | None = None

    @property
    def parameter_count(self) -> int:
        """Number of canonical (unpadded) parameters."""
        return parameter_count(self.abstract.params, self.objective.config.model.vocab_size)

    def lower(self, batch: BatchShapes) -> jax.stages.Lowered:
        """Lower the training step for the shapes of ``batch``; the result has the method ``compile``."""
        words = self._seed_words()
        of_seed = jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=self._replicated)
        return self._step.lower(
            self.abstract, with_shardings(batch, self.mesh), fixed=self.objective.fixed, seed_words=of_seed
        )

    def step_for(self, batch: BatchShapes) -> StepFunction:
        """Return the training step compiled for the shapes of ``batch``.

        Of the values of ``batch``, only shape and dtype are read.
        """
        key = tuple((name, x.shape) for name, x in sorted(batch.items()))
        if key not in self._compiled:
            began = time.perf_counter()
            # Only the size of the state is known before the step is compiled.
            what = f"the training step (its state alone needs {gib(device_bytes(self.abstract))})"
            with explain_memory(what, step_advice(self.objective.config)):
                compiled = self.lower(batch).compile()
            self.compile_seconds += time.perf_counter() - began
            self.step_bytes = step_bytes(compiled)
            words = self._seed_words()
            placed = jax.make_array_from_callback(words.shape, self._replicated, lambda index: words[index])
            self._compiled[key] = functools.partial(compiled, fixed=self.objective.fixed, seed_words=placed)
        return self._compiled[key]

    def _seed_words(self) -> np.ndarray:
        config = self.objective.config
        return key_words(make_prng_key(config.execution, config.training.seed))

    def eval_step(self, params: Params, batch: Batch) -> Sums:
        """Return the sums of :func:`bert_jax.training.step.make_eval_step`."""
        return self._eval_step(params, batch, self.objective.fixed)

    def gather(self, state: TrainState) -> Params:
        """Return the parameters to evaluate, gathered on each replica: the moving average if ``state`` has one,
        else the trained parameters."""
        return self._gather(state.params if state.ema is None else state.ema)
