"""Plans: predicted memory, time and cost of a recipe on a slice."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bert_jax.config import PretrainConfig
from bert_jax.config.pretrain import DataConfig
from bert_jax.config.schema import require
from bert_jax.contrib.planner.arithmetic import program_memory, rows_per_device, step_seconds, step_temporary_bytes
from bert_jax.contrib.planner.compiled import CompiledStep, compile_step
from bert_jax.contrib.planner.cycles import step_cost
from bert_jax.contrib.planner.gpu_devices import can_compile
from bert_jax.contrib.planner.sharding_table import abstract_mesh, abstract_train_state, batch_bytes
from bert_jax.contrib.planner.topology import Topology
from bert_jax.model.flops import training_flops_per_sequence
from bert_jax.objectives.registry import objective_class
from bert_jax.parallel.mesh import check_batches, mesh_sizes
from bert_jax.training.memory import device_bytes

_GPU_COMPILER = "with pip install 'bert_jax[gpu]', a plan compiles the step instead; no GPU is needed"
# Fractions of the step time above which a plan warns about communication and about the random bits of dropout.
_MUCH_COMMUNICATION, _MUCH_DROPOUT = 0.3, 0.05


@dataclass(frozen=True)
class Plan:
    """Predictions for one recipe on one slice. docs/planning.md explains every field; byte counts are per JAX
    device."""

    topology: str
    chips: int
    devices: int
    hosts: int
    mesh: dict[str, int]
    # compiled (from the compiled step) or arithmetic.
    method: str
    scan_layers: bool
    remat: str
    global_batch_size: int
    accumulation_steps: int
    batch_per_device: float
    fits: bool
    peak_bytes: int
    hbm_bytes: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    # Times are None for a step that does not fit.
    predicted_step_seconds: float | None
    predicted_mfu: float | None
    tokens_per_second: float | None
    sequences_per_second: float | None
    num_steps: int
    hours: float | None
    chip_hours: float | None
    cost: float | None
    # Fractions of predicted_step_seconds: attention, mlm_head, dropout, optimizer, communication, rest.
    shares: dict[str, float] | None
    communication_seconds: float | None
    # Instructions without a cycle estimate by the compiler: their share of the operations and of the time.
    unestimated_share: float = 0.0
    unestimated_time_share: float = 0.0
    unestimated: dict[str, float] = field(default_factory=dict)
    # What the kernels of a GPU read and write; 0: unknown.
    moved_bytes: float = 0.0
    compile_seconds: float = 0.0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """Options of a plan that are not part of the recipe."""

    price_per_chip_hour: float | None = None
    # Number of steps that earlier phases completed.
    first_step: int = 0


def make_plan(
    config: PretrainConfig, topology: Topology, asked: Asked, progress: Callable[[str], None] = lambda line: None
) -> Plan:
    """Return the plan of ``config`` on ``topology``. Raises ``ValueError`` for a batch or mesh that does not fit
    the slice."""
    check_batches(config.training, mesh_sizes(config.mesh, topology.num_devices))
    if not topology.is_tpu and not can_compile():
        plan = arithmetic_plan(config, topology, asked)
        return dataclasses.replace(plan, warnings=(*plan.warnings, _GPU_COMPILER))
    return plan_compiled(config, topology, asked, compile_step(config, topology, progress))


def plan_compiled(config: PretrainConfig, topology: Topology, asked: Asked, step: CompiledStep) -> Plan:
    """Return the plan of ``config``, computed from ``step``, its compiled training step."""
    names = ("peak_bytes", "hbm_bytes", "argument_bytes", "output_bytes", "temporary_bytes", "compile_seconds")
    measured: dict[str, Any] = {"method": "compiled", "fits": step.fits}
    measured |= {name: getattr(step, name) for name in names}
    if not step.fits:
        return _plan(config, topology, asked, step.mesh_shape, None, **measured)
    cost = step_cost(step.hlo, topology.chip, step.mesh_shape, topology.shape)
    loops = cost.unknown_loops
    return _plan(
        config, topology, asked, step.mesh_shape, cost.parts,
        unestimated_share=sum(share for _, share in cost.unestimated),
        unestimated_time_share=cost.unestimated_seconds / cost.seconds, unestimated=dict(cost.unestimated),
        moved_bytes=cost.moved_bytes,
        warnings=(f"loops of unknown length, counted once: {', '.join(loops)}",) if loops else (), **measured,
    )  # fmt: skip


def arithmetic_plan(config: PretrainConfig, topology: Topology, asked: Asked) -> Plan:
    """Return the plan of ``config``, computed from arithmetic estimates, which are available for every slice and
    require no device or compiler."""
    mesh = mesh_sizes(config.mesh, topology.num_devices)
    # Keep only the options on which the state depends, so that a search computes few states.
    same_state = PretrainConfig(
        model=config.model, optimizer=config.optimizer, mesh=config.mesh,
        execution=dataclasses.replace(config.execution, remat="none"),
        data=DataConfig(seq_length=8, next_sentence=config.data.next_sentence),
    )  # fmt: skip
    held = _state_bytes(same_state, topology.num_devices)
    arguments = held + batch_bytes(config, abstract_mesh(mesh))
    temporary = step_temporary_bytes(config, topology, mesh)
    hbm = program_memory(topology)
    fits = arguments + temporary <= hbm
    return _plan(
        config, topology, asked, mesh, step_seconds(config, topology, mesh) if fits else None,
        method="arithmetic", fits=fits, peak_bytes=arguments + temporary, hbm_bytes=hbm,
        argument_bytes=arguments, output_bytes=held, temporary_bytes=temporary,
    )  # fmt: skip


@functools.cache
def _state_bytes(config: PretrainConfig, num_devices: int) -> int:
    return device_bytes(abstract_train_state(config, abstract_mesh(mesh_sizes(config.mesh, num_devices))))


def _plan(
    config: PretrainConfig,
    topology: Topology,
    asked: Asked,
    mesh: Mapping[str, int],
    parts: Mapping[str, float] | None,
    *,
    warnings: tuple[str, ...] = (),
    **measured: Any,
) -> Plan:
    """Return the plan of a recipe. ``parts`` maps the name of each part of a training step to its time in seconds;
    it is None if the step does not fit."""
    training, length = config.training, config.data.seq_length
    batch = training.global_batch_size
    flops = batch * _flops_per_sequence(config)
    seconds = sum(parts.values()) if parts else None
    shares = {part: each / seconds for part, each in parts.items()} if parts and seconds else None
    steps = full_steps(config, asked.first_step)
    hours = seconds * steps / 3600 if seconds else None
    chip_hours = hours * topology.num_chips if hours is not None else None
    price = asked.price_per_chip_hour
    peak = topology.chip.device_peak_flops * topology.num_devices
    return Plan(
        topology=topology.name,
        chips=topology.num_chips,
        devices=topology.num_devices,
        hosts=topology.num_hosts,
        mesh=dict(mesh),
        scan_layers=config.execution.scan_layers,
        remat=config.execution.remat,
        global_batch_size=batch,
        accumulation_steps=training.accumulation_steps,
        batch_per_device=rows_per_device(config, mesh),
        predicted_step_seconds=seconds,
        predicted_mfu=flops / seconds / peak if seconds else None,
        tokens_per_second=batch * length / seconds if seconds else None,
        sequences_per_second=batch / seconds if seconds else None,
        num_steps=training.num_steps - asked.first_step,
        hours=hours,
        chip_hours=chip_hours,
        cost=chip_hours * price if price is not None and chip_hours is not None else None,
        shares=shares,
        communication_seconds=parts["communication"] if parts else None,
        warnings=(*_warnings(config, topology, shares or {}), *warnings),
        **measured,
    )


def _flops_per_sequence(config: PretrainConfig) -> float:
    """Return the training FLOPs per sequence; if the objective does not define them, those of masked_lm."""
    return objective_class(config.objective)(config, None).flops_per_sequence() or training_flops_per_sequence(
        config.model, seq_length=config.data.seq_length, max_predictions=config.row_shape.max_predictions,
        has_nsp=config.has_nsp,
    )  # fmt: skip


def full_steps(config: PretrainConfig, first_step: int) -> float:
    """Return the number of steps from ``first_step`` to the end of training. A step of the batch ramp counts as a
    fraction of a step: its batch size divided by the full batch size."""
    training = config.training
    require(training.num_steps > 0, "training.num_steps", 0, "1 or more in a plan, which reads no text")
    if not 0 <= first_step < training.num_steps:
        raise ValueError(f"--first_step: {first_step} is not allowed; use 0 to {training.num_steps - 1}")
    left = training.num_steps - first_step
    steps = 0.0
    for count, size in zip(training.batch_ramp[::2], training.batch_ramp[1::2], strict=True):
        taken = min(count, left)
        steps += taken * size / training.global_batch_size
        left -= taken
    return steps + left


def _warnings(config: PretrainConfig, topology: Topology, shares: Mapping[str, float]) -> list[str]:
    """Return a warning for each cause of a slow step, which names the option that would make the step faster, and
    one for packed rows."""
    execution, lines = config.execution, []
    dropout, communication = shares.get("dropout", 0.0), shares.get("communication", 0.0)
    if topology.is_tpu and execution.prng == "threefry" and dropout > _MUCH_DROPOUT:
        lines.append(f"dropout takes {dropout:.0%} of the step; execution.prng hash needs fewer operations")
    if config.data.packing != "none" and config.row_shape.sequences_per_row == 1:
        lines.append(
            "data.packing: the plan computes rows of one sequence; set training.batch_unit rows, "
            "training.global_batch_size to the number of rows in a batch, and data.sequences_per_row"
        )
    if execution.dtype == "float32":
        lines.append("execution.dtype bfloat16 runs the matrix products at least twice as fast")
    if communication > _MUCH_COMMUNICATION:
        lines.append(
            f"{communication:.0%} of the step is communication; use fewer chips or a larger "
            "training.global_batch_size"
        )
    return lines
