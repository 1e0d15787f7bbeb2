"""The start of a run: the plan, which is made before any file is written, and the first state."""

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.config.loader import Setting
from bert_jax.io.storage import Location
from bert_jax.tokenization import Tokenizer, build_tokenizer

if TYPE_CHECKING:
    import numpy as np

    from bert_jax.interop.model_bundle import ModelBundle
    from bert_jax.interop.taken_over import Kept
    from bert_jax.training.job import Job
    from bert_jax.training.launch import Launch
    from bert_jax.training.programs import TrainPrograms
    from bert_jax.training.spikes import RollBack
    from bert_jax.training.start import FirstState

# Flags that extend the initial model, in pretraining only.
EXTENSIONS = ("add_words", "vocab_slots", "extend_positions")
_PRETRAINING_HEADS = ("mlm_head", "nsp_head", "rtd_head")
# Layers between the encoder and the task head.
_TASK_LAYERS = ("feature_mix", "bilstm")


def _nothing_kept() -> "Kept":
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a run: from random parameters, another model, an earlier phase or its own checkpoint."""

    # Options that the initial model or warm_start.yaml fixes; they replace those of the command line.
    settings: tuple[Setting, ...] = ()
    # Lines for the log.
    messages: tuple[str, ...] = ()
    # Initial model, extended to the vocabulary and positions of the run. None: there is none, or
    # :meth:`with_parameters` has taken its parameters.
    weights: "ModelBundle | None" = None
    # Parameters at step 0, canonical name -> float32 array; those that are missing are randomly initialized.
    # :meth:`first_state` empties the dict, so that the memory is free during the run.
    params: "dict[str, np.ndarray]" = field(default_factory=dict)
    # Text of WORKDIR/warm_start.yaml; empty: the file is not changed.
    record: str = ""
    # Absolute path or URL of the initial model; empty: the parameters of step 0 were randomly initialized.
    source: str = ""
    # True if the run must resume from a checkpoint in its workdir.
    resumes: bool = False
    # Workdir of an earlier phase, whose last state this phase starts from.
    continue_from: Location | None = None
    # Method to extend the position table of that state if the phase has more positions; empty: none.
    extend_positions: Literal["", "tile", "interpolate"] = ""
    # Allow a resumed run to change execution.prng.
    allow_numeric_change: bool = False
    # Pretraining: path (or URL) and content of the vocabulary file to write; None: the file exists.
    vocabulary: tuple[str, bytes] | None = None
    # Other facts that the run keeps from the initial model (see ``taken_over``).
    kept: "Kept" = field(default_factory=_nothing_kept)
    # Fine-tuning: settings and file content of the tokenizer.
    tokenizer_config: TokenizerConfig = TokenizerConfig()  # noqa: RUF009 (frozen)
    tokenizer_content: bytes = b""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a fine-tuning run."""
        return build_tokenizer(self.tokenizer_config, self.tokenizer_content, self.source or "data.vocab")

    def with_parameters(
        self, spec: ModelSpec, *, redrawn: tuple[str, ...] = (), redraw_head: bool = False
    ) -> "Start":
        """Return the start with those parameters of the initial model that a model with ``spec`` can use. All other
        parameters are randomly initialized later.

        A task head and its CRF are taken only if both models have the same classes. Parameters whose names begin
        with a prefix in ``redrawn`` are not taken. If ``redraw_head`` is True, neither the task head nor the layers
        between the encoder and the head are taken.
        """
        messages = [*self.messages]
        kept = {}
        if self.weights is not None:
            from bert_jax.interop.model_bundle import parameter_shapes

            wanted, heads = parameter_shapes(spec), self.weights.spec.heads
            for name, shape in wanted.items():
                part, values = name.partition("/")[0], self.weights.params.get(name)
                is_of_classes = part == "crf" or (part.endswith("_head") and part not in _PRETRAINING_HEADS)
                if values is None or tuple(values.shape) != shape or name.startswith(redrawn):
                    continue
                if redraw_head and (is_of_classes or part in _TASK_LAYERS):
                    continue
                if not is_of_classes or _has_classes_of(heads, spec.heads):
                    kept[name] = values
            drawn = dict.fromkeys(_part(name) for name in wanted if name not in kept)
            unused = dict.fromkeys(_part(name) for name in self.weights.params if name not in wanted)
            messages += [f"randomly initialized: {', '.join(drawn)}"] if drawn else []
            messages += [f"not used: {', '.join(unused)}"] if unused else []
        return dataclasses.replace(self, weights=None, params=kept, messages=tuple(messages))

    def first_state(
        self, job: "Job", programs: "TrainPrograms", launch: "Launch", rollback: "RollBack | None",
        report: Callable[[str], None],
    ) -> "FirstState":  # fmt: skip
        """Return the state from which the run trains; see :func:`bert_jax.start.state.first_state`."""
        from bert_jax.start.state import first_state  # imports JAX, which a plan does not need

        return first_state(self, job, programs, launch, rollback, report)


def _has_classes_of(source: HeadsConfig, own: HeadsConfig) -> bool:
    names = ("sequence_labels", "token_labels", "pair_labels", "problem")
    return all(getattr(source, name) == getattr(own, name) for name in names)


def _part(name: str) -> str:
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "encoder" else parts[0]
