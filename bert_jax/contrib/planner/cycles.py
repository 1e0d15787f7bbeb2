"""Estimate the time of a compiled step.

On a TPU, the estimate uses the compiler's cycle estimates; on a GPU, it uses a lower bound for each kernel
(``bert_jax.contrib.planner.kernels``).

The compiler for TPUs annotates nearly every instruction of the scheduled program with a cycle estimate.
``step_cost`` adds the estimates in the order of the schedule, counts those in a loop once per iteration, and models
the instructions without an estimate:

* collectives: bytes / bandwidth of the links along the torus axes that the group of devices spans;
* asynchronous copies and collectives run during the instructions between their start and their end, at most one
  copy and one collective at a time; the instruction at their end waits until they are done;
* a collective that the compiler runs inside a chain of fusions advances only while these fusions run, so the two
  together take at least the longer of both times;
* Pallas kernels: the operations of their blocks (``bert_jax.contrib.planner.kernels``);
* all other instructions (such as random bits): bytes / memory bandwidth.

The estimate assumes that nothing else uses the chip and that the chip never waits for the host.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bert_jax.contrib.planner import hlo
from bert_jax.contrib.planner.kernels import kernel_cost, pallas_seconds, stated_numbers
from bert_jax.parallel.hardware import Chip

PARTS = ("attention", "mlm_head", "dropout", "optimizer", "communication", "rest")
# The first pattern that matches the scopes of an instruction determines its part.
_PART_PATTERNS = (
    ("dropout", re.compile(r"rng_bit_generator|random_bits|threefry|/dropout")),
    ("optimizer", re.compile(r"/optimizer\b")),
    ("mlm_head", re.compile(r"\bmlm_head\b|mlm_loss")),
    ("attention", re.compile(r"dot_product_attention")),
)
_COLLECTIVES = re.compile(
    r"all-reduce|reduce-scatter|all-gather|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
)
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "iota", "domain", "add-dependency",
}  # fmt: skip
# Bookkeeping that no unit of the chip executes.
_FREE_TARGETS = {
    "ConcatBitcast", "AllocateBuffer", "X64Combine", "X64SplitLow", "X64SplitHigh", "AssumeGatherIndicesInBound",
    "GatherScatterIndicesBitpacked", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "LayoutConstraint",
}  # fmt: skip
# Minimum time of a message over one link.
_HOP_SECONDS = 1e-6


@dataclass(frozen=True)
class StepCost:
    """Predicted time of one run of a program on one device.

    ``communication_seconds`` is the portion of ``seconds`` in which only collectives run. ``parts`` contains the
    seconds of each of the :data:`PARTS`; their sum is ``seconds``. ``operations`` is the number of multiplications
    and additions in the matrix products. ``unestimated`` lists the instructions without a cycle estimate, as
    (opcode and number of instructions, fraction of ``operations``), and ``unestimated_seconds`` is their time.
    ``unknown_loops`` names the loops whose number of iterations is unknown; they are counted as one iteration.
    ``moved_bytes`` is the number of bytes that GPU kernels read and write; 0 on a TPU.
    """

    seconds: float
    communication_seconds: float
    parts: dict[str, float]
    operations: float
    unestimated: list[tuple[str, float]]
    unestimated_seconds: float
    unknown_loops: list[str]
    moved_bytes: float = 0.0


def step_cost(hlo_text: str, chip: Chip, mesh_shape: Mapping[str, int], grid: Sequence[int] = ()) -> StepCost:
    """Return the predicted cost of the program ``hlo_text`` (``Compiled.as_text()``) on one device of ``chip``.

    Args:
        hlo_text: the scheduled program of one device.
        chip: a GPU, or a TPU with a known clock rate.
        mesh_shape: sizes of the mesh axes; their product is the number of devices.
        grid: chips along each axis of the slice, as in the name of the topology (``(4, 4)`` for v5e:4x4); empty:
            the most even grid.

    Raises ``ValueError`` for text that is not a compiled program.
    """
    devices = math.prod(mesh_shape.values())
    grid = tuple(grid) or even_grid(max(devices // chip.devices_per_chip, 1), chip.link_axes)
    return _Model(hlo.parse(hlo_text), chip, devices, tuple(grid)).cost()


def even_grid(chips: int, axes: int) -> tuple[int, ...]:
    """Return ``axes`` integers whose product is ``chips``, in ascending order, such that the largest integer is as
    small as possible."""
    if axes <= 1:
        return (chips,)
    grids = ((n, *even_grid(chips // n, axes - 1)) for n in range(1, chips + 1) if chips % n == 0)
    return min((tuple(sorted(grid)) for grid in grids), key=lambda grid: grid[::-1])


@dataclass
class _Timeline:
    """Simulated schedule of one computation up to ``now``, the number of seconds since the start of the
    computation. The computation runs ``times`` times per step."""

    computation: str
    times: float
    now: float = 0.0
    free: dict[str, float] = field(default_factory=lambda: {"memory": 0.0, "links": 0.0})
    pending: dict[str, tuple[str, float]] = field(default_factory=dict)
    # Remaining seconds of each collective that runs inside other instructions.
    chains: dict[str, float] = field(default_factory=dict)

    def start(self, name: str, resource: str, seconds: float) -> None:
        """Queue an asynchronous operation that occupies ``resource`` for ``seconds``."""
        self.free[resource] = max(self.now, self.free[resource]) + seconds
        self.pending[name] = resource, self.free[resource]

    def wait(self, name: str) -> tuple[str, float]:
        """Remove the operation that :meth:`start` queued as ``name``. Return its resource and the seconds until it
        ends."""
        resource, end = self.pending.pop(name)
        return resource, max(end - self.now, 0.0)


class _Model:
    """Simulation of one program, which adds up its cost in the order of its schedule."""

    def __init__(self, module: hlo.Module, chip: Chip, devices: int, grid: tuple[int, ...]) -> None:
        self.module, self.chip, self.devices, self.grid = module, chip, devices, grid
        self.seconds: dict[str, float] = defaultdict(float)
        self.unestimated_seconds = 0.0
        self.unestimated: Counter[str] = Counter()
        self.unestimated_operations: dict[str, float] = defaultdict(float)
        self.unknown_loops: list[str] = []
        self.operations = self.moved_bytes = 0.0

    def cost(self) -> StepCost:
        """Follow the schedule once and return the cost."""
        self._run(self.module.entry, 1.0)
        operations = self.operations or self.module.operations(self.module.entry)
        total = sum(self.seconds.values())
        without = [
            (f"{what} ({count})", self.unestimated_operations[what] / operations if operations else 0.0)
            for what, count in self.unestimated.most_common()
        ]
        return StepCost(
            seconds=total,
            communication_seconds=self.seconds["communication"],
            parts={part: self.seconds[part] for part in PARTS},
            operations=operations,
            unestimated=sorted(without, key=lambda item: -item[1]),
            unestimated_seconds=self.unestimated_seconds,
            unknown_loops=self.unknown_loops,
            moved_bytes=self.moved_bytes,
        )

    def _run(self, computation: str, times: float) -> float:
        """Simulate ``computation``, which runs ``times`` times per step. Return the seconds of one run."""
        timeline = _Timeline(computation, times)
        for line in self.module.computations[computation].instructions.values():
            self._step(line, timeline)
        return timeline.now

    def _step(self, line: hlo.Instruction, timeline: _Timeline) -> None:
        lines = self.module.computations[timeline.computation].instructions
        if line.opcode.endswith(("-done", "-update")):
            if line.operands and line.operands[0] in timeline.pending:
                if line.opcode.endswith("-update"):
                    timeline.pending[line.name] = timeline.pending.pop(line.operands[0])
                    return
                resource, waited = timeline.wait(line.operands[0])
                part = "communication" if resource == "links" else self._part(line)
                self._spend(part, waited, timeline)
            return
        collective = self._collective(line, lines)
        if collective is not None and (chains := self._chains(line)):
            self._chain_step(line, timeline, chains, collective)
            return
        if line.opcode.endswith("-start"):
            if collective is not None:
                timeline.start(line.name, "links", collective)
            else:
                timeline.start(line.name, "memory", self._copy_seconds(line, lines))
        elif collective is not None:
            self._spend("communication", collective, timeline)
        elif line.opcode == "while":
            timeline.now += self._loop(line, timeline)
        elif line.opcode in ("call", "conditional"):
            timeline.now += self._branches(line, timeline.times)
        else:
            self._spend(self._part(line), self._instruction(line, timeline), timeline)

    def _chain_step(self, line: hlo.Instruction, timeline: _Timeline, chains: list[str], collective: float) -> None:
        """Add the time of one fusion in a chain of fusions that runs a collective: the first fusion of the chain,
        the last one, or one in between."""
        targets = {i.target for name in line.called for i in self.module.computations[name].instructions.values()}
        if "AsyncCollectiveStart" in targets:
            timeline.chains[chains[0]] = collective
        elif "AsyncCollectiveDone" in targets:
            self._spend("communication", timeline.chains.pop(chains[0], collective), timeline)
        else:
            seconds = self._instruction(line, timeline)
            self._spend(self._part(line), seconds, timeline)
            for chain in chains:
                timeline.chains[chain] = max(timeline.chains.get(chain, collective) - seconds / len(chains), 0.0)

    def _chains(self, line: hlo.Instruction) -> list[str]:
        """Return the chain ids of the collectives that a fusion advances, sorted."""
        if line.opcode != "fusion":
            return []
        inner = [i for name in line.called for i in self.module.computations[name].instructions.values()]
        chains = {hlo.first_group(r'chain_id="(\d+)"', i.attributes) for i in inner if _COLLECTIVES.match(i.opcode)}
        return sorted(chains - {""})

    def _loop(self, line: hlo.Instruction, timeline: _Timeline) -> float:
        trips = self.module.trip_count(line, timeline.computation)
        if trips is None:
            self.unknown_loops.append(line.name)
            trips = 1
        names = (line.attribute("condition"), line.attribute("body"))
        return trips * sum(self._run(name, timeline.times * trips) for name in names)

    def _branches(self, line: hlo.Instruction, times: float) -> float:
        """Return the seconds of a call, or of the slowest branch of a conditional, and add them to the times of the
        parts to which the instructions belong."""
        costs = []
        for name in line.called:
            before = dict(self.seconds)
            costs.append((self._run(name, times), {k: v - before.get(k, 0.0) for k, v in self.seconds.items()}))
            self.seconds = defaultdict(float, before)
        if not costs:
            return 0.0
        seconds, charged = max(costs, key=lambda cost: cost[0])
        for part, more in charged.items():
            self.seconds[part] += more
        return seconds

    def _instruction(self, line: hlo.Instruction, timeline: _Timeline) -> float:
        if line.estimated_cycles is not None and self.chip.clock_ghz:
            return line.estimated_cycles / (self.chip.clock_ghz * 1e9)
        if line.opcode in _FREE or line.target in _FREE_TARGETS:
            return 0.0
        if not self.chip.link_axes:
            return self._gpu_kernel(line, timeline)
        what = f"{line.opcode} {line.target}".strip()
        lines = self.module.computations[timeline.computation].instructions
        if stated := stated_numbers(line):
            operations, seconds = stated["flops"], pallas_seconds(stated, self.chip)
        else:
            operations = self.module.instruction_operations(line, timeline.computation)
            moved = _touched_bytes(line, lines)
            seconds = max(operations / self.chip.device_peak_flops, moved / self.chip.device_memory_bandwidth)
        self.unestimated[what] += round(timeline.times)
        self.unestimated_operations[what] += operations * timeline.times
        self.unestimated_seconds += seconds * timeline.times
        return seconds

    def _gpu_kernel(self, line: hlo.Instruction, timeline: _Timeline) -> float:
        seconds, operations, moved = kernel_cost(line, timeline.computation, self.module, self.chip)
        self.operations += operations * timeline.times
        self.moved_bytes += moved * timeline.times
        if line.target:
            self.unestimated[line.target] += round(timeline.times)
            self.unestimated_operations[line.target] += operations * timeline.times
            self.unestimated_seconds += seconds * timeline.times
        return seconds

    def _copy_seconds(self, line: hlo.Instruction, lines: Mapping[str, hlo.Instruction]) -> float:
        """Return the seconds of an asynchronous copy. Its bytes are counted twice if both source and destination
        are in the main memory of the device."""
        source = lines[line.operands[0]].arrays
        # The result of a copy start contains source and destination in either order; the smaller of the two is
        # copied.
        big = [a for a in line.arrays if a.shape and a.num_bytes > 4] or list(line.arrays)
        moved = min(big, key=lambda array: array.num_bytes)
        ends = sum(array.memory == 0 for array in (source[0], moved)) if source else 1
        return max(ends, 1) * moved.num_bytes / self.chip.device_memory_bandwidth

    def _collective(self, line: hlo.Instruction, lines: Mapping[str, hlo.Instruction]) -> float | None:
        """Return the seconds of a collective; None for any other instruction."""
        if kind := _COLLECTIVES.match(line.opcode):
            return self._collective_seconds(kind[0], line, lines)
        if line.opcode not in ("fusion", "async-start", "call-start"):
            return None
        # A fused collective is an instruction of the computation that the fusion calls.
        for name in line.called:
            inner = self.module.computations[name].instructions
            for each in inner.values():
                if kind := _COLLECTIVES.match(each.opcode):
                    fused = "reduce-scatter" if "all-reduce-scatter" in name else kind[0]
                    return self._collective_seconds(fused, each, inner)
        return None

    def _collective_seconds(self, kind: str, line: hlo.Instruction, lines: Mapping[str, hlo.Instruction]) -> float:
        num_bytes = sum(lines[name].num_bytes for name in line.operands)
        size = _group_size(line.attributes, self.devices)
        return collective_seconds(kind, num_bytes, size, self.chip, self.grid)

    def _part(self, line: hlo.Instruction) -> str:
        name = line.op_name
        for called in line.called:
            if not name:
                inner = self.module.computations[called]
                products = [i for i in inner.instructions.values() if i.opcode in ("convolution", "dot")]
                name = next(
                    (i.op_name for i in [*products, inner.root, *inner.instructions.values()] if i.op_name), ""
                )
        return next((part for part, pattern in _PART_PATTERNS if pattern.search(name)), "rest")

    def _spend(self, part: str, seconds: float, timeline: _Timeline) -> None:
        """Advance ``timeline`` by ``seconds`` and add them to the time of ``part``."""
        self.seconds[part] += seconds * timeline.times
        timeline.now += seconds


def collective_seconds(kind: str, num_bytes: int, size: int, chip: Chip, grid: Sequence[int]) -> float:
    """Return the seconds of one collective of ``size`` devices, each of which contributes ``num_bytes``.

    The group spans complete axes of ``grid`` where possible. Along an axis that forms a ring, a chip sends over two
    links. Along any other axis, it sends over one link, because the chips at both ends of the axis have only one.
    Links along several axes are used in parallel.
    """
    chips = -(-size // chip.devices_per_chip)
    axes = spanned_axes(chips, grid)
    if size <= 1 or not axes:
        return 0.0
    bandwidth = sum(2 if is_ring(axis, grid, chip) else 1 for axis in axes) * chip.link_bandwidth
    latency = _HOP_SECONDS * sum(axis / 2 if is_ring(axis, grid, chip) else axis - 1 for axis in axes)
    whole = num_bytes * chip.devices_per_chip if kind == "all-gather" else num_bytes
    share = (chips - 1) / chips
    match kind:
        case "all-reduce":
            return 2 * (whole * share / bandwidth + latency)
        case "all-gather":
            return whole * chips * share / bandwidth + latency
        case "all-to-all" | "ragged-all-to-all":
            return whole * chips * share / bandwidth / 4 + latency
        case "collective-permute":
            return whole / chip.link_bandwidth + latency
    return whole * share / bandwidth + latency


def spanned_axes(chips: int, grid: Sequence[int]) -> list[int]:
    """Return the number of chips along each axis of ``grid`` that a group of ``chips`` chips spans, longest axes
    first. The group may span only a part of the last axis."""
    axes, left = [], chips
    for axis in sorted((n for n in grid if n > 1), reverse=True):
        if left % axis == 0:
            axes.append(axis)
            left //= axis
    return [*axes, left] if left > 1 else axes


def is_ring(axis: int, grid: Sequence[int], chip: Chip) -> bool:
    """Return True if an axis of ``axis`` chips forms a ring. If chips have links along three axes, every axis of
    a slice of complete 4x4x4 cubes forms a ring. If they have links along two axes (v5e, v6e), only an axis of 16
    chips, the length of a full pod, forms a ring."""
    if axis not in grid:
        return False
    return axis % 4 == 0 and all(n % 4 == 0 for n in grid) if chip.link_axes == 3 else axis == 16


def _group_size(attributes: str, devices: int) -> int:
    """Return the number of devices that exchange values: the size of the first replica group."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    if iota := hlo.first_group(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(iota)
    group = hlo.first_group(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return len(group.split(",")) if group else devices


def _touched_bytes(line: hlo.Instruction, lines: Mapping[str, hlo.Instruction]) -> int:
    """Return the number of bytes that an instruction reads and writes."""
    if line.opcode == "dynamic-update-slice":
        return 2 * lines[line.operands[1]].num_bytes
    if line.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * line.num_bytes
    return line.num_bytes + sum(lines[name].num_bytes for name in line.operands if name in lines)
