"""The command that plans a training run: plan."""

import argparse
from pathlib import Path

from bert_jax.commands.options import Command, names_of, option

_PLAN = {
    "allow_abbrev": False,
    "usage": "bert-jax plan --config FILE --topology NAME [options] [--section.key VALUE ...]",
}


def plan_command(arguments: argparse.Namespace) -> None:
    """Predict memory, step time, MFU, duration and cost of a pretraining recipe on a TPU slice or on GPUs, by
    compiling its training step ahead of time (requires the tpu or gpu extra). No accelerator is needed.
    --section.key VALUE sets an option of the recipe, as in run_pretrain.py. See docs/planning.md."""
    from bert_jax.contrib.planner.topology import prepare_environment

    prepare_environment()  # before JAX starts
    from bert_jax.contrib.planner.command import PlanOptions, plan

    others = ("command", "run", "config", "is_whole", "takes_recipe")
    options = {name: value for name, value in vars(arguments).items() if name not in others}
    files = [word for file in arguments.config for word in ("--config", file)]
    plan(PlanOptions(**options | {"recipe": [*files, *arguments.recipe]}))


COMMANDS = (
    Command("plan", "predict memory, time and cost of a recipe on hardware that is not present", plan_command, (
        option(
            "--config", action="append", default=[], metavar="FILE",
            help="recipe; the option may be repeated",
        ),
        option(
            "--topology", metavar="NAME",
            help="TPU slice or GPUs, such as v5e:16x16, v5e-256, v5p:4x4x8 or h100:8",
        ),
        option(
            "--devices", type=int, metavar="N",
            help="with --show_sharding: number of devices; replaces --topology",
        ),
        option("--json", action="store_true", help="print the plan as one JSON object"),
        option(
            "--price_per_chip_hour", type=float, metavar="X",
            help="price of one chip for one hour, from which the cost of the run is computed",
        ),
        option(
            "--first_step", type=int, default=0, metavar="N",
            help="number of steps of earlier phases (default: 0)",
        ),
        option("--show_sharding", action="store_true", help="print the sharding and the bytes of every parameter"),
        option(
            "--search", action="store_true",
            help="search for the fastest layout: number of microbatches, execution.remat and mesh",
        ),
        option(
            "--tries", type=int, default=8, metavar="N",
            help="with --search: maximum number of layouts to compile (default: 8)",
        ),
        option(
            "--batches", type=names_of, default=(), metavar="16,64,...",
            help="with --search: numbers of sequences per device to try, separated by commas; the resulting "
            "global batch sizes replace that of the recipe",
        ),
        option(
            "--output", type=Path, metavar="FILE",
            help="with --search: file for the fastest recipe (default: print it)",
        ),
    ), _PLAN, is_whole=False, takes_recipe=True, group="train",
        example="--config configs/bert_base_phase1.yaml --topology v5e:16x16 --price_per_chip_hour 1.2",
    ),
)  # fmt: skip
