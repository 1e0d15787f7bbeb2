"""The training step compiled ahead of time, and what to say when something does not fit the device."""

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from bert_jax.batch import feature_shapes
from bert_jax.config import PretrainConfig, RunConfig
from bert_jax.model import BertForPretraining, BertModel
from bert_jax.optim import make_optimizer, make_schedule
from bert_jax.parallel import batch_sharding, check_batches
from bert_jax.training.loop import StepFunction
from bert_jax.training.state import TrainState, abstract_state, compute_shardings, make_prng_key, state_shardings
from bert_jax.training.step import make_train_step

# Gradients are summed in several collectives as the backward pass yields them, beside its products, instead of in
# one after it. The compiler does so only when sums are not joined to ones of more than this many bytes. On v5e
# alone: v4 has too little fast memory for it (docs/design/tpu-performance.md).
_V5E_OPTIONS = {
    "xla_enable_async_all_gather": "true",
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_jf_crs_combiner_threshold_in_bytes": "1000000",
}


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Options for compiling a training step on ``mesh``; what ``LIBTPU_INIT_ARGS`` sets is left as it says."""
    if mesh.devices.flat[0].device_kind not in ("TPU v5 lite", "TPU v5e"):
        return {}
    given = set(re.findall(r"--(\w+)", os.environ.get("LIBTPU_INIT_ARGS", "")))
    return {name: value for name, value in _V5E_OPTIONS.items() if name not in given}


def train_programs(config: PretrainConfig, mesh: Mesh) -> "TrainPrograms":
    """Model, optimizer, state and step of ``config`` on ``mesh``, nothing allocated or compiled yet.

    The devices of ``mesh`` need not be there: those of ``jax.experimental.topologies`` compile as well. Raises
    ``ValueError`` when a batch of the run cannot be cut evenly over the mesh.
    """
    check_batches(config.training, mesh.shape)
    return make_programs(config, BertForPretraining(config.model, config.execution, config.has_nsp, mesh))


def make_programs(
    config: RunConfig, model: BertModel, *, with_start: bool = False, joining: Any = None, **step_options: Any
) -> "TrainPrograms":
    """Optimizer, state and step of ``model`` (with its mesh) as ``config`` says. ``with_start``: the state keeps
    the parameters that training started from. ``joining``: see :func:`bert_jax.optim.make_optimizer`;
    ``step_options``: see :func:`bert_jax.training.step.make_train_step`."""
    training, shard_optimizer, mesh = config.training, config.mesh.shard_optimizer, model.mesh
    optimizer = make_optimizer(config.optimizer, joining)
    step = make_train_step(
        model,
        optimizer,
        make_schedule(config.optimizer, training.num_steps),
        config.optimizer,
        training.accumulation_steps,
        make_prng_key(config.execution, training.seed),
        reduction_dtype=training.gradient_reduction_dtype,
        shardings=state_shardings(model, mesh, shard_optimizer=shard_optimizer),
        **step_options,
    )
    abstract = abstract_state(
        model, optimizer, mesh, with_ema=config.optimizer.ema_decay > 0, with_start=with_start,
        shard_optimizer=shard_optimizer,
    )  # fmt: skip
    return TrainPrograms(step, abstract, config, mesh, model, optimizer)


def pretraining_batch(config: PretrainConfig, mesh: Mesh, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a global batch of ``batch_size`` rows."""
    shapes = feature_shapes(batch_size, config.data.seq_length, config.data.max_predictions)
    return with_shardings({name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}, mesh)


