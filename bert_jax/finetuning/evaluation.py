"""Model outputs for all records of a split, and the metrics of their predictions."""

import functools
import inspect
import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.finetuning.artifacts import Baseline, Metric, Result
from bert_jax.finetuning.batch_shapes import row_length
from bert_jax.finetuning.resolve import ResolvedTask
from bert_jax.inference import batching
from bert_jax.metrics import Score, value
from bert_jax.metrics.resampling import confidence_intervals
from bert_jax.model import BertModel
from bert_jax.model.bert import bert_output
from bert_jax.model.canonical import Params
from bert_jax.parallel import host_rows, to_global
from bert_jax.records import Record
from bert_jax.tasks.task import Confusion, ModelInput, OwnMetric, Prediction, Task
from bert_jax.training.logging.verdict import NEAREST_SENTENCE, REMEDY, WEAK
from bert_jax.training.state import abstract_params

# The sum and the denominator of each loss of a batch.
_Losses = Mapping[str, tuple[jax.Array, jax.Array]]
# Maximum number of tokens of a batch per device: on CPU, on accelerators.
_CPU_TOKENS, _TOKENS = 2048, 16384
_MOST_UNITS = 32
# Maximum number of scores with an interval: each interval requires a thousand resamples.
_MOST_INTERVALS = 40
# Field of predictions, and parameter of a metric.
PROBABILITIES: Literal["probabilities"] = "probabilities"
# Fields of predictions that contain the answer.
_ANSWERS = ("value", "label", "labels", "choice", "answer", "cosine")


