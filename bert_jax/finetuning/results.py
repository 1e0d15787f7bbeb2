"""Outputs of a fine-tuning run: the saved model, predictions, entries of metrics.json, the export."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import ModelSpec, to_dict
from bert_jax.finetuning.artifacts import PREDICTIONS
from bert_jax.finetuning.best import BestCheckpoint
from bert_jax.finetuning.evaluation import choosing_score, confusion_of, scores_of, with_intervals
from bert_jax.finetuning.resolve import ResolvedTask
from bert_jax.interop.exchange import ModelBundle, parameter_shapes
from bert_jax.interop.export import export_model
from bert_jax.interop.initialization import Start
from bert_jax.interop.saved_model import BEST
from bert_jax.io.files import write_whole
from bert_jax.records import Record
from bert_jax.tasks.task import Prediction

# Folder of the export in a workdir.
EXPORT = "export"


def saved_model(
    resolved: ResolvedTask,
    start: Start,
    params: Mapping[str, np.ndarray],
    step: int,
    values: Mapping[str, Mapping[str, float | None]],
) -> ModelBundle:
    """Return the model of ``step`` with its canonical ``params``; ``values`` are its metrics by dev split and
    name."""
    config = resolved.config
    spec = ModelSpec(
        model=config.model,
        heads=resolved.heads,
        sentence=resolved.task.sentence,
        tokenizer=start.tokenizer_config,
        family="roberta" if config.model.position_offset else "bert",
    )
    metrics = {f"{split}: {name}": value for split, named in values.items() for name, value in named.items()}
    origin = {
        "format": "fine-tuning run", "name": config.name, "step": step, "init_from": start.source,
        "recipe": to_dict(config), "metrics": {"step": step, **metrics} if metrics else {},
    }  # fmt: skip
    arrays = {name: np.asarray(params[name], np.float32) for name in parameter_shapes(spec)}
    return ModelBundle(spec=spec, params=arrays, tokenizer_content=start.tokenizer_content, origin=origin)


def write_predictions(
    folder: Path, split: str, records: Sequence[Record], predictions: Sequence[Prediction]
) -> None:
    """Write a JSON line per record."""
    lines = [
        json.dumps({"id": record.id, **one}, ensure_ascii=False)
        for record, one in zip(records, predictions, strict=True)
    ]
    write_whole(folder / PREDICTIONS.format(split), "".join(f"{line}\n" for line in lines))


def result_entry(
    resolved: ResolvedTask,
    split: str,
    predictions: Sequence[Prediction],
    best: BestCheckpoint,
    *,
    step: int,
    began: float,
) -> dict[str, Any]:
    """Return the entry of a split in metrics.json, of parameters of ``step``; ``began``: when
    prediction began, by ``time.perf_counter``."""
    config, task, records = resolved.config, resolved.task, resolved.records[split]
    scores, count = scores_of(task, records, predictions)
    confusion = confusion_of(task, records, predictions)
    chosen_by = {}
    if resolved.record_digests[split] == best.split:
        score = choosing_score(best.metric, scores)
        chosen_by = {"chosen_by": {"metric": score.name, "higher_is_better": score.higher_is_better}}
    return {
        "task": config.name,
        "split": split,
        "n": len(records),
        "digest": resolved.prediction_digests[split],
        "metrics": with_intervals(scores, count, config.training.seed, best.metric or config.task.metric),
        "seed": config.training.seed,
        "step": step,
        "seconds": round(time.perf_counter() - began, 3),
        **chosen_by,
        **({} if confusion is None else {"confusion_matrix": confusion}),
    }


def export(folder: Path, form: str) -> list[str]:
    """Write ``export/`` of a workdir in a format of ``bert-jax export``; returns lines for the log."""
    lines: list[str] = []
    try:
        export_model(folder / BEST, folder / EXPORT, form, force=True, verify=False, report=lines.append)
    except ValueError as error:
        return [f"no export: {error}"]
    return lines
