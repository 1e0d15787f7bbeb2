"""Options of fine-tuning (``run_finetune.py``): the task, its files, and what training has beside pretraining's.

The same rules as in ``schema``: frozen, hashable, validated when built; no jax import. An option names the kinds of
tasks that have it (``only``); for the other kinds it does not exist. Labels, tags and the number of steps, if they
are left open, are completed from the training records, so that the config beside a checkpoint holds them.
"""

from dataclasses import dataclass
from typing import Literal

from bert_jax.config.schema import (
    ExecutionConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    _require,
    _require_positive,
    _require_probability,
    only,
)
from bert_jax.config.spec import Features, Pooling

# Options that select which other ones exist.
KIND, TRUNCATION, LOSS, CRF = "task.kind", "task.truncation", "sentence.loss", "tagging.crf"
# Kinds of tasks whose label belongs to a whole text or pair, whose texts task.truncation cuts, with a tag per word.
_WHOLE = ("classification", "regression", "multi_label")
_CUT = (*_WHOLE, "choice", "sentence")
_WORDS = ("tagging", "joint")
_SOFTMAX = {KIND: ("classification", "choice", *_WORDS, "sentence"), LOSS: ("softmax",), CRF: (False,)}
_FOCAL = {**_SOFTMAX, KIND: ("multi_label", *_SOFTMAX[KIND])}
_HEAD = (*_WHOLE, "choice", *_WORDS)

