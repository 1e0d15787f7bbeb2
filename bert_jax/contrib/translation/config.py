"""Options of translation: of the network (section ``model``) and of its training and search (section
``translation``). This module does not import jax."""

import dataclasses
import functools
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from bert_jax.config.architecture import ModelConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.schema import AtLeast0, Beams, Probability, Section, only, require
from bert_jax.config.spec import TaskSettings
from bert_jax.config.task import KIND

_COMMON = tuple(one.name for one in fields(ModelConfig))
# Options that the two parts of the network do not have, or that follow from the part.
_OF_PARTS = ("encoder", "attention")
# Options of the decoder that must have these values: its layers are whole and equal.
_PLAIN: dict[str, Any] = {
    "relative_positions": "none", "attention_windows": (), "attention_block": 0, "global_tokens": 0,
    "shared_layers": False, "layer_heads": (), "layer_units": (), "word_rank": 0,
}  # fmt: skip
# Options that must be equal in both parts of a model that shares them.
_SHARED = (
    "hidden_size", "num_layers", "num_attention_heads", "intermediate_size", "embedding_size",
    "max_position_embeddings", "position_offset", "type_vocab_size", "vocab_size", "position_embeddings",
    "norm", "norm_position", "feed_forward", "without_bias", "embedding_norm", "final_norm",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """Options of ``model.encoder encoder_decoder`` (Vaswani et al. 2017; Rothe et al. 2020).

    They are the options of the encoder, and those of the decoder that differ from them.
    """

    TITLE: ClassVar[str] = "An encoder and a decoder with cross-attention, for translation"
    TAG: ClassVar[str] = "encoder-decoder"

    # Options of the decoder whose values differ from those of the encoder, as NAME=VALUE in the order in which
    # this help lists them, such as num_layers=2 activation=relu. The attention of the decoder is causal.
    decoder: tuple[str, ...] = ()
    # Use the parameters of the encoder for the decoder too, except for cross-attention and the output layer (Rothe
    # et al. 2020, BERTShare).
    shared: bool = False
    # Vocabulary size of the encoder if the decoder has a larger vocabulary; 0: vocab_size.
    source_vocab_size: AtLeast0[int] = 0

    @functools.cached_property
    def source(self) -> ModelConfig:
        """The network of the encoder."""
        values = {name: getattr(self, name) for name in _COMMON if name != "encoder"}
        return ModelConfig(**values | {"vocab_size": self.source_vocab_size or self.vocab_size})

    @functools.cached_property
    def target(self) -> ModelConfig:
        """The network of the decoder, without its cross-attention."""
        values: dict[str, Any] = {"vocab_size": self.vocab_size, "attention": "causal"}
        values |= dict(map(self._parsed, self.decoder))
        return dataclasses.replace(self.source, **values)

    def _parsed(self, item: str) -> tuple[str, Any]:
        name, equals, text = item.partition("=")
        allowed = f"NAME=VALUE, with an option of the section model, such as num_layers={self.num_layers}"
        known = name in _COMMON and name not in _OF_PARTS
        require(bool(known and equals), "model.decoder", item, allowed)
        try:
            return name, _value(getattr(self, name), text)
        except ValueError:
            kind = type(getattr(self, name)).__name__
            raise ValueError(f"model.decoder: {item!r} is not allowed; allowed: a value of type {kind}") from None

    def _check_encoder(self) -> None:
        super()._check_encoder()
        source, target = self.source, self.target  # which check their own values
        self._require("attention", self.attention == "bidirectional", "bidirectional, since the decoder is causal")
        for name, value in _PLAIN.items():
            found = getattr(target, name)
            require(found == value, f"model.decoder: {name}", found, f"{value!r} in a decoder")
        allowed = "post or pre in a decoder"
        require(target.norm_position != "pre_skip_first", "model.norm_position", target.norm_position, allowed)
        sizes = {source.vocab_size, target.vocab_size}
        self._require("vocab_size", self.vocab_size == max(sizes), "the larger one of both vocabularies")
        listed = differences(source, target)
        self._require("decoder", self.decoder == listed, f"{' '.join(listed) or 'nothing'} for this decoder")
        other = [name for name in _SHARED if getattr(source, name) != getattr(target, name)]
        self._require("shared", not (self.shared and other), f"false with another {', '.join(other)}")

    @property
    def max_length(self) -> int:
        return min(self.source.max_length, self.target.max_length)

    @property
    def layer_counts(self) -> list[str]:
        return ["num_layers"]


def differences(source: ModelConfig, target: ModelConfig) -> tuple[str, ...]:
    """Return ``EncoderDecoderConfig.decoder`` for the networks of an encoder and of a decoder."""
    larger = max(source.vocab_size, target.vocab_size)
    base = dataclasses.replace(source, vocab_size=larger)
    names = [name for name in _COMMON if name not in _OF_PARTS and getattr(base, name) != getattr(target, name)]
    return tuple(f"{name}={_text(getattr(target, name))}" for name in names)


def joined(source: ModelConfig, target: ModelConfig, shared: bool = False) -> EncoderDecoderConfig:
    """Return the network with the encoder ``source`` and the decoder ``target``; their attention is set. Raises
    ``ValueError`` for networks that cannot be joined."""
    larger = max(source.vocab_size, target.vocab_size)
    values = {name: getattr(source, name) for name in _COMMON}
    values |= {"encoder": "encoder_decoder", "attention": "bidirectional", "vocab_size": larger, "shared": shared}
    smaller = source.vocab_size if source.vocab_size < larger else 0
    decoder = differences(source, target)
    return EncoderDecoderConfig(**values, decoder=decoder, source_vocab_size=smaller)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(like: Any, text: str) -> Any:
    """Return the value of ``text``, of the type of ``like``. Raises ``ValueError`` if it is of another type."""
    if isinstance(like, bool):
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    if isinstance(like, tuple):
        parts = text.split(",") if text else []
        return tuple(int(part) if part.lstrip("-").isdecimal() else part for part in parts)
    return type(like)(text)


@dataclass(frozen=True, kw_only=True)
class TranslationConfig(Section, prefix="translation."):
    """Training of a translation model, and its beam search."""

    # Label smoothing: share of the target probability that is spread over the whole vocabulary.
    label_smoothing: Probability = 0.1
    # Number of hypotheses in the beam search of evaluations and predictions; 1: greedy search.
    beams: Beams = 1
    # The score of a hypothesis is divided by length ** length_penalty.
    length_penalty: AtLeast0[float] = 1.0


@dataclass(frozen=True, kw_only=True)
class TranslatedConfig(FinetuneConfig):
    """Options of fine-tuning with those of translation."""

    translation: TranslationConfig = only(TranslationConfig(), {KIND: ("translation",)})

    def __post_init__(self) -> None:
        super().__post_init__()
        is_network = isinstance(self.model, EncoderDecoderConfig)
        if self.task.kind != "translation":
            allowed = "another one with task.kind " + self.task.kind
            require(not is_network, "model.encoder", self.model.encoder, allowed)
            return
        require(is_network, "model.encoder", self.model.encoder, _NEEDS)
        for key, default in _UNSUPPORTED.items():
            section, _, name = key.partition(".")
            value = getattr(getattr(self, section), name)
            require(value == default, key, value, f"{default!r} with task.kind translation")

    @property
    def settings(self) -> TaskSettings:
        """The settings, with those of the search."""
        found, search = super().settings, self.translation
        return dataclasses.replace(found, beams=search.beams, length_penalty=search.length_penalty)


_NEEDS = (
    "encoder_decoder with task.kind translation: set it to start from random weights, or add a decoder to the "
    "model of --init_from with --decoder_from"
)
# Options that name layers or heads of an encoder alone -> the only value with a decoder.
_UNSUPPORTED: dict[str, Any] = {
    "features.frozen_encoder": False, "regularization.reinit_layers": 0, "optimizer.layer_decay": 1.0,
    "optimizer.frozen": (), "optimizer.unfreeze_every": 0.0, "loss.mlm_weight": 0.0, "loss.lm_weight": 0.0,
    "execution.quantization": "none",
}  # fmt: skip


def options_of(config: FinetuneConfig) -> TranslationConfig:
    """Return the section ``translation`` of ``config``, which the registered parts extend."""
    assert isinstance(config, TranslatedConfig)
    return config.translation
