"""Ahead-of-time compilation of the real training step for TPUs or GPUs that need not be attached."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bert_jax.config import PretrainConfig
from bert_jax.contrib.planner.arithmetic import program_memory
from bert_jax.contrib.planner.topology import Topology, prepare_environment, topology_devices


@dataclass(frozen=True)
class CompiledStep:
    """Memory use and optimized program of a training step, as the compiler reports them. Bytes are per JAX
    device."""

    # State and batch, which are in memory during the whole step.
    argument_bytes: int
    # New state and metrics. The new state overwrites the old one, so the peak excludes the new state.
    output_bytes: int
    # Gradients, activations and other temporary arrays of the step.
    temporary_bytes: int
    # Arguments, outputs that do not replace an argument, temporaries and the program.
    peak_bytes: int
    # Memory that a program may use.
    hbm_bytes: int
    compile_seconds: float
    # Text of the optimized program; empty if the step does not fit.
    hlo: str
    mesh_shape: dict[str, int]

    @property
    def fits(self) -> bool:
        """True if the step fits into the memory of a device."""
        return bool(self.hlo) and self.peak_bytes <= self.hbm_bytes


def compile_step(
    config: PretrainConfig, topology: Topology, progress: Callable[[str], None] = lambda line: None
) -> CompiledStep:
    """Lower and compile the training step of ``config`` for ``topology``. If the step needs too much
    memory, ``fits`` of the result is False. ``progress`` is called with a line of text before the compilation.

    Raises ``ValueError`` if the mesh or batch does not fit the slice, or if the compiler is not installed.
    """
    prepare_environment()
    import jax

    from bert_jax.objectives.registry import objective_class
    from bert_jax.parallel import make_mesh
    from bert_jax.training.memory import device_bytes
    from bert_jax.training.programs import pretraining_batch, train_programs

    mesh = make_mesh(config.mesh, topology_devices(topology))
    objective = objective_class(config.objective)(config, mesh)
    if objective.reads_records:
        raise ValueError(
            f"objective.name: {config.objective.name!r} cannot be planned, because its step reads counts of the "
            "training records; plan another objective"
        )
    programs = train_programs(objective)
    batch = pretraining_batch(objective, config.training.global_batch_size)
    arguments = device_bytes((programs.abstract, batch))
    hbm = program_memory(topology)
    progress(f"compiling the training step for {topology.name}, which may take minutes")
    began = time.perf_counter()
    # The kernels of GPUs are lowered for the device that the current mesh names.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if not topology.is_tpu else contextlib.nullcontext():
        lowered = programs.lower(batch)
    try:
        with _no_cache():
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise
        seconds = time.perf_counter() - began
        # One compiler message states the bytes of the temporaries, another the bytes of the complete program.
        temporary, peak = (needed[0], arguments + needed[0]) if needed[1] else (needed[0] - arguments, needed[0])
        return CompiledStep(arguments, 0, temporary, peak, hbm, seconds, "", dict(mesh.shape))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    peak = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    )  # fmt: skip
    hlo = text if topology.is_tpu or peak <= hbm else ""
    return CompiledStep(
        memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes, peak, hbm,
        time.perf_counter() - began, hlo, dict(mesh.shape),
    )  # fmt: skip


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Disable the compilation cache of JAX, which cannot load programs for absent devices."""
    import jax

    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def needed_bytes(message: str) -> tuple[int, bool] | None:
    """Return the number of bytes that a program needs according to the error ``message`` of the compiler, and True
    if the number includes only temporary arrays. Return None if the message reports any other error."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    temporaries = re.search(r"HLO temporaries \(([\d.]+)([KMGT]?)\)", message)
    found = temporaries or re.search(r"Used ([\d.]+)([KMGT]?) of", message)
    if found is None:
        return None
    return round(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")), temporaries is not None
