"""Skip-gram and CBOW with negative sampling (Mikolov et al. 2013a, 2013b; github.com/tmikolov/word2vec).

Shapes: B rows, S tokens per row, N negatives per row, V vocabulary size, D width of a vector.
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch, PretrainSource
from bert_jax.contrib.ancestors.config import Word2VecConfig
from bert_jax.contrib.ancestors.objectives.sampling import AliasTable, token_counts, uniform
from bert_jax.contrib.ancestors.objectives.word_vectors import WordVectorObjective
from bert_jax.model.canonical import Params
from bert_jax.model.dropout import DropoutKey, TokenKey, mix
from bert_jax.objectives.causal_lm import original_ids
from bert_jax.objectives.display import Column, Display, Panel, Tile
from bert_jax.objectives.objective import Aux, Summed, padding_sums
from bert_jax.tokenization import Tokenizer

# Numbers of the random words of a token, for subsampling and the window; negatives follow.
_KEEP, _WINDOW, _NEGATIVE = 0, 1, 2


class Windows(NamedTuple):
    """The kept tokens of each row, moved to its beginning, and what to predict for them."""

    ids_BxS: jax.Array  # int32
    sequence_ids_BxS: jax.Array  # int32: 0 after the last kept token
    reach_BxS: jax.Array  # int32: tokens on each side of a token that are its context
    negatives_BxN: jax.Array  # int32


def keep_probabilities(counts_V: np.ndarray, threshold: float) -> np.ndarray:
    """Return float32[V], the probability that an occurrence of each token is kept: (sqrt(f / t) + 1) * t / f, at
    most 1, with the relative frequency f and the threshold t (as word2vec computes it; its paper has sqrt(t / f));
    with t = 0 every occurrence is kept. Tokens that do not occur are not kept."""
    shares_V = counts_V / counts_V.sum()
    if not threshold:
        return (counts_V > 0).astype(np.float32)
    ratios_V = threshold / np.maximum(shares_V, 1e-30)
    return np.where(counts_V > 0, np.minimum(np.sqrt(ratios_V) + ratios_V, 1), 0).astype(np.float32)


@jax.custom_jvp
def softplus(x: jax.Array) -> jax.Array:
    """Return log(1 + exp(x)). On a CPU, this is several times as fast as ``jax.nn.softplus``."""
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


softplus.defjvps(lambda tangent, _, x: tangent * jax.nn.sigmoid(x))


@jax.custom_vjp
def rows_of_both(table_VxD: jax.Array, ids_BxS: jax.Array, negatives_BxN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the rows of ``table`` for two arrays of ids, float32[B, S, D] and float32[B, N, D].

    Both gradients are added to one array of the size of the table. Those of two ``jnp.take`` are two arrays and
    their sum, with which a step of CBOW takes 1.1 times as long on a CPU.
    """
    return jnp.take(table_VxD, ids_BxS, axis=0), jnp.take(table_VxD, negatives_BxN, axis=0)


def _add_to_table(
    saved: tuple[jax.Array, jax.Array, jax.Array], grads: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None, None]:
    table_VxD, ids_BxS, negatives_BxN = saved
    return jnp.zeros_like(table_VxD).at[ids_BxS].add(grads[0]).at[negatives_BxN].add(grads[1]), None, None


rows_of_both.defvjp(lambda *arguments: (rows_of_both(*arguments), arguments), _add_to_table)


def is_context(windows: Windows) -> jax.Array:
    """Return float32[B, S, S], 1 where the second token is a context of the first one, otherwise 0."""
    places_S = jnp.arange(windows.ids_BxS.shape[1])
    distances_SxS = jnp.abs(places_S[:, None] - places_S)
    first, second = windows.sequence_ids_BxS[:, :, None], windows.sequence_ids_BxS[:, None]
    found = (first == second) & (first > 0) & (distances_SxS > 0) & (distances_SxS <= windows.reach_BxS[..., None])
    return found.astype(jnp.float32)


