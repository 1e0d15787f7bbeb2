"""Options of pretraining and fine-tuning with a teacher. This module does not import jax."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from bert_jax.config.finetune import HEAD, SOFTMAX, FinetuneConfig
from bert_jax.config.objective import ObjectiveConfig
from bert_jax.config.schema import AtLeast0, Positive, PositiveShare, Section, only
from bert_jax.config.task import KIND, TaskDataConfig


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(ObjectiveConfig):
    """Options of ``objective.name distillation``."""

    TITLE: ClassVar[str] = (
        "predicts masked tokens and the outputs of a teacher (Sanh et al. 2019); requires --teacher and "
        "data.next_sentence none"
    )

    # Coefficient of the z-loss (Chowdhery et al. 2022: 1e-4) of the predicted tokens; 0: off.
    z_loss: AtLeast0[float] = 0.0
    # Weight of the masked-LM loss.
    mlm_weight: AtLeast0[float] = 1.0
    # Weight of the divergence of the student's distribution from the teacher's distribution at each masked token
    # (Hinton et al. 2015).
    soft_weight: AtLeast0[float] = 1.0
    # Divisor of the logits of teacher and student before the divergence is computed.
    temperature: Positive[float] = 2.0
    # Number of the teacher's most probable tokens to compare; 0: all.
    soft_top_k: AtLeast0[int] = 0
    # Loss between the hidden states of student and teacher: none, cosine (1 - cosine; DistilBERT), or mse (mean
    # squared error; TinyBERT). If their widths differ, a learned projection precedes the loss.
    hidden_loss: Literal["none", "cosine", "mse"] = "none"
    # Weight of the loss in objective.hidden_loss.
    hidden_weight: Positive[float] = 1.0
    # Hidden states to compare: last (those of the last layer), or all (the embeddings and all layers, each with
    # the teacher layer at the same relative depth; their losses are added).
    hidden_layers: Literal["last", "all"] = "last"
    # Loss between the attention of student and teacher: none, scores (squared error of the attention scores of all
    # layers; TinyBERT), or relations (in one layer, the divergence of the scaled dot products among queries, among
    # keys and among values; MiniLM v2).
    attention_loss: Literal["none", "scores", "relations"] = "none"
    # Weight of the loss in objective.attention_loss.
    attention_weight: Positive[float] = 1.0
    # Number of parts into which queries, keys and values are split for objective.attention_loss relations; the dot
    # products are computed in each part.
    relation_heads: Positive[int] = 12
    # Teacher layer that objective.attention_loss relations compares with the last layer of the student, counted
    # from 0; -1: the last layer.
    relation_layer: int = -1
    # dtype in which the teacher is computed.
    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    # Width of the teacher; the run sets it.
    teacher_width: AtLeast0[int] = 0


@dataclass(frozen=True, kw_only=True)
class TaskDistillationConfig(Section, prefix="distillation."):
    """Loss between the model and its teachers, the models of ``--teacher`` (Hinton et al. 2015)."""

    # Weight of the distillation loss; the label loss has weight 1 - distillation.weight.
    weight: PositiveShare[float] = 0.5
    # Divisor of the logits of student and teacher.
    temperature: Positive[float] = only(2.0, {KIND: (*SOFTMAX[KIND][:-1], "multi_label", "qa")})
    # Weight of the distance between the first tokens' hidden states in student and teacher, in all layers except
    # the last (Sun et al. 2019); 0: off.
    layers_weight: AtLeast0[float] = only(0.0, {KIND: (*HEAD, "qa")})


@dataclass(frozen=True, kw_only=True)
class TaughtDataConfig(TaskDataConfig):
    """The files of a task."""

    SPLITS: ClassVar[tuple[str, ...]] = (*TaskDataConfig.SPLITS, "unlabelled")

    # Files with additional training records for distillation, whose labels are not read; requires --teacher.
    # Entries unlabelled:ROLE=COLUMN of data.columns set the columns of these files.
    unlabelled: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TaughtConfig(FinetuneConfig):
    """Options of fine-tuning with teachers."""

    distillation: TaskDistillationConfig = TaskDistillationConfig()
    data: TaughtDataConfig = TaughtDataConfig()


def options_of_teachers(config: FinetuneConfig) -> TaskDistillationConfig:
    """Return the section ``distillation`` of ``config``, which the registered parts extend."""
    assert isinstance(config, TaughtConfig)
    return config.distillation
