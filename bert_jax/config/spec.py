"""Specs: descriptions of saved models without their weights (sizes, heads, pooling, tokenizer).

A recipe (``schema``) defines how a model is trained; a spec defines the resulting network, so that spec and weights
determine the outputs. This module does not import jax.
"""

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from bert_jax import registry
from bert_jax.config.architecture import FamilyName, ModelConfig
from bert_jax.config.former import current_fields
from bert_jax.config.schema import SET, AtLeast0, Beams, Limit, Positive, Range, Section, limited, require

FORMAT = 1
Description = typing.TypeVar("Description")

Problem = Literal["single_label", "multi_label", "regression"]
Pooling = Literal["cls", "mean", "max"]
Activation = Literal["identity", "tanh", "relu", "gelu", "sigmoid"]
# Hidden states that task heads read: the last, or as in Devlin et al. 2018, section 5.3.
Features = Literal[
    "last", "embeddings", "second_to_last", "weighted_last_four", "weighted_all", "weighted_with_embeddings",
    "concat_last_four",
]  # fmt: skip
Truncation = Literal["longest_first", "head", "tail", "head_tail", "key_sentences", "windows"]
TaskKind = Literal[
    "classification", "regression", "multi_label", "qa", "tagging", "joint", "choice", "sentence", "translation"
]
PairOrder = Literal["given", "both"]

