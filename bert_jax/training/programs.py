"""Programs of a run: the training step, compiled ahead of time, and the evaluation step."""

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh

from bert_jax.model import from_canonical
from bert_jax.model.canonical import abstract_params, canonical_shapes
from bert_jax.objectives.objective import Objective, PretrainObjective, TaughtObjective
from bert_jax.optim import make_optimizer
from bert_jax.parallel import batch_sharding, check_batches
from bert_jax.parallel.hardware import TPUS
from bert_jax.training.memory import device_bytes, explain_memory, gib, step_advice
from bert_jax.training.state import TrainState, abstract_state, compute_shardings, parameter_count
from bert_jax.training.step import make_eval_step, make_train_step

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


@struct.dataclass
class StepMetrics:
    """Metrics of one step, packed into one float32 array.

    The host therefore reads them in one transfer instead of about twenty.
    """

    values: Any  # float32[number of metrics]
    tree: jax.tree_util.PyTreeDef = struct.field(pytree_node=False)

    @classmethod
    def pack(cls, metrics: Mapping[str, Any]) -> "StepMetrics":
        """Pack a tree of scalar ``metrics``; called inside the compiled step."""
        leaves, tree = jax.tree.flatten(metrics)
        return cls(jnp.stack([leaf.astype(jnp.float32) for leaf in leaves]), tree)

    def unpack(self) -> dict[str, Any]:
        """Wait for the step and return its metrics as floats, in a tree with the original structure."""
        metrics: dict[str, Any] = jax.tree.unflatten(self.tree, np.asarray(self.values).tolist())
        return metrics


StepFunction = Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, StepMetrics]]


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
    abstract = abstract_state(config, model, optimizer, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.params)
    step = make_train_step(objective, optimizer, shardings=shardings, **step_options)
    return TrainPrograms(step, abstract, objective, optimizer)


def pretraining_batch(objective: PretrainObjective, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes, dtypes and shardings of the features of a global batch of ``batch_size`` rows."""
    assert objective.mesh is not None
    return with_shardings(objective.batch_shapes(batch_size), objective.mesh)


def with_shardings(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a ``jax.ShapeDtypeStruct``, sharded over ``mesh``, for each feature of a global batch.

    The features are arrays or ``jax.ShapeDtypeStruct`` objects.
    """
    sharding = batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in batch.items()}


def _abstract_teacher(objective: TaughtObjective) -> Any:
    """Return the shapes, dtypes and shardings of the parameters of the teacher."""
    assert objective.mesh is not None
    if objective.teacher is None:
        plan = "bert-jax plan has no teacher, so plan the student with objective.name masked_lm"
        raise ValueError(f"--teacher: missing; name the model that teaches; {plan}")
    shapes = nn.unbox(abstract_params(objective.teacher))
    shardings = compute_shardings(objective.teacher, objective.mesh)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


class TrainPrograms:
    """Programs of one objective on its mesh: the training step, compiled ahead of time for each batch shape, and
    the evaluation step."""

    def __init__(
        self,
        step: Callable[..., Any],
        abstract: TrainState,
        objective: Objective,
        optimizer: optax.GradientTransformation,
    ) -> None:
        assert objective.mesh is not None
        self.objective, self.abstract, self.optimizer = objective, abstract, optimizer
        self.mesh, self.model = objective.mesh, objective.model
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

        def packed(state: TrainState, batch: Any, taught: Any = None) -> tuple[TrainState, StepMetrics]:
            state, metrics = step(state, batch, taught)
            return state, StepMetrics.pack(metrics)

        packed.__name__ = "train_step"  # the name in a profiler's trace
        self._step = jax.jit(
            packed, donate_argnums=0, out_shardings=(shardings, None), compiler_options=compiler_options(self.mesh)
        )
        self._eval_step = jax.jit(make_eval_step(objective))
        self._gather = jax.jit(lambda params: params, out_shardings=compute_shardings(self.model, self.mesh))
        self._compiled: dict[tuple[Any, ...], StepFunction] = {}
        self.compile_seconds = 0.0
        self.memory: Any = None
        # Parameters of the teacher (set_teacher), or their shapes; None: no teacher.
        self.taught: Any = None
        if isinstance(objective, TaughtObjective) and objective.stored is None:
            self.taught = _abstract_teacher(objective)

    @property
    def parameter_count(self) -> int:
        """Number of canonical (unpadded) parameters."""
        return parameter_count(self.abstract.params, self.objective.config.model.vocab_size)

    def lower(self, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """Lower the training step for the shapes of ``batch``; the result has the method ``compile``."""
        inputs = self.abstract, with_shardings(batch, self.mesh)
        if self.taught is None:
            return self._step.lower(*inputs)
        return self._step.lower(*inputs, jax.tree.map(_shape_of, self.taught))

    def set_teacher(self, params: Mapping[str, np.ndarray]) -> None:
        """Copy the canonical parameters of the teacher to the devices."""
        assert isinstance(self.objective, TaughtObjective)
        teacher, like = self.objective.teacher, self.taught
        vocab_size, names = teacher.config.vocab_size, canonical_shapes(teacher)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
        place = jax.jit(lambda params: from_canonical(params, like, vocab_size), out_shardings=shardings)
        self.taught = place({name: params[name] for name in names})

    def step_for(self, batch: Mapping[str, Any]) -> StepFunction:
        """Return the training step compiled for the shapes of ``batch``.

        The values of ``batch`` are global arrays or ``jax.ShapeDtypeStruct`` objects.
        """
        key = tuple((name, x.shape) for name, x in sorted(batch.items()))
        if key not in self._compiled:
            began = time.perf_counter()
            # Only the size of the state is known before the step is compiled.
            what = f"the training step (its state alone needs {gib(device_bytes(self.abstract))})"
            with explain_memory(what, step_advice(self.objective.config)):
                compiled = self.lower(batch).compile()
            self.compile_seconds += time.perf_counter() - began
            self.memory = compiled.memory_analysis()
            self._compiled[key] = self._with_teacher(compiled)
        return self._compiled[key]

    def eval_step(self, params: Any, batch: Mapping[str, jax.Array]) -> Any:
        """Return the sums of :func:`bert_jax.training.step.make_eval_step`."""
        return self._eval_step(params, batch, self.taught)

    def _with_teacher(self, compiled: Callable[..., Any]) -> StepFunction:
        return compiled if self.taught is None else lambda state, batch: compiled(state, batch, self.taught)

    def gather(self, state: TrainState) -> Any:
        """Return the parameters to evaluate, gathered on each replica: the moving average if ``state`` has one,
        else the trained parameters."""
        return self._gather(state.params if state.ema is None else state.ema)
