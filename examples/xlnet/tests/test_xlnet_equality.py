"""Logits, memory and gradients are those of transformers, whose arrays are in reference.npz."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bert_jax_xlnet.objective import PermutationLm, permutation_mask, random_ranks, targets_of
from xlnet_references import (
    FILE,
    classes,
    differences,
    lm_of,
    lm_spec,
    params_of,
    random_features,
    tree_of,
    worst,
)

from bert_jax.config import PretrainConfig, load_config


@pytest.fixture(scope="module")
def stored():
    return np.load(FILE)


@pytest.mark.slow
def test_logits_memory_and_gradients_are_those_of_transformers(stored):
    found = differences(stored)
    assert len(found) == 5 + len(params_of(lm_spec(), stored["weights"])) == 42
    for name, difference in found.items():
        assert difference < (1e-4 if name.startswith("gradient") else 2e-5), name


@pytest.mark.slow
def test_a_classifier_reads_the_token_that_xlnet_has_at_the_end(stored):
    assert worst(classes(stored), stored["logits/classes"]) < 2e-5


def random_lm():
    """A language model with random parameters."""
    spec = lm_spec()
    flat = np.random.default_rng(0).normal(0, 0.5, 1477).astype(np.float32)
    return (model := lm_of(spec)), tree_of(model, params_of(spec, flat))


def logits_of(features):
    model, tree = random_lm()
    apply = jax.jit(lambda features: model.apply({"params": tree}, features).mlm_logits)
    return [np.asarray(apply(one)) for one in features]


def test_a_target_sees_the_targets_before_it_and_never_itself():

    batch = random_features(rows=3, length=12, targets=4)
    is_target = np.asarray(targets_of(batch))
    ranks = np.asarray(random_ranks(batch, is_target, seed=0))
    mask = np.asarray(permutation_mask(ranks, is_target))
    assert is_target.sum() == 12 and len(np.unique(ranks)) == 36
    places = batch["mlm_positions"]
    order = np.take_along_axis(ranks, places, 1).argsort(axis=1)
    features = {**batch, "perm_mask": mask, "target_positions": places}
    changed = []
    for at in range(4):  # the target at this place of the order is another token
        ids = batch["input_ids"].copy()
        rows, columns = np.arange(3), places[np.arange(3), order[:, at]]
        ids[rows, columns] = ids[rows, columns] % 23 + 5
        changed.append({**features, "input_ids": ids})
    before, *after = logits_of([features, *changed])
    for row in range(3):
        for at in range(4):
            for other in range(4):
                target = order[row, other]
                same = np.array_equal(before[row, target], after[at][row, target])
                assert same == (other <= at), (row, at, other)


def test_the_order_follows_from_the_sequence_and_its_targets():

    def ranks(seed=0, **changed):
        batch = random_features(rows=2, length=12, targets=4) | changed
        return np.asarray(random_ranks(batch, targets_of(batch), seed))

    first = ranks()
    assert np.array_equal(first, ranks())
    assert not (first == ranks(seed=1)).any()
    assert not (first == ranks(sequence_keys=np.array([[7], [8]], np.uint32))).any()
    other = random_features(rows=2, length=12, targets=4)["mlm_positions"].copy()
    other[0, 0] = next(place for place in range(1, 11) if place not in other[0])
    moved = ranks(mlm_positions=other)
    assert not (first[0] == moved[0]).any() and np.array_equal(first[1], moved[1])


@pytest.mark.slow
def test_padding_and_other_sequences_of_a_row_change_nothing():
    model, tree = random_lm()
    apply = jax.jit(lambda features: model.apply({"params": tree}, features).sequence_output)

    def states(parts, length):
        ids = np.concatenate([*parts, np.zeros(length - sum(map(len, parts)), np.int32)])[None]
        numbers = np.zeros_like(ids)
        positions, at = np.zeros_like(ids), 0
        for number, part in enumerate(parts, 1):
            numbers[0, at : at + len(part)] = number
            positions[0, at : at + len(part)] = np.arange(len(part))
            at += len(part)
        row = {"input_ids": ids, "token_type_ids": 0 * ids, "sequence_ids": numbers, "position_ids": positions}
        return np.asarray(apply(row))[0]

    first, second = np.arange(5, 11, dtype=np.int32), np.arange(12, 21, dtype=np.int32)
    packed = states([first, second], 18)
    np.testing.assert_allclose(packed[:6], states([first], 6), atol=2e-6)
    np.testing.assert_allclose(packed[6:15], states([second], 11)[:9], atol=2e-6)
    alone = states([second[:1]], 6)[0]
    assert np.abs(alone - states([second], 9)[0]).max() > 0.01


def test_options_are_checked():
    def config(*words):
        fixed = ["--model.hidden_size", "32", "--model.num_attention_heads", "4", "--data.next_sentence", "none"]
        return load_config(PretrainConfig, [*fixed, *words])

    xlnet = ["--model.encoder", "xlnet"]
    assert config(*xlnet).model.memory_length == 0
    for words, message in (
        ([*xlnet, "--model.num_attention_heads", "5"], r"num_attention_heads: 5 .*a divisor of model\.hidden_size"),
        ([*xlnet, "--model.norm_position", "pre"], r"model\.norm_position"),
        ([*xlnet, "--data.row_order", "carried"], r"objective\.name: 'masked_lm' is not allowed"),
        (["--model.memory_length", "3"], r"it exists only with model\.encoder xlnet"),
    ):
        with pytest.raises(ValueError, match=message):
            config(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", r"^model\.encoder: 'transformer' is not allowed; allowed: xlnet with objective\.name permutation_lm$"),
        (
            "--model.encoder xlnet --data.row_order carried",
            r"^model\.memory_length: 0 .* above 0 with data\.row_order",
        ),
    ],
)
def test_what_the_objective_refuses(words, message):

    config = load_config(
        PretrainConfig, [*["--objective.name", "permutation_lm", "--data.next_sentence", "none"], *words.split()]
    )
    with pytest.raises(ValueError, match=message):
        PermutationLm.make_model(config, None)


@pytest.mark.slow
def test_the_memory_forgets_a_text_that_ends():
    model, tree = random_lm()
    row = random_features(rows=2, length=6, targets=2) | {"cache_start": jnp.zeros((), jnp.int32)}
    empty = {"encoder": {"memory": jnp.zeros((2, 2, 7, 8)), "held": jnp.zeros((2, 7), bool)}}
    step = jax.jit(lambda cache, row: model.apply({"params": tree, "cache": cache}, row, mutable=["cache"]))
    first, cache = step(empty, row)
    held = np.asarray(cache["cache"]["encoder"]["held"])
    assert held.sum(axis=1).tolist() == [6, 6] and not held[:, 0].any()
    second, cache = step(cache["cache"], row)
    assert np.abs(second.sequence_output - first.sequence_output).max() > 1e-4
    assert np.asarray(cache["cache"]["encoder"]["held"]).all()
    ended = {**row, "sequence_ids": np.array([[1] * 6, [1] * 5 + [0]], np.int32)}
    _, cache = step(cache["cache"], ended)
    assert np.asarray(cache["cache"]["encoder"]["held"]).all(axis=1).tolist() == [True, False]
    third, _ = step(cache["cache"], row)
    np.testing.assert_array_equal(third.sequence_output[1], first.sequence_output[1])
