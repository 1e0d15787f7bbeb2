"""Options of the systems before BERT: of their encoders (section ``model``) and objectives (section ``objective``).

This module does not import jax.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from bert_jax.config.architecture import Biased, ModelConfig
from bert_jax.config.objective import ObjectiveConfig
from bert_jax.config.schema import AtLeast0, Layers, Positive, Probability

# Fields of the Transformer that no other encoder reads.
_TRANSFORMER_ONLY = {
    "num_attention_heads", "layer_heads", "intermediate_size", "layer_units", "activation", "feed_forward",
    "norm_position", "final_norm", "rotary_base", "rotary_window_base", "relative_buckets", "relative_max_distance",
    "attention", "separator_id", "random_blocks",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WordVectorsConfig(ModelConfig):
    """Options of ``model.encoder none``, in which the output of a token is its embedding.

    The sections of the other encoders extend this section.
    """

    TITLE: ClassVar[str] = "Word vectors"
    TAG: ClassVar[str] = "word-vectors"
    FINETUNING_RATE: ClassVar[float] = 9e-3
    FITS_MUON: ClassVar[bool] = False
    LOCKS_DROPOUT: ClassVar[bool] = True

    def _check_encoder(self) -> None:
        what = f"with encoder {self.encoder}"
        self._check_layers()
        self._require("word_rank", not self.word_rank, f"0 {what}")
        allowed = f"learned, sinusoidal or none {what}, which has no attention"
        self._require("position_embeddings", self.position_embeddings != "rotary", allowed)
        self._require("relative_positions", self.relative_positions == "none", f"none {what}")
        for name in ("attention_windows", "global_tokens", "attention_block", "shared_layers"):
            value = getattr(self, name)
            self._require(name, not value, f"{type(value)()!r} {what}")
        wanted = self.input_width
        self._require("embedding_size", self.embedding_width == wanted, f"{wanted:g} (of the encoder) {what}")

    def _check_layers(self) -> None:
        self._require("num_layers", self.num_layers == 0, "0 with encoder none")

    @property
    def input_width(self) -> float:
        """Width of the embeddings that the encoder reads."""
        return self.hidden_size

    @property
    def unread_fields(self) -> set[str]:
        unread = set(_TRANSFORMER_ONLY)
        unread |= {"max_position_embeddings"} if self.position_embeddings == "none" else set()
        return unread | ({"norm", "norm_epsilon"} if not self.has_embedding_norm else set())

    @property
    def biased_parts(self) -> tuple[Biased, ...]:
        absent = {"qkv", "attention_output", "feed_forward"} | (set() if self.has_embedding_norm else {"norm"})
        return tuple(part for part in super().biased_parts if part not in absent)

    @property
    def table_sizes(self) -> list[str]:
        return [name for name in super().table_sizes if name not in ("type_vocab_size", "intermediate_size")]

    @property
    def layer_counts(self) -> list[str]:
        return []


@dataclass(frozen=True, kw_only=True)
class LayersConfig(WordVectorsConfig):
    """Options of the encoders with layers."""

    # Character convolutions that compute the embedding of a token: pairs of a width in characters and a number of
    # filters, such as 1 32 2 32 3 64 (ELMo); empty: an embedding table.
    character_filters: tuple[int, ...] = ()
    # Width of the character embeddings.
    character_size: Positive[int] = 16
    # Maximum number of bytes of a token, including the marks of its beginning and end.
    max_characters: Positive[int] = 50
    # Number of highway layers (Srivastava et al. 2015) after the character convolutions.
    highway_layers: Layers = 2
    # Activation of the character convolutions.
    character_activation: Literal["relu", "tanh"] = "relu"
    # Probability with which the embedding of a vocabulary entry is 0 in the whole batch (Merity et al. 2018,
    # section 4.3).
    word_dropout: Probability = 0.0

    def _check_encoder(self) -> None:
        super()._check_encoder()
        is_tied = self.tied_output and self.is_causal and self.embedding_width != self.hidden_size
        allowed = f"false with encoder {self.encoder} and embeddings of another width"
        self._require("tied_output", not is_tied, allowed)
        filters = self.character_filters
        self._require("character_filters", len(filters) % 2 == 0 and all(n > 0 for n in filters), "pairs above 0")
        self._require("max_characters", self.max_characters >= 3, "3 or more")
        allowed = f"widths up to model.max_characters ({self.max_characters})"
        self._require("character_filters", max(filters[::2], default=0) <= self.max_characters, allowed)

    def _check_layers(self) -> None:
        self._require("num_layers", self.num_layers > 0, "1 or more")

    @property
    def is_causal(self) -> bool:
        return True

    @property
    def input_width(self) -> float:
        return self.embedding_width

    @property
    def inner_widths(self) -> tuple[int, ...]:
        return self.embedding_width, self.hidden_size

    @property
    def spells_words(self) -> bool:
        return bool(self.character_filters)

    @property
    def whole_word_dropout(self) -> float:
        return self.word_dropout

    @property
    def unread_fields(self) -> set[str]:
        characters = {"character_size", "max_characters", "highway_layers", "character_activation"}
        return super().unread_fields | {"word_dropout"} | (set() if self.spells_words else characters)

    @property
    def layer_counts(self) -> list[str]:
        return ["num_layers", *(["highway_layers"] if self.spells_words else [])]


@dataclass(frozen=True, kw_only=True)
class NnlmConfig(LayersConfig):
    """Options of ``model.encoder nnlm`` (Bengio et al. 2003)."""

    TITLE: ClassVar[str] = "A neural language model (NNLM)"
    TAG: ClassVar[str] = "nnlm"
    FITS_MUON: ClassVar[bool] = True

    # Number of tokens that the layer reads: the last token and those before it (n - 1 in the paper).
    context_size: Positive[int] = 4

    def _check_layers(self) -> None:
        self._require("num_layers", self.num_layers == 1, "1 with encoder nnlm")

    @property
    def table_sizes(self) -> list[str]:
        return [*super().table_sizes, "context_size"]


@dataclass(frozen=True, kw_only=True)
class LstmConfig(LayersConfig):
    """Options of ``model.encoder lstm`` (AWD-LSTM; Merity et al. 2018)."""

    TITLE: ClassVar[str] = "An LSTM"
    TAG: ClassVar[str] = "lstm"
    HAS_STATE: ClassVar[bool] = True

    # Number of cells in a layer; 0: the number of outputs of the layer. With encoder bidirectional_lstm, a
    # projection reduces the cells to the outputs (Sak et al. 2014). With encoder lstm, every layer except the last
    # has this width.
    lstm_cells: AtLeast0[int] = 0
    # Maximum absolute value of a cell (ELMo: 3); 0: no limit.
    lstm_cell_clip: AtLeast0[float] = 0.0
    # Maximum absolute value of a projected output (ELMo: 3); 0: no limit.
    lstm_projection_clip: AtLeast0[float] = 0.0
    # Add the input of each layer except the first to its output (ELMo).
    lstm_skip: bool = False
    # Dropout rate for the weights between the states of consecutive tokens (Merity et al. 2018, section 2).
    lstm_weight_dropout: Probability = 0.0

    def _check_encoder(self) -> None:
        super()._check_encoder()
        equal = self.lstm_cells in (0, self.hidden_size) and self.embedding_width == self.hidden_size
        allowed = "false with layers of different widths"
        self._require("lstm_skip", equal or not self.lstm_skip or not self.is_causal, allowed)

    @property
    def inner_widths(self) -> tuple[int, ...]:
        inner = [self.lstm_cells or self.hidden_size] * (self.num_layers - 1)
        return self.embedding_width, *inner, self.hidden_size

    @property
    def unread_fields(self) -> set[str]:
        return super().unread_fields | {"lstm_weight_dropout"}

    @property
    def table_sizes(self) -> list[str]:
        return [*super().table_sizes, "lstm_cells"]


@dataclass(frozen=True, kw_only=True)
class BidirectionalLstmConfig(LstmConfig):
    """Options of ``model.encoder bidirectional_lstm`` (ELMo; Peters et al. 2018).

    The outputs of two LSTMs are concatenated to ``hidden_size`` values.
    """

    TITLE: ClassVar[str] = "A bidirectional LSTM (ELMo)"
    TAG: ClassVar[str] = "elmo"

    @property
    def is_causal(self) -> bool:
        return False

    @property
    def directions(self) -> int:
        return 2

    @property
    def input_width(self) -> float:
        return self.hidden_size / 2

    @property
    def inner_widths(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class BidirectionalLmConfig(ObjectiveConfig):
    """Options of ``objective.name bidirectional_lm``."""

    TITLE: ClassVar[str] = (
        "predicts each next and each previous token (ELMo: Peters et al. 2018); requires model.encoder "
        "bidirectional_lstm"
    )

    @property
    def carries_state(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class GloveConfig(ObjectiveConfig):
    """Options of ``objective.name glove``."""

    TITLE: ClassVar[str] = (
        "fits the co-occurrence counts of tokens (Pennington et al. 2014); requires model.encoder none"
    )

    # Maximum distance, in tokens, between a word and its context.
    window: Positive[int] = 5
    # Co-occurrence count at and above which a pair of words has weight 1 in the loss.
    largest_count: Positive[float] = 100.0
    # Power in the weight of a smaller count x, which is (x / objective.largest_count) ** objective.count_power.
    count_power: Positive[float] = 0.75


@dataclass(frozen=True, kw_only=True)
class Word2VecConfig(ObjectiveConfig):
    """Options of ``objective.name skip_gram`` and, with another title, ``cbow``."""

    TITLE: ClassVar[str] = (
        "predicts the surrounding tokens from a token (word2vec: Mikolov et al. 2013); requires model.encoder none"
    )

    # Maximum distance, in tokens, between a word and its context; for each word, a distance up to this maximum is
    # sampled.
    window: Positive[int] = 5
    # Number of negative samples per pair (Mikolov et al. 2013b: 5 to 20 for small texts).
    negatives: Positive[int] = 5
    # Occurrences of a word are dropped at random if its share of the text is above this number; 0: none are
    # dropped.
    subsample: AtLeast0[float] = 1e-3
    # A word is sampled as a negative with a probability that is proportional to its count raised to this power.
    noise_power: AtLeast0[float] = 0.75


@dataclass(frozen=True, kw_only=True)
class CbowConfig(Word2VecConfig):
    """Options of ``objective.name cbow``."""

    TITLE: ClassVar[str] = (
        "predicts a token from the surrounding tokens (word2vec: Mikolov et al. 2013); requires model.encoder none"
    )
