"""Fine-tuning as a job of ``bert_jax.training.run``: examples, metrics on dev, the best checkpoint, predictions."""

import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from bert_jax.config import HeadsConfig, ModelSpec, to_dict
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning.artifacts import METRICS, PREDICTIONS, read_results, records_digest
from bert_jax.finetuning.batches import ExampleBatches
from bert_jax.finetuning.best import BestCheckpoint
from bert_jax.finetuning.evaluation import (
    Predictor,
    blank_scores,
    choosing_score,
    confusion_of,
    metrics_text,
    point_values,
    predict_split,
    result_lines,
    scores_of,
    with_intervals,
)
from bert_jax.finetuning.packing import plan_shapes
from bert_jax.finetuning.resolve import Splits, chosen_splits, redrawn_layers, with_steps
from bert_jax.finetuning.task_objective import TaskObjective, check_layers
from bert_jax.inference.batching import Shape
from bert_jax.interop.exchange import ModelBundle, parameter_shapes
from bert_jax.interop.export import export_model
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
from bert_jax.tasks.registry import task_class
from bert_jax.tasks.task import Task
from bert_jax.training.checkpoint.digest import json_digest
from bert_jax.training.job import Context, Data, Job
from bert_jax.training.launch import InitialModel, Launch
from bert_jax.training.logging.report import write_report
from bert_jax.training.programs import TrainPrograms, make_programs, with_shardings
from bert_jax.training.run import train
from bert_jax.training.state import TrainState, abstract_params

# Folders and files of a workdir.
EXPORT = "export"