def with_shardings(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a global batch (of arrays or the like), cut over the mesh."""
    sharding = batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in batch.items()}


class TrainPrograms:
    """What a run computes, and its training steps compiled ahead of time, one per shape of batch. A step's metrics
    come as one array, which is one transfer to the host instead of twenty; :meth:`unpack` takes it apart."""

    def __init__(
        self,
        step: Callable[..., Any],
        abstract: TrainState,
        config: RunConfig,
        mesh: Mesh,
        model: BertModel,
        optimizer: optax.GradientTransformation,
    ) -> None:
        self.abstract, self.config, self.mesh = abstract, config, mesh
        self.model, self.optimizer = model, optimizer
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        self._metrics: Any = None  # their tree, known once a step is traced

        def packed(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
            state, metrics = step(state, batch)
            leaves, self._metrics = jax.tree.flatten(metrics)
            return state, jnp.stack([leaf.astype(jnp.float32) for leaf in leaves])

        packed.__name__ = "train_step"  # the name in a profiler's trace
        self._step = jax.jit(
            packed, donate_argnums=0, out_shardings=(shardings, None), compiler_options=compiler_options(mesh)
        )
        self._gather = jax.jit(lambda params: params, out_shardings=compute_shardings(model, mesh))
        self._compiled: dict[tuple[Any, ...], StepFunction] = {}
        self.compile_seconds = 0.0
        self.memory: Any = None

    def lower(self, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """The step for batches of the shapes of ``batch``, ready for ``.compile()``."""
        return self._step.lower(self.abstract, with_shardings(batch, self.mesh))

    def step_for(self, batch: Mapping[str, Any]) -> StepFunction:
        """The compiled step for batches (global arrays, or their shapes) of the shapes of ``batch``."""
        key = tuple((name, x.shape) for name, x in sorted(batch.items()))
        if key not in self._compiled:
            began = time.perf_counter()
            # Before it is compiled, what it needs is known at the least.
            least = state_bytes(self.abstract)
            what = f"the training step (its state alone takes {_gib(least)})"
            with explain_memory(what, step_advice(self.config)):
                compiled = self.lower(batch).compile()
            self.compile_seconds += time.perf_counter() - began
            self.memory = compiled.memory_analysis()
            self._compiled[key] = compiled
        return self._compiled[key]

    def gather(self, params: Any) -> Any:
        """Parameters, or their average, of a state as layers compute with them: whole on each replica."""
        return self._gather(params)

    def unpack(self, values: np.ndarray) -> dict[str, Any]:
        """The metrics of a step, as :func:`training.step.make_train_step` names them, from their array."""
        metrics: dict[str, Any] = jax.tree.unflatten(self._metrics, values.tolist())
        return metrics


class OutOfMemory(ValueError):
    """A device has too little memory; the message is one line with what needed how much and what to change."""


@contextlib.contextmanager
def explain_memory(what: str, advice: str, needed: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Raise :class:`OutOfMemory` when a device runs out of memory inside the block. ``what`` was done,
    ``needed`` tells its bytes per device where they are known, ``advice`` what to change."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise out_of_memory_error(error, what, advice, needed()) from None


def out_of_memory_error(error: Exception, what: str, advice: str, needed: int | None) -> Exception:
    """:class:`OutOfMemory` for a device out of memory; any other error is returned as it is."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return error
    statistics = jax.local_devices()[0].memory_stats() or {}
    available = statistics.get("bytes_limit")
    # What compilers and allocators say: "Used 17.89G of 15.48G hbm", "allocate 2.00GiB", "allocating 123 bytes".
    total = re.search(rf"Used {_AMOUNT} of {_AMOUNT}", text)
    asked = re.search(rf"(?:allocat\w*|reserve) {_AMOUNT}", text)
    if total:
        needed, available = _bytes(total[1], total[2]), _bytes(total[3], total[4])
    amounts = [f"{_gib(needed)} per device" if needed else "more per device than there is"]
    if asked and not total:
        amounts.append(f"the last {_gib(_bytes(asked[1], asked[2]))} of it were refused")
    amounts.append(f"available {_gib(available)}" if available else "available unknown")
    return OutOfMemory(f"out of device memory: {what} needs {', '.join(amounts)}; {advice}")


_AMOUNT = r"([\d.]+\d|\d+) ?([KMGT]?)"


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** " KMGT".index(unit or " "))


def _gib(amount: int) -> str:
    return f"{amount / 2**30:,.1f} GiB" if amount >= 2**26 else f"{amount:,} bytes"


def step_bytes(memory: Any) -> int | None:
    """Peak bytes per device of a compiled program, None before it is compiled."""
    if memory is None:
        return None
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return peak - memory.alias_size_in_bytes


def state_bytes(abstract: TrainState) -> int:
    """Bytes of the state on one device."""
    leaves = jax.tree.leaves(abstract)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def step_advice(config: RunConfig) -> str:
    """What to change when the training step does not fit."""
    training, execution = config.training, config.execution
    remat = "" if execution.remat == "full" else f"set execution.remat (now {execution.remat}) to full, "
    dtype = "" if execution.dtype == "bfloat16" else "set execution.dtype bfloat16, "
    return (
        f"raise training.accumulation_steps (now {training.accumulation_steps}), lower training.global_batch_size "
        f"(now {training.global_batch_size}) or {config.SEQ_LENGTH_OPTION}, {remat}{dtype}or use more devices"
    )


def state_advice(config: RunConfig) -> str:
    """What to change when parameters and optimizer state do not fit."""
    average = ", set optimizer.ema_decay 0" if config.optimizer.ema_decay else ""
    return (
        f"cut it over more devices with mesh.fsdp (now {config.mesh.fsdp}){average}, or train a smaller model "
        "(model.num_layers, model.hidden_size)"
    )
