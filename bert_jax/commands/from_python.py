"""Pretraining and fine-tuning from Python: ``bert_jax.pretrain`` and ``bert_jax.finetune``.

Both do what the commands do, with options given as Python values. They set signal handlers only in the main thread
and only while they run, print nothing except by ``report``, and do not end the process.
"""

import contextlib
import json
import numbers
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bert_jax.commands import finetune as finetune_command
from bert_jax.commands import pretrain as pretrain_command
from bert_jax.commands import task_data
from bert_jax.commands.finetune import FinetuneRunOptions, Records, TaskCaller
from bert_jax.commands.options import Caller, with_encoder
from bert_jax.commands.plain_values import column_names
from bert_jax.config import RunOptions
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import OptionValue, Settings, python_settings, split_settings
from bert_jax.config.options import PYTHON, extended
from bert_jax.config.task import TaskKind
from bert_jax.io.files import whole_file
from bert_jax.io.signatures import names_parameters
from bert_jax.io.storage import is_url
from bert_jax.json_values import Json
from bert_jax.process import exits
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.process.signals import StopRequest
from bert_jax.training.logging.logger import Callback

if TYPE_CHECKING:
    from bert_jax.commands.trained import FinetuneRun, PretrainRun, TrainedRun
    from bert_jax.inference.loaded import LoadedModel
    from bert_jax.interop.model_bundle import ModelBundle
    from bert_jax.tasks.task import OwnMetrics

    Model = str | PathLike[str] | LoadedModel | TrainedRun

Text = str | Mapping[str, Json]
C = TypeVar("C", bound=RunOptions)
Run = TypeVar("Run", bound="TrainedRun")

# Options of the commands that are no options here, and what to use instead.
_PROCESSES = "use bert-jax pretrain or finetune, because jax already runs in this process"
_ELSEWHERE = {
    "config": "use the parameter recipe",
    "workdir": "use the parameter workdir",
    "init_from": "use the parameter of the initial model",
    "print_config": "see the attribute config of the run",
    **dict.fromkeys(("coordinator", "num_processes", "process_id", "heartbeat_timeout"), _PROCESSES),
}
# A text that only the name of a missing file can be.
_FILE_NAME = re.compile(r"\S+\.(txt|text|jsonl?|csv|tsv|parquet|xml)(\.(gz|bz2|xz|zst))?")
# Options of files of records.
_OF_FILES = ("train", "dev", "test", "dev_fraction", "train_limit", "dev_limit")


