"""Evaluation during a fine-tuning run: predictions, logged metrics, and selection of the best parameters."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from bert_jax.finetuning import evaluation
from bert_jax.finetuning.best import BestCheckpoint, Values, describe_again, read_parameters, save_parameters
from bert_jax.finetuning.findings import findings_of
from bert_jax.finetuning.resolve import ResolvedTask
from bert_jax.model import BertModel
from bert_jax.model.canonical import Params
from bert_jax.objectives.display import Confusion, Findings, PlainAnswer, ReportData
from bert_jax.start.start import Start
from bert_jax.tasks.task import Prediction
from bert_jax.training.job import Context
from bert_jax.training.state import TrainState


class Evaluator:
    """Evaluator of a run: it predicts the splits, evaluates the dev splits, and saves the parameters of the best
    evaluation."""

    def __init__(self, resolved: ResolvedTask, start: Start, model: BertModel) -> None:
        """Construct the evaluator of ``model``, the training model. Raises ``ValueError`` for an unknown
        ``task.metric``."""
        self._resolved, self._start, self._devs = resolved, start, resolved.dev_splits
        self._model = model.clone(heads=resolved.heads, all_layers=False)
        self._predictors: dict[Mesh, evaluation.Predictor] = {}
        self.best = BestCheckpoint()
        # Predictions by split of the parameters in best/; empty if another process saved these.
        self._of_best: dict[str, list[Prediction]] = {}
        # Lines for the log before training.
        self.notes: tuple[str, ...] = ()
        config = resolved.config
        # The first metric of other kinds is always defined.
        if self._devs and (config.task.metric or config.task.kind in ("regression", "sentence")):
            name, is_defined = self._choosing_metric()
            what = f"WARNING: {self._devs[0]}: {name} is undefined on its labels, so the last parameters are taken"
            self.notes = () if is_defined else (f"{what}; set task.metric to another metric",)

    def _choosing_metric(self) -> tuple[str, bool]:
        """Return the name of the metric that selects the best parameters, and False if it is undefined whatever the
        model predicts. Raises ``ValueError`` for an unknown ``task.metric``."""
        resolved = self._resolved
        records, inputs = resolved.records[self._devs[0]], resolved.inputs[self._devs[0]]
        scores = evaluation.blank_scores(resolved.task, self._model, records, inputs)
        score = evaluation.choosing_score(resolved.config.task.metric, scores)
        count = len(resolved.task.scored(records))
        return score.name, evaluation.point_values([score], count)[score.name] is not None

    def require_same_choice(self) -> None:
        """Raise ``ValueError`` if further evaluations are not comparable with the recorded ones."""
        if self.best.split and self._devs:
            self.best.require_same(self._choosing_metric()[0], self._resolved.record_digests[self._devs[0]])

    @property
    def _logs_loss(self) -> bool:
        """True if the loss of the task is the whole training loss."""
        losses, supervision = self._resolved.config.loss, self._resolved.supervision
        more = losses.layers or losses.mlm_weight or losses.lm_weight or losses.nsp_weight
        return not supervision.targets and not more

    @property
    def takes_best(self) -> bool:
        """True if the run ends with the parameters of the best evaluation instead of the last ones."""
        return self._resolved.config.training.restore_best and bool(self.best.step)

    def evaluate(self, context: Context, state: TrainState, step: int) -> None:
        """Evaluate the dev splits, log their metrics, and save the parameters if they are the best so far."""
        resolved, first, is_best = self._resolved, self._devs[0], False
        params = context.programs.gather(state)
        # Predict all splits before changing any state: after a signal in between, the evaluation is repeated.
        scores, values, losses = {}, {}, dict[str, float | None]()
        predictions: dict[str, list[Prediction]] = {}
        for split in self._devs:
            predictions[split] = self._predict(context, params, split, lambda: context.before_batch(step))
            losses[split] = self._predictors[context.programs.mesh].loss if self._logs_loss else None
            scores[split], count = evaluation.scores_of(resolved.task, resolved.records[split], predictions[split])
            values[split] = evaluation.point_values(scores[split], count)
        # The parameters of a finished run are final: an evaluation on another dev file does not select others.
        if self.best.judged < step:
            score = evaluation.choosing_score(resolved.config.task.metric, scores[first])
            value, digest = values[first][score.name], resolved.record_digests[first]
            is_best = self.best.judge(score, value, step, digest)
        for split in self._devs:
            own = values[split]
            # The metric that selects the parameters comes first.
            chosen = {name: own[name] for name in (self.best.metric,) if name in own}
            loss = {} if losses[split] is None else {"loss": losses[split]}
            context.log.write(step, {"split": split, **chosen, **own, **loss}, shows=True)
        context.log.show(lambda: self._report_data(context, predictions))
        if is_best and resolved.config.training.restore_best:
            self._save(context, params, step, values)
            self._of_best = predictions

    def _report_data(self, context: Context, predictions: Mapping[str, Sequence[Prediction]]) -> ReportData:
        """Return what the predictions of the dev splits show in the report."""
        resolved, found, matrices = self._resolved, dict[str, Findings](), dict[str, Confusion]()
        metric, answers = self.best.metric or resolved.config.task.metric, dict[str, PlainAnswer]()
        for split, own in predictions.items():
            records = resolved.records[split]
            found[split] = findings_of(resolved.task, records, own)
            if (matrix := evaluation.confusion_of(resolved.task, records, own)) is not None:
                matrices[split] = matrix
            if known := evaluation.baseline(resolved, split, own, metric, context.log.at(0, split)):
                answers[split] = known
        return {"findings": found, "confusion": matrices, "plain_answers": answers}

    def _save(self, context: Context, params: Params, step: int, values: Values) -> None:
        with context.watchdog.phase("saving the best parameters"):
            save_parameters(context.folder, self._resolved, self._start, params, step, values)

    def final_predictions(
        self, context: Context, params: Params, split: str, before_batch: Callable[[], None]
    ) -> list[Prediction]:
        """Return a prediction for every record of ``split`` by :meth:`final_parameters`, those of the evaluation
        that chose them if possible. Must be called by every process."""
        if self.takes_best and split in self._of_best:
            return self._of_best[split]
        return self._predict(context, params, split, before_batch)

    def _predict(
        self, context: Context, params: Params, split: str, before_batch: Callable[[], None]
    ) -> list[Prediction]:
        """Return a prediction for every record of ``split``. Must be called by every process."""
        mesh, task = context.programs.mesh, self._resolved.task
        if mesh not in self._predictors:
            self._predictors[mesh] = evaluation.Predictor(task, self._model.clone(mesh=mesh), mesh)
        records, inputs = self._resolved.records[split], self._resolved.inputs[split]
        return task.decode(records, inputs, self._predictors[mesh].outputs(params, inputs, before_batch))

    def describe_again(self, folder: Path) -> None:
        """Store the options of this run with the model in ``best/``; called by the lead process."""
        describe_again(folder, self._resolved, self._start)

    def final_parameters(self, context: Context, state: TrainState) -> tuple[Any, int]:
        """Return the final parameters of the run and their step, and save them in ``best/`` unless they were read
        from it."""
        params, step = context.programs.gather(state), int(state.step)
        if self.takes_best:
            return read_parameters(context.folder, params, self._resolved.config.model.vocab_size)
        self._save(context, params, step, {})
        return params, step