# Kind of a task -> heads of a model whose outputs are its predictions (sentence: vectors of texts).
HEADS_OF: dict[TaskKind, tuple[str, ...]] = {
    "classification": ("sequence",), "regression": ("sequence",), "multi_label": ("sequence",), "qa": ("span",),
    "tagging": ("token",), "joint": ("sequence", "token"), "choice": ("choice",), "sentence": ("sentence",),
    "translation": (),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(Section, prefix="heads."):
    """Output layers of a model. An absent head has no parameters and no output."""

    # tanh(dense(first token)); input of the nsp, sequence and choice heads.
    pooler: bool = limited(
        False, *(Limit((True,), {f"heads.{name}": SET}) for name in ("nsp", "choice", "sequence_labels"))
    )
    # Masked language model, its output layer tied to the word embeddings.
    mlm: bool = False
    # Sentence pair: label 0 = B follows A, 1 = it does not.
    nsp: bool = False
    # Replaced token detection (ELECTRA): one score per token, positive for a replaced token.
    rtd: bool = False
    # Names of the classes of the sequence head, in id order; empty: no such head. A regression head has one name.
    sequence_labels: tuple[str, ...] = ()
    # Meaning of the sequence head's logits: softmax, independent sigmoids, or values.
    problem: Problem = "single_label"
    # Function of the value that a regression head predicts (the score of a cross-encoder); empty: not stated, the
    # value itself.
    activation: Literal["", Activation] = ""
    # The logits of the sequence head are added over both orders of a pair of texts.
    both_orders: bool = False
    # Encoder layers (1 = the first) with a pooler and a sequence head of their own, in ascending order: a
    # prediction may stop there.
    exits: tuple[int, ...] = ()
    # Names of the tags of the token head, in id order; empty: no such head.
    token_labels: tuple[str, ...] = ()
    # Start and end of an answer.
    span: bool = False
    # One score per choice.
    choice: bool = False
    # CRF transitions between the tags of the token head, which are then decoded jointly.
    crf: bool = limited(False, Limit((False,), {"heads.token_labels": ((),)}))
    # Names of the classes of a pair of texts, predicted from their embeddings (u, v, |u - v|); empty: no such head.
    # pair_hidden: width of a hidden layer of this head; 0: none.
    pair_labels: tuple[str, ...] = ()
    pair_hidden: AtLeast0[int] = 0
    # Input of sequence, token, span and choice heads; width of a BiLSTM before the token head (0: none).
    features: Features = "last"
    bilstm: AtLeast0[int] = 0
    # Dropout before the task heads; None: model.hidden_dropout, but none before the head of pair_labels.
    dropout: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sequence_labels", "token_labels", "pair_labels"):
            labels = getattr(self, name)
            self._require(name, len(set(labels)) == len(labels), "each label once")
        outputs = len(self.sequence_labels)
        self._require(
            "problem", self.problem != "regression" or outputs <= 1, f"another one with {outputs} outputs"
        )
        fits = outputs and self.problem == "single_label" and self.features == "last"
        allowed = "none without a sequence head of single labels on the last hidden state"
        self._require("exits", fits or not self.exits, allowed)
        self._require("exits", list(self.exits) == sorted({*self.exits}), "different layers in ascending order")

    def present(self) -> tuple[str, ...]:
        """Return the names of the present heads, in the order pooler, mlm, nsp, rtd, sequence, token, span,
        choice."""
        flags = {
            "pooler": self.pooler, "mlm": self.mlm, "nsp": self.nsp, "rtd": self.rtd,
            "sequence": bool(self.sequence_labels), "token": bool(self.token_labels), "span": self.span,
            "choice": self.choice,
        }  # fmt: skip
        return tuple(name for name, is_present in flags.items() if is_present)

    def output_sizes(self) -> dict[str, int]:
        """Return the number of outputs of each present head that is one dense layer (nsp, sequence, token, span,
        choice)."""
        sizes = {
            "nsp": 2 * self.nsp, "sequence": len(self.sequence_labels), "token": len(self.token_labels),
            "span": 2 * self.span, "choice": 1 * self.choice,
        }  # fmt: skip
        return {name: size for name, size in sizes.items() if size}

    def unread_fields(self) -> tuple[str, ...]:
        """Return prefixes of the fields of ``ModelConfig``, and of the parts with biases, that only absent heads
        read."""
        unread = () if self.mlm else ("mlm_", "tied_output")
        unread = unread if self.span else (*unread, "span_transform")
        return unread if self.pooler else (*unread, "pool", "token_pooler", "sequence_head")

    def check_features(self, model: ModelConfig) -> None:
        """Raise ``ValueError`` if ``model`` has fewer layers than the features or the exits use."""
        allowed = f"none with model.encoder {model.encoder}"
        self._require("exits", model.has_attention or not self.exits, allowed)
        fits = all(1 <= layer < model.num_layers for layer in self.exits)
        self._require("exits", fits, f"layers below the last, from 1 to {model.num_layers - 1}")
        fits = model.num_layers >= 4 or not self.features.endswith("last_four")
        require(fits, "features.layers", self.features, f"another value with model.num_layers {model.num_layers}")

    def feature_width(self, model: ModelConfig) -> int:
        """Return the width of the features of a token."""
        return model.hidden_size * (4 if self.features == "concat_last_four" else 1)


def pretraining_heads(has_nsp: bool) -> HeadsConfig:
    """Return the heads of pretraining: MLM head and, if ``has_nsp`` is True, pooler and sentence-pair head."""
    return HeadsConfig(mlm=True, nsp=has_nsp, pooler=has_nsp)


@dataclass(frozen=True, kw_only=True)
class SentenceModule:
    """One step after pooling: division by the Euclidean norm, or a dense layer with activation."""

    kind: Literal["normalize", "dense"]
    features: int = 0
    bias: bool = True
    activation: Activation = "identity"


@dataclass(frozen=True, kw_only=True)
class SentenceConfig:
    """Reduction of token outputs to one vector per text (Sentence-BERT; Reimers and Gurevych 2019)."""

    # Poolings whose results are concatenated in this order.
    pooling: tuple[Pooling, ...] = ("mean",)
    modules: tuple[SentenceModule, ...] = ()
    # (name, text to insert before the input).
    prompts: tuple[tuple[str, str], ...] = ()
    # Name of the prompt that is used by default; empty: none.
    default_prompt: str = ""
    # cosine, dot, euclidean or manhattan; empty: unknown.
    similarity: str = ""
    # Include the tokens of the prompt in the pooling.
    include_prompt: bool = True

    def vector_width(self, hidden_size: int) -> int:
        """Return the width of a text vector, for token outputs of width ``hidden_size``."""
        dense = [module.features for module in self.modules if module.kind == "dense"]
        return dense[-1] if dense else hidden_size * len(self.pooling)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Section, prefix="tokenizer."):
    """Name of the tokenizer file, which is in the folder of the weights, and settings of the tokenizer."""

    # vocab.txt (WordPiece), tokenizer.model (SentencePiece) or tokenizer.json (byte-level BPE).
    file: str = "vocab.txt"
    # WordPiece only: lower-case the text; strip accents (None: as lower_case); treat every CJK character as a word.
    lower_case: bool = True
    strip_accents: bool | None = None
    split_cjk: bool = True
    # WordPiece with split_cjk: the longest words of the vocabulary are found in runs of CJK characters.
    cjk_words: bool = False
    # Maximum number of tokens in an input, special tokens included; 0: the number of positions of the model.
    max_length: AtLeast0[int] = 0
    # Side at which longer texts are truncated.
    truncation_side: Literal["right", "left"] = "right"
    # The second text of a pair has a token type of its own; False: all token types are 0.
    pair_types: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # A spec may be untrusted: its tokenizer file must be in the same folder.
        fits = not {"/", "\\"} & {*self.file} and self.file.endswith((".txt", ".model", ".json"))
        self._require("file", fits, "the name of a .txt, .model or .json file")


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Section, prefix="task."):
    """Settings by which texts become inputs of a fine-tuned model, and its outputs predictions: options of
    fine-tuning, with their names, defaults and meanings. Every command that predicts reads them."""

    kind: TaskKind
    # Longest input in tokens, special tokens included.
    max_length: Annotated[int, Range("4 or more", lambda value: value >= 4)]
    truncation: Truncation = "longest_first"
    head_share: Annotated[float, Range("above 0, below 1", lambda value: 0 < value < 1)] = 0.25
    window_overlap: AtLeast0[int] = 32
    max_windows: AtLeast0[int] = 0
    pair_order: PairOrder = "given"
    # Classes (sentence: of its classifier of pairs) in id order, as in the files, and their names in exports; no
    # names: as in the files.
    labels: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    crf: bool = False
    document_context: bool = False
    doc_stride: Positive[int] = 128
    max_query_length: Positive[int] = 64
    max_answer_length: Positive[int] = 30
    n_best: Positive[int] = 20
    no_answer: bool = False
    null_threshold: Annotated[float, Range("a finite number", math.isfinite)] = 0.0
    matryoshka: tuple[int, ...] = ()
    # Translation: hypotheses of the beam search, and the power of the length by which it divides their scores.
    beams: Beams = 1
    length_penalty: AtLeast0[float] = 1.0
    # qa.scoring and tagging.scoring: how predictions are compared with the right answers.
    answer_scoring: Literal["english", "chinese"] = "english"
    tag_scoring: Literal["conlleval", "strict"] = "conlleval"
    # The second text of a pair has another token type than the first.
    pair_types: bool = True
    # File name of a user-defined task, which no command runs; empty: none.
    module: str = ""

    def __post_init__(self) -> None:
        # Settings may be untrusted: the folder of a stranger's model.
        super().__post_init__()
        one_each = len(self.label_names) in (0, len(self.labels))
        self._require("label_names", one_each, f"one for each of the {len(self.labels)} labels")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Description of a saved model without its weights: sizes, heads, pooling and tokenizer."""

    model: ModelConfig
    heads: HeadsConfig
    sentence: SentenceConfig | None = None
    tokenizer: TokenizerConfig | None = None
    # Names that Hugging Face uses for the parts of the architecture.
    family: FamilyName = "bert"
    # Settings of the task on which the model was fine-tuned; None: not stated.
    task: TaskSettings | None = None

    def __post_init__(self) -> None:
        self.heads.check_features(self.model)
        length, most = 0 if self.task is None else self.task.max_length, self.model.max_length
        most = most if self.model.position_embeddings == "learned" else 1 << 20  # the others have no table
        require(length <= most, "task.max_length", length, f"at most {most} positions")

    @property
    def skips_padding(self) -> bool:
        """True if positions count only the tokens that are not padding (RoBERTa and families after it)."""
        return self.model.position_offset > 0 and self.family != "bert"

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in an input, special tokens included."""
        positions = self.model.max_length
        return min(positions, self.tokenizer.max_length or positions) if self.tokenizer else positions

    @property
    def task_length(self) -> int:
        """Maximum number of tokens in an input of the task on which the model was fine-tuned; ``max_length`` if
        this task is not stated."""
        return self.task.max_length if self.task else self.max_length

    def settings_of(self, kind: TaskKind) -> TaskSettings:
        """Return the settings of a task of ``kind`` with this model: those on which it was fine-tuned or, if they
        are not stated, defaults. Classes and tags have the names of the heads."""
        heads, own = self.heads, self.task
        if own is None:
            order: PairOrder = "both" if heads.both_orders else "given"
            own = TaskSettings(kind=kind, max_length=self.max_length, pair_order=order)
        named = heads.pair_labels if kind == "sentence" else heads.sequence_labels
        if kind != "choice" and named != (own.label_names or own.labels):
            # The classes were renamed, or the settings do not state them.
            own = dataclasses.replace(own, labels=named, label_names=())
        types = self.model.type_vocab_size > 1
        return dataclasses.replace(own, kind=kind, tags=heads.token_labels, crf=heads.crf, pair_types=types)


