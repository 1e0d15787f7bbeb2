"""``bert-jax pretrain`` and ``run_pretrain.py``: create a vocabulary and shards from text, then pretrain."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bert_jax.commands.options import COMMAND, Caller, with_encoder
from bert_jax.config import PretrainConfig, RunOptions, dump_yaml
from bert_jax.config.loader import (
    HELP,
    HELP_ALL,
    Settings,
    build_config,
    load_config,
    show_help,
    take_options,
)
from bert_jax.config.options import field_types
from bert_jax.config.pretrain import DataConfig, with_text_length
from bert_jax.io.storage import location
from bert_jax.objectives.inputs import Inputs
from bert_jax.objectives.registry import inputs_class, objective_class
from bert_jax.process import early
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.process.allocator import keep_freed_memory, require_memory
from bert_jax.process.exits import run_command
from bert_jax.process.signals import StopRequest
from bert_jax.training.launch import Launch
from bert_jax.training.logging.logger import make_loggers
from bert_jax.training.logging.run_files import CONFIG_FILE

# Largest number of files of which a check reads the first lines.
_READ_FILES = 16

if TYPE_CHECKING:
    from bert_jax.batch import PretrainSource
    from bert_jax.interop.model_bundle import ModelBundle
    from bert_jax.start.start import Start
    from bert_jax.tokenization import Tokenizer


def main(argv: Sequence[str] | None = None, program: str = "run_pretrain.py") -> int:
    """Pretrain as the arguments ``argv`` (default: those of the process) state; return the exit code.

    Installs handlers for SIGINT and SIGTERM, which end the run at its next step. ``program`` is the name of the
    command in its help.
    """
    stop = StopRequest.install()  # before the heavy imports, so that no signal during them is lost
    return run_command(functools.partial(_run, sys.argv[1:] if argv is None else argv, program, stop))


def _run(argv: Sequence[str], program: str, stop: StopRequest) -> None:
    options, settings = take_options(RunOptions, argv)
    if HELP & set(argv):  # only an encoder in a file imports JAX
        show_help(PretrainConfig, with_encoder(settings), program, type(options), whole=HELP_ALL in argv)
        return
    if options.print_config:
        config, *_ = configure(options, with_encoder(settings))
        print(dump_yaml(config), end="")
        return

    keep_to_cpu_without_accelerator()
    from bert_jax.process import hosts

    hosts.start(options)
    if hosts.count() > 1:
        stop.share()
    with hosts.ends_together(options.host_timeout):
        train(options, with_encoder(settings), stop, early.STARTED)


def configure(
    options: RunOptions, settings: Settings, model: "ModelBundle | None" = None
) -> "tuple[PretrainConfig, Start, Inputs]":
    """Return the resolved config, and the start and the inputs of the objective, which determine some of its
    options. ``model``: the initial model, if it is in memory. To print the config, the file of ``objective.module``
    is not run."""
    from bert_jax.start.plan import plan_start

    workdir = location(options.folder("pretrain"))
    start = plan_start(PretrainConfig, options, workdir, settings.all, model)
    also = [*field_types(type(options))]
    config = build_config(PretrainConfig, [*settings.all, *start.settings], also)
    if options.print_config and config.objective.module:
        return config, start, Inputs()
    inputs = inputs_class(config.objective).find(config, options, workdir)
    if inputs.settings:
        config = build_config(PretrainConfig, [*settings.all, *start.settings, *inputs.settings], also)
    return config, start, inputs


def train(
    options: RunOptions, settings: Settings, stop: StopRequest, started: float, caller: Caller = COMMAND
) -> None:
    """Prepare the data, then pretrain. ``started``: start time of the run, a value of ``time.perf_counter``."""
    config, start, inputs = configure(options, settings, caller.model)
    if not (config.training.num_steps or start.source):
        raise ValueError(
            "training.num_steps: not set; name a recipe, such as --config configs/quickstart.yaml, or set "
            "training.num_steps or training.num_tokens (with --init_from, the default follows from the text)"
        )
    loggers = make_loggers(options.loggers)
    if options.keep_memory:
        rows = config.training.global_batch_size // config.training.accumulation_steps
        keep_freed_memory(config.model, rows * config.data.seq_length, config.data.seq_length)
    # Created first, so that an invalid file or conflicting options are reported before the data are prepared.
    objective = objective_class(config.objective)
    first = objective(config, None)

    import jax

    from bert_jax.process import hosts
    from bert_jax.start.plan import pretraining_spec
    from bert_jax.training.pretrain import PretrainJob
    from bert_jax.training.run import train as run
    from data_pipeline.read.pretrain_input import ShardSource

    for note in inputs.notes if hosts.is_lead() else ():
        caller.say(note)
    inputs.give(first)  # raises for inputs that do not fit this run
    jax.devices()  # raises for a platform of JAX_PLATFORMS that cannot be used
    require_memory(config, config.data.seq_length, hosts.count())
    vocabulary, tokenizer = _prepared(config, options, settings, start, inputs, stop, caller.say)
    spec = pretraining_spec(config, first.model)
    start = start.with_parameters(spec)
    start = dataclasses.replace(start, params=dict(objective.placed(config, start.params)))
    if not config.training.num_steps:
        given = [setting.key for setting in settings.all]
        config, line = with_text_length(config, ShardSource(config, tokenizer).examples_per_pass, given)
        start = dataclasses.replace(start, messages=(*start.messages, line))
    launch = Launch(
        workdir=location(options.folder("pretrain")),
        stop=stop,
        start=start,
        host_timeout=options.host_timeout,
        started=started,
        report=caller.report,
        callbacks=caller.callbacks,
        loggers=loggers,
    )
    source = ShardSource(config, tokenizer)
    if "mlm_loss" in objective.display.keys:
        source.require_predictions()
    source.more = inputs.features(config, objective, source, stop, caller.say)
    run(PretrainJob(config, objective, tokenizer, vocabulary, source, inputs), launch)
    if hosts.is_lead():
        caller.say(f"exports: bert-jax export --model {launch.workdir} names the formats that hold this model")


class Reopened(NamedTuple):
    """The inputs of a pretraining run that a command reads after it."""

    config: PretrainConfig
    tokenizer: "Tokenizer"
    source: "PretrainSource"
    # Number of training documents; None if the shards do not record it.
    documents: int | None
    # Number of training records.
    records: int


def reopen(workdir: Path) -> Reopened:
    """Return the inputs of the pretraining run in ``workdir``. Raises ``ValueError`` for another folder, and if the
    vocabulary or the shards are gone."""
    path = workdir / CONFIG_FILE
    if not path.is_file() or "task:" in path.read_text(encoding="utf-8").splitlines():
        raise ValueError(f"{workdir}: not the workdir of a pretraining run; name one")
    from bert_jax.start.fixed_options import vocabulary_file
    from bert_jax.tokenization import load_tokenizer
    from data_pipeline.read.pretrain_input import ShardSource
    from data_pipeline.shards.mixture_parts import train_parts
    from data_pipeline.shards.shard_files import read_manifest

    config = load_config(PretrainConfig, ["--config", str(path)])
    vocabulary = vocabulary_file(workdir)
    if vocabulary is None:
        raise ValueError(f"{workdir}: no vocabulary file; start the run, which writes it")
    tokenizer = load_tokenizer(str(vocabulary), **config.data.rules)
    manifests = [read_manifest(part.folder) for part in train_parts(config.data)]
    documents = [one["counts"]["documents"] for one in manifests if one is not None]
    known = len(documents) == len(manifests)
    source = ShardSource(config, tokenizer)
    records, _ = source.content(held_out=False)
    return Reopened(config, tokenizer, source, sum(documents) if known else None, records)


def corpus_lines(data: DataConfig, most: int) -> list[str]:
    """Return the first lines of some files of ``data.corpus`` as training reads them, about ``most`` characters.
    Entries that are not on this machine, and datasets, are omitted."""
    from data_pipeline.text.corpus import corpus_of
    from data_pipeline.text.documents import read_documents

    there = tuple(entry for entry in data.corpus if entry.startswith("package:") or Path(entry).exists())
    if not there:
        return []
    sources = corpus_of(dataclasses.replace(data, corpus=there))
    chosen = sources[:: -(-len(sources) // _READ_FILES)]
    lines = list[str]()
    for source in chosen:
        left = most // len(chosen)
        for line in chain.from_iterable(read_documents(source, line="sentence", json_field=data.json_field)):
            lines.append(line)
            left -= len(line)
            if left <= 0:
                break
    return lines


def _prepared(
    config: PretrainConfig, options: RunOptions, settings: Settings, start: "Start", inputs: Inputs,
    stop: StopRequest, report: Callable[[str], None],
) -> "tuple[Path, Tokenizer]":  # fmt: skip
    """Build the vocabulary and the shards that do not exist yet; return the vocabulary file and the tokenizer.

    Raises ``ValueError``, before anything is built, if a checkpoint, an earlier phase or the inputs of the
    objective have another vocabulary.
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
        if not config.data.mixture:
            inputs.check_vocabulary(known, vocabulary_path(config.data))
        if hosts.count() == 1:
            vocabulary = ensure_data(config.data, vocab_size=config.model.vocab_size, report=report)
        else:
            vocabulary = require_shards(config, settings)
    tokenizer = load_tokenizer(vocabulary, **config.data.rules)
    if config.objective.needs_mask:
        tokenizer.require_mask(f"objective.name {config.objective.name} (causal_lm needs none)")
    if not (options.init_from or options.continue_from or saved_steps(workdir)):
        check_padding(config.model.position_offset, tokenizer, vocabulary)
    inputs.check_vocabulary(tokenizer, vocabulary)
    return vocabulary, tokenizer
