"""Names, types, defaults and help of the options that every run has.

Those of one kind of run lie in ``pretrain``, ``task`` and ``finetune``. Frozen, keyword-only dataclasses with
hashable fields, so a section can be a static argument of a jitted function. Values are validated when a section is
built; a value that cannot work raises ``ValueError`` with what was given and what is allowed. Nothing is written
back into a config after it was built; what follows from several fields is a property. No jax import here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")


def only(default: T, conditions: Mapping[str, tuple[Any, ...]]) -> T:
    """Return a field that exists only where each option of ``conditions`` has one of its values there.

    The loader refuses the option elsewhere, and neither ``--help`` nor a stored config holds it; in Python the
    field keeps its default. A condition on an option that does not exist itself does not count.
    """
    return field(default=default, metadata={"only": conditions})


def _require(ok: bool, field: str, given: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{field}: {given!r} is not allowed; allowed: {allowed}")


def _require_probability(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(0.0 <= value < 1.0, f"{section}.{name}", value, "a number from 0 to below 1")


def _require_positive(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value > 0, f"{section}.{name}", value, "a number above 0")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The function that the network computes. Defaults: BERT-base, uncased (Devlin et al. 2018)."""

    # Size of the vocabulary, special tokens included.
    vocab_size: int = 30522
    # Width of the encoder.
    hidden_size: int = 768
    # Number of encoder layers.
    num_layers: int = 12
    # Attention heads per layer; must divide hidden_size.
    num_attention_heads: int = 12
    # Width of the feed-forward layer.
    intermediate_size: int = 3072
    # Rows of the position table.
    max_position_embeddings: int = 512
    # Rows of the position table before that of the first token (RoBERTa: 2).
    position_offset: int = 0
    # Number of segment (token type) embeddings.
    type_vocab_size: int = 2
    # Dropout after the embeddings, the attention output and the feed-forward output.
    hidden_dropout: float = 0.1
    # Dropout on the attention probabilities.
    attention_dropout: float = 0.1
    # Feed-forward and MLM-head activation: gelu (erf), gelu_tanh, gelu_sigmoid (x * sigmoid(1.702 x)) or relu.
    activation: Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu"] = "gelu"
    # LayerNorm after each residual sum (post, the paper) or before each sub-layer (pre).
    norm_position: Literal["post", "pre"] = "post"
    # Epsilon of every LayerNorm.
    norm_epsilon: float = 1e-12
    # Positions: learned (the paper) or sinusoidal (Vaswani et al. 2017) rows added to the embeddings, or rotary
    # (Su et al. 2021): query and key of every layer are rotated.
    position_embeddings: Literal["learned", "sinusoidal", "rotary"] = "learned"
    # Base of the wave lengths of rotary positions.
    rotary_base: float = 10_000.0
    # Keys that a query sees: those of its whole sequence (bidirectional) or up to its own position (causal).
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    # Standard deviation of the truncated normal from which weights start (cut at two sigma, not rescaled).
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        _require_positive(
            "model", self, "vocab_size", "hidden_size", "num_layers", "num_attention_heads",
            "intermediate_size", "max_position_embeddings", "type_vocab_size", "norm_epsilon", "initializer_range",
            "rotary_base",
        )  # fmt: skip
        _require_probability("model", self, "hidden_dropout", "attention_dropout")
        _require(
            0 <= self.position_offset < self.max_position_embeddings, "model.position_offset",
            self.position_offset, f"0 to below model.max_position_embeddings ({self.max_position_embeddings})",
        )  # fmt: skip
        _require(
            self.hidden_size % self.num_attention_heads == 0, "model.num_attention_heads",
            self.num_attention_heads, f"a divisor of model.hidden_size ({self.hidden_size})",
        )  # fmt: skip
        _require(
            self.position_embeddings != "sinusoidal" or self.hidden_size % 2 == 0, "model.hidden_size",
            self.hidden_size, "an even number with sinusoidal positions",
        )  # fmt: skip
        _require(
            self.position_embeddings != "rotary" or self.head_size % 2 == 0, "model.num_attention_heads",
            self.num_attention_heads, f"heads of an even width of {self.hidden_size} with rotary positions",
        )  # fmt: skip

    @property
    def max_length(self) -> int:
        """Longest sequence, special tokens included (sinusoidal positions have no such limit)."""
        return self.max_position_embeddings - self.position_offset

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Execution of the same function: may change on resume without changing the result of training."""

    # Stack the layers' parameters and loop over them with lax.scan: compiles much faster; unrolled runs faster.
    scan_layers: bool = False
    # What to recompute in the backward pass: none, attention (scores and probabilities), full (whole layers).
    remat: Literal["none", "attention", "full"] = "none"
    # Compute dtype; parameters, LayerNorm statistics, softmax, losses and optimizer state stay float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # One matrix product for query, key and value (stacked in the forward pass; parameters stay apart).
    fused_qkv: bool = False
    # Attention implementation: xla, pallas (a TPU kernel; interpreted elsewhere) or auto (pallas on TPU, else xla).
    attention: Literal["auto", "xla", "pallas"] = "auto"
    # Dropout, residual and LayerNorm at the end of a block: the same choice.
    residual_norm: Literal["auto", "xla", "pallas"] = "auto"
    # Random bits for dropout: threefry is equal on every mesh; rbg is much cheaper on TPU, equal per mesh.
    prng: Literal["threefry", "rbg"] = "threefry"
    # The embedding table is padded in memory to a multiple of this (padded rows take part in nothing).
    vocab_multiple: int = 128

    def __post_init__(self) -> None:
        _require_positive("execution", self, "vocab_multiple")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Update rule and learning-rate schedule."""

    # adamw (bias-corrected), bert_adam (google-research/bert: no bias correction), lamb (You et al. 2019), muon
    # (Jordan 2024: orthogonalized momentum for the encoder's matrices, adamw at the same rate for all others).
    name: Literal["adamw", "bert_adam", "lamb", "muon"] = "adamw"
    # Peak learning rate.
    learning_rate: float = 1e-4
    # Steps of linear warmup from 0.
    warmup_steps: int = 10_000
    # After warmup: linear, cosine, constant, inverse_sqrt, wsd (warmup, stable, decay), bert2018 (linear decay
    # counted from step 0, overwritten during warmup, so it drops where warmup ends), or slanted_triangular (Howard
    # and Ruder 2018; the warmup is its rising part).
    schedule: Literal["linear", "cosine", "constant", "inverse_sqrt", "wsd", "bert2018", "slanted_triangular"] = (
        "linear"
    )
    # Step at which the decay ends; 0: training.num_steps.
    decay_steps: int = 0
    # Share of the peak learning rate that remains at the end of the decay.
    final_fraction: float = 0.0
    # Share of the steps that the decay of wsd takes.
    wsd_decay_fraction: float = 0.1
    # Weight decay on everything but LayerNorm and bias.
    weight_decay: float = 0.01
    # decoupled (AdamW) or l2 (added to the gradient before the moments).
    weight_decay_type: Literal["decoupled", "l2"] = "decoupled"
    # Decay rate of the first moment.
    beta1: float = 0.9
    # Decay rate of the second moment.
    beta2: float = 0.999
    # Added to the root of the second moment.
    epsilon: float = 1e-6
    # Gradients are scaled down to this global norm; 0: off.
    clip_norm: float = 1.0
    # Decay of the moving average of the parameters, which begins with those of step 0; 0: off.
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        _require(self.learning_rate >= 0, "optimizer.learning_rate", self.learning_rate, "0 or more")
        for name in ("warmup_steps", "decay_steps", "weight_decay", "clip_norm", "epsilon"):
            _require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "0 or more")
        _require_probability("optimizer", self, "beta1", "beta2", "ema_decay")
        for name in ("final_fraction", "wsd_decay_fraction"):
            _require(0 <= getattr(self, name) <= 1, f"optimizer.{name}", getattr(self, name), "from 0 to 1")
        _require(
            self.name != "muon" or self.weight_decay_type == "decoupled", "optimizer.weight_decay_type",
            self.weight_decay_type, "decoupled with optimizer.name muon",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The run: length, batch, logging, evaluation, checkpoints."""

    # Preset under all other options: standard (today's practice) or bert2018 (google-research/bert: Adam
    # without bias correction, the schedule's drop after warmup, tanh GELU).
    mode: Literal["standard", "bert2018"] = "standard"
    # Optimizer steps in all, earlier phases included.
    num_steps: int = 1_000_000
    # Sequences per optimizer step, over all devices.
    global_batch_size: int = 256
    # The batch is computed in this many microbatches.
    accumulation_steps: int = 1
    # dtype in which gradients are summed over the replicas, once per optimizer step; bfloat16 halves the traffic.
    gradient_reduction_dtype: Literal["float32", "bfloat16"] = "float32"
    # Smaller batches at the start: pairs of (steps, batch size), then global_batch_size.
    batch_ramp: tuple[int, ...] = ()
    # Seed of the initial parameters, dropout and the order of data.
    seed: int = 0
    # Steps between log lines.
    log_interval: int = 100
    # Steps between evaluations on held-out data; 0: only at the end.
    eval_interval: int = 0
    # Most batches per evaluation; 0: all held-out data. The last evaluation always takes all.
    eval_batches: int = 0
    # Sequences per evaluation batch; 0: global_batch_size.
    eval_batch_size: int = 0
    # Steps between checkpoints.
    checkpoint_interval: int = 1000
    # Newest checkpoints that are kept.
    keep_checkpoints: int = 3
    # Also keep every checkpoint whose step is a multiple of this; 0: none.
    keep_every: int = 0
    # Steps in a row with a non-finite loss or gradient after which the run goes back (spike_rollbacks) or stops
    # with code 44.
    max_bad_steps: int = 5
    # A loss this many standard deviations above its running mean is a spike: the run goes back or stops with
    # code 44; 0: losses are not watched.
    spike_deviations: float = 0.0
    # Steps over which that mean and deviation run; none is a spike before so many were seen.
    spike_window: int = 200
    # How often in all the run may go back to the newest checkpoint before a spike, or before max_bad_steps
    # non-finite steps, and leave out the batches since then.
    spike_rollbacks: int = 0
    # Batches after the spike's that are left out too.
    spike_skip_batches: int = 100
    # Seconds without any progress after which the run exits with code 45 and the stacks of all threads; ten times
    # as long for compiling, restoring and saving; 0: never.
    watchdog_seconds: float = 600.0
    # First and last step that the profiler traces; empty: none.
    profile_steps: tuple[int, ...] = ()
    # Folder of compiled programs that later starts reuse; empty: WORKDIR/compilation_cache; none: off.
    compilation_cache: str = ""

    # Options whose value follows from the training data where they are 0.
    ZERO_MEANS_INFERRED = tuple[str, ...]()

    def __post_init__(self) -> None:
        positive = (
            "num_steps", "global_batch_size", "accumulation_steps", "log_interval", "checkpoint_interval",
            "keep_checkpoints", "max_bad_steps", "spike_window",
        )  # fmt: skip
        _require_positive("training", self, *(name for name in positive if name not in self.ZERO_MEANS_INFERRED))
        for name in (
            *self.ZERO_MEANS_INFERRED,
            "eval_interval", "eval_batches", "eval_batch_size", "keep_every", "seed", "spike_deviations",
            "spike_rollbacks", "spike_skip_batches", "watchdog_seconds",
        ):  # fmt: skip
            _require(getattr(self, name) >= 0, f"training.{name}", getattr(self, name), "0 or more")
        _require(
            len(self.batch_ramp) % 2 == 0 and all(n > 0 for n in self.batch_ramp), "training.batch_ramp",
            self.batch_ramp, "pairs of (steps, batch size), all above 0",
        )  # fmt: skip
        for size in (self.global_batch_size, *self.batch_ramp[1::2]):
            _require(
                size % self.accumulation_steps == 0, "training.accumulation_steps",
                self.accumulation_steps, f"a divisor of every batch size (got {size})",
            )  # fmt: skip
        _require(
            len(self.profile_steps) in (0, 2) and list(self.profile_steps) == sorted(self.profile_steps),
            "training.profile_steps", self.profile_steps, "two steps, first and last",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The device mesh; an axis of -1 takes the devices that remain."""

    # Replicas that see different rows of the batch.
    data: int = -1
    # Parts that parameters, optimizer state and batch are cut into.
    fsdp: int = 1
    # Parts that heads, feed-forward width and vocabulary are cut into.
    tensor: int = 1
    # Cut optimizer state and moving average over the replicas too (ZeRO-1): each updates its part. Parameters lie
    # in the same parts between steps and are whole on every replica during one.
    shard_optimizer: bool = True

    def __post_init__(self) -> None:
        sizes = (self.data, self.fsdp, self.tensor)
        _require(
            all(n > 0 or n == -1 for n in sizes) and sizes.count(-1) <= 1, "mesh", sizes,
            "sizes above 0, at most one of them -1",
        )  # fmt: skip


class RunConfig(Protocol):
    """Sections and properties of a config that every run of training reads."""

    SEQ_LENGTH_OPTION: str

    @property
    def model(self) -> ModelConfig: ...
    @property
    def execution(self) -> ExecutionConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def training(self) -> TrainingConfig: ...
    @property
    def mesh(self) -> MeshConfig: ...
    @property
    def parameter_layout(self) -> dict[str, object]: ...
    @property
    def stores_start_params(self) -> bool: ...


# Presets lie under the YAML files and the command line, so every value stays visible and can be overridden.
PRESETS: dict[str, dict[str, str]] = {
    "standard": {},
    "bert2018": {
        "optimizer.name": "bert_adam",
        "optimizer.schedule": "bert2018",
        "model.activation": "gelu_tanh",
    },
}
