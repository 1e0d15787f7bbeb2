"""The objective of fine-tuning: the loss of the task and auxiliary losses, on optionally perturbed parameters."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.finetuning.gradient_cache import cached_gradients
from bert_jax.finetuning.supervision import LABELS_ONLY, Supervision
from bert_jax.model import BertModel, BertOutput
from bert_jax.model.bert import present
from bert_jax.model.canonical import STACKED, Params, path_name
from bert_jax.model.dropout import DropoutKey, whole_key
from bert_jax.objectives.causal_lm import CausalLm, next_weights
from bert_jax.objectives.display import Display
from bert_jax.objectives.masked_lm import COLUMNS, MLM_EPSILON, PANELS
from bert_jax.objectives.objective import (
    Aux,
    Batch,
    Gradients,
    Objective,
    Replica,
    Summed,
    Sums,
    denominator,
    padding_sums,
    weighted_cross_entropy,
)
from bert_jax.tasks.task import Task

# First number of the random keys of weight dropout and mixout, above the layer dropout keys.
_WEIGHTS = 1 << 20


class TaskObjective(Objective):
    """The loss of a task and auxiliary losses, on parameters that may be perturbed."""

    def __init__(
        self, task: Task, config: FinetuneConfig, model: BertModel, supervision: Supervision = LABELS_ONLY
    ) -> None:
        super().__init__(config, model)
        self._task, self._supervision = task, supervision
        self.display = task_display(supervision)

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Return the denominator of each loss by name. The denominators of the auxiliary losses are divided by the
        weights of these losses, so that the quotients are the weighted losses."""
        options = self._task.config.loss
        values = self._supervision.denominators(self._task.denominators(batch), batch)
        values |= {f"layer_{n}_loss": values["loss"] / options.layer_weight for n in options.layers}
        if options.nsp_weight:
            values["nsp_loss"] = jnp.maximum(jnp.sum(batch["nsp_weights"]), MLM_EPSILON) / options.nsp_weight
        if options.mlm_weight:
            values["mlm_loss"] = (jnp.sum(batch["mlm_weights"]) + MLM_EPSILON) / options.mlm_weight
        if options.lm_weight:
            values["lm_loss"] = denominator(next_weights(batch["sequence_ids"])) / options.lm_weight
        return values

    def sums(self, params: Params, aux: Aux, batch: Batch, key: DropoutKey | None, *, axis: str | None) -> Summed:
        """Return (sum, weight) of the losses and of the logged values. Mixout sets random weights to their values
        in ``aux.fixed["start"]``."""
        output, others = self._outputs(params, aux, batch, key)
        return self._task.loss(output, batch, axis=axis) | others, aux.carried

    def gradients(self, params: Params, batch: Batch, replica: Replica) -> Gradients:
        config = self._task.config
        if replica.count == 1 or config.task.kind != "sentence" or not config.sentence.gradient_cache:
            return super().gradients(params, batch, replica)

        def vectors(params: Params, rows: Batch, key: DropoutKey | None) -> tuple[jax.Array, Sums]:
            output, others = self._outputs(params, replica.aux, rows, key)
            return present(output.sentence_embeddings), others

        def compare(vectors: jax.Array) -> Sums:
            output = BertOutput(sequence_output=vectors, sentence_embeddings=vectors)
            return self._task.loss(output, batch, axis=replica.axis)

        return cached_gradients(vectors, compare, params, batch, replica)

    def _outputs(self, params: Params, aux: Aux, batch: Batch, key: DropoutKey | None) -> tuple[BertOutput, Sums]:
        """Return the output of the model, and the sums of all losses and values but those of the task."""
        options, losses = self._task.config.regularization, self._task.config.loss
        if key is not None and (options.weight_dropout or options.mixout):
            params = perturbed(params, aux.fixed["start"], key, options.weight_dropout, options.mixout)
        output = self.model.apply({"params": params}, batch, key)
        sums = padding_sums(batch["sequence_ids"]) | self._supervision.sums(output, batch)
        for number in losses.layers:
            if number in self.model.heads.exits:
                logits = output.exit_logits[self.model.heads.exits.index(number)]
            else:
                hidden_BxSxH = output.hidden_states[number]
                logits = self.model.apply({"params": params}, hidden_BxSxH, batch, key, method="pooled_logits")
            of_layer = self._task.loss(output.replace(sequence_logits=logits), batch, axis=None)
            sums[f"layer_{number}_loss"] = of_layer["loss"]
        if losses.mlm_weight:
            sums |= weighted_cross_entropy("mlm", output.mlm_logits, batch["mlm_labels"], batch["mlm_weights"])
        if losses.lm_weight:  # without mlm_positions, the head reads every token
            targets, weights = batch["input_ids"][:, 1:], next_weights(batch["sequence_ids"])
            sums |= weighted_cross_entropy("lm", output.mlm_logits[:, :-1], targets, weights)
        if losses.nsp_weight:
            sums |= weighted_cross_entropy("nsp", output.nsp_logits, batch["nsp_labels"], batch["nsp_weights"])
        return output, sums

    def damaged_rows(self, sequence_ids: jax.Array) -> jax.Array:
        """Return 0, because a row without tokens is an unused row of the batch, not a damaged record."""
        return jnp.zeros((), jnp.int32)


