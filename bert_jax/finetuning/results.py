"""Outputs of a finished fine-tuning run: predictions, metrics.json, the export, the report."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from bert_jax.finetuning import evaluation
from bert_jax.finetuning.artifacts import METRICS, PREDICTIONS, Result, read_results
from bert_jax.finetuning.evaluator import Evaluator
from bert_jax.finetuning.findings import findings_of
from bert_jax.finetuning.resolve import ResolvedTask
from bert_jax.finetuning.task_objective import task_display
from bert_jax.interop.export import export_model
from bert_jax.interop.saved_files import BEST
from bert_jax.io.files import json_line, write_whole
from bert_jax.model.canonical import Params
from bert_jax.objectives.display import ReportData
from bert_jax.process import hosts
from bert_jax.tasks.task import Prediction
from bert_jax.training.job import Context
from bert_jax.training.logging.report import write_report
from bert_jax.training.logging.run_files import read_data

# Folder of the export in a workdir.
EXPORT = "export"


def has_results(folder: Path, resolved: ResolvedTask) -> bool:
    """Return True if ``folder`` has a report, and metrics.json has a current entry for each predicted split."""
    digests = {entry["split"]: entry.get("digest") for entry in read_results(folder)}
    return bool(digests) and digests | resolved.prediction_digests == digests


def write_results(
    context: Context, resolved: ResolvedTask, evaluator: Evaluator, params: Params, *, step: int, began: float
) -> None:
    """Predict the splits that lack predictions of ``params``, then write metrics, export, report and log lines.

    Must be called by every process. ``step``: the step of ``params``. ``began``: start time of this phase, a value
    of ``time.perf_counter``.
    """
    folder, config, best = context.folder, resolved.config, evaluator.best
    # Predictions of the same parameters are kept; a continued run has no report, so its entries are not read.
    entries = {entry["split"]: entry for entry in read_results(folder) if entry["step"] == step}
    asked, digests = resolved.predicted_splits, resolved.prediction_digests
    is_due = {split: split not in entries or entries[split].get("digest") != digests[split] for split in asked}
    timeout = context.launch.host_timeout
    remarks: list[str] = []
    known = read_data(folder).get("findings", {}) if entries else {}
    found = {split: known[split] for split in asked if split in known}
    due = [split for split in asked if hosts.broadcast_from_lead(f"predict_{split}", is_due[split], timeout)]
    for split in due:
        before_batch = partial(context.watchdog.beat, f"predicting {split}")
        predictions = evaluator.final_predictions(context, params, split, before_batch)
        if hosts.is_lead():
            pairs = zip(resolved.records[split], predictions, strict=True)
            what = f"{split}: a prediction"
            lines = [json_line({"id": record.id, **one}, what) for record, one in pairs]
            write_whole(folder / PREDICTIONS.format(split), "".join(f"{line}\n" for line in lines))
        entries[split] = _result_entry(resolved, split, predictions, evaluator, context.log.at(0, split))
        found[split] = findings_of(resolved.task, resolved.records[split], predictions)
        windows = Counter(unit.record for unit in resolved.inputs[split])
        found[split]["windows"] = sum(count > 1 for count in windows.values())
        remarks += evaluation.remarks_of(resolved.task, split, resolved.records[split], predictions)
        entries[split]["step"], entries[split]["seconds"] = step, round(time.perf_counter() - began, 3)
    if not hosts.is_lead():
        return
    evaluator.describe_again(folder)
    results = [entries.pop(split) for split in asked] + [*entries.values()]
    write_whole(folder / METRICS, evaluation.metrics_text(results))
    metric = best.metric or config.task.metric
    lines = [line for result in results for line in evaluation.result_lines(result, metric)] + remarks
    lines += evaluation.warning_lines(results)
    if evaluator.takes_best and step == best.step:
        lines.append(f"parameters of step {step:,}, the first one with the best {best.metric}")
    elif evaluator.takes_best:
        lines.append(f"parameters of step {step:,}; the best parameters, of step {best.step:,}, were not saved")
    elif best.metric and config.training.restore_best:
        lines.append(f"WARNING: parameters of the last step, {step:,}: {best.metric} was never defined on dev")
    lines += _export(folder, "hf" if resolved.task.sentence is None else "sentence-transformers")
    values = {name: entry["value"] for result in results[:1] for name, entry in result["metrics"].items()}
    matrices = {entry["split"]: entry["confusion_matrix"] for entry in results if "confusion_matrix" in entry}
    content: ReportData = {"summary": lines, "evaluation": values, "confusion": matrices, "findings": found}
    write_report(folder, task_display(resolved.supervision), content, name=context.launch.workdir.name)
    context.log.report()
    for line in [*lines, f"report: {context.launch.workdir}/report.html"]:
        context.log.line(line)


def _result_entry(
    resolved: ResolvedTask,
    split: str,
    predictions: Sequence[Prediction],
    evaluator: Evaluator,
    before: Mapping[str, float | None],
) -> Result:
    """Return the entry of a split in metrics.json, without the step and the seconds. ``before``: the metrics before
    training by name; empty if they are unknown."""
    config, task, records, best = resolved.config, resolved.task, resolved.records[split], evaluator.best
    scores, count = evaluation.scores_of(task, records, predictions)
    metric, confusion = best.metric or config.task.metric, evaluation.confusion_of(task, records, predictions)
    known = evaluation.baseline(resolved, split, predictions, metric, before)
    entry = Result(
        task=config.name,
        split=split,
        n=len(records),
        digest=resolved.prediction_digests[split],
        metrics=evaluation.with_intervals(scores, count, config.training.seed, metric, without=task.own_metrics),
        seed=config.training.seed,
    )
    if resolved.record_digests[split] == best.split:
        score = evaluation.choosing_score(best.metric, scores)
        entry["chosen_by"] = {"metric": score.name, "higher_is_better": score.higher_is_better}
    if known is not None:
        entry["baseline"] = known
    if confusion is not None:
        entry["confusion_matrix"] = confusion
    return entry


def _export(folder: Path, preferred: str) -> list[str]:
    """Export the model of a workdir to ``export/`` in the format ``preferred`` of ``bert-jax export`` or, if this
    cannot represent the model, as npz. Return lines for the log, which include the reason."""
    lines: list[str] = []
    for form in (preferred, "npz"):
        try:
            export_model(folder / BEST, folder / EXPORT, form, force=True, verify=False, report=lines.append)
            break
        except ValueError as error:
            lines.append(f"no {form} export: {error}")
    return lines