@names_parameters
def pretrain(
    recipe: str | PathLike[str] | None = None,
    *,
    corpus: str | PathLike[str] | Iterable[Text | PathLike[str]] | None = None,
    workdir: str | PathLike[str] | None = None,
    init_from: "Model | None" = None,
    num_steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    seed: int | None = None,
    options: Mapping[str, OptionValue] | None = None,
    callbacks: Sequence[Callback] = (),
    report: Callable[[str], None] | None = print,
) -> "PretrainRun":
    """Pretrain a model and return the run. The same call on the same ``workdir`` continues a run that was stopped,
    and returns a complete one unchanged.

    Ctrl-C saves the state, and the call returns the incomplete run (before the first step, it raises
    ``KeyboardInterrupt``).

    Args:
        recipe: name of a recipe of the library, such as quickstart, or a YAML file. None: quickstart or, with
            ``init_from``, the architecture of this model.
        corpus: text to train on, instead of the recipe's: a file, a folder, ``package:NAME``, ``hf:NAME``, a list
            of these, or an iterable of texts, each a document, which are written to ``workdir/corpus``. Vocabulary
            and shards are then built in ``workdir/shards``.
        workdir: folder of the run. None: a temporary folder, which is removed with the returned object.
        init_from: initial model: a path in any format that :func:`bert_jax.load` reads, a loaded model, or a
            run.
        num_steps: number of steps (``training.num_steps``).
        learning_rate: peak of the learning rate (``optimizer.learning_rate``).
        batch_size: number of sequences in a step (``training.global_batch_size``).
        max_length: maximum number of tokens of a sequence (``data.seq_length``).
        seed: seed of the initial parameters, the data order, dropout and dynamic masks (``training.seed``).
        options: every other option of ``bert-jax pretrain`` by name, such as ``{"model.num_layers": 4}``.
        callbacks: functions that are called with each line of metrics.jsonl, a dict. After one returns True, the
            run is evaluated and saved, and ends.
        report: function that is called with each line of the log; None: no output.

    Raises:
        ValueError: the text or an option is invalid; the message is the line that the command prints.
    """
    from bert_jax.commands.trained import PretrainRun

    with _workdir(workdir) as (folder, owned):
        named: dict[str, OptionValue | None] = {
            "training.num_steps": num_steps, "optimizer.learning_rate": learning_rate,
            "training.global_batch_size": batch_size, "data.seq_length": max_length, "training.seed": seed,
        }  # fmt: skip
        if corpus is not None:
            named |= {"data.corpus": _corpus(corpus, folder), "data.shards": folder / "shards"}
        name = recipe if recipe is not None or init_from is not None else "quickstart"
        files = () if name is None else (str(name),)
        caller = Caller(report=report or _ignore, callbacks=tuple(callbacks), model=_in_memory(init_from))
        run_options, settings = _options(RunOptions, files, named, options, folder, init_from)
        with _training(folder, caller.say) as stop:
            pretrain_command.train(run_options, with_encoder(settings), stop, time.perf_counter(), caller)
        return owned(PretrainRun.of(folder))


@names_parameters
def finetune(
    model: "Model | None",
    *,
    task: TaskKind | None = "classification",
    train: Any = None,
    dev: Any = None,
    test: Any = None,
    workdir: str | PathLike[str] | None = None,
    num_epochs: float | None = None,
    num_steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    seed: int | None = None,
    options: Mapping[str, OptionValue] | None = None,
    callbacks: Sequence[Callback] = (),
    metrics: "OwnMetrics | None" = None,
    report: Callable[[str], None] | None = print,
) -> "FinetuneRun":
    """Fine-tune a model on a task and return the run.

    ``workdir``, ``seed``, ``callbacks``, ``report`` and Ctrl-C work as in :func:`pretrain`.

    Args:
        model: a path in any format that :func:`bert_jax.load` reads, a loaded model, or a run. None: random
            parameters, with the vocabulary ``options["data.vocab"]``.
        task: kind of the task (``task.kind``). None: ``options`` determine the task, such as by ``task.module``.
        train: training records: a tuple of columns, such as ``(texts, labels)``, a mapping, frame or dataset of
            columns, an iterable of records (:func:`bert_jax.commands.task_data.records`), a file, or a list of
            paths.
        dev: records that select the best parameters, in the same forms, or a share of the training records, such
            as 0.1, stratified by class.
        test: records that are only evaluated and predicted.
        num_epochs: number of passes over the training records (``training.num_epochs``).
        num_steps: number of steps, instead of ``num_epochs`` (``training.num_steps``).
        learning_rate: peak of the learning rate (``optimizer.learning_rate``). None: it depends on the size of the
            model.
        batch_size: number of records in a step (``training.global_batch_size``).
        max_length: maximum number of tokens of a text or a pair (``task.max_length``).
        options: every other option of ``bert-jax finetune`` by name, such as ``{"task.metric": "f1"}``.
        metrics: further metrics by name, higher is better: functions of the lists of correct and predicted answers
            (:func:`bert_jax.finetuning.evaluation.answers_of`) and, if asked for, ``probabilities``.

    Raises ``ValueError`` for an invalid record or option, with the line that the command prints.
    """
    from bert_jax.commands.trained import FinetuneRun

    named: dict[str, OptionValue | None] = {
        "task.kind": task, "training.num_epochs": num_epochs, "training.num_steps": num_steps,
        "optimizer.learning_rate": learning_rate, "training.global_batch_size": batch_size,
        "task.max_length": max_length, "training.seed": seed,
    }  # fmt: skip
    files, read = _task_data({"train": train, "dev": dev, "test": test}, options or {})
    inputs = Caller(report=report or _ignore, callbacks=tuple(callbacks), model=_in_memory(model))
    caller = TaskCaller(**vars(inputs), read=read, metrics=metrics or {})
    with _workdir(workdir) as (folder, owned):
        own, settings = _options(extended(FinetuneRunOptions), (), named | files, options, folder, model)
        with _training(folder, caller.say) as stop:
            finetune_command.train(own, with_encoder(settings), stop, time.perf_counter(), caller)
        return owned(FinetuneRun.of(folder))


