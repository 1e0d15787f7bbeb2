"""Functions that read the files of a finished fine-tuning run: config, ``metrics.json``, predictions."""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NotRequired, TypedDict, cast

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import build_config, read_yaml
from bert_jax.io.storage import Location
from bert_jax.io.untrusted_folder import json_object
from bert_jax.objectives.display import PlainAnswer
from bert_jax.records import Record
from bert_jax.tasks.task import Confusion
from bert_jax.training.logging.run_files import has_report

METRICS, PREDICTIONS = "metrics.json", "predictions_{}.jsonl"


class Metric(TypedDict):
    """A metric; ``value`` is None if it is undefined, ``ci95`` if it has no interval."""

    value: float | None
    ci95: list[float] | None


class ChosenBy(TypedDict):
    """The metric that chose the best parameters."""

    metric: str
    higher_is_better: bool


class Baseline(PlainAnswer):
    """An answer that needs no training, and whether the run is better."""

    is_beaten: bool


class Result(TypedDict):
    """An entry of metrics.json: the metrics of one split, computed with the parameters of one step."""

    task: str
    split: str
    n: int
    digest: NotRequired[str]
    metrics: dict[str, Metric]
    seed: int
    chosen_by: NotRequired[ChosenBy]
    baseline: NotRequired[Baseline]
    confusion_matrix: NotRequired[Confusion]
    step: NotRequired[int]
    seconds: NotRequired[float]


def stored_options(workdir: Location, names: Collection[str]) -> FinetuneConfig:
    """Return the config of a run with the options named in ``names`` as stored; all other options have their
    defaults, because an older version of bert_jax may have written the file. Raises ``ValueError`` if ``workdir``
    is not a workdir of fine-tuning."""
    file = workdir / "config.yaml"
    if not file.is_file():
        raise ValueError(f"{workdir}: no config.yaml in this folder; give a workdir of run_finetune.py")
    settings = [setting for setting in read_yaml(cast(Any, file)) if setting.key in names]
    if "task.kind" not in [setting.key for setting in settings]:
        raise ValueError(f"{file}: no task.kind in this file; give a workdir of run_finetune.py")
    return build_config(FinetuneConfig, settings)


def read_results(workdir: Location) -> list[Result]:
    """Return the entries of ``metrics.json``; an empty list if the run is not complete (has no report yet)."""
    if not ((workdir / METRICS).is_file() and has_report(workdir)):
        return []
    entries: list[Result] = json.loads((workdir / METRICS).read_text(encoding="utf-8"))
    return entries


def records_digest(records: Iterable[Record]) -> str:
    """Return a digest of the content of records, independent of the paths of their files."""
    digest = hashlib.sha256()
    groups: dict[str, int] = {}  # numbered, because a group name may contain the file name
    for record in records:
        group = groups.setdefault(record.group, len(groups))
        content = repr((dataclasses.replace(record, source="", group=""), group))
        digest.update(content.encode("utf-8", "replace"))
    return digest.hexdigest()


def predicted_splits(workdir: Location) -> list[str]:
    """Return the sorted names of the splits that have predictions."""
    before, after = PREDICTIONS.split("{}")
    files = workdir.glob(PREDICTIONS.format("*"))
    return sorted(file.name.removeprefix(before).removesuffix(after) for file in files)


def read_predictions(workdir: Location, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (FILE:LINE, prediction) for every record of a split, in file order.

    Raises ``ValueError`` if the split has no predictions, or if its file is not UTF-8 or has a line that is not a
    JSON object.
    """
    file = workdir / PREDICTIONS.format(split)
    if not file.is_file():
        splits = ", ".join(predicted_splits(workdir)) or "none, the run is not finished"
        raise ValueError(f"{file}: file not found; splits with predictions: {splits}")
    try:
        lines = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except UnicodeDecodeError:
        raise ValueError(
            f"{file}: not valid UTF-8; delete report.html in this folder and repeat the command of the run"
        ) from None
    for number, text in enumerate(lines, 1):
        where = f"{file}:{number}"
        yield where, in_new_form(json_object(text, where))


def in_new_form(line: dict[str, Any]) -> dict[str, Any]:
    """Return ``line``, a prediction, with the current field names.

    In a line of an older run, ``label`` was the correct answer, ``prediction`` the predicted class, classes, choice
    or value, and ``scores`` the probabilities.
    """
    # Predictions for pairs of texts without classes had no ``prediction``.
    is_old_pair = "label" in line and "cosine" in line and "probabilities" not in line
    if "prediction" not in line and not is_old_pair:
        return line
    line = dict(line)
    prediction, scores = line.pop("prediction", None), line.pop("scores", None)
    gold = {"gold": line.pop("label")} if "label" in line else {}
    if isinstance(prediction, list):
        line["labels"] = prediction
    elif isinstance(prediction, str):
        line["label"] = prediction
        if isinstance(scores, dict) and prediction in scores:
            line["score"] = scores[prediction]
    elif prediction is not None:
        line["choice" if isinstance(scores, list) else "value"] = prediction
    if scores is not None:
        line["probabilities"] = scores
    return line | gold
