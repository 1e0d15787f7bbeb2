"""Measure cost and quality of early exit (predictions that stop at lower layers) on labeled examples.

Xin et al. 2020 (DeeBERT), section 4: an entropy threshold trades layers for quality.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.contrib.compression.examples import read_examples, with_classes
from bert_jax.finetuning.evaluation import choosing_score, scores_of
from bert_jax.inference.engine import Engine
from bert_jax.inference.predict import EXIT_WINDOW, layers_run, task_head, task_of, task_program
from bert_jax.metrics.score import value
from bert_jax.records import Record
from bert_jax.tasks.task import Task

# Default thresholds, as shares of the maximum entropy (equal probabilities).
_SHARES = (0.05, 0.1, 0.2, 0.4, 0.8)


@dataclass(frozen=True)
class ExitPoint:
    """The predictions of labeled examples with one threshold."""

    # Nats; None: no early exit.
    entropy: float | None
    # Mean number of layers per example.
    layers: float
    # Metrics by name; the first one is that by which fine-tuning chooses parameters.
    metrics: dict[str, float]
    # Of all predictions, without compilation, with tokenization.
    seconds: float
    examples: int


def exit_curve(loaded: Engine, files: Sequence[str], entropies: Sequence[float] | None = None) -> list[ExitPoint]:
    """Return cost and quality of predictions with all layers, and with early exit at each of ``entropies`` (nats;
    None: five shares of the maximum entropy), on the labeled examples in ``files``.

    Raises ``ValueError`` for a model without heads on lower layers, invalid or unlabeled examples, and an entropy
    that is not a positive number.
    """
    task = task_of(loaded, task_head(loaded, "sequence"))
    task_program(loaded, task, "sequence", 0.0)  # refuses a model without heads on lower layers
    if entropies is None:
        entropies = [round(share * math.log(len(task.names)), 4) for share in _SHARES]
    for one in entropies:
        if not 0 < one < math.inf:
            raise ValueError(f"--entropies: {one} is not allowed; allowed: above 0, in nats")
    records = _labelled(task, files)
    return [_point(loaded, task, records, one) for one in (None, *entropies)]


def measured(loaded: Engine, files: Sequence[str]) -> ExitPoint:
    """Return cost and quality of predictions with all layers of a model with a sequence head, on the labeled
    examples in ``files``. Raises ``ValueError`` as :func:`exit_curve` does."""
    task = task_of(loaded, task_head(loaded, "sequence"))
    return _point(loaded, task, _labelled(task, files), None)


def _labelled(task: Task, files: Sequence[str]) -> list[Record]:
    records = with_classes(read_examples(files), task)
    if not task.scored(records):
        raise ValueError(f"--examples {files[0]}: no example has a label; give labeled examples")
    return records


def exit_lines(curve: Sequence[ExitPoint], layers: int) -> list[str]:
    """Return a table of ``curve`` for a model of ``layers`` layers, whose first point uses all layers."""
    name, whole = next(iter(curve[0].metrics)), curve[0]
    width = max(7, len(name))
    lines = [f"entropy  layers  share  {name:>{width}}  seconds  speed"]
    for point in curve:
        entropy = "all" if point.entropy is None else f"{point.entropy:.4f}"
        cost = f"{point.layers:6.2f}  {point.layers / layers:5.2f}  {point.metrics[name]:{width}.4f}"
        lines.append(f"{entropy:>7}  {cost}  {point.seconds:7.2f}  {whole.seconds / point.seconds:4.2f}x")
    return lines


def _point(loaded: Engine, task: Task, records: Sequence[Record], entropy: float | None) -> ExitPoint:
    program, depth = task_program(loaded, task, "sequence", entropy), loaded.spec.model.num_layers
    seconds: list[float] = []
    for _ in range(3):  # the first compiles
        start = time.perf_counter()
        predictions, layers = [], list[int]()
        results = loaded.windows(
            records, lambda part: task.featurize(part, training=False), program,
            sequences=task.sequences_of, targets=task.targets, window=EXIT_WINDOW,
        )  # fmt: skip
        for part, units, outputs in results:
            predictions += task.decode(part, units, outputs)
            layers += [depth] * len(units) if entropy is None else layers_run(loaded, outputs)
        seconds.append(time.perf_counter() - start)
    scores, count = scores_of(task, records, predictions)
    first = choosing_score("", scores)
    metrics = {score.name: float(value(score, count)) for score in (first, *scores)}
    return ExitPoint(entropy, sum(layers) / len(layers), metrics, min(seconds[1:]), len(records))
