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

    # Number of entries in the vocabulary, including special tokens.
    vocab_size: Positive[int] = 30522
    # Width of the encoder.
    hidden_size: Positive[int] = 768
    # Number of encoder layers.
    num_layers: Layers = 12
    # Network of the encoder. Installed packages can add encoders, and --model.module FILE adds the encoder that a
    # Python file defines. transformer: a Transformer.
    encoder: str = "transformer"
    # Number of attention heads in each layer, a divisor of hidden_size.
    num_attention_heads: Positive[int] = 12
    # Number of attention heads of each layer in a pruned model: one number per layer, at most num_attention_heads.
    # The width of a head stays hidden_size / num_attention_heads. Empty: num_attention_heads in every layer.
    layer_heads: tuple[int, ...] = ()
    # Width of the feed-forward layers.
    intermediate_size: Positive[int] = 3072
    # Feed-forward width of each layer in a pruned model: one number per layer, at most intermediate_size. Empty:
    # intermediate_size in every layer.
    layer_units: tuple[int, ...] = ()
    # Width of the embeddings, which a dense layer projects to hidden_size; 0: hidden_size, without a dense layer.
    embedding_size: AtLeast0[int] = 0
    # Rank of the word embedding table, which is stored as the product of two matrices; 0: one full table.
    word_rank: AtLeast0[int] = only(0, {"model.encoder": ("transformer",)})
    # Number of rows in the position table.
    max_position_embeddings: Positive[int] = 512
    # Number of rows in the position table before the row of the first token. RoBERTa has 2 such rows: the id of its
    # padding token (1) plus 1.
    position_offset: int = 0
    # Multiply the word embeddings by the square root of their width.
    embedding_scale: bool = False
    # Number of segment (token type) embeddings; 0: no segment embeddings.
    type_vocab_size: AtLeast0[int] = 2
    # Use one set of parameters for all layers (ALBERT).
    shared_layers: bool = False
    # Dropout rate after the embeddings, the attention output and the feed-forward output, and for the distance
    # embeddings of relative_positions disentangled.
    hidden_dropout: Probability = 0.1
    # Dropout rate for the attention probabilities.
    attention_dropout: Probability = 0.1
    # Dropout rate after the embeddings; -1: hidden_dropout.
    embedding_dropout: Inherited = -1.0
    # Dropout rate after the attention output; -1: hidden_dropout.
    attention_output_dropout: Inherited = -1.0
    # Dropout rate after the feed-forward output; -1: hidden_dropout.
    feed_forward_dropout: Inherited = -1.0
    # Activation of the feed-forward layers and the MLM head: gelu (erf), gelu_tanh, gelu_sigmoid (x * sigmoid(1.702
    # x)), relu or silu (x * sigmoid(x)).
    activation: Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"] = "gelu"
    # Feed-forward layer: mlp (dense, activation, dense) or gated (activation(dense) * dense, dense; Shazeer 2020).
    feed_forward: Literal["mlp", "gated"] = "mlp"
    # Normalization: layer_norm, or rms_norm, which subtracts no mean and has no bias (Zhang and Sennrich 2019).
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    # Position of the normalization: after each residual sum (post, as in the BERT paper), before each sub-layer
    # (pre), or before each sub-layer except the first (pre_skip_first, as in ModernBERT).
    norm_position: Literal["post", "pre", "pre_skip_first"] = "post"
    # Epsilon of all normalization layers.
    norm_epsilon: Positive[float] = 1e-12
    # Parts of the network that have no bias: norm (every LayerNorm; rms_norm never has a bias), qkv (query, key and
    # value), attention_output, feed_forward, pooler_layer, sequence_head, mlm_layer, mlm_output (the output layer
    # of the MLM head).
    without_bias: tuple[Biased, ...] = ()
    # Normalize the embeddings; auto: yes if norm_position is post, else no.
    embedding_norm: Presence = "auto"
    # Normalize the output of the last layer; auto: no if norm_position is post, else yes.
    final_norm: Presence = "auto"
    # learned (as in the BERT paper) and sinusoidal (Vaswani et al. 2017): a vector for each position is added to
    # the embeddings. rotary (Su et al. 2021): every layer rotates its queries and keys by their positions. none:
    # no positions.
    position_embeddings: Literal["learned", "sinusoidal", "rotary", "none"] = "learned"
    # Base of the wavelengths of rotary positions.
    rotary_base: Positive[float] = 10_000.0
    # Base of the wavelengths of rotary positions in layers that have a window (attention_windows); 0: rotary_base.
    rotary_window_base: AtLeast0[float] = 0.0
    # Effect of the distance between query and key on the attention scores. none: no effect. alibi: a penalty that
    # is proportional to the absolute distance (Press et al. 2022). buckets: a learned bias for each head and each
    # bucket of distances, shared by the layers (MPNet). disentangled: products of queries and keys with distance
    # embeddings (DeBERTa).
    relative_positions: Literal["none", "alibi", "buckets", "disentangled"] = "none"
    # Number of rows in the distance table, half of them for each direction, if relative_positions is buckets or
    # disentangled. Each small distance has its own row; larger distances share rows.
    relative_buckets: Positive[int] = 32
    # Distance at and above which all distances share one row of the distance table, if relative_positions is
    # buckets or disentangled.
    relative_max_distance: Positive[int] = 128
    # Keys that a query attends to: all keys of its sequence (bidirectional), or the keys up to its own position
    # (causal).
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    # Number of keys that a query attends to on each side, one number per layer; 0: no limit. A list with fewer
    # numbers than layers is repeated: with 0 64 64, the first layer and then every third layer has no limit. Empty:
    # no limits.
    attention_windows: tuple[int, ...] = ()
    # Maximum number of global tokens in a row of a model with a span head (Longformer); 0: no global tokens with
    # any head. A global token attends to every token of its sequence, every token of its sequence attends to it,
    # and it has separate projections. With a sequence head, the first token is global. With a span head, the tokens
    # before the first separator are global. With a choice head, all tokens from the second token after the first
    # separator are global. With other heads, no token is global.
    global_tokens: AtLeast0[int] = 0
    # Id of the separator token. The first separator determines the global tokens of span and choice heads
    # (global_tokens), and ends the question for span_transform (head_parts). A run takes the id from its
    # vocabulary.
    separator_id: AtLeast0[int] = 2
    # Number of tokens in a block (BigBird); 0: no blocks. A query attends to its block, the blocks before and
    # after it, the first and the last block of the row, and random_blocks random blocks. The tokens of the first
    # and the last block attend to the whole row. In a row of at most (5 + 2 * random_blocks) blocks, all tokens
    # attend to the whole row.
    attention_block: AtLeast0[int] = 0
    # Number of random blocks that a query attends to in training, sampled for each layer and head. In evaluation,
    # the first block takes the place of the random blocks and counts once for each of them, as in transformers.
    random_blocks: Positive[int] = 3
    # Vector of a sequence that the nsp, sequence and choice heads read: that of the first token, that of the last
    # token, or the mean over the tokens.
    pooling: Literal["first", "last", "mean"] = "first"
    # Activation of the pooler, a dense layer before the nsp, sequence and choice heads; none: no pooler. If there
    # are two activations, a model with a sequence head uses the second one, and every other model the first one.
    pooler_layer: tuple[PoolerActivation, ...] = ("tanh",)
    # Additional layers of the heads. pooler_norm: the pooler normalizes its output after the activation.
    # token_pooler: the token and span heads apply the layers of the pooler to each token. ModernBERT has
    # pooler_norm and token_pooler. span_transform (BigBird): the span head has a feed-forward block before its
    # output layer, and subtracts 1e6 from the scores of the question, which are the tokens up to the first
    # separator except the first token.
    head_parts: tuple[HeadPart, ...] = ()
    # Activation in the MLM head, which applies a dense layer, this activation and a normalization before its output
    # layer. same: the activation in model.activation. none: the MLM head consists only of its output layer.
    mlm_layer: Literal["none", "same", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"] = "same"
    # Use the word embeddings as the weights of the MLM output layer.
    tied_output: bool = True
    # Standard deviation of the initial weights. bert: initializer_range. megatron: the same, but initializer_range
    # / sqrt(2 * num_layers) for the output projections of attention and feed-forward layers (Shoeybi et al. 2019).
    initialization: Literal["bert", "megatron"] = "bert"
    # Standard deviation of the normal distribution from which the initial weights are sampled. The distribution is
    # truncated at two standard deviations and not rescaled.
    initializer_range: Positive[float] = 0.02
    # Family of encoders. An exported Hugging Face folder uses the names and the layout of this family; the other
    # options determine the network.
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