def over_contexts(contexts_BxSxS: jax.Array, values_BxSxE: jax.Array) -> jax.Array:
    """Return the sum of ``values`` over the contexts of each token, float32[B, S, E]."""
    return jnp.einsum("bst,bte->bse", contexts_BxSxS, values_BxSxE, precision="float32")


class Word2vec(WordVectorObjective):
    """Base class of skip-gram and CBOW: subsampling of frequent words, windows of random size, negatives."""

    # Negatives that the words of a row share. Each counts objective.negatives / row_negatives times for every pair,
    # so the expected loss equals word2vec's, and the products are matrix products. With few, the neighbors of
    # frequent words show the noise that the words of a row share (studies/word_vectors).
    row_negatives: ClassVar[int]

    display = Display(
        keys=("ns_loss",),
        columns=(Column("negative sampling {}", "ns_loss"),),
        panels=(Panel("negative-sampling loss (nats per pair)", "ns_loss"),),
        tiles=(Tile("held-out negative-sampling loss", "ns_loss"),),
    )

    @property
    def options(self) -> Word2VecConfig:
        """The section of the objective."""
        return Word2VecConfig.required(self.config.objective, "skip_gram or cbow")

    def prepare(self, source: PretrainSource, tokenizer: Tokenizer) -> None:
        """Count the tokens of the training records."""
        self.set_counts(token_counts(source, tokenizer, self.config.model.vocab_size))

    def set_counts(self, counts_V: np.ndarray) -> None:
        """Set the number of occurrences of every token, from which subsampling and negatives follow."""
        self._kept_V = keep_probabilities(counts_V, self.options.subsample)
        # 0 ** 0 is 1: words that do not occur must not become negatives.
        powers_V = np.maximum(counts_V, 1).astype(np.float64) ** self.options.noise_power
        self._noise = AliasTable.of(np.where(counts_V > 0, powers_V, 0))

    def windows(self, batch: Batch, key: DropoutKey | None) -> Windows:
        """Return the windows of a batch and its negatives, a function of ``key`` (None: for evaluation)."""
        random = self.random_tokens(batch, key)
        ids_BxS, sequence_ids_BxS = original_ids(batch), batch["sequence_ids"]
        kept_BxS = uniform(_random_words(random, _KEEP)) < jnp.asarray(self._kept_V)[ids_BxS]
        kept_BxS &= sequence_ids_BxS > 0
        # Dropped words leave no gap, as in word2vec.
        order_BxS = jnp.argsort(~kept_BxS, axis=1, stable=True)
        window = self.options.window
        sizes_BxS = 1 + (uniform(_random_words(random, _WINDOW)) * window).astype(jnp.int32)
        kept_ids_BxS, kept_sequences_BxS, kept_sizes_BxS = (
            jnp.take_along_axis(x, order_BxS, axis=1) for x in (ids_BxS, sequence_ids_BxS * kept_BxS, sizes_BxS)
        )
        rows = TokenKey(random.key, random.sequence_keys[:, :1], random.positions[:, :1])
        columns_N = _NEGATIVE + 2 * jnp.arange(self.row_negatives, dtype=jnp.int32)
        words = _random_words(rows, columns_N), _random_words(rows, columns_N + 1)
        return Windows(kept_ids_BxS, kept_sequences_BxS, kept_sizes_BxS, self._noise.draw(*words))

    def negative_sums(
        self, states_BxSxD: jax.Array, weights_BxSxN: jax.Array, negatives_BxNxD: jax.Array
    ) -> jax.Array:
        """Return the sum of the losses of the negatives, -log sigmoid(-u v): each vector v of ``states`` is
        compared with those of the negatives of its row, ``weights`` times."""
        scores_BxSxN = jnp.einsum("bsd,bnd->bsn", states_BxSxD, negatives_BxNxD)
        total = jnp.sum(softplus(scores_BxSxN) * weights_BxSxN)
        return total * (self.options.negatives / self.row_negatives)


