"""``bert-jax finetune`` and ``run_finetune.py``: read task files, fine-tune, export."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from bert_jax import registry
from bert_jax.commands.options import Caller, with_encoder
from bert_jax.config import RunOptions, dump_yaml
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import HELP, HELP_ALL, Settings, build_config, show_help, take_options
from bert_jax.config.options import extended, field_types
from bert_jax.io.storage import location
from bert_jax.process import early, exits
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.process.allocator import keep_freed_memory, require_memory
from bert_jax.process.exits import run_command
from bert_jax.process.signals import StopRequest
from bert_jax.records import Record
from bert_jax.training.launch import Launch
from bert_jax.training.logging.logger import make_loggers

if TYPE_CHECKING:
    from bert_jax.finetuning.supervision import Supervision
    from bert_jax.interop.model_bundle import ModelBundle
    from bert_jax.start.start import Start
    from bert_jax.tasks.task import OwnMetrics


# Records by split, and the names of the splits that do not select the best parameters.
Records = tuple[Mapping[str, Sequence[Record]], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class TaskCaller(Caller):
    """The inputs of a fine-tuning run that a program passes in addition to its options."""

    # Function of the config that returns the records. None: they are read from files.
    read: Callable[[FinetuneConfig], Records] | None = None
    # Further metrics by name (``Task.own_metrics``).
    metrics: "OwnMetrics" = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FinetuneRunOptions(RunOptions):
    """Fine-tuning options that are not part of the config of a run.

    A room adds options by a subclass, which overrides what they change; other methods call those of ``super()``.
    """

    FIXED: ClassVar[tuple[str, ...]] = ("continue_from", "add_words", "vocab_slots", "extend_positions")
    PARTS: ClassVar[registry.Kind] = "finetune_options"

    @property
    def several(self) -> tuple[str, ...]:
        """Options that turn this command into several runs; at most one of them may be set."""
        return ()

    def execute(self, settings: Settings, stop: StopRequest) -> int:
        """Execute the command; return the exit code."""
        train(self, settings, stop, early.STARTED)
        return exits.OK

    def shown(self, settings: Settings) -> FinetuneConfig:
        """Return the config to print, of a run that starts from a model or from a checkpoint."""
        return configure(self, settings)[0]

    def records(self, config: FinetuneConfig) -> Records:
        """Return the records of the files that the section data names. Raises ``ValueError`` for an invalid
        file."""
        return read_files(config)

    def supervision(self, config: FinetuneConfig, report: Callable[[str], None]) -> "Supervision":
        """Return the training signal in addition to the labels. ``report`` is called with each line about it."""
        from bert_jax.finetuning.supervision import LABELS_ONLY

        return LABELS_ONLY


def main(argv: Sequence[str] | None = None, program: str = "run_finetune.py") -> int:
    """Fine-tune as the arguments ``argv`` (default: those of the process) state; return the exit code.

    Installs handlers for SIGINT and SIGTERM, which end the run at its next step. ``program`` is the name of the
    command in its help.
    """
    stop = StopRequest.install()  # before the heavy imports, so that no signal during them is lost
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv, program, stop))


def _run(argv: Sequence[str], program: str, stop: StopRequest) -> int:
    options, settings = take_options(extended(FinetuneRunOptions), argv)
    if HELP & set(argv):  # only an encoder in a file imports JAX
        show_help(extended(FinetuneConfig), with_encoder(settings), program, type(options), whole=HELP_ALL in argv)
        return exits.OK
    if options.print_config:
        print(dump_yaml(shown(options, with_encoder(settings))), end="")
        return exits.OK

    keep_to_cpu_without_accelerator()
    from bert_jax.process import hosts

    hosts.start(options)
    if hosts.count() > 1:
        stop.share()
    with hosts.ends_together(options.host_timeout):
        if len(options.several) > 1:
            first, second, *_ = options.several
            raise ValueError(f"{first}: not allowed with {second}; omit these")
        return options.execute(with_encoder(settings), stop)


def shown(options: FinetuneRunOptions, settings: Settings) -> FinetuneConfig:
    """Return the config to print, before any records are read. It contains the sizes of the initial or restored
    model, if one exists."""
    from bert_jax.training.checkpoint.folder import saved_steps

    if not (options.init_from or saved_steps(location(options.folder("finetune")))):
        return build_config(extended(FinetuneConfig), settings.all, [*field_types(type(options))])
    return options.shown(settings)


def configure(
    options: FinetuneRunOptions, settings: Settings, model: "ModelBundle | None" = None
) -> "tuple[FinetuneConfig, Start]":
    """Return the resolved config, and the :class:`Start` that determines its model section. ``model``: the initial
    model, if it is in memory."""
    from bert_jax.start.plan import plan_start

    config_type = extended(FinetuneConfig)
    start = plan_start(config_type, options, location(options.folder("finetune")), settings.all, model)
    config = build_config(config_type, [*settings.all, *start.settings], [*field_types(type(options))])
    return config, start


def training_records(config: FinetuneConfig) -> list[Record]:
    """Return the training records, with the names of classes that predictions have."""
    from data_pipeline.tasks import read_splits, with_label_names

    return [with_label_names(record, config.data) for record in read_splits(config.data, config.task.kind)["train"]]


def records_of(config: FinetuneConfig, split: str) -> list[Record]:
    """Return the records of the files that ``data.SPLIT`` names. Raises ``ValueError`` for an invalid file."""
    from data_pipeline.tasks import read_named

    data, kind = config.data, config.task.kind
    return [record for name in getattr(data, split) for record in read_named(name, data, kind, split)]


def read_files(config: FinetuneConfig) -> Records:
    """Return the records of the files that the section data names."""
    from data_pipeline.tasks import read_splits, split_names

    return read_splits(config.data, config.task.kind), split_names(config.data)[1]


def train(
    options: FinetuneRunOptions,
    settings: Settings,
    stop: StopRequest,
    started: float,
    caller: TaskCaller = TaskCaller(),
) -> None:
    """Read the records, then fine-tune. ``started``: start time of the run, a value of ``time.perf_counter``."""
    config, start = configure(options, settings, caller.model)
    loggers = make_loggers(options.loggers)
    if options.keep_memory:
        rows = config.training.global_batch_size // config.training.accumulation_steps
        keep_freed_memory(config.model, rows * config.task.max_length, config.task.max_length)

    import jax

    from bert_jax.finetuning.finetune import finetune
    from bert_jax.process import hosts

    jax.devices()  # raises for a platform of JAX_PLATFORMS that cannot be used
    require_memory(config, config.task.max_length, hosts.count())
    splits, tests = (caller.read or options.records)(config)

    def report(line: str) -> None:
        if hosts.is_lead():
            caller.say(line)

    supervision = options.supervision(config, report)
    launch = Launch(
        workdir=location(options.folder("finetune")),
        stop=stop,
        start=start,
        host_timeout=options.host_timeout,
        started=started,
        report=caller.report,
        loggers=loggers,
        callbacks=caller.callbacks,
    )
    finetune(
        config, launch, splits=splits, tests=tests, start=start, supervision=supervision, metrics=caller.metrics
    )