Truncation = Literal["longest_first", "head", "tail", "head_tail", "key_sentences", "windows"]
TaskKind = Literal["classification", "regression", "multi_label", "qa", "tagging", "joint", "choice", "sentence"]
SentenceLoss = Literal["softmax", "cosine", "cosent", "triplet", "negatives", "simcse"]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is learned from a record, and how a text becomes a model input."""

    # classification, regression, multi_label: of a text or pair. qa: answers in a passage. tagging: a tag per word.
    # joint: both, intent and slots. choice: the right one of several. sentence: a vector per text (Sentence-BERT).
    kind: TaskKind = "classification"
    # Name in metrics.json and predictions; empty: the kind.
    name: str = ""
    # Python file with a task of your own: it defines a class Task (docs/finetuning.md).
    module: str = ""
    # Longest input in tokens, special tokens included.
    max_length: int = 128
    # What is left of a longer text: longest_first (a pair's longer side loses its end), head, tail, head_tail,
    # key_sentences (the most central ones, in order), windows (all of it, in several inputs; logits are averaged).
    truncation: Truncation = only("longest_first", {KIND: _CUT})  # noqa: RUF009 (a field)
    # Share of the tokens that head_tail takes from the head (Sun et al. 2019: 128 of 510).
    head_share: float = only(0.25, {KIND: _CUT, TRUNCATION: ("head_tail",)})
    # Tokens that neighbouring windows share.
    window_overlap: int = only(32, {KIND: _WHOLE, TRUNCATION: ("windows",)})
    # Most windows of one text; 0: as many as it has.
    max_windows: int = only(0, {KIND: _WHOLE, TRUNCATION: ("windows",)})
    # The metric that chooses the best checkpoint; empty: the first one of the task.
    metric: str = ""

    def __post_init__(self) -> None:
        _require(self.max_length >= 8, "task.max_length", self.max_length, "8 or more")
        _require(
            self.truncation != "windows" or self.kind in _WHOLE or bool(self.module), "task.truncation",
            self.truncation, f"one model input per text with task.kind {self.kind}",
        )  # fmt: skip
        _require(0 < self.head_share < 1, "task.head_share", self.head_share, "above 0, below 1")
        for name in ("window_overlap", "max_windows"):
            _require(getattr(self, name) >= 0, f"task.{name}", getattr(self, name), "0 or more")
        _require(
            self.truncation != "windows" or self.window_overlap <= self.max_length // 2, "task.window_overlap",
            self.window_overlap, f"at most half of task.max_length ({self.max_length // 2})",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskDataConfig:
    """The files of a task."""

    # Folder that the file names below are relative to.
    dir: str = ""
    # Training files.
    train: tuple[str, ...] = ()
    # Files to evaluate on; of several each is a split of its own, named after the file, and the first one chooses
    # the best checkpoint.
    dev: tuple[str, ...] = ()
    # Files to predict; their labels, where there are any, are scored as well.
    test: tuple[str, ...] = ()
    # tsv (cut at tabs and \n only, no quoting), csv (RFC 4180), jsonl, conll (word and tag columns), squad (JSON),
    # slots (folders of seq.in, seq.out, label), snips (one file, word:slot ... <=> intent), clinc (parts of a JSON
    # file: FILE.json:train+oos_train), tfds (NAME[/CONFIG][:VERSION]:SPLIT); auto: by the file's name.
    format: Literal["auto", "tsv", "csv", "jsonl", "conll", "squad", "slots", "snips", "clinc", "tfds"] = "auto"
    # Where in a line things are: ROLE=COLUMN, the column by name, or by number from 1 where the file has no header.
    # Roles: id, text, text_pair, label, labels, negative and choice (may stand several times, in order),
    # choice_prefix (stands before every choice), group, words, tags, answers. SPLIT:ROLE=COLUMN (train, dev, test)
    # is for the files of that split, which then have no others. Empty: columns that have the roles' names.
    columns: tuple[str, ...] = ()
    # Whether the first line names the columns; auto: when a column is given by name, or none is given.
    header: Literal["auto", "true", "false"] = "auto"
    # Classes in id order, as the files write them; empty: those of the training files, sorted.
    labels: tuple[str, ...] = only(
        (), {KIND: ("classification", "multi_label", "choice", "joint", "sentence"), LOSS: ("softmax", "negatives")}
    )
    # What the classes are called in exports and metrics; empty: as in the files. Predictions are as in the files.
    label_names: tuple[str, ...] = only((), {KIND: ("classification", "multi_label", "joint")})
    # Tags in id order; empty: those of the training files, sorted.
    tags: tuple[str, ...] = only((), {KIND: _WORDS})
    # Between several labels of one text (multi_label).
    label_separator: str = ","
    # Share of the training records that becomes dev where there are no dev files.
    dev_fraction: float = 0.0
    # What the split keeps together: none, article (of passages), document, or sentence (no text on both sides).
    group_by: Literal["none", "article", "document", "sentence"] = "none"
    # Seed of that split and of train_limit.
    split_seed: int = 0
    # Train on this many records, drawn by split_seed; 0: all.
    train_limit: int = 0
    # Evaluate on at most this many records of each split, the first ones; 0: all.
    dev_limit: int = 0
    # Vocabulary where the model has none or is not given; see pretraining's data.vocab.
    vocab: str = ""
    # Lower-case the text and strip accents; only with data.vocab.
    lower_case: bool = True
    # Folder of prepared TensorFlow Datasets (tfds); empty: ~/tensorflow_datasets.
    tfds_data_dir: str = ""

    def __post_init__(self) -> None:
        _require_probability("data", self, "dev_fraction")
        for name in ("train_limit", "dev_limit", "split_seed"):
            _require(getattr(self, name) >= 0, f"data.{name}", getattr(self, name), "0 or more")
        for name in ("labels", "label_names", "tags"):
            values = getattr(self, name)
            _require(len(set(values)) == len(values), f"data.{name}", values, "every one once")
        _require(
            not self.label_names or len(self.label_names) == len(self.labels), "data.label_names",
            self.label_names, f"one for each of data.labels ({len(self.labels)})",
        )  # fmt: skip
        _require(
            not (self.dev and self.dev_fraction), "data.dev_fraction", self.dev_fraction,
            "0 where data.dev is given",
        )  # fmt: skip
        for column in self.columns:
            split, colon, rest = column.partition(":")
            role, equals, where = (rest if colon and split in SPLITS else column).partition("=")
            known = role in COLUMN_ROLES and equals and where
            _require(bool(known), "data.columns", column, f"ROLE=COLUMN with a role of {', '.join(COLUMN_ROLES)}")


SPLITS = ("train", "dev", "test")
COLUMN_ROLES = (
    "id", "text", "text_pair", "label", "labels", "negative", "choice", "choice_prefix", "group", "words", "tags",
    "answers",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """Which training examples are drawn, and what is done to them."""

    # Examples share rows of a few fixed shapes (packing); off: one row each, all of task.max_length.
    packing: bool = True
    # Most compiled shapes of the training step.
    max_shapes: int = 8
    # Draw every class equally often.
    balanced: bool = only(False, {KIND: ("classification",)})
    # Examples of each class, drawn by data.split_seed; 0: all.
    few_shot: int = only(0, {KIND: ("classification",)})
    # Share of the tokens that becomes [MASK] in training.
    mask_fraction: float = 0.0
    # Share of the words that is left out in training.
    word_dropout: float = only(0.0, {KIND: _CUT})
    # Share of the words that is left out in spans in training.
    span_deletion: float = only(0.0, {KIND: _CUT})
    # Longest such span in words.
    span_max: int = only(5, {KIND: _CUT})

    def __post_init__(self) -> None:
        _require_positive("input", self, "max_shapes", "span_max")
        _require_probability("input", self, "mask_fraction", "word_dropout", "span_deletion")
        _require(self.few_shot >= 0, "input.few_shot", self.few_shot, "0 or more")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss of classes, and losses beside the task's own."""

    # Share of the probability that is spread over all classes.
    label_smoothing: float = only(0.0, _SOFTMAX)
    # Focal loss (Lin et al. 2017): (1 - p) ** gamma times the cross-entropy.
    focal_gamma: float = only(0.0, _FOCAL)
    # Weights of the classes: none, or balanced (n / (classes * count)).
    class_weights: Literal["none", "balanced"] = only("none", {KIND: ("classification",)})
    # Weight of a masked-LM loss on the task's own text, of which training then sees 15% masked; 0: off.
    mlm_weight: float = 0.0
    # Weight of a next-sentence loss on the task's own text: whether a text's second part is its own. Every example
    # is then seen twice; 0: off.
    nsp_weight: float = only(0.0, {KIND: (*_WHOLE, "qa", *_WORDS)})
    # Encoder layers (1 = the first) whose first token also predicts the label, through the same head.
    layers: tuple[int, ...] = only((), {KIND: _WHOLE})
    # Weight of each of those.
    layer_weight: float = only(0.1, {KIND: _WHOLE})

    def __post_init__(self) -> None:
        _require_probability("loss", self, "label_smoothing")
        for name in ("focal_gamma", "mlm_weight", "nsp_weight"):
            _require(getattr(self, name) >= 0, f"loss.{name}", getattr(self, name), "0 or more")
        _require_positive("loss", self, "layer_weight")


