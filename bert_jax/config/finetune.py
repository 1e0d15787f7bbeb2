"""Options of fine-tuning (``run_finetune.py``): how a task of ``task`` is learned, and all sections together.

The rules of ``schema`` apply: frozen, hashable, checked when built; no jax import. The training records determine
the number of steps if it is 0; the config in a checkpoint holds this number.
"""

import operator
from dataclasses import dataclass
from typing import Literal

from bert_jax.config.schema import (
    AtLeast0,
    ExecutionConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    Positive,
    Probability,
    Section,
    TrainingConfig,
    only,
    require,
)
from bert_jax.config.spec import Features
from bert_jax.config.task import (
    CRF,
    CUT,
    KIND,
    LOSS,
    WHOLE,
    WORDS,
    QaConfig,
    SentenceTaskConfig,
    TaggingConfig,
    TaskConfig,
    TaskDataConfig,
)

# Conditions of the options of the loss of classes, and task kinds with the options of the head.
_SOFTMAX = {KIND: ("classification", "choice", *WORDS, "sentence"), LOSS: ("softmax",), CRF: (False,)}
_FOCAL = {**_SOFTMAX, KIND: ("multi_label", *_SOFTMAX[KIND])}
_HEAD = (*WHOLE, "choice", *WORDS)


@dataclass(frozen=True, kw_only=True)
class InputConfig(Section, prefix="input."):
    """The draw of training examples and their augmentation."""

    # Examples share rows of a few fixed shapes (packing); off: one row each, all of task.max_length.
    packing: bool = True
    # Most compiled shapes of the training step.
    max_shapes: Positive[int] = 8
    # Draw every class equally often.
    balanced: bool = only(False, {KIND: ("classification",)})
    # Examples of each class, drawn by data.split_seed; 0: all.
    few_shot: AtLeast0[int] = only(0, {KIND: ("classification",)})
    # Share of the tokens that becomes [MASK] in training.
    mask_fraction: Probability = 0.0
    # Share of the words that is removed in training.
    word_dropout: Probability = only(0.0, {KIND: CUT})
    # Share of the words that is removed in spans in training.
    span_deletion: Probability = only(0.0, {KIND: CUT})
    # Longest such span in words.
    span_max: Positive[int] = only(5, {KIND: CUT})


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section, prefix="loss."):
    """The loss of classes, and losses in addition to that of the task."""

    # Share of the probability that is spread over all classes.
    label_smoothing: Probability = only(0.0, _SOFTMAX)
    # Focal loss (Lin et al. 2017): (1 - p) ** gamma times the cross-entropy.
    focal_gamma: AtLeast0[float] = only(0.0, _FOCAL)
    # Weights of the classes: none, or balanced (n / (classes * count)).
    class_weights: Literal["none", "balanced"] = only("none", {KIND: ("classification",)})
    # Weight of a masked-LM loss on the text of the task, 15% of which is then masked in training; 0: off.
    mlm_weight: AtLeast0[float] = 0.0
    # Weight of a next-sentence loss on the text of the task: does the second part of a text belong to it? Training
    # then uses every example twice; 0: off.
    nsp_weight: AtLeast0[float] = only(0.0, {KIND: (*WHOLE, "qa", *WORDS)})
    # Encoder layers (1 = the first) whose first token also predicts the label, through the same head.
    layers: tuple[int, ...] = only((), {KIND: WHOLE})
    # Weight of the loss of each of these layers.
    layer_weight: Positive[float] = only(0.1, {KIND: WHOLE})


@dataclass(frozen=True, kw_only=True)
class RegularizationConfig(Section, prefix="regularization."):
    """Regularization of a large model on little data."""

    # Dropout before the task's head; -1: model.hidden_dropout.
    head_dropout: float = only(-1.0, {KIND: _HEAD})
    # Probability with which a weight is zero during a step (DropConnect), in all matrices of the encoder.
    weight_dropout: Probability = 0.0
    # Probability with which a weight has its start value during a step (Lee et al. 2020), in the matrices of
    # encoder and pooler that were read from the start model.
    mixout: Probability = 0.0
    # Top layers that start from drawn weights (Zhang et al. 2021); the pooler is drawn again with them.
    reinit_layers: AtLeast0[int] = 0
    # The head of the task, with features and CRF, starts from drawn weights even if the start model has one for the
    # same classes.
    reinit_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        is_share = self.head_dropout == -1 or 0 <= self.head_dropout < 1
        self._require("head_dropout", is_share, "from 0 to below 1, or -1")
        allowed = "0 with regularization.mixout, which is weight dropout towards the start"
        self._require("weight_dropout", not (self.weight_dropout and self.mixout), allowed)


@dataclass(frozen=True, kw_only=True)
class FeaturesConfig(Section, prefix="features."):
    """Hidden states that the task's head reads, and layers before it (Devlin et al. 2018, section 5.3)."""

    # Hidden states that the head reads: last, embeddings, second_to_last, weighted_last_four and weighted_all (a
    # learned scalar mix, Peters et al. 2018), concat_last_four.
    layers: Features = only("last", {KIND: (*_HEAD, "qa")})
    # The encoder stays as it is, without dropout.
    frozen_encoder: bool = only(False, {LOSS: ("softmax",)})
    # Width of each direction of a two-layer BiLSTM before the head; 0: none.
    bilstm_size: AtLeast0[int] = only(0, {KIND: WORDS})


