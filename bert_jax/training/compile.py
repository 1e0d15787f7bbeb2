"""The training step compiled ahead of time, and what to say when it does not fit the device."""

import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.batch import feature_shapes
from bert_jax.config import PretrainConfig
from bert_jax.parallel import batch_sharding
from bert_jax.training.loop import StepFunction
from bert_jax.training.state import TrainState


class TrainPrograms:
    """Training steps compiled ahead of time, one per batch size."""

    def __init__(self, step: Callable[..., Any], abstract: TrainState, config: PretrainConfig, mesh: Mesh) -> None:
        self._abstract, self._config, self._mesh = abstract, config, mesh
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        self._step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        self._compiled: dict[int, StepFunction] = {}
        self.compile_seconds = 0.0
        self.memory: Any = None

    def step_for(self, batch_size: int) -> StepFunction:
        """The compiled step for batches of ``batch_size`` rows."""
        if batch_size not in self._compiled:
            data = self._config.data
            sharding = batch_sharding(self._mesh)
            batch = {
                name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
                for name, (shape, dtype) in feature_shapes(
                    batch_size, data.seq_length, data.max_predictions
                ).items()
            }
            began = time.perf_counter()
            try:
                compiled = self._step.lower(self._abstract, batch).compile()
            except jax.errors.JaxRuntimeError as error:
                raise out_of_memory_error(error, None, self._config) from None
            self.compile_seconds = time.perf_counter() - began
            self.memory = compiled.memory_analysis()
            self._compiled[batch_size] = compiled
        return self._compiled[batch_size]


def out_of_memory_error(error: Exception, memory: Any, config: PretrainConfig) -> Exception:
    """One line for a device out of memory: needed against available bytes, and what to change. Any other error
    is returned as it is."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    needed = "more than it has"
    if memory is not None:
        peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        needed = f"{(peak - memory.alias_size_in_bytes) / 2**30:.1f} GiB"
    statistics = jax.local_devices()[0].memory_stats() or {}
    limit = statistics.get("bytes_limit")
    available = f"{limit / 2**30:.1f} GiB" if limit else "unknown"
    training = config.training
    return ValueError(
        f"out of device memory: the training step needs {needed} per device, available {available}; raise "
        f"training.accumulation_steps (now {training.accumulation_steps}), lower training.global_batch_size (now "
        f"{training.global_batch_size}) or data.seq_length, set execution.remat (now {config.execution.remat}) to "
        "attention or full, set execution.dtype bfloat16, or use more devices"
    )
