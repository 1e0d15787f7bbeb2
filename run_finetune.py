"""Fine-tune BERT on a task: files to a trained model, metrics, predictions and an export.

python run_finetune.py --config configs/finetune/sst2.yaml --init_from MODEL --data.dir DIR

The same command on every host of a TPU pod or a SLURM job makes one run.
"""

import sys
import time

STARTED = time.perf_counter()

from bert_jax.training.signals import StopRequest

STOP = StopRequest.install()  # before the heavy imports: a signal that comes during them is not lost

from typing import Any

from bert_jax.accelerators import keep_to_cpu_without_accelerator
from bert_jax.config import dump_yaml, load_config
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import RunOptions, Setting, take_options
from bert_jax.exits import run_command
from bert_jax.storage import location


def main() -> None:
    options, arguments = take_options(RunOptions, sys.argv[1:])
    if options.print_config or {"--help", "-h"} & set(arguments):
        config = load_config(FinetuneConfig, arguments, prog="run_finetune.py", extra=RunOptions)
        print(dump_yaml(config), end="")
        return

    keep_to_cpu_without_accelerator()
    from bert_jax.parallel import hosts

    hosts.start(options)
    if hosts.count() > 1:
        STOP.share()
    with hosts.ends_together(options.host_timeout):
        train(options, arguments)


def configure(options: RunOptions, arguments: list[str]) -> tuple[FinetuneConfig, Any]:
    """The config with the model section of the model that the run starts from, and that start."""
    workdir, start = location(options.folder("finetune")), None

    def resolve(settings: list[Setting]) -> list[Setting]:
        nonlocal start
        from bert_jax.tasks import start as starts

        start, settings = starts.resolve(options, workdir, settings)
        return settings

    config = load_config(FinetuneConfig, arguments, prog="run_finetune.py", extra=RunOptions, resolve=resolve)
    return config, start


def train(options: RunOptions, arguments: list[str]) -> None:
    """Read the records, then fine-tune."""
    config, start = configure(options, arguments)

    from bert_jax.tasks.finetune import finetune
    from data_pipeline.tasks import read_splits, split_names

    splits = read_splits(config.data, config.task.kind)
    finetune(
        config,
        workdir=location(options.folder("finetune")),
        splits=splits,
        tests=split_names(config.data)[1],
        start=start,
        stop=STOP,
        allow_numeric_change=options.allow_numeric_change,
        host_timeout=options.host_timeout,
        started=STARTED,
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
