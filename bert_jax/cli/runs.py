"""Subcommands of ``bert-jax`` for training runs: compare, submission, plan."""

import argparse
import json
from pathlib import Path

from bert_jax.cli.options import Command, names_of, option


def compare_command(arguments: argparse.Namespace) -> None:
    """Compare two fine-tuning runs on one split: difference, 95% interval (paired bootstrap) and p-value.

    The p-value is from McNemar's exact test if the metric is a share of right predictions, such as accuracy;
    otherwise it is from the bootstrap.
    """
    from bert_jax.experiments.compare import compare, table
    from bert_jax.io.storage import location

    comparison = compare(
        location(arguments.first), location(arguments.second), arguments.split, arguments.metric,
        seed=arguments.seed, resamples=arguments.resamples,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps(comparison.as_dict(), ensure_ascii=False))
        return
    for line in table(comparison):
        print(line)


def submission_command(arguments: argparse.Namespace) -> None:
    """Write the files for the GLUE leaderboard (CoLA.tsv and others) from the test-set predictions of the runs, and
    a zip file that contains them."""
    from bert_jax.experiments.submission import write_submission
    from bert_jax.io.storage import location

    for line in write_submission([location(name) for name in arguments.workdirs], arguments.output):
        print(line)


def plan_command(arguments: argparse.Namespace) -> None:
    """Predict memory, step time, MFU, duration and cost of a pretraining recipe on a TPU slice or on GPUs, by
    compiling its training step ahead of time (extra: tpu or gpu). No accelerator is needed."""
    from bert_jax.planner.topology import prepare_environment

    prepare_environment()  # before JAX starts
    from bert_jax.planner.command import PlanOptions, plan

    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "run", "config")}
    files = [word for file in arguments.config for word in ("--config", file)]
    plan(PlanOptions(**options | {"recipe": [*files, *arguments.recipe]}))


_PLAN = {
    "allow_abbrev": False,
    "usage": "bert-jax plan --config FILE --topology NAME [options] [--section.key VALUE ...]",
    "epilog": "--section.key VALUE: any option of a recipe, as for run_pretrain.py. See docs/planning.md.",
}
COMMANDS = (
    Command("compare", "is one fine-tuned model better than another?", compare_command, (
        option("first", metavar="A", help="workdir of run_finetune.py"),
        option("second", metavar="B", help="workdir of another run, on the same records"),
        option("--split", default="dev", help="SPLIT in predictions_SPLIT.jsonl (default: dev)"),
        option("--metric", metavar="NAME", help="name in metrics.json (default: task.metric, else the first)"),
        option("--seed", type=int, default=0, metavar="N", help="seed of the bootstrap (default: 0)"),
        option("--resamples", type=int, default=1000, metavar="N", help="bootstrap resamples (default: 1000)"),
        option("--json", action="store_true", help="one JSON object"),
    )),
    Command("submission", "the files for GLUE's leaderboard", submission_command, (
        option("workdirs", nargs="+", metavar="WORKDIR", help="workdir of run_finetune.py with a GLUE recipe"),
        option("--output", type=Path, required=True, metavar="DIR", help="folder in which to write the files"),
    )),
    Command("plan", "memory, speed, time and cost of a recipe on absent hardware", plan_command, (
        option("--config", action="append", default=[], metavar="FILE", help="recipe; several are allowed"),
        option("--topology", metavar="NAME", help="v5e:16x16, v5e-256, v5p:4x4x8, h100:8, ..."),
        option(
            "--devices", type=int, metavar="N",
            help="with --show_sharding: number of devices, instead of --topology",
        ),
        option("--json", action="store_true", help="one JSON object"),
        option("--price_per_chip_hour", type=float, metavar="X", help="price, to compute the cost of the run"),
        option("--first_step", type=int, default=0, metavar="N", help="steps done by earlier phases (default: 0)"),
        option("--show_sharding", action="store_true", help="print the partition and bytes of every parameter"),
        option("--search", action="store_true", help="search for the fastest layout (microbatches, remat, mesh)"),
        option("--tries", type=int, default=8, metavar="N", help="maximum number of compilations (default: 8)"),
        option(
            "--batches", type=names_of, default=(), metavar="16,64,...",
            help="with --search: sequences per device to try; they replace the global batch of the recipe",
        ),
        option("--output", type=Path, metavar="FILE", help="with --search: recipe of the fastest layout"),
    ), _PLAN),
)  # fmt: skip
