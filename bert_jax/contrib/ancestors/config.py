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
    """Section of ``encoder`` none: the output of a token is its embedding. The other encoders extend it."""

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

    # Widths of the character convolutions from which the embedding of a token is computed, each followed by its
    # number of filters, as 1 32 2 32 3 64 (ELMo); empty: a table of embeddings.
    character_filters: tuple[int, ...] = ()
    # Width of the embedding of a character.
    character_size: Positive[int] = 16
    # Most bytes of a token, its begin and end included.
    max_characters: Positive[int] = 50
    # Highway layers (Srivastava et al. 2015) after the convolutions.
    highway_layers: Layers = 2
    # Activation of the convolutions.
    character_activation: Literal["relu", "tanh"] = "relu"
    # Dropout of words: their embeddings are 0 in the whole batch (Merity et al. 2018, section 4.3).
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
    """Section of ``encoder`` nnlm (Bengio et al. 2003)."""

    TITLE: ClassVar[str] = "A neural language model (NNLM)"
    TAG: ClassVar[str] = "nnlm"
    FITS_MUON: ClassVar[bool] = True

    # Tokens that the layer reads: the last one and those before it (the paper's n - 1).
    context_size: Positive[int] = 4

    def _check_layers(self) -> None:
        self._require("num_layers", self.num_layers == 1, "1 with encoder nnlm")

    @property
    def table_sizes(self) -> list[str]:
        return [*super().table_sizes, "context_size"]


@dataclass(frozen=True, kw_only=True)
class LstmConfig(LayersConfig):
    """Section of ``encoder`` lstm (AWD-LSTM of Merity et al. 2018)."""

    TITLE: ClassVar[str] = "An LSTM"
    TAG: ClassVar[str] = "lstm"
    HAS_STATE: ClassVar[bool] = True

    # Cells of a layer; 0: as many as it has outputs. With encoder bidirectional_lstm, a projection reduces them to
    # the outputs (Sak et al. 2014); with lstm, every layer but the last has this width.
    lstm_cells: AtLeast0[int] = 0
    # Largest absolute value of the cells (ELMo: 3); 0: no limit.
    lstm_cell_clip: AtLeast0[float] = 0.0
    # Largest absolute value of the projected outputs (ELMo: 3); 0: no limit.
    lstm_projection_clip: AtLeast0[float] = 0.0
    # The output of each layer but the first is added to its input (ELMo).
    lstm_skip: bool = False
    # Dropout of the weights between the states (Merity et al. 2018, section 2).
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
    """Section of ``encoder`` bidirectional_lstm (ELMo of Peters et al. 2018): two LSTMs, whose outputs are
    concatenated to ``hidden_size`` values."""

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
    """Section of ``objective.name`` bidirectional_lm."""

    TITLE: ClassVar[str] = (
        "every next and every previous token, with model.encoder bidirectional_lstm (ELMo: Peters et al. 2018)"
    )

    @property
    def carries_state(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class GloveConfig(ObjectiveConfig):
    """Section of ``objective.name`` glove."""

    TITLE: ClassVar[str] = "vectors of tokens, with model.encoder none (Pennington et al. 2014)"

    # Largest distance between a word and its context.
    window: Positive[int] = 5
    # Counts from this one on have the weight 1 in the loss.
    largest_count: Positive[float] = 100.0
    # Exponent of the weight (x / objective.largest_count) ** objective.count_power of smaller counts x.
    count_power: Positive[float] = 0.75


@dataclass(frozen=True, kw_only=True)
class Word2VecConfig(ObjectiveConfig):
    """Section of ``objective.name`` skip_gram and cbow."""

    TITLE: ClassVar[str] = "vectors of tokens, with model.encoder none (word2vec: Mikolov et al. 2013)"

    # Largest distance between a word and its context; a smaller one is sampled for each word.
    window: Positive[int] = 5
    # Negatives of a pair (Mikolov et al. 2013b: 5 to 20 for small texts).
    negatives: Positive[int] = 5
    # Words more frequent than this share of the text are dropped in part; 0: none is.
    subsample: AtLeast0[float] = 1e-3
    # Negatives are sampled with probabilities proportional to this power of the counts.
    noise_power: AtLeast0[float] = 0.75
