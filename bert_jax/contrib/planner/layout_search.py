"""Search for the fastest layout of a recipe on a slice.

A layout is a mesh, a number of sequences per device, a kind of recomputation, and scanned or unrolled layers.

Candidates keep the global batch size of the recipe, so that training is unchanged, and vary the number of
microbatches; ``batches`` sets other global batch sizes. Arithmetic estimates drop the candidates that cannot fit
and order the others; the first few are compiled.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from bert_jax.config import MeshConfig, PretrainConfig
from bert_jax.contrib.planner.compiled import compile_step
from bert_jax.contrib.planner.gpu_devices import can_compile
from bert_jax.contrib.planner.plan import Asked, Plan, arithmetic_plan, plan_compiled
from bert_jax.contrib.planner.topology import Topology

# The arithmetic estimate of memory is rough, so a candidate is dropped only if it exceeds the memory by this
# factor.
_SURELY_TOO_LARGE = 2.0
# Largest fraction of the memory that a candidate may use; the memory that the compiler reports varies slightly.
_FULL = 0.97

Candidate = tuple[PretrainConfig, Plan]


def search(
    config: PretrainConfig,
    topology: Topology,
    asked: Asked,
    *,
    tries: int,
    batches: Sequence[int],
    progress: Callable[[str], None],
) -> tuple[list[Plan], Candidate | None]:
    """Return the plans of all tried layouts, fastest first, and the fastest layout with its plan (None if no layout
    fits).

    Args:
        tries: maximum number of layouts to compile.
        batches: numbers of sequences per device to try, in one microbatch; the resulting global batch sizes replace
            the batch size of the recipe.
        progress: called with a line of text before and after each compilation.
    """
    ordered = _ordered(config, topology, asked, batches)
    if not ordered:
        raise ValueError(
            f"--search: no mesh divides the global batch of {config.training.global_batch_size:,} over "
            f"{topology.num_devices} devices; set --batches or another training.global_batch_size"
        )
    progress(f"estimated {len(ordered)} layouts by arithmetic")
    if not topology.is_tpu and not can_compile():
        return _sorted(ordered), _best(ordered)
    tried: list[Candidate] = []
    chosen = _spread(ordered, tries - 1 if tries > 1 else 1)
    for number, (candidate, _) in enumerate(chosen, 1):
        tried.append(_try(candidate, topology, asked, f"{number} of {len(chosen)}", progress))
    # Scanning or unrolling the layers hardly changes which candidate is best, so only the best one is tried both
    # ways.
    if config.model.has_equal_layers and (best := _best(tried)) and tries > 1:
        execution = best[0].execution
        other = dataclasses.replace(execution, scan_layers=not execution.scan_layers)
        which = f"the best, {'unrolled' if execution.scan_layers else 'scanned'}"
        tried.append(_try(dataclasses.replace(best[0], execution=other), topology, asked, which, progress))
    return _sorted(tried), _best(tried)


def _try(
    config: PretrainConfig, topology: Topology, asked: Asked, which: str, progress: Callable[[str], None]
) -> Candidate:
    training, mesh = config.training, config.mesh
    progress(
        f"compiling {which}: batch {training.global_batch_size:,}, microbatches {training.accumulation_steps}, "
        f"remat {config.execution.remat}, mesh {mesh.data}x{mesh.fsdp}x{mesh.tensor}"
    )
    plan = plan_compiled(config, topology, asked, compile_step(config, topology))
    speed = f"{plan.tokens_per_second:,.0f} tokens/s" if plan.tokens_per_second else "does not fit"
    progress(f"  {speed}, {plan.peak_bytes / 2**30:.1f} GiB, {plan.compile_seconds:.0f} s")
    return config, plan


def _sorted(tried: Sequence[Candidate]) -> list[Plan]:
    return sorted((plan for _, plan in tried), key=_order)


def _order(plan: Plan) -> tuple[float, int]:
    """Return the sort key of ``plan``: fastest plans first, then plans that do not fit, sorted by memory."""
    return -(plan.tokens_per_second or 0.0), plan.peak_bytes


def _best(tried: Sequence[Candidate]) -> Candidate | None:
    fitting = [each for each in tried if each[1].fits and each[1].peak_bytes <= _FULL * each[1].hbm_bytes]
    return max(fitting, key=lambda each: each[1].tokens_per_second or 0.0, default=None)


def _ordered(config: PretrainConfig, topology: Topology, asked: Asked, batches: Sequence[int]) -> list[Candidate]:
    """Return the candidates with their arithmetic plans, fastest first, then those that do not fit according to the
    estimate, sorted by memory. Candidates whose estimate is far above the memory are omitted."""
    plans = []
    for candidate in candidates(config, topology, batches):
        plan = arithmetic_plan(candidate, topology, asked)
        if plan.peak_bytes <= _SURELY_TOO_LARGE * plan.hbm_bytes:
            plans.append((candidate, plan))
    return sorted(plans, key=lambda candidate: _order(candidate[1]))


def _spread(ordered: list[Candidate], count: int) -> list[Candidate]:
    """Return the first ``count`` candidates after moving each one back by 3 positions for every earlier candidate
    with the same mesh and recomputation. Arithmetic estimates are too rough to choose among such candidates."""
    seen = Counter[tuple[object, ...]]()
    places = []
    for place, (config, _) in enumerate(ordered):
        key = config.mesh, config.execution.remat
        places.append((place + 3 * seen[key], place))
        seen[key] += 1
    return [ordered[place] for _, place in sorted(places)[:count]]


def candidates(config: PretrainConfig, topology: Topology, batches: Sequence[int]) -> Iterator[PretrainConfig]:
    """Yield the recipe in every layout: each combination of mesh, number of microbatches (or, if ``batches`` is
    given, number of sequences per device) and recomputation."""
    if batches:  # reset options that depend on the global batch size of the recipe
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
    """Yield the data-parallel mesh, and the meshes with fsdp and tensor axes that the model allows."""
    heads = math.gcd(config.model.num_attention_heads, *config.model.heads_by_layer)
    for tensor in (1, 2, 4, 8):
        for fsdp in dict.fromkeys((1, 2, 4, 8, devices // tensor)):
            if fsdp and heads % tensor == 0 and devices % (tensor * fsdp) == 0:
                yield dataclasses.replace(config.mesh, data=devices // tensor // fsdp, fsdp=fsdp, tensor=tensor)


def _batches(config: PretrainConfig, parts: int, batches: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each (global batch size, number of microbatches) whose microbatches can be divided into ``parts`` equal
    shards."""
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
