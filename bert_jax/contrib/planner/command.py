"""``bert-jax plan``: predict memory, time and cost of a recipe on a slice of accelerators before the slice is
rented."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_jax.config import PretrainConfig, dump_yaml, load_config
from bert_jax.contrib.planner.layout_search import search
from bert_jax.contrib.planner.plan import Asked, Plan, make_plan
from bert_jax.contrib.planner.plan_text import plan_lines, search_lines, sharding_lines, totals
from bert_jax.contrib.planner.sharding_table import sharding_table
from bert_jax.contrib.planner.topology import EXAMPLES, Topology, parse_topology
from bert_jax.parallel.mesh import mesh_sizes
from bert_jax.process.signals import STOPPED, ends_at_once
from bert_jax.training.memory import step_advice


@dataclass(frozen=True)
class PlanOptions:
    """Options of the command that are not part of a recipe."""

    # Recipe files and --section.key flags.
    recipe: Sequence[str]
    topology: str | None = None
    # Number of devices, in place of ``topology``; for the sharding table only.
    devices: int | None = None
    json: bool = False
    show_sharding: bool = False
    search: bool = False
    tries: int = 8
    batches: tuple[str, ...] = ()
    output: Path | None = None
    price_per_chip_hour: float | None = None
    first_step: int = 0


def plan(options: PlanOptions) -> None:
    """Print the requested plan. Raises ``ValueError`` with a one-line message if the plan is impossible."""
    config = load_config(PretrainConfig, options.recipe, extra=PlanOptions)
    _check(options)
    topology = parse_topology(options.topology) if options.topology else None
    if options.show_sharding:
        _show_sharding(config, topology, options)
        return
    assert topology is not None
    asked = Asked(options.price_per_chip_hour, options.first_step)
    with ends_at_once(STOPPED, lambda seconds: _progress(f"  {seconds:.0f} s")):
        if options.search:
            _search(config, topology, asked, options)
            return
        predicted = make_plan(config, topology, asked, _progress)
    if options.json:
        print(json.dumps(dataclasses.asdict(predicted)))
        return
    print("\n".join(plan_lines(predicted, step_advice(config))))


def _check(options: PlanOptions) -> None:
    if options.topology is None and not (options.show_sharding and options.devices):
        raise ValueError(
            f"--topology: missing; allowed: {EXAMPLES}; with --show_sharding, --devices N is allowed instead"
        )
    if options.topology is not None and options.devices is not None:
        raise ValueError("--devices cannot be combined with --topology, which determines the number of devices")
    for name, value in (("devices", options.devices), ("tries", options.tries)):
        if value is not None and value < 1:
            raise ValueError(f"--{name}: {value} is not allowed; use 1 or more")
    for batch in options.batches:
        if not batch.isdecimal() or not 0 < int(batch[:19]) < 10**9:
            raise ValueError(f"--batches: {batch!r} is not allowed; use integers above 0, such as 16,64")
    price = options.price_per_chip_hour
    if price is not None and not 0 <= price < float("inf"):
        raise ValueError(f"--price_per_chip_hour: {price} is not allowed; use 0 or more")
    for name in ("output", "batches"):
        if getattr(options, name) and not options.search:
            raise ValueError(f"--{name}: requires --search; add --search")
    if options.search and options.show_sharding:
        raise ValueError("--show_sharding cannot be combined with --search")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show_sharding(config: PretrainConfig, topology: Topology | None, options: PlanOptions) -> None:
    devices = topology.num_devices if topology else options.devices
    assert devices is not None
    mesh = mesh_sizes(config.mesh, devices)
    rows = sharding_table(config, mesh)
    if not options.json:
        print("\n".join(sharding_lines(rows, topology, mesh)))
        return
    params, optimizer = totals(rows)
    table = [dataclasses.asdict(row) for row in rows]
    print(json.dumps({"mesh": mesh, "parameter_bytes": params, "optimizer_bytes": optimizer, "parameters": table}))


def _search(config: PretrainConfig, topology: Topology, asked: Asked, options: PlanOptions) -> None:
    if options.output is not None and not options.output.parent.is_dir():
        raise ValueError(
            f"--output {options.output}: the folder {options.output.parent} does not exist; create it first"
        )
    plans, best = search(
        config, topology, asked, tries=options.tries, batches=[int(batch) for batch in options.batches],
        progress=_progress,
    )  # fmt: skip
    recipe = _recipe(len(plans), *best, topology, config) if best else None
    if options.output is not None and recipe is not None:
        options.output.write_text(recipe, encoding="utf-8")
    if options.json:
        candidates = [dataclasses.asdict(each) for each in plans]
        chosen = dataclasses.asdict(best[1]) if best else None
        print(json.dumps({"candidates": candidates, "best": chosen, "recipe": recipe}))
        return
    print("\n".join(search_lines(plans, best[1] if best else None)))
    if recipe is None:
        print(f"no candidate fits {topology.name}; {step_advice(config)}")
    elif options.output is not None:
        print(f"best: {options.output}")
    else:
        print(f"\n{recipe}", end="")


def _recipe(tried: int, config: PretrainConfig, best: Plan, topology: Topology, original: PretrainConfig) -> str:
    """Return the YAML recipe of ``config``, the fastest candidate of a search, with a comment that
    summarizes its plan ``best``."""
    head = [
        f"The fastest of {tried} layouts that bert-jax plan --search tried for {topology.name}.",
        f"Predicted ({best.method}): {1000 * (best.predicted_step_seconds or 0):,.1f} ms per step, "
        f"{best.predicted_mfu or 0:.1%} MFU, {best.peak_bytes / 2**30:,.1f} of {best.hbm_bytes / 2**30:,.1f} GiB.",
    ]
    if best.global_batch_size != original.training.global_batch_size:
        head.append(
            f"The global batch of the original recipe is {original.training.global_batch_size:,}; choose another "
            "learning rate and number of steps."
        )
    return "".join(f"# {line}\n" for line in head) + dump_yaml(config)
