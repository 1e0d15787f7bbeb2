"""Resolution of a task: the values that follow from its records, such as labels, steps and output layers."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import RATED_OPTIMIZERS, FinetuneConfig, automatic_rate
from bert_jax.finetuning.artifacts import records_digest
from bert_jax.finetuning.supervision import LABELS_ONLY, Supervision
from bert_jax.records import Record
from bert_jax.tasks import sampling
from bert_jax.tasks.classes import blank_lines
from bert_jax.tasks.registry import task_class
from bert_jax.tasks.task import ModelInput, Task
from bert_jax.tokenization import Tokenizer
from bert_jax.training.checkpoint.digest import json_digest

# Former options of the section input, so that digests of earlier runs stay the same.
_FORMER_INPUT = {"mask_fraction": 0.0, "span_max": 5}
# Evaluations of a run whose number of epochs is not set.
_MOST_EVALUATIONS = 10
# Log lines of a run whose interval is not set, and the largest interval, of a long run.
_LOG_LINES, _LONGEST_LOG_INTERVAL = 20, 50

Splits = Mapping[str, Sequence[Record]]


@dataclass(frozen=True)
class ResolvedTask:
    """A task, its records, and the values that follow from them."""

    # Options with labels, tags, steps, intervals and warmup filled in.
    config: FinetuneConfig
    task: Task
    # Records and their model inputs by split; with ``input.few_shot``, "train" contains only the selected records.
    records: Splits
    inputs: Mapping[str, Sequence[ModelInput]]
    # Splits that are evaluated; the first one selects the best parameters.
    dev_splits: tuple[str, ...]
    # Lines for the log.
    notes: tuple[str, ...]
    supervision: Supervision

    @property
    def predicted_splits(self) -> list[str]:
        """Names of the splits that are predicted: all except "train"."""
        return [split for split in self.records if split != "train"]

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in one pass over the training examples."""
        return math.ceil(len(self.inputs["train"]) / self.config.training.global_batch_size)

    @property
    def heads(self) -> HeadsConfig:
        """Output layers of the saved model."""
        heads, config = self.task.heads, self.config
        of_tokens = bool(heads.token_labels or heads.span) and "token_pooler" in config.model.head_parts
        return dataclasses.replace(
            heads,
            pooler=heads.pooler or of_tokens,
            features=config.features.layers,
            bilstm=config.features.bilstm_size if heads.token_labels else 0,
            exits=config.exits,
            dropout=None if config.regularization.head_dropout < 0 else config.regularization.head_dropout,
        )

    @functools.cached_property
    def record_digests(self) -> dict[str, str]:
        """Digest of the records of each split, independent of the paths of their files."""
        return {split: records_digest(records) for split, records in self.records.items()}

    @functools.cached_property
    def prediction_digests(self) -> dict[str, str]:
        """For each predicted split, a digest of its records and of the options that affect predictions."""
        config = self.config
        options = dataclasses.asdict(dataclasses.replace(config.task, name="", metric="", module=""))
        if options["pair_order"] == "given":  # so that the digests of earlier runs stay the same
            del options["pair_order"]
        options |= {name: dataclasses.asdict(getattr(config, name)) for name in ("qa", "tagging", "sentence")}
        key = [options, config.training.restore_best]
        return {split: json_digest([self.record_digests[split], key])[:16] for split in self.predicted_splits}

    @functools.cached_property
    def order_digest(self) -> str:
        """Digest of the training examples, and of every option that determines their order."""
        digest, config = hashlib.sha256(), self.config
        for one in self.inputs["train"]:
            for sequence in one.sequences:
                digest.update(np.asarray(sequence.ids, np.int32).tobytes() + b"|")
            for name, values in sorted(one.targets.items()):
                # Outputs of other models differ in the last digits between machines; the key stands for them.
                if name in self.task.targets:
                    digest.update(name.encode() + np.asarray(values).tobytes())
            digest.update(f"{one.weight}".encode())
        key = [
            config.training.global_batch_size,
            config.training.seed,
            dataclasses.asdict(config.input) | _FORMER_INPUT,
        ]
        return json_digest([digest.hexdigest(), [*key, *self.supervision.key]])

    def train_classes(self) -> np.ndarray:
        """Return int64[n], the class of each training example as an index into ``data.labels``."""
        labels, records = self.config.data.labels, self.records["train"]
        return np.array([labels.index(records[one.record].label or "") for one in self.inputs["train"]])


