"""Plans: predicted memory, time and cost of a recipe on a slice."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bert_jax.config import PretrainConfig
from bert_jax.config.pretrain import DataConfig
from bert_jax.config.schema import ExecutionConfig, MeshConfig, ModelConfig, OptimizerConfig
from bert_jax.model.flops import training_flops_per_sequence
from bert_jax.parallel.mesh import check_batches, mesh_sizes
from bert_jax.planner.arithmetic import StepEstimate, estimate_step, rows_per_device
from bert_jax.planner.compiled import CompiledStep, compile_step
from bert_jax.planner.cycles import PARTS, StepCost, step_cost
from bert_jax.planner.sharding_table import abstract_mesh, abstract_train_state, batch_bytes, device_bytes
from bert_jax.planner.topology import Topology

# Share of the step from which on communication is named.
_MUCH_COMMUNICATION = 0.3
# Share of the step from which on the random bits of dropout are.
_MUCH_DROPOUT = 0.05


@dataclass(frozen=True)
class Plan:
    """One recipe on one slice. docs/planning.md says what every field is; bytes are per jax device."""

    topology: str
    chips: int
    devices: int
    hosts: int
    mesh: dict[str, int]
    # compiled (the compiler's own figures) or arithmetic.
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
    # None for a step that does not fit and was therefore not compiled.
    predicted_step_seconds: float | None
    predicted_mfu: float | None
    tokens_per_second: float | None
    sequences_per_second: float | None
    num_steps: int
    hours: float | None
    chip_hours: float | None
    cost: float | None
    # Of predicted_step_seconds: attention, mlm_head, dropout, optimizer, communication, rest.
    shares: dict[str, float] | None
    communication_seconds: float | None
    # What the compiler gives no cycle estimate for: its share of the operations and of the time.
    unestimated_share: float
    unestimated_time_share: float
    unestimated: dict[str, float]
    compile_seconds: float
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain values for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Asked:
    """Request of a plan beside the recipe."""

    price_per_chip_hour: float | None = None
    # Steps that earlier phases have done.
    first_step: int = 0


def make_plan(config: PretrainConfig, topology: Topology, asked: Asked) -> Plan:
    """Predict ``config`` on ``topology``; raises ``ValueError`` for a batch or mesh that does not fit the slice."""
    check_batches(config.training, mesh_sizes(config.mesh, topology.num_devices))
    if not topology.is_tpu:
        return without_time(arithmetic_plan(config, topology, asked))
    return plan_compiled(config, topology, asked, compile_step(config, topology))


def without_time(plan: Plan) -> Plan:
    """``plan``, without the time of a step that would not run."""
    if plan.fits:
        return plan
    names = (
        "predicted_step_seconds", "predicted_mfu", "tokens_per_second", "sequences_per_second", "hours",
        "chip_hours", "cost", "shares", "communication_seconds",
    )  # fmt: skip
    nothing: dict[str, Any] = dict.fromkeys(names)
    return dataclasses.replace(plan, **nothing)


def plan_compiled(config: PretrainConfig, topology: Topology, asked: Asked, step: CompiledStep) -> Plan:
    """The plan of a compiled step of ``config``."""
    cost = step_cost(step.hlo, topology.chip, step.mesh_shape, topology.shape) if step.fits else None
    loops = cost.unknown_loops if cost else []
    return _plan(
        config, topology, asked, step.mesh_shape, cost,
        method="compiled", fits=step.fits, peak_bytes=step.peak_bytes, hbm_bytes=step.hbm_bytes,
        argument_bytes=step.argument_bytes, output_bytes=step.output_bytes, temporary_bytes=step.temporary_bytes,
        unestimated_share=sum(share for _, share in cost.unestimated) if cost else 0.0,
        unestimated_time_share=cost.unestimated_seconds / cost.seconds if cost else 0.0,
        unestimated=dict(cost.unestimated) if cost else {},
        compile_seconds=step.compile_seconds,
        warnings=[f"loops of unknown length counted once: {', '.join(loops)}"] if loops else (),
    )  # fmt: skip


def arithmetic_plan(config: PretrainConfig, topology: Topology, asked: Asked) -> Plan:
    """The plan by arithmetic alone, on any slice; no device or compiler is needed."""
    mesh = mesh_sizes(config.mesh, topology.num_devices)
    batch = batch_bytes(config, abstract_mesh(mesh))
    layout = dataclasses.replace(config.execution, remat="none")  # recomputation changes no state
    held = _state_bytes(config.model, layout, config.optimizer, config.mesh, config.has_nsp, topology.num_devices)
    step = estimate_step(config, topology, mesh, held + batch)
    return _plan(
        config, topology, asked, mesh, step,
        method="arithmetic", fits=step.fits, peak_bytes=step.peak_bytes, hbm_bytes=step.hbm_bytes,
        argument_bytes=step.argument_bytes, output_bytes=held, temporary_bytes=step.temporary_bytes,
        unestimated_share=0.0, unestimated_time_share=0.0, unestimated={}, compile_seconds=0.0,
    )  # fmt: skip


@functools.cache
def _state_bytes(
    model: ModelConfig, execution: ExecutionConfig, optimizer: OptimizerConfig, mesh: MeshConfig, has_nsp: bool,
    devices: int,
) -> int:  # fmt: skip
    """Bytes of the state on one device; a search asks for the same ones many times."""
    data = DataConfig(seq_length=8, next_sentence="nsp" if has_nsp else "none")
    config = PretrainConfig(model=model, execution=execution, optimizer=optimizer, mesh=mesh, data=data)
    return device_bytes(abstract_train_state(config, abstract_mesh(mesh_sizes(mesh, devices))))


def _plan(
    config: PretrainConfig,
    topology: Topology,
    asked: Asked,
    mesh: Mapping[str, int],
    cost: StepCost | StepEstimate | None,
    *,
    warnings: Sequence[str] = (),
    **measured: Any,
) -> Plan:
    training, length = config.training, config.data.seq_length
    batch = training.global_batch_size
    flops = batch * training_flops_per_sequence(
        config.model, seq_length=length, max_predictions=config.data.max_predictions, has_nsp=config.has_nsp
    )
    seconds = cost.seconds if cost else None
    warnings = [*_warnings(config, topology, cost), *warnings]
    if cost and cost.shares["communication"] > _MUCH_COMMUNICATION:
        warnings.append(
            f"{cost.shares['communication']:.0%} of the step is communication: fewer chips or a larger "
            "training.global_batch_size would use them better"
        )
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
        shares={part: cost.shares[part] for part in PARTS} if cost else None,
        communication_seconds=cost.communication_seconds if cost else None,
        warnings=tuple(warnings),
        **measured,
    )


def full_steps(config: PretrainConfig, first_step: int) -> float:
    """Steps from ``first_step`` to the end, those of a batch ramp counted by their share of the full batch."""
    training = config.training
    if not 0 <= first_step < training.num_steps:
        raise ValueError(f"--first_step: {first_step} is not allowed; allowed: 0 to {training.num_steps - 1}")
    left = training.num_steps - first_step
    steps = 0.0
    for count, size in zip(training.batch_ramp[::2], training.batch_ramp[1::2], strict=True):
        taken = min(count, left)
        steps += taken * size / training.global_batch_size
        left -= taken
    return steps + left


def _warnings(config: PretrainConfig, topology: Topology, cost: StepCost | StepEstimate | None) -> list[str]:
    """Causes of slowness of a recipe on its hardware, each with the option that changes it."""
    execution, lines = config.execution, []
    dropout = cost.shares["dropout"] if cost else 0.0
    if topology.is_tpu and execution.prng == "threefry" and dropout > _MUCH_DROPOUT:
        lines.append(f"dropout takes {dropout:.0%} of the step; execution.prng rbg draws cheaper bits on a TPU")
    if execution.dtype == "float32":
        lines.append("execution.dtype bfloat16 runs the matrix products at least twice as fast")
    return lines
