"""word2vec and GloVe: one update against float64, subsampling, negatives, counts, a run and its resume."""

import jax
import numpy as np
import pytest
from support import (
    SyntheticSource,
    objective_of,
    random_batch,
    random_params,
    sums_of,
    tiny_config,
    untimed,
    whole_and_resumed,
)

from bert_jax.contrib.ancestors.objectives.glove import co_occurrences
from bert_jax.contrib.ancestors.objectives.sampling import AliasTable
from bert_jax.contrib.ancestors.objectives.word2vec import keep_probabilities
from bert_jax.contrib.ancestors.objectives.word_vectors import CONTEXTS, WORDS
from bert_jax.inference.loaded import load
from bert_jax.model import to_canonical

OPTIONS = (
    "--model.encoder none --model.num_layers 0 --model.position_embeddings none --model.type_vocab_size 0 "
    "--model.embedding_norm no --data.next_sentence none --optimizer.name adagrad --optimizer.weight_decay 0"
)


class Ids:
    """The special tokens of a tokenizer."""

    pad_id, unk_id, cls_id, sep_id, mask_id = range(5)


def prepared(name: str, *options: str):
    """The objective ``name`` with the counts of a batch, parameters away from 0, and the batch."""
    config = tiny_config(OPTIONS, f"--objective.name {name}", *options)
    objective, batch = objective_of(config), random_batch(config, rows=3)
    objective.set_counts(np.arange(config.model.vocab_size) % 17 + 1)
    params = jax.tree.map(
        lambda x: np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32) * 0.4,
        random_params(objective.model, 0),
    )
    return objective, params, batch


def pairs_of(objective, batch, key):
    """Lists of the pairs (row, center, context) and of the negatives of each row, from the windows."""
    windows = jax.device_get(jax.jit(objective.windows)(batch, key))
    pairs = []
    for row, (sequences, reach) in enumerate(zip(windows.sequence_ids_BxS, windows.reach_BxS, strict=True)):
        for i, j in np.argwhere((sequences[:, None] == sequences) & (sequences > 0)):
            if i != j and abs(i - j) <= reach[i]:
                pairs.append((row, i, j))
    return windows, pairs


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, 3])
def test_gradient_of_skip_gram_is_that_of_each_pair_in_float64(key):
    objective, params, batch = prepared("skip_gram", "--objective.subsample 0.05 --objective.window 4")
    key = None if key is None else jax.random.key(key)
    windows, pairs = pairs_of(objective, batch, key)
    flat = {name: np.asarray(x, np.float64) for name, x in to_canonical(params, 211).items()}
    v, u, weight = flat[WORDS], flat[CONTEXTS], 5 / objective.row_negatives
    of_v, of_u, loss = np.zeros_like(v), np.zeros_like(u), 0.0
    for row, i, j in pairs:
        center, context = windows.ids_BxS[row, i], windows.ids_BxS[row, j]
        terms = [(context, 1.0, -1)]
        terms += [(token, weight, 1) for token in windows.negatives_BxN[row] if token != context]
        for token, share, sign in terms:
            score = sign * (v[center] @ u[token])
            loss += share * np.log1p(np.exp(score))
            of_v[center] += share * sign * sigmoid(score) * u[token]
            of_u[token] += share * sign * sigmoid(score) * v[center]
    compute = jax.jit(
        jax.value_and_grad(lambda p: tuple(sums_of(objective, p, batch, key)["ns_loss"]), has_aux=True)
    )
    (total, count), gradients = compute(params)
    ours = to_canonical(jax.device_get(gradients), 211)
    assert len(pairs) == count > 50
    assert abs(float(total) - loss) < 1e-6 * loss
    for name, theirs in ((WORDS, of_v), (CONTEXTS, of_u)):
        assert np.abs(np.asarray(ours[name]) - theirs).max() < 1e-6 * np.abs(theirs).max()


