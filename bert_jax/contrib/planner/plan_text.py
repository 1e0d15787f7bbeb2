"""Plans, sharding tables and search results as text."""

import math
from collections.abc import Sequence

from bert_jax.contrib.planner.plan import Plan
from bert_jax.contrib.planner.sharding_table import Row
from bert_jax.contrib.planner.topology import Topology

_PART_NAMES = {
    "attention": "attention", "mlm_head": "MLM head", "dropout": "dropout", "optimizer": "optimizer",
    "communication": "communication", "rest": "the rest of the model",
}  # fmt: skip
# Maximum number of candidates of a search to print, in addition to those that no other candidate beats.
_SHOWN = 12
_METHODS = {
    "compiled": "An estimate, nothing was run: the training step was compiled for this slice; its time is the sum "
    "of the cycle estimates of the compiler over all iterations of loops, with collectives at link bandwidth. "
    "Input, evaluation, checkpoints and start-up are not included.",
    "kernels": "A lower bound, nothing was run: the training step was compiled for these boards; its time is the "
    "sum over its kernels of the bytes that they move at full bandwidth or of their products at full speed, "
    "whichever takes longer, with collectives at link bandwidth. Launches, vector operations, input, evaluation, "
    "checkpoints and start-up are not included.",
    "arithmetic": "An estimate by arithmetic alone, nothing was compiled or run: operations at 65% of the peak, "
    "bytes at memory bandwidth, gradients at link bandwidth. Input, evaluation, checkpoints and start-up are not "
    "included. The error may be about a third.",
}


def plan_lines(plan: Plan, advice: str) -> list[str]:
    """Return ``plan`` as lines of text; ``advice`` is added if the step does not fit."""
    mesh = " ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    micro = f" in {plan.accumulation_steps} microbatches" if plan.accumulation_steps > 1 else ""
    lines = [
        f"{plan.topology}: {_count(plan.chips, 'chip')}, {_count(plan.hosts, 'host')}, mesh {mesh}",
        f"batch     {plan.global_batch_size:,} sequences{micro}, {plan.batch_per_device:g} at a time per device",
    ]
    memory = (
        f"{gib(plan.peak_bytes)} of {gib(plan.hbm_bytes)} GiB per device (state and batch "
        f"{gib(plan.argument_bytes)}, temporary arrays {gib(plan.temporary_bytes)})"
    )
    lines.append(f"fits      yes: {memory}" if plan.fits else f"fits      no: it needs {memory}; {advice}")
    if plan.predicted_step_seconds is not None and plan.shares is not None:
        parts = sorted(plan.shares.items(), key=lambda item: -item[1])
        money = f", {plan.cost:,.0f} by --price_per_chip_hour" if plan.cost is not None else ""
        lines += [
            f"step      {1000 * plan.predicted_step_seconds:,.1f} ms, {plan.predicted_mfu:.1%} MFU, "
            f"{plan.sequences_per_second:,.0f} sequences/s, {plan.tokens_per_second:,.0f} tokens/s",
            f"recipe    {plan.num_steps:,} steps: {_duration(plan.hours)}, {plan.chip_hours:,.1f} chip-hours"
            f"{money}",
            f"time in   {', '.join(f'{_PART_NAMES[part]} {share:.0%}' for part, share in parts)}",
        ]
    if plan.moved_bytes:
        called = f"; called programs: {', '.join(plan.unestimated)}" if plan.unestimated else ""
        lines.append(f"moves     {plan.moved_bytes / 1e9:,.1f} GB of memory per device{called}")
    elif plan.unestimated:
        lines.append(
            f"no cycle estimate for {plan.unestimated_share:.1%} of the operations, estimated from bytes and peak: "
            f"{plan.unestimated_time_share:.1%} of the time"
        )
    if plan.method == "compiled":
        layout = "scanned layers" if plan.scan_layers else "unrolled layers"
        lines.append(f"compiled  with {layout}, in {plan.compile_seconds:.0f} s")
    lines += [f"note      {line}" for line in plan.warnings]
    return [*lines, _METHODS["kernels" if plan.moved_bytes else plan.method]]


