"""Change the probabilities of a trained classifier, as a new output layer: a temperature, and class frequencies."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from bert_jax.contrib.compression.examples import read_examples, with_classes
from bert_jax.inference.engine import Engine
from bert_jax.inference.loaded import prepare
from bert_jax.inference.predict import predict, task_head, task_of
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.io.files import new_folder, whole_folder
from bert_jax.metrics.classification import calibration_error, classification_scores
from bert_jax.metrics.score import value
from bert_jax.tasks.text_classification import probability_table

_KERNEL, _BIAS = "sequence_head/kernel", "sequence_head/bias"
# The range of the natural logarithm of a temperature.
_MOST = 4.0
_SHOWN = ("log_loss", "accuracy", "f1_macro")


def log_loss(gold_N: np.ndarray, logits_NxL: np.ndarray) -> float:
    """Return the mean negative log-probability of the classes ``gold``, int[N], under ``logits``, float[N, L]."""
    return float(-np.mean(log_softmax(logits_NxL, -1)[np.arange(len(gold_N)), gold_N]))


def fitted_temperature(gold_N: np.ndarray, logits_NxL: np.ndarray) -> float:
    """Return the temperature with the lowest :func:`log_loss` of ``logits`` / temperature, between 0.018 and 55
    (Guo et al. 2017, section 4.2). ``gold``: int[N] classes; ``logits``: float[N, L]."""
    found = minimize_scalar(
        lambda x: log_loss(gold_N, logits_NxL / math.exp(x)), bounds=(-_MOST, _MOST), method="bounded"
    )
    return math.exp(found.x)


def with_logits(weights: ModelBundle, temperature: float, biases: np.ndarray) -> ModelBundle:
    """Return the classifier ``weights`` whose logits are divided by ``temperature`` and increased by ``biases``,
    float[L]. Raises ``ValueError`` if its output layer has no bias and ``biases`` are not 0."""
    orders = 2 if weights.spec.heads.both_orders else 1  # the logits of both orders of a pair are added
    changed = {_KERNEL: weights.params[_KERNEL] / temperature}
    if _BIAS in weights.params:
        changed[_BIAS] = weights.params[_BIAS] / temperature + biases / orders
    elif np.any(biases):
        raise ValueError("--equal_classes: not allowed for a model whose output layer has no bias; omit it")
    arrays = {name: array.astype(np.float32) for name, array in changed.items()}
    return dataclasses.replace(weights, params={**weights.params, **arrays})


def calibrate_model(
    source: Path,
    target: Path,
    examples: Sequence[str],
    options: ReadOptions,
    *,
    equal_classes: bool = False,
    check: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> None:
    """Save the classifier ``source`` to the new folder ``target`` with the :func:`fitted_temperature` of the
    labeled records in the files ``examples`` and, with ``equal_classes``, with probabilities that are divided by
    the frequencies of the classes in these records (Menon et al. 2021, section 4.1).

    ``check``: files of the records on which the values before and after are reported; empty: ``examples``.
    ``report`` is called with each line of the log. Raises ``ValueError`` if the model cannot be read or does not
    predict one class per text, for invalid or unlabeled records, if ``equal_classes`` is set and a class has no
    record, and if ``target`` is not empty.
    """
    target = new_folder(target)
    weights = read_weights(source, options)
    for note in weights.notes:
        report(note)
    if not weights.spec.heads.sequence_labels or weights.spec.heads.problem != "single_label":
        raise ValueError(f"{source}: no head that predicts one class per text; fine-tune task.kind classification")
    if weights.spec.heads.exits:
        raise ValueError(
            f"{source}: heads for early exit are not calibrated; fine-tune without loss.layer_heads own"
        )
    engine = prepare(weights, name=str(source))
    gold, logits, names = _logits(engine, examples, "--examples")
    temperature, biases = fitted_temperature(gold, logits), np.zeros(len(names))
    if equal_classes:
        counts = np.bincount(gold, minlength=len(names))
        if missing := [name for name, count in zip(names, counts, strict=True) if not count]:
            what = f"--examples has no record of {', '.join(missing[:5])}"
            raise ValueError(f"--equal_classes: {what}; add records of every class, or omit --equal_classes")
        biases = -np.log(counts / len(gold))
    changed = with_logits(weights, temperature, biases)
    lines = [f"temperature {temperature:.4g}, from {len(gold):,} records"]
    if equal_classes:
        lines[0] += "; for equally frequent classes"
    if check:
        gold, logits, _ = _logits(engine, check, "--check")
    lines += _comparison(gold, logits, logits / temperature + biases, names)
    with whole_folder(target) as unverified:
        write_saved(
            unverified, dataclasses.replace(changed, origin={**weights.origin, "calibrated": lines[0]}, notes=())
        )
    for line in (*lines, f"saved: {target}"):
        report(line)


def _logits(engine: Engine, files: Sequence[str], option: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return the classes int[N] and the logits float64[N, L], up to a constant for each record, of the labeled
    records in ``files``, and the names of the classes."""
    task = task_of(engine, task_head(engine, "sequence"))
    records = with_classes(read_examples(files), task)
    labelled = [records[place] for place in task.scored(records)]
    if not labelled:
        raise ValueError(f"{option} {files[0]}: no record has a label; give labeled records")
    inputs = [one.text if one.text_pair is None else (one.text, one.text_pair) for one in labelled]
    labels = task.settings.labels
    p = probability_table([*predict(engine, inputs, task="sequence")], labels)
    gold = np.array([labels.index(one.label or "") for one in labelled])
    return gold, np.log(np.maximum(p, np.finfo(np.float64).tiny)), task.names


def _comparison(gold: np.ndarray, before: np.ndarray, after: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return a line for each metric of the logits ``before`` and ``after``, for the correct classes ``gold``."""
    found = []
    for logits in (before, after):
        scores = classification_scores(gold, logits.argmax(-1), names, softmax(logits, -1))
        values = {one.name: float(value(one, len(gold))) for one in scores if one.name in _SHOWN}
        found.append({**values, "calibration_error": calibration_error(gold, softmax(logits, -1))})
    lines = [f"  {name}: {found[0][name]:.4f}, {found[1][name]:.4f}" for name in (*_SHOWN, "calibration_error")]
    return [f"{len(gold):,} records: before, after", *lines]