@dataclass(frozen=True, kw_only=True)
class RegularizationConfig:
    """What keeps a large model from forgetting on little data."""

    # Dropout before the task's head; -1: model.hidden_dropout.
    head_dropout: float = only(-1.0, {KIND: _HEAD})
    # Probability with which a weight is zero during a step (DropConnect), in all matrices of the encoder.
    weight_dropout: float = 0.0
    # Probability with which a weight has its start value during a step (Lee et al. 2020), in the matrices of
    # encoder and pooler that were read from the start model.
    mixout: float = 0.0
    # Top layers that start from drawn weights (Zhang et al. 2021); the pooler is drawn again with them.
    reinit_layers: int = 0
    # The task's head, and what stands between it and the encoder (features, CRF), starts from drawn weights, also
    # where the start model has one for the same classes.
    reinit_head: bool = False

    def __post_init__(self) -> None:
        _require(
            self.head_dropout == -1 or 0 <= self.head_dropout < 1, "regularization.head_dropout", self.head_dropout,
            "from 0 to below 1, or -1",
        )  # fmt: skip
        _require_probability("regularization", self, "weight_dropout", "mixout")
        _require(
            not (self.weight_dropout and self.mixout), "regularization.weight_dropout", self.weight_dropout,
            "0 with regularization.mixout, which is weight dropout towards the start",
        )  # fmt: skip
        _require(self.reinit_layers >= 0, "regularization.reinit_layers", self.reinit_layers, "0 or more layers")


