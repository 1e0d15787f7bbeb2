"""Evaluation during a fine-tuning run: predictions for its splits, lines of metrics, the parameters to keep."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from bert_jax.finetuning.best import BestCheckpoint, Values, read_parameters, save_parameters
from bert_jax.finetuning.evaluation import (
    Predictor,
    blank_scores,
    choosing_score,
    point_values,
    predict_split,
    scores_of,
)
from bert_jax.finetuning.resolve import ResolvedTask
from bert_jax.interop.initialization import Start
from bert_jax.metrics import Score
from bert_jax.model import BertModel
from bert_jax.tasks.task import Prediction
from bert_jax.training.job import Context
from bert_jax.training.state import TrainState


class Evaluator:
    """Predicts the splits of a run, evaluates its dev splits, and keeps the parameters of the best evaluation."""

    def __init__(self, resolved: ResolvedTask, start: Start, model: BertModel) -> None:
        """``model``: the one of training. ``ValueError`` for a ``task.metric`` that is not measured."""
        self._resolved, self._start, self._devs = resolved, start, resolved.dev_splits
        self._model = model.clone(heads=resolved.heads, all_layers=False)
        self._predictors: dict[Mesh, Predictor] = {}
        self.best = BestCheckpoint()
        if resolved.config.task.metric and self._devs:
            self._choosing_metric()

    def _choosing_metric(self) -> str:
        """Return the name of the metric that chooses; ``ValueError`` for one that is not measured."""
        first, resolved = self._devs[0], self._resolved
        scores = blank_scores(resolved.task, self._model, resolved.records[first], resolved.inputs[first])
        return choosing_score(resolved.config.task.metric, scores).name

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after the evaluations of ``state``, that of ``best``."""
        self.best = BestCheckpoint.of(state)

    def require_same_choice(self) -> None:
        """Raise ``ValueError`` if further evaluations could not be compared with those so far."""
        if self.best.split and self._devs:
            self.best.require_same(self._choosing_metric(), self._resolved.record_digests[self._devs[0]])

    @property
    def takes_best(self) -> bool:
        """Return True if the run ends with the parameters of the best evaluation, not with the last ones."""
        return self._resolved.config.training.restore_best and bool(self.best.step)

    def stopped_early(self) -> bool:
        """Return True if nothing got better for ``training.patience`` evaluations."""
        patience = self._resolved.config.training.patience
        return bool(patience) and self.best.waited >= patience

    def evaluate(self, context: Context, state: TrainState, step: int) -> None:
        """Evaluate the dev splits, write their lines, and keep the parameters if they are the best so far."""
        params = context.programs.gather(state)
        # All of them before anything changes: a signal between two leaves the evaluation to be made again.
        found = {split: self._scores(context, params, split, step) for split in self._devs}
        values = {split: point_values(*scored) for split, scored in found.items()}
        # Not again on another dev file of a finished run: its parameters were chosen.
        is_best = self.best.judged < step and self._judge(values[self._devs[0]], found[self._devs[0]][0], step)
        for split in self._devs:
            # An evaluation made again, because the checkpoint does not know of it, has its line.
            if not context.log.has(step, split):
                context.log.write(step, {"split": split, **values[split]})
        if is_best and self._resolved.config.training.restore_best:
            self._save(context, params, step, values)

    def _scores(self, context: Context, params: Any, split: str, step: int) -> tuple[list[Score], int]:
        predictions = self.predictions(context, params, split, lambda: context.before_batch(step))
        return scores_of(self._resolved.task, self._resolved.records[split], predictions)

    def _judge(self, values: Mapping[str, float | None], scores: Sequence[Score], step: int) -> bool:
        """Return True if this is the best evaluation so far."""
        config = self._resolved.config
        score = choosing_score(config.task.metric, scores)
        split = self._resolved.record_digests[self._devs[0]]
        return self.best.judge(score, values[score.name], step, split, config.training.min_delta)

    def _save(self, context: Context, params: Any, step: int, values: Values) -> None:
        with context.watchdog.phase("saving the best parameters"):
            save_parameters(context.folder, self._resolved, self._start, params, step, values)

    def predictions(
        self, context: Context, params: Any, split: str, before_batch: Callable[[], None]
    ) -> list[Prediction]:
        """Return a prediction for every record of ``split``; every process calls it."""
        mesh, task = context.programs.mesh, self._resolved.task
        if mesh not in self._predictors:
            self._predictors[mesh] = Predictor(task, self._model.clone(mesh=mesh), mesh)
        records, inputs = self._resolved.records[split], self._resolved.inputs[split]
        return predict_split(task, self._predictors[mesh], params, records, inputs, before_batch)

    def final_parameters(self, context: Context, state: TrainState) -> tuple[Any, int]:
        """Return the parameters that the run ends with, those in ``best/``, and their step."""
        params, step = context.programs.gather(state), int(state.step)
        if self.takes_best:
            return read_parameters(context.folder, params, self._resolved.config.model.vocab_size)
        self._save(context, params, step, {})
        return params, step