@dataclass(frozen=True, kw_only=True)
class FinetuneOptimizerConfig(OptimizerConfig):
    """Update rule and learning-rate schedule of fine-tuning."""

    learning_rate: AtLeast0[float] = 2e-5
    # Steps of linear warmup from 0; 0: optimizer.warmup_fraction of all steps.
    warmup_steps: AtLeast0[int] = 0
    # Share of the steps that warmup takes.
    warmup_fraction: Probability = 0.1
    # Each layer learns at this factor times the rate of the one above; embeddings are below the first; heads 1.
    layer_decay: float = 1.0
    # Weight decay pulls towards the start weights instead of zero (Wiese et al. 2017), and newly drawn weights
    # towards zero (Li et al. 2018).
    decay_to_start: bool = False
    # Parts that stay as they are: embeddings, encoder, pooler, or layer_N (from 0).
    frozen: tuple[str, ...] = ()
    # Epochs after which the next layer below joins, from the top; heads learn from the start; 0: all do. Better
    # not with bert_adam: without bias correction a layer's first steps are up to six times as large.
    unfreeze_every: AtLeast0[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("layer_decay", 0 < self.layer_decay <= 1, "above 0, at most 1")
        allowed = "false with lamb, whose trust ratio measures the weights themselves"
        self._require("decay_to_start", not self.decay_to_start or self.name != "lamb", allowed)


@dataclass(frozen=True, kw_only=True)
class FinetuneTrainingConfig(TrainingConfig):
    """The run of fine-tuning: length, batch, logging, evaluation, checkpoints."""

    # Passes over the training records.
    num_epochs: Positive[float] = 3.0
    # Optimizer steps in all; 0: training.num_epochs passes.
    num_steps: AtLeast0[int] = 0
    # Examples per optimizer step, over all devices.
    global_batch_size: Positive[int] = 32
    log_interval: Positive[int] = 50
    # Steps between evaluations on the dev split; 0: once per epoch.
    eval_interval: AtLeast0[int] = 0
    # Steps between checkpoints; 0: once per epoch.
    checkpoint_interval: AtLeast0[int] = 0
    keep_checkpoints: Positive[int] = 1
    # Stop after this many evaluations in a row without a better one; 0: never.
    patience: AtLeast0[int] = 0
    # By how much an evaluation must be better to count.
    min_delta: AtLeast0[float] = 0.0
    # Take the parameters of the best evaluation at the end, not the last ones.
    restore_best: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # Fine-tuning evaluates whole splits in packed batches, so it would ignore these options.
        for name in ("batch_ramp", "eval_batches", "eval_batch_size"):
            self._require(name, not getattr(self, name), "nothing in fine-tuning")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Fine-tuning: a task's head on an encoder."""

    task: TaskConfig = TaskConfig()
    data: TaskDataConfig = TaskDataConfig()
    input: InputConfig = InputConfig()
    loss: LossConfig = LossConfig()
    regularization: RegularizationConfig = RegularizationConfig()
    features: FeaturesConfig = FeaturesConfig()
    qa: QaConfig = only(QaConfig(), {KIND: ("qa",)})
    tagging: TaggingConfig = only(TaggingConfig(), {KIND: WORDS})
    sentence: SentenceTaskConfig = only(SentenceTaskConfig(), {KIND: ("sentence",)})
    model: ModelConfig = ModelConfig()
    execution: ExecutionConfig = ExecutionConfig()
    optimizer: FinetuneOptimizerConfig = FinetuneOptimizerConfig()
    training: FinetuneTrainingConfig = FinetuneTrainingConfig()
    mesh: MeshConfig = MeshConfig()

    # The option that holds the length of sequences.
    SEQ_LENGTH_OPTION = "task.max_length"
    # With this option every other one exists: a task of the user's own may use it.
    ALL_OPTIONS_WITH = "task.module"
    # Keys in records of older runs whose values follow from the training records.
    FORMER_OPTIONS = ("class_weights", "hard_negatives")

    def __post_init__(self) -> None:
        length, most = self.task.max_length, self.model.max_length
        fits = length <= most or self.model.position_embeddings == "sinusoidal"
        require(fits, "task.max_length", length, f"at most the {most} positions of the model")

    @property
    def parameter_layout(self) -> dict[str, object]:
        """Values outside the model section that determine which parameters exist."""
        names = (
            "task.kind", "task.module", "data.labels", "data.tags", "features", "tagging.crf", "sentence.loss",
            "sentence.hidden_size",
        )  # fmt: skip
        layout: dict[str, object] = {name: operator.attrgetter(name)(self) for name in names}
        return layout | {
            "loss.mlm_weight": self.loss.mlm_weight > 0,
            "loss.nsp_weight": self.loss.nsp_weight > 0,
        }

    @property
    def stores_start_params(self) -> bool:
        """True if the state holds the parameters that training started from."""
        return self.regularization.mixout > 0 or self.optimizer.decay_to_start

    @property
    def name(self) -> str:
        """Name of the task in results."""
        return self.task.name or self.task.kind
