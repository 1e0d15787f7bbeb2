"""Compare two fine-tuning runs on the same records: difference of a metric, confidence interval and p-value.

Only ``config.yaml`` and ``predictions_SPLIT.jsonl`` of each run are read, not the model.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning.artifacts import read_predictions, stored_options
from bert_jax.io.storage import Location
from bert_jax.json_values import Json
from bert_jax.metrics import Score, value
from bert_jax.metrics.resampling import mcnemar, paired_bootstrap
from bert_jax.records import Record
from bert_jax.tasks.registry import TASKS
from bert_jax.tasks.task import Prediction, Task
from bert_jax.tokenization import Tokenizer

# Metrics whose value for one record is 0 or 1.
RIGHT_OR_WRONG = ("accuracy", "triplet_accuracy", "precision@1")
# Options that determine the metrics and the format of the predictions.
_READ = ("task.kind", "task.module", "task.metric", "data.labels", "data.label_names", "sentence.loss")


@dataclass(frozen=True)
class Comparison:
    """Metric values of both runs over ``records`` records, their difference a - b with its 95% interval, and the
    two-sided p-value of ``test``. ``only_a`` and ``only_b``: numbers of records that only run a, or only run b,
    predicts correctly; None unless ``test`` is McNemar's test."""

    a: str
    b: str
    split: str
    metric: str
    records: int
    value_a: float
    value_b: float
    difference: float
    low: float
    high: float
    p_value: float
    test: str
    only_a: int | None = None
    only_b: int | None = None

    def as_dict(self) -> dict[str, float | str | None]:
        """Return the fields as JSON-serializable values; NaN becomes None."""
        values = dataclasses.asdict(self)
        return {name: None if isinstance(one, float) and math.isnan(one) else one for name, one in values.items()}


@dataclass(frozen=True)
class _Run:
    name: str
    task: Task
    # Records and predictions by record id.
    records: dict[str, Record]
    predictions: dict[str, Prediction]


def compare(
    first: Location, second: Location, split: str = "dev", metric: str | None = None,
    *, seed: int = 0, resamples: int = 1000,
) -> Comparison:  # fmt: skip
    """Compare the runs of two workdirs on the labeled records of ``split``.

    ``metric``: a metric of metrics.json. None: ``task.metric`` of the first run or, if it is empty, the first
    metric of its task. The p-value of a metric in ``RIGHT_OR_WRONG``, such as accuracy, is computed by McNemar's
    exact test; all other p-values and all intervals by the paired bootstrap. Raises ``ValueError`` if the runs
    differ in task, labels or records, if their predictions lack the correct answers, and for an invalid argument.
    """
    if resamples < 1:
        raise ValueError(f"resamples: {resamples} is not allowed; use 1 or more")
    if seed < 0:
        raise ValueError(f"seed: {seed} is not allowed; use 0 or more")
    a, b = _read_run(first, split), _read_run(second, split)
    _check_alike(a, b)
    everyone = list(a.records)
    ids = [everyone[i] for i in a.task.scored(list(a.records.values()))]
    if not ids:
        raise ValueError(f"{a.name}: split {split} has no labels; use a split with labels")
    scores_a, scores_b = ({score.name: score for score in _scores(a.task, run, ids)} for run in (a, b))
    name = metric or a.task.config.task.metric or next(iter(scores_a))
    if name not in scores_a or name not in scores_b:
        allowed = ", ".join(each for each in scores_a if each in scores_b)
        raise ValueError(f"metric: {name!r} is not a metric of both runs; allowed: {allowed}")
    score_a, score_b, n = scores_a[name], scores_b[name], len(ids)
    bootstrap = paired_bootstrap(score_a, score_b, n, seed, resamples)
    p_value, test, only_a, only_b = bootstrap.p_value, "paired bootstrap", None, None
    if name in RIGHT_OR_WRONG:
        only_a, only_b, p_value = mcnemar(_right(score_a, n), _right(score_b, n))
        test = "McNemar, exact"
    return Comparison(
        str(first), str(second), split, name, n, value(score_a, n), value(score_b, n), bootstrap.difference,
        bootstrap.low, bootstrap.high, p_value, test, only_a, only_b,
    )  # fmt: skip