def finetune(config: FinetuneConfig, launch: Launch, *, splits: Splits, tests: Sequence[str], start: Start) -> None:
    """Train the task of ``config`` on ``splits["train"]``, evaluate on the other splits, and predict all of them;
    ``tests`` are those that choose nothing.

    Raises ``ValueError`` for what the user can mend and ``exits.Stop`` when the run ends early.
    """
    if isinstance(launch.workdir, ObjectPath):
        raise ValueError(f"--workdir {launch.workdir}: fine-tuning writes to a folder that all hosts see; give one")
    job = FinetuneJob(config, splits, tests, start)
    initial = job.initial_model()
    initial = dataclasses.replace(initial, messages=(*initial.messages, *job.notes))
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
        tokenizer = start.tokenizer
        kind = task_class(config)
        splits = chosen_splits(config, splits)
        if not splits.get("train"):
            raise ValueError("data.train: there are no training records; name the files in data.train")
        config = kind.from_data(config, splits)
        self._units = kind(config, tokenizer, splits["train"]).featurize(splits["train"], training=True)
        if not self._units:
            raise ValueError("data.train: no training record gives anything to learn; look at data.columns")
        config = with_steps(config, len(self._units))
        super().__init__(config, tokenizer)
        self.task: Task = kind(config, tokenizer, splits["train"])
        self.notes = self.task.notes(config, splits)
        self._splits, self._tests, self._start = splits, tests, start
        self._devs = [name for name in splits if name != "train" and name not in tests]
        for split, records in splits.items():
            without = sum(not self.task.is_labelled(record) for record in records)
            if split in self._devs and without == len(records):
                raise ValueError(
                    f"data.dev: split {split} has no labels, nothing to evaluate on; use data.test for it"
                )
            if split != "train" and 0 < without < len(records):
                self.notes.append(f"{split}: {without:,} of {len(records):,} records are not scored: no label")
        if config.training.patience and not self._devs:
            raise ValueError(
                f"training.patience: {config.training.patience} has no use without a dev split; name a file in "
                "data.dev, cut a split with data.dev_fraction, or leave it out"
            )
        # Now, so that a line that does not fit is found before training.
        self._units_of = {
            split: self.task.featurize(records, training=False)
            for split, records in splits.items()
            if split != "train"
        }
        self._shapes: list[Shape] = []
        self._predictor: Predictor | None = None
        self._best = BestCheckpoint()
        self.eval_split = self._devs[0] if self._devs else "dev"
        heads = dataclasses.replace(
            self.task.heads,
            features=config.features.layers,
            bilstm=config.features.bilstm_size if self.task.heads.token_labels else 0,
            dropout=None if config.regularization.head_dropout < 0 else config.regularization.head_dropout,
        )
        heads.check_features(config.model)
        check_layers(config, heads)
        self.heads = heads  # of what comes out
        self.model = BertModel(
            config.model,
            config.execution,
            _with_losses(heads, config),
            self.task.sentence,
            all_layers=bool(config.loss.layers),
            frozen_encoder=config.features.frozen_encoder,
        )
        if config.task.metric and self._devs:
            self._choosing_metric()

    def _choosing_metric(self) -> str:
        """Name of the metric that chooses; ``ValueError`` for one that is not measured."""
        first, model = self._devs[0], self.model.clone(heads=self.heads, all_layers=False)
        scores = blank_scores(self.task, model, self._splits[first], self._units_of[first])
        return choosing_score(self.config.task.metric, scores).name

    @functools.cached_property
    def _contents(self) -> dict[str, str]:
        """Digests of the records of each split, wherever their files lie."""
        return {split: records_digest(records) for split, records in self._splits.items()}

    @functools.cached_property
    def _digests(self) -> dict[str, str]:
        """The same with the options that shape predictions, of the splits that are predicted."""
        config = self.config
        options = dataclasses.asdict(dataclasses.replace(config.task, name="", metric="", module=""))
        options |= {name: dataclasses.asdict(getattr(config, name)) for name in ("qa", "tagging", "sentence")}
        key = [options, config.training.restore_best]
        return {
            split: json_digest([found, key])[:16] for split, found in self._contents.items() if split != "train"
        }

    def initial_model(self) -> InitialModel:
        """Return the parameters of the start that the model of training has."""
        model, config = self.model, self.config
        spec = ModelSpec(model=config.model, heads=model.heads, sentence=model.sentence)
        redraw_head = config.regularization.reinit_head
        return initial_model(self._start, spec, redrawn=redrawn_layers(config), redraw_head=redraw_head)

    # --- What run() asks for -----------------------------------------------------------------------------------

    def programs(self, mesh: Mesh) -> TrainPrograms:
        config, model = self.config, self.model.clone(mesh=mesh)
        self._predictor = Predictor(self.task, model.clone(heads=self.heads, all_layers=False), mesh)
        like = nn.unbox(abstract_params(model))
        parts = config.model.num_layers, like, self._steps_per_epoch
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

    @property
    def _steps_per_epoch(self) -> int:
        return math.ceil(len(self._units) / self.config.training.global_batch_size)

    def _batches(self, mesh: Mesh) -> ExampleBatches:
        config, sizes = self.config, mesh.shape
        lengths = np.array([unit.length for unit in self._units])
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
        classes = self._classes() if config.input.balanced else None
        return ExampleBatches(
            self.task, self._units, self._shapes, lambda count: host_rows(mesh, count), self._fingerprint, classes
        )

    @functools.cached_property
    def _fingerprint(self) -> str:
        """Of the examples, and of everything that decides which one comes when."""
        config = self.config
        digest = hashlib.sha256()
        for unit in self._units:
            for sequence in unit.sequences:
                digest.update(np.asarray(sequence.ids, np.int32).tobytes() + b"|")
            for name, values in sorted(unit.targets.items()):
                digest.update(name.encode() + np.asarray(values).tobytes())
            digest.update(f"{unit.weight}".encode())
        key = [config.training.global_batch_size, config.training.seed, dataclasses.asdict(config.input)]
        return json_digest([digest.hexdigest(), key])

    def _classes(self) -> np.ndarray:
        labels = self.config.data.labels
        records = self._splits["train"]
        return np.array([labels.index(records[unit.record].label or "") for unit in self._units])

    def data(self, mesh: Mesh, *, complete: bool) -> Data:
        if self._best.split and self._devs and not complete:
            self._best.require_same(self._choosing_metric(), self._contents[self._devs[0]])
        batches = self._batches(mesh)
        parts = len(host_rows(mesh, mesh.size)) / mesh.size
        return Data(batches, parts, 2, [batches.state(), self._contents])

    def batch_shapes(self, mesh: Mesh, data_step: int) -> Mapping[str, Any]:
        return with_shardings(self._batches(mesh).pack(data_step)[0], mesh)

    def flops_per_sequence(self) -> float:
        return 0.0

    def has_eval_data(self) -> bool:
        return bool(self._devs)

    def evaluate(self, context: Context, state: TrainState, step: int) -> bool:
        if not self._devs:
            return False
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
        assert self._predictor is not None
        records, units = self._splits[split], self._units_of[split]
        predictions = predict_split(
            self.task, self._predictor, params, records, units, lambda: context.before_batch(step)
        )
        return scores_of(self.task, records, predictions)

    def _judge(self, values: Mapping[str, float | None], scores: Sequence[Score], step: int) -> bool:
        """Whether this is the best evaluation so far."""
        score = choosing_score(self.config.task.metric, scores)
        split, min_delta = self._contents[self._devs[0]], self.config.training.min_delta
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

    # --- What comes out ------------------------------------------------------------------------------------------

    def _weights(self, params: Any, step: int, values: Mapping[str, Mapping[str, float | None]]) -> ModelBundle:
        """Parameters in exchange form, with metrics of the dev splits; every process calls it."""
        config = self.config
        flat = to_canonical(to_host(params), config.model.vocab_size)
        spec = ModelSpec(
            model=config.model,
            heads=self.heads,
            sentence=self.model.sentence,
            tokenizer=self._start.tokenizer_config,
            family="roberta" if config.model.position_offset else "bert",
        )
        metrics = {f"{split}: {name}": value for split, found in values.items() for name, value in found.items()}
        origin = {
            "format": "fine-tuning run", "name": config.name, "step": step, "init_from": self._start.source,
            "recipe": to_dict(config), "metrics": {"step": step, **metrics} if metrics else {},
        }  # fmt: skip
        arrays = {name: np.asarray(flat[name], np.float32) for name in parameter_shapes(spec)}
        return ModelBundle(spec=spec, params=arrays, tokenizer_content=self._start.tokenizer_content, origin=origin)

    def _save_best(
        self, context: Context, params: Any, step: int, values: Mapping[str, Mapping[str, float | None]]
    ) -> None:
        with context.watchdog.phase("saving the best parameters"):
            weights = self._weights(params, step, values)
            if hosts.is_lead():
                replace_saved(context.folder / BEST, weights, step)

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
        asked = [split for split in self._splits if split != "train"]
        due = [split for split in asked if made.get(split, {}).get("digest") != self._digests[split]]
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
        lines = [line for result in results for line in result_lines(result, self._metric)]
        if use_best and step == self._best.step:
            lines.append(f"parameters of step {step:,}, the best {self._best.metric}")
        elif use_best:
            lines.append(f"parameters of step {step:,}; those of step {self._best.step:,}, the best, were not kept")
        lines += self._export(folder)
        evaluation = {name: found["value"] for result in results[:1] for name, found in result["metrics"].items()}
        matrices = {found["split"]: found["confusion_matrix"] for found in results if "confusion_matrix" in found}
        content = {"summary": lines, "evaluation": evaluation, "confusion": matrices}
        write_report(folder, TaskObjective.display, content)
        for line in [*lines, f"report: {context.launch.workdir}/report.html"]:
            context.log.line(line)

    def _predict(self, context: Context, params: Any, split: str, step: int, began: float) -> dict[str, Any]:
        """Write the predictions of a split; its entry of metrics.json."""
        assert self._predictor is not None
        records = self._splits[split]
        predictions = predict_split(
            self.task, self._predictor, params, records, self._units_of[split],
            lambda: context.watchdog.beat(f"predicting {split}"),
        )  # fmt: skip
        if hosts.is_lead():
            lines = [
                json.dumps({"id": record.id, **one}, ensure_ascii=False)
                for record, one in zip(records, predictions, strict=True)
            ]
            write_whole(context.folder / PREDICTIONS.format(split), "".join(f"{line}\n" for line in lines))
        scores, count = scores_of(self.task, records, predictions)
        confusion = confusion_of(self.task, records, predictions)
        return {
            "task": self.config.name,
            "split": split,
            "n": len(records),
            "digest": self._digests[split],
            "metrics": with_intervals(scores, count, self.config.training.seed, self._metric),
            "seed": self.config.training.seed,
            "step": step,
            "seconds": round(time.perf_counter() - began, 3),
            **({"chosen_by": self._chosen_by(scores)} if self._contents[split] == self._best.split else {}),
            **({} if confusion is None else {"confusion_matrix": confusion}),
        }

    def _export(self, folder: Path) -> list[str]:
        """Write ``export/`` as a Hugging Face folder; what to say about it."""
        said: list[str] = []
        form = "hf" if self.model.sentence is None else "sentence-transformers"
        try:
            export_model(folder / BEST, folder / EXPORT, form, force=True, verify=False, report=said.append)
        except ValueError as error:
            return [f"no export: {error}"]
        return said

    @property
    def _metric(self) -> str:
        """Name of the metric that chose, or would; empty: the first."""
        return self._best.metric or self.config.task.metric

    def _chosen_by(self, scores: Sequence[Score]) -> dict[str, Any]:
        score = choosing_score(self._best.metric, scores)
        return {"metric": score.name, "higher_is_better": score.higher_is_better}

    def is_finished(self, folder: Path) -> bool:
        made = {entry["split"]: entry.get("digest") for entry in read_results(folder)}
        return bool(made) and made | self._digests == made


def _with_losses(heads: HeadsConfig, config: FinetuneConfig) -> HeadsConfig:
    """The heads of training: with those of the losses beside the task's."""
    has_nsp = config.loss.nsp_weight > 0
    return dataclasses.replace(heads, mlm=config.loss.mlm_weight > 0, nsp=has_nsp, pooler=heads.pooler or has_nsp)
