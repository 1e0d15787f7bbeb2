"""The outputs of teachers for the units of a student, computed once before training."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.batch import Batch
from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.contrib.compression.config import TaskDistillationConfig, options_of_teachers
from bert_jax.contrib.compression.finetuning.kinds import Vectors, soft_targets
from bert_jax.contrib.compression.finetuning.soft_targets import SoftTargets, first_tokens
from bert_jax.contrib.compression.teachers.find import TEACHER_RECORD
from bert_jax.finetuning.supervision import Supervision
from bert_jax.inference.batching import BatchOptions, by_level
from bert_jax.inference.engine import Engine
from bert_jax.io.files import write_whole
from bert_jax.json_values import Json
from bert_jax.model import BertOutput
from bert_jax.model.bert import bert_output
from bert_jax.model.canonical import Params
from bert_jax.objectives.display import Column, Display, Panel
from bert_jax.objectives.objective import Sums
from bert_jax.records import Record
from bert_jax.tasks.task import ModelInput, Outputs, Target, Task

# Texts between two lines of progress.
_REPORTED = 20_000


@dataclass(frozen=True)
class Teaching(Supervision):
    """Teachers, and texts that only they label."""

    # Models with the output layer of the task; empty: no teacher.
    teachers: Sequence[Engine] = ()
    # Text of WORKDIR/teacher.json: paths and digests of the teachers.
    record: str = ""
    # Records whose labels are not read.
    unlabelled: Sequence[Record] = ()
    # Called with each line about the reading of the teachers.
    report: Callable[[str], None] = lambda line: None
    # The loss of the outputs of the teachers; None before the units are known, and without a teacher.
    soft: SoftTargets | None = None

    display = Display(
        columns=(Column("teacher {}", "teacher_loss"),),
        panels=(Panel("difference from the teacher", "teacher_loss"),),
    )

    @property
    def targets(self) -> Mapping[str, Target]:  # type: ignore[override]
        return self.soft.targets if self.soft is not None else {}

    @property
    def all_layers(self) -> bool:  # type: ignore[override]
        return self.soft is not None and self.soft.options.layers_weight > 0

    @property
    def key(self) -> Sequence[Json]:  # type: ignore[override]
        if self.soft is None:
            return ()
        return dataclasses.asdict(self.soft.options), [one["digest"] for one in json.loads(self.record)]

    def completed(self, config: FinetuneConfig, *, has_labels: bool) -> FinetuneConfig:
        check_teaching(self, config, has_labels=has_labels)
        if has_labels or not self.unlabelled or config.task.kind == "choice":
            return super().completed(config, has_labels=has_labels)
        return with_names(config, self.teachers[0].spec.heads)

    def units(self, task: Task, train: Sequence[Record]) -> list[ModelInput]:
        return student_units(task, train, self.unlabelled)

    def of_units(
        self, task: Task, units: Sequence[ModelInput], train: Sequence[Record]
    ) -> tuple["Teaching", Sequence[ModelInput]]:
        if not self.teachers:
            return self, units
        soft, taught = taught_units(task, units, train, self)
        return dataclasses.replace(self, soft=soft), taught

    def denominators(self, of_labels: dict[str, jax.Array], batch: Batch) -> dict[str, jax.Array]:
        if self.soft is None:
            return of_labels
        # Without weight, the loss of the labels is logged only.
        share = 1 - self.soft.options.weight
        return {name: value / share for name, value in of_labels.items() if share} | self.soft.denominators(batch)

    def sums(self, output: BertOutput, batch: Batch) -> Sums:
        return {} if self.soft is None else self.soft.sums(output, batch)

    def write_record(self, folder: Path) -> None:
        if self.record:
            write_whole(folder / TEACHER_RECORD, self.record)


def check_teaching(teaching: Teaching, config: FinetuneConfig, *, has_labels: bool) -> None:
    """Raise ``ValueError`` for options of distillation without a teacher, and for a loss of labels without labels;
    ``has_labels``: there are training records with labels."""
    distillation = options_of_teachers(config)
    if not teaching.teachers:
        if teaching.unlabelled:
            raise ValueError("data.unlabelled: no teacher labels these texts; add --teacher MODEL, or omit them")
        if distillation != TaskDistillationConfig():
            raise ValueError("distillation: these options need --teacher MODEL; add it, or omit them")
        return
    weight = distillation.weight
    if not has_labels and weight < 1:
        given = f"distillation.weight: {weight} is not allowed without data.train"
        raise ValueError(f"{given}, because no text has a label; set 1")
    if teaching.unlabelled and config.input.balanced:
        raise ValueError("input.balanced: true is not allowed with data.unlabelled, whose texts have no class")


def with_names(config: FinetuneConfig, heads: HeadsConfig) -> FinetuneConfig:
    """Return ``config`` with the classes and tags of a teacher where it has none, for a run without labels."""
    data = config.data
    if config.task.kind not in ("regression", "qa", "choice"):
        labels, tags = data.labels or heads.sequence_labels, data.tags or heads.token_labels
        data = dataclasses.replace(data, labels=labels, tags=tags)
    return dataclasses.replace(config, data=data)


def without_labels(records: Sequence[Record]) -> list[Record]:
    """Return ``records`` without their labels."""
    return [dataclasses.replace(one, label=None, labels=None, tags=None, answers=None) for one in records]


def student_units(task: Task, train: Sequence[Record], unlabelled: Sequence[Record]) -> list[ModelInput]:
    """Return the units of the training records and those of the records without labels, which have weight 0 in the
    loss of the labels; their ``record`` counts on from the training records."""
    more = task.featurize(unlabelled, training=False) if unlabelled else []
    own = task.featurize(train, training=True) if train else []
    return own + [dataclasses.replace(unit, record=len(train) + unit.record) for unit in more]


def taught_units(
    task: Task, units: Sequence[ModelInput], train: Sequence[Record], teaching: Teaching
) -> tuple[SoftTargets, list[ModelInput]]:
    """Return the soft targets of ``task``, and ``units``, its :func:`student_units`, with the outputs of the
    teachers, each of which reads the texts with its own tokenizer.

    Raises ``ValueError`` if a teacher lacks the output layer of the task, or has other classes.
    """
    soft = soft_targets(task)
    for teacher in teaching.teachers:
        check_teacher(soft, teacher, len(teaching.teachers))
    of_teachers = [_arrays(soft, teacher, units, train, teaching) for teacher in teaching.teachers]
    taught = []
    for unit, weight, *arrays in zip(units, soft.weights(units), *of_teachers, strict=True):
        targets = {name: np.mean([one[name] for one in arrays], axis=0) for name in arrays[0]}
        taught.append(dataclasses.replace(unit, targets={**unit.targets, **targets, "soft_weights": weight}))
    return soft, taught


def check_teacher(soft: SoftTargets, teacher: Engine, teachers: int) -> None:
    """Raise ``ValueError`` if a model cannot teach the student: without its output layer, with other classes, or
    with layers that cannot be compared."""
    given, spec, own = f"--teacher {teacher.name}: the model", teacher.spec, soft.task.config.model
    if not soft.has_head(spec):
        heads = ", ".join(spec.heads.present()) or "none"
        kind = soft.task.config.task.kind
        raise ValueError(f"{given} lacks {soft.needs} (heads: {heads}); give a model for task.kind {kind}")
    try:
        soft.order(spec.heads)
    except ValueError as error:
        raise ValueError(f"{given} {error}") from None
    if soft.layers:
        if teachers > 1:
            raise ValueError(
                f"distillation.layers_weight: not allowed with {teachers} teachers; give one, or set 0"
            )
        if spec.model.hidden_size != own.hidden_size or spec.model.num_layers % own.num_layers:
            sizes = f"{spec.model.num_layers} layers of width {spec.model.hidden_size}"
            raise ValueError(
                f"{given} has {sizes}; distillation.layers_weight compares layers in proportion: allowed are a "
                f"multiple of {own.num_layers} layers and width {own.hidden_size}; or set it to 0"
            )


def _arrays(
    soft: SoftTargets, teacher: Engine, units: Sequence[ModelInput], train: Sequence[Record], teaching: Teaching
) -> list[dict[str, np.ndarray]]:
    """Return the arrays of each of ``units``, the units of the student, from the outputs of ``teacher``."""
    config, spec, unlabelled = soft.task.config, teacher.spec, teaching.unlabelled
    length = min(config.task.max_length, spec.max_length)
    config = dataclasses.replace(
        config, model=spec.model, task=dataclasses.replace(config.task, max_length=length)
    )  # fmt: skip
    task = type(soft.task)(config, teacher.need_tokenizer(), train)
    read = student_units(task, train, unlabelled)
    every = spec.model.num_layers // soft.task.config.model.num_layers
    outputs = _outputs(type(soft)(task), teacher, [every * n for n in soft.layers], read, teaching.report)
    for name, order in soft.order(spec.heads).items():
        outputs = [{**output, name: output[name][..., list(order)]} for output in outputs]
    arrays = soft.of_units(units, len(train) + len(unlabelled), read, outputs)
    if not soft.layers:
        return arrays
    if [unit.record for unit in read] != [unit.record for unit in units]:
        raise ValueError(
            f"--teacher {teacher.name}: the model divides the texts into other windows; distillation.layers_weight "
            "compares windows, so give a teacher with the vocabulary of the student, or set it to 0"
        )
    return [{**one, "soft_layers": output["soft_layers"]} for one, output in zip(arrays, outputs, strict=True)]


def _outputs(
    soft: SoftTargets,
    teacher: Engine,
    layers: Sequence[int],
    read: Sequence[ModelInput],
    report: Callable[[str], None],
) -> Outputs:
    """Return the outputs of ``teacher``, whose soft targets are ``soft``, for the units that it reads."""
    task = soft.task
    sentence = teacher.model.sentence if isinstance(soft, Vectors) else None
    model = teacher.model.clone(sentence=sentence, all_layers=bool(layers))

    def run(params: Params, batch: dict[str, jax.Array]) -> Any:
        output = bert_output(model.apply({"params": params}, batch))
        outputs = soft.outputs(output, batch)
        if layers:
            outputs["soft_layers"] = ("unit", first_tokens(output, batch, layers))
        return by_level(outputs)

    report(f"teacher {teacher.name}: reads {len(read):,} texts")
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if before // _REPORTED < done // _REPORTED:
            report(f"teacher {teacher.name}: {done:,} of {len(read):,} texts")

    windows = teacher.windows(
        read, lambda part: part, teacher.program(("distill", tuple(layers)), run), sequences=task.sequences_of,
        targets=task.targets, batches=BatchOptions(progress=progress),
    )  # fmt: skip
    return [output for _, _, outputs in windows for output in outputs]
