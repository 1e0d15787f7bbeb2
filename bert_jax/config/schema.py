"""Names, types, defaults and help of the options that every run has.

Options of one kind of run are in ``pretrain``, ``task`` and ``finetune``. Sections are frozen, keyword-only
dataclasses with hashable fields, so a section can be a static argument of a jitted function. A section checks its
values when it is created and raises ``ValueError`` with the invalid value and the allowed values. A config never
changes after its creation; values that follow from several fields are properties. This module does not import jax.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    get_origin,
    get_type_hints,
)

from bert_jax import registry

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Number = TypeVar("Number", int, float)


# JAX counts steps, rows and positions with 32 bits.
MOST = 2**31 - 1


class Range(NamedTuple):
    """Allowed values of a number, as text and as a predicate. A whole number is at most ``most``."""

    allowed: str
    contains: Callable[[float], bool]
    most: int = MOST


Positive = Annotated[Number, Range("a number above 0", lambda value: value > 0)]
AtLeast0 = Annotated[Number, Range("0 or more", lambda value: value >= 0)]
Tokens = Annotated[int, Range("0 or more", lambda value: value >= 0, 2**63 - 1)]
# JAX drops the higher bits of a seed.
Seed = Annotated[int, Range("0 or more", lambda value: value >= 0, 2**32 - 1)]
Share = Annotated[Number, Range("from 0 to 1", lambda value: 0 <= value <= 1)]
PositiveShare = Annotated[Number, Range("above 0, at most 1", lambda value: 0 < value <= 1)]
Probability = Annotated[float, Range("a number from 0 to below 1", lambda value: 0 <= value < 1)]
# A probability, or -1: another option applies.
Inherited = Annotated[float, Range("-1 or a number from 0 to below 1", lambda value: value == -1 or 0 <= value < 1)]
# Layers are listed, so their number has a bound, far above that of any published model.
MOST_LAYERS = 10_000
Layers = Annotated[int, Range(f"from 0 to {MOST_LAYERS:,}", lambda value: 0 <= value <= MOST_LAYERS)]
# Hypotheses of a beam search, each of which has a cache.
Beams = Annotated[int, Range("from 1 to 1,000", lambda value: 1 <= value <= 1000)]
_INT32 = range(-(2**31), 2**31)


# Values of options that another option decides unless they are set.
SWITCH: dict[str, bool | None] = {"auto": None, "true": True, "false": False}


class Weighted(str):
    """Type of the items of an option that names things with weights: texts NAME=WEIGHT. The option is a mapping or
    a list in YAML, and a list on the command line."""


# Values of data.row_order with which the rows of a document follow each other.
CONTIGUOUS = ("contiguous", "carried")
# Steps of training.spike_limit, if it has one number.
SPIKE_WINDOW = 200.0
# Batches of training.spike_rollback, if it has one number.
SPIKE_SKIPPED = 100


# In a condition: any value that is not false, 0 or empty.
SET = None
# A value of an option.
Value = bool | int | float | str | tuple["Value", ...]
When = Mapping[str, tuple[Value, ...] | None]


class Limit(NamedTuple):
    """The values that an option must have while each option in ``when`` has one of the values listed for it."""

    allowed: tuple[Value, ...] | Range
    when: When
    # Follows the allowed values in the message.
    reason: str = ""

    def allows(self, value: Any, states: Mapping[str, Value]) -> bool:
        """Return True if ``value`` is allowed with the values ``states`` of the options in ``when``."""
        for key, values in self.when.items():
            if not (states[key] if values is SET else states[key] in values):
                return True
        return self.allowed.contains(value) if isinstance(self.allowed, Range) else value in self.allowed

    def words(self, states: Mapping[str, Value]) -> str:
        """Return the allowed values and the condition in words."""
        values = self.allowed.allowed if isinstance(self.allowed, Range) else " or ".join(map(_text, self.allowed))
        conditions = []
        for key, state in states.items():
            shown = "" if self.when[key] is SET or state is True else f" {_text(state)}"
            conditions.append(f"with {key}{shown}" if state else f"without {key}")
        return f"{values} {' and '.join(conditions)}{self.reason}"


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value or 0 if value != () else "none")


def limited(default: T, *limits: Limit) -> T:
    """Return a field whose value the ``limits`` restrict."""
    return field(default=default, metadata={"limits": limits})


def only(default: T, conditions: Mapping[str, tuple[Value, ...]], *limits: Limit) -> T:
    """Return a field that exists only if every option in ``conditions`` has one of the values listed for it, and
    whose value the ``limits`` restrict.

    Otherwise the loader rejects the option, and ``--help`` and stored configs omit it; in Python the field keeps
    its default. A condition on an option that does not exist itself is ignored.
    """
    return field(default=default, metadata={"only": conditions, "limits": limits})


def require(ok: bool, option: str, value: Any, allowed: str) -> None:
    """Raise ``ValueError`` with the value of ``option`` and the ``allowed`` values unless ``ok`` is True."""
    if not ok:
        raise ValueError(f"{option}: {value!r} is not allowed; allowed: {allowed}")


class Choice(NamedTuple):
    """The field of a section that names a registered part, whose options are a subclass of the section."""

    field: str
    parts: registry.Kind
    options: registry.Kind


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a config: a dataclass that checks the :class:`Range` of each field when it is created.

    Class arguments: ``prefix``, such as ``model.``, precedes the names of fields in messages; ``chosen_by``: the
    field that chooses the class of the section.
    """

    # Fields of the base class that are no options of this section: they keep their defaults.
    FIXED: ClassVar[tuple[str, ...]] = ()
    # What the part of this section is, in help and (an encoder) in model cards.
    TITLE: ClassVar[str] = ""
    prefix: ClassVar[str] = ""
    chosen_by: ClassVar[Choice | None] = None

    def __init_subclass__(cls, prefix: str = "", chosen_by: Choice | None = None, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.prefix, cls.chosen_by = prefix or cls.prefix, chosen_by or cls.chosen_by

    @classmethod
    def class_for(cls, values: Mapping[str, Value | None]) -> type[Self]:
        """Return the class of a section with ``values`` by field: the class of the registered part that the values
        name, if this part adds options, else this class."""
        name = values.get(cls.chosen_by.field) if cls.chosen_by else None
        if cls.chosen_by is None or not isinstance(name, str) or registry.is_of_trunk(cls.chosen_by.parts, name):
            return cls
        if name not in registry.names(cls.chosen_by.options):
            return cls
        found: type[Self] = registry.load(cls.chosen_by.options, name)
        return found

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Return a section with ``values``, which also determine its class."""
        return cls.class_for(values)(**values)

    def __post_init__(self) -> None:
        for one in fields(self):
            fits = one.name not in self.FIXED or getattr(self, one.name) == one.default
            self._require(one.name, fits, f"only {one.default!r}")
        for name, values in _ranges(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            self._require(name, values.contains(value), values.allowed)
            fits = not isinstance(value, int) or value <= values.most
            self._require(name, fits, f"at most {values.most}")
        own = {f"{self.prefix}{one.name}": getattr(self, one.name) for one in fields(self)}
        self.check_limits(own)

    def check_limits(self, values: Mapping[str, Value]) -> None:
        """Raise ``ValueError`` for a field that one of its limits refuses. ``values`` are those of the options by
        dotted name; a limit with a condition on another option is not checked."""
        for one in fields(self):
            for limit in one.metadata.get("limits", ()):
                if limit.when.keys() <= values.keys():
                    states = {key: values[key] for key in limit.when}
                    self._require(one.name, limit.allows(getattr(self, one.name), states), limit.words(states))

    def _require_int32(self) -> None:
        for name, value in vars(self).items():
            numbers = value if isinstance(value, tuple) else (value,)
            fits = all(number in _INT32 for number in numbers if isinstance(number, int))
            self._require(name, fits, f"at most {_INT32[-1]:,}")

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        require(ok, f"{self.prefix}{name}", getattr(self, name), allowed)


def check_limits(config: "DataclassInstance") -> None:
    """Raise ``ValueError`` for an option of ``config``, a dataclass of sections, that one of its limits refuses."""
    sections = {one.name: getattr(config, one.name) for one in fields(config)}
    values = {
        f"{name}.{one.name}": getattr(section, one.name)
        for name, section in sections.items()
        for one in fields(section)
    }
    for section in sections.values():
        if isinstance(section, Section):
            section.check_limits(values)


def require_encoding(option: str, value: str) -> None:
    """Raise ``ValueError`` unless ``value`` is "auto" or the name of a character encoding."""
    try:
        is_known = value == "auto" or "".encode(value) is not None
    except (LookupError, ValueError):
        is_known = False
    require(is_known, option, value, "auto, or a character encoding of Python, such as utf-16, cp1252 or gb18030")


@functools.cache
def _ranges(section: type) -> dict[str, Range]:
    hints = get_type_hints(section, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig(Section, prefix="execution."):
    """Execution of the model. A resumed run may change these options; some, such as dtype, affect numerical
    results.
    """

    # Stack the parameters of the layers and loop over the layers with lax.scan, which compiles much faster; false:
    # unroll the layers, which runs faster.
    scan_layers: bool = False
    # Values that the backward pass recomputes to save memory: none, attention (scores and probabilities), or full
    # (whole layers).
    remat: Literal["none", "attention", "full"] = "none"
    # dtype of the computation. Parameters, LayerNorm statistics, softmax, losses and optimizer state stay float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # int8: quantization-aware training, which reduces the loss of accuracy in an int8 export. Training and
    # evaluation round the weights of the embeddings and the encoder, and the inputs of matrix products (separately
    # for each token), as an int8 export without calibration does. Gradients ignore the rounding. none: no rounding.
    quantization: Literal["none", "int8"] = "none"
    # Compute query, key and value with one matrix product. Their parameters stay separate and are stacked in the
    # forward pass.
    fused_qkv: bool = False
    # Implementation of attention: xla, pallas (a kernel for TPUs and GPUs, interpreted on a CPU), or auto (pallas
    # on TPUs and GPUs where it is supported, else xla).
    attention: Literal["auto", "xla", "pallas"] = "auto"
    # Implementation of dropout, residual sum and LayerNorm at the end of a block and, on TPUs, of LayerNorm before
    # a block: xla, pallas or auto (see execution.attention).
    residual_norm: Literal["auto", "xla", "pallas"] = "auto"
    # Generator of the random bits for dropout. hash: a hash of step, layer, sequence and position; the bits are
    # the same on every mesh, in every kernel and for every split into microbatches. threefry: the default
    # generator of JAX; the bits are the same on every mesh. rbg: the generator of the chip; the bits depend on the
    # mesh. A resumed run keeps the generator of its checkpoint; another value requires --allow_numeric_change.
    prng: Literal["hash", "threefry", "rbg"] = "hash"
    # In memory, rows without effect are added to the word embedding table until the number of its rows is a
    # multiple of this number.
    vocab_multiple: Positive[int] = 128


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, prefix="optimizer."):
    """Update rule and learning-rate schedule."""

    # Optimizer. adamw: Adam with bias correction. bert_adam: Adam without bias correction, as in
    # google-research/bert. lamb: LAMB, for large batches (You et al. 2019). muon: orthogonalized momentum for the
    # matrices of the encoder (Jordan 2024), and adamw at the same learning rate for all other parameters.
    # stable_adamw: adamw with smaller steps where gradients grow (Wortsman et al. 2023), usually with clip_norm 0.
    # sgd: gradient descent without momentum, for word2vec and AWD-LSTM. adagrad: Adagrad with sums of squares that
    # start at 1, for GloVe and ELMo (Duchi et al. 2011).
    name: Literal["adamw", "bert_adam", "lamb", "muon", "stable_adamw", "sgd", "adagrad"] = "adamw"
    # Peak learning rate.
    learning_rate: AtLeast0[float] = 1e-4
    # Number of warmup steps, during which the learning rate rises linearly from 0.
    warmup_steps: AtLeast0[int] = 10_000
    # Length of the warmup in tokens, which is converted to optimizer.warmup_steps; 0: optimizer.warmup_steps
    # applies.
    warmup_tokens: Tokens = 0
    # Schedule of the learning rate after warmup. wsd: warmup, stable, decay. bert2018: a linear decay that is
    # counted from step 0 but applies only after warmup, so the learning rate drops at the end of warmup.
    # slanted_triangular: Howard and Ruder 2018; the warmup is its rising part. triangle: the learning rate rises
    # from 1/4 of the peak to the peak in 3/4 of the steps, then falls; no warmup (Geiping and Goldstein 2022).
    schedule: Literal[
        "linear", "cosine", "constant", "inverse_sqrt", "wsd", "bert2018", "slanted_triangular", "triangle"
    ] = "linear"
    # Start the schedule, including warmup, at the first step of a phase that --continue_from begins; false: the
    # schedule continues from the earlier phases.
    restart_schedule: bool = False
    # Step of the schedule at which the decay ends; 0: training.num_steps.
    decay_steps: AtLeast0[int] = 0
    # Learning rate at the end of the decay as a share of the peak learning rate.
    final_fraction: Share[float] = 0.0
    # Shape of the decay phase of wsd: linear, or one_minus_sqrt (1 minus the square root of the elapsed share of
    # the phase; Haegele et al. 2024).
    wsd_decay: Literal["linear", "one_minus_sqrt"] = "linear"
    # Length of the wsd decay phase as a share of all steps.
    wsd_decay_fraction: Share[float] = 0.1
    # Length of the wsd decay phase in steps; 0: optimizer.wsd_decay_fraction applies.
    wsd_decay_steps: AtLeast0[int] = 0
    # Length of the wsd decay phase in tokens, which is converted to optimizer.wsd_decay_steps; 0:
    # optimizer.wsd_decay_steps applies.
    wsd_decay_tokens: Tokens = 0
    # Weight decay of all parameters except biases, the parameters of normalization layers, and parameters whose
    # names match optimizer.without_decay.
    weight_decay: AtLeast0[float] = 0.01
    # Regular expressions. Parameters whose names contain a match have no weight decay, in addition to biases and
    # the parameters of normalization layers.
    without_decay: tuple[str, ...] = ()
    # decoupled: weight decay is multiplied by the learning rate (AdamW). independent: it is multiplied by the
    # ratio of the learning rate to its peak (Composer, ModernBERT). l2: it is added to the gradient before the
    # moments are computed.
    weight_decay_type: Literal["decoupled", "independent", "l2"] = limited(
        "decoupled", Limit(("decoupled", "independent"), {"optimizer.name": ("muon",)})
    )
    # Decay rate of the first moment of the gradients.
    beta1: Probability = 0.9
    # Decay rate of the second moment of the gradients.
    beta2: Probability = 0.999
    # Number that is added to the square root of the second moment (adagrad: to the sum of squares).
    epsilon: AtLeast0[float] = 1e-6
    # Maximum global norm of the gradients; larger gradients are scaled down to this norm. 0: no limit.
    clip_norm: AtLeast0[float] = 1.0
    # Decay rate of the moving average of the parameters, which starts at the initial parameters; 0: no moving
    # average.
    ema_decay: Probability = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section, prefix="training."):
    """Length, batch size, logging, evaluation and checkpoints of a run."""

    # Preset of defaults for other options: standard (current practice), or bert2018 (as in google-research/bert:
    # Adam without bias correction, a learning rate that drops at the end of warmup, and gelu_tanh).
    mode: Literal["standard", "bert2018"] = "standard"
    # Total number of optimizer steps, including those of earlier phases. 0 (the default with --init_from): the
    # number is derived from the size of the text.
    num_steps: AtLeast0[int] = 1_000_000
    # Length of this phase in tokens, which is converted to training.num_steps; 0: training.num_steps applies. A
    # batch counts as (number of rows) * data.seq_length tokens, including padding.
    num_tokens: Tokens = 0
    # First step of this phase; --continue_from sets it.
    first_step: AtLeast0[int] = 0
    # Number of sequences (or rows, see training.batch_unit) per optimizer step, in total over all devices.
    global_batch_size: Positive[int] = 256
    # Unit of all batch sizes: sequences, or rows of data.seq_length tokens, each of which holds several sequences
    # if data.packing is best_fit.
    batch_unit: Literal["sequences", "rows"] = "sequences"
    # Number of microbatches into which each batch is split; their gradients are added.
    accumulation_steps: Positive[int] = limited(1, Limit((1,), {"data.row_order": ("carried",)}))
    # dtype in which gradients are summed over the replicas, once per optimizer step; bfloat16 halves the
    # communication.
    gradient_reduction_dtype: Literal["float32", "bfloat16"] = "float32"
    # Smaller batch sizes at the start of training; a step is compiled for each size. The numbers are either pairs
    # (a number of steps, a batch size), after which training.global_batch_size applies, or three numbers: the
    # number of tokens during which the batch size grows, the first batch size, and the increment. With three
    # numbers, all sizes have nearly equal numbers of steps. Empty: one batch size.
    batch_ramp: tuple[int, ...] = limited((), Limit(((),), {"data.row_order": CONTIGUOUS}))
    # Seed of the initial parameters, of dropout and of the data order.
    seed: Seed = 0
    # Number of steps between log lines.
    log_interval: Positive[int] = 100
    # Number of steps between evaluations on held-out data; 0: one evaluation at the end.
    eval_interval: AtLeast0[int] = 0
    # Maximum number of batches per evaluation; 0: all held-out data. The last evaluation always uses all held-out
    # data.
    eval_batches: AtLeast0[int] = 0
    # Number of sequences (or rows, see training.batch_unit) per evaluation batch; 0: training.global_batch_size.
    eval_batch_size: AtLeast0[int] = 0
    # Number of steps between checkpoints.
    checkpoint_interval: Positive[int] = 1000
    # Number of newest checkpoints to keep.
    keep_checkpoints: Positive[int] = 3
    # Also keep each checkpoint whose step is a multiple of this number; 0: keep no others.
    keep_every: AtLeast0[int] = 0
    # After this many consecutive steps with a non-finite loss or gradient, the run rolls back if
    # training.spike_rollback allows another rollback, and otherwise exits with code 44.
    max_bad_steps: Positive[int] = 5
    # A loss is a spike if it exceeds the moving average of the loss by more than this number of standard
    # deviations. After a spike, the run rolls back if training.spike_rollback allows another rollback, and
    # otherwise exits with code 44. An optional second number (default 200) is the length of this average in steps;
    # detection begins after this many steps. Empty: spikes are not detected.
    spike_limit: tuple[float, ...] = ()
    # Maximum number of rollbacks in a phase; empty: none. A rollback follows a spike, or training.max_bad_steps
    # consecutive non-finite steps. It restores the newest checkpoint from before the first bad step, and skips all
    # batches up to the last bad step and 100 more. An optional second number replaces 100.
    spike_rollback: tuple[int, ...] = ()
    # Number of seconds without progress after which the run prints the stacks of all threads and exits with code
    # 45; 0: never. The limit is ten times as long during compilation, restoring and the last save.
    watchdog_seconds: AtLeast0[float] = 600.0
    # First and last step to trace with the profiler of JAX; empty: no trace.
    profile_steps: tuple[int, ...] = ()
    # Check data, log and network at every evaluation, as bert-jax doctor does; this takes at most about 1% of the
    # time of the run. The results appear in the log, in doctor.json and in the report. Requires a run with one
    # process.
    doctor: bool = False
    # Folder for compiled programs, which later runs with the same number of CPU threads reuse; none: no folder.
    # Empty: WORKDIR/compilation_cache if the run has several processes or the workdir is a URL, else the folder in
    # JAX_COMPILATION_CACHE_DIR, else ~/.cache/bert_jax/programs.
    compilation_cache: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = len(self.batch_ramp) % 2 == 0 and all(0 < n < 2**31 for n in self.batch_ramp)
        self._require("batch_ramp", pairs, "pairs of (steps, batch size), all above 0")
        fits = len(self.spike_limit) < 3 and all(number > 0 for number in self.spike_limit)
        numbers = len(self.spike_rollback) < 3 and all(0 <= number <= MOST for number in self.spike_rollback)
        self._require("spike_rollback", numbers, "a number of rollbacks, and a number of batches")
        self._require("spike_limit", fits and self.spike_window % 1 == 0, "deviations, and a number of steps")
        for size in (self.global_batch_size, *self.batch_ramp[1::2]):
            allowed = f"a divisor of every batch size, including {size}"
            self._require("accumulation_steps", size % self.accumulation_steps == 0, allowed)
        window = self.profile_steps
        is_window = len(window) in (0, 2) and list(window) == sorted(window)
        self._require("profile_steps", is_window, "two steps, first and last")

    @property
    def spike_window(self) -> float:
        """Number of steps in the running mean and standard deviation of the loss."""
        return self.spike_limit[1] if len(self.spike_limit) > 1 else SPIKE_WINDOW

    @property
    def most_rollbacks(self) -> int:
        """Maximum number of rollbacks in a phase."""
        return self.spike_rollback[0] if self.spike_rollback else 0

    @property
    def skipped_batches(self) -> int:
        """Number of batches after a spike that a rollback skips too."""
        return self.spike_rollback[1] if len(self.spike_rollback) > 1 else SPIKE_SKIPPED


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The axes of the device mesh; at most one axis has size -1, which stands for the remaining devices."""

    # Number of replicas, each of which computes different rows of the batch.
    data: int = -1
    # Number of parts into which parameters, optimizer state and the rows of the batch are partitioned.
    fsdp: int = 1
    # Number of parts into which attention heads, feed-forward width and vocabulary are partitioned.
    tensor: int = 1
    # Also partition the optimizer state and the moving average over the replicas (ZeRO-1), each of which updates
    # its part. Parameters are partitioned in the same way between steps; during a step, every replica holds all of
    # them.
    shard_optimizer: bool = True

    def __post_init__(self) -> None:
        sizes = (self.data, self.fsdp, self.tensor)
        ok = all(n > 0 or n == -1 for n in sizes) and sizes.count(-1) <= 1
        require(ok, "mesh", sizes, "sizes above 0, or -1 for at most one of them")


# YAML files and the command line override presets, so the resolved config shows every value.
PRESETS: dict[str, dict[str, str]] = {
    "standard": {},
    "bert2018": {
        "optimizer.name": "bert_adam",
        "optimizer.schedule": "bert2018",
        "model.activation": "gelu_tanh",
    },
}


@dataclass(frozen=True, kw_only=True)
class RunOptions(Section):
    """Options of a run that are not part of its config."""

    PARTS: ClassVar[registry.Kind] = "pretrain_options"

    # Recipes, each a YAML file or the name of a recipe, such as quickstart or finetune/sst2. Later recipes
    # override earlier ones.
    config: tuple[str, ...] = ()
    # Folder for all output of the run; empty: runs/NAME, where NAME is the name of the last recipe.
    workdir: str = ""
    # Workdir of an earlier phase, from which the run takes the parameters, the optimizer moments, the moving
    # average and the step. The data may differ from those of the earlier phase. Of the model options, only dropout,
    # rotary base, attention windows and blocks, pooling, initialization and number of positions may differ.
    continue_from: str = ""
    # Model from which the run takes its initial parameters, its sizes and its vocabulary: a workdir, a saved model,
    # a folder or checkpoint in any format that bert-jax reads, or a name on the Hugging Face Hub. The run starts at
    # step 0 with a new optimizer state. If the run already has a checkpoint, it continues from the checkpoint
    # instead.
    init_from: str = ""
    # File of words, one per line, to add to the WordPiece vocabulary of --init_from. The embedding of an added
    # word starts as the mean of the embeddings of its pieces. Longer words that begin with an added word are also
    # split differently, because WordPiece uses the longest match.
    add_words: str = ""
    # true: the words of --add_words replace the first [unusedN] pieces. false: they are added after the last piece.
    vocab_slots: bool = False
    # Extend the position table: tile (repeat its rows; the first positions keep their rows) or interpolate
    # (stretch the table). The table of --init_from is extended to data.seq_length or
    # model.max_position_embeddings, whichever is larger; the table of --continue_from, to
    # model.max_position_embeddings. Empty: do not extend the table.
    extend_positions: Literal["", "tile", "interpolate"] = ""
    # Read the model of --init_from even if its config contradicts its tensors, or its tokenizer files contradict
    # each other. The run then prints which of the contradictory values it uses.
    allow_mismatch: bool = False
    # Loggers that receive the metrics in addition to metrics.jsonl: tensorboard (events in WORKDIR/tensorboard),
    # wandb (Weights & Biases; set environment variables such as WANDB_PROJECT), or the name of a logger in an
    # installed package.
    loggers: tuple[str, ...] = ("tensorboard",)
    # Print the resolved config and exit.
    print_config: bool = False
    # Allow a resumed run to change execution.prng.
    allow_numeric_change: bool = False
    # Address HOST:PORT of process 0 in a run with several processes, where PORT is any free port; the value is the
    # same for all processes. Not needed on Cloud TPU or under SLURM. Environment variable: JAX_COORDINATOR_ADDRESS.
    coordinator: str = ""
    # Number of processes of a run with --coordinator. Environment variable: JAX_NUM_PROCESSES.
    num_processes: int = 0
    # Index of this process, counted from 0, in a run with --coordinator. Environment variable: JAX_PROCESS_ID.
    process_id: int = -1
    # Maximum number of seconds for which the processes wait for each other, at the start and during the run.
    host_timeout: Positive[int] = 300
    # Number of seconds without a heartbeat after which a process is considered dead and the other processes exit.
    heartbeat_timeout: Positive[int] = 100
    # On a Linux CPU, keep freed memory for the next step, which makes steps faster. This applies only to models of
    # at most 50 million parameters, and only if enough memory is free.
    keep_memory: bool = True

    def folder(self, kind: str) -> str:
        """Return ``workdir``, or a folder under ``runs`` with the name of the last recipe or, if none, ``kind``."""
        return self.workdir or f"runs/{Path(self.config[-1]).stem if self.config else kind}"

    @property
    def changes(self) -> tuple[str, ...]:
        """Names of the given options that change the network of the initial model, in the order of the changes."""
        return ()

    def require_no_inputs(self, objective: str) -> None:
        """Raise ``ValueError`` for options that name inputs of an objective, because the objective of the run,
        which the option ``objective`` names, has no inputs."""
