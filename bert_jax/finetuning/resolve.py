"""A fine-tuning config completed by the records: which of them are trained on, labels, steps, intervals, warmup."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.records import Record
from bert_jax.tasks import sampling as selection

Splits = Mapping[str, Sequence[Record]]


def chosen_splits(config: FinetuneConfig, splits: Splits) -> dict[str, Sequence[Record]]:
    """``splits`` with the training records that few-shot learning keeps."""
    chosen = dict(splits)
    if config.input.few_shot:
        labels = [record.label or "" for record in splits["train"]]
        kept = selection.few_shot(labels, config.input.few_shot, config.data.split_seed)
        chosen["train"] = [splits["train"][i] for i in kept]
    return chosen


def redrawn_layers(config: FinetuneConfig) -> tuple[str, ...]:
    """Return prefixes of the parameters that ``regularization.reinit_layers`` draws anew: the top layers, and the
    pooler with them."""
    count, layers = config.regularization.reinit_layers, config.model.num_layers
    if count > layers:
        raise ValueError(f"regularization.reinit_layers: {count} is not allowed; the model has {layers} layers")
    top = tuple(f"encoder/layer_{layers - 1 - i}/" for i in range(count))
    return (*top, "pooler/") if count else ()


def with_steps(config: FinetuneConfig, count: int) -> FinetuneConfig:
    """``config`` with what follows from the number of training units."""
    training, optimizer = config.training, config.optimizer
    per_epoch = math.ceil(count / training.global_batch_size)
    steps = training.num_steps or max(1, math.ceil(training.num_epochs * per_epoch))
    training = dataclasses.replace(
        training,
        num_steps=steps,
        eval_interval=training.eval_interval or per_epoch,
        checkpoint_interval=training.checkpoint_interval or per_epoch,
    )
    warmup = optimizer.warmup_steps or round(optimizer.warmup_fraction * steps)
    optimizer = dataclasses.replace(optimizer, warmup_steps=warmup)
    return dataclasses.replace(config, training=training, optimizer=optimizer)