def task_display(supervision: Supervision) -> Display:
    """Return the columns and panels of the auxiliary losses."""
    more = supervision.display
    return Display(
        columns=(*more.columns, *COLUMNS, *CausalLm.display.columns),
        panels=(*more.panels, *PANELS, *CausalLm.display.panels[:1]),
    )


def perturbed(params: Params, start: Any, key: DropoutKey, weight_dropout: float, mixout: float) -> Params:
    """Return ``params`` with weight dropout or mixout applied, the same on every replica.

    Weight dropout sets random weights of the encoder matrices to zero and scales the others (DropConnect; Wan et
    al. 2013). Mixout sets random weights of the encoder and pooler matrices to their values in ``start`` and shifts
    the others so that the expected value is unchanged (Lee et al. 2020, equation 5). Matrices that are 0 in
    ``start``, because they were randomly initialized, remain unchanged.
    """
    whole = whole_key(key)
    rate = mixout or weight_dropout

    numbers = itertools.count()

    def one(path: jax.tree_util.KeyPath, param: jax.Array, before: jax.Array) -> jax.Array:
        name, number = path_name(path), next(numbers)
        parts = ("encoder/", "pooler/") if mixout else ("encoder/",)
        if not (name.startswith(parts) and name.endswith("kernel")):
            return param
        drops = jax.random.bernoulli(jax.random.fold_in(whole, _WEIGHTS + number), rate, param.shape)
        if not mixout:
            return jnp.where(drops, 0.0, param) / (1 - rate)
        mixed = (jnp.where(drops, before, param) - rate * before) / (1 - rate)
        axes = tuple(range(1 if STACKED in name else 0, param.ndim))
        return jnp.where(jnp.any(before, axes, keepdims=True), mixed, param)

    return jax.tree.map_with_path(one, params, start if mixout else params)


def check_layers(config: FinetuneConfig, heads: HeadsConfig) -> None:
    """Raise ``ValueError`` if ``loss.layers`` names a layer that the model lacks or that the pooler of ``heads``
    cannot read, or if a width of ``sentence.matryoshka`` is not below the width of the vectors."""
    widths, size = config.sentence.matryoshka, config.model.hidden_size
    if len({*widths} & {*range(1, size)}) < len(widths):
        raise ValueError(
            f"sentence.matryoshka: {list(widths)} is not allowed; allowed: different widths from 1 to {size - 1}"
        )
    layers, count = config.loss.layers, config.model.num_layers
    if len({*layers} & {*range(1, count)}) < len(layers):
        raise ValueError(
            f"loss.layers: {list(layers)} is not allowed; allowed: different layers from 1 to {count - 1}"
        )
    width, model = heads.feature_width(config.model), config.model.hidden_size
    if layers and width != model:
        raise ValueError(
            f"features.layers: {heads.features} is not allowed with loss.layers {list(layers)}: the head "
            f"requires features of width {width}, but a layer has width {model}; change features.layers, "
            "or omit loss.layers"
        )
