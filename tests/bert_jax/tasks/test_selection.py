"""The order of examples: each once an epoch, other orders for other keys, every class equally often if asked."""

from collections import Counter

import numpy as np
import pytest

from bert_jax.tasks.sampling import epoch_order, few_shot, record_permutation


def test_recorded_permutation():
    """The order of a running job must not change with a version."""
    assert record_permutation(8, 3, 1).tolist() == [5, 1, 4, 6, 0, 3, 2, 7]


def test_an_epoch_has_every_example_once():
    orders = [epoch_order(1000, 7, epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(1000)) for order in orders)
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], epoch_order(1000, 8, 0))
    # No trace of the order before: ranks are as good as uncorrelated.
    assert abs(np.corrcoef(orders[0], np.arange(1000))[0, 1]) < 0.1


def test_classes_come_equally_often_and_their_examples_in_turn():
    classes = np.array([0] * 90 + [1] * 9 + [2])
    orders = [epoch_order(100, 0, epoch, classes) for epoch in range(9)]
    for order in orders:
        assert Counter(classes[order].tolist()) == Counter({0: 34, 1: 33, 2: 33})
    seen = Counter(np.concatenate(orders).tolist())
    # 306 draws of 90 and 297 draws of 9 examples: as even as can be.
    assert {seen[i] for i in range(90)} <= {3, 4} and {seen[i] for i in range(90, 99)} == {33}


def test_few_shot_takes_so_many_of_each_class():
    labels = ["b", "a", "b", "c", "a", "c", "a", "b", "c"]
    chosen = few_shot(labels, 2, seed=0)
    assert chosen == sorted(chosen) and Counter(labels[i] for i in chosen) == {"a": 2, "b": 2, "c": 2}
    assert any(few_shot(labels, 2, seed) != chosen for seed in range(1, 9))
    with pytest.raises(ValueError, match=r"input\.few_shot: 4 .* 3 examples of class 'a'"):
        few_shot(labels, 4, seed=0)
