"""``bert-jax pretrain`` and ``run_pretrain.py``: create a vocabulary and shards from text, then pretrain."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax.commands.options import take_encoder
from bert_jax.config import PretrainConfig, RunOptions, dump_yaml, load_config
from bert_jax.config.loader import HELP, Setting, read_settings, take_options
from bert_jax.config.pretrain import with_text_length
from bert_jax.io.storage import location
from bert_jax.objectives.registry import objective_class
from bert_jax.process import early
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.process.allocator import keep_freed_memory, require_memory
from bert_jax.process.exits import run_command
from bert_jax.process.signals import StopRequest
from bert_jax.registry import check, load
from bert_jax.training.launch import TEACHER_RECORD, Launch

if TYPE_CHECKING:
    from bert_jax.start.start import Start
    from bert_jax.tokenization import Tokenizer
    from bert_jax.training.launch import Teacher


def main(argv: Sequence[str] | None = None, program: str = "run_pretrain.py") -> int:
    """Pretrain as the arguments ``argv`` (default: those of the process) state; return the exit code.

    Installs handlers for SIGINT and SIGTERM, which end the run at its next step. ``program`` is the name of the
    command in its help.
    """
    stop = StopRequest.install()  # before the heavy imports, so that no signal during them is lost
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv, program, stop))


def _run(argv: Sequence[str], program: str, stop: StopRequest) -> None:
    argv, encoder = take_encoder(argv)
    options, arguments = take_options(RunOptions, [*argv, *encoder])
    if HELP & set(arguments):  # exits here, before JAX is imported
        load_config(PretrainConfig, arguments, prog=program, extra=RunOptions)
    if options.print_config:
        config, *_ = configure(options, arguments)
        print(dump_yaml(config), end="")
        return

    keep_to_cpu_without_accelerator()
    from bert_jax.process import hosts

    hosts.start(options)
    if hosts.count() > 1:
        stop.share()
    with hosts.ends_together(options.host_timeout):
        train(options, arguments, stop)


def configure(options: RunOptions, arguments: list[str]) -> "tuple[PretrainConfig, Start, Teacher | None]":
    """Return the resolved config, and the start and the teacher of the run, which determine some of its options."""
    from bert_jax.start.plan import plan_start

    workdir = location(options.folder("pretrain"))
    start = plan_start(PretrainConfig, options, workdir, arguments)
    teacher = None
    if options.teacher or options.teacher_outputs or (workdir / TEACHER_RECORD).is_file():
        from bert_jax.interop.model_bundle import ReadOptions

        reading = ReadOptions(allow_mismatch=options.allow_mismatch)
        find_teacher = load("extensions", "--teacher").find_teacher
        teacher = find_teacher(options.teacher, workdir, reading, options.teacher_outputs)
    config = load_config(PretrainConfig, arguments, extra=RunOptions, extra_settings=start.settings)
    check("objectives", config.objective.name, "objective.name")
    if teacher is not None:
        if (name := config.objective.name) != "distillation":
            raise ValueError(f"--teacher: not allowed with objective.name {name}; set distillation, or omit it")
        width = Setting("--teacher", "objective.teacher_width", str(teacher.spec.model.hidden_size))
        settings = (*start.settings, width)
        config = load_config(PretrainConfig, arguments, extra=RunOptions, extra_settings=settings)
    if teacher is not None and teacher.outputs and config.data.masking != "static":
        given = f"data.masking: {config.data.masking} is not allowed with --teacher_outputs"
        raise ValueError(f"{given}, because each pass has other masks; allowed: static")
    if teacher is None and config.objective.name == "distillation":
        raise ValueError("--teacher: missing; name the model whose outputs the run learns to reproduce")
    return config, start, teacher


def train(options: RunOptions, arguments: list[str], stop: StopRequest) -> None:
    """Prepare the data, then pretrain."""
    config, start, teacher = configure(options, arguments)
    if not (config.training.num_steps or start.source):
        raise ValueError(
            "training.num_steps: not set; name a recipe, such as --config configs/quickstart.yaml, or set "
            "training.num_steps or training.num_tokens (only with --init_from they follow from the text)"
        )
    if options.keep_memory:
        rows = config.training.global_batch_size // config.training.accumulation_steps
        keep_freed_memory(config.model, rows * config.data.seq_length, config.data.seq_length)
    # Created first, so that an invalid file or conflicting options are reported before the data are prepared.
    objective = objective_class(config.objective)
    model = objective.make_model(config, None)

    import jax

    from bert_jax.objectives.objective import TaughtObjective
    from bert_jax.process import hosts
    from bert_jax.start.plan import pretraining_spec
    from bert_jax.training.pretrain import PretrainJob
    from bert_jax.training.run import train as run
    from data_pipeline.read.pretrain_input import ShardSource

    if teacher is not None and hosts.is_lead():
        for note in teacher.notes:
            _report(f"--teacher {teacher.name}: {note}")
    if teacher is not None and issubclass(objective, TaughtObjective):
        objective(config, None).teach(teacher.spec)  # raises for a model that cannot teach this run
    jax.devices()  # raises for a platform of JAX_PLATFORMS that cannot be used
    require_memory(config, config.data.seq_length, hosts.count())
    vocabulary, tokenizer = _prepared(config, options, arguments, start, teacher, stop)
    start = start.with_parameters(pretraining_spec(config, model))
    start = dataclasses.replace(start, params=dict(objective.placed(config, start.params)))
    if not config.training.num_steps:
        given = [setting.key for setting in read_settings(arguments)]
        config, line = with_text_length(config, ShardSource(config, tokenizer).examples_per_pass, given)
        start = dataclasses.replace(start, messages=(*start.messages, line))
    launch = Launch(
        workdir=location(options.folder("pretrain")),
        stop=stop,
        start=start,
        host_timeout=options.host_timeout,
        started=early.STARTED,
    )
    source, outputs = ShardSource(config, tokenizer), None
    if "mlm_loss" in objective.display.keys:
        source.require_predictions()
    if teacher is not None and teacher.outputs:
        with stop.at_once("stopped; the same command continues with the outputs of the teacher"):
            outputs = load("extensions", "--teacher_outputs").prepared_outputs(
                config, objective, teacher, source, _report
            )
        source = ShardSource(config, tokenizer, outputs)
    run(PretrainJob(config, objective, tokenizer, vocabulary, source, teacher, outputs), launch)


def _prepared(
    config: PretrainConfig, options: RunOptions, arguments: list[str], start: "Start", teacher: "Teacher | None",
    stop: StopRequest,
) -> "tuple[Path, Tokenizer]":  # fmt: skip
    """Build the vocabulary and the shards that do not exist yet; return the vocabulary file and the tokenizer.

    Raises ``ValueError``, before anything is built, if a checkpoint, an earlier phase or the teacher has another
    vocabulary.
    """
    from bert_jax.process import hosts
    from bert_jax.start.state import check_checkpoint
    from bert_jax.start.tokenizer import check_padding
    from bert_jax.tokenization import load_tokenizer
    from bert_jax.training.checkpoint.folder import saved_steps
    from data_pipeline.build.ensure import STOPPED, ensure_data, require_shards
    from data_pipeline.build.vocabulary import existing_vocabulary, place_vocabulary, vocabulary_path

    workdir = location(options.folder("pretrain"))
    with stop.at_once(STOPPED):
        if start.vocabulary is not None and hosts.is_lead():
            name, content = start.vocabulary
            place_vocabulary(location(name), content)
        hosts.barrier("vocabulary", options.host_timeout)
        known = existing_vocabulary(config.data, config.model.vocab_size)[1]
        check_checkpoint(workdir, start.continue_from, config, known)
        if teacher is not None and not config.data.mixture:
            load("extensions", "--teacher").check_vocabulary(teacher, known, vocabulary_path(config.data))
        if hosts.count() == 1:
            vocabulary = ensure_data(config.data, vocab_size=config.model.vocab_size, report=_report)
        else:
            vocabulary = require_shards(config, arguments)
    tokenizer = load_tokenizer(vocabulary, **config.data.rules)
    if config.objective.name != "causal_lm" and not config.objective.module:
        tokenizer.require_mask(f"objective.name {config.objective.name} (causal_lm needs none)")
    if not (options.init_from or options.continue_from or saved_steps(workdir)):
        check_padding(config.model.position_offset, tokenizer, vocabulary)
    if teacher is not None:
        load("extensions", "--teacher").check_vocabulary(teacher, tokenizer, vocabulary)
    return vocabulary, tokenizer


def _report(line: str) -> None:
    print(line, flush=True)
