"""Options of pretraining and fine-tuning with a teacher. This module does not import jax."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from bert_jax.config.finetune import HEAD, SOFTMAX, FinetuneConfig
from bert_jax.config.objective import ObjectiveConfig
from bert_jax.config.schema import AtLeast0, Positive, PositiveShare, Section, only
from bert_jax.config.task import KIND, TaskDataConfig


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(ObjectiveConfig):
    """Section of ``objective.name`` distillation."""

    TITLE: ClassVar[str] = (
        "masked_lm, and the outputs of a teacher (--teacher), with data.next_sentence none (Sanh et al. 2019)"
    )

    # Coefficient of the z-loss, as with masked_lm.
    z_loss: AtLeast0[float] = 0.0
    # Weight of the loss of the masked tokens.
    mlm_weight: AtLeast0[float] = 1.0
    # Weight of the divergence from the teacher's distribution of each masked token (Hinton et al. 2015).
    soft_weight: AtLeast0[float] = 1.0
    # The logits of both networks are divided by this before the divergence.
    temperature: Positive[float] = 2.0
    # Pieces of the teacher's distribution that count, the most probable ones; 0: all.
    soft_top_k: AtLeast0[int] = 0
    # Difference from the hidden states of the teacher: 1 - cosine (DistilBERT), or the mean squared error
    # (TinyBERT). A projection that is learned too comes before it where the widths differ.
    hidden_loss: Literal["none", "cosine", "mse"] = "none"
    # Weight of this difference.
    hidden_weight: Positive[float] = 1.0
    # The last layer, or all layers and the embeddings, with layers of the teacher in proportion; their losses are
    # added.
    hidden_layers: Literal["last", "all"] = "last"
    # Difference from the attention of the teacher: squared error of the scores of all layers (TinyBERT), or
    # divergence of the relations of queries, of keys and of values in the last layer (MiniLM v2).
    attention_loss: Literal["none", "scores", "relations"] = "none"
    # Weight of this difference.
    attention_weight: Positive[float] = 1.0
    # Parts of the width, of which each has relations.
    relation_heads: Positive[int] = 12
    # Layer of the teacher whose relations are learned, from 0; -1: the last one.
    relation_layer: int = -1
    # Dtype of the computation of the teacher.
    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    # Width of the teacher, which the run sets.
    teacher_width: AtLeast0[int] = 0


@dataclass(frozen=True, kw_only=True)
class TaskDistillationConfig(Section, prefix="distillation."):
    """Loss between the model and its teachers, the models of ``--teacher`` (Hinton et al. 2015)."""

    # Weight of the distillation loss; the label loss has the weight 1 - weight.
    weight: PositiveShare[float] = 0.5
    # The logits of student and teacher are divided by this.
    temperature: Positive[float] = only(2.0, {KIND: (*SOFTMAX[KIND][:-1], "multi_label", "qa")})
    # Weight of the distance between the first tokens of the layers of student and teacher, without the last (Sun et
    # al. 2019); 0: off.
    layers_weight: AtLeast0[float] = only(0.0, {KIND: (*HEAD, "qa")})


@dataclass(frozen=True, kw_only=True)
class TaughtDataConfig(TaskDataConfig):
    """The files of a task."""

    SPLITS: ClassVar[tuple[str, ...]] = (*TaskDataConfig.SPLITS, "unlabelled")

    # Files whose labels are not read: more texts to learn from, with --teacher. Entries unlabelled:ROLE=COLUMN of
    # data.columns set their columns.
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
