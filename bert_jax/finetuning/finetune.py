"""Fine-tuning as a job of ``bert_jax.training.run``."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning.artifacts import stored_options
from bert_jax.finetuning.batches import ExampleBatches, Shape, planned_shapes
from bert_jax.finetuning.evaluator import Evaluator
from bert_jax.finetuning.resolve import Splits, resolve_task
from bert_jax.finetuning.results import has_results, write_results
from bert_jax.finetuning.supervision import LABELS_ONLY, Supervision
from bert_jax.finetuning.training_model import start_parameters, training_model, training_programs
from bert_jax.json_values import Json
from bert_jax.start.start import Start
from bert_jax.start.tokenizer import store_tokenizer
from bert_jax.tasks.task import NO_METRICS, OwnMetrics
from bert_jax.training.job import Context, Data, Job
from bert_jax.training.launch import Launch
from bert_jax.training.programs import TrainPrograms, with_shardings
from bert_jax.training.run import train
from bert_jax.training.state import TrainState


def finetune(
    config: FinetuneConfig,
    launch: Launch,
    *,
    splits: Splits,
    tests: Sequence[str],
    start: Start,
    supervision: Supervision = LABELS_ONLY,
    metrics: OwnMetrics = NO_METRICS,
) -> None:
    """Train a model for the task of ``config`` on ``splits["train"]``, then evaluate and predict the other splits.

    ``tests``: names of the splits that do not select the best parameters. ``metrics``: see
    ``Task.own_metrics``. Raises ``ValueError`` for errors that the user can correct, and ``exits.Stop`` if the run
    ends early.
    """
    if not isinstance(launch.workdir, Path):
        raise ValueError(
            f"--workdir {launch.workdir}: fine-tuning writes to a folder that all hosts share, not to a URL; "
            "give a path"
        )
    job = FinetuneJob(config, splits, tests, start, supervision, metrics)
    if start.resumes and (stored := _stored_order(config, job.config, launch.workdir)):
        job = FinetuneJob(stored, splits, tests, start, supervision, metrics)
    train(job, dataclasses.replace(launch, start=job.start()))


def _stored_order(given: FinetuneConfig, resolved: FinetuneConfig, workdir: Path) -> FinetuneConfig | None:
    """Return ``given`` with the classes and tags of the run in ``workdir``, if ``resolved`` has the same in another
    order and ``given`` states none: older runs have whole numbers in the order of text. None: no such run."""
    stated, found = given.data, resolved.data
    if stated.labels or stated.tags or not (workdir / "config.yaml").is_file():
        return None
    own = stored_options(workdir, ("task.kind", "data.labels", "data.tags")).data
    same = all(sorted(getattr(own, name)) == sorted(getattr(found, name)) for name in ("labels", "tags"))
    if not same or (own.labels, own.tags) == (found.labels, found.tags):
        return None
    return dataclasses.replace(given, data=dataclasses.replace(stated, labels=own.labels, tags=own.tags))


class FinetuneJob(Job):
    """Fine-tuning of a task; the attribute ``config`` includes the resolved labels, steps, intervals and warmup."""

    config: FinetuneConfig
    eval_split = "dev"
    options_used_after_completion = (
        "other dev and test files, training.restore_best and options of prediction (task.max_length, "
        "task.truncation, qa, tagging, sentence)"
    )

    def __init__(
        self,
        config: FinetuneConfig,
        splits: Splits,
        tests: Sequence[str],
        start: Start,
        supervision: Supervision = LABELS_ONLY,
        metrics: OwnMetrics = NO_METRICS,
    ) -> None:
        self.resolved = resolve_task(config, splits, tests, start.tokenizer, supervision)
        self.resolved.task.own_metrics = metrics
        super().__init__(self.resolved.config, start.tokenizer)
        self.task, self.heads, devs = self.resolved.task, self.resolved.heads, self.resolved.dev_splits
        self.eval_split = devs[0] if devs else "dev"
        # Vectors may be good before any training, and there is no constant answer to compare them with.
        self.evaluates_start = self.task.sentence is not None
        self._start = start
        # Shapes of the training batches, planned for the first mesh; empty: not planned yet.
        self.shapes: list[Shape] = []
        self.model = training_model(self.resolved)
        self._evaluator = Evaluator(self.resolved, start, self.model)

    def start(self) -> Start:
        """Return the start with the initial parameters of the training model."""
        initial = start_parameters(self.resolved, self.model, self._start)
        return dataclasses.replace(initial, messages=(*initial.messages, *self._evaluator.notes))

    def programs(self, mesh: Mesh) -> TrainPrograms:
        return training_programs(self.resolved, self.model, mesh)

    def write_tokenizer(self, folder: Path) -> None:
        store_tokenizer(folder, self._start.tokenizer_config, self._start.tokenizer_content)
        self.resolved.supervision.write_record(folder)

    def data(self, mesh: Mesh, *, complete: bool) -> Data:
        if not complete:
            self._evaluator.require_same_choice()
        batches = self.batches(mesh)
        return Data(batches, batches.host_share, 2, [batches.state(), self.resolved.record_digests])

    def batches(self, mesh: Mesh) -> ExampleBatches:
        """Return an iterator over the training batches, starting at the first batch."""
        self.shapes = self.shapes or planned_shapes(self.resolved, mesh)
        return ExampleBatches(self.resolved, self.shapes, mesh)

    def batch_shapes(self, mesh: Mesh, data_step: int) -> Mapping[str, Any]:
        return with_shardings(self.batches(mesh).pack(data_step)[0], mesh)

    def flops_per_sequence(self) -> float:
        return 0.0

    def has_eval_data(self) -> bool:
        return bool(self.resolved.dev_splits)

    def evaluate(self, context: Context, state: TrainState, step: int) -> bool:
        if self.has_eval_data():
            self._evaluator.evaluate(context, state, step)
        ends = self.stopped_early()
        if ends:
            best = self._evaluator.best
            what = f"no better {best.metric} since step {best.step:,}"
            context.log.line(f"step {step:,}: {what}; training.patience ends the run")
        return ends

    def stopped_early(self) -> bool:
        patience = self.resolved.config.training.patience
        return bool(patience) and self._evaluator.best.waited >= patience

    def state(self) -> dict[str, Json]:
        return dataclasses.asdict(self._evaluator.best)

    def eval_is_recorded(self, step: int) -> bool:
        return self._evaluator.best.judged >= step

    def restore(self, state: Mapping[str, Json]) -> None:
        self._evaluator.best.restore(state)

    def finish(self, context: Context, state: TrainState) -> None:
        began = time.perf_counter()
        params, step = self._evaluator.final_parameters(context, state)
        write_results(context, self.resolved, self._evaluator, params, step=step, began=began)

    def is_finished(self, folder: Path) -> bool:
        return has_results(folder, self.resolved)
