"""The objective of fine-tuning: the loss of the task and auxiliary losses, on optionally perturbed parameters."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.model import BertModel
from bert_jax.model.canonical import STACKED, path_name
from bert_jax.model.dropout import DropoutKey, ShardKey
from bert_jax.objectives.display import Display
from bert_jax.objectives.masked_lm import COLUMNS, MLM_EPSILON, PANELS
from bert_jax.objectives.objective import Objective, Sums, padding_sums, weighted_cross_entropy
from bert_jax.tasks.task import Task

# Weight dropout and mixout draw after all sites of the layers.
_WEIGHTS = 1 << 20


class TaskObjective(Objective):
    """The loss of a task, losses beside it, on parameters that may be perturbed."""

    # Of the pretraining losses that may stand beside the task's.
    display = Display(columns=COLUMNS, panels=PANELS)

    def __init__(self, task: Task, config: FinetuneConfig, model: BertModel) -> None:
        super().__init__(config, model)
        self._task = task

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the denominators of the task and of the auxiliary losses, divided by the weights of the losses."""
        options = self._task.config.loss
        found = self._task.denominators(batch)
        found |= {f"layer_{n}_loss": found["loss"] / options.layer_weight for n in options.layers}
        if options.nsp_weight:
            found["nsp_loss"] = jnp.maximum(jnp.sum(batch["nsp_weights"]), MLM_EPSILON) / options.nsp_weight
        if options.mlm_weight:
            found["mlm_loss"] = (jnp.sum(batch["mlm_weights"]) + MLM_EPSILON) / options.mlm_weight
        return found

    def sums(
        self,
        params: Any,
        batch: Mapping[str, jax.Array],
        key: DropoutKey | None,
        *,
        start: Any,
        axis: str | None,
    ) -> Sums:
        """Losses and what is logged; ``start`` are the parameters that mixout goes back to."""
        options = self._task.config.regularization
        if key is not None and (options.weight_dropout or options.mixout):
            params = perturbed(params, start, key, options.weight_dropout, options.mixout)
        output = self.model.apply({"params": params}, batch, key)
        sums = self._task.loss(output, batch, axis=axis)
        for number in self._task.config.loss.layers:
            hidden_BxSxH = output.hidden_states[number]
            logits = self.model.apply({"params": params}, hidden_BxSxH, batch, key, method="pooled_logits")
            sums[f"layer_{number}_loss"] = self._task.loss(
                output.replace(sequence_logits=logits), batch, axis=axis
            )["loss"]
        if self._task.config.loss.mlm_weight:
            sums |= weighted_cross_entropy("mlm", output.mlm_logits, batch["mlm_labels"], batch["mlm_weights"])
        if self._task.config.loss.nsp_weight:
            sums |= weighted_cross_entropy("nsp", output.nsp_logits, batch["nsp_labels"], batch["nsp_weights"])
        return sums | padding_sums(batch)

    def damaged_rows(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return 0: rows that no unit needed are blank too."""
        return jnp.zeros((), jnp.int32)


def perturbed(params: Any, start: Any, key: DropoutKey, weight_dropout: float, mixout: float) -> Any:
    """Encoder matrices with some weights zero (DropConnect; Wan et al. 2013), the others scaled, or encoder and
    pooler matrices with some weights as in ``start``, the others moved so that the mean stays (mixout; Lee et al.
    2020, equation 5). Mixout leaves alone what is 0 in ``start``: it was drawn. The same on every replica."""
    whole = key.key if isinstance(key, ShardKey) else key
    rate = mixout or weight_dropout

    def one(path: tuple[Any, ...], param: jax.Array, before: jax.Array | None, number: int) -> jax.Array:
        name = path_name(path)
        parts = ("encoder/", "pooler/") if mixout else ("encoder/",)
        if not (name.startswith(parts) and name.endswith("kernel")):
            return param
        drops = jax.random.bernoulli(jax.random.fold_in(whole, _WEIGHTS + number), rate, param.shape)
        if before is None:
            return jnp.where(drops, 0.0, param) / (1 - rate)
        mixed = (jnp.where(drops, before, param) - rate * before) / (1 - rate)
        axes = tuple(range(1 if STACKED in name else 0, param.ndim))
        return jnp.where(jnp.any(before, axes, keepdims=True), mixed, param)

    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    starts = jax.tree.leaves(start) if mixout else [None] * len(paths)
    leaves = [one(path, leaf, starts[i], i) for i, (path, leaf) in enumerate(paths)]
    return jax.tree.unflatten(tree, leaves)


def check_layers(config: FinetuneConfig, heads: HeadsConfig) -> None:
    """``ValueError`` for ``loss.layers`` that a model with ``heads`` lacks or whose pooler cannot read them."""
    layers, count = config.loss.layers, config.model.num_layers
    if not layers:
        return
    wrong = [layer for layer in layers if not 0 < layer < count]
    if wrong or len(set(layers)) < len(layers):
        raise ValueError(
            f"loss.layers: {list(layers)} is not allowed; allowed: different layers from 1 to {count - 1}"
        )
    width, model = heads.feature_width(config.model), config.model.hidden_size
    if width != model:
        raise ValueError(
            f"features.layers: {heads.features} is not allowed with loss.layers {list(layers)}: the head reads "
            f"{width} numbers, one layer has {model}; allowed: any other features.layers"
        )