@pytest.mark.slow
def test_gradient_of_cbow_is_that_of_word2vec_in_float64():
    objective, params, batch = prepared("cbow", "--objective.window 3")
    windows, pairs = pairs_of(objective, batch, None)
    flat = {name: np.asarray(x, np.float64) for name, x in to_canonical(params, 211).items()}
    v, u, weight = flat[WORDS], flat[CONTEXTS], 5 / objective.row_negatives
    of_v, of_u, loss = np.zeros_like(v), np.zeros_like(u), 0.0
    centers = sorted({(row, i) for row, i, _ in pairs})
    for row, i in centers:
        around = [windows.ids_BxS[row, j] for r, k, j in pairs if (r, k) == (row, i)]
        center, mean = windows.ids_BxS[row, i], np.mean([v[token] for token in around], axis=0)
        terms = [(center, 1.0, -1)]
        terms += [(token, weight, 1) for token in windows.negatives_BxN[row] if token != center]
        whole = np.zeros_like(mean)
        for token, share, sign in terms:
            score = sign * (mean @ u[token])
            loss += share * np.log1p(np.exp(score))
            whole += share * sign * sigmoid(score) * u[token]
            of_u[token] += share * sign * sigmoid(score) * mean
        for token in around:  # each gets the whole error, as in word2vec
            of_v[token] += whole
    total, gradients = jax.jit(jax.value_and_grad(lambda p: sums_of(objective, p, batch)["ns_loss"][0]))(params)
    ours = to_canonical(jax.device_get(gradients), 211)
    assert abs(float(total) - loss) < 1e-6 * loss
    for name, theirs in ((WORDS, of_v), (CONTEXTS, of_u)):
        assert np.abs(np.asarray(ours[name]) - theirs).max() < 1e-6 * np.abs(theirs).max()


@pytest.mark.slow
def test_frequent_words_are_dropped_and_leave_no_gap():
    counts = np.array([0, 10, 90_000, 9_990])
    assert keep_probabilities(counts, 0).tolist() == [0, 1, 1, 1]
    kept = keep_probabilities(counts, 1e-3)
    assert kept[0] == 0 and kept[1] == 1
    assert kept[2] == pytest.approx((np.sqrt(0.9 / 1e-3) + 1) * 1e-3 / 0.9)
    objective, _, batch = prepared("skip_gram", "--objective.subsample 0.001")
    windows = jax.tree.map(np.asarray, objective.windows(batch, jax.random.key(1)))
    lengths = (windows.sequence_ids_BxS > 0).sum(1)
    assert 0 < lengths.sum() < (batch["sequence_ids"] > 0).sum()
    assert all((row[:length] > 0).all() for row, length in zip(windows.sequence_ids_BxS, lengths, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("power", [0.75, 0.0])
def test_negatives_are_drawn_in_proportion_to_a_power_of_the_counts(power):
    objective, _, batch = prepared("skip_gram", f"--objective.noise_power {power} --objective.negatives 2")
    counts = np.arange(211) % 17 + 1
    draw = jax.jit(jax.vmap(lambda key: objective.windows(batch, key).negatives_BxN))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 300))).ravel()
    shares = counts**power / (counts**power).sum()
    found = np.bincount(drawn, minlength=211) / len(drawn)
    assert np.abs(found - shares).max() < 5 * np.sqrt(shares.max() / len(drawn))


@pytest.mark.slow
def test_words_that_do_not_occur_are_no_negatives():
    objective, _, batch = prepared("cbow", "--objective.noise_power 0")
    counts = np.zeros(211, np.int64)
    counts[[7, 90, 200]] = 1, 5, 1000
    objective.set_counts(counts)
    drawn = np.asarray(objective.windows(batch, jax.random.key(0)).negatives_BxN)
    assert set(drawn.ravel().tolist()) == {7, 90, 200}


def test_a_batch_holds_negatives_that_are_contexts():
    # Otherwise the gradients above would not show what is left out.
    objective, _, batch = prepared("skip_gram", "--objective.window 4")
    windows, pairs = pairs_of(objective, batch, None)
    assert any(windows.ids_BxS[row, j] in windows.negatives_BxN[row] for row, _, j in pairs)
    assert any(windows.ids_BxS[row, i] in windows.negatives_BxN[row] for row, i, _ in pairs)


@pytest.mark.slow
def test_padding_and_blank_rows_draw_no_entries_of_glove():
    config = tiny_config(OPTIONS, "--objective.name glove")
    objective, batch = objective_of(config), random_batch(config, rows=4)
    ids, sequences = batch["input_ids"], batch["sequence_ids"]
    objective.set_counts(co_occurrences([(ids, sequences)], 211, 3))
    params = random_params(objective.model, 0)
    compute = jax.jit(lambda batch: sums_of(objective, params, batch)["glove_loss"])
    whole, weight = compute(batch)
    assert int(weight) == (sequences > 0).sum() < sequences.size
    blank = {name: x.copy() for name, x in batch.items()}
    blank["sequence_ids"][2:] = 0
    part, _ = compute({name: x[:2] for name, x in batch.items()})
    assert float(compute(blank)[0]) == pytest.approx(float(part))
    assert float(whole) > float(part) > 0


