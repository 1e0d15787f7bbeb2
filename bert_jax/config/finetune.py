"""Options of fine-tuning (``run_finetune.py``): how a model is trained for a task, and the config class with
all sections.

The rules of ``schema`` apply: frozen, hashable, validated when created; no JAX import. If ``training.num_steps`` is
0, the training records determine the number of steps; the config in a checkpoint contains this number.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from bert_jax import registry
from bert_jax.config.architecture import ModelConfig
from bert_jax.config.lengths import Parsed, automatic_steps
from bert_jax.config.options import COMMAND_LINE, PYTHON
from bert_jax.config.schema import (
    SET,
    AtLeast0,
    ExecutionConfig,
    Inherited,
    Limit,
    MeshConfig,
    OptimizerConfig,
    Positive,
    PositiveShare,
    Probability,
    Range,
    Section,
    TrainingConfig,
    Value,
    check_limits,
    limited,
    only,
    require,
)
from bert_jax.config.spec import Features, TaskSettings
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

# Conditions of the options of the classification loss, and the kinds of tasks that have the options of the head.
SOFTMAX: dict[str, tuple[Value, ...]] = {
    KIND: ("classification", "choice", *WORDS, "sentence"),
    LOSS: ("softmax",),
    CRF: (False,),
}
_FOCAL: dict[str, tuple[Value, ...]] = {**SOFTMAX, KIND: ("multi_label", *SOFTMAX[KIND])}
HEAD = (*WHOLE, "choice", *WORDS)
# Automatic learning rates: that of a Transformer of the width of BERT-base, the power of the width with which it
# falls, the highest one; that of heads on a frozen Transformer.
_BASE_WIDTH, _BASE_RATE, _POWER, _HIGHEST_RATE, _FROZEN_RATE = 768, 2e-5, 2.2, 1e-3, 3e-3


@dataclass(frozen=True, kw_only=True)
class InputConfig(Section, prefix="input."):
    """Sampling and augmentation of training examples."""

    # Pack several examples into a row; the rows have a few fixed lengths. false: each row contains one example and
    # has the length task.max_length.
    packing: bool = limited(True, Limit((False,), {"model.attention_block": SET}))
    # Maximum number of batch shapes for which the training step is compiled.
    max_shapes: Positive[int] = 8
    # Sample all classes equally often.
    balanced: bool = only(False, {KIND: ("classification",)})
    # Number of training examples to use per class, sampled with data.split_seed; 0: all.
    few_shot: AtLeast0[int] = only(0, {KIND: ("classification",)})
    # Share of the words that are removed at random from training texts.
    word_dropout: Probability = only(0.0, {KIND: CUT})
    # Share of the words that are removed from training texts in random spans of 1 to 5 words.
    span_deletion: Probability = only(0.0, {KIND: CUT})


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section, prefix="loss."):
    """Options of the classification loss, and additional losses."""

    # Label smoothing: share of the target probability that is spread over all classes.
    label_smoothing: Probability = only(0.0, SOFTMAX)
    # Focal loss (Lin et al. 2017): multiply the cross-entropy by (1 - p) ** focal_gamma, where p is the
    # probability of the correct answer; 0: off.
    focal_gamma: AtLeast0[float] = only(0.0, _FOCAL)
    # Weights of the classes in the loss: none, or balanced (inversely proportional to the number of training
    # records of the class).
    class_weights: Literal["none", "balanced"] = only("none", {KIND: ("classification",)})
    # Weight of an additional masked-LM loss on the texts of the task; 15% of their tokens are then masked in
    # training. 0: off.
    mlm_weight: AtLeast0[float] = limited(0.0, Limit((0,), {"loss.lm_weight": SET}))
    # Weight of an additional next-token loss on the texts of the task (Radford et al. 2018: 0.5); requires a
    # causal model. 0: off.
    lm_weight: AtLeast0[float] = 0.0
    # Weight of an additional next-sentence loss on the texts of the task: the model predicts whether the second
    # part of a text belongs to the first part. Training then reads every example twice. 0: off.
    nsp_weight: AtLeast0[float] = only(
        0.0, {KIND: (*WHOLE, "qa", *WORDS)}, Limit((0,), {"task.pair_order": ("both",)})
    )
    # Layers below the last layer, counted from 1, whose outputs also predict the label in training. Empty: none.
    layers: tuple[int, ...] = only((), {KIND: WHOLE})
    # Weight of the loss of each layer in loss.layers.
    layer_weight: Positive[float] = only(0.1, {KIND: WHOLE})
    # Heads of the layers in loss.layers: shared (all use the head of the last layer), or own (each layer has its
    # own pooler and output layer, so that a prediction can stop at this layer: early exit; Xin et al. 2020).
    layer_heads: Literal["shared", "own"] = only(
        "shared", {KIND: ("classification",)}, Limit(("shared",), {"loss.layers": ((),)})
    )


@dataclass(frozen=True, kw_only=True)
class RegularizationConfig(Section, prefix="regularization."):
    """Regularization, mainly for large models that are trained on few records."""

    # Dropout rate before the task head; -1: model.hidden_dropout, but 0 before the classifier of sentence pairs
    # (sentence.loss softmax).
    head_dropout: Inherited = only(-1.0, {KIND: (*HEAD, "sentence"), LOSS: ("softmax",)})
    # Probability with which each weight in the matrices of the encoder is set to zero during a step (DropConnect).
    weight_dropout: Probability = limited(
        0.0,
        Limit((0,), {"regularization.mixout": SET}, ", which is weight dropout towards the initial weights"),
    )
    # Probability with which a weight is replaced with its initial value during a step (Lee et al. 2020). This
    # applies only to the matrices of the encoder and the pooler that were read from the initial model.
    mixout: Probability = 0.0
    # Number of top layers to initialize randomly, together with the pooler (Zhang et al. 2021); 0: none.
    reinit_layers: AtLeast0[int] = 0
    # Initialize the task head randomly, including its CRF and the layers before it (section features), even if the
    # initial model has a head for the same classes.
    reinit_head: bool = False


@dataclass(frozen=True, kw_only=True)
class FeaturesConfig(Section, prefix="features."):
    """Hidden states that the task head reads, and layers before the head (Devlin et al. 2018, section 5.3)."""

    # Hidden states that the task head reads: last, embeddings, second_to_last, concat_last_four, or a mix with
    # learned weights: weighted_last_four, weighted_all, or weighted_with_embeddings (all layers and the
    # embeddings, as in ELMo).
    layers: Features = only("last", {KIND: (*HEAD, "qa")}, Limit(("last",), {"loss.layer_heads": ("own",)}))
    # Do not train the embeddings and the encoder, and run them without dropout.
    frozen_encoder: bool = only(False, {LOSS: ("softmax",)})
    # Width of each direction of a two-layer BiLSTM before the head; 0: none.
    bilstm_size: AtLeast0[int] = only(0, {KIND: WORDS})


@dataclass(frozen=True, kw_only=True)
class FinetuneOptimizerConfig(OptimizerConfig):
    """Update rule and learning-rate schedule of fine-tuning."""

    FIXED: ClassVar[tuple[str, ...]] = ("warmup_tokens", "wsd_decay_tokens", "restart_schedule")

    # Peak learning rate. If -1, the rate depends on the encoder and its width (docs/finetuning.md, Rate and
    # length).
    learning_rate: Annotated[float, Range("0 or more, or -1", lambda value: value >= 0 or value == -1)] = -1.0
    # Number of warmup steps, during which the learning rate rises linearly from 0; 0: optimizer.warmup_fraction
    # applies.
    warmup_steps: AtLeast0[int] = 0
    # Length of the warmup as a share of all steps.
    warmup_fraction: Probability = 0.1
    # Ratio of the learning rate of a layer to that of the layer above it. The embeddings count as the layer below
    # the first; heads have the full learning rate.
    layer_decay: PositiveShare[float] = 1.0
    # Weight decay pulls parameters toward their initial values instead of zero (Wiese et al. 2017). Randomly
    # initialized parameters are still pulled toward zero (Li et al. 2018).
    decay_to_start: bool = limited(
        False,
        Limit((False,), {"optimizer.name": ("lamb",)}, ", whose trust ratio measures the weights themselves"),
    )
    # Parts of the model that are not trained: embeddings, encoder, pooler, or layer_N (counted from 0).
    frozen: tuple[str, ...] = ()
    # Number of epochs after which the next lower layer is unfrozen, beginning at the top; heads are trained from
    # the start. 0: all layers are trained from the start. Not recommended with bert_adam, which has no bias
    # correction: the first steps of an unfrozen layer are then up to six times as large as with bias correction.
    unfreeze_every: AtLeast0[float] = 0.0


@dataclass(frozen=True, kw_only=True)
class FinetuneTrainingConfig(TrainingConfig):
    """Length, batch size, logging, evaluation and checkpoints of a fine-tuning run."""

    # Fine-tuning evaluates whole splits in packed batches and has one phase.
    FIXED: ClassVar[tuple[str, ...]] = (
        "batch_ramp", "batch_unit", "num_tokens", "first_step", "eval_batches",
        "eval_batch_size", "doctor",
    )  # fmt: skip

    # Number of passes over the training records, if training.num_steps is 0. If both options are 0, the run makes 3
    # passes, or more if there are few records (docs/finetuning.md, Rate and length).
    num_epochs: AtLeast0[float] = 0.0
    # Total number of optimizer steps; 0: training.num_epochs applies.
    num_steps: AtLeast0[int] = 0
    # Number of examples per optimizer step, in total over all devices.
    global_batch_size: Positive[int] = 32
    # Number of steps between log lines; 0: a twentieth of all steps, but at most 50.
    log_interval: AtLeast0[int] = 0
    # Number of steps between evaluations on the dev split. 0: one evaluation per epoch, but at most 10 in all if
    # neither training.num_epochs nor training.num_steps is set.
    eval_interval: AtLeast0[int] = 0
    # Number of steps between checkpoints. 0: the number of steps that applies with training.eval_interval 0.
    checkpoint_interval: AtLeast0[int] = 0
    keep_checkpoints: Positive[int] = 1
    # Stop after this many consecutive evaluations without improvement; 0: never. Requires a dev split.
    patience: AtLeast0[int] = 0
    # At the end, use the parameters of the best evaluation instead of the last parameters.
    restore_best: bool = True

    @property
    def has_length(self) -> bool:
        """True if the options set the number of steps or of epochs."""
        return self.num_steps > 0 or self.num_epochs > 0

    def steps(self, per_epoch: int) -> int:
        """Return the number of steps of a run with ``per_epoch`` steps in an epoch."""
        if not self.has_length:
            return automatic_steps(per_epoch)
        return self.num_steps or max(1, math.ceil(self.num_epochs * per_epoch))


# Optimizers that the automatic rate has been measured with.
RATED_OPTIMIZERS = ("adamw", "bert_adam", "muon")


def automatic_rate(config: "FinetuneConfig") -> float:
    """Return the learning rate of a run that sets none, with two significant digits.

    That of a Transformer is 2e-5 (Devlin et al. 2018) at 768 values per token and falls with the power 2.2 of this
    width, up to 1e-3; if it is frozen, 3e-3. Other encoders have 9e-3. ``studies/finetuning_defaults`` says why.
    """
    if config.model.FINETUNING_RATE:
        return config.model.FINETUNING_RATE
    if config.features.frozen_encoder:
        return _FROZEN_RATE
    rate = _BASE_RATE * (_BASE_WIDTH / config.model.hidden_size) ** _POWER
    return float(f"{min(rate, _HIGHEST_RATE):.2g}")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Options of fine-tuning, which trains an encoder with a task head."""

    PARTS: ClassVar[registry.Kind] = "finetune_config"

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

    # Name of the option that defines the length of sequences.
    SEQ_LENGTH_OPTION = "task.max_length"
    # Arguments of the example in --help.
    EXAMPLE = "--config finetune/csv --init_from MODEL --data.train my.csv --data.columns text=review label=stars"
    # Options of --help; --help_all prints the others too.
    USUAL = (
        "config", "workdir", "init_from", "print_config", "task.kind", "task.max_length", "task.metric", "data.dir",
        "data.train", "data.dev", "data.dev_fraction", "data.test", "data.columns", "data.labels",
        "execution.dtype", "optimizer.learning_rate", "training.num_epochs", "training.patience",
        "training.global_batch_size", "training.seed",
    )  # fmt: skip
    # If this option is set, all other options exist, because a user-defined task may use any of them.
    ALL_OPTIONS_WITH = "task.module"
    # Keys in configs stored by older versions, and the value with which they are still read; None: any value.
    FORMER_OPTIONS: ClassVar[Mapping[str, str | None]] = {
        "class_weights": None, "hard_negatives": None, "input.mask_fraction": "0.0", "input.span_max": "5",
        "training.min_delta": "0.0", "training.batch_ramp_tokens": None,
    }  # fmt: skip

    def __post_init__(self) -> None:
        self.model.check_loop(self.execution.scan_layers)
        length, most = self.task.max_length, self.model.max_length
        fits = length <= most or self.model.position_embeddings == "sinusoidal"
        require(fits, "task.max_length", length, f"at most the {most} positions of the model")
        weight, fits = self.loss.lm_weight, self.model.is_causal
        allowed = "0 with a bidirectional model, which sees the next token (loss.mlm_weight has masked tokens)"
        require(fits or not weight, "loss.lm_weight", weight, allowed)
        check_limits(self)
        if self.exits:
            last, model = self.model.num_layers, self.model
            fits = {*self.exits} <= {*range(1, last)} and len({*self.exits}) == len(self.exits)
            require(fits, "loss.layers", self.loss.layers, f"different layers from 1 to {last - 1}")
            require(model.has_attention, "loss.layer_heads", "own", f"shared with model.encoder {model.encoder}")

    @classmethod
    def complete(cls, parsed: Parsed) -> Parsed:
        """Return ``parsed``, the settings of a config. If only one of data.dev and data.dev_fraction, which exclude
        each other, is an option of the command or of the call, it replaces that of a recipe."""
        rivals = ("data.dev", "data.dev_fraction")
        given = [key for key in rivals if key in parsed and parsed[key][1] in (COMMAND_LINE, PYTHON)]
        if len(given) != 1 or not parsed[given[0]][0]:
            return parsed
        return {key: one for key, one in parsed.items() if key in given or key not in rivals}

    @property
    def settings(self) -> TaskSettings:
        """The options that determine how texts become predictions, apart from those of the network."""
        task, data, qa, tagging = self.task, self.data, self.qa, self.tagging
        has_labels = task.kind != "sentence" or self.sentence.loss == "softmax"
        return TaskSettings(
            kind=task.kind, max_length=task.max_length, truncation=task.truncation, head_share=task.head_share,
            window_overlap=task.window_overlap, max_windows=task.max_windows, pair_order=task.pair_order,
            labels=data.labels if has_labels else (), label_names=data.label_names, tags=data.tags,
            crf=tagging.crf, document_context=tagging.document_context, doc_stride=qa.doc_stride,
            max_query_length=qa.max_query_length, max_answer_length=qa.max_answer_length, n_best=qa.n_best,
            no_answer=qa.no_answer, null_threshold=qa.null_threshold, matryoshka=self.sentence.matryoshka,
            answer_scoring=qa.scoring, tag_scoring=tagging.scoring,
            pair_types=self.model.type_vocab_size > 1, module=Path(task.module).name,
        )  # fmt: skip

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
            "loss.lm_weight": self.loss.lm_weight > 0,
            "loss.nsp_weight": self.loss.nsp_weight > 0,
            "loss.layers (own heads)": self.exits,
        }

    @property
    def exits(self) -> tuple[int, ...]:
        """Lower layers that have a separate head, in ascending order."""
        return tuple(sorted(self.loss.layers)) if self.loss.layer_heads == "own" else ()

    @property
    def stores_start_params(self) -> bool:
        """True if the train state also contains the parameters from which training started."""
        return self.regularization.mixout > 0 or self.optimizer.decay_to_start

    @property
    def name(self) -> str:
        """Name of the task in results."""
        return self.task.name or self.task.kind
