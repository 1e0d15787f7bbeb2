"""GloVe trains vectors whose products approximate logarithms of co-occurrence counts (Pennington et al. 2014;
github.com/stanfordnlp/GloVe).

Shapes: B rows, S tokens per row, V vocabulary size, D width of a vector, N entries of the matrix of counts.
"""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import linen as nn

from bert_jax.batch import Batch, PretrainSource
from bert_jax.config import HeadsConfig, ModelConfig, PretrainConfig
from bert_jax.contrib.ancestors.config import GloveConfig
from bert_jax.contrib.ancestors.objectives.sampling import one_of, special_ids, training_ids
from bert_jax.contrib.ancestors.objectives.word_vectors import CONTEXTS, WORDS, WordVectorObjective
from bert_jax.model.canonical import Params
from bert_jax.model.dropout import DropoutKey
from bert_jax.objectives.display import Column, Display, Panel, Tile
from bert_jax.objectives.objective import Aux, Summed, padding_sums
from bert_jax.tokenization import Tokenizer

# Pairs that are collected before they are added to the matrix.
_LEAST_PAIRS = 1 << 22
# Entries that a run may have: they are constants of the compiled step, whose size is limited to 2 GB.
MOST_ENTRIES = 100_000_000


def co_occurrences(
    rows: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int, window: int, excluded: Iterable[int] = ()
) -> scipy.sparse.coo_array:
    """Return the symmetric matrix [V, V] of the weighted co-occurrences of tokens: a pair at distance d, up to
    ``window`` and in one sequence, counts 1 / d (section 3.1). The ids in ``excluded`` do not count.

    ``rows`` yields token ids and sequence ids, each int32[B, S].
    """
    shape, left_out = (vocab_size, vocab_size), np.zeros(vocab_size, bool)
    left_out[list(excluded)] = True
    total, waiting, pairs_waiting = scipy.sparse.csr_array(shape, dtype=np.float64), [], 0
    for ids_BxS, sequence_ids_BxS in rows:
        firsts, seconds, values = [], [], []
        used_BxS = (sequence_ids_BxS > 0) & ~left_out[ids_BxS]
        for distance in range(1, min(window, ids_BxS.shape[1] - 1) + 1):
            pairs = sequence_ids_BxS[:, :-distance] == sequence_ids_BxS[:, distance:]
            pairs &= used_BxS[:, :-distance] & used_BxS[:, distance:]
            firsts.append(ids_BxS[:, :-distance][pairs])
            seconds.append(ids_BxS[:, distance:][pairs])
            values.append(np.full(len(firsts[-1]), 1 / distance))
        places = np.concatenate(firsts), np.concatenate(seconds)
        waiting.append(scipy.sparse.coo_array((np.concatenate(values), places), shape))
        pairs_waiting += waiting[-1].nnz
        if pairs_waiting > max(_LEAST_PAIRS, total.nnz):  # so that the matrix is not added to for every few rows
            total, waiting, pairs_waiting = _added(total, waiting), [], 0
    total = _added(total, waiting)
    return (total + total.T).tocoo()


def _added(total: scipy.sparse.csr_array, parts: list[scipy.sparse.coo_array]) -> scipy.sparse.csr_array:
    if not parts:
        return total
    values = np.concatenate([part.data for part in parts])
    places = tuple(np.concatenate([part.coords[axis] for part in parts]) for axis in (0, 1))
    return total + scipy.sparse.coo_array((values, places), total.shape).tocsr()


class Glove(WordVectorObjective):
    """Weighted squared error of the logarithms of counts (eq. 8). Each token of a batch stands for one entry of the
    co-occurrence matrix of the training records, sampled uniformly. The vectors of the model are the sums of those
    of words and contexts, as in section 4.2."""

    has_bias = True
    display = Display(
        keys=("glove_loss",),
        columns=(Column("weighted squared error {}", "glove_loss"),),
        panels=(Panel("weighted squared error of log counts", "glove_loss"),),
        tiles=(Tile("weighted squared error of log counts", "glove_loss"),),
    )

    @property
    def options(self) -> GloveConfig:
        """The section of the objective."""
        return GloveConfig.required(self.config.objective, "glove")

    def prepare(self, source: PretrainSource, tokenizer: Tokenizer) -> None:
        """Count the co-occurrences of the training records."""
        size, window = self.config.model.vocab_size, self.options.window
        counts = co_occurrences(training_ids(source), size, window, special_ids(tokenizer))
        if not counts.nnz:
            raise ValueError("data.shards: no two words of the vocabulary occur together; build the shards again")
        if counts.nnz > MOST_ENTRIES:
            remedy = "lower model.vocab_size or objective.window"
            found = f"data.shards: {counts.nnz:,} pairs of words occur together"
            raise ValueError(f"{found}; at most {MOST_ENTRIES:,} are allowed; {remedy}")
        self.set_counts(counts)

    def set_counts(self, counts: scipy.sparse.coo_array) -> None:
        """Set the matrix of co-occurrences [V, V], whose entries are above 0."""
        self._first_N, self._second_N = (jnp.asarray(part, jnp.int32) for part in counts.coords)
        self._count_N = jnp.asarray(counts.data, jnp.float32)

    def entry_losses(
        self, params: Params, batch: Batch, first: jax.Array, second: jax.Array, counts: jax.Array
    ) -> jax.Array:
        """Return f(X) (w v + b + c - log X)^2 for the words ``first``, the contexts ``second`` and ``counts`` X."""
        words_VxD, contexts_VxD, bias_V, context_bias_V = self.model.apply({"params": params}, batch, None)
        products = jnp.sum(jnp.take(words_VxD, first, axis=0) * jnp.take(contexts_VxD, second, axis=0), axis=-1)
        errors = products + bias_V[first] + context_bias_V[second] - jnp.log(counts)
        weights = jnp.minimum(counts / self.options.largest_count, 1) ** self.options.count_power
        return weights * jnp.square(errors)

    def sums(self, params: Params, aux: Aux, batch: Batch, key: DropoutKey | None, *, axis: str | None) -> Summed:
        words, _ = self.random_tokens(batch, key).words()
        drawn = one_of(len(self._count_N), words)
        chosen = (jnp.take(values, drawn, axis=0) for values in (self._first_N, self._second_N, self._count_N))
        weights = (batch["sequence_ids"] > 0).astype(jnp.float32)  # padding would draw one entry many times
        losses = self.entry_losses(params, batch, *chosen) * weights
        return {"glove_loss": (jnp.sum(losses), jnp.sum(weights))} | padding_sums(
            batch["sequence_ids"]
        ), aux.carried

    @classmethod
    def network(
        cls, config: PretrainConfig, model: nn.Module, params: Mapping[str, np.ndarray], name: str
    ) -> tuple[ModelConfig, HeadsConfig, Mapping[str, np.ndarray]]:
        return config.model, HeadsConfig(), {WORDS: params[WORDS] + params[CONTEXTS]}
