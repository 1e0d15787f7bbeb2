"""Importance of attention heads and feed-forward units, from which ``bert-jax prune`` chooses.

* gradient: the expected absolute value, over examples, of the product of a mask on the output of the head or unit,
  which is 1, and the gradient of the loss with respect to it (Michel et al. 2019, arXiv:1905.10650, equation 2);
* magnitude: the Euclidean norm of all parameters of the head or unit;
* movement: the growth of the square of this norm in training (Sanh et al. 2020, arXiv:2005.07683). Half of it is,
  for gradient descent and up to the squares of the steps, their sum of -rate * gradient * parameter over all steps:
  parameters that training moved away from zero are kept, those that it moved towards zero are not;
* random: random numbers, as a baseline.

The values of a layer are divided by their Euclidean norm, as in section 4.1 of Michel et al., so that values of
different layers are comparable.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from bert_jax.batch import Batch
from bert_jax.config import ModelConfig
from bert_jax.contrib.compression.examples import with_classes
from bert_jax.contrib.compression.heads_and_units import Parts, masked, whole_masks
from bert_jax.finetuning.augment import mask_for_mlm_loss
from bert_jax.finetuning.batch_shapes import row_length
from bert_jax.hashing import permutation
from bert_jax.inference.batching import Shape, pack_batch
from bert_jax.inference.engine import Engine
from bert_jax.inference.predict import HEADS, task_head, task_of
from bert_jax.model.bert import bert_output, present
from bert_jax.model.canonical import Params
from bert_jax.objectives.objective import weighted_cross_entropy
from bert_jax.records import Record
from bert_jax.tasks.task import ModelInput, Task

# Loss of parameters on a batch.
Loss = Callable[[Params, Batch], jax.Array]


def random_importance(model: ModelConfig, seed: int) -> Parts:
    """Return random importance values for the heads and units of ``model``."""
    rng = np.random.default_rng(seed)
    return Parts(*(tuple(rng.random(len(mask)) for mask in of_layers) for of_layers in whole_masks(model)))


def magnitude_importance(model: ModelConfig, params: Mapping[str, np.ndarray]) -> Parts:
    """Return the Euclidean norm of the canonical parameters of each head and unit."""
    heads, units = [], []
    for i, count in enumerate(model.heads_by_layer):
        of_head = _squares(params, f"encoder/layer_{i}/attention/")
        heads.append(np.sqrt(of_head.reshape(count, -1).sum(axis=1)))
        units.append(np.sqrt(_squares(params, f"encoder/layer_{i}/feed_forward/")))
    return _comparable(Parts(tuple(heads), tuple(units)))


def movement_importance(
    model: ModelConfig, params: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray]
) -> Parts:
    """Return by how much the squared norm of the parameters of each head and unit grew from ``before``, the
    parameters with which training started, to ``params``."""
    heads, units = [], []
    for i, count in enumerate(model.heads_by_layer):
        grown = [
            _squares(params, place) - _squares(before, place)
            for place in (f"encoder/layer_{i}/attention/", f"encoder/layer_{i}/feed_forward/")
        ]
        heads.append(grown[0].reshape(count, -1).sum(axis=1))
        units.append(grown[1])
    return _comparable(Parts(tuple(heads), tuple(units)))


def _squares(params: Mapping[str, np.ndarray], place: str) -> np.ndarray:
    """Return the sum of squared parameters for each lane between the projections of a block, float64[lanes]."""
    total = np.square(params[f"{place}output/kernel"], dtype=np.float64).sum(axis=1)
    for name, values in params.items():
        if name.startswith(place) and not name.startswith((f"{place}output/", f"{place}layer_norm/")):
            total += np.square(values, dtype=np.float64).reshape(-1, len(total)).sum(axis=0)
    return total


def gradient_importance(loaded: Engine, records: Sequence[Record], limit: int, seed: int) -> tuple[Parts, int]:
    """Return the mean absolute gradients of the masks of heads and units, and the number of examples.

    The loss is the task loss of examples with labels or, for a model without a task head, the masked-LM loss of
    texts with 15% of the tokens masked. ``limit`` records are sampled from ``records``; 0: all.

    Raises ``ValueError`` for a model without such a head, without attention, and for examples without labels.
    """
    order = permutation(len(records), seed)[: limit or None]
    records = [records[place] for place in order]
    heads = [head for head in loaded.spec.heads.present() if head in HEADS]
    if len(heads) > 1:
        raise ValueError(
            f"{loaded.name}: several task heads ({', '.join(heads)}), but --importance gradient reads the loss of "
            "one; use --importance magnitude"
        )
    if heads:
        loss, batches = _of_task(loaded, records)
    elif loaded.spec.heads.mlm:
        loss, batches = _of_masked_lm(loaded, records, seed)
    else:
        raise ValueError(
            f"{loaded.name}: neither a task head nor a masked-LM head, whose loss --importance gradient requires; "
            "fine-tune the model, or use --importance magnitude"
        )
    ones, head_size = whole_masks(loaded.spec.model), loaded.spec.model.head_size

    def add(params: Params, batch: Batch, sums: Parts) -> Parts:
        flat = traverse_util.flatten_dict(params, sep="/")

        def of_masks(masks: Parts) -> jax.Array:
            return loss(traverse_util.unflatten_dict(masked(flat, masks, head_size), sep="/"), batch)

        gradients = jax.grad(of_masks)(jax.tree.map(jnp.asarray, ones))
        return jax.tree.map(lambda total, gradient: total + jnp.abs(gradient), sums, gradients)

    run, sums = loaded.program("importance", add), jax.tree.map(np.zeros_like, ones)
    for batch in batches:
        sums = run(loaded.params, batch, sums)
    return _comparable(jax.tree.map(np.asarray, sums)), len(records)


def _comparable(scores: Parts) -> Parts:
    """Return ``scores`` divided by the Euclidean norm of each layer."""
    return jax.tree.map(lambda values: values / max(float(np.linalg.norm(values)), 1e-30), scores)


def _of_task(loaded: Engine, records: Sequence[Record]) -> tuple[Loss, Iterator[Mapping[str, np.ndarray]]]:
    """Return the loss of the task head, and the batches of one example each, the longest first."""
    task, model = task_of(loaded, head := task_head(loaded), records), loaded.model.clone(sentence=None)
    if head == "sequence" and loaded.spec.heads.problem != "regression":
        records = with_classes(records, task)
    for record in records:
        if not task.is_labelled(record):
            raise ValueError(
                f"{record.source}: no {' and '.join(task.gold)}, which --importance gradient requires; add it, or "
                "use --importance magnitude"
            )

    def loss(params: Params, batch: Batch) -> jax.Array:
        denominators = task.denominators(batch)
        sums = task.loss(bert_output(model.apply({"params": params}, batch)), batch, axis=None)
        return jnp.asarray(sum(sums[name][0] / total for name, total in denominators.items()))

    return loss, _batches(loaded, task.featurize(records, training=True), task)


def _of_masked_lm(
    loaded: Engine, records: Sequence[Record], seed: int
) -> tuple[Loss, Iterator[Mapping[str, np.ndarray]]]:
    """Return the loss of the masked-LM head, and the batches of one text each."""
    tokenizer, model = loaded.need_tokenizer(), loaded.model.clone(sentence=None)
    tokenizer.require_mask(loaded.name)

    def loss(params: Params, batch: Batch) -> jax.Array:
        logits = present(bert_output(model.apply({"params": params}, batch)).mlm_logits)
        total, weight = weighted_cross_entropy("mlm", logits, batch["mlm_labels"], batch["mlm_weights"])["mlm_loss"]
        return total / jnp.maximum(weight, 1)

    def masked_batches() -> Iterator[Mapping[str, np.ndarray]]:
        texts = [record.text for record in records]
        units = [ModelInput(i, (encoded,)) for i, encoded in enumerate(loaded.model_inputs(texts))]
        for number, batch in enumerate(_batches(loaded, units, None)):
            mask_for_mlm_loss(batch, tokenizer, seed, number)
            yield batch

    return loss, masked_batches()


def _batches(loaded: Engine, units: Sequence[ModelInput], task: Task | None) -> Iterator[dict[str, np.ndarray]]:
    """Yield the features of one unit at a time, the longest first, in rows of a few lengths."""
    sequences, targets = (1, {}) if task is None else (task.sequences_of(units), task.targets)
    pad_id = loaded.need_tokenizer().pad_id
    for unit in sorted(units, key=lambda unit: -unit.length):
        shape = Shape(1, row_length(unit.length), 1)
        yield pack_batch([unit], [[0]], shape, pad_id=pad_id, sequences=sequences, targets=targets).features
