"""Selection and order of the training examples."""

from collections.abc import Sequence

import numpy as np

from bert_jax.hashing import GOLDEN, mix64


def _mixed(values: np.ndarray) -> np.ndarray:
    return mix64(values + np.uint64(GOLDEN))


def record_permutation(count: int, *key: int) -> np.ndarray:
    """Return a permutation int64[count] of task records that depends only on ``count`` and ``key``. Its hash is not
    that of ``bert_jax.hashing.permutation``, which orders the rows of shards: stored runs depend on both."""
    mixed = np.zeros(1, np.uint64)
    for part in key:
        mixed = _mixed(mixed ^ np.uint64(part))
    return np.argsort(_mixed(np.arange(count, dtype=np.uint64) ^ mixed), kind="stable")


def epoch_order(count: int, seed: int, epoch: int, classes: np.ndarray | None = None) -> np.ndarray:
    """Return int64[count], the indices of the examples of an epoch in training order.

    Without ``classes``, each example occurs once. With ``classes`` (int[count], the class of each example), the
    classes alternate and occur equally often: examples of small classes are repeated, and examples of large classes
    are spread over several epochs.
    """
    if classes is None:
        return record_permutation(count, seed, epoch)
    present = np.unique(classes)
    order = np.zeros(count, np.int64)
    for place, label in enumerate(present):
        members = np.flatnonzero(classes == label)
        wanted = len(order[place :: len(present)])
        first = epoch * wanted
        taken = np.arange(first, first + wanted)
        rounds = np.stack([members[record_permutation(len(members), seed, int(r), int(label))] for r in
                           range(taken[0] // len(members), taken[-1] // len(members) + 1)]).reshape(-1)  # fmt: skip
        order[place :: len(present)] = rounds[taken - taken[0] // len(members) * len(members)]
    return order


def few_shot(labels: Sequence[str], count: int, seed: int) -> list[int]:
    """Return the sorted indices of ``count`` examples per class, sampled with ``seed``.

    Raises ``ValueError`` if a class has fewer than ``count`` examples.
    """
    chosen: list[int] = []
    for number, label in enumerate(sorted(set(labels))):
        members = [i for i, other in enumerate(labels) if other == label]
        if len(members) < count:
            raise ValueError(
                f"input.few_shot: {count} is more than the {len(members)} examples of class {label!r}; set "
                f"input.few_shot to {len(members)} or less"
            )
        chosen += [members[i] for i in record_permutation(len(members), seed, number)[:count]]
    return sorted(chosen)
