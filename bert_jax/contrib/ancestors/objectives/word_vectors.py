"""Two tables of vectors, one for tokens and one for their contexts, and what word2vec and GloVe share.

Shapes: B rows, S tokens per row, V vocabulary size, D width of a vector.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from bert_jax.batch import Batch, PretrainSource
from bert_jax.config import HeadsConfig, ModelConfig, PretrainConfig
from bert_jax.model import BertModel, padded_vocab_size
from bert_jax.model.dropout import DropoutKey, TokenKey, whole_key
from bert_jax.objectives.objective import TEXT_FEATURES, PretrainObjective
from bert_jax.parallel.axes import constrain, with_logical_axes
from bert_jax.tokenization import Tokenizer

# Canonical names of the token vectors and of the context vectors.
WORDS, CONTEXTS = "embeddings/word_embeddings/embedding", "context_embeddings/embedding"


class ContextTable(nn.Module):
    """Vectors of contexts, float32[V, D], and with ``has_bias`` their biases, float32[V]. The initial values are 0,
    as in word2vec, or truncated normal with the standard deviation ``initializer_range``, if it is above 0."""

    rows: int
    width: int
    has_bias: bool = False
    initializer_range: float = 0.0

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        zeros = nn.initializers.zeros_init()
        drawn = nn.initializers.truncated_normal(self.initializer_range) if self.initializer_range else zeros
        table = self.param("embedding", with_logical_axes(drawn, ("vocab", "embed")), (self.rows, self.width))
        bias = None
        if self.has_bias:
            bias = self.param("vocabulary_bias", with_logical_axes(zeros, ("vocab",)), (self.rows,))
        return table, bias


class TwoTables(BertModel):
    """Word vectors and context vectors. With ``has_bias``, every token has a bias in both roles."""

    has_bias: bool = False

    def setup(self) -> None:
        super().setup()
        rows, width = padded_vocab_size(self.config, self.execution), self.config.hidden_size
        deviation = self.config.initializer_range if self.has_bias else 0.0
        self.context_embeddings = ContextTable(rows, width, self.has_bias, deviation)
        if self.has_bias:
            zeros = with_logical_axes(nn.initializers.zeros_init(), ("vocab",))
            self.vocabulary_bias = self.param("vocabulary_bias", zeros, (rows,))

    def __call__(self, features: Mapping[str, jax.Array], dropout_key: DropoutKey | None = None) -> Any:  # type: ignore[override]
        """Return the tables float32[V, D] of words and contexts, and their biases float32[V] (or None)."""
        _, words_VxD = self.embeddings(
            features["input_ids"], features["token_type_ids"], features["position_ids"], None
        )
        contexts_VxD, context_bias_V = self.context_embeddings()
        found = words_VxD, contexts_VxD, self.vocabulary_bias if self.has_bias else None, context_bias_V
        # Whole on every device: the compiler cannot look rows up in tables that two axes cut (design/sharding.md).
        return jax.tree.map(lambda x: constrain(x, (None,) * x.ndim, self.mesh), found)


class WordVectorObjective(PretrainObjective):
    """Base class of the objectives that train a vector per token. Its losses are sums over the global batch, not
    means, so that the papers' learning rate applies to any batch size."""

    has_bias = False
    reads_records = True
    features = TEXT_FEATURES

    @classmethod
    def make_model(cls, config: PretrainConfig, mesh: Mesh | None) -> TwoTables:  # type: ignore[override]
        model = config.model
        for key, value, wanted in (
            ("model.encoder", model.encoder, "none"),
            ("model.position_embeddings", model.position_embeddings, "none"),
            ("model.type_vocab_size", model.type_vocab_size, 0),
            ("model.embedding_norm", model.embedding_norm, "no"),
            ("data.next_sentence", config.data.next_sentence, "none"),
        ):
            if value != wanted:
                raise ValueError(f"{key}: {value!r} is not allowed with word vectors; set {key} {wanted}")
        return TwoTables(model, config.execution, HeadsConfig(), mesh=mesh, has_bias=cls.has_bias)

    @classmethod
    def network(
        cls, config: PretrainConfig, model: nn.Module, params: Mapping[str, np.ndarray], name: str
    ) -> tuple[ModelConfig, HeadsConfig, Mapping[str, np.ndarray]]:
        return config.model, HeadsConfig(), {WORDS: params[WORDS]}

    def evaluation(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        values = super().evaluation(totals)
        (loss,) = self.display.keys
        return values | {"loss": values.get(loss, float("nan"))}

    def random_tokens(self, batch: Batch, key: DropoutKey | None) -> TokenKey:
        """Return the random key for the tokens in ``batch``, which is the same in every evaluation."""
        own = jax.random.key(0) if key is None else whole_key(key)
        return TokenKey.of(own, batch["sequence_keys"], batch["sequence_ids"], batch["position_ids"])

    @abstractmethod
    def prepare(self, source: PretrainSource, tokenizer: Tokenizer) -> None:
        """Compute the counts of the training records that the objective needs."""

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        return {name: jnp.float32(1) for name in self.display.keys}
