"""The architecture of the network: every option that changes the function that the model computes.

A family of encoders is a set of values of these options. Their defaults describe BERT-base, uncased (Devlin et al.
2018). This module does not import jax.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from bert_jax import registry
from bert_jax.config.schema import (
    AtLeast0,
    Choice,
    Inherited,
    Layers,
    Positive,
    Probability,
    Section,
    only,
    require,
)

# Whether a part exists; auto: the rule in the comment of the option decides.
Presence = Literal["auto", "yes", "no"]

# Families of encoders that Hugging Face folders can hold.
FamilyName = Literal[
    "bert", "roberta", "xlm-roberta", "camembert", "modernbert", "distilbert", "albert", "electra", "mpnet",
    "deberta-v2", "gpt2", "openai-gpt", "nomic_bert", "neobert", "longformer",
    "big_bird",
]  # fmt: skip


PoolerActivation = Literal["none", "tanh", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"]
# Parts of the network that have a bias.
Biased = Literal[
    "norm", "qkv", "attention_output", "feed_forward", "pooler_layer", "sequence_head", "mlm_layer", "mlm_output"
]
# Layers of the heads that only some families have.
HeadPart = Literal["pooler_norm", "token_pooler", "span_transform"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section, prefix="model.", chosen_by=Choice("encoder", "encoders", "encoder_options")):
    """Architecture, dropout and initialization of the model. Defaults: BERT-base, uncased (Devlin et al. 2018)."""

    # Tag of the encoder in model cards; empty: that of the family.
    TAG: ClassVar[str] = ""
    # Learning rate of fine-tuning, if none is set; 0: from the width, as for a Transformer.
    FINETUNING_RATE: ClassVar[float] = 0.0
    # Whether a run can keep the state of the encoder between batches (data.row_order).
    HAS_STATE: ClassVar[bool] = False
    # Whether the optimizer muon applies to the matrices of the encoder.
    FITS_MUON: ClassVar[bool] = True
    # Dropout drops the same values of all tokens of a sequence (locked dropout; Merity et al. 2018, section 4.1).
    LOCKS_DROPOUT: ClassVar[bool] = False

    # Size of the vocabulary, special tokens included.
    vocab_size: Positive[int] = 30522
    # Width of the encoder.
    hidden_size: Positive[int] = 768
    # Number of encoder layers.
    num_layers: Layers = 12
    # Encoder: transformer, that of another package, or that of the Python file that --model.module names.
    encoder: str = "transformer"
    # Attention heads per layer; must divide hidden_size.
    num_attention_heads: Positive[int] = 12
    # Attention heads of each layer, at most num_attention_heads, which with hidden_size determines the width of a
    # head (a pruned model); empty: num_attention_heads in every layer.
    layer_heads: tuple[int, ...] = ()
    # Width of the feed-forward layer.
    intermediate_size: Positive[int] = 3072
    # Width of the feed-forward layer of each layer, at most intermediate_size (a pruned model); empty:
    # intermediate_size in every layer.
    layer_units: tuple[int, ...] = ()
    # Width of the embeddings, which a dense layer projects to hidden_size; 0: hidden_size, without a dense layer.
    embedding_size: AtLeast0[int] = 0
    # Rank of the table of word embeddings, the product of a table of this width and a matrix; 0: a whole table.
    word_rank: AtLeast0[int] = only(0, {"model.encoder": ("transformer",)})
    # Rows of the position table.
    max_position_embeddings: Positive[int] = 512
    # Number of rows of the position table before the row of the first token: the id of padding + 1 (RoBERTa: 2).
    position_offset: int = 0
    # The word embeddings are multiplied by the square root of their width.
    embedding_scale: bool = False
    # Number of segment (token type) embeddings; 0: no segment embeddings.
    type_vocab_size: AtLeast0[int] = 2
    # One set of layer parameters, which every layer uses (ALBERT).
    shared_layers: bool = False
    # Dropout after the embeddings, the attention output and the feed-forward output, and on the embeddings of
    # distances (relative_positions disentangled).
    hidden_dropout: Probability = 0.1
    # Dropout on the attention probabilities.
    attention_dropout: Probability = 0.1
    # Dropout after the embeddings; -1: hidden_dropout.
    embedding_dropout: Inherited = -1.0
    # Dropout after the attention output; -1: hidden_dropout.
    attention_output_dropout: Inherited = -1.0
    # Dropout after the feed-forward output; -1: hidden_dropout.
    feed_forward_dropout: Inherited = -1.0
    # Feed-forward and MLM-head activation: gelu (erf), gelu_tanh, gelu_sigmoid (x * sigmoid(1.702 x)), relu or silu
    # (x * sigmoid(x)).
    activation: Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"] = "gelu"
    # Feed-forward layer: mlp (dense, activation, dense) or gated (activation(dense) * dense, dense; Shazeer 2020).
    feed_forward: Literal["mlp", "gated"] = "mlp"
    # Normalization: layer_norm, or rms_norm (Zhang and Sennrich 2019: no mean is subtracted, no bias).
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    # Normalization after each residual sum (post, as in the BERT paper), before each sub-layer (pre), or before
    # each sub-layer but the first (pre_skip_first: ModernBERT).
    norm_position: Literal["post", "pre", "pre_skip_first"] = "post"
    # Epsilon of every normalization.
    norm_epsilon: Positive[float] = 1e-12
    # Parts without biases: norm (every LayerNorm; rms_norm never has one), qkv (query, key and value),
    # attention_output, feed_forward, pooler_layer, sequence_head, mlm_layer, mlm_output (the output layer of the
    # MLM head).
    without_bias: tuple[Biased, ...] = ()
    # Normalization of the embeddings; auto: with norm_position post.
    embedding_norm: Presence = "auto"
    # Normalization after the last layer; auto: unless norm_position is post.
    final_norm: Presence = "auto"
    # Positions: learned (as in the BERT paper) or sinusoidal (Vaswani et al. 2017) rows added to the embeddings,
    # rotary (Su et al. 2021): query and key of every layer are rotated, or none.
    position_embeddings: Literal["learned", "sinusoidal", "rotary", "none"] = "learned"
    # Base of the wave lengths of rotary positions.
    rotary_base: Positive[float] = 10_000.0
    # Base of the wave lengths of rotary positions in layers with a window (attention_windows); 0: rotary_base.
    rotary_window_base: AtLeast0[float] = 0.0
    # Effect of the distance between query and key on the attention scores: none, alibi (Press et al. 2022, with the
    # absolute distance), buckets (a learned bias per head and bucket of distances, shared by the layers; MPNet) or
    # disentangled (DeBERTa: products of query and key with embeddings of the distance).
    relative_positions: Literal["none", "alibi", "buckets", "disentangled"] = "none"
    # Rows of the table of distances, with relative_positions buckets and disentangled; half of them for each
    # direction. Small distances have a row each, larger ones share rows.
    relative_buckets: Positive[int] = 32
    # Larger distances have the same row, with relative_positions buckets and disentangled.
    relative_max_distance: Positive[int] = 128
    # Keys that a query sees: those of its whole sequence (bidirectional) or up to its own position (causal).
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    # Number of keys on each side that a query sees, for each layer; 0: no limit. The list repeats (0 64 64: every
    # third layer, the first included, has no limit). Empty: no limits.
    attention_windows: tuple[int, ...] = ()
    # Most tokens of a row that see every token of their sequence, and that all of them see (Longformer), with
    # projections of their own: the first token with a sequence head, the tokens before the first separator with a
    # span head, those from the second token after it on with a choice head (the number has no limit for sequence
    # and choice heads), otherwise none. 0: no global tokens.
    global_tokens: AtLeast0[int] = 0
    # Id of the separator in the vocabulary, which bounds the global tokens of span and choice heads, and the
    # question (span_transform). A run takes that of its own vocabulary.
    separator_id: AtLeast0[int] = 2
    # Tokens of a block (BigBird): a query sees its block, the blocks before and after it, the first and the last
    # block of the row, and random_blocks more; the tokens of the first and the last block see the whole row. Rows
    # of at most (5 + 2 * random_blocks) blocks are not divided. 0: no blocks.
    attention_block: AtLeast0[int] = 0
    # Random blocks that a query sees in training, drawn for each layer and head. Evaluation counts the first block
    # so many times more instead, as transformers does.
    random_blocks: Positive[int] = 3
    # Vector of a sequence that the nsp, sequence and choice heads read: its first token, its last token, or the
    # mean of its tokens.
    pooling: Literal["first", "last", "mean"] = "first"
    # Layer before the nsp, sequence and choice heads (the pooler): dense, with this activation; a second activation
    # replaces the first in a model with a sequence head. none: no such layer.
    pooler_layer: tuple[PoolerActivation, ...] = ("tanh",)
    # Further layers of the heads. pooler_norm: a normalization after the activation of the pooler. token_pooler:
    # the token and span heads read the pooler's layers of each token (ModernBERT has both). span_transform: the
    # span head has a feed-forward block before its output layer, and subtracts 1e6 from the scores of the question:
    # the tokens up to the first separator_id, except the first (BigBird).
    head_parts: tuple[HeadPart, ...] = ()
    # Layer of the MLM head before its output layer: dense, with this activation (same: activation) and a
    # normalization. none: no such layer.
    mlm_layer: Literal["none", "same", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"] = "same"
    # The weights of the output layer of the MLM head are the word embeddings.
    tied_output: bool = True
    # Initial weights: bert (one standard deviation for all), or megatron (that of the output projections of
    # attention and feed-forward layers is divided by sqrt(2 * num_layers); Shoeybi et al. 2019).
    initialization: Literal["bert", "megatron"] = "bert"
    # Standard deviation of the truncated normal distribution of initial weights (truncated at two standard
    # deviations, not rescaled).
    initializer_range: Positive[float] = 0.02
    # Family of encoders whose names Hugging Face folders use; the other options determine the network.
    family: FamilyName = "bert"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_int32()
        rows, width = self.max_position_embeddings, self.hidden_size
        allowed = f"0 to below model.max_position_embeddings ({rows})"
        self._require("position_offset", 0 <= self.position_offset < rows, allowed)
        few = rows <= 1 << 20 or self.position_embeddings == "learned"
        allowed = f"at most {1 << 20:,} with {self.position_embeddings} positions"
        self._require("max_position_embeddings", few, allowed)
        registry.check("encoders", self.encoder, "model.encoder")
        section = ModelConfig.class_for({"encoder": self.encoder})
        # A subclass with more options has the title of its section; every encoder of contrib has its own.
        if not isinstance(self, section) or self.TITLE != section.TITLE:
            raise ValueError(f"model.encoder: the section of encoder {self.encoder} is {section.__qualname__}")
        self._check_encoder()
        embedding = self.embedding_width
        self._require("word_rank", self.word_rank < embedding, f"below {embedding}, the width of the embeddings")
        if self.position_embeddings in ("sinusoidal", "rotary"):
            allowed = f"an even number with {self.position_embeddings} positions"
            self._require("hidden_size", width % 2 == 0, allowed)
        if self.position_embeddings == "rotary":
            allowed = f"a divisor of {width} with heads of an even width, for rotary positions"
            self._require("num_attention_heads", self.head_size % 2 == 0, allowed)
        if self.relative_positions in ("buckets", "disentangled"):
            allowed = f"an even number with {self.relative_positions} positions"
            self._require("relative_buckets", self.relative_buckets % 2 == 0, allowed)
        pooler, allowed = self.pooler_layer, "none, or one or two activations"
        self._require(
            "pooler_layer", pooler == ("none",) or (0 < len(pooler) < 3 and "none" not in pooler), allowed
        )
        self._require("attention_windows", all(window >= 0 for window in self.attention_windows), "0 or more each")
        plain = self.attention == "bidirectional" and self.relative_positions == "none"
        windows = self.attention_windows[: self.num_layers]  # not layer_windows: a file may declare any size
        windowed = plain and self.position_embeddings != "rotary" and windows != () and all(windows)
        allowed = "0 unless all attention_windows are above 0, attention is bidirectional, no position relative"
        self._require("global_tokens", not self.global_tokens or windowed, allowed)
        allowed = "0 unless attention is bidirectional, without attention_windows, no position relative"
        self._require("attention_block", not self.attention_block or (plain and not any(windows)), allowed)
        self._check_pruned()

    def _check_encoder(self) -> None:
        """Check the options on which encoders differ."""
        self._require("num_layers", self.num_layers > 0, "1 or more")
        allowed = f"a divisor of model.hidden_size ({self.hidden_size})"
        divides = not self.has_attention or self.hidden_size % self.num_attention_heads == 0
        self._require("num_attention_heads", divides, allowed)

    def _check_pruned(self) -> None:
        """Check the sizes of single layers."""
        for name, most in (("layer_heads", self.num_attention_heads), ("layer_units", self.intermediate_size)):
            sizes: tuple[int, ...] = getattr(self, name)
            if not sizes:
                continue
            has_layers = self.has_attention and not self.shared_layers
            self._require(name, has_layers, "no numbers unless encoder is transformer, without shared_layers")
            allowed = f"one number from 1 to {most} for each of the {self.num_layers} layers"
            fits = len(sizes) == self.num_layers and all(1 <= size <= most for size in sizes)
            self._require(name, fits, allowed)
        # Slopes, biases and random blocks belong to the number of a head.
        plain = self.relative_positions == "none" and not self.attention_block
        allowed = "no numbers unless relative_positions is none, without attention_block"
        self._require("layer_heads", plain or not self.layer_heads, allowed)

    @property
    def is_causal(self) -> bool:
        """True if the output of a token depends on this token and the tokens before it only."""
        return self.has_attention and self.attention == "causal"

    @property
    def has_attention(self) -> bool:
        """True if the layers are those of the Transformer: attention and a feed-forward layer."""
        return self.encoder == "transformer"

    @property
    def directions(self) -> int:
        """Number of encoders. Each reads the embeddings; their outputs are concatenated."""
        return 1

    @property
    def inner_widths(self) -> tuple[int, ...]:
        """Widths of the outputs of the layers, if they differ from each other."""
        return ()

    def require_equal_widths(self) -> None:
        """Raise ``ValueError`` if the embeddings and the outputs of the layers have different widths, so that they
        cannot be read together."""
        if len(set(self.inner_widths)) > 1:
            listed = ", ".join(map(str, self.inner_widths))
            raise ValueError(
                f"model: its embeddings and layers have different widths ({listed}), so only the last layer can be "
                "read; use a model of one width"
            )

    @property
    def spells_words(self) -> bool:
        """True if the embedding of a token is computed from its characters."""
        return False

    @property
    def whole_word_dropout(self) -> float:
        """Probability with which the embedding of a word is 0 in the whole batch."""
        return 0.0

    @property
    def unread_fields(self) -> set[str]:
        """Fields that do not change the outputs of the encoder with these values of the others."""
        return set()

    @property
    def table_sizes(self) -> list[str]:
        """Fields that are dimensions of parameters."""
        names = ["vocab_size", "hidden_size", "embedding_size", "word_rank", "type_vocab_size"]
        names += ["intermediate_size"] if not self.layer_units else []
        names += ["max_position_embeddings"] if self.position_embeddings == "learned" else []
        return names + (["relative_buckets"] if self.relative_positions in ("buckets", "disentangled") else [])

    @property
    def layer_counts(self) -> list[str]:
        """Fields that contain numbers of layers, each of which has separate parameters."""
        return [] if self.shared_layers else ["num_layers"]

    @property
    def family_name(self) -> FamilyName:
        """Family of the model; that of models from before this option is RoBERTa if their positions have an
        offset."""
        return "roberta" if self.family == "bert" and self.position_offset else self.family

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a sequence, special tokens included (only learned positions have such a
        limit)."""
        return self.max_position_embeddings - self.position_offset

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings."""
        return self.embedding_size or self.hidden_size

    @property
    def mlm_activation(self) -> str:
        """Activation of the layer of the MLM head before its output layer; none: it has no such layer."""
        return self.activation if self.mlm_layer == "same" else self.mlm_layer

    def pooler_activation(self, has_sequence_head: bool) -> str:
        """Return the activation of the pooler in a model with or without a sequence head; none: it has no dense
        layer."""
        return self.pooler_layer[-1 if has_sequence_head else 0]

    @property
    def biased_parts(self) -> tuple[Biased, ...]:
        """Parts of the network that may have a bias."""
        return get_args(Biased)

    def has_bias(self, part: Biased) -> bool:
        """Return True if ``part`` has a bias."""
        return part not in self.without_bias and (part != "norm" or self.norm == "layer_norm")

    def with_output_layer_only(self) -> "ModelConfig":
        """Return this model with an MLM head without parameters, which uses only the word embeddings."""
        parts = tuple(part for part in get_args(Biased) if part in (*self.without_bias, "mlm_output"))
        return replace(self, mlm_layer="none", without_bias=parts, tied_output=True)

    @property
    def has_embedding_norm(self) -> bool:
        """True if the embeddings are normalized."""
        return self.norm_position == "post" if self.embedding_norm == "auto" else self.embedding_norm == "yes"

    @property
    def has_final_norm(self) -> bool:
        """True if the output of the last layer is normalized."""
        return self.norm_position != "post" if self.final_norm == "auto" else self.final_norm == "yes"

    @property
    def has_equal_layers(self) -> bool:
        """True if all layers compute the same function of their parameters, so that one loop can compute them."""
        kinds = set(zip(self.layer_windows, self.heads_by_layer, self.units_by_layer, strict=True))
        return self.norm_position != "pre_skip_first" and len(kinds) == 1

    def check_loop(self, scan_layers: bool) -> None:
        """Raise ``ValueError`` if one loop is to compute layers of different sizes."""
        is_even = len(set(self.heads_by_layer)) <= 1 and len(set(self.units_by_layer)) <= 1
        allowed = "false with layers of different sizes (model.layer_heads, model.layer_units)"
        require(is_even or not scan_layers, "execution.scan_layers", scan_layers, allowed)

    @property
    def heads_by_layer(self) -> tuple[int, ...]:
        """Number of attention heads of each layer."""
        return self.layer_heads or (self.num_attention_heads,) * self.num_layers

    @property
    def units_by_layer(self) -> tuple[int, ...]:
        """Width of the feed-forward layer of each layer."""
        return self.layer_units or (self.intermediate_size,) * self.num_layers

    @property
    def own_layers(self) -> int:
        """Number of layers with separate parameters: 1 if all layers share one set."""
        return 1 if self.shared_layers else self.num_layers

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Number of keys on each side that a query sees, for each layer; 0: no limit."""
        pattern = self.attention_windows or (0,)
        return tuple(pattern[i % len(pattern)] for i in range(self.num_layers))

    @property
    def whole_length(self) -> int:
        """Number of tokens up to which rows are not divided into blocks (``attention_block``)."""
        return (5 + 2 * self.random_blocks) * self.attention_block

    @property
    def padding_sees_tokens(self) -> bool:
        """True if a padding token sees the tokens of its row, so that its output is defined."""
        is_limited = any(self.layer_windows) or self.attention == "causal" or self.attention_block > 0
        return not is_limited and self.relative_positions != "disentangled"

    def dropout_at(self, place: Literal["embedding", "attention_output", "feed_forward"]) -> float:
        """Return the rate of the dropout after the embeddings or at the end of a block."""
        rate: float = getattr(self, f"{place}_dropout")
        return self.hidden_dropout if rate < 0 else rate

    def rotary_base_of(self, window: int) -> float:
        """Return the base of rotary positions in a layer with ``window``."""
        return self.rotary_window_base if window and self.rotary_window_base else self.rotary_base
