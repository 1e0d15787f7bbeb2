"""The model that fine-tuning trains, with the heads of all losses; its initial parameters and its programs."""

import dataclasses

from flax import linen as nn
from jax.sharding import Mesh

from bert_jax.config import ModelSpec
from bert_jax.finetuning.resolve import ResolvedTask, redrawn_layers
from bert_jax.finetuning.task_objective import TaskObjective, check_layers
from bert_jax.model import BertModel
from bert_jax.optim import lr_multipliers, unfreeze_updates
from bert_jax.start.start import Start
from bert_jax.training.programs import TrainPrograms, make_programs
from bert_jax.training.state import abstract_params


def training_model(resolved: ResolvedTask) -> BertModel:
    """Return the training model: the encoder with the heads of the task and of the auxiliary losses.

    Raises ``ValueError`` for ``features.layers`` or ``loss.layers`` that the model does not support.
    """
    config, heads = resolved.config, resolved.heads
    heads.check_features(config.model)
    check_layers(config, heads)
    loss, model = config.loss, config.model
    has_nsp, has_mlm = loss.nsp_weight > 0, loss.mlm_weight > 0 or loss.lm_weight > 0
    if loss.lm_weight and model.mlm_layer != "none":  # a run of causal_lm: its output layer is the word embeddings
        model = model.with_output_layer_only()
    return BertModel(
        model,
        config.execution,
        dataclasses.replace(heads, mlm=has_mlm, nsp=has_nsp, pooler=heads.pooler or has_nsp),
        resolved.task.sentence,
        all_layers=bool(config.loss.layers and not config.exits) or resolved.supervision.all_layers,
        frozen_encoder=config.features.frozen_encoder,
    )


def start_parameters(resolved: ResolvedTask, model: BertModel, start: Start) -> Start:
    """Return ``start`` with the parameters of its initial model that ``model``, the training model, can use. The
    messages of the result include the notes about the records of the task."""
    config = resolved.config
    spec = ModelSpec(model=model.config, heads=model.heads, sentence=model.sentence)
    redraw_head = config.regularization.reinit_head
    initial = start.with_parameters(spec, redrawn=redrawn_layers(config), redraw_head=redraw_head)
    return dataclasses.replace(initial, messages=(*initial.messages, *resolved.notes))


def training_programs(resolved: ResolvedTask, model: BertModel, mesh: Mesh) -> TrainPrograms:
    """Return the programs that train ``model`` on ``mesh``."""
    config, model = resolved.config, model.clone(mesh=mesh)
    like = nn.unbox(abstract_params(model))
    parts = config.model.own_layers, like, resolved.steps_per_epoch
    optimizer = config.optimizer
    if config.features.frozen_encoder:  # weight decay and auxiliary losses must not change it either
        optimizer = dataclasses.replace(optimizer, frozen=(*optimizer.frozen, "embeddings", "encoder"))
    return make_programs(
        TaskObjective(resolved.task, config, model, resolved.supervision),
        lr_multipliers=lr_multipliers(optimizer, *parts),
        unfreeze_updates=unfreeze_updates(optimizer, *parts),
        decay_toward_start=config.optimizer.decay_to_start,
    )