class Predictor:
    """A program that applies the model to model inputs on a device mesh. It is compiled once per batch shape; all
    batches of a split have the same shape."""

    def __init__(self, task: Task, model: BertModel, mesh: Mesh) -> None:
        self._task, self._mesh = task, mesh
        # The mean loss of the units of the last call of ``outputs``; None unless ``Task.logs_loss``.
        self.loss: float | None = None
        # Every process receives all outputs.
        replicated = NamedSharding(mesh, PartitionSpec())
        run = _run_with_losses if task.logs_loss else _run_without_losses
        self.step = jax.jit(functools.partial(run, task, model), out_shardings=replicated)

    def outputs(
        self, params: Params, units: Sequence[ModelInput], before_batch: Callable[[], None] = lambda: None
    ) -> list[batching.Outputs]:
        """Return the output arrays of every unit by name, in the order of ``units``. For each unit, an
        output of level ``unit`` is the entry of this unit, and an output of level ``token`` contains one entry for
        each token of this unit.

        ``before_batch`` is called before each batch.
        """

        losses: list[_Losses] = []

        def program(features: dict[str, np.ndarray]) -> batching.DeviceOutputs:
            before_batch()
            count = len(features["input_ids"])
            rows = host_rows(self._mesh, count)
            own = {name: array[rows] for name, array in features.items()}
            outputs, of_batch = self.step(params, to_global(own, self._mesh, count))
            losses.append(of_batch)
            return outputs

        outputs = batching.run_packed(program, units, self._batches(units)) if units else []
        self.loss = _mean_loss(losses)
        return outputs

    def _batches(self, units: Sequence[ModelInput]) -> Iterator[batching.Packed]:
        task, mesh = self._task, self._mesh.shape
        config = task.config
        parts = mesh["data"] * mesh["fsdp"]
        longest = max(unit.length for unit in units)
        limit = max(config.task.max_length * task.sequences_per_unit, longest)
        length = row_length(longest) if config.input.packing else limit
        per_row = min(_MOST_UNITS, 1 + length // 8) if config.input.packing else 1
        tokens = _CPU_TOKENS if self._mesh.devices.flat[0].platform == "cpu" else _TOKENS

        def sizes(length: int, rows: int) -> Sequence[int]:
            # The number of rows that the token limit allows, but no more rows than are needed.
            return (parts * max(1, min(tokens // length, math.ceil(rows / parts))),)

        return batching.packed_batches(
            units, (length,), per_row, sizes,
            pad_id=task.tokenizer.pad_id, sequences=task.sequences_of(units), targets=task.targets,
        )  # fmt: skip


def _run(task: Task, model: BertModel, params: Params, batch: Mapping[str, jax.Array]) -> batching.DeviceOutputs:
    output = bert_output(model.apply({"params": params}, batch, None))
    return batching.by_level(task.outputs(output, batch))


def _run_without_losses(
    task: Task, model: BertModel, params: Params, batch: Mapping[str, jax.Array]
) -> tuple[batching.DeviceOutputs, _Losses]:
    return _run(task, model, params, batch), {}


def _run_with_losses(
    task: Task, model: BertModel, params: Params, batch: Mapping[str, jax.Array]
) -> tuple[batching.DeviceOutputs, _Losses]:
    """Return what :func:`_run` returns, and the sum and the denominator of each loss; 0 without labeled units."""
    output = bert_output(model.apply({"params": params}, batch, None))
    sums, is_labeled = task.loss(output, batch, axis=None), jnp.any(batch["weights"] > 0)
    known = {name: (sums[name][0], below * is_labeled) for name, below in task.denominators(batch).items()}
    return batching.by_level(task.outputs(output, batch)), known


def _mean_loss(losses: Sequence[_Losses]) -> float | None:
    """Return the total loss over several batches; None if it is unknown."""
    names = [*losses[0]] if losses else []
    # float64[losses, batches, 2] -> float64[losses, 2]
    totals = np.array([[one[name] for one in losses] for name in names], np.float64).sum(axis=1) if names else None
    if totals is None or not (totals[:, 1] > 0).all():
        return None
    return float((totals[:, 0] / totals[:, 1]).sum())


def scores_of(task: Task, records: Sequence[Record], predictions: Sequence[Prediction]) -> tuple[list[Score], int]:
    """Return the scores over the records that ``Task.scored`` selects, those of ``Task.own_metrics`` included, and
    the number of these records. Raises ``ValueError`` if one of ``Task.own_metrics`` has the name of another
    metric, or needs probabilities that the predictions do not contain."""
    records, predictions = _labelled(task, records, predictions)
    if not records:
        return [], 0
    scores = task.scores(records, predictions)
    if taken := [score.name for score in scores if score.name in task.own_metrics]:
        raise ValueError(f"metrics: this task has a metric {taken[0]} itself; use another name")
    return [*scores, *_own_scores(task, records, predictions)], len(records)


def answers_of(task: Task, record: Record, prediction: Prediction) -> tuple[Any, Any]:
    """Return the correct and the predicted answer: classes as str, several classes or tags as list[str], values and
    cosines as float, the index of a choice as int, the correct answers to a question as list[str] and the predicted
    one as str, and (tags, class) for joint. The correct answer is None where the record has none."""
    fields: Mapping[str, Any] = prediction
    words = [[token["label"] for token in fields["tokens"]]] if "tokens" in fields else []
    first = next(([fields[name]] for name in _ANSWERS if name in fields), [])
    predicted = [*words, *first]
    correct = [getattr(record, name) for name in task.gold]
    correct = [[getattr(x, "text", x) for x in one] if isinstance(one, tuple) else one for one in correct]
    if correct[0] is not None and isinstance(predicted[0], int | float):
        correct[0] = type(predicted[0])(correct[0])
    return (correct[0], predicted[0]) if len(correct) == 1 else (tuple(correct), tuple(predicted))


def _own_scores(task: Task, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
    if not task.own_metrics:
        return []
    pairs = [answers_of(task, *both) for both in zip(records, predictions, strict=True)]

    def score(name: str, function: OwnMetric) -> Score:
        needs_probabilities = PROBABILITIES in inspect.signature(function).parameters
        if needs_probabilities and PROBABILITIES not in predictions[0]:
            raise ValueError(
                f"metrics: {name} has the parameter {PROBABILITIES}, which predictions of this task do not "
                "contain; use a function of the correct and the predicted answers"
            )

        def of(indices: np.ndarray) -> float:
            chosen = [pairs[i] for i in indices]
            more = {PROBABILITIES: [predictions[i][PROBABILITIES] for i in indices]} if needs_probabilities else {}
            return float(
                function([correct for correct, _ in chosen], [predicted for _, predicted in chosen], **more)
            )

        return Score(name, of)

    return [score(name, function) for name, function in task.own_metrics.items()]


def choosing_score(metric: str, scores: Sequence[Score]) -> Score:
    """Return the score that selects the best parameters: the score named ``metric``, or the first score if
    ``metric`` is empty.

    Raises ``ValueError`` if no score has this name.
    """
    chosen = next((score for score in scores if score.name == metric or not metric), None)
    if chosen is None:
        names = [score.name for score in scores]
        whole = [name for name in names if "/" not in name]
        parts = [name for name in names if "/" in name]
        more = f" and {len(parts)} with a suffix, such as {parts[0]}" if parts else ""
        raise ValueError(f"task.metric: {metric!r} is not allowed; allowed: {', '.join(whole)}{more}")
    return chosen


def blank_scores(
    task: Task, model: BertModel, records: Sequence[Record], units: Sequence[ModelInput]
) -> list[Score]:
    """Return the scores of the records for random model outputs, to determine the names of the scores, and which of
    them are undefined on these records.

    The model is neither compiled nor run.
    """
    shape = batching.Shape(1, row_length(units[0].length), 1)
    batch = batching.pack_batch(
        units[:1], [[0]], shape,
        pad_id=task.tokenizer.pad_id, sequences=task.sequences_of(units), targets=task.targets,
    ).features  # fmt: skip
    shapes = jax.eval_shape(functools.partial(_run, task, model), nn.unbox(abstract_params(model)), batch)
    arrays = [(level, name, like) for level, named in shapes.items() for name, like in named.items()]
    rng = np.random.default_rng(0)

    def blank(unit: ModelInput, level: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
        shape = ((unit.length,) if level == "token" else ()) + like.shape[2:]
        floating = np.issubdtype(like.dtype, np.floating)
        return rng.random(shape, np.float32) if floating else np.zeros(shape, like.dtype)

    outputs = [{name: blank(unit, level, like) for level, name, like in arrays} for unit in units]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as the warning about constant values
        return scores_of(task, records, task.decode(records, units, outputs))[0]


def remarks_of(task: Task, split: str, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[str]:
    """Return the lines of ``Task.remarks`` about the records that ``Task.scored`` selects."""
    records, predictions = _labelled(task, records, predictions)
    return [f"WARNING: {split}: {line}" for line in task.remarks(records, predictions)]


def confusion_of(task: Task, records: Sequence[Record], predictions: Sequence[Prediction]) -> Confusion | None:
    """Return ``Task.confusion`` of the records that ``Task.scored`` selects; return None if it selects none."""
    records, predictions = _labelled(task, records, predictions)
    return task.confusion(records, predictions) if records else None


def _labelled(
    task: Task, records: Sequence[Record], predictions: Sequence[Prediction]
) -> tuple[list[Record], list[Prediction]]:
    numbers = task.scored(records)
    return [records[i] for i in numbers], [predictions[i] for i in numbers]


def baseline(
    resolved: ResolvedTask,
    split: str,
    predictions: Sequence[Prediction],
    metric: str,
    before: Mapping[str, float | None],
) -> Baseline | None:
    """Return the baseline of a split, with which its scores are compared, as JSON: ``answer`` (in words),
    ``metric``, its ``value``, and ``is_beaten``, which is True if the run is better. None: there is nothing to
    compare with.

    It is the constant answer of the task or, if it has none, the answer by ``Task.plain_answer`` or ``before``, the
    values before training. The metric is
    ``metric`` (empty: the first one) or, where this is undefined for a constant, the first one that is defined; the
    run is then better if it is better by either.
    """
    task, answer, values, records = resolved.task, "before training", before, resolved.records[split]
    scores, count = scores_of(task, records, predictions)
    train = resolved.records["train"]
    if train and (constant := task.constant(train)):
        answer, replaced = constant
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as the warning about constant values
            values = point_values(*scores_of(task, records, [replaced(one) for one in predictions]))
    elif own := _plain_answers(task, records, predictions):
        answer, values = own
    defined = [score for score in scores if values.get(score.name) is not None]
    if not defined:
        return None
    asked, score = (next((one for one in of if one.name == metric), of[0]) for of in (scores, defined))
    # A correlation, which is undefined for a constant, is better if it is above 0.
    pairs = ((one, value(one, count), values.get(one.name) or 0.0) for one in (asked, score))
    is_beaten = any(own > known if one.higher_is_better else own < known for one, own, known in pairs)
    return {"answer": answer, "metric": score.name, "value": values[score.name], "is_beaten": bool(is_beaten)}


def _plain_answers(
    task: Task, records: Sequence[Record], predictions: Sequence[Prediction]
) -> tuple[str, dict[str, float | None]] | None:
    """Return the answer by ``Task.plain_answer`` in words, and its scores by name; None if the task has none."""
    answers = [task.plain_answer(record) for record in records]
    if all(answer is None for answer in answers):
        return None
    replaced: list[Prediction] = [
        {**one, "answer": answer or ""} for one, answer in zip(predictions, answers, strict=True)
    ]
    return NEAREST_SENTENCE, point_values(*scores_of(task, records, replaced))


def point_values(scores: Sequence[Score], count: int) -> dict[str, float | None]:
    """Return the values of the scores by name; the value of an undefined score is None."""
    values = {score.name: float(value(score, count)) for score in scores}
    return {name: None if math.isnan(number) else number for name, number in values.items()}


def with_intervals(
    scores: Sequence[Score], count: int, seed: int, metric: str = "", *, without: Collection[str] = ()
) -> dict[str, Metric]:
    """Return ``{"value", "ci95"}`` of each score by name; ci95 is a 95% bootstrap interval from 1,000 resamples.

    At most 40 scores get an interval, and those named in ``without`` get none; for the others, ci95 is None. The
    score named ``metric`` has priority, followed by the scores over all records, and then by the scores of single
    classes.
    """
    values: dict[str, Metric] = {
        name: {"value": number, "ci95": None} for name, number in point_values(scores, count).items()
    }
    resampled = [score for score in scores if score.name not in without]
    first = sorted(resampled, key=lambda score: _rank(score.name, metric))[:_MOST_INTERVALS]
    for score, (number, low, high) in zip(first, confidence_intervals(first, count, seed), strict=True):
        if not math.isnan(number):
            values[score.name]["ci95"] = [low, high]
    return values


def _rank(name: str, metric: str) -> tuple[bool, bool]:
    """Return a sort key for the names of scores: ``metric`` is first, and the scores of single classes are last."""
    return name != metric, "/" in name


def metrics_text(results: Sequence[Result]) -> str:
    """Return the content of metrics.json with each matrix row on one line (JSON strings contain no line breaks)."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    return re.sub(r"\[\n[\d,\s]+\]", lambda row: " ".join(row[0].split()), text) + "\n"


def result_lines(result: Result, metric: str = "") -> list[str]:
    """Return the log line of ``result``, an entry of metrics.json, as a list of one string. The line shows
    ``metric`` and up to three other scores."""
    shown = []
    for name, entry in sorted(result["metrics"].items(), key=lambda item: _rank(item[0], metric))[:4]:
        number = "undefined" if entry["value"] is None else f"{entry['value']:.4f}"
        interval = "" if entry["ci95"] is None else " [{:.4f}, {:.4f}]".format(*entry["ci95"])
        shown.append(f"{name} {number}{interval}")
    if known := result.get("baseline"):
        shown.append(f"({known['answer']}: {known['metric']} {known['value']:.4f})")
    return [f"{result['split']}: {result['n']:,} records  {'  '.join(shown)}"]


def warning_lines(results: Sequence[Result]) -> list[str]:
    """Return a warning that names the splits on which the run is not better than its baseline; none if there are
    no such splits."""
    weak = [result for result in results if not result.get("baseline", {}).get("is_beaten", True)]
    names = ", ".join(f"{result['split']} ({result['baseline']['answer']})" for result in weak)
    return [f"{WEAK}{names}; {REMEDY}"] if weak else []
