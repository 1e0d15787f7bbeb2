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
    """Execution of the model. A resumed run may change these options without changing the result of training."""

    # Stack the parameters of the layers and loop over them with lax.scan, which compiles much faster; false:
    # unrolled layers, which run faster.
    scan_layers: bool = False
    # Recomputation in the backward pass: none, attention (scores and probabilities), full (whole layers).
    remat: Literal["none", "attention", "full"] = "none"
    # Compute dtype; parameters, LayerNorm statistics, softmax, losses and optimizer state stay float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Rounding of the weights of embeddings and encoder, and of the inputs of their products, in training and
    # evaluation: none, or int8 (as in an int8 export, with the range of each batch; gradients ignore the rounding),
    # so that the trained model loses less when it is exported.
    quantization: Literal["none", "int8"] = "none"
    # One matrix product for query, key and value (stacked in the forward pass; parameters stay separate).
    fused_qkv: bool = False
    # Attention implementation: xla, pallas (a kernel for TPUs or GPUs; interpreted on a CPU) or auto (pallas on
    # TPUs and GPUs where it can run, else xla).
    attention: Literal["auto", "xla", "pallas"] = "auto"
    # Implementation of dropout, residual and LayerNorm at the end of a block, and of LayerNorm before a block
    # (TPU): xla, pallas or auto, as for attention.
    residual_norm: Literal["auto", "xla", "pallas"] = "auto"
    # Random bits of dropout. hash: a hash of step, layer, sequence and position; the bits are the same on every
    # mesh, in every kernel and for every split into microbatches. threefry: the generator of JAX, the same bits on
    # every mesh. rbg: the generator of the chip, whose bits depend on the mesh. A run with a checkpoint keeps its
    # generator unless this option is set.
    prng: Literal["hash", "threefry", "rbg"] = "hash"
    # The embedding table is padded in memory to a multiple of this (padded rows have no effect).
    vocab_multiple: Positive[int] = 128


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, prefix="optimizer."):
    """Update rule and learning-rate schedule."""

    # adamw (bias-corrected), bert_adam (google-research/bert: no bias correction), lamb (You et al. 2019), muon
    # (Jordan 2024: orthogonalized momentum for the encoder's matrices, adamw at the same rate for all others),
    # stable_adamw (Wortsman et al. 2023: adamw with shorter steps where gradients grow; usually with clip_norm 0),
    # sgd (the gradient itself: word2vec, AWD-LSTM), adagrad (Duchi et al. 2011, with sums of squares that start at
    # 1: GloVe, ELMo).
    name: Literal["adamw", "bert_adam", "lamb", "muon", "stable_adamw", "sgd", "adagrad"] = "adamw"
    # Peak learning rate.
    learning_rate: AtLeast0[float] = 1e-4
    # Number of steps of linear warmup from 0.
    warmup_steps: AtLeast0[int] = 10_000
    # Tokens of linear warmup, from which optimizer.warmup_steps follows; 0: that option counts.
    warmup_tokens: Tokens = 0
    # Schedule after warmup: linear, cosine, constant, inverse_sqrt, wsd (warmup, stable, decay), bert2018 (linear
    # decay counted from step 0, overwritten during warmup, so that the rate drops at the end of warmup),
    # slanted_triangular (Howard and Ruder 2018; the warmup is its rising part), or triangle (Geiping and Goldstein
    # 2022: from 1/4 of the peak up to the peak during 3/4 of the steps, then down; no warmup).
    schedule: Literal[
        "linear", "cosine", "constant", "inverse_sqrt", "wsd", "bert2018", "slanted_triangular", "triangle"
    ] = "linear"
    # Count the steps of the schedule, warmup included, from the first step of a new phase (--continue_from); false:
    # from the first step of the run.
    restart_schedule: bool = False
    # Step of the schedule at which the decay ends; 0: training.num_steps.
    decay_steps: AtLeast0[int] = 0
    # Share of the peak learning rate that remains at the end of the decay.
    final_fraction: Share[float] = 0.0
    # Shape of the decay phase of wsd: linear, or one_minus_sqrt (of its elapsed share; Haegele et al. 2024).
    wsd_decay: Literal["linear", "one_minus_sqrt"] = "linear"
    # Share of all steps in the decay phase of wsd.
    wsd_decay_fraction: Share[float] = 0.1
    # Number of steps in the decay phase of wsd; 0: optimizer.wsd_decay_fraction of all steps.
    wsd_decay_steps: AtLeast0[int] = 0
    # Tokens in the decay phase of wsd, from which optimizer.wsd_decay_steps follows; 0: that option counts.
    wsd_decay_tokens: Tokens = 0
    # Weight decay on everything but LayerNorm, bias and optimizer.without_decay.
    weight_decay: AtLeast0[float] = 0.01
    # Further parameters without weight decay: regular expressions, searched in the names of the parameters.
    without_decay: tuple[str, ...] = ()
    # decoupled (AdamW: times the learning rate), independent (times the learning rate's share of its peak, as in
    # Composer and in ModernBERT) or l2 (added to the gradient before the moments).
    weight_decay_type: Literal["decoupled", "independent", "l2"] = limited(
        "decoupled", Limit(("decoupled", "independent"), {"optimizer.name": ("muon",)})
    )
    # Decay rate of the first moment.
    beta1: Probability = 0.9
    # Decay rate of the second moment.
    beta2: Probability = 0.999
    # Added to the square root of the second moment; adagrad: to the sum of squares.
    epsilon: AtLeast0[float] = 1e-6
    # Maximum global norm of the gradients, which are scaled down to it; 0: off.
    clip_norm: AtLeast0[float] = 1.0
    # Decay rate of the moving average of the parameters, which starts at the initial parameters; 0: no average.
    ema_decay: Probability = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section, prefix="training."):
    """Length, batch size, logging, evaluation and checkpoints of a run."""

    # Preset of defaults for all other options: standard (current practice) or bert2018 (google-research/bert: Adam
    # without bias correction, a schedule that drops after warmup, tanh GELU).
    mode: Literal["standard", "bert2018"] = "standard"
    # Total number of optimizer steps, including those of earlier phases; 0: from the size of the text, the default
    # with --init_from.
    num_steps: AtLeast0[int] = 1_000_000
    # Tokens of this phase, from which training.num_steps follows; 0: that option counts. A batch has as many tokens
    # as its rows have positions, padding included: (number of rows) x data.seq_length.
    num_tokens: Tokens = 0
    # First step of this phase; a run with --continue_from sets it.
    first_step: AtLeast0[int] = 0
    # Sequences (see training.batch_unit) per optimizer step, over all devices.
    global_batch_size: Positive[int] = 256
    # Unit of all batch sizes: sequences, or rows of data.seq_length tokens, which hold several sequences with
    # data.packing.
    batch_unit: Literal["sequences", "rows"] = "sequences"
    # Number of microbatches into which a batch is split; their gradients are summed.
    accumulation_steps: Positive[int] = limited(1, Limit((1,), {"data.row_order": ("carried",)}))
    # dtype in which gradients are summed over the replicas, once per optimizer step; bfloat16 halves the traffic.
    gradient_reduction_dtype: Literal["float32", "bfloat16"] = "float32"
    # Smaller batches at the start, each size with its own compiled step: pairs (number of steps, batch size), and
    # global_batch_size afterwards; or three numbers, from which such pairs follow: tokens during which the batch
    # size grows, first size, increment. Each of these sizes has nearly the same number of steps.
    batch_ramp: tuple[int, ...] = limited((), Limit(((),), {"data.row_order": CONTIGUOUS}))
    # Seed of the initial parameters, dropout and the order of data.
    seed: Seed = 0
    # Steps between log lines.
    log_interval: Positive[int] = 100
    # Steps between evaluations on held-out data; 0: only at the end.
    eval_interval: AtLeast0[int] = 0
    # Maximum number of batches per evaluation; 0: all held-out data. The last evaluation always uses all held-out
    # data.
    eval_batches: AtLeast0[int] = 0
    # Sequences per evaluation batch; 0: global_batch_size.
    eval_batch_size: AtLeast0[int] = 0
    # Steps between checkpoints.
    checkpoint_interval: Positive[int] = 1000
    # Number of newest checkpoints to keep.
    keep_checkpoints: Positive[int] = 3
    # Also keep every checkpoint whose step is a multiple of this; 0: none.
    keep_every: AtLeast0[int] = 0
    # Number of consecutive steps with a non-finite loss or gradient after which the run rolls back
    # (spike_rollback) or exits with code 44.
    max_bad_steps: Positive[int] = 5
    # A loss this many standard deviations above its running mean is a spike: the run rolls back or exits with code
    # 44. A second number is that of the steps in mean and deviation (200), before which no spike is detected.
    # Empty: no spikes are detected.
    spike_limit: tuple[float, ...] = ()
    # Maximum number of rollbacks in a phase. A rollback restores the newest checkpoint before a spike, or before
    # max_bad_steps non-finite steps, and skips the batches since then and 100 more; a second number replaces the
    # 100. Empty: no rollbacks.
    spike_rollback: tuple[int, ...] = ()
    # Seconds without any progress after which the run prints the stacks of all threads and exits with code 45; ten
    # times as long during compilation, restoring and saving; 0: never.
    watchdog_seconds: AtLeast0[float] = 600.0
    # First and last step that the profiler traces; empty: none.
    profile_steps: tuple[int, ...] = ()
    # Check data, log and network at every evaluation, in at most about 1% of the time of the run; results are lines
    # of the log, doctor.json and a section of the report (bert-jax doctor). Only with one process.
    doctor: bool = False
    # Folder of compiled programs that later starts with as many CPU threads reuse; none: off; empty: the folder
    # that JAX_COMPILATION_CACHE_DIR names, else ~/.cache/bert_jax/programs, or WORKDIR/compilation_cache if the run
    # has several processes or the workdir is a URL.
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
    """The device mesh; an axis of size -1 uses the remaining devices."""

    # Number of replicas that compute different rows of the batch.
    data: int = -1
    # Number of parts into which parameters, optimizer state and batch are partitioned.
    fsdp: int = 1
    # Number of parts into which heads, feed-forward width and vocabulary are partitioned.
    tensor: int = 1
    # Also partition optimizer state and moving average over the replicas (ZeRO-1); each replica updates its part.
    # Parameters are partitioned in the same way between steps, and complete on every replica during a step.
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

    # YAML file of a recipe; with several files, later ones override earlier ones.
    config: tuple[str, ...] = ()
    # Folder for all output of the run; empty: runs/NAME-OF-THE-LAST-RECIPE.
    workdir: str = ""
    # Workdir of an earlier phase. The run continues from the parameters, optimizer moments, moving average and step
    # of that phase. Of the model, only dropout, rotary base and number of positions may change; the data may too.
    continue_from: str = ""
    # Start from the parameters of this model, at step 0 with a new optimizer state: a saved model, a workdir, or a
    # folder or checkpoint of any format that bert-jax reads, or a name on the Hugging Face Hub. The run has the
    # sizes and the vocabulary of this model. A run that already has a checkpoint continues from the checkpoint
    # instead.
    init_from: str = ""
    # File of words, one per line, to add to the WordPiece vocabulary of --init_from. The embedding of an added word
    # starts as the mean of the embeddings of its pieces. Because the longest match is used, longer words that begin
    # with an added word are then split differently.
    add_words: str = ""
    # Store the added words in place of [unusedN] pieces instead of after the last piece.
    vocab_slots: bool = False
    # Extend the position table of --init_from to data.seq_length or model.max_position_embeddings, that of
    # --continue_from to the latter: tile (repeat the rows; old positions keep theirs) or interpolate (stretch it).
    extend_positions: Literal["", "tile", "interpolate"] = ""
    # Read the model of --init_from even if its config and its tensors, or its tokenizer files, contradict each
    # other; a line names what is used.
    allow_mismatch: bool = False
    # Loggers of the metrics, in addition to metrics.jsonl: tensorboard (events in WORKDIR/tensorboard), wandb
    # (Weights & Biases; WANDB_PROJECT and its other environment variables apply), or one that an installed package
    # adds.
    loggers: tuple[str, ...] = ("tensorboard",)
    # Print the resolved config and exit.
    print_config: bool = False
    # Allow a resumed run to change execution.prng.
    allow_numeric_change: bool = False
    # HOST:PORT of process 0 in a run of several processes, with any free port; the same for all processes. Not
    # needed on Cloud TPU and SLURM. Environment variable: JAX_COORDINATOR_ADDRESS.
    coordinator: str = ""
    # Number of processes of the run; environment variable: JAX_NUM_PROCESSES.
    num_processes: int = 0
    # Index of this process, from 0; environment variable: JAX_PROCESS_ID.
    process_id: int = -1
    # Maximum number of seconds that the processes wait for each other, at the start and later.
    host_timeout: Positive[int] = 300
    # Seconds without a heartbeat after which a process is considered dead and the others exit.
    heartbeat_timeout: Positive[int] = 100
    # On a Linux CPU, keep freed memory for the next step (at most 50 million parameters, and enough free memory).
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