def spec_to_json(spec: ModelSpec) -> str:
    """Return JSON text that :func:`spec_from_json` reads back to an equal spec."""
    values = {"format": FORMAT, **dataclasses.asdict(spec)}
    if spec.task is None:  # older versions read the file too
        del values["task"]
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def spec_from_json(text: str | bytes, name: str) -> ModelSpec:
    """Parse the text of ``model.json``; ``name`` appears in messages. Raises ``ValueError`` for invalid JSON,
    another format, an unknown or missing key, and a value that has the wrong type or is not allowed.
    """
    return described(ModelSpec, text, name)


def described(kind: type[Description], text: str | bytes, name: str) -> Description:
    """Parse a JSON object with ``format`` and the fields of ``kind``, a class of this module or the class of one of
    its fields. Raises ``ValueError`` as :func:`spec_from_json` does."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not JSON ({error})") from None
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise ValueError(
            f'{name}: must be an object with "format": {FORMAT}, as in the model.json of a saved model'
        )
    return typing.cast(Description, _build(kind, values, name))


def _build(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: {value!r} is not an object")
        if hint is ModelConfig:
            try:
                registry.check("encoders", str(value.get("encoder", "transformer")), "model.encoder")
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            value = current_fields(value, typed=lambda kind, item, name: _build(kind, item, f"{where}: {name}"))
            hint = ModelConfig.class_for(value)
        every = typing.get_type_hints(hint)
        hints = {one.name: every[one.name] for one in dataclasses.fields(hint)}
        unknown = sorted(set(value) - set(hints))
        if unknown:
            raise ValueError(f"{where}: unknown key {', '.join(unknown)}; allowed: {', '.join(hints)}")
        built = {key: _build(hints[key], item, f"{where}: {key}") for key, item in value.items()}
        try:
            return typing.cast(type, hint)(**built)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (inner,) = (option for option in typing.get_args(hint) if option is not type(None))
        return _build(inner, value, where)
    if origin is Literal:
        if value not in typing.get_args(hint):
            raise ValueError(f"{where}: {value!r} is not allowed; allowed: {', '.join(typing.get_args(hint))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: {value!r} is not a list")
        inner_types = typing.get_args(hint)
        if inner_types[-1] is Ellipsis:
            inner_types = inner_types[:1] * len(value)
        if len(value) != len(inner_types):
            raise ValueError(f"{where}: requires exactly {len(inner_types)} items, got {len(value)}")
        return tuple(_build(inner, item, where) for inner, item in zip(inner_types, value, strict=True))
    if type(value) is int and not -(1 << 63) < value < 1 << 63:
        raise ValueError(f"{where}: a number of {len(str(value))} digits is not allowed")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{where}: {value!r} is not of type {hint.__name__}")
    return value
