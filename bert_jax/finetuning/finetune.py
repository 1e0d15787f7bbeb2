"""Fine-tuning as a job of ``bert_jax.training.run``: examples, metrics on dev, the best checkpoint, predictions."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from bert_jax.config import HeadsConfig, ModelSpec
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning.artifacts import METRICS, read_results
from bert_jax.finetuning.batches import ExampleBatches
from bert_jax.finetuning.best import BestCheckpoint
from bert_jax.finetuning.evaluation import (
    Predictor,
    blank_scores,
    choosing_score,
    metrics_text,
    point_values,
    predict_split,
    result_lines,
    scores_of,
)
from bert_jax.finetuning.packing import plan_shapes
from bert_jax.finetuning.resolve import Splits, redrawn_layers, resolve_task
from bert_jax.finetuning.results import export, result_entry, saved_model, write_predictions
from bert_jax.finetuning.task_objective import TaskObjective, check_layers
from bert_jax.inference.batching import Shape
from bert_jax.interop.initialization import Start, initial_model, store_tokenizer
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import BEST, replace_saved
from bert_jax.io.files import write_whole
from bert_jax.io.storage import ObjectPath
from bert_jax.metrics import Score
from bert_jax.model import BertModel, from_canonical, to_canonical
from bert_jax.optim import lr_multipliers, unfreeze_updates
from bert_jax.parallel import host_rows, to_host
from bert_jax.process import hosts
from bert_jax.tasks.task import Prediction
from bert_jax.training.job import Context, Data, Job
from bert_jax.training.launch import InitialModel, Launch
from bert_jax.training.logging.report import write_report
from bert_jax.training.programs import TrainPrograms, make_programs, with_shardings
from bert_jax.training.run import train
from bert_jax.training.state import TrainState, abstract_params


def finetune(config: FinetuneConfig, launch: Launch, *, splits: Splits, tests: Sequence[str], start: Start) -> None:
    """Train the task of ``config`` on ``splits["train"]``, evaluate on the other splits, and predict all of them;
    ``tests`` are those that choose nothing.

    Raises ``ValueError`` for what the user can mend and ``exits.Stop`` when the run ends early.
    """
    if isinstance(launch.workdir, ObjectPath):
        raise ValueError(f"--workdir {launch.workdir}: fine-tuning writes to a folder that all hosts see; give one")
    job = FinetuneJob(config, splits, tests, start)
    initial = job.initial_model()
    initial = dataclasses.replace(initial, messages=(*initial.messages, *job.resolved.notes))
    train(job, dataclasses.replace(launch, initial_model=initial))


class FinetuneJob(Job):
    """A task on its records. ``config`` is completed: labels, steps, intervals and warmup are filled in."""

    config: FinetuneConfig
    eval_split = "dev"
    options_used_after_completion = (
        "other dev and test files, training.restore_best and options of prediction (task.max_length, "
        "task.truncation, qa, tagging, sentence)"
    )

    def __init__(self, config: FinetuneConfig, splits: Splits, tests: Sequence[str], start: Start) -> None:
        self.resolved = resolve_task(config, splits, tests, start.tokenizer)
        config, self.task, self.heads = self.resolved.config, self.resolved.task, self.resolved.heads
        super().__init__(config, start.tokenizer)
        self._start, self._devs = start, self.resolved.dev_splits
        self.eval_split = self._devs[0] if self._devs else "dev"
        self._shapes: list[Shape] = []
        self._predictors: dict[Mesh, Predictor] = {}
        self._best = BestCheckpoint()
        self.heads.check_features(config.model)
        check_layers(config, self.heads)
        self.model = BertModel(
            config.model,
            config.execution,
            _with_losses(self.heads, config),
            self.task.sentence,
            all_layers=bool(config.loss.layers),
            frozen_encoder=config.features.frozen_encoder,
        )
        if config.task.metric and self._devs:
            self._choosing_metric()

    def _choosing_metric(self) -> str:
        """Return the name of the metric that chooses; ``ValueError`` for one that is not measured."""
        first, model = self._devs[0], self.model.clone(heads=self.heads, all_layers=False)
        scores = blank_scores(self.task, model, self.resolved.records[first], self.resolved.inputs[first])
        return choosing_score(self.config.task.metric, scores).name

    def initial_model(self) -> InitialModel:
        """Return the parameters of the start that the model of training has."""
        model, config = self.model, self.config
        spec = ModelSpec(model=config.model, heads=model.heads, sentence=model.sentence)
        redraw_head = config.regularization.reinit_head
        return initial_model(self._start, spec, redrawn=redrawn_layers(config), redraw_head=redraw_head)

    # --- What run() asks for -----------------------------------------------------------------------------------

    def programs(self, mesh: Mesh) -> TrainPrograms:
        config, model = self.config, self.model.clone(mesh=mesh)
        like = nn.unbox(abstract_params(model))
        parts = config.model.num_layers, like, self.resolved.steps_per_epoch
        optimizer = config.optimizer
        if config.features.frozen_encoder:  # weight decay and losses beside the task's own move it neither
            optimizer = dataclasses.replace(optimizer, frozen=(*optimizer.frozen, "embeddings", "encoder"))
        return make_programs(
            TaskObjective(self.task, config, model),
            with_start=config.stores_start_params,
            lr_multipliers=lr_multipliers(optimizer, *parts),
            unfreeze_updates=unfreeze_updates(optimizer, *parts),
            decay_toward_start=config.optimizer.decay_to_start,
        )

    def write_tokenizer(self, folder: Path) -> None:
        store_tokenizer(folder, self._start)

    def _batches(self, mesh: Mesh) -> ExampleBatches:
        config, sizes, examples = self.config, mesh.shape, self.resolved.inputs["train"]
        lengths = np.array([example.length for example in examples])
        # A next-sentence loss sees every example a second time.
        times = 2 if config.loss.nsp_weight else 1
        self._shapes = self._shapes or plan_shapes(
            lengths,
            config.training.global_batch_size * times,
            steps=config.training.num_steps,
            width=config.model.hidden_size,
            parts=sizes["data"] * sizes["fsdp"] * config.training.accumulation_steps,
            most=config.input.max_shapes,
            packing=config.input.packing,
            limit=max(config.task.max_length * self.task.sequences_per_unit, int(lengths.max())),
        )
        return ExampleBatches(
            self.task,
            examples,
            self._shapes,
            lambda count: host_rows(mesh, count),
            self.resolved.order_digest,
            self.resolved.train_classes() if config.input.balanced else None,
        )

    def data(self, mesh: Mesh, *, complete: bool) -> Data:
        if self._best.split and self._devs and not complete:
            self._best.require_same(self._choosing_metric(), self.resolved.record_digests[self._devs[0]])
        batches = self._batches(mesh)
        parts = len(host_rows(mesh, mesh.size)) / mesh.size
        return Data(batches, parts, 2, [batches.state(), self.resolved.record_digests])

    def batch_shapes(self, mesh: Mesh, data_step: int) -> Mapping[str, Any]:
        return with_shardings(self._batches(mesh).pack(data_step)[0], mesh)

    def flops_per_sequence(self) -> float:
        return 0.0

    def has_eval_data(self) -> bool:
        return bool(self._devs)

    def evaluate(self, context: Context, state: TrainState, step: int) -> bool:
        params = context.programs.gather(state)
        # All of them before anything changes: a signal between two leaves the evaluation to be made again.
        found = {split: self._scores(context, params, split, step) for split in self._devs}
        values = {split: point_values(*scored) for split, scored in found.items()}
        # Not again on another dev file of a finished run: its parameters were chosen.
        is_best = self._best.judged < step and self._judge(values[self._devs[0]], found[self._devs[0]][0], step)
        for split in self._devs:
            # An evaluation made again, because the checkpoint does not know of it, has its line.
            if not context.log.has(step, split):
                context.log.write(step, {"split": split, **values[split]})
        if is_best and self.config.training.restore_best:
            self._save_best(context, params, step, values)
        return self.stopped_early()

    def _scores(self, context: Context, params: Any, split: str, step: int) -> tuple[list[Score], int]:
        predictions = self._predictions(context, params, split, lambda: context.before_batch(step))
        return scores_of(self.task, self.resolved.records[split], predictions)

    def _predictions(
        self, context: Context, params: Any, split: str, before_batch: Callable[[], None]
    ) -> list[Prediction]:
        mesh = context.programs.mesh
        if mesh not in self._predictors:
            model = self.model.clone(mesh=mesh, heads=self.heads, all_layers=False)
            self._predictors[mesh] = Predictor(self.task, model, mesh)
        records, inputs = self.resolved.records[split], self.resolved.inputs[split]
        return predict_split(self.task, self._predictors[mesh], params, records, inputs, before_batch)

    def _judge(self, values: Mapping[str, float | None], scores: Sequence[Score], step: int) -> bool:
        """Return True if this is the best evaluation so far."""
        score = choosing_score(self.config.task.metric, scores)
        split, min_delta = self.resolved.record_digests[self._devs[0]], self.config.training.min_delta
        return self._best.judge(score, values[score.name], step, split, min_delta)

    def stopped_early(self) -> bool:
        patience = self.config.training.patience
        return bool(patience) and self._best.waited >= patience

    def state(self) -> dict[str, Any]:
        return self._best.state()

    def eval_is_recorded(self, step: int) -> bool:
        return self._best.judged >= step

    def restore(self, state: Mapping[str, Any]) -> None:
        self._best = BestCheckpoint.of(state)

    # --- Outputs ---------------------------------------------------------------------------------------------

    def _save_best(
        self, context: Context, params: Any, step: int, values: Mapping[str, Mapping[str, float | None]]
    ) -> None:
        with context.watchdog.phase("saving the best parameters"):
            flat = to_canonical(to_host(params), self.config.model.vocab_size)  # by every process
            if hosts.is_lead():
                saved = saved_model(self.resolved, self._start, flat, step, values)
                replace_saved(context.folder / BEST, saved, step)

    def finish(self, context: Context, state: TrainState) -> None:
        began = time.perf_counter()
        folder, config, step = context.folder, self.config, int(state.step)
        use_best = config.training.restore_best and bool(self._best.step)
        params = context.programs.gather(state)
        if use_best:
            stored = read_weights(folder / BEST)
            like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
            # Heads of losses beside the task's are not among the stored ones, and are not needed any more.
            flat = to_canonical(params, config.model.vocab_size) | dict(stored.params)
            values = from_canonical(flat, like, config.model.vocab_size)
            params = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), values, params)
            step = stored.origin["step"]
        else:
            self._save_best(context, params, step, {})
        # What was predicted with the same parameters stays; a run that went on has no report, so nothing does.
        made = {entry["split"]: entry for entry in read_results(folder) if entry["step"] == step}
        asked, digests = self.resolved.predicted_splits, self.resolved.prediction_digests
        due = [split for split in asked if made.get(split, {}).get("digest") != digests[split]]
        due = [
            split
            for split in asked
            if hosts.broadcast_from_lead(f"predict_{split}", split in due, context.launch.host_timeout)
        ]
        made |= {split: self._predict(context, params, split, step, began) for split in due}
        if not hosts.is_lead():
            return
        results = [made.pop(split) for split in asked] + [*made.values()]
        write_whole(folder / METRICS, metrics_text(results))
        lines = [
            line for result in results for line in result_lines(result, self._best.metric or config.task.metric)
        ]
        if use_best and step == self._best.step:
            lines.append(f"parameters of step {step:,}, the best {self._best.metric}")
        elif use_best:
            lines.append(f"parameters of step {step:,}; those of step {self._best.step:,}, the best, were not kept")
        lines += export(folder, "hf" if self.task.sentence is None else "sentence-transformers")
        evaluation = {name: found["value"] for result in results[:1] for name, found in result["metrics"].items()}
        matrices = {found["split"]: found["confusion_matrix"] for found in results if "confusion_matrix" in found}
        content = {"summary": lines, "evaluation": evaluation, "confusion": matrices}
        write_report(folder, TaskObjective.display, content)
        for line in [*lines, f"report: {context.launch.workdir}/report.html"]:
            context.log.line(line)

    def _predict(self, context: Context, params: Any, split: str, step: int, began: float) -> dict[str, Any]:
        """Write the predictions of a split, and return its entry of metrics.json."""
        predictions = self._predictions(
            context, params, split, lambda: context.watchdog.beat(f"predicting {split}")
        )
        if hosts.is_lead():
            write_predictions(context.folder, split, self.resolved.records[split], predictions)
        return result_entry(self.resolved, split, predictions, self._best, step=step, began=began)

    def is_finished(self, folder: Path) -> bool:
        made = {entry["split"]: entry.get("digest") for entry in read_results(folder)}
        return bool(made) and made | self.resolved.prediction_digests == made


def _with_losses(heads: HeadsConfig, config: FinetuneConfig) -> HeadsConfig:
    """The heads of training: with those of the losses beside the task's."""
    has_nsp = config.loss.nsp_weight > 0
    return dataclasses.replace(heads, mlm=config.loss.mlm_weight > 0, nsp=has_nsp, pooler=heads.pooler or has_nsp)
