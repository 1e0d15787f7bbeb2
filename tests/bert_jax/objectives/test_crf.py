"""The conditional random field against enumeration of all tag sequences, in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.objectives.crf import crf_decode, crf_denominator, crf_loss

# Scored tokens of each sequence of each row; 0: a sequence of which nothing is scored.
CHAINS = ((3, 1, 4), (), (5,), (2, 0, 2), (0,))
WIDTH = 18


def parameters(labels, seed=0, scale=1.0):
    """(transitions, start, end), float32."""
    rng = np.random.default_rng(seed)
    return tuple((scale * rng.normal(size=s)).astype(np.float32) for s in ((labels, labels), labels, labels))


def batch(labels, seed=1, chains=CHAINS, width=WIDTH):
    """(emissions, labels, sequence ids, is_scored); what is not scored is nan, and label -100."""
    rng = np.random.default_rng(seed)
    emissions = np.full((len(chains), width, labels), np.nan, np.float32)
    tags = np.full((len(chains), width), -100)
    sequence_ids = np.zeros((len(chains), width), np.int32)
    for row, lengths in enumerate(chains):
        used = 0
        for k, scored in enumerate(lengths):
            size = scored + 2
            sequence_ids[row, used : used + size] = k + 1
            # Before, between or after the scored tokens stand two others.
            places = used + np.sort(rng.permutation(size)[:scored])
            emissions[row, places] = rng.normal(size=(scored, labels))
            tags[row, places] = rng.integers(0, labels, scored)
            used += size
    return emissions, tags, sequence_ids, tags >= 0


def chains_of(features):
    """(row, positions) of every chain."""
    _, _, sequence_ids, is_scored = features
    for row in range(len(sequence_ids)):
        for k in range(1, sequence_ids[row].max() + 1):
            places = np.flatnonzero((sequence_ids[row] == k) & is_scored[row])
            if len(places):
                yield row, places


def score(path, emissions, transitions, start, end):
    moves = sum(transitions[a, b] for a, b in itertools.pairwise(path))
    return start[path[0]] + moves + sum(e[tag] for e, tag in zip(emissions, path, strict=True)) + end[path[-1]]


def enumerated(features, tables):
    """Loss, its gradients (emissions, transitions, start, end) and best tags over all sequences of tags."""
    emissions, tags, _, _ = features
    tables = [table.astype(np.float64) for table in tables]
    loss, best = 0.0, np.zeros(tags.shape, int)
    gradients = [np.zeros(x.shape) for x in (emissions, *tables)]
    for row, places in chains_of(features):
        own = emissions[row, places].astype(np.float64)
        paths = list(itertools.product(range(emissions.shape[-1]), repeat=len(places)))
        scores = np.array([score(path, own, *tables) for path in paths])
        partition = np.log(np.exp(scores).sum())
        gold = tuple(tags[row, places])
        loss += partition - score(gold, own, *tables)
        best[row, places] = paths[scores.argmax()]
        for path, share in [*zip(paths, np.exp(scores - partition), strict=True), (gold, -1.0)]:
            np.add.at(gradients[0], (row, places, path), share)
            np.add.at(gradients[1], (path[:-1], path[1:]), share)
            gradients[2][path[0]] += share
            gradients[3][path[-1]] += share
    return loss, gradients, best


def value_and_gradients(features, tables):
    """Loss, its weight, and gradients of emissions and tables."""

    def loss(emissions, tables):
        return crf_loss(emissions, *features[1:], *tables)["loss"]

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, weight), (emissions, tables) = gradients(features[0], tuple(map(jnp.asarray, tables)))
    return float(value), float(weight), [np.asarray(x) for x in (emissions, *tables)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("labels", [1, 2, 4])
def test_loss_and_gradients_equal_enumeration(labels):
    features, tables = batch(labels), parameters(labels)
    value, weight, gradients = value_and_gradients(features, tables)
    expected, expected_gradients, _ = enumerated(features, tables)
    assert abs(value - expected) <= 1e-6 * max(expected, 1)
    for given, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(given, wanted, rtol=0, atol=2e-6)
    assert not np.any(gradients[0][~features[3]])
    assert weight == 6 == float(crf_denominator(*features[2:]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("labels", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_decoded_tags_are_the_best(labels, seed):
    features, tables = batch(labels, seed), parameters(labels, seed, scale=2.0)
    decoded = jax.jit(crf_decode)(features[0], *features[2:], *tables)
    np.testing.assert_array_equal(decoded, enumerated(features, tables)[2])
    assert decoded.dtype == jnp.int32


@pytest.mark.slow
def test_packed_equals_unpacked():
    features, tables = batch(4), parameters(4)
    found = list(chains_of(features))
    apart = [np.zeros((len(found), *x.shape[1:]), x.dtype) for x in features]
    for i, (row, places) in enumerate(found):
        for single, packed in zip(apart, features, strict=True):
            single[i, 3 : 3 + len(places)] = packed[row, places]
        apart[2][i, 3 : 3 + len(places)] = 1
    packed, single = (value_and_gradients(x, tables) for x in (features, apart))
    np.testing.assert_allclose(packed[:2], single[:2], rtol=1e-6)
    for given, wanted in zip(packed[2][1:], single[2][1:], strict=True):
        np.testing.assert_allclose(given, wanted, rtol=0, atol=2e-6)
    decoded, decoded_apart = (np.asarray(jax.jit(crf_decode)(x[0], *x[2:], *tables)) for x in (features, apart))
    for i, (row, places) in enumerate(found):
        np.testing.assert_array_equal(decoded[row, places], decoded_apart[i, 3 : 3 + len(places)])


@pytest.mark.slow
def test_a_batch_without_scored_tokens_is_nothing():
    features, tables = batch(3, chains=((), (0,), (0, 0))), parameters(3)
    value, weight, gradients = value_and_gradients(features, tables)
    assert (value, weight, float(crf_denominator(*features[2:]))) == (0, 0, 1)
    assert not any(np.any(x) for x in gradients)
    assert not np.any(jax.jit(crf_decode)(features[0], *features[2:], *tables))


@pytest.mark.slow
def test_a_small_loss_of_a_long_row_is_exact():
    """Labels above the others: partition and score grow to 4,000 and differ by little."""
    features, tables = batch(5, chains=((500,),), width=512), parameters(5)
    emissions, tags, _, is_scored = features
    emissions[0, is_scored[0], tags[0, is_scored[0]]] += 8
    alpha = None
    transitions, start, end = (table.astype(np.float64) for table in tables)
    for e in emissions[0, is_scored[0]].astype(np.float64):
        alpha = e + (start if alpha is None else np.logaddexp.reduce(alpha[:, None] + transitions, axis=0))
    gold = score(tags[0, is_scored[0]], emissions[0, is_scored[0]].astype(np.float64), transitions, start, end)
    expected = np.logaddexp.reduce(alpha + end) - gold
    value, _, _ = value_and_gradients(features, tables)
    assert gold > 3_500
    assert expected < 15
    assert abs(value - expected) <= 1e-5