# ------------------------------------------------------------------ options


def _options(
    options_type: type[C], files: tuple[str, ...], named: Mapping[str, OptionValue | None],
    options: Mapping[str, OptionValue] | None, folder: Path, model: "Model | None",
) -> tuple[C, Settings]:  # fmt: skip
    """Return the options of the run and the settings of its config. ``named``: values of parameters, None where
    they are not set. Raises ``ValueError`` for an option that is also given by a parameter."""
    given = {name: value for name, value in named.items() if value is not None}
    for name in options or {}:
        if name in _ELSEWHERE:
            raise ValueError(f"{PYTHON}: {name}: not an option here; {_ELSEWHERE[name]}")
        if name in given and name != "data.shards":
            raise ValueError(f"{PYTHON}: {name}: also set by a parameter of the function; omit one of them")
    places: dict[str, OptionValue] = {"workdir": folder}
    if model is not None:
        places["init_from"] = _name_of(model)
    own, settings = split_settings(
        options_type, Settings(files, python_settings({**given, **(options or {}), **places}))
    )
    if several := getattr(own, "several", ()):
        raise ValueError(f"{several[0]}: starts several runs; use bert-jax finetune")
    return own, settings


def _name_of(model: "Model") -> str:
    from bert_jax.commands.trained import TrainedRun

    if isinstance(model, TrainedRun):
        return str(model.workdir)
    return str(model) if isinstance(model, str | PathLike) else model.name


def _in_memory(model: "Model | None") -> "ModelBundle | None":
    """Return a loaded model in the form from which a run can start, None for another model."""
    from bert_jax.inference.loaded import LoadedModel

    return model.bundle() if isinstance(model, LoadedModel) else None


# ------------------------------------------------------------------ data


def _corpus(corpus: Any, folder: Path) -> list[str]:
    """Return the entries of ``data.corpus``. Texts are written to ``folder``."""
    if isinstance(corpus, str | PathLike):
        return [str(corpus)]
    if isinstance(corpus, Mapping) or hasattr(corpus, "columns"):  # a frame, which iterates over their names
        names = ", ".join(map(str, corpus if isinstance(corpus, Mapping) else column_names(corpus)))
        raise ValueError(f"corpus: {type(corpus).__name__} is not allowed; give one of its columns: {names}")
    if isinstance(corpus, list | tuple):
        are_files = [isinstance(one, PathLike) or (isinstance(one, str) and _names_text(one)) for one in corpus]
        if corpus and all(are_files):
            return [str(one) for one in corpus]
        if any(are_files):
            other = corpus[are_files.index(False)]
            raise ValueError(f"corpus: {str(other)[:60]!r} is not a file, but other entries are; give one kind")
        if missing := [one for one in corpus if isinstance(one, str) and _FILE_NAME.fullmatch(one)]:
            raise ValueError(f"corpus: {missing[0]}: does not exist; give files that exist, or texts")
    file = folder / "corpus" / "texts.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as partial, partial.open("w", encoding="utf-8", errors="replace") as stream:
        for number, one in enumerate(corpus):
            text = one.get("text") if isinstance(one, Mapping) else one
            if not isinstance(text, str):
                raise ValueError(f"corpus[{number}]: {type(text).__name__} is not allowed; give texts, or files")
            stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return [str(file)]