def sharding_lines(rows: Sequence[Row], topology: Topology | None, mesh: dict[str, int]) -> list[str]:
    """Return the sharding table with totals as lines of text."""
    table = [("parameter", "shape", "computed", "between steps", "bytes", "optimizer bytes")]
    for row in rows:
        name = f"{row.name} x{row.count}" if row.count > 1 else row.name
        shape = "x".join(str(n) for n in row.shape)
        table.append(
            (name, shape, row.sharding, row.state_sharding, f"{row.device_bytes:,}",
             f"{row.optimizer_device_bytes:,}")
        )  # fmt: skip
    params, optimizer = totals(rows)
    table.append(("total", "", "", "", f"{params:,}", f"{optimizer:,}"))
    lines = _columns(table, right=(4, 5))
    where = f"{topology.name}, " if topology else ""
    axes = " ".join(f"{axis}={size}" for axis, size in mesh.items())
    lines.insert(0, f"{where}mesh {axes}; bytes on one device, all layers of a row together")
    notes = [f"{row.name}: {note}" for row in rows for note in row.notes]
    lines += [f"note  {note}" for note in notes]
    lines.append(
        f"parameters {params / 1e6:,.1f} MB, optimizer state {optimizer / 1e6:,.1f} MB on each of "
        f"{math.prod(mesh.values())} devices"
    )
    return lines


def _columns(table: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return the lines of ``table``, with each cell padded to the width of its column. The columns with the indices
    ``right`` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def totals(rows: Sequence[Row]) -> tuple[int, int]:
    """Return the total bytes of the parameters and of the optimizer state on one device."""
    return sum(row.device_bytes for row in rows), sum(row.optimizer_device_bytes for row in rows)


def search_lines(plans: Sequence[Plan], best: Plan | None) -> list[str]:
    """Return the candidates as a table. ``*`` marks the candidates that :func:`pareto` returns. A long table
    contains only these and the fastest candidates."""
    table = [
        ("", "batch/device", "microbatches", "global batch", "remat", "layers", "mesh", "GiB", "tokens/s", "MFU")
    ]
    front = pareto(plans)
    shown = [plan for place, plan in enumerate(plans) if place < _SHOWN or plan in front or plan is best]
    for plan in shown:
        mark = ("*" if plan in front else "") + ("best" if plan is best else "")
        fits = plan.predicted_step_seconds is not None
        table.append(
            (
                mark, f"{plan.batch_per_device:g}", str(plan.accumulation_steps), f"{plan.global_batch_size:,}",
                plan.remat, "scanned" if plan.scan_layers else "unrolled",
                "x".join(str(size) for size in plan.mesh.values()), gib(plan.peak_bytes),
                f"{plan.tokens_per_second:,.0f}" if fits else "does not fit",
                f"{plan.predicted_mfu:.1%}" if fits else "",
            )
        )  # fmt: skip
    lines = _columns(table)
    hidden = len(plans) - len(shown)
    return [*lines, f"and {hidden} slower candidates (--json prints all)"] if hidden else lines


def pareto(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans that fit and are Pareto-optimal: no other plan is better in speed or memory and at least as
    good in both."""
    scored = [(plan.tokens_per_second or 0.0, -plan.peak_bytes, plan) for plan in plans if plan.fits]
    return [
        plan
        for speed, room, plan in scored
        if not any(s >= speed and r >= room and (s, r) != (speed, room) for s, r, _ in scored)
    ]


def gib(amount: float) -> str:
    """Format a number of bytes as GiB with one decimal place."""
    return f"{amount / 2**30:,.1f}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _duration(hours: float | None) -> str:
    assert hours is not None
    if hours < 1:
        return f"{60 * hours:.1f} min"
    return f"{hours:,.1f} h" if hours < 72 else f"{hours / 24:,.1f} days"