def resolve_task(
    config: FinetuneConfig,
    splits: Splits,
    tests: Sequence[str],
    tokenizer: Tokenizer,
    supervision: Supervision = LABELS_ONLY,
) -> ResolvedTask:
    """Resolve the task of ``config`` on the records of ``splits``; ``tests``: names of the splits that do not
    select the best parameters.

    All records are converted to model inputs here, so that an invalid record is reported before training. Raises
    ``ValueError`` for records that cannot be trained on or evaluated.
    """
    kind, records = task_class(config), dict(splits)
    train = records.setdefault("train", ())
    config = supervision.completed(config, has_labels=bool(train))
    config, records, prepared = kind.prepare(config, records, tests)
    train = records["train"]
    if config.input.few_shot:
        labels = [record.label or "" for record in train]
        chosen = sampling.few_shot(labels, config.input.few_shot, config.data.split_seed)
        records["train"] = train = [train[i] for i in chosen]
    config = kind.from_data(config, records)
    examples = supervision.units(kind(config, tokenizer, train), train)
    if not examples:
        raise ValueError(
            "data.train: no training record yields a training example; check that the records contain words, and "
            "check data.columns"
        )
    asked, config = config, with_steps(config, len(examples))
    task = kind(config, tokenizer, train)
    dev_splits = tuple(split for split in records if split != "train" and split not in tests)
    notes = [*automatic_notes(asked, config, len(examples)), *prepared, *blank_lines(train)]
    notes += task.notes(config, records)
    for split, own in records.items():
        unlabelled = sum(not task.is_labelled(record) for record in own)
        if split in dev_splits and unlabelled == len(own):
            raise ValueError(f"data.dev: split {split} has no labels; add labels, or name its file in data.test")
        if split != "train" and unlabelled:
            notes.append(f"{split}: {unlabelled:,} of {len(own):,} records have no label and are not scored")
    if config.training.patience and not dev_splits:
        raise ValueError(
            f"training.patience: {config.training.patience} needs a dev split; set data.dev or data.dev_fraction, "
            "or omit training.patience"
        )
    inputs: dict[str, Sequence[ModelInput]] = {
        split: task.featurize(own, training=False) for split, own in records.items() if split != "train"
    }
    supervision, inputs["train"] = supervision.of_units(task, examples, train)
    return ResolvedTask(config, task, records, inputs, dev_splits, tuple(notes), supervision)


def with_steps(config: FinetuneConfig, count: int) -> FinetuneConfig:
    """Return ``config`` with the rate, the steps, intervals and warmup that follow from the width of the model and
    from ``count``, the number of examples."""
    training, optimizer = config.training, config.optimizer
    per_epoch = math.ceil(count / training.global_batch_size)
    steps = training.steps(per_epoch)
    interval = per_epoch if training.has_length else max(per_epoch, math.ceil(steps / _MOST_EVALUATIONS))
    training = dataclasses.replace(
        training,
        num_steps=steps,
        log_interval=training.log_interval or max(1, min(_LONGEST_LOG_INTERVAL, steps // _LOG_LINES)),
        eval_interval=training.eval_interval or interval,
        checkpoint_interval=training.checkpoint_interval or interval,
    )
    warmup = optimizer.warmup_steps or round(optimizer.warmup_fraction * steps)
    rate = automatic_rate(config) if optimizer.learning_rate < 0 else optimizer.learning_rate
    optimizer = dataclasses.replace(optimizer, warmup_steps=warmup, learning_rate=rate)
    return dataclasses.replace(config, training=training, optimizer=optimizer)


def automatic_notes(asked: FinetuneConfig, config: FinetuneConfig, count: int) -> list[str]:
    """Return a line with the rate and the length of ``config`` that ``asked``, the options, leaves open; ``count``
    is the number of examples."""
    training, parts = config.training, list[str]()
    if asked.optimizer.learning_rate < 0:
        name = config.optimizer.name
        known = "" if name in RATED_OPTIMIZERS else f" (measured for {', '.join(RATED_OPTIMIZERS)}, not for {name})"
        parts.append(f"optimizer.learning_rate {config.optimizer.learning_rate:g}{known}")
    if not asked.training.has_length:
        epochs = training.num_steps * training.global_batch_size / count
        parts.append(f"training.num_steps {training.num_steps:,} ({epochs:.1f} epochs of {count:,} examples)")
    return [f"not set, chosen: {', '.join(parts)}"] if parts else []


def redrawn_layers(config: FinetuneConfig) -> tuple[str, ...]:
    """Return the name prefixes of the parameters that ``regularization.reinit_layers`` randomly initializes: the
    top layers and the pooler. Raises ``ValueError`` if the option exceeds the number of layers of the model."""
    count, layers = config.regularization.reinit_layers, config.model.own_layers
    if count > layers:
        raise ValueError(
            f"regularization.reinit_layers: {count} is not allowed; allowed: 0 to {layers}, the number of layers "
            "with separate parameters"
        )
    top = tuple(f"encoder/layer_{layers - 1 - i}/" for i in range(count))
    return (*top, "pooler/") if count else ()