def table(result: Comparison) -> list[str]:
    """Return the comparison as lines of text."""
    only = ""
    if result.only_a is not None:
        only = f"; correct only in A: {result.only_a:,}, only in B: {result.only_b:,}"
    cells = {
        "metric": result.metric,
        "A": f"{result.value_a:.4f}",
        "B": f"{result.value_b:.4f}",
        "A - B": f"{result.difference:+.4f}",
        "95% interval": f"[{result.low:+.4f}, {result.high:+.4f}]",
        "p": "< 0.0001" if result.p_value < 1e-4 else f"{result.p_value:.4f}",
    }
    widths = [max(len(head), len(cell)) for head, cell in cells.items()]
    rows = [map(str.ljust, row, widths) for row in (cells, cells.values())]
    return [
        f"A: {result.a}",
        f"B: {result.b}",
        f"{result.split}: {result.records:,} records; p by {result.test}{only}",
        *("  ".join(row).rstrip() for row in rows),
    ]


def _right(score: Score, n: int) -> np.ndarray:
    """Return bool[n]: True for each record whose metric is 1."""
    return np.array([score.of(np.array([record])) for record in range(n)]) == 1


def _scores(task: Task, run: _Run, ids: Sequence[str]) -> list[Score]:
    return task.scores([run.records[one] for one in ids], [run.predictions[one] for one in ids])


def _check_alike(a: _Run, b: _Run) -> None:
    kind, other = (run.task.config.task.kind for run in (a, b))
    if kind != other:
        raise ValueError(f"{a.name}: task.kind {kind}, but {b.name} has {other}; compare runs of the same task")
    labels = [sorted(run.task.config.data.labels) for run in (a, b)]
    if labels[0] != labels[1]:
        both = " and ".join(", ".join(each[:10]) for each in labels)
        raise ValueError(f"{a.name} and {b.name} have different labels: {both}; compare runs with the same labels")
    for one, two in ((a, b), (b, a)):
        missing = next((each for each in one.records if each not in two.records), None)
        if missing is not None:
            raise ValueError(
                f"{two.name} ({len(two.records):,} records): the record {missing!r} of {one.name} "
                f"({len(one.records):,} records) is missing; compare runs on the same records"
            )
    for each, record in a.records.items():
        if record != dataclasses.replace(b.records[each], source=record.source):
            raise ValueError(
                f"{b.name}: the record {each!r} has a different label in {a.name}; compare runs on the same records"
            )


# ------------------------------------------------------------------ files of a run


def _read_run(workdir: Location, split: str) -> _Run:
    config = stored_options(workdir, _READ)
    kind = config.task.kind
    if config.task.module or kind not in _READERS:
        what = f"task.module {config.task.module}" if config.task.module else f"task.kind {kind}"
        raise ValueError(
            f"{workdir}: the predictions of {what} do not include the correct answers, so they cannot be compared; "
            f"compare runs whose task.kind is one of {', '.join(_READERS)}"
        )
    # The metrics need no tokenizer, only the labels, all of which are in the config.
    task = TASKS[kind](config, cast(Tokenizer, None))
    records: dict[str, Record] = {}
    predictions: dict[str, Prediction] = {}
    for where, line in read_predictions(workdir, split):
        record = _record(line, config, where)
        if record.id in records:
            raise ValueError(f"{where}: the record {record.id!r} occurs twice; every id must be unique")
        records[record.id], predictions[record.id] = record, cast(Prediction, line)
    return _Run(str(workdir), task, records, predictions)


