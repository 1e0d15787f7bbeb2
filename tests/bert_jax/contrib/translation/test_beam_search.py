"""Beam search against all translations, and against greedy search."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.contrib.translation.search import Search, search

END = 0


def tables(texts, vocabulary, seed=0):
    """Logits of the next token by text, place and last token."""
    return np.random.default_rng(seed).normal(size=(texts, 8, vocabulary, vocabulary)).astype(np.float32) * 2


def found(table, beams, most, length_penalty=0.0, limits=None):
    texts = len(table)
    logits = jnp.asarray(table)

    def step(cache, ids, place):
        text = jnp.repeat(jnp.arange(texts), beams)
        # The cache holds all tokens of a hypothesis: a wrong order of its rows changes the logits.
        history = cache["history"].at[:, place].set(ids)
        bonus = (history * jnp.arange(1, most + 1)).sum(axis=1)[:, None] * 1e-3 * jnp.arange(table.shape[-1])
        return logits[text, place, ids] + bonus, {"history": history}

    limits = jnp.full(texts, most) if limits is None else jnp.asarray(limits)
    wanted = Search(jnp.ones(texts, int), jnp.full(texts, END), limits, jnp.full(texts, length_penalty))
    cache = {"history": jnp.zeros((texts * beams, most), int)}
    return jax.jit(lambda cache: search(step, cache, beams, most, wanted))(cache)


def log_p(table, text, ids):
    """Sum of the log-probabilities of ``ids`` by the model of :func:`found`."""
    total, history = 0.0, [1]
    for place, token in enumerate(ids):
        weights = np.array([i + 1 for i in range(len(history))])
        bonus = (np.array(history) * weights).sum() * 1e-3 * np.arange(table.shape[-1])
        logits = (table[text, place, history[-1]] + bonus).astype(np.float64)
        total += logits[token] - np.log(np.exp(logits).sum())
        history.append(token)
    return total


def every(vocabulary, most):
    """All translations of at most ``most`` tokens: those with an end token at the end, and the longest ones."""
    words = range(1, vocabulary)
    for length in range(1, most + 1):
        for ids in itertools.product(words, repeat=length - 1):
            yield (*ids, END)
    yield from itertools.product(words, repeat=most)


@pytest.mark.parametrize("penalty", [0.0])
def test_a_full_width_beam_finds_the_best_of_all(penalty):
    table, most = tables(3, 5), 4
    result = found(table, 4**most, most, penalty)
    for text in range(3):
        scores = {ids: log_p(table, text, ids) for ids in every(5, most)}
        best = sorted(scores, key=scores.get, reverse=True)[:6]
        for rank, ids in enumerate(best):
            own = [int(i) for i in result.ids[text, rank] if i >= 0]
            assert own == [i for i in ids if i != END]
            assert abs(float(result.scores[text, rank]) - scores[ids]) < 1e-4


def greedy(table, text, most):
    ids = []
    while len(ids) < most and (not ids or ids[-1] != END):
        ids.append(max(range(table.shape[-1]), key=lambda token: log_p(table, text, [*ids, token])))
    return [i for i in ids if i != END]


def test_one_beam_is_greedy_search_and_texts_end_at_their_limits():
    table, limits = tables(6, 7, seed=3), [6, 6, 6, 2, 1, 0]
    result = found(table, 1, 6, 1.0, limits)
    for text, limit in enumerate(limits):
        assert [int(i) for i in result.ids[text, 0] if i >= 0] == greedy(table, text, limit)


def test_the_penalty_divides_by_a_power_of_the_length_with_the_end():
    table = tables(4, 6, seed=5)
    plain, divided = (found(table, 3, 6, penalty) for penalty in (0.0, 2.0))
    for text in range(4):
        for result, penalty in ((plain, 0.0), (divided, 2.0)):
            ids = [int(i) for i in result.ids[text, 0] if i >= 0]
            ids += [END] if len(ids) < 6 else []
            expected = log_p(table, text, ids) / len(ids) ** penalty
            assert abs(float(result.scores[text, 0]) - expected) < 1e-4
    assert not np.array_equal(plain.ids, divided.ids)