def equals_negative(windows: Windows) -> jax.Array:
    """Return float32[B, S, N], 1 where a token equals a negative of its row."""
    return (windows.ids_BxS[..., None] == windows.negatives_BxN[:, None]).astype(jnp.float32)


def _random_words(key: TokenKey, column: jax.Array | int) -> jax.Array:
    """Return random 32-bit words (int32) of the tokens of ``key``, [B, S], for a number, or [B, N] for N numbers
    and one token a row."""
    first, second = key.words()
    return mix(first + column, second)


class SkipGram(Word2vec):
    """Skip-gram: the vector of a word predicts each word of its window (Mikolov et al. 2013b, eq. 4)."""

    row_negatives = 192

    def sums(self, params: Params, aux: Aux, batch: Batch, key: DropoutKey | None, *, axis: str | None) -> Summed:
        words_VxD, contexts_VxD, _, _ = self.model.apply({"params": params}, batch, None)
        windows = self.windows(batch, key)
        v_BxSxD = jnp.take(words_VxD, windows.ids_BxS, axis=0)
        u_BxSxD, negatives_BxNxD = rows_of_both(contexts_VxD, windows.ids_BxS, windows.negatives_BxN)
        contexts_BxSxS = is_context(windows)
        scores_BxSxS = jnp.einsum("bsd,btd->bst", v_BxSxD, u_BxSxD)
        total = jnp.sum(softplus(-scores_BxSxS) * contexts_BxSxS)
        # For each negative, the pairs of a token whose context it is not: word2vec leaves these out.
        apart_BxSxN = over_contexts(contexts_BxSxS, 1 - equals_negative(windows))
        total += self.negative_sums(v_BxSxD, apart_BxSxN, negatives_BxNxD)
        return {"ns_loss": (total, jnp.sum(contexts_BxSxS))} | padding_sums(batch["sequence_ids"]), aux.carried


class Cbow(Word2vec):
    """Continuous bag of words: the mean of the vectors of the window predicts the word in its middle (Mikolov et
    al. 2013a, section 3.1). As in word2vec, each vector of the window gets the whole gradient of the mean."""

    row_negatives = 128

    def sums(self, params: Params, aux: Aux, batch: Batch, key: DropoutKey | None, *, axis: str | None) -> Summed:
        words_VxD, contexts_VxD, _, _ = self.model.apply({"params": params}, batch, None)
        windows = self.windows(batch, key)
        v_BxSxD = jnp.take(words_VxD, windows.ids_BxS, axis=0)
        u_BxSxD, negatives_BxNxD = rows_of_both(contexts_VxD, windows.ids_BxS, windows.negatives_BxN)
        contexts_BxSxS = is_context(windows)
        sum_BxSxD, count_BxS = over_contexts(contexts_BxSxS, v_BxSxD), jnp.sum(contexts_BxSxS, axis=-1)
        mean_BxSxD = jax.lax.stop_gradient(sum_BxSxD / jnp.maximum(count_BxS, 1)[..., None])
        # The value of the mean, to which 0 is added, with the gradient of the sum.
        mean_BxSxD += sum_BxSxD - jax.lax.stop_gradient(sum_BxSxD)
        has_context_BxS = (count_BxS > 0).astype(jnp.float32)
        scores_BxS = jnp.sum(mean_BxSxD * u_BxSxD, axis=-1)
        total = jnp.sum(softplus(-scores_BxS) * has_context_BxS)
        weights_BxSxN = (1 - equals_negative(windows)) * has_context_BxS[..., None]
        total += self.negative_sums(mean_BxSxD, weights_BxSxN, negatives_BxNxD)
        return {"ns_loss": (total, jnp.sum(has_context_BxS))} | padding_sums(batch["sequence_ids"]), aux.carried