@dataclass(frozen=True, kw_only=True)
class FeaturesConfig:
    """Which hidden states the task's head sees, and what stands between (the paper's section 5.3)."""

    # Hidden states that the head reads: last, embeddings, second_to_last, weighted_last_four and weighted_all (a
    # learned scalar mix, Peters et al. 2018), concat_last_four.
    layers: Features = only("last", {KIND: (*_HEAD, "qa")})  # noqa: RUF009 (a field)
    # The encoder stays as it is, without dropout.
    frozen_encoder: bool = only(False, {LOSS: ("softmax",)})
    # Width of each direction of a two-layer BiLSTM before the head; 0: none.
    bilstm_size: int = only(0, {KIND: _WORDS})

    def __post_init__(self) -> None:
        _require(self.bilstm_size >= 0, "features.bilstm_size", self.bilstm_size, "0 or more")


@dataclass(frozen=True, kw_only=True)
class QaConfig:
    """Extractive question answering (google-research/bert ``run_squad.py``)."""

    # Tokens between the starts of two windows of a passage.
    doc_stride: int = 128
    # Tokens of the question that are kept.
    max_query_length: int = 64
    # Longest answer in tokens.
    max_answer_length: int = 30
    # Candidates that are kept.
    n_best: int = 20
    # Whether a question may have no answer (SQuAD 2.0).
    no_answer: bool = False
    # No answer is predicted when its score is above the best answer's by more than this.
    null_threshold: float = 0.0
    # How answers are compared: english (SQuAD's words) or chinese (CMRC's characters).
    scoring: Literal["english", "chinese"] = "english"

    def __post_init__(self) -> None:
        _require_positive("qa", self, "doc_stride", "max_query_length", "max_answer_length", "n_best")
        _require(
            not self.no_answer or self.scoring == "english", "qa.scoring", self.scoring,
            "english with qa.no_answer, questions without an answer have no other score",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaggingConfig:
    """A tag per word."""

    # Learnt transitions between tags, decoded together (Lafferty et al. 2001).
    crf: bool = False
    # Words of neighbouring sentences of the document are seen too, as many as fit (Devlin et al. 2018, 5.3).
    document_context: bool = False
    # Entities as conlleval reads them, or only those that begin with B- (strict).
    scoring: Literal["conlleval", "strict"] = "conlleval"


@dataclass(frozen=True, kw_only=True)
class SentenceTaskConfig:
    """Sentence embeddings (Reimers and Gurevych 2019)."""

    # softmax: classes of (u, v, |u - v|). cosine: regression of the cosine. cosent: order of cosines. triplet: an
    # anchor nearer to its positive. negatives: the right one among all of the batch (of a microbatch, with
    # accumulation), with hard negatives where given. simcse: each text against its own second pass.
    loss: SentenceLoss = "softmax"
    # How token outputs become one vector.
    pooling: Pooling = "mean"
    # Vectors are divided by their length.
    normalize: bool = False
    # Width of a hidden layer between (u, v, |u - v|) and the classes; 0: none.
    hidden_size: int = only(0, {LOSS: ("softmax",)})
    # Cosines are multiplied by this (cosent, negatives, simcse).
    scale: float = only(20.0, {LOSS: ("cosent", "negatives", "simcse")})
    # Distance by which the positive must be nearer (triplet).
    margin: float = only(5.0, {LOSS: ("triplet",)})
    # Positive pairs are texts with the same label (negatives, triplet).
    pairs_from_classes: bool = only(False, {LOSS: ("negatives", "triplet")})
    # Labels of cosine and cosent are divided by this: the top of their scale.
    label_scale: float = only(1.0, {LOSS: ("cosine", "cosent")})

    def __post_init__(self) -> None:
        _require_positive("sentence", self, "scale", "margin", "label_scale")
        _require(self.hidden_size >= 0, "sentence.hidden_size", self.hidden_size, "0 or more")


@dataclass(frozen=True, kw_only=True)
class FinetuneOptimizerConfig(OptimizerConfig):
    """Update rule and learning-rate schedule, with what fine-tuning adds."""

    learning_rate: float = 2e-5
    # Steps of linear warmup from 0; 0: optimizer.warmup_fraction of all steps.
    warmup_steps: int = 0
    # Share of the steps that warmup takes.
    warmup_fraction: float = 0.1
    # Each layer learns at this factor times the rate of the one above; embeddings are below the first; heads 1.
    layer_decay: float = 1.0
    # Weight decay pulls towards the start weights instead of zero (Wiese et al. 2017), what is drawn anew towards
    # zero (Li et al. 2018).
    decay_to_start: bool = False
    # Parts that stay as they are: embeddings, encoder, pooler, or layer_N (from 0).
    frozen: tuple[str, ...] = ()
    # Epochs after which the next layer below joins, from the top; heads learn from the start; 0: all do. Better
    # not with bert_adam: without bias correction a layer's first steps are up to six times as large.
    unfreeze_every: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_probability("optimizer", self, "warmup_fraction")
        _require(0 < self.layer_decay <= 1, "optimizer.layer_decay", self.layer_decay, "above 0, at most 1")
        _require(
            not self.decay_to_start or self.name != "lamb", "optimizer.decay_to_start", self.decay_to_start,
            "false with lamb, whose trust ratio measures the weights themselves",
        )  # fmt: skip
        _require(self.unfreeze_every >= 0, "optimizer.unfreeze_every", self.unfreeze_every, "0 or more")


@dataclass(frozen=True, kw_only=True)
class FinetuneTrainingConfig(TrainingConfig):
    """The run, with what fine-tuning adds."""

    # Passes over the training records.
    num_epochs: float = 3.0
    # Optimizer steps in all; 0: training.num_epochs passes.
    num_steps: int = 0
    # Examples per optimizer step, over all devices.
    global_batch_size: int = 32
    log_interval: int = 50
    # Steps between evaluations on the dev split; 0: once per epoch.
    eval_interval: int = 0
    # Steps between checkpoints; 0: once per epoch.
    checkpoint_interval: int = 0
    keep_checkpoints: int = 1
    # Stop after this many evaluations in a row without a better one; 0: never.
    patience: int = 0
    # By how much an evaluation must be better to count.
    min_delta: float = 0.0
    # Take the parameters of the best evaluation at the end, not the last ones.
    restore_best: bool = True

    ZERO_MEANS_INFERRED = ("num_steps", "checkpoint_interval")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("training", self, "num_epochs")
        for name in ("patience", "min_delta"):
            _require(getattr(self, name) >= 0, f"training.{name}", getattr(self, name), "0 or more")
        # What fine-tuning would ignore: a split is evaluated whole, in batches of its own making.
        for name in ("batch_ramp", "eval_batches", "eval_batch_size"):
            _require(not getattr(self, name), f"training.{name}", getattr(self, name), "nothing in fine-tuning")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Fine-tuning: a task's head on an encoder."""

    task: TaskConfig = TaskConfig()
    data: TaskDataConfig = TaskDataConfig()
    input: InputConfig = InputConfig()
    loss: LossConfig = LossConfig()
    regularization: RegularizationConfig = RegularizationConfig()
    features: FeaturesConfig = FeaturesConfig()
    qa: QaConfig = only(QaConfig(), {KIND: ("qa",)})  # noqa: RUF009 (frozen)
    tagging: TaggingConfig = only(TaggingConfig(), {KIND: _WORDS})  # noqa: RUF009
    sentence: SentenceTaskConfig = only(SentenceTaskConfig(), {KIND: ("sentence",)})  # noqa: RUF009
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
        _require(
            self.task.max_length <= self.model.max_length or self.model.position_embeddings == "sinusoidal",
            "task.max_length", self.task.max_length, f"at most the model's {self.model.max_length} positions",
        )  # fmt: skip

    @property
    def parameter_layout(self) -> dict[str, object]:
        """What decides, beside the model section, which parameters there are."""
        return {
            "task.kind": self.task.kind,
            "task.module": self.task.module,
            "data.labels": self.data.labels,
            "data.tags": self.data.tags,
            "features": self.features,
            "tagging.crf": self.tagging.crf,
            "sentence.loss": self.sentence.loss,
            "sentence.hidden_size": self.sentence.hidden_size,
            "loss.mlm_weight": self.loss.mlm_weight > 0,
            "loss.nsp_weight": self.loss.nsp_weight > 0,
        }

    @property
    def stores_start_params(self) -> bool:
        """Whether the state holds the parameters that training started from."""
        return self.regularization.mixout > 0 or self.optimizer.decay_to_start

    @property
    def name(self) -> str:
        """What the task is called."""
        return self.task.name or self.task.kind