def _names_text(entry: str) -> bool:
    """Return True if ``entry`` names a text source and is not itself a text."""
    is_named = entry.startswith(("package:", "tfds:", "hf:")) or is_url(entry)
    return "\n" not in entry and (is_named or os.path.exists(entry))  # noqa: PTH110 - False for a long text


def _is_file(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(one, PathLike) for one in data)
    return isinstance(data, str | PathLike)


def _task_data(
    data: Mapping[str, Any], options: Mapping[str, OptionValue]
) -> tuple[dict[str, OptionValue], Callable[[FinetuneConfig], Records] | None]:
    """Return the options that name the files of ``data``, by split, or the function that returns its records if
    some are in memory. Raises ``ValueError`` for an option that excludes ``data``."""
    given = {split: value for split, value in data.items() if value is not None}
    in_files = all(map(_is_file, given.values()))
    for name in (f"data.{name}" for name in (*given, *(() if in_files else _OF_FILES))):
        if name in options:
            raise ValueError(f"{PYTHON}: {name}: not allowed with {', '.join(given)}; omit it, or omit these")
    if in_files:
        return {f"data.{split}": value for split, value in given.items()}, None
    return {}, lambda config: _records(given, config)


def _records(given: Mapping[str, Any], config: FinetuneConfig) -> Records:
    """Return the records of the splits ``given``."""
    kind, data = config.task.kind, config.data
    is_share = isinstance(given.get("dev"), numbers.Real)
    splits = {
        split: task_data.records(value, kind, split=split, options=data)
        for split, value in given.items()
        if not (split == "dev" and is_share)
    }
    splits.setdefault("train", [])
    if is_share:
        splits["train"], dev = task_data.split_off(splits["train"], given["dev"], data.split_seed, kind)
        splits = {"train": splits["train"], "dev": dev, **splits}
    return splits, [split for split in splits if split == "test"]


# ------------------------------------------------------------------ the process


def _ignore(line: str) -> None:
    pass


@contextlib.contextmanager
def _workdir(given: str | PathLike[str] | None) -> Iterator[tuple[Path, Callable[[Run], Run]]]:
    """Context manager for the folder of a run, and the function that makes the run object own the folder. A
    temporary folder is removed after an error, else with the run object."""
    if given is not None:
        if is_url(str(given)):
            raise ValueError(f"workdir: {given}: a URL is not allowed; use bert-jax pretrain, or a folder")
        yield Path(given), lambda run: run
        return
    folder = Path(tempfile.mkdtemp(prefix="bert_jax-"))

    def owned(run: Run) -> Run:
        weakref.finalize(run, shutil.rmtree, folder, ignore_errors=True)
        return run

    try:
        yield folder, owned
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _training(folder: Path, report: Callable[[str], None]) -> Iterator[StopRequest]:
    """Context manager for a run in this process, with its request to stop. After a signal, the block ends without
    an error if the run has saved its state in ``folder``."""
    keep_to_cpu_without_accelerator()
    from bert_jax.process import hosts
    from bert_jax.training.checkpoint.folder import saved_steps

    if hosts.count() > 1:
        raise ValueError(f"jax.distributed: {hosts.count()} processes; {_PROCESSES}")
    stop = StopRequest(report)
    try:
        with _jax_cache_kept(), stop.handling():
            yield stop
    except exits.Stop as early:
        if early.code not in (exits.INTERRUPTED, exits.PREEMPTED):
            raise
        if not saved_steps(folder):
            raise KeyboardInterrupt(str(early)) from None
        report(str(early))
    except Exception as error:
        known = exits.outcome(error)
        line = known[1].removeprefix("error: ") if known else ""
        if not line or isinstance(error, ValueError | OSError):
            raise
        raise RuntimeError(line) from error


@contextlib.contextmanager
def _jax_cache_kept() -> Iterator[None]:
    """Context manager that restores jax's folder of compiled programs, which a run sets."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()  # opened again in the folder of the run
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
