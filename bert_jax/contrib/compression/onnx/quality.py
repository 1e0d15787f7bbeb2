"""Compare the scores of an exported program and its model, which shows the cost of rounding on the user's texts."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bert_jax.batch import Batch
from bert_jax.contrib.compression.examples import read_examples, with_classes
from bert_jax.finetuning.evaluation import choosing_score, scores_of
from bert_jax.inference.batching import DeviceOutputs, Function, by_level
from bert_jax.inference.engine import Engine
from bert_jax.inference.loaded import prepare
from bert_jax.inference.onnx_network import OnnxNetwork, open_session
from bert_jax.inference.predict import HEADS, task_of
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.metrics.classification import calibration_error
from bert_jax.metrics.score import Score
from bert_jax.metrics.score import value as value_of
from bert_jax.model.bert import bert_output
from bert_jax.model.canonical import Params
from bert_jax.process.exits import VERIFICATION_FAILED, Stop
from bert_jax.records import Record
from bert_jax.tasks.task import Prediction, Task
from bert_jax.tasks.text_classification import probability_table


@dataclasses.dataclass(frozen=True)
class Scores:
    """The chosen metric of the model in float32 and of its exported program on ``count`` records."""

    name: str
    count: int
    model: float
    program: float
    higher_is_better: bool
    # Calibration errors of the model and of its program, if it predicts one class per text.
    calibration: tuple[float, float] | None = None

    @property
    def loss(self) -> float:
        """By how much the score of the program is worse than that of the model."""
        return self.model - self.program if self.higher_is_better else self.program - self.model


def program_scores(folder: Path, weights: ModelBundle, file: str) -> Scores:
    """Return the scores of the model ``weights`` and of its ONNX export in ``folder`` on the labeled records of
    ``file``, JSON lines with the fields of ``bert-data records``.

    The score is the metric by which fine-tuning selects parameters; for a model of text vectors, it is that of
    pairs with values (the correlation of cosines) or of pairs without labels (retrieval). Raises ``ValueError``
    for a model without a task, invalid or unlabeled records, and if onnxruntime is not installed.
    """
    engine = prepare(weights)
    task, records = _labelled(engine, file)
    given = predictions(engine, task, records, folder)
    model, program = (_chosen(task, records, one) for one in given)
    score, count, value = model
    errors = None
    if task.settings.kind == "classification":
        errors = _calibration_error(task, records, given[0]), _calibration_error(task, records, given[1])
    return Scores(score.name, count, value, program[2], score.higher_is_better, errors)


def _calibration_error(task: Task, records: Sequence[Record], given: Sequence[Prediction]) -> float:
    places, labels = task.scored(records), task.settings.labels
    gold = np.array([labels.index(records[place].label or "") for place in places])
    return calibration_error(gold, probability_table([given[place] for place in places], labels))


def model_score(weights: ModelBundle, file: str) -> tuple[str, float, int]:
    """Return the metric's name, its value for the model ``weights``, and the number of records.

    As :func:`program_scores`, but without an exported program; raises ``ValueError`` in the same cases.
    """
    engine = prepare(weights)
    task, records = _labelled(engine, file)
    score, count, value = _chosen(task, records, _predicted(engine, task, records, _program_of(engine, task)))
    return score.name, value, count


def _labelled(engine: Engine, file: str) -> tuple[Task, Sequence[Record]]:
    """Return the task of a model, and the labeled records of ``file``."""
    task, records = _task(engine, _head(engine), read_examples([file]))
    if not task.scored(records):
        raise ValueError(f"--check {file}: no record has a label ({', '.join(task.gold)}); give labeled records")
    return task, records


def _chosen(task: Task, records: Sequence[Record], given: Sequence[Prediction]) -> tuple[Score, int, float]:
    """Return the score by which fine-tuning chooses, the number of records and the value."""
    named, count = scores_of(task, records, given)
    score = choosing_score("", named)
    return score, count, float(value_of(score, count))


def check_program(
    folder: Path,
    weights: ModelBundle,
    *,
    file: str,
    allowed: float | None,
    dtype: str,
    report: Callable[[str], None],
) -> None:
    """Report the :func:`program_scores` of an export of ``dtype``, and for one class per text the calibration
    errors (:func:`bert_jax.metrics.classification.calibration_error`).

    Raises ``Stop`` with VERIFICATION_FAILED if the score of the program is worse than the score of the model by
    more than ``allowed``. None allows any difference.
    """
    scores = program_scores(folder, weights, file)
    change = scores.program - scores.model
    values = f"{scores.name} float32 {scores.model:.4f}, {dtype} {scores.program:.4f} ({change:+.4f})"
    report(f"{file}: {scores.count:,} records: {values}")
    if scores.calibration is not None:
        model, program = scores.calibration
        report(f"  calibration error: float32 {model:.4f}, {dtype} {program:.4f}")
    if allowed is not None and not scores.loss <= allowed:
        problem = f"{scores.name} is worse by {scores.loss:.4f} (allowed: {allowed:g})"
        raise Stop(VERIFICATION_FAILED, f"--check {file}: {problem}; nothing was exported")


def predictions(
    engine: Engine, task: Task, records: Sequence[Record], folder: Path
) -> tuple[list[Prediction], list[Prediction]]:
    """Return the predictions of ``task`` for all records by the model of ``engine``, and by its ONNX export in
    ``folder``."""
    program = OnnxNetwork(open_session(folder), engine.spec, engine.need_tokenizer().pad_id)

    def of_program(params: Params, batch: Batch) -> DeviceOutputs:
        arrays = {name: np.asarray(values) for name, values in batch.items()}
        return by_level(task.outputs(program(arrays), batch))

    programs = _program_of(engine, task), of_program
    first, second = (_predicted(engine, task, records, run) for run in programs)
    return first, second


def _program_of(engine: Engine, task: Task) -> Function:
    def run(params: Params, batch: Batch) -> DeviceOutputs:
        return by_level(task.outputs(bert_output(engine.model.apply({"params": params}, batch)), batch))

    return engine.program("check", run)


def _predicted(engine: Engine, task: Task, records: Sequence[Record], run: Function) -> list[Prediction]:
    ((_, units, outputs),) = engine.windows(
        records, lambda part: task.featurize(part, training=False), run,
        sequences=task.sequences_of, targets=task.targets, window=len(records),
    )  # fmt: skip
    return task.decode(records, units, outputs)


def _head(engine: Engine) -> str:
    """Return the only task head of the model, or "sentence" for a model of text vectors."""
    present = [head for head in engine.spec.heads.present() if head in HEADS]
    if len(present) > 1:
        names = ", ".join(present)
        raise ValueError(f"--check: the model has several task heads ({names}); export one of them with --heads")
    if not present and engine.spec.sentence is None:
        heads = ", ".join(engine.spec.heads.present()) or "none"
        raise ValueError(f"--check: the model has no task (heads: {heads}); fine-tune it, or omit --check")
    return present[0] if present else "sentence"


def _task(engine: Engine, head: str, records: Sequence[Record]) -> tuple[Task, Sequence[Record]]:
    """Return the task of a head, and ``records`` with the names of its classes."""
    task = task_of(engine, head, records)
    is_class = head == "sequence" and engine.spec.heads.problem != "regression"
    return task, with_classes(records, task) if is_class else records
