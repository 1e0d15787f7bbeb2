"""``bert-jax finetune`` and ``run_finetune.py``: read task files, fine-tune, export."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax.commands.options import with_encoder
from bert_jax.config import dump_yaml, load_config
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import HELP, read_settings, take_options
from bert_jax.config.schema import TEACHER_RECORD
from bert_jax.config.sweep import Cell, FinetuneRunOptions, plan_cells
from bert_jax.io.storage import location
from bert_jax.process import early, exits
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.process.allocator import keep_freed_memory, require_memory
from bert_jax.process.exits import run_command
from bert_jax.process.signals import StopRequest
from bert_jax.records import Record
from bert_jax.registry import load
from bert_jax.training.launch import Launch

if TYPE_CHECKING:
    from bert_jax.inference.loaded import LoadedModel
    from bert_jax.start.start import Start


def main(argv: Sequence[str] | None = None, program: str = "run_finetune.py") -> int:
    """Fine-tune as the arguments ``argv`` (default: those of the process) state; return the exit code.

    Installs handlers for SIGINT and SIGTERM, which end the run at its next step. ``program`` is the name of the
    command in its help.
    """
    stop = StopRequest.install()  # before the heavy imports, so that no signal during them is lost
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv, program, stop))


def _run(argv: Sequence[str], program: str, stop: StopRequest) -> int:
    options, arguments = take_options(FinetuneRunOptions, argv)
    if HELP & set(arguments):  # exits here; only an encoder in a file imports JAX
        load_config(FinetuneConfig, with_encoder(arguments), prog=program, extra=FinetuneRunOptions)
    if options.print_config:
        print(dump_yaml(shown(options, with_encoder(arguments))), end="")
        return exits.OK

    keep_to_cpu_without_accelerator()
    from bert_jax.process import hosts

    hosts.start(options)
    if hosts.count() > 1:
        stop.share()
    with hosts.ends_together(options.host_timeout):
        arguments = with_encoder(arguments)
        if options.is_pruned:
            prune(options, arguments, stop)
            return exits.OK
        if options.is_sweep:
            return sweep(options, arguments, stop)
        train(options, arguments, stop, early.STARTED)
    return exits.OK


def shown(options: FinetuneRunOptions, arguments: list[str]) -> FinetuneConfig:
    """Return the config to print, before any records are read. It contains the sizes of the initial or restored
    model, if one exists. For a sweep, it contains the options that all runs share."""
    from bert_jax.training.checkpoint.folder import saved_steps

    if not (options.init_from or saved_steps(location(options.folder("finetune")))):
        return load_config(FinetuneConfig, arguments, extra=FinetuneRunOptions)
    if options.is_sweep:
        return plan(options, arguments)[0]
    return configure(options, arguments)[0]


def plan(options: FinetuneRunOptions, arguments: list[str]) -> tuple[FinetuneConfig, list[Cell]]:
    """Return the config that all runs of a sweep share, and the runs."""
    start = configure(options, arguments)[1]
    return plan_cells(options, [*read_settings(arguments), *start.settings])


def sweep(options: FinetuneRunOptions, arguments: list[str], stop: StopRequest) -> int:
    """Execute every run of ``--sweep`` and ``--seeds``; return the exit code."""
    base, cells = plan(options, arguments)

    from bert_jax.start.fixed_options import whole_name

    def one(folder: Path, more: list[str]) -> None:
        own = dataclasses.replace(options, workdir=str(folder), sweep=(), seeds=1)
        train(own, [*arguments, *more], stop, time.perf_counter())

    code: int = load("extensions", "finetune --sweep")(
        base,
        cells,
        Path(options.folder("finetune")),
        one,
        init_from=whole_name(options.init_from),
        stop=stop,
        host_timeout=options.host_timeout,
    )
    return code


def prune(options: FinetuneRunOptions, arguments: list[str], stop: StopRequest) -> None:
    """Train and prune in rounds (``--prune_heads``, ``--prune_units``)."""
    from data_pipeline.tasks import read_splits, with_label_names

    def records_of(config: FinetuneConfig) -> list[Record]:
        records = read_splits(config.data, config.task.kind)["train"]
        return [with_label_names(record, config.data) for record in records]

    load("extensions", "finetune --prune_heads")(
        options,
        configure=lambda own: configure(own, arguments)[0],
        records_of=records_of,
        train=lambda own: train(own, arguments, stop, time.perf_counter()),
        stop=stop,
    )


def configure(options: FinetuneRunOptions, arguments: list[str]) -> "tuple[FinetuneConfig, Start]":
    """Return the resolved config, and the :class:`Start` that determines its model section."""
    from bert_jax.start.plan import plan_start

    start = plan_start(FinetuneConfig, options, location(options.folder("finetune")), arguments)
    config = load_config(FinetuneConfig, arguments, extra=FinetuneRunOptions, extra_settings=start.settings)
    return config, start


def train(options: FinetuneRunOptions, arguments: list[str], stop: StopRequest, started: float) -> None:
    """Read the records, then fine-tune. ``started``: start time of the run, a value of ``time.perf_counter``."""
    config, start = configure(options, arguments)
    if options.keep_memory:
        rows = config.training.global_batch_size // config.training.accumulation_steps
        keep_freed_memory(config.model, rows * config.task.max_length, config.task.max_length)

    import jax

    from bert_jax.finetuning.distillation.teachers import Teaching
    from bert_jax.finetuning.finetune import finetune
    from bert_jax.interop.model_bundle import ReadOptions
    from bert_jax.process import hosts
    from data_pipeline.tasks import read_splits, read_unlabelled, split_names

    jax.devices()  # raises for a platform of JAX_PLATFORMS that cannot be used
    require_memory(config, config.task.max_length, hosts.count())
    splits = read_splits(config.data, config.task.kind)
    workdir, record = location(options.folder("finetune")), ""
    teachers: Sequence[LoadedModel] = ()
    if options.teacher or (workdir / TEACHER_RECORD).is_file():
        reading = ReadOptions(allow_mismatch=options.allow_mismatch)
        find = load("extensions", "--teacher").find_task_teachers
        teachers, record = find(options.teacher, workdir, reading)

    def report(line: str) -> None:
        if hosts.is_lead():
            print(line, flush=True)

    for teacher in teachers:
        for note in teacher.notes:
            report(f"--teacher {teacher.name}: {note}")
    launch = Launch(
        workdir=workdir,
        stop=stop,
        start=start,
        host_timeout=options.host_timeout,
        started=started,
    )
    teaching = Teaching(teachers, record, read_unlabelled(config.data, config.task.kind), report)
    finetune(config, launch, splits=splits, tests=split_names(config.data)[1], start=start, teaching=teaching)