def _record(line: Mapping[str, Json], config: FinetuneConfig, where: str) -> Record:
    """Return the record of a prediction line, with the fields that the metrics of the task read."""
    kind, labels = config.task.kind, config.data.labels
    reader, fields = _READERS[kind]
    record = reader(line, labels) if isinstance(line.get("id"), str) else None
    if record is None:
        shown = json.dumps(line, ensure_ascii=False)[:80]
        raise ValueError(f"{where}: {shown} is not a prediction of {kind}; required: id, {fields}")
    return dataclasses.replace(record, id=str(line["id"]), source=where)


def _class(line: Mapping[str, Json], labels: tuple[str, ...]) -> Record | None:
    gold = line.get("gold")
    fits = gold in (None, *labels) and line.get("label") in labels and _has_probabilities(line, labels)
    return Record(id="", source="", label=None if gold is None else str(gold)) if fits else None


def _classes(line: Mapping[str, Json], labels: tuple[str, ...]) -> Record | None:
    gold, predicted = line.get("gold", []), line.get("labels")
    if not (isinstance(gold, list) and isinstance(predicted, list) and _has_probabilities(line, labels)):
        return None
    if not all(one in labels for one in (*gold, *predicted)):
        return None
    # The metrics ignore the order.
    return Record(id="", source="", labels=tuple(sorted(gold)) if "gold" in line else None)


def _value(line: Mapping[str, Json], _: tuple[str, ...]) -> Record | None:
    gold = line.get("gold")
    fits = _is_number(line.get("value")) and (gold is None or _is_number(gold))
    label = repr(float(gold)) if isinstance(gold, int | float) else None
    return Record(id="", source="", label=label) if fits else None


def _choice(line: Mapping[str, Json], labels: tuple[str, ...]) -> Record | None:
    gold, predicted = line.get("gold"), line.get("choice")
    numbers = [one for one in (gold, predicted) if one is not None]
    fits = predicted is not None and all(type(one) is int and 0 <= one < len(labels) for one in numbers)
    return Record(id="", source="", label=None if gold is None else str(gold)) if fits else None


def _pair(line: Mapping[str, Json], labels: tuple[str, ...]) -> Record | None:
    """Return the record of a prediction of sentence embeddings, or None if the line is invalid. The fields of the
    line determine the metrics (see ``SentenceTask.scores``)."""
    gold = line.get("gold")
    is_triplet, is_class = "cosine_negative" in line, gold in labels and "label" in line
    fits = gold is None or isinstance(gold, str)
    fits &= all(_is_number(line[name]) for name in ("cosine", "cosine_negative", "rank") if name in line) or (
        line.get("rank", 1) is None  # undefined
    )
    fits &= is_class or gold is None or is_triplet or (_as_number(gold) and "cosine" in line)
    fits &= not is_class or (line["label"] in labels and _has_probabilities(line, labels))
    fits &= not is_triplet or "cosine" in line
    if not fits:
        return None
    # A single text has no correct answer.
    pair = "" if is_triplet or "rank" in line else None
    return Record(
        id="",
        source="",
        label=None if gold is None else str(gold),
        text_pair=pair,
        negatives=("",) if is_triplet else (),
    )


def _has_probabilities(line: Mapping[str, Json], labels: Sequence[str]) -> bool:
    values = line.get("probabilities")
    return isinstance(values, dict) and all(_is_number(values.get(label)) for label in labels)


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_number(text: Any) -> bool:
    try:
        return math.isfinite(float(text))
    except (TypeError, ValueError):
        return False


_READERS: dict[str, tuple[Callable[[Mapping[str, Json], tuple[str, ...]], Record | None], str]] = {
    "classification": (_class, "gold, label and probabilities of data.labels"),
    "multi_label": (_classes, "gold, labels (lists) and probabilities of data.labels"),
    "regression": (_value, "gold and value (numbers)"),
    "choice": (_choice, "gold and choice (indices of choices, from 0)"),
    "sentence": (
        _pair,
        "cosine with gold, rank or cosine_negative; or gold, label and probabilities of data.labels",
    ),
}
