"""Search for the fastest layout of a recipe on a slice: batch per device x recomputation x scan x mesh.

The recipe's global batch, and so the function learned, stays (microbatches change the batch per device), unless
other batches are asked for. Arithmetic drops what cannot fit and orders the rest; on a TPU the first few are
compiled.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bert_jax.config import MeshConfig, PretrainConfig
from bert_jax.planner.compiled import compile_step
from bert_jax.planner.plan import Asked, Plan, arithmetic_plan, plan_compiled, without_time
from bert_jax.planner.topology import Topology

# The arithmetic of memory is that rough: what it puts this far above the memory is not tried.
_SURELY_TOO_LARGE = 2.0
# A device is not filled to the last byte: the compiler's own figures differ a little from run to run.
_FULL = 0.97


@dataclass(frozen=True)
class Found:
    """Result of a search; ``config`` is the recipe with the layout of the best plan, None where nothing fits."""

    plans: list[Plan]
    best: Plan | None
    config: PretrainConfig | None


def search(
    config: PretrainConfig,
    topology: Topology,
    asked: Asked,
    *,
    tries: int,
    batches: Sequence[int],
    progress: Callable[[str], None],
) -> Found:
    """The best layout of ``config`` on ``topology``.

    Args:
        tries: most steps that are compiled (a TPU slice).
        batches: sequences per device and microbatch to try with other global batches than the recipe's.
        progress: is given a line before and after each try.
    """
    ordered = _ordered(config, topology, asked, batches)
    if not ordered:
        raise ValueError(
            f"--search: no mesh cuts a batch of {config.training.global_batch_size:,} over {topology.num_devices} "
            "devices; give --batches or another training.global_batch_size"
        )
    progress(f"{len(ordered)} layouts by arithmetic")
    if not topology.is_tpu:
        return _best(ordered)
    tried: list[tuple[PretrainConfig, Plan]] = []
    chosen = _spread(ordered, tries - 1 if tries > 1 else 1)
    for number, (candidate, _) in enumerate(chosen, 1):
        tried.append(_try(candidate, topology, asked, f"{number} of {len(chosen)}", progress))
    found = _best(tried)
    # Scanned or unrolled hardly changes which candidate is best, so the other layout is tried for the best alone.
    if found.config is not None and tries > 1:
        execution = found.config.execution
        other = dataclasses.replace(execution, scan_layers=not execution.scan_layers)
        which = f"the best, {'unrolled' if execution.scan_layers else 'scanned'}"
        tried.append(_try(dataclasses.replace(found.config, execution=other), topology, asked, which, progress))
        found = _best(tried)
    return found


def _try(
    config: PretrainConfig, topology: Topology, asked: Asked, which: str, progress: Callable[[str], None]
) -> tuple[PretrainConfig, Plan]:
    training, mesh = config.training, config.mesh
    progress(
        f"compiling {which}: batch {training.global_batch_size:,} in {training.accumulation_steps}, remat "
        f"{config.execution.remat}, mesh {mesh.data}x{mesh.fsdp}x{mesh.tensor}"
    )
    plan = plan_compiled(config, topology, asked, compile_step(config, topology))
    speed = f"{plan.tokens_per_second:,.0f} tokens/s" if plan.tokens_per_second else "does not fit"
    progress(f"  {speed}, {plan.peak_bytes / 2**30:.1f} GiB, {plan.compile_seconds:.0f} s")
    return config, plan


def _best(tried: Sequence[tuple[PretrainConfig, Plan]]) -> Found:
    fitting = [
        (config, plan) for config, plan in tried
        if plan.fits and plan.peak_bytes <= _FULL * plan.hbm_bytes
    ]  # fmt: skip
    plans = sorted(
        (without_time(plan) for _, plan in tried),
        key=lambda plan: (-(plan.tokens_per_second or 0), plan.peak_bytes),
    )
    if not fitting:
        return Found(plans, None, None)
    config, plan = max(fitting, key=lambda item: item[1].tokens_per_second or 0.0)
    return Found(plans, plan, config)


def _ordered(
    config: PretrainConfig, topology: Topology, asked: Asked, batches: Sequence[int]
) -> list[tuple[PretrainConfig, Plan]]:
    """Every candidate with its plan by arithmetic, fastest first, those surely too large left out."""
    plans = []
    for candidate in candidates(config, topology, batches):
        plan = arithmetic_plan(candidate, topology, asked)
        if plan.peak_bytes <= _SURELY_TOO_LARGE * plan.hbm_bytes:
            plans.append((candidate, plan))
    return sorted(plans, key=lambda item: (not item[1].fits, -(item[1].tokens_per_second or 0), item[1].peak_bytes))


def _spread(ordered: list[tuple[PretrainConfig, Plan]], count: int) -> list[tuple[PretrainConfig, Plan]]:
    """The first ``count`` in order, but of each (mesh, remat) the first before the second: arithmetic is too rough
    to choose among neighbours."""
    seen: dict[tuple[object, ...], int] = {}
    ranked = []
    for place, (config, plan) in enumerate(ordered):
        key = config.mesh, config.execution.remat
        seen[key] = seen.get(key, -1) + 1
        ranked.append((place + seen[key] * 3, place, (config, plan)))
    return [item for *_, item in sorted(ranked, key=lambda entry: entry[:2])[:count]]


def candidates(config: PretrainConfig, topology: Topology, batches: Sequence[int]) -> Iterator[PretrainConfig]:
    """The recipe in every layout: meshes x microbatches (or ``batches`` per device) x recomputation."""
    if batches:  # what belongs to the recipe's own batch
        training = dataclasses.replace(config.training, batch_ramp=(), eval_batch_size=0)
        config = dataclasses.replace(config, training=training, data=dataclasses.replace(config.data, lanes=0))
    for mesh in _meshes(config, topology.num_devices):
        parts = mesh.data * mesh.fsdp
        for batch, steps in _batches(config, parts, batches):
            for remat in ("none", "attention", "full"):
                yield dataclasses.replace(
                    config,
                    mesh=mesh,
                    execution=dataclasses.replace(config.execution, remat=remat),
                    training=dataclasses.replace(
                        config.training, global_batch_size=batch, accumulation_steps=steps
                    ),
                )


def _meshes(config: PretrainConfig, devices: int) -> Iterator[MeshConfig]:
    """Data parallel, and the modest uses of the other axes that this model allows."""
    heads = config.model.num_attention_heads
    for tensor in (1, 2, 4, 8):
        for fsdp in dict.fromkeys((1, 2, 4, 8, devices // tensor)):
            if heads % tensor == 0 and devices % (tensor * fsdp) == 0 and fsdp:
                yield dataclasses.replace(config.mesh, data=devices // tensor // fsdp, fsdp=fsdp, tensor=tensor)


def _batches(config: PretrainConfig, parts: int, batches: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(global batch, microbatches) that cut evenly into ``parts``."""
    if batches:
        yield from ((per_device * parts, 1) for per_device in batches)
        return
    total, ramp = config.training.global_batch_size, config.training.batch_ramp[1::2]
    if (config.training.eval_batch_size or total) % parts:
        return
    steps = 1
    while steps * parts <= total:
        if all(size % (steps * parts) == 0 for size in (total, *ramp)):
            yield total, steps
        steps *= 2