def test_counts_that_are_too_many_are_a_mistake(monkeypatch):
    monkeypatch.setattr("bert_jax.contrib.ancestors.objectives.glove.MOST_ENTRIES", 10)
    config = tiny_config(OPTIONS, "--objective.name glove")
    with pytest.raises(ValueError, match=r"pairs of words occur together; at most 10 are allowed; lower model"):
        objective_of(config).prepare(SyntheticSource(config), Ids())


@pytest.mark.parametrize("name", ["skip_gram", "cbow", "glove"])
def test_a_plan_is_refused_in_one_line(name):
    from bert_jax.contrib.planner.compiled import compile_step
    from bert_jax.contrib.planner.topology import parse_topology

    with pytest.raises(ValueError, match=rf"^objective.name: '{name}' cannot be planned"):
        compile_step(tiny_config(OPTIONS, f"--objective.name {name}"), parse_topology("v5e:2x2"))


def test_alias_table_is_exact():
    weights = np.array([0.0, 5.0, 1.0, 0.25, 3.0])
    table = AliasTable.of(weights)
    own = table.kept_V.astype(float).copy()
    for column, other in enumerate(table.other_V):
        own[other] += 1 - table.kept_V[column]
    assert np.allclose(own / 5, weights / weights.sum(), atol=1e-7)


def test_counts_of_glove_are_those_of_a_loop(monkeypatch):
    rng = np.random.default_rng(0)
    ids, sequences = rng.integers(0, 12, (4, 15)), np.repeat([[1] * 6 + [2] * 7 + [0] * 2], 4, axis=0)
    expected = np.zeros((12, 12))
    for row in range(4):
        for i in range(15):
            for j in range(15):
                same = sequences[row, i] == sequences[row, j] > 0 and ids[row, i] != 0 != ids[row, j]
                if i != j and abs(i - j) <= 4 and same:
                    expected[ids[row, i], ids[row, j]] += 1 / abs(i - j)
    for least in (1, 1 << 22):  # added part by part, and at the end
        monkeypatch.setattr("bert_jax.contrib.ancestors.objectives.glove._LEAST_PAIRS", least)
        counts = co_occurrences([(ids[i : i + 1], sequences[i : i + 1]) for i in range(4)], 12, 4, excluded=[0])
        assert np.allclose(counts.toarray(), expected) and expected.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("skip_gram", marks=pytest.mark.slow), "cbow", "glove"])
def test_a_run_learns_and_resumes_bit_for_bit(name, tmp_path):
    options = f"--objective.name {name} --optimizer.learning_rate 2 --optimizer.warmup_steps 0"
    lines = whole_and_resumed(tiny_config(OPTIONS, options, "--training.num_steps 24"), tmp_path, 5)
    key = "glove_loss" if name == "glove" else "ns_loss"
    losses = [line[key] for line in untimed(lines) if key in line and "split" not in line]
    assert losses[-1] < losses[0]
    loaded = load(tmp_path / "whole")
    assert loaded.config.encoder == "none" and loaded.embed(["w1 w2"], pooling="mean").shape[0] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model.encoder transformer --model.num_layers 1", "model.encoder: 'transformer' is not allowed"),
        ("--data.next_sentence nsp --model.type_vocab_size 2", "model.type_vocab_size: 2 is not allowed"),
        ("--model.position_embeddings learned", "model.position_embeddings: 'learned' is not allowed"),
        ("--objective.noise_power -1", r"objective\.noise_power: -1\.0 is not allowed; allowed: 0 or more"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        objective_of(tiny_config(OPTIONS, "--objective.name cbow", options))


def test_no_word_in_the_shards_is_a_mistake():
    config = tiny_config(OPTIONS, "--objective.name skip_gram")
    objective = objective_of(config)

    class Empty(SyntheticSource):
        def training_pass(self):
            return (batch | {"sequence_ids": 0 * batch["sequence_ids"]} for batch in super().training_pass())

    with pytest.raises(ValueError, match=r"^data\.shards: the training records contain no word"):
        objective.prepare(Empty(config), Ids())
